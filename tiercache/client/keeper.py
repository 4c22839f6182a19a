"""Keeps one client's session with the daemon: UP, or coming back.

A missed deadline, an end of file on the session socket or a refused session bring the client DOWN. A background thread
then probes, with back-off and jitter, and brings it UP after three good pings. A daemon that was only slow keeps its
session; after a restart there is a new session with a new mapping of the arena. The same thread maps regions that
become ready, renews leases that are held for long, and gives back what was granted too late for its caller.
"""

from __future__ import annotations

import logging
import os
import random
import select
import threading
import time
from collections import deque

from tiercache.client.leases import Leases
from tiercache.client.self_report import SelfReport
from tiercache.client.session import Errands, Session, SessionSettings
from tiercache.errors import (
    ArenaError,
    DaemonUnavailable,
    DeadlineExceeded,
    ProtocolError,
    RequestRefused,
    TierCacheError,
)
from tiercache.ground import forks
from tiercache.protocol.curve import is_remote
from tiercache.protocol.messages import Bye, Ping
from tiercache.protocol.namespaces import NamespaceSpec

BACK_OFF_FIRST_S = 0.05
BACK_OFF_LAST_S = 2.0
GOOD_PINGS = 3
STEADY_S = 10.0
"""After UP for this long the next back-off is short again: the client does not flap with a daemon that is too slow."""
CLOSE_S = 2.0
LINGER_S = 60.0
"""A session outlives `close` by at most this time: while copies run, or the daemon cannot be told of their end."""
TIDY_S = 0.02
BYE_S = 0.2
_CHANCE = random.Random()
"""Our own generator: a program that seeded the process's one expects no other draws from it."""

logger = logging.getLogger("tiercache.client")


class Wakeup:
    """What one thread waits for beside a socket, and every other thread sets. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may set it while this thread has it
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        forks.watch(self, "_lock")

    def set(self) -> None:
        """End the present wait, or the next one."""
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def wait(self, fd: int | None, seconds: float) -> bool:
        """Wait until `fd` is readable, for `seconds` at most or until `set`; returns whether `fd` is.

        Returns at once when this is closed.
        """
        if (own := self._fd) < 0:
            return False
        poll = select.poll()
        poll.register(own, select.POLLIN)
        if fd is not None:
            poll.register(fd, select.POLLIN)
        ready = {readable for readable, _ in poll.poll(max(1, int(seconds * 1000)))}
        if own in ready and self._fd == own:
            try:
                os.eventfd_read(own)
            except BlockingIOError:
                return False  # another wait has read it
        return bool(ready - {own})

    def close(self) -> None:
        """Release the descriptor. Idempotent."""
        with self._lock:
            # Cleared before it is closed: a signal handler in between would write to the number's next owner.
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def forget_in_child(self) -> None:
        """After a fork, in the child: the counter is the parent's too."""
        self.close()


class SessionKeeper:
    """Opens, maintains and ends the sessions of one client, one at a time. Thread-safe.

    Args:
        settings: of each session.
        address: of the daemon, for people.

    Attributes:
        leases: of this client, and its loads and stores in progress.
        report: what each session tells the daemon of this process.
        errands: requests that end leases, once the daemon answers.
        forked: whether this is a child's copy of its parent's.
        up_since_s: when it last came UP, by `time.monotonic()`.
        times_up, times_down: how often it did.
    """

    def __init__(self, settings: SessionSettings, address: str) -> None:
        self.leases = Leases()
        self.report = SelfReport()
        self.errands: Errands = deque()
        self.forked = False
        self.up_since_s = 0.0
        self.times_up = 0
        self.times_down = 0
        self._settings = settings
        self._address = address
        self._lock = threading.RLock()  # a signal handler may close the client while this thread has it
        self._up: Session | None = None  # the session while UP
        self._session: Session | None = None  # also while DOWN, if it may come back
        self._reason = "it has not been reached yet"
        self._specs: dict[str, NamespaceSpec] = {}
        self._direct: set[str] = set()  # fingerprints of specs whose blocks we read on NVMe ourselves
        self._back_off_s = BACK_OFF_FIRST_S
        self._closed = False
        self._wakeup = Wakeup()
        self._thread: threading.Thread | None = None
        forks.watch(self, "_lock")

    def start(self, timeout_s: float, *, required: bool, warn: bool = True) -> None:
        """See `Client.start`."""
        deadline_s = time.monotonic() + timeout_s
        while (error := self._try_to_come_up()) is not None and required:
            if isinstance(error, RequestRefused):
                raise error
            if time.monotonic() + self._back_off_s > deadline_s:
                start = "" if is_remote(self._address) else f" --run-dir {self._address}"
                raise DaemonUnavailable(
                    f"no tiercache daemon answers at {self._address}: {self._reason}; "
                    f"start one with `tiercache daemon{start or ' --listen'}`"
                )
            self._pause(self._next_back_off_s())
        if error is not None:
            self._complain(error, warn)
        self._thread = threading.Thread(target=self._watch, name="tiercache-client", daemon=True)
        self._thread.start()

    # --- the session ---------------------------------------------------------------------------------

    @property
    def up(self) -> Session | None:
        """The session, while UP."""
        return self._up

    def session(self) -> Session:
        """The session. Raises DaemonUnavailable at once when DOWN. Takes no lock."""
        session = self._up
        if session is None:
            raise DaemonUnavailable(f"the cache at {self._address} is unavailable: {self._reason}")
        return session

    def expect(self, spec: NamespaceSpec, *, direct: bool) -> None:
        """See `Client.expect`."""
        self._specs[spec.fingerprint()] = spec
        if direct:
            self._direct.add(spec.fingerprint())

    def close(self) -> None:
        """See `Client.close`."""
        self.stop()
        if self._thread not in (None, threading.current_thread()) and not self.forked:
            self._thread.join(CLOSE_S)

    def stop(self) -> None:
        """As `close`, and never blocks: the background thread ends the session. A destructor may call it."""
        if self._closed or self.forked:
            return
        self._closed = True
        self._reason = "this client was closed"
        self._up = None
        self.leases.stop()
        self.wake()
        if self._thread is None:
            self._leave()  # it never came up, so nothing was granted

    # --- going down and coming up ------------------------------------------------------------------

    def session_failed(self, session: Session, reason: str, over: bool) -> None:
        """Leave UP, unless it is a former session. `over`: it will never work again. Called in any thread."""
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
            logger.warning("the cache at %s is down: %s; going on without it", self._address, reason)
        if over:
            session.end()
        self.wake()

    def wake(self) -> None:
        """Wake the background thread."""
        self._wakeup.set()

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
                self.session_failed(session, str(error), True)
            return error
        with self._lock:
            if self._session is not session:
                return DaemonUnavailable(self._reason)
            session.resume()
            self._up = session
            if self._closed:  # perhaps by a signal handler, just before
                self._up = None
                return DaemonUnavailable(self._reason)
            self.up_since_s = time.monotonic()
        for said in [said for said in list(_complaints) if said[0] == self._address]:
            _complaints.pop(said, None)
        if self.times_up or self._thread is not None:
            logger.warning("the cache at %s is %s", self._address, "back" if self.times_up else "there")
        self.times_up += 1
        return None

    def _complain(self, error: Exception, warn: bool = True) -> None:
        """Log why it cannot come up, unless a client of this process has done so already."""
        told = object()
        if _complaints.setdefault((self._address, str(error)), told) is told and warn:
            what = "no daemon answers at %s yet" if _is_absence(error) else "the cache at %s cannot be used"
            logger.warning(what + ": %s; going on without it", self._address, error)

    def _open_session(self) -> Session:
        session = Session(self._settings, self)
        with self._lock:
            self._session = session
        return session

    def _prove(self, session: Session) -> None:
        """Three good pings, and everything that must be in order before calls go through.

        Raises RequestRefused when the daemon refuses our blocks: then it is of no use as it is.
        """
        half_s = self._settings.request_timeout_s / 2
        for _ in range(GOOD_PINGS):
            session.call(Ping, half_s)
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
            told = idle and not self.errands
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
            self._wakeup.close()
        if session is not None:
            session.end()

    def _say_good_bye(self, session: Session, idle: bool) -> bool:
        """Run the remaining errands, then end the session; False while anything is still in progress."""
        if not session.receive():
            self.session_failed(session, "the daemon is gone", True)
            return False
        with session.probing():
            if session.settle() or not idle:
                return False
            session.call(Bye, BYE_S)
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
            if time.monotonic() - self.up_since_s > STEADY_S:
                self._back_off_s = BACK_OFF_FIRST_S
            try:
                soon = session.tidy()
                self.leases.renew(session)
                self._wait(session, TIDY_S if soon else self.leases.until_next_renewal_s())
                pause_s = BACK_OFF_FIRST_S
            except TierCacheError as error:
                # `Session.call` has brought the client down if necessary; else this is retried later.
                logger.debug("background work for %s: %s", self._address, error)
                self._pause(pause_s * _CHANCE.uniform(0.75, 1.25))
                pause_s = min(pause_s * 2, BACK_OFF_LAST_S)

    def _pause(self, seconds: float) -> None:
        """Wait while DOWN; an end of file ends a session that was only slow."""
        deadline_s = time.monotonic() + seconds
        while not self._closed and (left_s := deadline_s - time.monotonic()) > 0:
            self._wait(self._session, left_s)

    def _wait(self, session: Session | None, seconds: float) -> None:
        """Wait for the session socket or a wake-up; read the socket."""
        fd = None if session is None else session.fileno()
        if fd is not None and fd < 0:
            return
        if not self._wakeup.wait(fd, seconds) or session is None:
            return
        try:
            if not session.receive():
                self.session_failed(session, "the daemon is gone (its session socket closed)", True)
        except (ProtocolError, ArenaError, OSError) as error:
            self.session_failed(session, str(error), True)

    def forget_in_child(self) -> None:
        """In a forked child: the session, the thread and what it waits for are the parent's."""
        if self._closed:
            return
        self.forked = True
        self._reason = forks.FORKED
        self._session = self._up = None


def _is_absence(error: Exception) -> bool:
    """True if no daemon answers; else there is one, which cannot be used as it is."""
    return isinstance(error, (DaemonUnavailable, OSError))


_complaints: dict[tuple[str, str], object] = {}
"""What has been logged in this process per address, until a client comes up there."""
