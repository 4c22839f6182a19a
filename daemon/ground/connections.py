"""Limits the connections to a listening ZeroMQ socket, and what a peer may send before its message is complete.

ZeroMQ accepts every connection, in a thread of its own, and has no limit. It reports each connection that comes and
goes through a pipe, its *monitor*; connections beyond the limit are shut down when we read of them. The pipe itself
bounds those we have not read of yet: ZeroMQ's thread waits while `UNSEEN_EVENTS` are unread, however long the event
loop takes to read them.

ZeroMQ keeps the parts of a message until the last one has come, without a limit. The kernel counts the bytes that have
come on a TCP connection: one on which more has come than a message may have, and no message, is shut down. Nothing
counts the bytes on a unix socket, whose peers are the daemon's own user and group.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections.abc import Iterator
from itertools import islice

import zmq
from zmq.utils.monitor import parse_monitor_message

log = logging.getLogger("tiercache.daemon")

HANDSHAKE_MS = 3000
"""A connection without a complete handshake lives so long."""
_HIGH_WATER = 1
_ZMQ_HIGH_WATER = 1000
"""Of ZeroMQ's end of the pipe; its capacity is the sum of both."""
EVENTS_AT_ONCE = 128
"""Events read in one go: about a millisecond."""
UNSEEN_EVENTS = _HIGH_WATER + _ZMQ_HIGH_WATER + EVENTS_AT_ONCE
"""The most connections that ZeroMQ has accepted beyond the limit, or that we have not shut down yet."""
_MOST_AT_END = 100 * EVENTS_AT_ONCE
WEIGHED_EVERY_S = 0.5
WEIGHED_AT_ONCE = 64
"""Connections whose bytes are looked at in one go, in turn."""
_TCP_INFO_BYTES, _RECEIVED_AT = 136, 128
"""Of Linux's `tcp_info`, up to and with `tcpi_bytes_received`."""


class Connections:
    """Counts the peers of one socket. Make it before the socket is bound; `close` it before the socket. One thread.

    A connection beyond the limit replaces the oldest one that may not have completed its handshake, which may be
    itself: so clients that open many connections and stay silent keep no other client out. ZeroMQ does not say which
    have completed it; we count those that were `heard`, and those that have lived longer than a handshake may take.

    Args:
        most: connections.
        most_bytes: of a message with all of its parts. A peer that has sent more twice in a row, half a second or more
            apart, and that was not `heard` meanwhile, is shut down.

    Attributes:
        refused: connections that were shut down so far.
    """

    def __init__(self, socket_: zmq.Socket[bytes], most: int, most_bytes: int) -> None:
        self.refused = 0
        self._socket = socket_
        self._most = most
        self._most_bytes = most_bytes
        self._complete: dict[int, int] = {}  # bytes that had come when it was last heard
        self._spoke: set[int] = set()  # heard since its bytes were looked at
        self._suspects: set[int] = set()
        self._weighing: Iterator[int] = iter(())
        self._weighed_s = 0.0
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

    def heard(self, fd: int) -> None:
        """A message came on a connection (its `SRCFD`): its handshake is complete."""
        self._heard.add(fd)
        self._spoke.add(fd)

    def drop(self, fd: int) -> None:
        """Shut down a connection that must not stay."""
        if fd in self._all and fd not in self._leaving:
            self._refuse(fd)

    def look(self) -> bool:
        """Read of peers that came and went, for about a millisecond at most. Returns whether there is more."""
        for _ in range(EVENTS_AT_ONCE):
            if not self._see():
                # The arrival of those heard has been read by now, and before it that of a former owner of their
                # numbers.
                for fd in self._heard:
                    self._greeting.pop(fd, None)
                self._heard.clear()
                self._weigh()
                return False
        return True

    def _see(self) -> bool:
        """Read one event, if there is one."""
        try:
            message = self._monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        event = parse_monitor_message(message)
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
            self._complete.pop(fd, None)
            self._spoke.discard(fd)
            self._suspects.discard(fd)
        return True

    def _least_known(self) -> int | None:
        """The oldest connection that may not have completed its handshake."""
        known_s = time.monotonic() - HANDSHAKE_MS / 1000
        while self._greeting and next(iter(self._greeting.values())) < known_s:
            del self._greeting[next(iter(self._greeting))]
        return next((fd for fd in self._greeting if fd not in self._heard), None)

    def _weigh(self) -> None:
        """Shut down peers that have sent more than a message has, and no message: a few in turn."""
        if time.monotonic() < self._weighed_s + WEIGHED_EVERY_S or self._endpoint()[0] != "tcp":
            return
        self._weighed_s = time.monotonic()
        turn = list(islice(self._weighing, WEIGHED_AT_ONCE))
        if not turn:
            self._weighing = iter(sorted(self._all - self._leaving))
        for fd in turn:
            if fd not in self._all:
                continue
            came = self._bytes_from(fd)
            unfinished = came - self._complete.get(fd, 0)
            if fd in self._spoke:
                self._spoke.discard(fd)
                self._suspects.discard(fd)
                self._complete[fd] = came
            elif unfinished <= self._most_bytes:
                self._suspects.discard(fd)
            elif fd not in self._suspects:
                self._suspects.add(fd)  # its messages may wait to be read
            else:
                log.warning("a peer is disconnected: it has sent %d bytes of one message", unfinished)
                self._refuse(fd)

    def _bytes_from(self, fd: int) -> int:
        """How many bytes have come on a connection; 0 if it has gone."""
        try:
            with socket.socket(fileno=os.dup(fd)) as peer:
                if self._came_here(peer):
                    info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                    return int(struct.unpack_from("=Q", info, _RECEIVED_AT)[0])
        except (OSError, struct.error) as error:  # an older kernel says less
            log.debug("the bytes of a connection are not known: %s", error)
        return 0

    def _refuse(self, fd: int) -> None:
        """Shut a connection down, which makes ZeroMQ close it. What it has sent of a message is dropped with it."""
        self.refused += 1
        self._greeting.pop(fd, None)
        self._leaving.add(fd)
        self._suspects.discard(fd)
        try:
            with socket.socket(fileno=os.dup(fd)) as peer:
                # It may be closed by now, and its number another file's: then it is not ours to end.
                if self._came_here(peer):
                    peer.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("a connection over the limit was gone already: %s", error)

    def _came_here(self, peer: socket.socket) -> bool:
        scheme, _, where = self._endpoint()
        name = peer.getsockname()
        if scheme == "ipc":
            return bool(peer.family == socket.AF_UNIX and name == where)
        return peer.family != socket.AF_UNIX and str(name[1]) == where.rpartition(":")[2]

    def _endpoint(self) -> tuple[str, str, str]:
        """Scheme, `://` and address."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT).partition("://")

    def close(self) -> None:
        """Stop counting. Unblocks ZeroMQ's thread, which would otherwise wait for us to read for ever."""
        for _ in range(_MOST_AT_END):
            if not self._see():
                break
        self._socket.monitor(None, 0)
        self._monitor.close(0)
