"""Keys for connections from other hosts: CurveZMQ (https://rfc.zeromq.org/spec/26/), and their files.

    DIR/server.toml          both keys of a daemon; secret
    DIR/clients/NAME.toml    the public key of a client that may connect; removing it locks the client out
    NAME.toml                for the client: both its keys, and the daemon's public one; secret

A client's name is its tenant. Addresses of daemons on other hosts are `tcp://HOST:PORT?key=FILE`; without `key`, the
file is that of $TIERCACHE_KEY.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq
from zmq.utils import z85

from tiercache.config.setting_kinds import TENANT_NAME, split_http
from tiercache.errors import ConfigError
from tiercache.ground.file_systems import make_directory

KEY_VARIABLE = "TIERCACHE_KEY"
SERVER_FILE = "server.toml"
CLIENTS_DIR = "clients"
MAX_CLIENTS = 4096
_KEY_CHARS = 40
_SCHEME = "tcp://"


class ServerKeys(NamedTuple):
    """A daemon's keys, as ZeroMQ takes them (Z85, 40 characters each)."""

    public: bytes
    secret: bytes

    def secure(self, socket: zmq.Socket[bytes], domain: str) -> None:
        """Before a socket is bound, restrict it to CURVE and to the clients that the ZAP domain allows."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, domain)


class ClientKeys(NamedTuple):
    """A client's keys, and the public key of its daemon; no other can answer in the daemon's place."""

    public: bytes
    secret: bytes
    server: bytes

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """To be called before the socket is connected."""
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server)


class Remote(NamedTuple):
    """A daemon on another host; `ipv6` if sockets need the option IPV6 to connect to it."""

    endpoint: str
    keys: ClientKeys
    ipv6: bool = False

    def prepare(self, socket: zmq.Socket[bytes]) -> None:
        """To be called before the socket is connected."""
        socket.setsockopt(zmq.IPV6, int(self.ipv6))
        self.keys.secure(socket)


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The contents of a key file."""

    public_key: str
    secret_key: str = ""
    server_key: str = ""


# --- addresses -----------------------------------------------------------------------------------


def is_remote(address: str | os.PathLike[str]) -> bool:
    """True if an address is that of a daemon on another host."""
    return str(address).startswith(_SCHEME)


def find_remote(address: str | os.PathLike[str]) -> Remote | None:
    """The endpoint and the keys behind an address, or None for a run directory. Raises ConfigError."""
    text = str(address)
    if not is_remote(text):
        if "://" in text:
            raise ConfigError(f"address {text}: write a run directory, or tcp://HOST:PORT?key=FILE")
        return None
    endpoint, _, query = text.partition("?")
    name, _, path = query.partition("=")
    if query and (name != "key" or not path):
        raise ConfigError(f"address {text}: after the ? there is only key=FILE")
    try:
        _, port = split_http(endpoint.removeprefix(_SCHEME))
    except ValueError:
        port = 0
    if port == 0:
        raise ConfigError(f"address {text}: write tcp://HOST:PORT?key=FILE, an IPv6 address as [::1]")
    path = path or os.environ.get(KEY_VARIABLE, "")
    if not path:
        text = f"address {endpoint}: daemons on other hosts are only talked to with keys: write {endpoint}?key=FILE"
        raise ConfigError(f"{text}, or set ${KEY_VARIABLE} (the daemon's operator makes one with `tiercache keygen`)")
    return Remote(endpoint, load_client(Path(path)))


def public_part(address: str | os.PathLike[str]) -> str:
    """An address as it may be logged: without the path of the key."""
    return str(address).partition("?")[0] if is_remote(address) else str(address)


# --- files ---------------------------------------------------------------------------------------


def load_client(path: Path) -> ClientKeys:
    """Read a client's key file. Raises ConfigError: it is missing, readable by others, or not a key file."""
    keys = _read(path, secret=True)
    if not keys.server_key:
        text = "it has no server_key, so it is not a client's file: take the one that `tiercache keygen DIR NAME` wrote"
        raise ConfigError(f"key file {path}: {text}")
    return ClientKeys(keys.public_key.encode(), keys.secret_key.encode(), keys.server_key.encode())


def load_server(directory: Path) -> ServerKeys:
    """Read a daemon's keys. Raises ConfigError as `load_client` does, and where others could let clients in."""
    for folder in (directory, directory / CLIENTS_DIR):
        if folder.is_dir() and folder.stat().st_mode & 0o002 and not os.statvfs(folder).f_flag & os.ST_RDONLY:
            sticky = folder.stat().st_mode & stat.S_ISVTX  # such as /tmp
            remedy = f"name a folder in it, as {folder}/keys" if sticky else f"chmod o-w {folder}"
            raise ConfigError(f"{folder} can be written by all users, who could let clients in: {remedy}")
    keys = _read(directory / SERVER_FILE, secret=True)
    return ServerKeys(keys.public_key.encode(), keys.secret_key.encode())


def load_allowed(directory: Path) -> tuple[dict[bytes, str], list[str]]:
    """The clients that may connect: name by public key (Z85); and what is wrong with other files there."""
    allowed: dict[bytes, str] = {}
    problems = []
    paths = sorted(directory.joinpath(CLIENTS_DIR).glob("*.toml"))
    if len(paths) > MAX_CLIENTS:
        problems.append(f"{directory / CLIENTS_DIR} has {len(paths)} files: the first {MAX_CLIENTS} are read")
    for path in paths[:MAX_CLIENTS]:
        try:
            check_name(path.stem)
            allowed[_read(path, secret=False).public_key.encode()] = path.stem
        except ConfigError as error:
            problems.append(str(error))
    return allowed, problems


def make_server(directory: Path) -> Path:
    """Write a daemon's keys; returns the file. Raises ConfigError if there are some already."""
    for folder in (directory, directory / CLIENTS_DIR):
        try:
            make_directory(folder, 0o700)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be made ({error.strerror}): name another directory") from None
    public, secret = zmq.curve_keypair()
    path = directory / SERVER_FILE
    _write(path, _File(public_key=public.decode(), secret_key=secret.decode()))
    return path


def make_client(directory: Path, name: str, out: Path) -> Path:
    """Write a client's keys to `out`, and allow it at the daemon of `directory`; returns the public file."""
    check_name(name)
    server = load_server(directory)
    public, secret = zmq.curve_keypair()
    allowed = directory / CLIENTS_DIR / f"{name}.toml"
    if allowed.exists():
        raise ConfigError(f"client {name} is there already: remove {allowed} first, which locks the old key out")
    keys = _File(public_key=public.decode(), secret_key=secret.decode(), server_key=server.public.decode())
    _write(out, keys)
    _write(allowed, _File(public_key=public.decode()))
    return allowed


def check_name(name: str) -> None:
    """Raise ConfigError for an invalid client name."""
    if not TENANT_NAME.fullmatch(name):
        raise ConfigError(f"client {name!r}: a name has 1 to 64 letters, digits, and . _ - (not the first)")


def _read(path: Path, *, secret: bool) -> _File:
    try:
        mode = path.stat().st_mode
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"key file {path} cannot be read ({error.strerror}): see `tiercache keygen`") from error
    if secret and mode & 0o077:
        raise ConfigError(f"key file {path} can be read by others (mode {mode & 0o777:04o}): chmod 0600 {path}")
    try:
        keys = msgspec.convert(_parse_toml(text), _File)
    except (ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"key file {path} is not a key file ({error}): make one with `tiercache keygen`") from error
    wanted = {"public_key": keys.public_key, **({"secret_key": keys.secret_key} if secret else {})}
    if keys.server_key:
        wanted["server_key"] = keys.server_key
    for name, key in wanted.items():
        if not _is_key(key):
            raise ConfigError(f"key file {path}: {name} is not a key of {_KEY_CHARS} characters (Z85)")
    return keys


def _is_key(text: str) -> bool:
    try:
        return len(text) == _KEY_CHARS and len(z85.decode(text.encode("ascii"))) == 32
    except (KeyError, ValueError):
        return False


def _parse_toml(text: bytes) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return dict(tomllib.loads(text.decode()))


def _write(path: Path, keys: _File) -> None:
    """Write a new file that only its owner can read, whole or not at all."""
    lines = [f"{name} = '{key}'\n" for name, key in msgspec.to_builtins(keys).items()]  # Z85 has no '
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} exists: keys are never overwritten; remove it, or name another file") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    with os.fdopen(fd, "w") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
