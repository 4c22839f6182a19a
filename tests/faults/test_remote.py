"""Clients on other hosts, other users and groups of this one: encrypted or not at all, each in its own tenant."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import msgpack
import numpy as np
import pytest
import zmq
from chains import chain_of
from fault_engine import Engine, spec_of
from fault_processes import Daemon
from raw_client import DROPPED, FRAME, VISIBLE, Requests, hello, new_spec

from tiercache.client.client import Client
from tiercache.daemon.requests.service import FOR_TENANTS
from tiercache.errors import ConfigError, DaemonUnavailable
from tiercache.protocol import messages as m
from tiercache.protocol.curve import load_client, make_client, make_server


def free_port() -> int:
    """A port of the loopback on which no process listens, and that stays free until a daemon takes it.

    The kernel gives none of those below its own range to a test beside this one that asks for any port.
    """
    first_of_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(10_000, max(first_of_kernel, 11_000)), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("a hundred ports are taken")


class Site:
    """A daemon that listens on TCP, and the keys of two tenants."""

    def __init__(self, folder: Path, port: int, host: str = "127.0.0.1") -> None:
        self.host = host
        self.keys = folder / "keys"
        self.port = port
        make_server(self.keys)
        for name in ("team-a", "team-b"):
            make_client(self.keys, name, folder / f"{name}.toml")
        self.flags = ("--arena", "16MiB", "--region", "4MiB", "--listen", f"tcp://{host}:{port}")
        self.flags += ("--curve-keys", str(self.keys))
        self._folder = folder

    def file(self, name: str) -> Path:
        """The key file of a tenant."""
        return self._folder / f"{name}.toml"

    def address(self, name: str) -> str:
        """How a tenant's client reaches the daemon."""
        return f"tcp://{self.host}:{self.port}?key={self.file(name)}"


class Tenant(Requests):
    """One session of a tenant over TCP. It sends and gets payloads, whatever it says of a mapping."""

    def __init__(self, site: Site, name: str, *, map_arena: bool = False) -> None:
        super().__init__()
        load_client(site.file(name)).secure(self._dealer)
        self._dealer.connect(f"tcp://127.0.0.1:{site.port}")
        self.welcome, _ = self.exchange(msgpack.packb(hello(os.urandom(16), name, map_arena)))
        assert self.welcome[0] == "welcome", self.welcome
        self.generation, self.token = self.welcome[2], self.welcome[3]

    def __enter__(self) -> Tenant:
        return self

    def store(self, namespace: int, key: bytes, data: bytes) -> list[int]:
        """Store one block; the states of its commit."""
        lease, *_ = self.reserve(namespace, key)
        assert self.ask("write", lease, 0, 0, payload=[data]) == ["done"]
        return self.commit(lease, [0])

    def load(self, namespace: int, key: bytes, length: int) -> bytes:
        """The first bytes of one block, or nothing."""
        _, lease, _ = self.match([namespace], key)
        if not lease:
            return b""
        tag, _, data = self.ask("read", lease, namespace, 0, 0, length)
        assert (tag, self.release(lease)) == ("payload", True)
        return bytes(data)


pytestmark = pytest.mark.stress


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, free_port())


@pytest.fixture
def remote(site: Site, start_daemon: Callable[..., Daemon]) -> Daemon:
    return start_daemon(*site.flags)


@pytest.mark.parametrize(("host", "name"), [("127.0.0.1", "localhost"), ("[::1]", "[::1]")])
def test_bytes_come_back_to_their_tenant_and_to_no_other(
    tmp_path: Path, start_daemon: Callable[..., Daemon], engine_of: Callable[..., Engine], host: str, name: str
) -> None:
    site = Site(tmp_path, free_port(), host)
    remote = start_daemon(*site.flags)
    site.host = name
    spec, keys = spec_of(5000), chain_of("a prompt", 4)
    first = engine_of(site.address("team-a"), spec)
    assert first.store(keys).stored == first.load(keys) == 4
    for address in (site.address("team-b"), remote.run_dir):  # another tenant, and a client without one
        assert engine_of(address, spec).load(keys) == 0


def test_wrong_keys_get_no_answer(site: Site, remote: Daemon, tmp_path: Path) -> None:
    make_server(tmp_path / "else")
    make_client(tmp_path / "else", "team-c", tmp_path / "team-c.toml")
    with pytest.raises(DaemonUnavailable, match="it has other keys, or it does not let ours in"):
        # The key of another daemon, unknown to this one.
        Client.connect(site.address("team-c"), timeout_s=1.0, request_timeout_s=0.5)  # rule: none comes
    right = load_client(tmp_path / "team-a.toml")
    stranger, secret = zmq.curve_keypair()
    keys = {"public_key": stranger, "secret_key": secret, "server_key": right.server}
    unknown = tmp_path / "unknown.toml"
    unknown.write_text("".join(f"{name} = '{key.decode()}'\n" for name, key in keys.items()))
    unknown.chmod(0o600)
    with pytest.raises(DaemonUnavailable, match="does not let ours in"):
        Client.connect(site.address("unknown"), timeout_s=1.0, request_timeout_s=0.5)  # rule: none comes
    with Client.connect(remote.run_dir, map_arena=False) as local:
        assert local.stats()["counters"]["handshakes_refused"] >= 1
    Client.connect(site.address("team-a")).close()


def knock(port: int, data: bytes) -> None:
    """Send bytes to the TCP port and wait until it hangs up or says nothing for a moment."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.settimeout(0.2)
        try:
            sock.sendall(data)
            while sock.recv(65536):
                continue
        except (TimeoutError, ConnectionError):
            return


def test_garbage_and_truncated_handshakes(site: Site, remote: Daemon) -> None:
    before = remote.stats()["counters"]
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    null = greeting.replace(b"CURVE" + bytes(3), b"NULL" + bytes(4))
    noise = np.random.default_rng(5).bytes(5000)
    heads = [greeting[:length] for length in (1, 10, 12, 40, 64)]
    for data in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", noise, b"", *heads, greeting + noise[:300], null + noise[:300]):
        knock(site.port, data)
    after = remote.stats()["counters"]
    assert after["sessions_opened"] - before["sessions_opened"] == 1  # that of stats()
    assert after["requests_failed"] == 0
    with Client.connect(site.address("team-b")) as other:
        other.ping()


# --- other users and groups of this host ------------------------------------------------------------

STRANGER, GROUP = 54322, 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="acts as other users")


def as_stranger(work: Callable[[], object], gid: int = STRANGER) -> str:
    """What another user's process is told: what `work` returns, or the error."""
    its, ours = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = "failed"
        try:
            os.setgroups([])
            os.setgid(gid)
            os.setuid(STRANGER)
            said = str(work())
        except (OSError, DaemonUnavailable, ConfigError) as error:
            said = str(error)
        finally:
            os.write(ours, said.encode())
            os._exit(0)
    os.close(ours)
    os.waitpid(pid, 0)
    with os.fdopen(its) as file:
        return file.read()


@needs_root
def test_a_group_may_connect_and_no_other_user(start_daemon: Callable[..., Daemon]) -> None:
    folder = Path(start_daemon("--arena", "16MiB", "--region", "4MiB", "--group", str(GROUP)).run_dir)
    assert folder.stat().st_mode & 0o777 == 0o750
    for name in ("session.sock", "control.sock"):
        assert (folder / name).stat().st_mode & 0o777 == 0o660
        assert (folder / name).stat().st_gid == GROUP

    def connect() -> object:
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(str(folder / "session.sock"))

    assert as_stranger(connect, GROUP) == "None"
    assert "Permission denied" in as_stranger(connect)


@needs_root
def test_a_false_daemon_in_a_folder_for_all_users(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    """Another user took the path in /tmp first: that daemon would get all blocks, and could answer with anything."""
    daemon = start_daemon()  # below /tmp, and root's
    os.chown(daemon.run_dir, STRANGER + 1, -1)
    assert "it may be no daemon of ours" in as_stranger(lambda: Client.connect(daemon.run_dir))
    link = Path(daemon.run_dir + "-link")
    link.symlink_to(tmp_path)
    os.chown(link, STRANGER + 1, -1, follow_symlinks=False)
    try:
        assert "it may be no daemon of ours" in as_stranger(lambda: Client.connect(str(link)))
        late = Daemon("--arena", "16MiB", run_dir=str(link))
        assert late.launch().status() != 0
        assert "is another user's symbolic link" in late.log()
        late.close()
    finally:
        link.unlink()
        os.chown(daemon.run_dir, 0, -1)


# --- tenants that claim anything: none reads another's bytes, takes another's room, or learns of it --


MIB = 1 << 20


@pytest.fixture
def tenant(site: Site, closing: ExitStack) -> Callable[..., Tenant]:
    return lambda name, **settings: closing.enter_context(Tenant(site, name, **settings))


@pytest.mark.parametrize("claim", [False, True])
def test_frames_never_show_what_they_held_before(
    site: Site, start_daemon: Callable[..., Daemon], tenant: Callable[..., Tenant], claim: bool
) -> None:
    """Whatever a client on another host says of a mapping: it has none, so what it did not send is not its block."""
    start_daemon("--arena", "2MiB", "--region", "2MiB", *site.flags[4:])
    secret = b"another tenant's KV " * (MIB // 20 + 1)
    first, second = tenant("team-a"), tenant("team-b", map_arena=claim)
    theirs, ours = first.namespace(MIB - 4000), second.namespace(MIB - 4000)
    for _ in range(2):  # the whole arena
        assert first.store(theirs, os.urandom(16), secret[: MIB - 4000]) == [VISIBLE]
    for sent in (0, 1, MIB - 4001):
        key = os.urandom(16)
        lease, states, *_ = second.reserve(ours, key)  # evicts, and has the other one's frame
        assert states == [FRAME]
        if sent:
            assert second.ask("write", lease, 0, 0, payload=[b"x" * sent]) == ["done"]
        assert second.commit(lease, [0]) == [DROPPED]
        assert second.load(ours, key, 4096) == b""
    assert second.store(ours, key, b"y" * (MIB - 4000)) == [VISIBLE]
    assert second.load(ours, key, MIB - 4000) == b"y" * (MIB - 4000)
    _, lease, _ = second.match([ours], key)
    assert second.ask("read", lease, ours, 0, MIB - 4000, 1)[:2] == ["error", "bad_value"], "the rest of the frame"
    assert second.ask("read", lease, theirs, 0, 0, 1)[:2] == ["error", "unknown_namespace"]


def test_what_tells_of_others_is_barred(
    site: Site, start_daemon: Callable[..., Daemon], tenant: Callable[..., Tenant]
) -> None:
    daemon = start_daemon(*site.flags)
    other = tenant("team-b")
    number, key = other.namespace(4096), os.urandom(16)
    fields: dict[type, tuple[Any, ...]] = {
        m.Stats: (),
        m.Check: (),
        m.Inspect: ([], key),
        m.Pins: (),
        m.Specs: ([number],),
        m.Extents: (1, number, 0, 1),
        m.BadExtent: (1, number, 0),
        m.ReserveExtents: (number, b"", key, 1000),
        m.CommitExtents: (1, b""),
        m.Settings: (),
        m.ChangeSetting: ("quota", "team-b=1TiB"),
    }
    # New kinds of requests are refused to tenants until this table allows them.
    assert fields.keys() == set(get_args(m.ANY_REQUEST)) - FOR_TENANTS
    for kind, its in fields.items():
        assert other.ask(kind.__struct_config__.tag, *its)[:2] == ["error", "forbidden"], kind
    assert other.ask("flush", "all", [], b"")[:2] == ["error", "forbidden"]
    assert daemon.run_dir not in str(other.welcome)
    # Nor does it help to claim that its blocks are another's: the daemon writes its own name over that.
    spec = new_spec(4096)
    own = other.ask("register_namespace", spec)
    assert other.ask("register_namespace", {**spec, "extra": {"tenant": "team-a"}}) == own
