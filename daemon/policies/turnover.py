"""The clock of the policies: seconds, scaled by the time in which the cache turns over.

A cache that is used a hundred times as fast evicts its blocks a hundred times as soon. By this clock it is the same
cache, so everything that a policy has learnt, and every decision, is the same. From one minute to the next the clock
runs like a wall clock: a client returns after some time, not after some number of blocks of others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

PACE_OVER = 4
"""Turnovers over which the pace is averaged."""
PACE_CHANGES = 64.0
"""The pace is only updated when it has changed by this factor. Not sooner: what was learnt is expressed in the old
pace, and ages are told apart well enough at this one."""


class Turnover:
    """One for all tiers of a daemon. Event loop only; O(1)."""

    __slots__ = (
        "_at",
        "_came_bytes",
        "_clock_s",
        "_from",
        "_per_s",
        "_room_bytes",
        "_since",
        "_since_s",
        "_whole",
        "room_bytes",
        "stored_bytes",
        "turned",
    )

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self.turned = 0.0
        """Bytes that have come into DRAM, stored or promoted, over its capacity."""
        self.stored_bytes = 0
        """What clients have stored."""
        self.room_bytes: Callable[[], int] = lambda: 1
        """The capacity of DRAM."""
        self._room_bytes, self._from, self._came_bytes = 0, 0.0, 0  # capacity; `turned` at its last change; bytes
        self._per_s = 0.0  # pace of this clock; 0: it follows `turned`
        self._at, self._since_s, self._since = 0.0, 0.0, 0.0  # its reading at a time, and the amount stored by then
        self._whole = deque([(clock_s(), 0.0)], maxlen=PACE_OVER + 1)  # when each of the last turnovers ended

    @property
    def now(self) -> float:
        """The time by this clock, in turnovers at the present pace."""
        if self._per_s:
            return self._at + (self._clock_s() - self._since_s) * self._per_s
        return self._at + self.turned - self._since

    def comes(self, size_bytes: int, stored: bool) -> None:
        """Count bytes that come into DRAM, `stored` by a client or moved up. Call before they are inserted."""
        room_bytes = self.room_bytes()
        if room_bytes != self._room_bytes:
            self._room_bytes, self._from, self._came_bytes = room_bytes, self.turned, 0
        self._came_bytes += size_bytes
        # Not added up, so that a run counts as much as its blocks one by one.
        turned = self._from + self._came_bytes / max(1, room_bytes)
        if turned >= self._whole[-1][1] + 1.0:
            self._turn_over(turned)
        self.turned = turned
        if stored:
            self.stored_bytes += size_bytes

    def per_s(self) -> float:
        """The pace: how far this clock moves in a second."""
        return self._per_s or self.turned / max(self._clock_s() - self._whole[0][0], 1e-3)

    def _turn_over(self, turned: float) -> None:
        """A turnover has ended: see whether the pace has changed."""
        now_s = self._clock_s()
        self._whole.append((now_s, turned))
        first_s, first = self._whole[0]
        # If no time has passed the clock follows the bytes that come.
        pace = (turned - first) / (now_s - first_s) if now_s > first_s else 0.0
        if not self._per_s / PACE_CHANGES <= pace <= self._per_s * PACE_CHANGES:
            self._at, self._since_s, self._since = self.now, now_s, self.turned
            self._per_s = pace
