"""Slices: work too long for one go of the event loop, written as a generator that yields now and then.

    reply = yield from self._find(...)      in a method that answers in slices: the loop serves others at each `yield`
    reply = finish(self._find(...))         all at once, where it is known to be short

State may change between two slices: code that yields must look again, or have pinned what it uses.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]

LOOKUPS = 2048
"""Keys looked up in one slice, about a millisecond."""
PINS = 512
"""Blocks pinned, touched or unpinned in one slice: about a millisecond too."""


class AnswerNow(Exception):
    """Thrown into the steps of a request that may not wait: they answer if their work is done, or let this through."""


def finish(steps: Steps[T]) -> T:
    """Run all of it now."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def noted(steps: Steps[T]) -> Steps[tuple[T, bool]]:
    """The same, and whether the loop served others meanwhile."""
    yielded = False
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, yielded
        yielded = True
        yield


class Slices:
    """Work in progress, one slice of each in turn. Event loop only."""

    def __init__(self) -> None:
        self._under_way: deque[Steps[None]] = deque()

    def __len__(self) -> int:
        return len(self._under_way)

    def add(self, steps: Steps[None]) -> None:
        """Add work; it begins with its next turn."""
        self._under_way.append(steps)

    def begin(self, steps: Steps[None]) -> None:
        """Run the first slice now, nearly always all of the work, and the rest in turn."""
        try:
            next(steps)
        except StopIteration:
            return
        self.add(steps)

    def work(self) -> bool:
        """Run one slice; True while there is more."""
        if self._under_way:
            steps = self._under_way.popleft()
            try:
                next(steps)
            except StopIteration:
                return bool(self._under_way)
            self._under_way.append(steps)
        return bool(self._under_way)


class CpuLimit:
    """Runs out once the calling thread has used `limit_ns` of CPU time since it was made; `math.inf`: never."""

    __slots__ = ("_cpu_end_ns", "_wall_end_ns")

    def __init__(self, limit_ns: float) -> None:
        self._wall_end_ns = time.perf_counter_ns() + limit_ns
        self._cpu_end_ns = time.thread_time_ns() + limit_ns

    @property
    def over(self) -> bool:
        """True if it has run out. For the thread that made it."""
        if time.perf_counter_ns() < self._wall_end_ns:
            return False
        left_ns = self._cpu_end_ns - time.thread_time_ns()
        self._wall_end_ns = time.perf_counter_ns() + left_ns
        return left_ns <= 0
