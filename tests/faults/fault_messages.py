"""Things that no client should send: packets for the session socket, parts for the ROUTER, raw ZMTP."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec
from fault_peer import DEADLINE_S, hello, open_session_socket, readable

from tiercache.protocol import messages as m
from tiercache.protocol.wire import close_fds, receive_packet, send_packet

_decode = msgspec.msgpack.Decoder(m.SessionMessage).decode
END = None


def greet(
    run_dir: str, data: bytes | None = None, fds: Sequence[int] | None = None, pid: int | None = None
) -> m.Welcome | m.Refused | m.Regions | None:
    """Send one first packet and return the answer; None is the end of the connection.

    By default a right hello, with the pidfd of `pid` (this process by default).
    """
    own = [] if fds is not None else [os.pidfd_open(pid or os.getpid())]
    with open_session_socket(run_dir) as sock:
        with suppress(BrokenPipeError):  # refused unread: the reason waits to be read
            send_packet(sock, hello(b"i" * 16) if data is None else data, own if fds is None else fds)
        close_fds(own)
        return answer_on(sock)


def answer_on(sock: socket.socket) -> m.Welcome | m.Refused | m.Regions | None:
    """The next packet of a session socket; None is the end of the connection."""
    try:
        data, fds = receive_packet(sock)
    except ConnectionResetError:
        data, fds = receive_packet(sock)  # refused unread: the reason comes after the error
    close_fds(fds)
    return _decode(data) if data else END


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
        deadline_s = time.monotonic() + timeout_s
        while readable(self.sock, deadline_s - time.monotonic()):
            try:
                if not self.sock.recv(1 << 16):
                    return True
            except ConnectionError:
                return True
        return False

    def close(self) -> None:
        """Hang up."""
        with suppress(OSError):
            self.sock.close()

    def __enter__(self) -> RawZmtp:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
