"""Clients on other hosts: encrypted or not at all, each in its own tenant; a wrong handshake harms no client."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from fault_processes import Daemon
from fault_tenants import Site, free_port
from waiting import wait_until

import tiercache
from tiercache.client.client import Client
from tiercache.errors import ConfigError, DaemonUnavailable, RequestRefused
from tiercache.protocol import messages as m
from tiercache.protocol.curve import ClientKeys, find_remote, load_allowed, load_client, make_client, make_server

SPEC = tiercache.NamespaceSpec(engine="remote/1", layout="x", dtype="uint8", block_size=4, block_bytes=5000)
KEYS = tiercache.KeyChain(tiercache.root_key("a model"), 4, range(16)).packed()  # of 4 blocks


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, free_port())


@pytest.fixture
def remote(site: Site, start_daemon: Callable[..., Daemon]) -> Daemon:
    return start_daemon(*site.flags)


def noise(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (8, 5000), np.uint8)


def connector(closing: ExitStack, address: str, pool: np.ndarray[Any, Any], **options: Any) -> tiercache.Connector:
    options.setdefault("required", True)
    its = tiercache.connect(address, namespace=SPEC, pool=tiercache.Pool.from_blocks(pool), **options)
    return closing.enter_context(its)


def test_bytes_come_back_to_their_tenant_and_to_no_other(site: Site, remote: Daemon, closing: ExitStack) -> None:
    pool = noise(1)
    first = connector(closing, site.address("team-a"), pool)
    assert first.store(KEYS, [0, 1, 2, 3]).stored == 4
    found = first.match(KEYS)
    assert found.blocks == 4
    assert first.load(found, [4, 5, 6, 7]) == 4
    assert np.array_equal(pool[4:], pool[:4])
    for address in (site.address("team-b"), remote.run_dir):  # another tenant, and a client without one
        with connector(closing, address, noise(2)) as other:
            assert other.match(KEYS).blocks == 0


def test_a_tenant_cannot_name_what_is_not_its_own(site: Site, remote: Daemon, closing: ExitStack) -> None:
    """Namespaces are small integers, so a tenant could guess them; and many requests could tell it about others."""
    connector(closing, site.address("team-a"), noise(1)).store(KEYS, [0, 1, 2, 3])
    other = closing.enter_context(Client.connect(site.address("team-b")))
    own = other.register(SPEC)
    foreign = 3 - own
    refused: list[tuple[type[m.Request], dict[str, Any], str]] = [
        (m.Match, {"namespaces": [foreign], "keys": KEYS, "ttl_ms": 1000}, "unknown_namespace"),
        (m.Match, {"namespaces": [own, foreign], "keys": KEYS, "ttl_ms": 1000}, "unknown_namespace"),
        (m.Peek, {"namespaces": [foreign], "keys": KEYS}, "unknown_namespace"),
        (m.Pin, {"namespaces": [foreign], "keys": KEYS, "ttl_ms": 1000}, "unknown_namespace"),
        (m.Flush, {"tier": "all", "namespaces": [foreign], "key": b""}, "unknown_namespace"),
        (m.Flush, {"tier": "all", "namespaces": [], "key": b""}, "forbidden"),
        (m.Stats, {}, "forbidden"),
        (m.Check, {}, "forbidden"),
    ]
    for kind, fields, code in refused:
        with pytest.raises(RequestRefused) as error:
            other.call(kind, **fields)
        assert error.value.code == code, kind
    # Nor by claiming another tenant's blocks.
    assert other.register(SPEC.of_tenant("team-a")) == own
    with connector(closing, site.address("team-a"), noise(3)) as again:
        assert again.match(KEYS).blocks == 4


def test_a_session_is_of_use_to_its_tenant_only(site: Site, remote: Daemon, closing: ExitStack) -> None:
    """Even a client that knows the token, which never crosses the network in clear, is refused with other keys."""
    client = closing.enter_context(Client.connect(site.address("team-a")))
    session = client.session()
    ping = m.Ping(7, session.welcome.session, session.generation, time.monotonic_ns() // 1000 + 5_000_000)
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        reached = find_remote(site.address("team-b"))
        assert reached is not None
        reached.keys.secure(sock)
        sock.connect(reached.endpoint)
        sock.send(msgspec.msgpack.encode(ping))
        assert sock.poll(5000)
        reply = msgspec.msgpack.decode(sock.recv(), type=m.AnyReply)
    assert isinstance(reply, m.Error)
    assert (reply.request_id, reply.code) == (7, "unknown_session")


def test_wrong_keys_get_no_answer(site: Site, remote: Daemon, tmp_path: Path) -> None:
    make_server(tmp_path / "else")
    make_client(tmp_path / "else", "team-c", tmp_path / "team-c.toml")
    with pytest.raises(DaemonUnavailable, match="it has other keys, or it does not let ours in"):
        # The key of another daemon, unknown to this one.
        Client.connect(site.address("team-c"), timeout_s=1.0, request_timeout_s=0.5)
    right = load_client(tmp_path / "team-a.toml")
    stranger, secret = zmq.curve_keypair()
    keys = {"public_key": stranger, "secret_key": secret, "server_key": right.server}
    unknown = tmp_path / "unknown.toml"
    unknown.write_text("".join(f"{name} = '{key.decode()}'\n" for name, key in keys.items()))
    unknown.chmod(0o600)
    with pytest.raises(DaemonUnavailable, match="does not let ours in"):
        Client.connect(site.address("unknown"), timeout_s=1.0, request_timeout_s=0.5)
    with Client.connect(remote.run_dir, map_arena=False) as local:
        assert local.stats()["counters"]["handshakes_refused"] >= 1
    Client.connect(site.address("team-a")).close()


def test_a_key_is_locked_out_by_removing_its_file(site: Site, remote: Daemon, closing: ExitStack) -> None:
    first = connector(closing, site.address("team-a"), noise(1))
    first.store(KEYS, [0, 1, 2, 3])
    allowed = site.keys / "clients" / "team-a.toml"
    allowed.rename(site.keys / "away")
    wait_until(lambda: first.match(KEYS).blocks == 0, "the session is cut")
    (site.keys / "away").rename(allowed)
    wait_until(lambda: first.match(KEYS).blocks == 4, "its blocks are back with its key", 60)


def test_hits_are_back_after_the_daemon_was_killed(site: Site, remote: Daemon, closing: ExitStack) -> None:
    first = connector(closing, site.address("team-a"), noise(1), request_timeout_s=0.3)
    assert first.store(KEYS, [0, 1, 2, 3]).stored == 4
    remote.kill()
    started_s = time.monotonic()
    assert first.match(KEYS).blocks == 0
    assert time.monotonic() - started_s < 5
    assert first.store(KEYS, [0, 1, 2, 3]).stored == 0
    remote.start()
    wait_until(lambda: first.store(KEYS, [0, 1, 2, 3]).stored == 4, "the client has found the new life", 60)
    assert first.match(KEYS).blocks == 4


class Recorder:
    """Passes one connection on and keeps what the client sent."""

    def __init__(self, port: int) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.sent = b""
        self._port = port
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            threading.Thread(target=self._pump, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, keep: bool) -> None:
        try:
            while data := source.recv(65536):
                if keep:
                    self.sent += data
                sink.sendall(data)
        except OSError:
            pass  # the other direction has closed both
        finally:
            source.close()
            sink.close()

    def close(self) -> None:
        self._server.close()


def knock(port: int, data: bytes) -> None:
    """Send bytes to the TCP port and wait until it hangs up or says nothing for a moment."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.settimeout(0.2)
        try:
            sock.sendall(data)
            while sock.recv(65536):
                continue
        except (TimeoutError, ConnectionError):
            return


def test_garbage_truncated_and_replayed_handshakes(site: Site, remote: Daemon, closing: ExitStack) -> None:
    recorder = Recorder(site.port)
    closing.callback(recorder.close)
    with Client.connect(site.address("team-a", recorder.port)) as client:
        client.ping()
    sent = recorder.sent
    assert b"CURVE" in sent
    assert b"team-a" not in sent
    assert client.instance not in sent
    before = _stats(remote)["counters"]
    rng = np.random.default_rng(5)
    for data in (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        rng.bytes(5000),
        b"",
        b"\xff" + bytes(8) + b"\x7f",
        *(sent[:length] for length in (1, 10, 12, 40, 64, 100, 200, 264, 300, 500)),
        sent,  # all that a good client sent, once more
        sent[:64] + rng.bytes(200),
        sent[:264] + rng.bytes(300),
        sent.replace(b"CURVE", b"PLAIN"),
        sent.replace(b"CURVE" + bytes(3), b"NULL" + bytes(4)),
    ):
        knock(site.port, data)
    after = _stats(remote)["counters"]
    assert after["sessions_opened"] - before["sessions_opened"] == 1  # that of _stats
    assert after["requests_failed"] == 0
    with Client.connect(site.address("team-b")) as other:
        other.ping()


def test_garbage_inside_a_good_connection_is_answered(site: Site, remote: Daemon) -> None:
    reached = find_remote(site.address("team-a"))
    assert reached is not None
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        reached.keys.secure(sock)
        sock.connect(reached.endpoint)
        for message in (["hello", 1], ["ping", 1, b"x", 1, 1], ["ping"], {}, None):
            data = msgspec.msgpack.encode(message)
            sock.send(data)
            assert sock.poll(5000), data
            assert isinstance(msgspec.msgpack.decode(sock.recv(), type=m.AnyReply), m.Error)
    assert _stats(remote)["counters"]["requests_failed"] == 0


def test_more_connections_than_sessions_are_refused(
    site: Site, start_daemon: Callable[..., Daemon], closing: ExitStack
) -> None:
    daemon = start_daemon(*site.flags, "--max-sessions", "8")
    for tenant in ("team-a", "team-b", "team-c"):
        if tenant == "team-c":
            make_client(site.keys, tenant, site.file(tenant))
        for _ in range(2):
            closing.enter_context(Client.connect(site.address(tenant)))
        with pytest.raises(RequestRefused, match=r"(2 sessions of tenant|6 sessions of other hosts)"):
            Client.connect(site.address(tenant))
    # A part is left for the engines of this host.
    for _ in range(2):
        closing.enter_context(Client.connect(daemon.run_dir, map_arena=False))
    with pytest.raises(RequestRefused, match="8 sessions are open: raise max_sessions"):
        Client.connect(daemon.run_dir, map_arena=False)


def _stats(daemon: Daemon) -> dict[str, Any]:
    with Client.connect(daemon.run_dir, map_arena=False) as client:
        return client.stats()


# --- key files and settings ------------------------------------------------------------------------


def test_key_files_of_the_wrong_form_say_what_to_do(site: Site, tmp_path: Path) -> None:
    good = tmp_path / "team-a.toml"
    assert isinstance(load_client(good), ClientKeys)
    bad = tmp_path / "bad.toml"

    def problem(text: str, mode: int = 0o600) -> str:
        bad.write_text(text)
        bad.chmod(mode)
        with pytest.raises(ConfigError) as error:
            load_client(bad)
        return str(error.value)

    text = good.read_text()
    assert "chmod 0600" in problem(text, 0o644)
    assert "no key file" in problem("-----BEGIN CERTIFICATE-----")
    assert "no key file" in problem("public_key = 5")
    assert "no key file" in problem("\x00\xff")
    assert "no key file" in problem(text + "other = ''\n")
    assert "no server_key" in problem("\n".join(text.splitlines()[:2]))
    assert "secret_key is no key" in problem("public_key = '" + "0" * 40 + "'\nserver_key = '" + "0" * 40 + "'")
    assert "public_key is no key" in problem(text.replace("public_key = '", "public_key = 'x"))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_client(tmp_path / "none.toml")
    (site.keys / "clients" / "..bad.toml").write_text(text)
    (site.keys / "clients" / "team-c.toml").write_text("nothing")
    allowed, problems = load_allowed(site.keys)
    assert sorted(allowed.values()) == ["team-a", "team-b"]
    assert len(problems) == 2


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("tcp://host", "write tcp://HOST:PORT"),
        ("tcp://host:99999?key=x", "write tcp://HOST:PORT"),
        ("tcp://host:1", "only talked to with keys"),
        ("tcp://host:1?cert=x", "only key=FILE"),
        ("tcp://host:1?key=/none.toml", "cannot be read"),
        ("http://host:1", "write a run directory, or tcp://"),
    ],
)
def test_addresses_of_the_wrong_form_say_what_to_do(address: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Client(address)


def test_a_daemon_without_proper_keys_does_not_start(site: Site) -> None:
    def refusal(*flags: str) -> str:
        daemon = Daemon("--arena", "16MiB", *flags)
        try:
            assert daemon.launch().wait(20) != 0
            return daemon.log().strip().splitlines()[-1]
        finally:
            daemon.close()

    listen = ("--listen", f"tcp://127.0.0.1:{site.port}")
    assert "tiercache keygen" in refusal(*listen)
    assert "tiercache keygen" in refusal("--curve-keys", str(site.keys))
    (site.keys / "server.toml").chmod(0o640)
    assert "chmod 0600" in refusal(*listen, "--curve-keys", str(site.keys))
    (site.keys / "server.toml").unlink()
    assert "cannot be read" in refusal(*listen, "--curve-keys", str(site.keys))
    shutil.rmtree(site.keys)
    make_server(site.keys)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "nothing can be served" in refusal("--listen", f"tcp://127.0.0.1:{port}", "--curve-keys", str(site.keys))


def test_keys_are_never_overwritten(site: Site, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="never overwritten"):
        make_server(site.keys)
    with pytest.raises(ConfigError, match="is there already"):
        make_client(site.keys, "team-a", tmp_path / "new.toml")
    with pytest.raises(ConfigError, match="never overwritten"):
        make_client(site.keys, "team-z", tmp_path / "team-a.toml")
    assert not (site.keys / "clients" / "team-z.toml").exists()
    with pytest.raises(ConfigError, match="letters"):
        make_client(site.keys, "../x", tmp_path / "x.toml")
    assert (tmp_path / "team-a.toml").stat().st_mode & 0o777 == 0o600


# --- the group -------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="gives sockets to a group that it is not in")
def test_a_group_may_connect_and_no_other_user(start_daemon: Callable[..., Daemon]) -> None:
    group = 54321
    daemon = start_daemon("--arena", "16MiB", "--region", "4MiB", "--group", str(group))
    folder = Path(daemon.run_dir)
    assert folder.stat().st_mode & 0o777 == 0o750
    for name in ("session.sock", "control.sock"):
        assert (folder / name).stat().st_mode & 0o777 == 0o660
        assert (folder / name).stat().st_gid == group

    def outcome(gid: int) -> int:
        pid = os.fork()
        if pid == 0:
            status = 9
            try:
                os.setgroups([])
                os.setgid(gid)
                os.setuid(54322)
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sock.connect(str(folder / "session.sock"))
                status = 0
            except PermissionError:
                status = 1
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert outcome(group) == 0
    assert outcome(54323) == 1


def test_a_group_that_is_not_there(tmp_path: Path) -> None:
    daemon = Daemon("--arena", "16MiB", "--group", "no-such-group-here")
    try:
        assert daemon.launch().wait(20) != 0
        assert "there is no such group" in daemon.log()
    finally:
        daemon.close()
