"""ARC: ghost hits decide how recent and frequent blocks share the capacity (Megiddo and Modha, FAST 2003)."""

from __future__ import annotations

from collections.abc import Sequence

from policies.ghosts import Ghosts
from policies.queues import Queues
from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import NO_ENTRY, Touch

ONCE, AGAIN = 0, 1
"""The queues, T1 and T2 of the paper: blocks used once since they came, and blocks used again or returned."""


class ARC:
    """Two LRU queues, each with ghosts of the blocks it has evicted (B1 and B2).

    A block that comes back raises the share of the queue that had evicted it. As in the paper there are never more
    ghosts than blocks, nor more blocks used once, ghosts included. Two differences: room is made before the block to
    come is known, so a ghost that comes back at that very moment has no say; and only ends of chains are evicted.
    """

    def __init__(self, index: Index) -> None:
        self._key = index.key
        self._columns = index.columns
        self._queues = Queues(index, 2)
        self._lost = Ghosts(), Ghosts()
        self._share = 0.0  # p: the part of the capacity, in blocks, that is for those used once

    @property
    def ghosts(self) -> int:
        """How many evicted blocks are remembered as ghosts."""
        return len(self._lost[ONCE]) + len(self._lost[AGAIN])

    # --- what happens to blocks ------------------------------------------------------------------

    def inserted(self, entry: int, stored: bool = False) -> None:
        queues, lost, key = self._queues, self._lost, self._key[entry]
        queues.inserted(entry)
        once, again = len(lost[ONCE]), len(lost[AGAIN])
        if lost[ONCE].take(key):
            self._share = min(queues.capacity, self._share + max(1.0, again / once))
        elif lost[AGAIN].take(key):
            self._share = max(0.0, self._share - max(1.0, once / again))
        else:
            return
        queues.lift(entry, AGAIN)

    def inserted_run(self, entries: Sequence[int], stored: bool = False) -> None:
        for entry in entries:
            self.inserted(entry)

    def inserted_many(self, first: int, count: int) -> None:
        self._queues.inserted_many(first, count)

    def touched(self, entry: int, how: Touch) -> None:
        if how.counts:
            self._queues.lift(entry, AGAIN)
        else:
            self._queues.restamp(entry)

    def _gone(self, entry: int) -> None:
        queues, lost = self._queues, self._lost
        queues.left(entry)
        capacity = int(queues.capacity)
        if queues.of(entry) == ONCE:
            lost[ONCE].add(self._key[entry], capacity - queues.sizes[ONCE])
            lost[AGAIN].trim(capacity - len(lost[ONCE]))
        else:
            lost[AGAIN].add(self._key[entry], capacity - len(lost[ONCE]))

    # --- candidates ------------------------------------------------------------------------------

    def add(self, entry: int) -> None:
        self._queues.add(entry)

    def remove(self, entry: int) -> None:
        self._queues.remove(entry)

    def follows(self, entry: int, child: int) -> bool:
        queues = self._queues
        if not queues.follows(entry, child):
            return False
        if queues.of(entry) == ONCE and queues.sizes[ONCE] - 1 <= self._share and queues.first(AGAIN) != NO_ENTRY:
            return False
        self._gone(entry)
        return True

    def replaced(self, entry: int, child: int) -> None:
        self._gone(child)
        self._queues.replaced(entry, child)

    def evicted(self, entry: int, parent: int) -> None:
        self._gone(entry)

    # --- the next victim -------------------------------------------------------------------------

    def victim(self) -> int:
        queues = self._queues
        queues.recount()
        once, again = queues.first(ONCE), queues.first(AGAIN)
        if once != NO_ENTRY and (again == NO_ENTRY or queues.sizes[ONCE] > self._share):
            return once
        return again

    def worth(self, entry: int) -> float:
        return 0.0

    def coldest_stamp(self) -> int | None:
        entry = self.victim()
        return None if entry == NO_ENTRY else self._columns.stamp[entry]
