"""Work in the background: transfers, and the queue that performs them and small tasks, in one thread."""

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

    def abandon(self) -> None:
        """Void it, and wait for a copy in progress, for 5 s at most: an exception keeps it from its caller.

        The blocks may then change: what it has read is never committed, and unless a copy hangs it writes no more.
        """
        self.void()
        if self.began_s:
            self.wait(CLOSE_TIMEOUT_S)

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
            logger.exception("a transfer failed unexpectedly")
        self.ended_s = time.monotonic()
        self._done.set()

    def forget_in_child(self) -> None:
        """After a fork, in the child: it is over here, as a miss. The copies were the parent's."""
        self._turns.clear()
        self._done = threading.Event()
        self._done.set()


class _Task:
    """Work without a result: done even when its queue is closed meanwhile, and dropped in a forked child."""

    __slots__ = ("_work",)

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def perform(self) -> None:
        try:
            self._work()
        except Exception:
            # The engine must go on after any error.
            logger.exception("work in the background failed unexpectedly")

    def cancel(self) -> None:
        """It is small."""

    def forget_in_child(self) -> None:
        """No thread waits for it."""


class JobQueue:
    """One thread that performs jobs in order: transfers, of which the queue takes a limited number, and small tasks.

    Most of a task's cost is to wake the thread, so tasks are collected by `later`, and `begin` wakes it once for all of
    them. An engine's scheduler can so hand over work within some microseconds. The thread starts with the first job.

    Args:
        name: of the thread.
        capacity: how many jobs may wait when a transfer is submitted; 0 for a queue of tasks.
    """

    def __init__(self, name: str, capacity: int = 0) -> None:
        self._name = name
        self._capacity = capacity
        self._lock = threading.RLock()  # a signal handler may submit while this thread has it
        self._jobs: deque[Transfer[Any] | _Task] = deque()
        self._performing: Transfer[Any] | _Task | None = None
        self._collected: list[_Task] = []
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        forks.watch(self, "_lock")

    def submit(self, transfer: Transfer[Any]) -> bool:
        """Queue a transfer. False when the queue is full or closed, or has no thread and gets none.

        An exception, such as a signal handler's, leaves no transfer behind that begins anything: its caller has none to
        wait for. For what it may have begun already, see `Transfer.abandon`.
        """
        if not self._has_thread():
            return False
        try:
            with self._lock:
                if self._closed or len(self._jobs) >= self._capacity:
                    return False
                self._jobs.append(transfer)
            self._wakeups.put(None)
            return True
        except BaseException:
            transfer.void()
            self._wakeups.put(None)  # it may be in the queue
            raise

    def later(self, work: Callable[[], object]) -> None:
        """Collect a task, to be done after the next `begin`. For one thread, which also calls `begin` and `finish`."""
        self._collected.append(_Task(work))

    def begin(self) -> None:
        """Start the collected tasks. A closed queue drops them."""
        if self._collected:
            collected, self._collected = self._collected, []
            self._hand_over(collected)

    def begin_with(self, work: Callable[[], object]) -> None:
        """Have a task done soon. For any thread."""
        self._hand_over([_Task(work)])

    def _hand_over(self, tasks: list[_Task]) -> None:
        if self._closed:
            return
        self._jobs.extend(tasks)
        if self._has_thread():  # else they wait for later ones, which may get one
            self._wakeups.put(None)

    def finish(self, timeout_s: float) -> bool:
        """Wait until all tasks are done, for `timeout_s` at most; returns whether they are."""
        if self._closed:
            return not self._collected and not self._jobs and self._performing is None
        done = threading.Event()
        self.later(done.set)
        self.begin()
        return done.wait(timeout_s)

    def _has_thread(self) -> bool:
        # Uninterrupted: a signal handler that submits meanwhile would start a second thread. And not under the lock: a
        # handler that closes the queue waits for the thread, which needs the lock.
        return self._thread is not None or uninterrupted(self._start)

    def _start(self) -> bool:
        with self._lock:
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # too many threads in this process
                    return False
                self._thread = thread
        return True

    def __len__(self) -> int:
        """Jobs that have not begun."""
        return len(self._jobs)

    def _work(self) -> None:
        while not self._closed or self._jobs:
            self._wakeups.get()
            while self._jobs:
                # Noted before it leaves the queue: a child that is forked in between must know of it.
                self._performing = self._jobs[0]
                self._jobs.popleft().perform()
                self._performing = None

    def close(self) -> None:
        """Cancel the transfers that wait, and finish the rest: tasks, and what has begun. Blocks for at most 5 s."""
        self.stop()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def stop(self) -> None:
        """As `close`, and never blocks: the thread ends by itself. A destructor may call it."""
        self.begin()
        with self._lock:
            self._closed = True
            for job in tuple(self._jobs):  # its thread takes from it meanwhile
                job.cancel()
        self._wakeups.put(None)

    def forget_in_child(self) -> None:
        """After a fork, in the child, where its thread does not exist: all jobs are over."""
        self._closed = True
        if self._performing is not None:
            self._performing.forget_in_child()
        for job in self._jobs:
            job.forget_in_child()
        self._performing = None
        self._jobs.clear()
        self._collected.clear()
        self._wakeups = queue.SimpleQueue()
