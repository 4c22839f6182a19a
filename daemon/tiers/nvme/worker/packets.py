"""Messages over a socket that keeps packets apart: long ones in parts, each with a byte that says if more follow."""

from __future__ import annotations

import array
import contextlib
import logging
import socket
from collections.abc import Iterator

PART_BYTES = 60 << 10
"""Fits the send buffer that sockets have by default, with room for others."""
_LAST, _MORE = b"\0", b"\1"

log = logging.getLogger("tiercache.daemon")


class Joiner:
    """Joins the parts of messages that come on one socket."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def add(self, packet: bytes) -> bytes | None:
        """Take a packet, never an empty one; returns the message that it completes."""
        self._parts.append(packet[1:])
        if packet[:1] == _MORE:
            return None
        whole = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        return whole


def parts_of(message: bytes) -> Iterator[bytes]:
    """The packets of a message."""
    for start in range(0, max(1, len(message)), PART_BYTES):
        end = start + PART_BYTES
        yield (_LAST if end >= len(message) else _MORE) + message[start:end]


def send_message(sock: socket.socket, message: bytes) -> None:
    """Send all of a message. Blocks; raises OSError."""
    for part in parts_of(message):
        sock.send(part)


def receive_now(sock: socket.socket, most_bytes: int) -> tuple[bytes, list[int]]:
    """A packet that is there, with its descriptors: one at most. Raises BlockingIOError when none is there.

    `socket.recv_fds` ignores its flags up to Python 3.12.
    """
    fds = array.array("i")
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    packet, ancillary, _, _ = sock.recvmsg(most_bytes, socket.CMSG_LEN(fds.itemsize), flags)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return packet, list(fds)


def send_now(sock: socket.socket, packet: bytes, fd: int) -> None:
    """Send a packet, with a descriptor unless `fd` is negative. Raises BlockingIOError where there is no room."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
    sock.sendmsg([packet], ancillary, socket.MSG_DONTWAIT)


def give_up_line(sock: socket.socket, error: OSError) -> None:
    """Nothing can be sent on a line: its reader finds its end, as if the process had closed it."""
    if not isinstance(error, ConnectionError):
        log.error("nothing can be sent to a worker process, which is given up: %s", error)
    with contextlib.suppress(OSError):  # it has been closed
        sock.shutdown(socket.SHUT_RDWR)


def receive_message(sock: socket.socket) -> bytes | None:
    """The next message; None at the end of file. Blocks; raises OSError."""
    joiner = Joiner()
    while packet := sock.recv(PART_BYTES + 1):
        message = joiner.add(packet)
        if message is not None:
            return message
    return None
