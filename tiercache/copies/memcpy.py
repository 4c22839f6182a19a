"""memcpy between addresses of this process; large copies use two threads.

One core does not always saturate memory. The second thread also keeps the second core awake: a daemon asleep there
would take longer to notice the end of the copy than the copy took.

Moves are cut in pieces, and both threads take the next piece until none is left. The caller's thread always takes part,
and waits for the other one only if that one has begun.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

from tiercache.ground import forks
from tiercache.ground.processors import usable_cores

Move = tuple[int, int, int]
"""Target address, source address, bytes."""

PIECE_BYTES = 1 << 20
"""A copy may exceed its limit by two pieces."""
SHARED_FROM_BYTES = 8 << 20
"""A smaller copy is over before another thread has woken up."""
memmove = ctypes.CDLL(None).memmove  # CDLL releases the interpreter's lock
memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
memmove.restype = None


def copy_moves(moves: Sequence[Move], reached: Callable[[], bool], *, shared: bool) -> int:
    """Make the moves in order until `reached()`; returns how many leading ones are complete.

    The first one is always made. With `shared` a second thread helps with a large copy. When this returns or raises, no
    copy is in progress.
    """
    if not shared or sum(length for _, _, length in moves) < SHARED_FROM_BYTES or not _second_core():
        for number, move in enumerate(moves):
            if number and reached():
                return number
            memmove(*move)
        return len(moves)
    job = _Job(moves, reached)
    _submit(job)
    return job.perform()


class _Job:
    """One copy, made by its caller and, if it comes in time, the helper."""

    def __init__(self, moves: Sequence[Move], reached: Callable[[], bool]) -> None:
        self._pieces = list(_pieces(moves))
        self._reached = reached
        self._places = itertools.count()  # next() of it is atomic: each position goes to one thread
        self._cut = [len(moves)]  # where threads stopped; moves before the first of these are complete
        self._stopped = False
        self._begun = threading.Lock()
        self._helped = threading.Lock()
        self._helped.acquire()

    def perform(self) -> int:
        """In the caller's thread: copy until all is done. Returns the number of complete moves."""
        try:
            self._work()
        except BaseException:
            self._stopped = True
            raise
        finally:
            if not self._begun.acquire(blocking=False):
                _await(self._helped)
        return min(self._cut)

    def help(self) -> None:
        """In the helper: take part, unless it is over."""
        if self._begun.acquire(blocking=False):
            try:
                self._work()
            finally:
                self._helped.release()

    def _work(self) -> None:
        pieces = self._pieces
        for place in self._places:
            if place >= len(pieces):
                return
            target, source, length, number = pieces[place]
            if self._stopped or (place and self._reached()):
                # All before it were taken by one of the two, and what is taken is copied.
                self._cut.append(number)
                return
            memmove(target, source, length)


def _pieces(moves: Sequence[Move]) -> Iterator[tuple[int, int, int, int]]:
    """Target, source, length, and number of the move, for each piece."""
    for number, (target, source, length) in enumerate(moves):
        for offset in range(0, length, PIECE_BYTES):
            yield target + offset, source + offset, min(PIECE_BYTES, length - offset), number


def _await(lock: threading.Lock) -> None:
    """Wait until a lock is free, even through a Ctrl-C: the copy must end before its caller may return."""
    try:
        with lock:
            return
    except BaseException:
        _await(lock)
        raise


# --- the helper: one thread for the process -------------------------------------------------------

_jobs: queue.SimpleQueue[_Job] | None = None
_start = threading.Lock()


def _second_core() -> bool:
    return usable_cores() > 1


def _submit(job: _Job) -> None:
    global _jobs
    if _jobs is None:
        with _start:
            if _jobs is None:
                jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
                try:
                    threading.Thread(target=_help, args=(jobs,), name="tiercache-copy", daemon=True).start()
                except RuntimeError:
                    return  # out of threads: the caller's does it all
                _jobs = jobs
    _jobs.put(job)


def _help(jobs: queue.SimpleQueue[_Job]) -> None:
    while True:
        jobs.get().help()


@forks.in_child
def _forget_helper() -> None:
    """The helper thread does not exist in a forked child."""
    global _jobs, _start
    _jobs, _start = None, threading.Lock()
