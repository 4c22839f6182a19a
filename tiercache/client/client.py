"""A client of the daemon: one session at a time, and how it behaves when the daemon fails.

    UP    calls go through; each has a deadline
    DOWN  every call raises DaemonUnavailable at once, within microseconds

A missed deadline, an end of file on the session socket or a refused session bring the client DOWN. A background thread
then probes, with back-off and jitter, and brings it UP after three good pings. A daemon that was only slow keeps its
session; after a restart the client opens a new session with a new mapping of the arena. The same thread maps regions
that become ready, renews leases that are held for long, and gives back what was granted too late for its caller.

What belongs to one life of the daemon is in `tiercache.client.session`.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from tiercache.client.channel import ANSWERS
from tiercache.client.leases import Leases
from tiercache.client.session import Errands, Session
from tiercache.config.daemon_config import session_socket_path
from tiercache.errors import (
    ArenaError,
    ConfigError,
    DaemonUnavailable,
    DeadlineExceeded,
    ProtocolError,
    RequestRefused,
    TierCacheError,
)
from tiercache.ground import forks
from tiercache.protocol import messages
from tiercache.protocol.curve import find_remote, is_remote, public_part
from tiercache.protocol.messages import (
    AnyReply,
    Bye,
    Done,
    Flush,
    Flushed,
    Ping,
    Request,
    Stats,
    StatsReply,
)
from tiercache.protocol.namespaces import NamespaceSpec

REQUEST_TIMEOUT_S = 0.5
BACK_OFF_FIRST_S = 0.05
BACK_OFF_LAST_S = 2.0
GOOD_PINGS = 3
STEADY_S = 10.0
"""After UP for this long the next back-off is short again: the client does not flap with a daemon that is too slow."""
CLOSE_S = 2.0
LINGER_S = 60.0
"""A session outlives `close` for at most so long: while copies run, or the daemon cannot be told of their end."""
TIDY_S = 0.02
BYE_S = 0.2
RAMP_S = 1.0
_CHANCE = random.Random()
"""Our own generator: a program that seeded the process's one expects no other draws from it."""

logger = logging.getLogger("tiercache.client")


class Client:
    """A client of one daemon, for as long as the process likes. Thread-safe. Close it when done.

    After a fork the child's copy is unusable and says so; connect anew there.
    """

    def __init__(
        self,
        address: str | Path,
        *,
        name: str = "",
        instance: bytes | None = None,
        map_arena: bool = True,
        cuda: bool = False,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        """Make a client that is DOWN; `start` or `connect` bring it up. Arguments as for `connect`."""
        if instance is not None and len(instance) != messages.INSTANCE_BYTES:
            raise ValueError(f"an instance is {messages.INSTANCE_BYTES} random bytes, not {len(instance)}")
        if request_timeout_s <= 0:
            raise ValueError(f"request_timeout_s is {request_timeout_s}: must be more than 0")
        find_remote(address)  # a wrong address is reported here, not retried again and again
        self.address = public_part(address) if is_remote(address) else str(session_socket_path(address).parent)
        self._where = str(address)
        self.name = name
        self.instance = instance or os.urandom(messages.INSTANCE_BYTES)
        self.request_timeout_s = request_timeout_s
        self.times_up = 0
        self.times_down = 0
        self._map_arena = map_arena
        self._cuda = cuda
        self._lock = threading.RLock()  # a signal handler may close the client while this thread has it
        self._up: Session | None = None  # the session while UP
        self._session: Session | None = None  # also while DOWN, if it may come back
        self._errands: Errands = deque()
        self._reason = "it has not been reached yet"
        self._specs: dict[str, NamespaceSpec] = {}
        self._direct: set[str] = set()  # fingerprints of specs whose blocks we read on NVMe ourselves
        self.leases = Leases()
        """Leases of this client, and its loads and stores in progress."""
        self._back_off_s = BACK_OFF_FIRST_S
        self._up_since_s = 0.0
        self._closed = False
        self.forked = False
        """Whether this is a child's copy of its parent's client."""
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None
        self.counters: Callable[[], dict[str, int]] = dict
        """Counters that the owner of the client wants reported to the daemon."""
        self._models: list[messages.ModelCard] = []
        _clients.add(self)
        forks.watch(self, "_lock")

    @classmethod
    def connect(
        cls,
        address: str | Path,
        *,
        name: str = "",
        instance: bytes | None = None,
        map_arena: bool = True,
        cuda: bool = False,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        timeout_s: float = 5.0,
    ) -> Client:
        """A client that is UP. Blocks for at most about `timeout_s`.

        Args:
            address: the daemon's run directory, or `tcp://HOST:PORT?key=FILE` of one on another host.
            name: this client's name in the daemon's statistics.
            instance: 16 random bytes shared by all sessions of one engine; random by default.
            map_arena: False moves bytes through the control socket, 2 MiB at a time.
            cuda: register the mapped regions with CUDA, so that copies to a GPU are direct.
            request_timeout_s: deadline of one request; after a missed one the client is DOWN.
            timeout_s: deadline of connecting.

        Raises:
            DaemonUnavailable: no daemon answers at `address`.
            RequestRefused: the daemon refuses this client (version, limits).
        """
        client = cls(
            address,
            name=name,
            instance=instance,
            map_arena=map_arena,
            cuda=cuda,
            request_timeout_s=request_timeout_s,
        )
        try:
            client.start(timeout_s, required=True)
        except BaseException:
            client.close()
            raise
        return client

    def start(self, timeout_s: float, *, required: bool, warn: bool = True) -> None:
        """Try for `timeout_s` to come UP (once, if not `required`), then continue in the background.

        Without `warn` the caller reports that there is no daemon yet; `session` tells it why.
        """
        deadline_s = time.monotonic() + timeout_s
        while (error := self._try_to_come_up()) is not None and required:
            if isinstance(error, RequestRefused):
                raise error
            if time.monotonic() + self._back_off_s > deadline_s:
                start = "" if is_remote(self.address) else f" --run-dir {self.address}"
                raise DaemonUnavailable(
                    f"no tiercache daemon answers at {self.address}: {self._reason}; "
                    f"start one with `tiercache daemon{start or ' --listen'}`"
                )
            self._pause(self._next_back_off_s())
        if error is not None:
            self._complain(error, warn)
        self._thread = threading.Thread(target=self._watch, name="tiercache-client", daemon=True)
        self._thread.start()

    # --- what callers use ------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """True while UP."""
        return self._up is not None

    @property
    def wants_events(self) -> bool:
        """Whether the daemon publishes KV events; False when DOWN."""
        session = self._up
        return session is not None and session.welcome.kv_events

    def session(self) -> Session:
        """The session, while UP. Raises DaemonUnavailable at once when DOWN. Takes no lock."""
        session = self._up
        if session is None:
            raise DaemonUnavailable(f"the cache at {self.address} is unavailable: {self._reason}")
        return session

    def call(self, request_type: type[Request], *, timeout_s: float | None = None, **fields: Any) -> AnyReply:
        """Send one request and return its reply, for all requests without payload.

        Raises RequestRefused for an `Error` reply, DeadlineExceeded, DaemonUnavailable.
        """
        reply = self.session().call(request_type, ANSWERS[request_type], timeout_s, **fields)
        return cast(AnyReply, reply)

    def ping(self) -> float:
        """One round trip; returns seconds."""
        start_s = time.perf_counter()
        self.session().call(Ping, Done)
        return time.perf_counter() - start_s

    def stats(self, *, histograms: bool = False, hot_prefixes: int = 0) -> dict[str, Any]:
        """The daemon's statistics; `daemon/MONITORING.md` explains them, and what each argument adds."""
        return self.session().call(Stats, StatsReply, histograms=histograms, hot_prefixes=hot_prefixes).stats

    def flush(self, *, tier: str = "all", namespaces: Sequence[NamespaceSpec] = (), key: bytes = b"") -> int:
        """Drop blocks of `namespaces` (none named: all): `key` with what follows it, or everything.

        Returns how many blocks were dropped.
        """
        session = self.session()
        numbers = [session.namespace_id(spec) for spec in namespaces]
        return session.call(Flush, Flushed, tier=tier, namespaces=numbers, key=key).blocks

    @property
    def warmth(self) -> float:
        """1 normally; rises from 0 to 1 in the first second after the daemon came back."""
        if self.times_up < 2:
            return 1.0
        return min(1.0, (time.monotonic() - self._up_since_s) / RAMP_S)

    def expect(self, spec: NamespaceSpec, *, direct: bool = False) -> None:
        """Register `spec` in every session as soon as it begins.

        With `direct` as one whose blocks this process reads on NVMe itself.
        """
        if problem := spec.problem():
            raise ConfigError(f"this namespace cannot be served: {problem}")
        self._specs[spec.fingerprint()] = spec
        if direct:
            self._direct.add(spec.fingerprint())

    def register(self, spec: NamespaceSpec) -> int:
        """The id of `spec` in the present session; it is registered again in every later one."""
        self.expect(spec)
        return self.session().namespace_id(spec)

    def announce(self, models: Sequence[messages.ModelCard]) -> None:
        """Announce the models of which this process stores blocks; replaces what was announced before.

        Sent in the background, and again in every later session. The daemon tells those who ask.
        """
        self._models = list(models)
        self._wake()

    def frame_address(self, frame: int, length: int) -> int:
        """The address of a frame in this process; waits, with a deadline, for its region to be mapped.

        Only valid while the session lives and a copy is announced (`ArenaMapping.begin_copy`). Raises ProtocolError for
        a frame outside its region, DeadlineExceeded, DaemonUnavailable.
        """
        arena = self.session().arena
        if arena is None:
            raise ArenaError("this client does not map the arena: it was connected with map_arena=False")
        return int(arena.addresses(messages.pack_frames([frame]), length, self.request_timeout_s)[0])

    def close(self) -> None:
        """End the session. Blocks for at most about 2 s. Idempotent.

        Loads and stores in progress begin no further copy. Copies that take longer than this end in the background, and
        the session after them, so that the daemon learns that their frames are free.
        """
        if self._closed or self.forked:
            return
        self._closed = True
        self._reason = "this client was closed"
        self._up = None
        self.leases.stop()
        self._wake()
        if self._thread is None:
            self._leave()  # it never came up, so nothing was granted
        elif self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- going down and coming up ------------------------------------------------------------------

    def _go_down(self, session: Session, reason: str, over: bool) -> None:
        """Leave UP. `over`: this session will never work again. Called in any thread."""
        with self._lock:
            if self.forked or self._session is not session:
                return
            was_up, self._up = self._up is session, None
            session.pause()
            if was_up:
                self._reason = reason
                self.times_down += 1
            if over:
                self._session = None
        if was_up and not self._closed:
            logger.warning("the cache at %s is down: %s; going on without it", self.address, reason)
        if over:
            session.end()
        self._wake()

    def _wake(self) -> None:
        """Wake the background thread."""
        with self._lock:
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def _try_to_come_up(self) -> Exception | None:
        """Connect if need be and ping three times. Returns why that failed, or None when UP."""
        session = self._session
        try:
            if session is None:
                session = self._open_session()
            with session.probing():
                self._prove(session)
        except (TierCacheError, OSError) as error:
            self._reason = str(error)
            if session is not None and not isinstance(error, DeadlineExceeded):
                self._go_down(session, str(error), True)
            return error
        with self._lock:
            if self._session is not session:
                return DaemonUnavailable(self._reason)
            session.resume()
            self._up = session
            if self._closed:  # perhaps by a signal handler, just before
                self._up = None
                return DaemonUnavailable(self._reason)
            self._up_since_s = time.monotonic()
        for said in [said for said in list(_complaints) if said[0] == self.address]:
            _complaints.pop(said, None)
        if self.times_up or self._thread is not None:
            logger.warning("the cache at %s is %s", self.address, "back" if self.times_up else "there")
        self.times_up += 1
        return None

    def _complain(self, error: Exception, warn: bool = True) -> None:
        """Log why it cannot come up, unless a client of this process has done so already."""
        told = object()
        if _complaints.setdefault((self.address, str(error)), told) is told and warn:
            what = "no daemon answers at %s yet" if _is_absence(error) else "the cache at %s cannot be used"
            logger.warning(what + ": %s; going on without it", self.address, error)

    def _open_session(self) -> Session:
        session = Session(
            self._where,
            self.name,
            self.instance,
            map_arena=self._map_arena,
            timeout_s=self.request_timeout_s,
            cuda=self._cuda,
        )
        session.on_trouble = self._go_down
        session.on_work = self._wake
        session.errands = self._errands
        session.counters = self.counters
        session.models = lambda: self._models
        with self._lock:
            self._session = session
        return session

    def _prove(self, session: Session) -> None:
        """Three good pings, and everything that must be in order before calls go through.

        Raises RequestRefused when the daemon refuses our blocks: then it is of no use as it is.
        """
        half_s = self.request_timeout_s / 2
        for _ in range(GOOD_PINGS):
            session.call(Ping, Done, half_s)
        if not session.receive():
            raise DaemonUnavailable("the daemon closed the session")
        for fingerprint, spec in list(self._specs.items()):
            session.namespace_id(spec, direct=fingerprint in self._direct)
        session.tidy()

    def _next_back_off_s(self) -> float:
        """The pause before the next probe: doubling, with jitter so that clients do not synchronize."""
        pause_s = self._back_off_s * _CHANCE.uniform(0.75, 1.25)
        self._back_off_s = min(self._back_off_s * 2, BACK_OFF_LAST_S)
        return pause_s

    # --- the background thread ---------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._serve()
        finally:
            self._take_leave()

    def _take_leave(self) -> None:
        """After `close`: finish what is in progress, tell the daemon so, and end the session."""
        deadline_s = time.monotonic() + LINGER_S
        while time.monotonic() < deadline_s:
            idle = self.leases.wait_idle(TIDY_S)
            told = idle and not self._errands
            try:
                if (session := self._session) is None:
                    if told:
                        break
                    if not idle:
                        continue
                    session = self._open_session()  # the session in which they began was lost meanwhile
                if self._say_good_bye(session, idle):
                    break
                if idle:
                    time.sleep(TIDY_S)  # late replies may still come
            except (TierCacheError, OSError) as error:
                logger.debug("good-bye could not be said: %s", error)
                if told or (self._session is None and not isinstance(error, DeadlineExceeded)):
                    break  # nothing that the daemon must know, or no daemon
                time.sleep(self._next_back_off_s())
        self._leave()

    def _leave(self) -> None:
        """Drop the session, and close the background thread's wake-up descriptor."""
        with self._lock:
            session, self._session = self._session, None
            # Cleared before it is closed: a signal handler in between would write to the number's next owner.
            wakeup, self._wakeup = self._wakeup, -1
            if wakeup >= 0:
                os.close(wakeup)
        if session is not None:
            session.end()

    def _say_good_bye(self, session: Session, idle: bool) -> bool:
        """Run the remaining errands, then end the session; False while anything is still in progress."""
        if not session.receive():
            self._go_down(session, "the daemon is gone", True)
            return False
        with session.probing():
            if session.settle() or not idle:
                return False
            session.call(Bye, Done, BYE_S)
        return True

    def _serve(self) -> None:
        pause_s = BACK_OFF_FIRST_S
        while not self._closed:
            session = self._up
            if session is None:
                self._pause(self._next_back_off_s())
                error = None if self._closed else self._try_to_come_up()
                if error is not None and not _is_absence(error):
                    self._complain(error)
                continue
            if time.monotonic() - self._up_since_s > STEADY_S:
                self._back_off_s = BACK_OFF_FIRST_S
            try:
                soon = session.tidy()
                self.leases.renew(session)
                self._wait(session, TIDY_S if soon else self.leases.until_next_renewal_s())
                pause_s = BACK_OFF_FIRST_S
            except TierCacheError as error:
                # `Session.call` has brought the client down if necessary; else this is retried later.
                logger.debug("background work for %s: %s", self.address, error)
                self._pause(pause_s * _CHANCE.uniform(0.75, 1.25))
                pause_s = min(pause_s * 2, BACK_OFF_LAST_S)

    def _pause(self, seconds: float) -> None:
        """Wait while DOWN; an end of file ends a session that was only slow."""
        deadline_s = time.monotonic() + seconds
        while not self._closed and (left_s := deadline_s - time.monotonic()) > 0:
            self._wait(self._session, left_s)

    def _wait(self, session: Session | None, seconds: float) -> None:
        """Wait for the session socket or a wake-up; read the socket."""
        if (wakeup := self._wakeup) < 0:
            return  # a signal handler has closed the client
        poll = select.poll()
        poll.register(wakeup, select.POLLIN)
        if session is not None:
            fd = session.fileno()
            if fd < 0:
                return
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(max(1, int(seconds * 1000)))}
        if wakeup in ready and self._wakeup == wakeup:
            try:
                os.eventfd_read(wakeup)
            except BlockingIOError:
                return  # another wait has read it
        if session is None or not ready - {wakeup}:
            return
        try:
            if not session.receive():
                self._go_down(session, "the daemon is gone (its session socket closed)", True)
        except (ProtocolError, ArenaError, OSError) as error:
            self._go_down(session, str(error), True)

    def forget_in_child(self) -> None:
        """In a forked child: the session, the thread and what it waits for are the parent's."""
        if self._closed:
            return
        self.forked = True
        self._reason = forks.FORKED
        self._session = self._up = None
        if self._wakeup >= 0:
            os.close(self._wakeup)
            self._wakeup = -1


def _is_absence(error: Exception) -> bool:
    """Whether no daemon answers; else there is one, which cannot be used as it is."""
    return isinstance(error, (DaemonUnavailable, OSError))


_complaints: dict[tuple[str, str], object] = {}
"""What has been logged in this process per address, until a client comes up there."""
_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def close_all_clients() -> None:
    """Close every client of this process, as at its exit."""
    for client in list(_clients):
        client.close()


atexit.register(close_all_clients)
