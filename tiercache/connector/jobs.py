"""Background work: transfers and their queue, and small tasks that the caller must not wait for."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tiercache.copies.pool import CopyLost, Limit
from tiercache.errors import DeadlineExceeded
from tiercache.ground import forks
from tiercache.ground.uninterrupted import uninterrupted

RESULT_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0

logger = logging.getLogger("tiercache.connector")
T = TypeVar("T")


class Transfer(Generic[T]):
    """A load or store in progress.

    The blocks that it names belong to it until `done()` is true: that is when its last copy has finished, whatever its
    result.

    Attributes:
        began_s, ended_s: when the work began and ended, by `time.monotonic()`; 0 before.
    """

    __slots__ = ("_done", "_limit", "_miss", "_result", "_run", "_skip", "_turns", "began_s", "ended_s")

    def __init__(self, run: Callable[[], T], skip: Callable[[], T], miss: T, limit: Limit) -> None:
        """`run` does the work; `skip` ends it unbegun; `miss` is its result when it fails."""
        self._run = run
        self._skip = skip
        self._miss = miss
        self._limit = limit
        self.began_s = self.ended_s = 0.0
        self._turns = [1]  # taking it means starting the work; taking is atomic
        self._done = threading.Event()
        self._result: T = miss

    @classmethod
    def finished(cls, result: T) -> Transfer[T]:
        """A transfer that was over before it began."""
        transfer = cls(lambda: result, lambda: result, result, Limit())
        transfer._turns.clear()
        transfer._done.set()
        return transfer

    def done(self) -> bool:
        """True when every copy has finished and the result is known. Never blocks."""
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until `done()`, for `timeout_s` at most; returns it."""
        return self._done.wait(timeout_s)

    def result(self, timeout_s: float = RESULT_TIMEOUT_S) -> T:
        """Wait for the result. Raises DeadlineExceeded after `timeout_s`; the transfer then goes on."""
        if not self.wait(timeout_s):
            raise DeadlineExceeded(f"the transfer is not done after {timeout_s:g} s")
        return self._result

    def cancel(self) -> None:
        """Begin no further copy. Copies in progress continue: wait for `done()` as before."""
        self._limit.stopped = True

    def void(self) -> None:
        """Cancel a store whose blocks are about to change: what is not committed yet never will be.

        So a block whose copy has not ended by now never becomes visible.
        """
        self._limit.annul()

    def perform(self) -> None:
        """Do the work, in the thread of a queue."""
        try:
            self._turns.pop()
        except IndexError:
            return
        self.began_s = time.monotonic()
        try:
            self._result = self._skip() if self._limit.stopped else self._run()
        except CopyLost as error:
            # Not done, and never will be: memory that a device may still write to is not given back.
            logger.error("a transfer is lost: %s", error)
            return
        except Exception:
            # The engine must go on after any error; the copies were over when it was raised.
            logger.exception("a transfer failed in a way that nobody foresaw")
        self.ended_s = time.monotonic()
        self._done.set()

    def forget_in_child(self) -> None:
        """After a fork, in the child: it is over here, as a miss. The copies were the parent's."""
        self._turns.clear()
        self._done = threading.Event()
        self._done.set()


class JobQueue:
    """One thread that runs transfers in order; the queue is bounded."""

    def __init__(self, name: str, capacity: int) -> None:
        self._name = name
        self._capacity = capacity
        self._jobs: deque[Transfer[Any]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._performing: Transfer[Any] | None = None
        self._closed = False
        forks.watch(self, "_changed")

    def submit(self, transfer: Transfer[Any]) -> bool:
        """Queue a transfer. False when the queue is full or closed, or has no thread and gets none."""
        # Uninterrupted: a signal handler that submits meanwhile would start a second thread. And not under the lock: a
        # handler that closes the queue waits for the thread, which needs the lock.
        if self._thread is None and not uninterrupted(self._start):
            return False
        with self._changed:
            if self._closed or len(self._jobs) >= self._capacity:
                return False
            self._jobs.append(transfer)
            self._changed.notify()
        return True

    def _start(self) -> bool:
        with self._changed:
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # too many threads in this process
                    return False
                self._thread = thread
        return True

    def __len__(self) -> int:
        """Transfers that have not begun."""
        return len(self._jobs)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._jobs:
                    if self._closed:
                        return
                    self._changed.wait(1.0)
                transfer = self._performing = self._jobs.popleft()
            transfer.perform()
            self._performing = None

    def close(self) -> None:
        """Cancel what is queued, and wait for what has begun, for at most 5 s."""
        with self._changed:
            self._closed = True
            for transfer in self._jobs:
                transfer.cancel()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def forget_in_child(self) -> None:
        """After a fork, in the child, where its thread does not exist: all submitted transfers are over."""
        self._closed = True
        for transfer in (*self._jobs, *filter(None, [self._performing])):
            transfer.forget_in_child()
        self._jobs.clear()


class Background:
    """One thread that runs small tasks in order, for one other thread.

    Most of a task's cost is to wake this thread, so it is woken once for many. An engine's scheduler can so hand over
    work within some microseconds.
    """

    def __init__(self, name: str) -> None:
        self._batch: list[Callable[[], object]] = []
        self._batches: queue.SimpleQueue[list[Callable[[], object]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._over = False
        forks.watch(self)

    def later(self, work: Callable[[], object]) -> None:
        """Queue work to be done after the next `begin`."""
        self._batch.append(work)

    def begin(self) -> None:
        """Start the queued work. After a fork there is no thread for it, and it is dropped."""
        if self._over:
            self._batch.clear()
        if self._batch:
            batch, self._batch = self._batch, []
            self._batches.put(batch)

    def begin_with(self, work: Callable[[], object]) -> None:
        """Have it done soon. For any thread."""
        self._batches.put([work])

    def finish(self, timeout_s: float) -> bool:
        """Wait until all queued work is done, for `timeout_s` at most; returns whether it is."""
        if not self._thread.is_alive():  # closed
            return not self._batch
        done = threading.Event()
        self.later(done.set)
        self.begin()
        return done.wait(timeout_s)

    def _run(self) -> None:
        while batch := self._batches.get():
            for work in batch:
                try:
                    work()
                except Exception:
                    # The engine must go on after any error.
                    logger.exception("work in the background failed in a way that nobody foresaw")

    def close(self) -> None:
        """Finish the remaining work, for at most 5 s."""
        self.begin()
        self._batches.put([])
        self._thread.join(CLOSE_TIMEOUT_S)

    def forget_in_child(self) -> None:
        """After a fork, in the child, where its thread does not exist."""
        self._over = True
        self._batches = queue.SimpleQueue()
