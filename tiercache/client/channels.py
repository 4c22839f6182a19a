"""Requests and replies between this process and one life of the daemon.

`Channels` is the pool of channels that belongs to one session: a call checks one out, sends, waits for the reply with
its request id and puts it back, so calls of different threads neither share a socket nor wait for each other.

A channel whose reply did not come in time goes to the `late` list, where `Channels.collect_late` reads it without
waiting: a late reply that grants a lease is given back, all others are dropped.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import zmq

from tiercache.client.channel import Channel
from tiercache.errors import CallInterrupted, DaemonUnavailable, DeadlineExceeded, ProtocolError, RequestRefused
from tiercache.ground import forks
from tiercache.ground.uninterrupted import interrupted
from tiercache.protocol.curve import Remote
from tiercache.protocol.messages import AnyRequest, Error, ErrorCode, Reply, Request, reply_type

PIPELINE_DEPTH = 8
LATE_CHANNEL_S = 30.0
"""How long a channel is watched for a missing reply before it is closed."""
LOOK_UP_NS = 100_000_000
"""How often a thread that waits for a reply checks whether the session is over."""

SESSION_OVER_CODES = (ErrorCode.STALE_GENERATION.value, ErrorCode.UNKNOWN_SESSION.value)
"""Refusals that every later request of this session will meet too."""

R = TypeVar("R", bound=Reply)
Order = tuple[type[AnyRequest], dict[str, Any], Any]
"""One request of a pipeline: its type, its own fields and its payload (bytes-like or None)."""

_request_ids = itertools.count(1)
_left_behind: list[Channel] = []
"""The parent's channels, in a forked child: never closed, and never collected either."""


class Pending(Generic[R]):
    """A request that was sent, on a channel that waits for its reply."""

    __slots__ = ("channel", "deadline_ns", "expect", "request_id", "timeout_s")

    def __init__(self, channel: Channel, request_id: int, deadline_ns: int, timeout_s: float, expect: type[R]) -> None:
        self.channel = channel
        self.request_id = request_id
        self.deadline_ns = deadline_ns
        self.timeout_s = timeout_s
        self.expect = expect


class Channels:
    """All channels of one session, no more than the daemon allows. Thread-safe.

    A thread without a channel waits while half as many threads as there may be channels hold some; the one that has
    waited longest is next. A thread that holds one gets a second at once, so that waiting threads cannot deadlock with
    it.

    Args:
        endpoint, session, generation: from the daemon's `Welcome`.
        remote: for a daemon on another host.
        most: connections that this session may have.
        on_late: called with every reply of this generation that came too late for its caller, in the thread that finds
            it; must not block.
    """

    def __init__(
        self,
        endpoint: str,
        session: bytes,
        generation: int,
        on_late: Callable[[Reply], None],
        remote: Remote | None = None,
        *,
        most: int,
    ) -> None:
        self.generation = generation
        self._endpoint = endpoint
        self._session = session
        self._on_late = on_late
        self._remote = remote
        self._lock = threading.Lock()  # entered faster than a condition
        self._changed = threading.Condition(self._lock)
        self._most = most
        self._holders: dict[int, int] = {}  # threads, and how many channels each has checked out
        self._waiting: deque[int] = deque()  # threads
        self._idle: list[Channel] = []
        self._late: deque[Channel] = deque()
        self.attendant = 0
        """The thread that maintains the session, and so never waits for other threads."""
        self._closed = False
        self._why_closed = "the session with the daemon is over"
        forks.watch(self, "_lock", "_changed")

    def post(self, request_type: type[Request[R]], timeout_s: float, **fields: Any) -> Pending[R]:
        """Send one request. Take its reply with `wait`, or give it up with `abandon`.

        Raises DaemonUnavailable when the session is over, RequestRefused if too many threads hold channels.
        """
        channel = self._check_out(timeout_s)
        deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        request_id = next(_request_ids)
        request = request_type(request_id, self._session, self.generation, deadline_ns // 1000, **fields)
        try:
            channel.send(request)
        except zmq.ZMQError as error:
            self._check_in(channel, broken=True)
            raise DaemonUnavailable(f"the connection to the daemon failed: {error}") from error
        return Pending(channel, request_id, deadline_ns, timeout_s, reply_type(request_type))

    def wait(self, pending: Pending[R]) -> R:
        """The reply to a posted request, once.

        Raises DeadlineExceeded without one in time, RequestRefused for an `Error`, ProtocolError for an answer of
        another type, DaemonUnavailable when the session is over.
        """
        channel = pending.channel
        # However the wait ends, the reply may still come and grant something, unless the connection is broken.
        owed, broken = 1, False
        try:
            while (received := self._receive(channel, pending.deadline_ns)) is not None:
                reply = received[0]
                if reply.generation != self.generation and not _says_session_is_over(reply):
                    continue
                if reply.request_id != pending.request_id:
                    self._take_late(channel, reply)
                    continue
                owed = 0
                return _expected(reply, pending.expect)
            raise DeadlineExceeded(f"no answer from the daemon in {pending.timeout_s:g} s")
        except ProtocolError:
            broken = True
            raise
        except zmq.ZMQError as error:
            broken = True
            raise DaemonUnavailable(f"the connection to the daemon failed: {error}") from error
        finally:
            self._check_in(channel, owed=owed, broken=broken)

    def abandon(self, pending: Pending[Any]) -> None:
        """Do not wait for the reply; what it grants is given back when it comes."""
        self._check_in(pending.channel, owed=1)

    def pipeline(
        self,
        orders: Iterable[Order],
        on_reply: Callable[[int, Any, bytes | None], None],
        timeout_s: float,
    ) -> None:
        """Send requests, up to 8 unanswered, and pass on each reply with its position in `orders`.

        Every request has a deadline of its own. Raises as `wait` does; replies still missing then
        are treated as late ones.
        """
        channel = self._check_out(timeout_s)
        waiting: dict[int, tuple[int, int, type[Reply]]] = {}
        broken = True
        try:
            self._exchange(channel, orders, on_reply, timeout_s, waiting)
            broken = False
        except (RequestRefused, DeadlineExceeded):
            broken = False
            raise
        except zmq.ZMQError as error:
            raise DaemonUnavailable(f"the connection to the daemon failed: {error}") from error
        finally:
            self._check_in(channel, owed=len(waiting), broken=broken)

    def _exchange(
        self,
        channel: Channel,
        orders: Iterable[Order],
        on_reply: Callable[[int, Any, bytes | None], None],
        timeout_s: float,
        waiting: dict[int, tuple[int, int, type[Reply]]],
    ) -> None:
        """The loop of `pipeline`. `waiting`: request id -> (position in `orders`, deadline, type of the reply)."""
        timeout_ns = int(timeout_s * 1e9)
        queue = enumerate(orders)
        more = True
        while True:
            while more and len(waiting) < PIPELINE_DEPTH:
                entry = next(queue, None)
                if entry is None:
                    more = False
                    break
                place, (request_type, fields, payload) = entry
                request_id = next(_request_ids)
                deadline_ns = time.monotonic_ns() + timeout_ns
                header = (request_id, self._session, self.generation, deadline_ns // 1000)
                channel.send(request_type(*header, **fields), payload)
                waiting[request_id] = (place, deadline_ns, reply_type(request_type))
            if not waiting:
                return
            oldest_ns = next(iter(waiting.values()))[1]
            received = self._receive(channel, oldest_ns)
            if received is None:
                raise DeadlineExceeded(f"no answer from the daemon in {timeout_s:g} s")
            reply, payload = received
            if reply.generation != self.generation and not _says_session_is_over(reply):
                continue
            slot = waiting.pop(reply.request_id, None)
            if slot is None:
                self._take_late(channel, reply)
                continue
            on_reply(slot[0], _expected(reply, slot[2]), payload)

    def _receive(self, channel: Channel, deadline_ns: int) -> tuple[Reply, bytes | None] | None:
        """See `Channel.receive`. Raises DaemonUnavailable soon after `close`: no more replies come.

        Raises CallInterrupted soon after a signal whose handler has raised; what is granted then is given back later.
        """
        while True:
            until_ns = min(deadline_ns, time.monotonic_ns() + LOOK_UP_NS)
            received = channel.receive(until_ns)
            if received is not None:
                return received
            if self._closed:
                raise DaemonUnavailable(self._why_closed)
            if interrupted():
                raise CallInterrupted("a signal has ended the call")
            if until_ns == deadline_ns:
                return None

    def collect_late(self) -> bool:
        """Read replies on late channels, without waiting. True while there are such channels."""
        with self._lock:
            channels, self._late = self._late, deque()
        kept = [channel for channel in channels if self._read_late(channel)]
        with self._lock:
            if self._closed:
                for channel in kept:
                    channel.close()
                return False
            self._late.extend(kept)
            return bool(self._late)

    def _read_late(self, channel: Channel) -> bool:
        """Read a late channel; True while it is to be kept as one."""
        try:
            while channel.owed and (received := channel.receive(0)) is not None:
                if received[0].generation == self.generation:
                    self._take_late(channel, received[0])
        except (ProtocolError, zmq.ZMQError):
            channel.close()
            return False
        if channel.owed == 0:
            self._check_in(channel)
            return False
        if time.monotonic() > channel.late_until_s:
            channel.close()
            return False
        return True

    def _take_late(self, channel: Channel, reply: Reply) -> None:
        """A reply that its caller did not wait for."""
        channel.owed = max(0, channel.owed - 1)
        self._on_late(reply)

    def close(self) -> None:
        """Close all channels; those in use are closed when their call returns. Idempotent."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            channels = [*self._idle, *self._late]
            self._idle.clear()
            self._late.clear()
        for channel in channels:
            channel.close()

    def forget_in_child(self) -> None:
        """After a fork, in the child: refuse all calls, and touch none of the parent's sockets."""
        self._closed, self._why_closed = True, forks.FORKED
        _left_behind.extend([*self._idle, *self._late])
        self._idle.clear()
        self._late.clear()

    def _check_out(self, timeout_s: float) -> Channel:
        thread = threading.get_ident()
        with self._lock:
            if not self._may_hold(thread):
                self._await_turn(thread, timeout_s)
            if self._closed:
                raise DaemonUnavailable(self._why_closed)
            # A late channel will do as well: its missing replies are recognized by their request ids.
            channel = self._idle.pop() if self._idle else self._late.popleft() if self._late else None
            self._holders[thread] = self._holders.get(thread, 0) + 1
        try:
            if channel is None:
                channel = Channel(self._endpoint, self._remote)
            channel.holder = thread
        except BaseException as error:
            with self._lock:
                self._let_go(thread)
            if isinstance(error, zmq.ZMQError):
                raise DaemonUnavailable(f"no connection to {self._endpoint}: {error}") from error
            raise
        return channel

    def _await_turn(self, thread: int, timeout_s: float) -> None:
        self._waiting.append(thread)
        try:
            if not self._changed.wait_for(lambda: self._may_hold(thread), timeout_s):
                text = f"requests of {len(self._holders)} threads of this client are under way: ask less at once"
                raise RequestRefused(ErrorCode.LIMIT.value, text)
        finally:
            self._waiting.remove(thread)
            self._changed.notify_all()

    def _may_hold(self, thread: int) -> bool:
        if self._closed or thread in self._holders or thread == self.attendant:
            return True
        is_next = not self._waiting or self._waiting[0] == thread
        return is_next and len(self._holders) < max(1, self._most // 2)

    def _let_go(self, thread: int) -> None:
        left = self._holders.pop(thread, 1) - 1
        if left:
            self._holders[thread] = left
        elif self._waiting:
            self._changed.notify_all()

    def _check_in(self, channel: Channel, *, owed: int = 0, broken: bool = False) -> None:
        with self._lock:
            channel.owed += owed
            kept = not self._closed and not broken and len(self._idle) + len(self._late) < self._most
            if kept and channel.owed:
                channel.late_until_s = time.monotonic() + LATE_CHANNEL_S
                self._late.append(channel)
            elif kept:
                self._idle.append(channel)
            if channel.holder:
                # Before another thread can take the channel, and be its holder.
                self._let_go(channel.holder)
                channel.holder = 0
        if not kept:
            channel.close()


def _says_session_is_over(reply: Reply) -> bool:
    """Such a refusal comes from another life of the daemon and carries that life's generation."""
    return isinstance(reply, Error) and reply.code in SESSION_OVER_CODES


def _expected(reply: Reply, expect: type[R]) -> R:
    """`reply` as the type that the request is answered with."""
    if isinstance(reply, expect):
        return reply
    if isinstance(reply, Error):
        raise RequestRefused(reply.code, reply.text)
    raise ProtocolError(f"the daemon answered with {type(reply).__name__}, not {expect.__name__}")
