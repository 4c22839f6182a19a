"""How far the cache has turned over: the clock that policies go by instead of the time of day.

A cache that is used a hundred times as fast gives up its blocks a hundred times as soon. By this clock it is the same
cache, so all that a policy has learnt, and every decision, is the same.
"""

from __future__ import annotations

from collections.abc import Callable

PACE_S = 60.0
"""The pace is that of the last minute or two."""


class Turnover:
    """One for all tiers of a daemon. Event loop only; O(1)."""

    __slots__ = (
        "_came_bytes", "_clock_s", "_from", "_marks", "_room_bytes", "now", "room_bytes", "stored_bytes", "storing",
    )  # fmt: skip

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self.now = 0.0
        """What has come into DRAM, stored or brought up, in units of the room that there is."""
        self.stored_bytes = 0
        """What clients have stored."""
        self.storing = False
        """Whether a client's store is being published: what is inserted then is its."""
        self.room_bytes: Callable[[], int] = lambda: 1
        """What DRAM has room for."""
        self._room_bytes, self._from, self._came_bytes = 0, 0.0, 0  # the room, and from when on it is as large
        self._marks = [(clock_s(), 0.0)] * 2

    def comes(self, size_bytes: int, stored: bool) -> None:
        """So much comes into DRAM, `stored` by a client; it is inserted before `came`."""
        room_bytes = self.room_bytes()
        if room_bytes != self._room_bytes:
            self._room_bytes, self._from, self._came_bytes = room_bytes, self.now, 0
        self._came_bytes += size_bytes
        # Not added up: a run is as far as its blocks one by one.
        self.now = self._from + self._came_bytes / max(1, room_bytes)
        if stored:
            self.stored_bytes += size_bytes
            self.storing = True

    def came(self) -> None:
        """What is inserted from here on is no store of a client's."""
        self.storing = False

    def per_s(self) -> float:
        """The pace: how far this clock goes in a second."""
        now_s = self._clock_s()
        if now_s - self._marks[1][0] > PACE_S:
            self._marks = [self._marks[1], (now_s, self.now)]
        since_s, since = self._marks[0]
        return (self.now - since) / max(now_s - since_s, 1e-3)
