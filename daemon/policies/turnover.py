"""The clock that policies go by: seconds, counted in the time that the cache takes to turn over.

A cache that is used a hundred times as fast gives up its blocks a hundred times as soon. By this clock it is the same
cache, so all that a policy has learnt, and every decision, is the same. But from one minute to the next it goes as
clocks do: who comes back does so after a while, and not after so many blocks of others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

PACE_OVER = 4
"""The pace is that of so many turnovers."""
PACE_CHANGES = 64.0
"""And is taken anew when it has become so many times faster or slower. Not sooner: what was learnt is told in the pace
before, and ages are told apart well enough at this one."""


class Turnover:
    """One for all tiers of a daemon. Event loop only; O(1)."""

    __slots__ = (
        "_at", "_came_bytes", "_clock_s", "_from", "_per_s", "_room_bytes", "_since", "_since_s", "_whole",
        "room_bytes", "stored_bytes", "storing", "turned",
    )  # fmt: skip

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self.turned = 0.0
        """What has come into DRAM, stored or brought up, in units of the room that there is."""
        self.stored_bytes = 0
        """What clients have stored."""
        self.storing = False
        """Whether a client's store is being published: what is inserted then is its."""
        self.room_bytes: Callable[[], int] = lambda: 1
        """What DRAM has room for."""
        self._room_bytes, self._from, self._came_bytes = 0, 0.0, 0  # the room, and from when on it is as large
        self._per_s = 0.0  # how fast this clock goes; 0: with `turned`
        self._at, self._since_s, self._since = 0.0, 0.0, 0.0  # what it showed, at what time, when so much had come
        self._whole = deque([(clock_s(), 0.0)], maxlen=PACE_OVER + 1)  # of each turnover, when it was over

    @property
    def now(self) -> float:
        """The time by this clock, in turnovers at the pace of the cache."""
        if self._per_s:
            return self._at + (self._clock_s() - self._since_s) * self._per_s
        return self._at + self.turned - self._since

    def comes(self, size_bytes: int, stored: bool) -> None:
        """So much comes into DRAM, `stored` by a client; it is inserted before `came`."""
        room_bytes = self.room_bytes()
        if room_bytes != self._room_bytes:
            self._room_bytes, self._from, self._came_bytes = room_bytes, self.turned, 0
        self._came_bytes += size_bytes
        # Not added up: a run is as far as its blocks one by one.
        turned = self._from + self._came_bytes / max(1, room_bytes)
        if turned >= self._whole[-1][1] + 1.0:
            self._turn_over(turned)
        self.turned = turned
        if stored:
            self.stored_bytes += size_bytes
            self.storing = True

    def came(self) -> None:
        """What is inserted from here on is no store of a client's."""
        self.storing = False

    def per_s(self) -> float:
        """The pace: how far this clock goes in a second."""
        return self._per_s or self.turned / max(self._clock_s() - self._whole[0][0], 1e-3)

    def _turn_over(self, turned: float) -> None:
        """Another turnover is over: see whether the pace has changed."""
        now_s = self._clock_s()
        self._whole.append((now_s, turned))
        first_s, first = self._whole[0]
        # In no time at all the clock goes on with what comes.
        pace = (turned - first) / (now_s - first_s) if now_s > first_s else 0.0
        if not self._per_s / PACE_CHANGES <= pace <= self._per_s * PACE_CHANGES:
            self._at, self._since_s, self._since = self.now, now_s, self.turned
            self._per_s = pace
