"""Limits the connections to a listening ZeroMQ socket.

ZeroMQ accepts every connection, in a thread of its own, and has no limit. It reports each connection that comes and
goes through a pipe, its *monitor*; connections beyond the limit are shut down when we read of them. The pipe itself
bounds those we have not read of yet: ZeroMQ's thread waits while `UNSEEN_EVENTS` are unread, however long the event
loop takes to read them.
"""

from __future__ import annotations

import logging
import os
import socket
import time

import zmq
from zmq.utils.monitor import parse_monitor_message

log = logging.getLogger("tiercache.daemon")

HANDSHAKE_MS = 3000
"""Lifetime of a connection without a complete handshake."""
_HIGH_WATER = 1
_ZMQ_HIGH_WATER = 1000
"""Of ZeroMQ's end of the pipe; its capacity is the sum of both."""
EVENTS_AT_ONCE = 128
"""Events read in one go: about a millisecond."""
UNSEEN_EVENTS = _HIGH_WATER + _ZMQ_HIGH_WATER + EVENTS_AT_ONCE
"""The most connections that ZeroMQ has accepted beyond the limit, or that we have not shut down yet."""
_READABLE = int(zmq.POLLIN)
_MOST_AT_END = 100 * EVENTS_AT_ONCE


class Connections:
    """Counts the peers of one socket. Make it before the socket is bound; `close` it before the socket. One thread.

    A connection beyond the limit replaces the oldest one that may not have completed its handshake, which may be
    itself: so clients that open many connections and stay silent keep no other client out. ZeroMQ does not say which
    have completed it; we count those that were `heard`, and those that have lived longer than a handshake may take.

    Attributes:
        refused: connections that were shut down so far.
    """

    def __init__(self, socket_: zmq.Socket[bytes], most: int) -> None:
        self.refused = 0
        self._socket = socket_
        self._most = most
        self._all: set[int] = set()
        self._greeting: dict[int, float] = {}  # since when, in that order
        self._heard: set[int] = set()  # since all events were last read
        self._leaving: set[int] = set()
        socket_.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
        address = f"inproc://connections-{id(self)}"
        socket_.monitor(address, events)
        self._monitor = socket_.context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        self._monitor.connect(address)

    @property
    def count(self) -> int:
        """Connected peers that may stay, as far as events were read."""
        return len(self._all) - len(self._leaving)

    def heard(self, part: zmq.Frame) -> None:
        """A message came on a connection: its handshake is complete."""
        try:
            self._heard.add(int(part.get(zmq.SRCFD)))
        except zmq.ZMQError:
            return  # ZeroMQ knows nothing of peers that speak ZMTP 1.0

    def look(self) -> bool:
        """Read of peers that came and went, for about a millisecond at most. Returns whether there is more."""
        for _ in range(EVENTS_AT_ONCE):
            if not self._see():
                # The arrival of those heard has been read by now, and before it that of a former owner of their
                # numbers.
                for fd in self._heard:
                    self._greeting.pop(fd, None)
                self._heard.clear()
                return False
        return True

    def _see(self) -> bool:
        """Read one event, if there is one."""
        if not int(self._monitor.getsockopt(zmq.EVENTS)) & _READABLE:
            return False  # at each tick: an exception would cost three times as much
        event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
        kind, fd = event["event"], event["value"]
        if kind == zmq.EVENT_ACCEPTED:
            self._all.add(fd)
            self._greeting[fd] = time.monotonic()
            if self.count > self._most:
                self._refuse(self._least_known() or fd)
        else:
            self._all.discard(fd)
            self._greeting.pop(fd, None)
            self._leaving.discard(fd)
        return True

    def _least_known(self) -> int | None:
        """The oldest connection that may not have completed its handshake."""
        known_s = time.monotonic() - HANDSHAKE_MS / 1000
        while self._greeting and next(iter(self._greeting.values())) < known_s:
            del self._greeting[next(iter(self._greeting))]
        return next((fd for fd in self._greeting if fd not in self._heard), None)

    def _refuse(self, fd: int) -> None:
        """Shut a connection down, which makes ZeroMQ close it."""
        self.refused += 1
        self._greeting.pop(fd, None)
        self._leaving.add(fd)
        try:
            with socket.socket(fileno=os.dup(fd)) as peer:
                # It may be closed by now, and its number another file's: then it is not ours to end.
                if self._came_here(peer):
                    peer.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("a connection over the limit was gone already: %s", error)

    def _came_here(self, peer: socket.socket) -> bool:
        scheme, _, where = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).partition("://")
        name = peer.getsockname()
        if scheme == "ipc":
            return bool(peer.family == socket.AF_UNIX and name == where)
        return peer.family != socket.AF_UNIX and str(name[1]) == where.rpartition(":")[2]

    def close(self) -> None:
        """Stop counting. Unblocks ZeroMQ's thread, which would otherwise wait for us to read forever."""
        for _ in range(_MOST_AT_END):
            if not self._see():
                break
        self._socket.monitor(None, 0)
        self._monitor.close(0)
