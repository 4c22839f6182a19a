"""Which of two ways to choose the next victim keeps the better blocks: seen from pairs of them.

Now and then both are asked. Each names the block that it would evict, which the other would keep. A block that is used
before a cache full has gone speaks for the way that wanted it kept, whether it was kept or not: so the one that has no
say is judged as well, and gets it when it has been better of late.
"""

from __future__ import annotations

from collections.abc import Iterable

MOST = 1024
"""Blocks that are waited for; the oldest are given up."""
MEMORY = 128
"""Uses: those that are as many ago weigh a third."""


class Duel:
    """Of a first and a second way, for one policy. O(1); event loop only."""

    __slots__ = ("_points", "second", "waiting")

    def __init__(self) -> None:
        self.second = False
        """Whether the second one has the say."""
        self.waiting: dict[bytes, tuple[bool, int]] = {}
        """Blocks by key: whether they speak for the second one, and until so many evictions."""
        self._points = [0.0, 0.0]

    def pair(self, first: Iterable[bytes], second: Iterable[bytes], evictions: int, until: int) -> None:
        """What the first one would evict next, in order, and what the second one would.

        A block is waited for once at a time: what the one without the say would have evicted is still there, and the
        next that it would evict is another.
        """
        waiting = self.waiting
        its = [
            next((key for key in keys if key not in waiting or waiting[key][1] < evictions), b"")
            for keys in (first, second)
        ]
        if all(its) and its[0] != its[1]:
            for key, speaks_for_second in zip(its, (True, False), strict=True):
                waiting.pop(key, None)
                waiting[key] = speaks_for_second, until
            while len(waiting) > MOST:
                del waiting[next(iter(waiting))]
        self.second = self._points[True] > self._points[False]

    def used(self, key: bytes, evictions: int) -> None:
        """One that was waited for is used, after so many evictions."""
        speaks_for_second, until = self.waiting.pop(key, (False, -1))
        if evictions > until:
            return
        points = self._points
        for number in (0, 1):
            points[number] = points[number] * (1.0 - 1.0 / MEMORY) + (number == speaks_for_second)
