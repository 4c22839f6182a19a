"""W-TinyLFU: a newcomer stays if it was asked for more often than the next victim (Einziger et al., TOS 2017)."""

from __future__ import annotations

from collections.abc import Sequence

from policies.queues import Queues
from policies.sketch import Sketch
from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import NO_ENTRY, Touch

WINDOW, PROBATION, PROTECTED = 0, 1, 2
WINDOW_SHARE = 0.01
"""Of the capacity, for blocks that have just come."""
WINDOW_LEAST = 16
"""Blocks: a short prompt is not judged while it is still being written to the tier below."""
PROTECTED_SHARE = 0.8
"""Of the main part, for blocks that were used while in it."""
MOST_MOVES = 64
"""Blocks that change their queue at one eviction or use."""
_ROOMY = 0.75
"""Blocks leave the window without a contest while less than this share of the capacity is taken."""


class WTinyLFU:
    """A small window and a main part in two segments, each in LRU order.

    When room is needed and the window exceeds its share, its oldest block competes with the oldest of the main part:
    the one asked for less often, by the sketch, is evicted; on a tie the newcomer. New blocks enter the window after
    room was made, so the window holds its share plus the blocks of the last prompt.
    """

    def __init__(self, index: Index, sketch: Sketch) -> None:
        self._key = index.key
        self._sketch = sketch
        self._columns = index.columns
        self._queues = Queues(index, 3)
        self._contest = NO_ENTRY, NO_ENTRY
        """Loser in the main part, and winner: the winner is let in when the loser is evicted."""

    # --- what happens to blocks ------------------------------------------------------------------

    def inserted(self, entry: int, stored: bool = False) -> None:
        queues = self._queues
        queues.inserted(entry)
        if queues.live < _ROOMY * queues.capacity or not queues.capacity:
            for _ in range(2):
                oldest = queues.first(WINDOW)
                if oldest == NO_ENTRY or not self._over(queues.live):
                    break
                queues.lift(oldest, PROBATION)

    def inserted_run(self, entries: Sequence[int], stored: bool = False) -> None:
        for entry in entries:
            self.inserted(entry)

    def inserted_many(self, first: int, count: int) -> None:
        self._queues.inserted_many(first, count)

    def touched(self, entry: int, how: Touch) -> None:
        queues = self._queues
        if not how.counts or queues.of(entry) == WINDOW:
            queues.restamp(entry)
            return
        queues.lift(entry, PROTECTED)
        for _ in range(MOST_MOVES):
            main = queues.sizes[PROBATION] + queues.sizes[PROTECTED]
            oldest = queues.first(PROTECTED)
            if queues.sizes[PROTECTED] <= PROTECTED_SHARE * main or oldest in (entry, NO_ENTRY):
                break
            queues.lower(oldest, PROBATION)

    def _gone(self, entry: int) -> None:
        queues, (loser, winner) = self._queues, self._contest
        queues.left(entry)
        self._sketch.fit(int(queues.capacity))
        self._contest = NO_ENTRY, NO_ENTRY
        if entry == loser and self._columns.next[winner] and queues.of(winner) == WINDOW:
            queues.lift(winner, PROBATION)

    # --- candidates ------------------------------------------------------------------------------

    def add(self, entry: int) -> None:
        self._queues.add(entry)

    def remove(self, entry: int) -> None:
        self._queues.remove(entry)

    def follows(self, entry: int, child: int) -> bool:
        """Each block has a contest of its own."""
        return False

    def replaced(self, entry: int, child: int) -> None:
        self._gone(child)
        self._queues.replaced(entry, child)

    def evicted(self, entry: int, parent: int) -> None:
        self._gone(entry)

    # --- the next victim -------------------------------------------------------------------------

    def _over(self, blocks: float) -> bool:
        """Whether the window exceeds its share of so many blocks."""
        return self._queues.sizes[WINDOW] > max(WINDOW_LEAST, WINDOW_SHARE * blocks)

    def victim(self) -> int:
        queues = self._queues
        queues.recount()
        self._contest = NO_ENTRY, NO_ENTRY
        newest = queues.first(WINDOW)
        oldest = queues.first(PROBATION)
        if oldest == NO_ENTRY:
            oldest = queues.first(PROTECTED)
        if oldest == NO_ENTRY:
            return newest
        if newest != NO_ENTRY and self._over(max(queues.capacity, queues.live)):
            if self._frequency(newest) <= self._frequency(oldest):
                return newest
            self._contest = oldest, newest
        return oldest

    def _frequency(self, entry: int) -> int:
        return self._sketch.frequency(self._key[entry])

    def worth(self, entry: int) -> float:
        """How often it was asked for: one scale for all tiers, though not in hits per second."""
        return float(self._frequency(entry))

    def coldest_stamp(self) -> int | None:
        entry = self.victim()
        return None if entry == NO_ENTRY else self._columns.stamp[entry]
