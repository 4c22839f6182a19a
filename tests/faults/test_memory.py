"""Memory and descriptors: seals, an arena that does not fit, floods of connections."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import msgspec
import pytest
from chains import chain_of
from fault_engine import Engine, spec_of
from fault_peer import Peer
from fault_processes import Daemon
from waiting import wait_until

from tiercache.config.daemon_config import session_socket_path
from tiercache.protocol import messages as m

pytestmark = pytest.mark.stress

MIB = 1 << 20
_F_ADD_SEALS, _SEAL_SHRINK, _SEAL_GROW, _SEAL_WRITE = 1033, 2, 4, 8
SPEC = spec_of(64 << 10)
encode = msgspec.msgpack.encode


def regions_of(peer: Peer, count: int) -> list[tuple[int, int]]:
    """Descriptor and size of each of the first regions that a client is sent."""
    found: list[tuple[int, int]] = []
    while len(found) < count:
        message, fds = peer.session.receive()
        found += [(fd, size) for (_, size), fd in zip(message[1], fds, strict=True)]
    return found


def test_29_no_client_can_resize_a_region(daemon: Daemon, connect: Callable[..., Peer], closing: ExitStack) -> None:
    other, keys = connect(daemon), chain_of("sealed", 8)
    other.store_chain(SPEC, keys)
    for fd, size in regions_of(connect(daemon), 4):
        closing.callback(os.close, fd)
        assert size == os.fstat(fd).st_size == 4 * MIB
        for length in (0, 4096, size - 1, size + 1, 2 * size):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, length)
        with pytest.raises(PermissionError):
            os.posix_fallocate(fd, size, 4096)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", size)
        with pytest.raises(PermissionError):  # nor make it read-only for the others
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_WRITE)
    assert other.load_chain(SPEC, keys) == 8


def test_43_a_daemon_out_of_descriptors_serves_those_it_has(
    start_daemon: Callable[..., Daemon], connect: Callable[..., Peer], closing: ExitStack
) -> None:
    """The daemon's own limits leave it enough descriptors; here the test lowers the limit under it."""
    daemon = start_daemon("--arena", "8MiB", "--region", "4MiB")
    peer, keys = connect(daemon), chain_of("files", 8)
    assert peer.load_chain(SPEC, keys) == 0  # its connection is made
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (48, 48))
    peer.store_chain(SPEC, keys)
    others: list[socket.socket] = []
    for _ in range(60):
        sock = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        sock.connect(str(session_socket_path(daemon.run_dir)))
        others.append(sock)
    wait_until(lambda: "could not be accepted" in daemon.log(), "the daemon is out of descriptors")
    for _ in range(200):
        assert peer.load_chain(SPEC, keys) == 8
    assert daemon.log().count("could not be accepted") < 20, "the loop does not spin"
    for sock in others:
        sock.close()
    wait_until(lambda: _lets_in(daemon), "it lets others in again")


def _lets_in(daemon: Daemon) -> bool:
    try:
        with Peer(daemon.run_dir) as peer:
            return isinstance(peer.tell(m.Ping), m.Done)
    except (OSError, AssertionError, msgspec.MsgspecError):
        return False


def test_a_lack_of_memory_is_said_and_survived(
    start_daemon: Callable[..., Daemon], engine_of: Callable[..., Engine], closing: ExitStack
) -> None:
    """No region fits: a line that says what to do, a daemon that answers, and an engine that goes on."""
    nothing_left = "from tiercache.copies import arena\narena._memory = lambda: iter([arena._Memory(0, 0, 'here')])"
    daemon = Daemon("--arena", "32MiB", "--region", "16MiB", patch=nothing_left)
    closing.callback(daemon.close)
    daemon.start(complete=False)
    wait_until(lambda: "make the arena smaller" in daemon.log(), "the log says what to do")
    engine, keys = engine_of(daemon, SPEC), chain_of("no room", 8)
    assert engine.store(keys) == (0, 0, 8, False)
    assert engine.load(keys) == 0
    stats = daemon.stats()
    assert stats["health"]["state"] == "degraded"
    assert "make the arena smaller" in stats["health"]["reasons"][0]
    assert stats["arena"]["populated_bytes"] == 0
    assert stats["arena"]["bytes"] == 32 * MIB


def test_24_connections_to_the_control_socket_never_take_the_last_descriptor(
    start_daemon: Callable[..., Daemon], connect: Callable[..., Peer], closing: ExitStack
) -> None:
    """ZeroMQ aborts without one. As fast as can be, and with few: what it accepts unseen is bounded too."""
    files = 1400

    limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, {files}))"
    daemon = start_daemon("--arena", "16MiB", "--region", "16MiB", patch=limit)
    peer = connect(daemon)
    assert isinstance(peer.tell(m.Ping), m.Done)  # a request on a connection that was never heard may be lost with it
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 2 * files), hard), hard))
    closing.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    deadline_s = time.monotonic() + 45
    for _ in range(files + 100):
        sock = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sock.setblocking(False)
        while True:
            assert time.monotonic() < deadline_s
            with suppress(BlockingIOError):
                sock.connect(peer.control.removeprefix("ipc://"))
                break
    assert isinstance(peer.tell(m.Ping), m.Done)
    assert f"may open {files} files" in daemon.log(), "the log says that it admits fewer than configured"
    with connect(daemon) as late:
        assert isinstance(late.tell(m.Ping), m.Done)
