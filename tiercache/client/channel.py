"""One connection to one life of the daemon: a DEALER socket, used by one thread at a time.

A send proves nothing: ZeroMQ takes messages for a dead daemon too. Only the reply is success.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from tiercache.errors import ProtocolError
from tiercache.ground import forks
from tiercache.protocol import messages
from tiercache.protocol.curve import Remote
from tiercache.protocol.messages import ANY_REPLY, AnyRequest, Reply
from tiercache.protocol.wire import UNREADABLE

HIGH_WATER_MESSAGES = 1024

_encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], Reply] = msgspec.msgpack.Decoder(ANY_REPLY).decode
_context_lock = threading.Lock()
_context: tuple[int, zmq.Context[zmq.Socket[bytes]]] | None = None


def process_context() -> zmq.Context[zmq.Socket[bytes]]:
    """The ZeroMQ context of this process; a forked child gets its own."""
    global _context
    with _context_lock:
        if _context is None or _context[0] != os.getpid():
            _context = (os.getpid(), zmq.Context())
        return _context[1]


@forks.in_child
def _forget_context() -> None:
    """The lock may be held by a thread that does not exist here; the context itself is known by its process."""
    global _context_lock
    _context_lock = threading.Lock()


class Channel:
    """One DEALER socket to the daemon's ROUTER. Not thread-safe."""

    __slots__ = ("_receive_timeout_ms", "_socket", "holder", "late_until_s", "owed")

    def __init__(self, endpoint: str, remote: Remote | None = None) -> None:
        socket = process_context().socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, HIGH_WATER_MESSAGES)
        socket.set(zmq.RCVHWM, HIGH_WATER_MESSAGES)
        socket.set(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
        if remote is not None:
            remote.prepare(socket)
        socket.connect(endpoint)
        self._socket = socket
        self._receive_timeout_ms = -1
        self.holder = 0
        """The thread that has checked it out."""
        self.owed = 0
        """Replies that its former users did not wait for."""
        self.late_until_s = 0.0

    def send(self, request: AnyRequest, payload: Any = None) -> None:
        """Queue one request. Raises zmq.Again when the queue is full."""
        if payload is None:
            self._socket.send(_encode(request), zmq.NOBLOCK)
        else:
            # The payload is copied: the caller can reuse its memory whatever becomes of the message.
            self._socket.send_multipart([_encode(request), payload], zmq.NOBLOCK)

    def receive(self, deadline_ns: int) -> tuple[Reply, bytes | None] | None:
        """The next reply and its payload part, or None at `deadline_ns` (time.monotonic_ns()).

        Raises ProtocolError for bytes that are not a reply.
        """
        wait_ms = max(0, -((time.monotonic_ns() - deadline_ns) // 1_000_000))
        if wait_ms != self._receive_timeout_ms:
            self._socket.set(zmq.RCVTIMEO, wait_ms)
            self._receive_timeout_ms = wait_ms
        try:
            part = self._socket.recv(copy=False)
        except zmq.Again:
            return None
        payload = self._socket.recv_multipart()[0] if part.more else None
        try:
            reply = _decode(part.bytes)
        except UNREADABLE as error:
            raise ProtocolError(f"the daemon sent something that is not a reply: {error}") from error
        return reply, payload

    def close(self) -> None:
        """Close the socket, dropping what it has queued. Idempotent."""
        self._socket.close(0)
