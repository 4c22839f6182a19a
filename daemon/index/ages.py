"""Converts recency stamps into ages: keeps a few readings of the policy's clock beside the real time."""

from __future__ import annotations

from array import array
from bisect import bisect_left

STEP_S = 1.0
MAX_MOMENTS = 1024
"""Moments beyond which they are thinned out: the further back, the coarser."""
_ERROR = 1 / 32
"""Error that thinning may add, as a share of the age: 500 moments are then left for a year."""


class Ages:
    """Turns stamps of `policy.Columns.clock` into seconds. `note` is O(1), `age_s` O(log n)."""

    def __init__(self) -> None:
        self._stamps = array("q")
        self._times_s = array("d")

    def note(self, clock: int, now_s: float) -> None:
        """Record that the policy's clock stands at `clock` now; ignored when the last note is younger than a step."""
        if self._times_s and now_s - self._times_s[-1] < STEP_S:
            return
        if self._stamps and self._stamps[-1] == clock:
            return  # nothing was stored or found since: no stamp lies between the two
        self._stamps.append(clock)
        self._times_s.append(now_s)
        if len(self._stamps) >= MAX_MOMENTS:
            self._thin_out(now_s)

    def _thin_out(self, now_s: float) -> None:
        """Remove moments whose neighbours are close to each other for their age."""
        stamps, times_s = self._stamps[:1], self._times_s[:1]
        for place in range(1, len(self._times_s) - 1):
            if self._times_s[place + 1] - times_s[-1] > _ERROR * (now_s - self._times_s[place]):
                stamps.append(self._stamps[place])
                times_s.append(self._times_s[place])
        stamps.append(self._stamps[-1])
        times_s.append(self._times_s[-1])
        self._stamps, self._times_s = stamps, times_s

    def age_s(self, stamp: int, now_s: float) -> float:
        """How long ago the stamp was given; at most a step, or a thirtieth, too short."""
        place = bisect_left(self._stamps, stamp)
        at_s = self._times_s[place] if place < len(self._times_s) else now_s
        return max(0.0, now_s - at_s)
