"""Faults 24, 41, 42, 43: too much, too many, too long, and silence. Others are answered all the while."""

from __future__ import annotations

import resource
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest
import zmq
from fault_peer import DEADLINE_S, Peer
from fault_processes import Daemon, rss_bytes

from tiercache.protocol import messages as m

pytestmark = pytest.mark.stress

MIB = 1 << 20


class RawZmtp:
    """A ZMTP 3.0 peer without ZeroMQ: the NULL handshake, then any bytes (RFC 23/ZMTP)."""

    def __init__(self, endpoint: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(DEADLINE_S)
        self.sock.connect(endpoint.removeprefix("ipc://"))

    def shake_hands(self) -> None:
        """Greeting and READY both ways."""
        greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(1 + 31)
        self.sock.sendall(greeting)
        self._take(64)
        properties = b"".join(
            bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
            for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", b""))
        )
        body = b"\x05READY" + properties
        self.sock.sendall(b"\x04" + bytes([len(body)]) + body)
        flags, length = self._take(2)
        assert flags == 4, "the peer's READY"
        self._take(length)

    def _take(self, count: int) -> bytes:
        got = b""
        while len(got) < count:
            more = self.sock.recv(count - len(got))
            assert more, "the daemon hung up during the handshake"
            got += more
        return got

    def announce(self, length: int) -> None:
        """The head of a frame of `length` bytes, and nothing of the frame."""
        self.sock.sendall(b"\x02" + struct.pack(">Q", length))

    def is_over(self, timeout_s: float = DEADLINE_S) -> bool:
        """Whether the daemon hangs up within the time."""
        self.sock.settimeout(timeout_s)
        try:
            while self.sock.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        return True

    def close(self) -> None:
        """Hang up."""
        with suppress(OSError):
            self.sock.close()

    def __enter__(self) -> RawZmtp:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def test_24_a_frame_of_a_gigabyte_and_a_half_is_not_awaited(
    hardened: Daemon, bystander: Peer, closing: ExitStack
) -> None:
    before = rss_bytes(hardened.pid)
    for _ in range(8):
        raw = closing.enter_context(RawZmtp(bystander.control))
        raw.shake_hands()
        raw.announce(3 << 29)
        assert raw.is_over(), "the daemon waits for 1.5 GiB"
    assert rss_bytes(hardened.pid) - before < 64 * MIB


def test_24_connections_to_the_control_socket_never_take_the_last_descriptor(
    start_daemon: Callable[..., Daemon], connect: Callable[..., Peer], closing: ExitStack
) -> None:
    """ZeroMQ aborts without one. As fast as can be, and with few: what it accepts unseen is bounded too."""
    files = 1400

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, files))

    daemon = start_daemon("--arena", "16MiB", "--region", "16MiB", preexec=limit)
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


def test_41_a_client_that_never_reads_its_replies_loses_its_session_only(
    hardened: Daemon, bystander: Peer, connect: Callable[..., Peer]
) -> None:
    deaf = connect(hardened, receive_hwm=1)
    others = [connect(hardened) for _ in range(3)]
    posted = 0
    deadline_s = time.monotonic() + 45
    while not deaf.is_over(0):
        assert time.monotonic() < deadline_s, f"{posted} replies were not read, and the session goes on"
        for _ in range(100):
            with suppress(zmq.Again):
                deaf.post(m.Stats)
                posted += 1
        assert all(isinstance(other.tell(m.Ping), m.Done) for other in others)
    assert posted > 1000, "a thousand outstanding replies are allowed"
    assert bystander.stats()["counters"]["sessions_cut"] > 0
    assert all(isinstance(other.tell(m.Ping), m.Done) for other in others)
