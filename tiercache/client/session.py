"""One session with one life of the daemon: hello, the session socket, the arena's mapping, requests.

Leases, namespace ids and frames are only valid in the session that granted them, so their holder also holds its
`Session` and sends requests through it: a request can then never reach another life.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from tiercache.client.channels import SESSION_OVER_CODES, Channels, Order, Pending
from tiercache.client.hello import Message, explain_absence, greet_nearby, greet_remote
from tiercache.client.mapping import ArenaMapping
from tiercache.client.self_report import SelfReport
from tiercache.errors import DaemonUnavailable, ProtocolError, RequestRefused, TierCacheError
from tiercache.ground import forks
from tiercache.ground.listening import RESOLVE_S, wants_ipv6
from tiercache.ground.uninterrupted import uninterrupted
from tiercache.protocol import messages
from tiercache.protocol.curve import find_remote
from tiercache.protocol.messages import (
    NO_LEASE,
    Abort,
    AnyRequest,
    ErrorCode,
    Hello,
    Matched,
    ModelCard,
    Ping,
    Refused,
    Regions,
    RegisterNamespace,
    Release,
    Reply,
    Report,
    Request,
    Reserved,
    ReservedExtents,
    SessionMessage,
)
from tiercache.protocol.namespaces import NamespaceSpec
from tiercache.protocol.wire import UNREADABLE, close_fds, receive_packet

REQUEST_TIMEOUT_S = 0.5
MAX_GIVE_BACK = 4096
MAX_NAME_CHARS = 200
KEEP_ALIVE_S = 5.0
"""For a daemon on another host: how often to ping, which also shows whether it lives."""
REPORT_S = 5.0
"""How often counters are reported to the daemon, if they have changed."""

ASK_AGAIN_CODES = (ErrorCode.EXPIRED.value, ErrorCode.LIMIT.value)
"""Refusals that say nothing about the request: the clock was wrong, or too much is in progress."""

logger = logging.getLogger("tiercache.client")
R = TypeVar("R", bound=Reply)
Errands = deque[tuple[int, bytes, type[AnyRequest], dict[str, Any]]]
"""Requests that end leases, each with the life of the daemon and the session that granted the lease."""
_decode = msgspec.msgpack.Decoder(SessionMessage).decode


@dataclass(slots=True)
class SessionSettings:
    """What a client says of itself in each of its sessions, and how long it waits; see `Client.connect`.

    `request_timeout_s` may change at any time: it applies to requests that are sent from then on.
    """

    address: str
    name: str
    instance: bytes
    map_arena: bool = True
    cuda: bool = False
    request_timeout_s: float = REQUEST_TIMEOUT_S


class SessionOwner(Protocol):
    """What keeps a session.

    Attributes:
        errands: queue of `Session.give_back`; shared by the sessions of one client, so that a later one can run it.
        report: what each session tells the daemon of this process.
    """

    errands: Errands
    report: SelfReport

    def wake(self) -> None:
        """`Session.tidy` has something to do. Called in any thread."""

    def session_failed(self, session: Session, reason: str, over: bool) -> None:
        """A request has failed; `over`: the session will never work again. Called in any thread."""


class Session:
    """One session with one life of the daemon. Thread-safe.

    Attributes:
        generation: the daemon's life.
        arena: this process's mapping of its regions, or None for clients that do not map.
    """

    def __init__(self, settings: SessionSettings, owner: SessionOwner) -> None:
        """Say hello. Blocks for at most about the time of a request, or twice that while a name does not resolve.

        Raises DaemonUnavailable, RequestRefused (version, limits), ProtocolError, ArenaError.
        """
        self._owner = owner
        self._settings = settings
        timeout_s = settings.request_timeout_s
        remote = find_remote(settings.address)
        if remote is not None:
            remote = remote._replace(ipv6=wants_ipv6(remote.endpoint, min(timeout_s, RESOLVE_S)))
        self.arena: ArenaMapping | None = None
        if settings.map_arena and remote is None:
            self.arena = ArenaMapping(self._arena_is_ready, cuda=settings.cuda)
        hello = Hello(
            protocol_min=messages.OLDEST_PROTOCOL,
            protocol_max=messages.PROTOCOL,
            instance=settings.instance,
            name=settings.name[:MAX_NAME_CHARS],
            clock_us=time.monotonic_ns() // 1000,
            map_arena=self.arena is not None,
        )
        self._far: socket.socket | None = None
        if remote is None:
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        else:
            # Nothing will come by it: a daemon on another host is gone when it no longer answers.
            self._sock, self._far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        forks.watch(self)
        try:
            if remote is None:
                self.welcome = greet_nearby(self._sock, settings.address, hello, timeout_s, self._read_packet)
            else:
                self.welcome = greet_remote(remote, hello, timeout_s)
        except (OSError, TierCacheError) as error:
            self._close_sockets()
            if self.arena is not None:
                self.arena.end()
            if isinstance(error, OSError):
                raise DaemonUnavailable(explain_absence(error)) from error
            raise
        self._sock.setblocking(False)
        self.generation = self.welcome.generation
        self._namespaces: dict[int, tuple[NamespaceSpec, int]] = {}
        self._direct: set[int] = set()
        self._prober: int | None = None
        self._paused = True
        self._reported: tuple[str, list[ModelCard], dict[str, int]] = ("none", [], {})
        self._report_due_s = 0.0
        self._remote = remote is not None
        self._asked_s = time.monotonic()
        self._clock_differs = False
        endpoint = self.welcome.control if remote is None else remote.endpoint
        self._channels = Channels(
            endpoint, self.welcome.session, self.generation, self._on_late, remote, most=self.welcome.connections
        )

    @property
    def timeout_s(self) -> float:
        """Deadline of one request."""
        return self._settings.request_timeout_s

    def fileno(self) -> int:
        """Descriptor of the session socket, to poll."""
        return self._sock.fileno()

    def _read_packet(self) -> Message:
        """Read one packet and map its regions. None is end of file."""
        data, fds = receive_packet(self._sock)
        try:
            if not data:
                return None
            try:
                message: Message = _decode(data)
            except UNREADABLE as error:
                raise ProtocolError(f"the daemon sent a packet that is not a message: {error}") from error
            if isinstance(message, Regions) and self.arena is not None:
                self.arena.add(message.regions, fds)
            return message
        finally:
            close_fds(fds)

    def receive(self) -> bool:
        """Read the session socket, without waiting. False when the session is over.

        Raises ProtocolError, ArenaError, OSError when what came cannot be used.
        """
        while True:
            try:
                message = self._read_packet()
            except BlockingIOError:
                return True
            if message is None or isinstance(message, Refused):
                return False

    def call(self, request_type: type[Request[R]], timeout_s: float | None = None, **fields: Any) -> R:
        """One request and its reply. Raises as `Channels.wait`, and reports trouble to the owner."""
        return uninterrupted(lambda: self.wait(self.post(request_type, timeout_s, **fields)))

    def post(self, request_type: type[Request[R]], timeout_s: float | None = None, **fields: Any) -> Pending[R]:
        """Send a request whose reply is taken later, with `wait` (or never: `abandon`)."""
        if self._paused and self._prober != threading.get_ident():
            raise DaemonUnavailable("the daemon did not answer, and is being probed")
        try:
            return self._channels.post(request_type, timeout_s or self.timeout_s, **fields)
        except TierCacheError as error:
            self._blame(error)
            raise

    def wait(self, pending: Pending[R]) -> R:
        """The reply to a posted request. Raises as `call` does."""
        try:
            return self._channels.wait(pending)
        except TierCacheError as error:
            self._blame(error)
            raise

    def abandon(self, pending: Pending[Any] | None) -> None:
        """Stop waiting for it; a lease that it may grant is given back."""
        if pending is not None:
            self._channels.abandon(pending)
            self._owner.wake()

    def pause(self) -> None:
        """Refuse calls at once, except from the thread that is `probing`. New sessions are paused."""
        self._paused = True

    def resume(self) -> None:
        """Let calls through."""
        self._paused = False

    @contextlib.contextmanager
    def probing(self) -> Iterator[None]:
        """Calls of this thread go through although the session is paused."""
        self._prober = self._channels.attendant = threading.get_ident()
        try:
            yield
        finally:
            self._prober = None

    def pipeline(self, orders: Iterable[Order], on_reply: Callable[[int, Any, bytes | None], None]) -> None:
        """Many requests, several in flight; see `Channels.pipeline`."""
        if self._paused:
            raise DaemonUnavailable("the daemon did not answer, and is being probed")
        try:
            self._channels.pipeline(orders, on_reply, self.timeout_s)
        except TierCacheError as error:
            self._blame(error)
            raise

    def _blame(self, error: TierCacheError) -> None:
        if isinstance(error, RequestRefused):
            if error.code in SESSION_OVER_CODES:
                self._owner.session_failed(self, str(error), True)
                raise DaemonUnavailable(f"the daemon does not know this session: {error.text}") from error
            if error.code == ErrorCode.EXPIRED.value:
                # We have waited for the answer, so it was in time: the daemon is wrong about our clock.
                self._clock_differs = True
                self._owner.wake()
        elif isinstance(error, ProtocolError):
            self._owner.session_failed(self, str(error), True)
        elif isinstance(error, DaemonUnavailable):
            self._owner.session_failed(self, str(error), False)

    def namespace_id(self, spec: NamespaceSpec, timeout_s: float | None = None, *, direct: bool = False) -> int:
        """The small integer of `spec` in this session; asks the daemon only the first time.

        With `direct` the daemon is told that we want to read such blocks on NVMe ourselves.
        """
        known = self._namespaces.get(id(spec))
        if known is None or (direct and id(spec) not in self._direct):
            namespace_id = self.call(RegisterNamespace, timeout_s, spec=spec, direct=direct).namespace
            if direct:
                self._direct.add(id(spec))
            # Specs cannot be hashed, and fingerprints cost as much as a request; the reference to the spec keeps its id
            # from being reused.
            self._namespaces[id(spec)] = known = (spec, namespace_id)
        return known[1]

    def give_back(self, request_type: type[AnyRequest], **fields: Any) -> None:
        """Send this `Release` or `Abort` once the daemon answers: the lease could not be ended in time.

        An `Abort` may go out in a later session with the same life of the daemon.
        """
        if len(self._owner.errands) < MAX_GIVE_BACK:
            self._owner.errands.append((self.generation, self.welcome.session, request_type, fields))
            self._owner.wake()

    def _on_late(self, reply: Reply) -> None:
        if isinstance(reply, Matched) and reply.lease != NO_LEASE:
            self.give_back(Release, lease=reply.lease)
        elif isinstance(reply, (Reserved, ReservedExtents)) and reply.lease != NO_LEASE:
            self.give_back(Abort, lease=reply.lease, finished=True)

    def tidy(self) -> bool:
        """`settle`, and report. Called by one thread; returns and raises like `settle`."""
        self._channels.attendant = threading.get_ident()
        waiting = self.settle()
        self._report()
        self._keep_alive()
        return waiting

    def settle(self) -> bool:
        """Read late replies, run errands. Called by one thread.

        True when there is more to do soon: late replies are still awaited. Raises as `call` does.
        """
        if self._clock_differs:
            self._tell_clock()
        waiting = self._channels.collect_late()
        while self._owner.errands:
            generation, session, request_type, fields = self._owner.errands[0]
            # Read leases have ended with their session; frames that were written to wait for this message.
            alive = session == self.welcome.session or (request_type is Abort and generation == self.generation)
            try:
                if alive:
                    self.call(request_type, **fields)
            except RequestRefused as error:
                if error.code in ASK_AGAIN_CODES:
                    return True
                logger.debug("the daemon would not take back %s: %s", fields, error)
            self._owner.errands.popleft()
        return waiting

    def _keep_alive(self) -> None:
        """Ping now and then: a daemon on another host cannot learn otherwise that we live, and what our clock shows."""
        if self._remote and time.monotonic() > self._asked_s + KEEP_ALIVE_S:
            self._tell_clock()
            self._asked_s = time.monotonic()

    def _tell_clock(self) -> None:
        """Have the daemon use our present clock for deadlines: one of the two may have stood still."""
        self.call(Ping, clock_us=time.monotonic_ns() // 1000)
        self._clock_differs = False

    def _report(self) -> None:
        """Report how the arena is held here, and the models; now and then the counters."""
        registration, models = self.arena.registration if self.arena is not None else "none", self._owner.report.models
        now_s = time.monotonic()
        if (registration, models) == self._reported[:2] and now_s < self._report_due_s:
            return
        self._report_due_s = now_s + REPORT_S
        report = (registration, models, self._owner.report.counters())
        if report != self._reported:
            try:
                self.call(Report, registration=registration, models=models, counters=report[2])
            except RequestRefused as error:
                if error.code == ErrorCode.EXPIRED.value:
                    raise
                logger.warning("the daemon takes no note of what this client reports: %s", error)
            self._reported = report

    def _arena_is_ready(self, registration: str) -> None:
        logger.debug("the arena is mapped and populated: %s", registration)
        self._owner.wake()

    def end(self) -> None:
        """Close the sockets; the arena is unmapped after the last copy. Idempotent."""
        self._channels.close()
        self._close_sockets()
        if self.arena is not None:
            self.arena.end()

    def forget_in_child(self) -> None:
        """After a fork, in the child: close the session socket, else the daemon would not see the parent die.

        Channels and arena handle the fork by themselves.
        """
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._sock.close()
        if self._far is not None:
            self._far.close()
