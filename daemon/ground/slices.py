"""Work that is too long for one go of the loop: written as a generator that yields now and then, and done in slices.

    reply = yield from self._find(...)      in a method that answers in slices: others are served at each `yield`
    reply = finish(self._find(...))         all at once, where it is known to be short

What a slice has seen may be otherwise in the next one; whoever yields looks again, or has pinned it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]

LOOKUPS = 2048
"""Keys looked up in one slice, about a millisecond."""
PINS = 512
"""Blocks pinned, touched or let go of in one slice: likewise."""


def finish(steps: Steps[T]) -> T:
    """Do all of it now."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def noted(steps: Steps[T]) -> Steps[tuple[T, bool]]:
    """The same, and whether others were served meanwhile."""
    yielded = False
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, yielded
        yielded = True
        yield


class Slices:
    """What is under way, each a slice in its turn. Event loop only."""

    def __init__(self) -> None:
        self._under_way: deque[Steps[None]] = deque()

    def __len__(self) -> int:
        return len(self._under_way)

    def add(self, steps: Steps[None]) -> None:
        """Something more to be done; it begins with its next turn."""
        self._under_way.append(steps)

    def begin(self, steps: Steps[None]) -> None:
        """The first slice of something now, nearly always all of it, and the rest in turn."""
        try:
            next(steps)
        except StopIteration:
            return
        self.add(steps)

    def work(self) -> bool:
        """One slice; True while there is more."""
        if self._under_way:
            steps = self._under_way.popleft()
            try:
                next(steps)
            except StopIteration:
                return bool(self._under_way)
            self._under_way.append(steps)
        return bool(self._under_way)
