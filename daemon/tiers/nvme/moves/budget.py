"""Write budget: how much may be written per day, and which blocks get it.

A token bucket that holds two hours' worth. While it is more than half full every new block is written; below that, only
blocks that were asked for again; when empty, none. So a small budget is spent on blocks of proven use, and a large one
does not lose the first reuse.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_DAY_S = 86_400.0
_DEPTH_S = 7_200.0


class WriteBudget:
    """`bytes_per_day` 0 means no limit. `clock_s` is monotonic seconds."""

    def __init__(self, bytes_per_day: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.bytes_per_day = bytes_per_day
        self._rate = bytes_per_day / _DAY_S
        self._depth = self._rate * _DEPTH_S
        self._clock_s = clock_s
        self._level = self._depth
        self._seen_s = clock_s()

    @property
    def fullness(self) -> float:
        """Share of the bucket that is left; 1 without a limit."""
        if not self.bytes_per_day:
            return 1.0
        now_s = self._clock_s()
        self._level = min(self._depth, self._level + (now_s - self._seen_s) * self._rate)
        self._seen_s = now_s
        return self._level / self._depth

    def admits(self, size_bytes: int, asked_again: bool, before_bytes: int = 0) -> bool:
        """True if a block of that size may be written; it is not charged yet. `before_bytes` are charged before it."""
        if not self.bytes_per_day:
            return True
        fullness = self.fullness - before_bytes / self._depth
        # A block larger than the whole bucket is written when that is full, and leaves it in debt.
        return self._level - before_bytes >= min(size_bytes, self._depth) and (asked_again or fullness > 0.5)

    def charge(self, size_bytes: int) -> None:
        """Charge bytes that go to the disk; a negative number gives back what was not written after all."""
        self._level -= size_bytes
