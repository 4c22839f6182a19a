"""The ROUTER socket: requests in, replies out, without ever waiting for a peer.

Three pitfalls, and how they are handled:
- the descriptor is edge-triggered, and a send can swallow the edge: EVENTS is read after every request, and the loop's
  tick drains the socket too;
- a full peer queue silently drops replies unless ROUTER_MANDATORY is set: a peer that does not read its replies loses
  its session;
- a payload sent without a copy is read by ZeroMQ's own thread: its frame is held until the tracker says that it is
  done.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import zmq

from tiercache.daemon.ground.connections import Connections
from tiercache.daemon.ground.multipart import Multipart
from tiercache.daemon.ground.run_directory import guard
from tiercache.errors import ConfigError
from tiercache.ground.listening import is_ipv6, remedy
from tiercache.protocol.messages import MAX_MESSAGE_BYTES

from .sessions import Session
from .unsent import SMALL_BYTES, Receiver, SmallAnswers, Unsent

BATCH = 64
BATCH_NS = 2_000_000
"""Time for serving requests in one turn of the loop; the one in progress is finished."""
MAX_OUTSTANDING = 1024
"""Replies that may wait for one peer; one more ends its session."""
CONNECTIONS_AT_ONCE, PARTS_AT_ONCE = 512, 64
"""Connections checked in one go for answers that have been sent, and such answers of one connection."""
COPIED_BYTES = 64 << 10
"""Longer messages are decoded where ZeroMQ has them: a copy of the longest takes half a millisecond."""
DRAIN_REQUESTS = 4 * MAX_OUTSTANDING
MAX_PARTS = 4
"""Of a message: identity, header, a payload, and one too many, for which there is an answer."""
_READABLE, _LAST, _MORE = int(zmq.POLLIN), int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
"""Plain integers: a step with flags of an enumeration takes as long as a look-up."""


class Answer(NamedTuple):
    """A reply to a session: its header, and a payload, perhaps with a callback for when that is no longer read."""

    header: bytes
    session: Session | None
    payload: memoryview | bytes | None = None
    payload_done: Callable[[], None] | None = None


class _Sending(NamedTuple):
    """A part that ZeroMQ may still read; `length` counts the bytes to send up to its end."""

    tracker: zmq.MessageTracker
    reader: Receiver
    length: int
    done: Callable[[], None] | None

    def end(self, unsent: Unsent) -> None:
        unsent.sent(self.reader, self.length)
        if self.done is not None:
            self.done()


Handler = Callable[[bytes, "bytes | memoryview", "list[zmq.Frame]"], "Answer | None"]


class Router:
    """Owns the ROUTER socket; calls `handle(identity, header, further parts)` for each request in turn.

    Deferred answers (`handle` returned None) are given to `reply` with the same identity. `prepare` is called with the
    socket before it is bound, to set up authentication; `peer` then identifies the client that `handle` serves. Raises
    ConfigError where the endpoint cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        handle: Handler,
        cut: Callable[[Session, str], None],
        unsent: Unsent,
        max_connections: int,
        prepare: Callable[[zmq.Socket[bytes]], None] | None = None,
        group: int | None = None,
    ) -> None:
        self.peer = ""
        self.empty_ns = time.perf_counter_ns()  # when the queue was last seen empty
        self._asks_who = prepare is not None
        self._handle = handle
        self._cut = cut
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context(io_threads=1)
        self._socket = socket_ = self._context.socket(zmq.ROUTER)
        self._socket.copy_threshold = 0  # copied messages are not tracked
        self._unsent = unsent
        unsent.collectors.append(self._collect)
        self._small = SmallAnswers(2 * max_connections)
        self._sending: dict[bytes, deque[_Sending]] = {}  # by connection, in order
        self._turn: deque[bytes] = deque()  # connections in that, in the order in which they are checked
        self._scheduled = False
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.SNDHWM, MAX_OUTSTANDING),
            (zmq.RCVHWM, MAX_OUTSTANDING),
            (zmq.IPV6, int(is_ipv6(endpoint))),
        ):
            socket_.setsockopt(option, value)
        self.connections = Connections(socket_, max_connections)
        self._messages = Multipart(socket_, MAX_PARTS)
        self._looking = False
        if prepare is not None:
            prepare(socket_)
        try:
            socket_.bind(endpoint)
        except zmq.ZMQError as error:
            self.connections.close()
            socket_.close()
            reason = zmq.strerror(error.errno or 0)
            raise ConfigError(f"nothing can be served at {endpoint}: {reason}: {_remedy(endpoint)}") from error
        if endpoint.startswith("ipc://"):
            guard(Path(endpoint.removeprefix("ipc://")), group)
        self._fd = int(socket_.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._on_readable)

    def _on_readable(self) -> None:
        self._scheduled = False
        if not self._socket.closed:  # else it was scheduled before `close`
            self.drain(BATCH)

    def drain(self, limit: int) -> bool:
        """Serve what is here now, at most `limit` requests; True when nothing is left. Else the loop goes on soon.

        Begins no more after `BATCH_NS`.
        """
        until_ns, served = time.perf_counter_ns() + BATCH_NS, 0
        while int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE:
            if served == limit or time.perf_counter_ns() >= until_ns:
                if not self._scheduled:  # the edge is used up, whoever called this
                    self._scheduled = True
                    self._loop.call_soon(self._on_readable)
                return False
            self._serve_one()
            served += 1
        self.empty_ns = time.perf_counter_ns()
        return True

    def _serve_one(self) -> None:
        """Serve one request, or skip a part of what is not a request; there is something."""
        message = self._messages.receive()
        if not message:
            return
        identity, header = message[0].bytes, self._header_of(message[1]) if len(message) > 1 else b""
        answer = self._handle(identity, header, message[2:])
        if answer is not None:
            self.reply(identity, answer)

    def _header_of(self, frame: zmq.Frame) -> bytes | memoryview:
        self.connections.heard(frame)
        if self._asks_who:
            self.peer = str(frame.get("User-Id"))
        return frame.bytes if len(frame) < COPIED_BYTES else frame.buffer

    def reply(self, identity: bytes, answer: Answer) -> None:
        """Send an answer, or drop it when its peer has gone or does not read."""
        session, last = answer.session, answer.header if answer.payload is None else answer.payload
        reader, is_large = session or self._unsent.strangers, answer.payload is not None or len(last) > SMALL_BYTES
        counted = len(last) if is_large else self._small.add(identity, len(last))
        if counted and answer.payload is None and self._unsent.is_too_much(reader, counted):
            if session is not None:
                self._cut_later(session)
            return
        try:
            self._socket.send(identity, _MORE)
            if answer.payload is not None:
                self._socket.send(answer.header, _MORE)
            if not counted:
                self._socket.send(last, _LAST)
                return
            tracker = self._socket.send(last, _LAST, copy=False, track=True)
        except zmq.ZMQError as error:
            if answer.payload_done is not None:
                answer.payload_done()
            # EHOSTUNREACH: the peer has gone, and its session socket says so too.
            if error.errno == zmq.EAGAIN and session is not None:
                self._cut_later(session)
            return
        assert isinstance(tracker, zmq.MessageTracker)
        self._unsent.add(reader, counted)
        queue = self._sending.get(identity)
        if queue is None:
            queue = self._sending[identity] = deque()
            self._turn.append(identity)
        queue.append(_Sending(tracker, reader, counted, answer.payload_done))

    def _cut_later(self, session: Session) -> None:
        # Deferred: ending a session drains this socket, and we may be in the middle of that.
        self._loop.call_soon(self._cut, session, "it does not read its replies")

    def tick(self) -> None:
        """Periodic work: finished payloads, new and lost connections."""
        self._collect()
        self._look()

    def _collect(self) -> None:
        """Release payloads that have been sent; with very many connections, some in turn."""
        for _ in range(min(CONNECTIONS_AT_ONCE, len(self._turn))):
            identity = self._turn.popleft()
            self._collect_of(identity)
            if identity in self._sending:
                self._turn.append(identity)

    def _collect_of(self, identity: bytes) -> None:
        """The same for one connection: ZeroMQ sends in order, so only the first waiting part is checked."""
        queue = self._sending[identity]
        for _ in range(min(PARTS_AT_ONCE, len(queue))):
            if not queue[0].tracker.done:
                return
            queue.popleft().end(self._unsent)
        if not queue:
            del self._sending[identity]

    def _look(self) -> None:
        """Count connections that came and went, a part at a time: in a flood others are served in between."""
        if not self._looking and not self._socket.closed and self.connections.look():
            self._looking = True
            self._loop.call_soon(self._look_on)

    def _look_on(self) -> None:
        self._looking = False
        self._look()

    def close(self) -> None:
        """Stop serving; what was not sent is dropped."""
        self._loop.remove_reader(self._fd)
        self.connections.close()
        self._socket.close()
        for queue in self._sending.values():
            for part in queue:
                part.end(self._unsent)
        self._context.term()


def _remedy(endpoint: str) -> str:
    """What to do if an endpoint cannot be bound."""
    if endpoint.startswith("ipc://"):
        return "choose another --run-dir"
    return remedy(endpoint)
