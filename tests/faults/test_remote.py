"""Clients on other hosts, other users and groups of this one: encrypted or not at all, each in its own tenant."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from fault_processes import Daemon
from fault_tenants import Site, free_port

import tiercache
from tiercache.client.client import Client
from tiercache.errors import ConfigError, DaemonUnavailable
from tiercache.protocol.curve import load_client, make_client, make_server

pytestmark = pytest.mark.stress

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


@pytest.mark.parametrize(("host", "name"), [("127.0.0.1", "localhost"), ("[::1]", "[::1]")])
def test_bytes_come_back_to_their_tenant_and_to_no_other(
    tmp_path: Path, start_daemon: Callable[..., Daemon], closing: ExitStack, host: str, name: str
) -> None:
    site = Site(tmp_path, free_port(), host)
    remote = start_daemon(*site.flags)
    site.host = name
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
    before = _stats(remote)["counters"]
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    null = greeting.replace(b"CURVE" + bytes(3), b"NULL" + bytes(4))
    noise = np.random.default_rng(5).bytes(5000)
    heads = [greeting[:length] for length in (1, 10, 12, 40, 64)]
    for data in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", noise, b"", *heads, greeting + noise[:300], null + noise[:300]):
        knock(site.port, data)
    after = _stats(remote)["counters"]
    assert after["sessions_opened"] - before["sessions_opened"] == 1  # that of _stats
    assert after["requests_failed"] == 0
    with Client.connect(site.address("team-b")) as other:
        other.ping()


def _stats(daemon: Daemon) -> dict[str, Any]:
    with Client.connect(daemon.run_dir, map_arena=False) as client:
        return client.stats()


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


STRANGER = 54322
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="acts as other users")


@needs_root
def test_a_false_daemon_in_a_folder_for_all_users(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    """Another user took the path in /tmp first: that daemon would get all blocks, and could answer with anything."""
    daemon = start_daemon()  # below /tmp, and root's

    def outcome(run_dir: str) -> str:
        its, ours = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setuid(STRANGER)
                Client.connect(run_dir)
                said = "connected"
            except (DaemonUnavailable, ConfigError) as error:
                said = str(error)
            finally:
                os.write(ours, said.encode())
                os._exit(0)
        os.close(ours)
        os.waitpid(pid, 0)
        with os.fdopen(its) as file:
            return file.read()

    os.chown(daemon.run_dir, STRANGER + 1, -1)
    assert "it may be no daemon of ours" in outcome(daemon.run_dir)
    link = Path(daemon.run_dir + "-link")
    link.symlink_to(tmp_path)
    os.chown(link, STRANGER + 1, -1, follow_symlinks=False)
    try:
        assert "it may be no daemon of ours" in outcome(str(link))
        late = Daemon("--arena", "16MiB", run_dir=str(link))
        assert late.launch().status() != 0
        assert "is another user's symbolic link" in late.log()
        late.close()
    finally:
        link.unlink()
        os.chown(daemon.run_dir, 0, -1)
