"""Receives messages of a few parts, and skips longer ones.

ZeroMQ bounds the length of a part, but not the number of parts, and hands a message over once all of them have come. So
a long message is read and dropped a slice at a time: the event loop does other work in between, but this socket gives
nothing else until its last part.
"""

from __future__ import annotations

import zmq

SKIPPED_AT_ONCE = 1000
"""Parts read and dropped in one go: about a millisecond."""


class Multipart:
    """The messages of one socket, of at most `most` parts each."""

    def __init__(self, socket_: zmq.Socket[bytes], most: int) -> None:
        self._socket = socket_
        self._most = most
        self._skipping = False

    def receive(self) -> list[zmq.Frame]:
        """The parts of the next message; none of a message that is too long, as long as its rest is skipped.

        Raises zmq.Again if there is no message.
        """
        if self._skipping:
            self._skip()
            return []
        part = self._socket.recv(zmq.NOBLOCK, copy=False)
        parts = [part]
        while part.more and len(parts) < self._most:
            part = self._socket.recv(copy=False)
            parts.append(part)
        self._skipping = bool(part.more)
        return [] if self._skipping else parts

    def _skip(self) -> None:
        for _ in range(SKIPPED_AT_ONCE):
            if not self._socket.recv(copy=False).more:
                self._skipping = False
                return
