"""The session socket: packets with file descriptors over a unix SEQPACKET socket.

It carries what ZeroMQ cannot: the client's pidfd one way, the regions' memfds the other, and the end of file that
reports a death.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Sequence

import msgspec

from tiercache.errors import ProtocolError
from tiercache.protocol.messages import MAX_FDS_PER_MESSAGE

MAX_PACKET_BYTES = 64 << 10
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that are not a message: invalid UTF-8 and endless nesting have errors of their own."""


def send_packet(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send one packet with at most 16 descriptors, which stay the caller's.

    Raises OSError (BlockingIOError on a full non-blocking socket, BrokenPipeError on a dead peer).
    """
    assert len(data) <= MAX_PACKET_BYTES
    assert len(fds) <= MAX_FDS_PER_MESSAGE
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
    assert sent == len(data), "SEQPACKET sends whole packets"


def receive_packet(sock: socket.socket) -> tuple[bytes, list[int]]:
    """One packet and its descriptors (close-on-exec, the caller's to close). `b""` is end of file.

    Raises OSError as recv does, and ProtocolError when the packet or its descriptors were truncated: a receiver that is
    out of descriptors gets fewer than were sent, and must not continue as if all came.
    """
    space = socket.CMSG_SPACE(MAX_FDS_PER_MESSAGE * array.array("i").itemsize)
    data, ancillary, flags, _ = sock.recvmsg(MAX_PACKET_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        close_fds(fds)
        raise ProtocolError(
            "a packet arrived cut short (too long, or no free file descriptors): raise the limit of open files"
        )
    return data, list(fds)


def close_fds(fds: Sequence[int]) -> None:
    """Close descriptors that came with a packet."""
    for fd in fds:
        os.close(fd)
