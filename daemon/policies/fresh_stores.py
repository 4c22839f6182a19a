"""The window: fresh stores are kept from every policy, so that what was just stored is found.

A client that stores blocks means to load them, and no policy can know how soon. So a stored block stays until a tenth
of DRAM's capacity has been stored after it: until then no policy sees it in DRAM, unless the tier below has it, where
it is kept in the same way. If nothing else is left to evict, the oldest blocks of the window go all the same, so that
no store is refused for the sake of another.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import NO_ENTRY, Learner, Policy, Touch

from .rings import Rings
from .turnover import Turnover

SHARE = 0.1
"""Of DRAM's capacity."""
NEVER = -(1 << 62)
LET_OUT = 512
"""Blocks that leave the window with one store, about a millisecond: a large block may push out very many small ones."""
_RING = 0
_COLUMN = "stored"


def are_below(index: Index, entries: Iterable[int]) -> None:
    """The tier below has these blocks of DRAM now: they are found there even if DRAM evicts them."""
    stored_at, following = index.columns.integers(_COLUMN, "q"), index.columns.next
    for entry in entries:
        stored_at[entry] = NEVER
        if following[entry]:  # a candidate: sort it again
            index.pin(entry)
            index.unpin(entry)


class FreshStores:
    """A policy behind the window; see `Policy`.

    The candidates in the window are a queue. In DRAM a promoted block counts as stored when the block before it was, so
    no block is younger than those after it. In the tier below (`below`) each is as new as its own write.
    """

    def __init__(
        self, index: Index, inner: Policy, turnover: Turnover, learner: Learner | None = None, below: bool = False
    ) -> None:
        columns = self._columns = index.columns
        self.inner = inner
        self._index = index
        self._turnover = turnover
        self._learner = learner
        self._below = below
        self._let_out_until = NEVER
        self._may_leave = 0
        self._rings = Rings(columns)
        self._heads = self._rings.heads
        self._stored_at = columns.integers(_COLUMN, "q")
        """How much had been stored when the block was stored."""
        self._inside = columns.integers("inside", "B")
        self.follows = inner.follows
        self.worth = inner.worth

    def _until(self) -> int:
        """What was stored no later than this has left the window."""
        turnover = self._turnover
        return turnover.stored_bytes - int(SHARE * turnover.room_bytes())

    # --- what happens to blocks ------------------------------------------------------------------

    def inserted_run(self, entries: Sequence[int], stored: bool = False) -> None:
        self._let_out_old()
        stored_at, parent = self._stored_at, self._index.parent[entries[0]]
        at = self._turnover.stored_bytes if stored or self._below else stored_at[parent]
        for entry in entries:
            stored_at[entry] = at
        self.inner.inserted_run(entries, stored)
        if stored and self._learner is not None:
            key = self._index.key
            self._learner.stored(key[parent], [key[entry] for entry in entries])

    def inserted_many(self, first: int, count: int) -> None:
        self._stored_at[first : first + count] = array("q", [NEVER]) * count
        self.inner.inserted_many(first, count)

    def touched(self, entry: int, how: Touch) -> None:
        if not self._inside[entry]:
            self.inner.touched(entry, how)
            return
        # It keeps its place in the queue and is not a candidate of the inner policy.
        columns = self._columns
        place = columns.prev[entry], columns.next[entry]
        columns.prev[entry] = columns.next[entry] = 0
        self.inner.touched(entry, how)
        columns.prev[entry], columns.next[entry] = place

    def replaced(self, entry: int, child: int) -> None:
        if self._inside[child]:  # a hint lets it go early
            self._let_out(child)
        self.inner.replaced(entry, child)

    def evicted(self, entry: int, parent: int) -> None:
        self.inner.evicted(entry, parent)

    # --- candidates ------------------------------------------------------------------------------

    def add(self, entry: int) -> None:
        if self._stored_at[entry] > self._until():
            self._inside[entry] = 1
            self._rings.add(_RING, entry)
        else:
            self.inner.add(entry)

    def remove(self, entry: int) -> None:
        if self._inside[entry]:
            self._inside[entry] = 0
            self._rings.remove(_RING, entry)
        else:
            self.inner.remove(entry)

    def _let_out(self, entry: int) -> None:
        self._inside[entry] = 0
        self._rings.remove(_RING, entry)
        self.inner.add(entry)

    def _let_out_old(self) -> None:
        """Hand blocks that have left the window to the policy; of very many, a part with each store."""
        heads, stored_at, until = self._heads, self._stored_at, self._until()
        if until != self._let_out_until:
            self._let_out_until, self._may_leave = until, LET_OUT
        while heads and stored_at[heads[_RING]] <= until and self._may_leave:
            self._may_leave -= 1
            self._let_out(heads[_RING])

    # --- the next victim -------------------------------------------------------------------------

    def victim(self) -> int:
        self._let_out_old()
        entry = self.inner.victim()
        if entry == NO_ENTRY and self._heads:
            self._let_out(self._heads[_RING])
            entry = self.inner.victim()
        return entry

    def coldest_stamp(self) -> int | None:
        entry = self.victim()
        return None if entry == NO_ENTRY else self._columns.stamp[entry]
