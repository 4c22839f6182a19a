"""Lines to the store: threads, each with a connection of its own, that do jobs one after another.

    loop ─ submit ─► queues by kind ─► thread: job.run(connection) ─► back on the loop: job.ended()

A thread never touches the daemon's state. A job holds what it needs, and what its `post` gives to the loop arrives in
order and before its end.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

from tiercache.daemon.tiers.shared.stores.store import Connection, SharedStore, StoreError, StoreProblem

log = logging.getLogger("tiercache.daemon")

DELIVER_S = 0.001
"""How long the event loop makes calls that the threads have posted, in one go. It finishes the call that has begun."""


ThreadsafeCall = Callable[[Callable[[], None]], object]


class LineUse(Enum):
    """What a line is for. A line does only jobs of the uses that it was made for."""

    LOOKUP = "lookup"
    FETCH = "fetch"
    WRITE = "write"


class JobOwner(Protocol):
    """The part of the tier that made a job."""

    def job_ended(self, job: Any) -> None:
        """Its job has ended; on the event loop."""


class SharedJob(ABC):
    """Work for a thread with a connection. Its owner is told when it has ended."""

    problem: StoreError | None = None
    """Why it failed."""
    idle = False
    """It ended without an answer of the store: that says nothing about the store."""

    def __init__(self, owner: JobOwner) -> None:
        self.owner = owner
        self.learned: dict[bytes, bytes] = {}
        """Notes that it has read, by their names."""
        self.given_up: Callable[[], bool] = lambda: False
        """Any thread: whether the store went away since the job was queued. Then it is not asked."""
        self.post: Callable[[Callable[[], None]], None] = lambda call: None
        """In `run`: have something called on the event loop."""

    @abstractmethod
    def run(self, connection: Connection) -> None:
        """Do it, on a thread; may raise StoreError."""

    def ended(self) -> None:
        """It has ended; on the event loop."""
        self.owner.job_ended(self)


class Lines:
    """The lines of one store. `uses`: for each line what it is for, the most urgent use first.

    `call_soon_threadsafe` is the event loop's.
    """

    def __init__(
        self,
        store: SharedStore,
        uses: list[tuple[LineUse, ...]],
        call_soon_threadsafe: ThreadsafeCall,
    ) -> None:
        self._store = store
        self._call_soon_threadsafe = call_soon_threadsafe
        self._queues: dict[LineUse, deque[SharedJob]] = {use: deque() for use in LineUse}
        self._changed = threading.Condition()
        self._stopping = False
        self._calls: deque[Callable[[], None]] = deque()
        self._scheduled = False
        self._lock = threading.Lock()
        self._running: dict[int, Connection] = {}
        self._threads = [
            threading.Thread(target=self._work, args=(number, use), name=f"shared {number}", daemon=True)
            for number, use in enumerate(uses)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Calls that the threads have posted and the loop has not made yet."""
        return len(self._calls)

    def submit(self, job: SharedJob, use: LineUse) -> None:
        """Queue a job. Event loop only."""
        job.post = self._post
        with self._changed:
            self._queues[use].append(job)
            self._changed.notify_all()

    def _work(self, number: int, uses: tuple[LineUse, ...]) -> None:
        connection = self._store.connect()
        self._running[number] = connection
        while (job := self._take(uses)) is not None:
            try:
                job.run(connection)
            except StoreError as error:
                job.problem = error.with_traceback(None)  # that would keep frames of the arena in use
            except BaseException:  # a panic of a native library is no Exception, and the job has to end
                log.exception("a job for the shared store failed")
                with contextlib.suppress(Exception):
                    connection.close()
                connection = self._running[number] = self._store.connect()
                job.problem = StoreError(StoreProblem.PROTOCOL, "a bug of ours: the daemon's log says where")
            self._post(job.ended)
            del job
        connection.close()

    def _take(self, uses: tuple[LineUse, ...]) -> SharedJob | None:
        with self._changed:
            while not self._stopping:
                for use in uses:
                    if self._queues[use]:
                        return self._queues[use].popleft()
                self._changed.wait()
        return None

    def _post(self, call: Callable[[], None]) -> None:
        with self._lock:
            self._calls.append(call)
            scheduled, self._scheduled = self._scheduled, True
        if not scheduled:
            try:
                self._call_soon_threadsafe(self.deliver)
            except RuntimeError:  # the loop is closed: the daemon has ended
                return

    def deliver(self) -> None:
        """Call what the threads have posted. Event loop only.

        A slice of it: much may have come while the loop was busy. The rest is called in the loop's next rounds.
        """
        until_s = time.monotonic() + DELIVER_S
        while True:
            with self._lock:
                if not self._calls:
                    self._scheduled = False
                    return
                call = self._calls.popleft()
            try:
                call()
            except Exception:
                log.exception("what a job for the shared store had found could not be taken in")
            if time.monotonic() >= until_s:
                break
        try:
            self._call_soon_threadsafe(self.deliver)
        except RuntimeError:
            return

    def stop(self, deadline_s: float) -> bool:
        """End the threads; calls under way are cut off. Whether all have ended by `deadline_s` (time.monotonic).

        Blocks until then; what was posted meanwhile is left for `deliver`. If not all have ended, something
        may still write to the frames of their fetches.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for connection in list(self._running.values()):
            connection.close()
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
