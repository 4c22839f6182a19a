"""The URL of a Valkey store, and what its user may get wrong in it.

    valkey://[[user]:password@]host[:port][/database][?connections=N]
    valkeys://…[?ca=FILE&cert=FILE&key=FILE]             with TLS
    valkey+cluster://[…@]host[:port][,host[:port]…]      a cluster; valkeys+cluster:// with TLS
    unix://[[user]:password@]/path/to/socket[?db=N]

`redis` does for `valkey`, and `rediss` for `valkeys`. User and password are percent-decoded. An error never shows
what may be a part of the password: in a URL with a stray `@`, `/` or `:` that is nearly everything.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from tiercache.errors import ConfigError

from .tls import Tls

DEFAULT_PORT = 6379
DEFAULT_CONNECTIONS = 4
MOST_CONNECTIONS = 64
MOST_PLACES = 64
"""A list of a cluster's nodes may be this long: any of them tells the others."""
MOST_DATABASES = 1 << 20
UNIX_PATH_BYTES = 107
"""The longest path of a Unix socket on Linux."""

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252})")
_PARAMETERS = ("connections", "ca", "cert", "key", "db")


class Place(NamedTuple):
    """Where a server listens: a host and a port, or a Unix socket's path."""

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ValkeySettings:
    """What a URL says. Its representation shows no secret."""

    address: str
    """The URL without user, password and parameters."""
    places: tuple[Place, ...]
    cluster: bool
    tls: Tls | None
    connections: int
    database: int
    user: bytes = field(default=b"", repr=False)
    password: bytes = field(default=b"", repr=False)
    """Empty: the store wants none."""


def is_host(text: str) -> bool:
    """True if this can be a host: a name, or an address."""
    if ":" not in text:
        return bool(_HOST.fullmatch(text))
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def read_url(url: str) -> ValkeySettings:
    """Raises ConfigError."""
    scheme, separator, rest = url.partition("://")
    kind, plus, cluster = scheme.lower().partition("+")
    kind = {"redis": "valkey", "rediss": "valkeys"}.get(kind, kind)
    if not separator or kind not in ("valkey", "valkeys", "unix") or (plus and cluster != "cluster"):
        raise _wrong("it begins with none of valkey://, valkeys://, unix://, valkey+cluster:// and valkeys+cluster://")
    if kind == "unix" and plus:
        raise _wrong("a cluster has no Unix socket: write valkey+cluster://HOST:PORT")
    _check_characters(rest)
    rest, _, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    if "@" in path or "@" in query:
        text = "there is an @ behind the host: in user and password write / as %2F, ? as %3F and @ as %40"
        raise _wrong(text if kind != "unix" else f"{text}, and in the path @ as %40")
    login, at, hosts = authority.rpartition("@")
    user, password = _credentials(login) if at else (b"", b"")
    parameters = _parameters(query)
    tls = _tls(kind, parameters)
    connections = _number(parameters, "connections", DEFAULT_CONNECTIONS, 1, MOST_CONNECTIONS)
    if kind == "unix":
        if hosts or not slash or not path:
            raise _wrong("a Unix socket has an absolute path and no host: write unix:///path/to/socket")
        places: tuple[Place, ...] = (_unix_place("/" + path),)
        database = _number(parameters, "db", 0, 0, MOST_DATABASES)
        address = f"unix://{places[0]}" + (f"?db={database}" if database else "")
    else:
        if "db" in parameters:
            raise _wrong("db= is for Unix sockets: write the database's number behind the host, as in valkey://HOST/1")
        places = _places(hosts, cluster=bool(plus))
        database = _database(path, cluster=bool(plus))
        address = f"{kind}{'+cluster' if plus else ''}://{','.join(map(str, places))}"
        address += f"/{database}" if database else ""
    return ValkeySettings(address, places, bool(plus), tls, connections, database, user, password)


def _wrong(text: str) -> ConfigError:
    return ConfigError(f"the URL of the Valkey store: {text}")


def _check_characters(rest: str) -> None:
    if "#" in rest:
        raise _wrong("it has a #, which would cut it: write %23 in user and password")
    if not rest.isascii() or not rest.isprintable() or " " in rest:
        raise _wrong("it has a character that is not plain ASCII: write it percent-encoded (a space as %20)")
    if re.search(r"%(?![0-9A-Fa-f]{2})", rest):
        raise _wrong("it has a % without two hexadecimal digits behind it: write %25 for a percent sign")
    if "%00" in rest:
        raise _wrong("it has a %00, which no name, password or path can hold")


def _credentials(login: str) -> tuple[bytes, bytes]:
    user, colon, password = login.partition(":")
    if not colon:
        raise _wrong("it has a user and no password: write user:password@ or, without a user, :password@")
    if not password:
        raise _wrong("its password is empty: write user:password@, or leave the part up to the @ out")
    return unquote_to_bytes(user), unquote_to_bytes(password)


def _parameters(query: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in query.split("&") if query else ():
        name, equals, value = part.partition("=")
        if name not in _PARAMETERS:
            shown = f" {name!r}" if re.fullmatch(r"[a-z_]{1,32}", name) and equals else ""
            raise _wrong(f"there is no parameter{shown}: it may have {', '.join(_PARAMETERS)}")
        if name in found:
            raise _wrong(f"it has the parameter {name} twice: leave one out")
        if not value:
            raise _wrong(f"its parameter {name} has no value: write {name}=VALUE")
        found[name] = unquote_to_bytes(value).decode(errors="surrogateescape")
    return found


def _tls(kind: str, parameters: dict[str, str]) -> Tls | None:
    ca, cert, key = (parameters.get(name, "") for name in ("ca", "cert", "key"))
    if kind != "valkeys":
        if ca or cert or key:
            raise _wrong("ca=, cert= and key= are for TLS: write valkeys://")
        return None
    if key and not cert:
        raise _wrong("it has a key= without its certificate: add cert=FILE")
    return Tls(ca, cert, key)


def _number(parameters: dict[str, str], name: str, default: int, least: int, most: int) -> int:
    text = parameters.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"[0-9]{1,8}", text) or not least <= int(text) <= most:
        raise _wrong(f"{name} = {text[:20]!r}: write a number from {least} to {most}")
    return int(text)


def _unix_place(quoted: str) -> Place:
    path = unquote_to_bytes(quoted)
    if len(path) > UNIX_PATH_BYTES:
        raise _wrong(f"the path of a Unix socket has at most {UNIX_PATH_BYTES} bytes: choose a shorter one")
    text = path.decode(errors="surrogateescape")
    if not text.isprintable():
        raise _wrong("the path of its Unix socket has a character that cannot be shown: choose another path")
    return Place("", 0, text)


def _database(path: str, *, cluster: bool) -> int:
    if not path:
        return 0
    if not re.fullmatch(r"[0-9]{1,8}", path) or int(path) > MOST_DATABASES:
        raise _wrong("what follows the host is the database's number, as in valkey://HOST/1")
    if cluster and int(path):
        raise _wrong("a cluster has only the database 0: leave the number out")
    return int(path)


def _places(hosts: str, *, cluster: bool) -> tuple[Place, ...]:
    parts = hosts.split(",")
    if len(parts) > 1 and not cluster:
        raise _wrong("it names several hosts: write valkey+cluster:// for a cluster, or one host")
    if len(parts) > MOST_PLACES:
        raise _wrong(f"it names more than {MOST_PLACES} hosts: a few are enough, they tell the others")
    return tuple(_place(part) for part in parts)


def _place(text: str) -> Place:
    bracketed = re.fullmatch(r"\[([^\[\]]*)\](?::(.*))?", text)
    host, port = bracketed.groups() if bracketed else _split_port(text)
    if bracketed:
        if ":" not in host or not is_host(host):
            raise _wrong("what is in brackets is not an IPv6 address: write [::1]:6379")
    elif not host:
        raise _wrong("it names no host: write valkey://HOST:PORT")
    elif not is_host(host):
        raise _wrong("its host is not a name or an address: write valkey://HOST:PORT, an IPv6 address in brackets")
    if port is None:
        return Place(host, DEFAULT_PORT)
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise _wrong("its port is not a number from 1 to 65535 (a : or / in a password is written %3A or %2F)")
    return Place(host, int(port))


def _split_port(text: str) -> tuple[str, str | None]:
    host, colon, port = text.partition(":")
    return host, port if colon else None
