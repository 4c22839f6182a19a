"""One session with one life of the daemon: hello, the session socket, the arena's mapping, requests.

Leases, namespace ids and frames are only valid in the session that granted them, so their holder also holds its
`Session` and sends requests through it: a request can then never reach another life.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from tiercache.client.channel import ANSWERS, SESSION_OVER_CODES, Channels, Order, Pending, process_context
from tiercache.client.mapping import ArenaMapping
from tiercache.config.daemon_config import session_socket_path
from tiercache.errors import DaemonUnavailable, ProtocolError, RequestRefused, TierCacheError
from tiercache.ground import forks
from tiercache.ground.uninterrupted import uninterrupted
from tiercache.protocol import messages
from tiercache.protocol.curve import Remote, find_remote
from tiercache.protocol.messages import (
    NO_LEASE,
    Abort,
    AnyReply,
    Done,
    ErrorCode,
    Hello,
    Matched,
    ModelCard,
    Namespace,
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
    Welcome,
)
from tiercache.protocol.namespaces import NamespaceSpec
from tiercache.protocol.wire import UNREADABLE, close_fds, receive_packet, send_packet

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
Errands = deque[tuple[int, bytes, type[Request], dict[str, Any]]]
"""Requests that end leases, each with the life of the daemon and the session that granted the lease."""
_decode = msgspec.msgpack.Decoder(messages.SessionMessage).decode
_encode = msgspec.msgpack.Encoder().encode


class Session:
    """One session with one life of the daemon. Thread-safe.

    Attributes:
        generation: the daemon's life.
        arena: this process's mapping of its regions, or None for clients that do not map.
    """

    def __init__(
        self,
        address: str | Path,
        name: str,
        instance: bytes,
        *,
        map_arena: bool = True,
        timeout_s: float = 0.5,
        cuda: bool = False,
    ) -> None:
        """Say hello. Blocks for at most about `timeout_s`.

        Raises DaemonUnavailable, RequestRefused (version, limits), ProtocolError, ArenaError.
        """
        remote = find_remote(address)
        self.arena = ArenaMapping(self._arena_is_ready, cuda=cuda) if map_arena and remote is None else None
        hello = Hello(
            protocol_min=messages.OLDEST_PROTOCOL,
            protocol_max=messages.PROTOCOL,
            instance=instance,
            name=name[:MAX_NAME_CHARS],
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
            self.welcome = (
                self._say_hello(address, hello, timeout_s) if remote is None else greet(remote, hello, timeout_s)
            )
        except (OSError, TierCacheError) as error:
            self._close_sockets()
            if self.arena is not None:
                self.arena.end()
            if isinstance(error, OSError):
                raise DaemonUnavailable(_explain(error)) from error
            raise
        self._sock.setblocking(False)
        self.generation = self.welcome.generation
        self.timeout_s = timeout_s
        self._namespaces: dict[int, tuple[NamespaceSpec, int]] = {}
        self._direct: set[int] = set()
        self.on_trouble: Callable[[Session, str, bool], None] = lambda session, reason, over: None
        """Called with a failed request's session, the reason, and whether the session is over for good."""
        self.on_work: Callable[[], None] = lambda: None
        """Called when `tidy` has something to do."""
        self.counters: Callable[[], dict[str, int]] = dict
        """The counters of this process, for the daemon's statistics."""
        self.models: Callable[[], list[ModelCard]] = list
        """The model cards that this process announces."""
        self._prober: int | None = None
        self._paused = True
        self._reported: tuple[str, list[ModelCard], dict[str, int]] = ("none", [], {})
        self._report_due_s = 0.0
        self.errands: Errands = deque()
        """Queue of `give_back`; shared by the sessions of one client, so that a later one can run it."""
        self._remote = remote is not None
        self._asked_s = time.monotonic()
        self._clock_differs = False
        endpoint, keys = (self.welcome.control, None) if remote is None else remote
        self._channels = Channels(
            endpoint, self.welcome.session, self.generation, timeout_s, self._on_late, keys, self.welcome.connections
        )

    def _say_hello(self, address: str | Path, hello: Hello, timeout_s: float) -> Welcome:
        path = session_socket_path(address)
        check_owner(path.parent)
        self._sock.settimeout(timeout_s)
        self._sock.connect(str(path))
        # The daemon watches the pidfd: frames that we may still be writing to stay ours until we have exited.
        pidfd = os.pidfd_open(os.getpid())
        try:
            send_packet(self._sock, _encode(hello), [pidfd])
        except BrokenPipeError:
            pass  # refused unread: the reason waits to be read
        finally:
            os.close(pidfd)
        try:
            message = self._read_packet()
        except ConnectionResetError:
            message = self._read_packet()  # refused unread: the reason comes after the error
        if isinstance(message, Refused):
            raise RequestRefused(message.code, message.text)
        if not isinstance(message, Welcome):
            raise ProtocolError("the daemon did not answer the hello with a welcome")
        return message

    def fileno(self) -> int:
        """Descriptor of the session socket, to poll."""
        return self._sock.fileno()

    def _read_packet(self) -> Welcome | Refused | Regions | None:
        """Read one packet and map its regions. None is end of file."""
        data, fds = receive_packet(self._sock)
        try:
            if not data:
                return None
            try:
                message: Welcome | Refused | Regions = _decode(data)
            except UNREADABLE as error:
                raise ProtocolError(f"the daemon sent a packet that is no message: {error}") from error
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

    def call(self, request_type: type[Request], expect: type[R], timeout_s: float | None = None, **fields: Any) -> R:
        """One request and its reply. Raises as `Channels.call`, and reports trouble to `on_trouble`."""
        return uninterrupted(lambda: self.wait(self.post(request_type, expect, timeout_s, **fields)))

    def post(
        self, request_type: type[Request], expect: type[R], timeout_s: float | None = None, **fields: Any
    ) -> Pending[R]:
        """Send a request whose reply is taken later, with `wait` (or never: `abandon`)."""
        if self._paused and self._prober != threading.get_ident():
            raise DaemonUnavailable("the daemon did not answer, and is being probed")
        try:
            return self._channels.post(request_type, expect, timeout_s, **fields)
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
            self.on_work()

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

    def pipeline(
        self, orders: Iterable[Order], expect: type[R], on_reply: Callable[[int, R, bytes | None], None]
    ) -> None:
        """Many requests, several in flight; see `Channels.pipeline`."""
        if self._paused:
            raise DaemonUnavailable("the daemon did not answer, and is being probed")
        try:
            self._channels.pipeline(orders, expect, on_reply)
        except TierCacheError as error:
            self._blame(error)
            raise

    def _blame(self, error: TierCacheError) -> None:
        if isinstance(error, RequestRefused):
            if error.code in SESSION_OVER_CODES:
                self.on_trouble(self, str(error), True)
                raise DaemonUnavailable(f"the daemon does not know this session: {error.text}") from error
            if error.code == ErrorCode.EXPIRED.value:
                # We have waited for the answer, so it was in time: the daemon is wrong about our clock.
                self._clock_differs = True
                self.on_work()
        elif isinstance(error, ProtocolError):
            self.on_trouble(self, str(error), True)
        elif isinstance(error, DaemonUnavailable):
            self.on_trouble(self, str(error), False)

    def namespace_id(self, spec: NamespaceSpec, timeout_s: float | None = None, *, direct: bool = False) -> int:
        """The small integer of `spec` in this session; asks the daemon only the first time.

        With `direct` the daemon is told that we want to read such blocks on NVMe ourselves.
        """
        known = self._namespaces.get(id(spec))
        if known is None or (direct and id(spec) not in self._direct):
            number = self.call(RegisterNamespace, Namespace, timeout_s, spec=spec, direct=direct).namespace
            if direct:
                self._direct.add(id(spec))
            # Specs cannot be hashed, and fingerprints cost as much as a request; the reference to the spec keeps its id
            # from being reused.
            self._namespaces[id(spec)] = known = (spec, number)
        return known[1]

    def give_back(self, request_type: type[Request], **fields: Any) -> None:
        """Send this `Release` or `Abort` once the daemon answers: the lease could not be ended in time.

        An `Abort` may go out in a later session with the same life of the daemon.
        """
        if len(self.errands) < MAX_GIVE_BACK:
            self.errands.append((self.generation, self.welcome.session, request_type, fields))
            self.on_work()

    def _on_late(self, reply: AnyReply) -> None:
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
        while self.errands:
            generation, session, request_type, fields = self.errands[0]
            # Read leases have ended with their session; frames that were written to wait for this message.
            alive = session == self.welcome.session or (request_type is Abort and generation == self.generation)
            try:
                if alive:
                    self.call(request_type, ANSWERS[request_type], **fields)
            except RequestRefused as error:
                if error.code in ASK_AGAIN_CODES:
                    return True
                logger.debug("the daemon would not take back %s: %s", fields, error)
            self.errands.popleft()
        return waiting

    def _keep_alive(self) -> None:
        """Ping now and then: a daemon on another host cannot learn otherwise that we live, and what our clock shows."""
        if self._remote and time.monotonic() > self._asked_s + KEEP_ALIVE_S:
            self._tell_clock()
            self._asked_s = time.monotonic()

    def _tell_clock(self) -> None:
        """Have the daemon use our present clock for deadlines: one of the two may have stood still."""
        try:
            self.call(Ping, Done, clock_us=time.monotonic_ns() // 1000)
        except RequestRefused as error:
            if error.code != ErrorCode.EXPIRED.value:
                raise
            text = "it is wrong about our clock, and too old to be told: a new session"
            self.on_trouble(self, text, True)
            raise DaemonUnavailable(text) from error
        self._clock_differs = False

    def _report(self) -> None:
        """Report how the arena is held here, and the models; now and then the counters."""
        registration, models = self.arena.registration if self.arena is not None else "none", self.models()
        now_s = time.monotonic()
        if (registration, models) == self._reported[:2] and now_s < self._report_due_s:
            return
        self._report_due_s = now_s + REPORT_S
        report = (registration, models, self.counters())
        if report != self._reported:
            try:
                self.call(Report, Done, registration=registration, models=models, counters=report[2])
            except RequestRefused as error:
                if error.code == ErrorCode.EXPIRED.value:
                    raise
                logger.warning("the daemon takes no note of what this client reports: %s", error)
            self._reported = report

    def _arena_is_ready(self, registration: str) -> None:
        logger.debug("the arena is mapped and populated: %s", registration)
        self.on_work()

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


def greet(remote: Remote, hello: Hello, timeout_s: float) -> Welcome:
    """Say hello to a daemon on another host. Raises DaemonUnavailable, RequestRefused, ProtocolError."""
    text = f"nothing answers at {remote.endpoint}, or it has other keys, or it does not let ours in"
    context = process_context()
    with context.socket(zmq.DEALER) as sock:
        sock.set(zmq.LINGER, 0)
        sock.set(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
        remote.keys.secure(sock)
        try:
            sock.connect(remote.endpoint)
            sock.send(_encode(hello))
            if not sock.poll(max(1, int(timeout_s * 1000))):
                raise DaemonUnavailable(text)
            message = _decode(sock.recv())
        except zmq.ZMQError as error:
            raise DaemonUnavailable(f"{remote.endpoint}: {error}") from error
        except UNREADABLE as error:
            raise ProtocolError(f"the daemon answered the hello with something else: {error}") from error
    if isinstance(message, Refused):
        raise RequestRefused(message.code, message.text)
    if not isinstance(message, Welcome):
        raise ProtocolError("the daemon did not answer the hello with a welcome")
    return message


def check_owner(run_dir: Path) -> None:
    """Refuse a run directory of another user in a folder such as /tmp (sticky), where any user could have made it.

    A daemon there would receive all blocks and could return anything. Raises DaemonUnavailable; a client of root may
    use any directory. OSError where there is no such directory.
    """
    owner, user = os.lstat(run_dir).st_uid, os.geteuid()
    shared = stat.S_IWOTH | stat.S_ISVTX
    if user != 0 and owner not in (0, user) and os.stat(run_dir.parent).st_mode & shared == shared:
        text = f"{run_dir} belongs to user {owner}, and everybody can make directories there"
        raise DaemonUnavailable(f"{text}: it may be no daemon of ours; a shared one has its run_dir elsewhere")


def _explain(error: OSError) -> str:
    """Why a connection could not be made, for people."""
    if error.errno == errno.ENOENT:
        return "there is no session socket"
    if error.errno == errno.ECONNREFUSED:
        return "its process is gone"
    if isinstance(error, TimeoutError) or error.errno == errno.EAGAIN:
        return "it does not answer the hello"
    return str(error)
