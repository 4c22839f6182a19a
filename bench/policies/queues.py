"""Several queues of blocks, one above the other: the common part of ARC, S3-FIFO and W-TinyLFU.

Each block is in one queue. The blocks before it in its prompt are in the same queue or a higher one, since they were
used whenever it was. Only candidates are kept in order; the other blocks are counted.
"""

from __future__ import annotations

from array import array

from tiercache.daemon.index.entries import Table
from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import MOVED, NO_ENTRY
from tiercache.daemon.policies.lru import LeafLRU

_SHRINK = 0.9995
"""Factor on the capacity at each eviction while fewer blocks are here than it says."""
_TABLES_AT_ONCE = 16


class Queues:
    """The queues of one policy, numbered from 0, the lowest. All O(1) amortised: a walk up a chain stops at blocks that
    are high enough already, and is paid for by what brought the others here.

    Order within a queue is by `Columns.stamp`, as in `LeafLRU`.
    """

    def __init__(self, index: Index, count: int) -> None:
        columns = self._columns = index.columns
        self._index = index
        self._queue = columns.integers("queue", "B")
        self._orders = [LeafLRU(columns) for _ in range(count)]
        self._tables: dict[int, Table] = {}
        self._rest = 0  # evictions until the next recount
        self.sizes = [0] * count
        """In blocks. Approximate after non-candidates were dropped: no policy is told of those."""
        self.live = 0
        self.capacity = 0.0
        """How many blocks there is room for: as many as were here at an eviction."""

    def of(self, entry: int) -> int:
        """The queue that a block is in."""
        return self._queue[entry]

    def first(self, queue: int) -> int:
        """The candidate that has waited longest in a queue, or NO_ENTRY."""
        return self._orders[queue].victim()

    # --- blocks come and go ----------------------------------------------------------------------

    def inserted(self, entry: int) -> None:
        """Add a new block to the lowest queue."""
        self._know(self._index.table[entry])
        self._orders[0].inserted(entry)
        self._queue[entry] = 0
        self.sizes[0] += 1
        self.live += 1

    def inserted_many(self, first: int, count: int) -> None:
        """As `inserted`, for the entries `first ..< first + count`."""
        if count:
            self._know(self._index.table[first])
        self._orders[0].inserted_many(first, count)
        self._queue[first : first + count] = array("B", bytes(count))
        self.sizes[0] += count
        self.live += count

    def left(self, entry: int) -> None:
        """The block is being evicted."""
        self.capacity = max(self.live, self.capacity * _SHRINK)
        queue = self._queue[entry]
        self.sizes[queue] = max(0, self.sizes[queue] - 1)
        self.live -= 1

    def _know(self, number: int) -> None:
        if number not in self._tables:
            self._tables[number] = self._index.tables[number]

    def recount(self) -> None:
        """Account for blocks that were dropped, as if they had come from all queues in proportion."""
        if self._rest:
            self._rest -= 1
            return
        self._rest = len(self._tables) // _TABLES_AT_ONCE
        live, told = sum(table.blocks for table in self._tables.values()), sum(self.sizes)
        if live == told:
            return
        if told:
            self.sizes = [size * live // told for size in self.sizes]
        self.sizes[0] += live - sum(self.sizes)
        self.live = live

    # --- up and down -----------------------------------------------------------------------------

    def restamp(self, entry: int) -> None:
        """Move a block to the end of its queue."""
        self._orders[self._queue[entry]].touched(entry, MOVED)

    def lift(self, entry: int, queue: int) -> None:
        """Move a block, and all blocks before it that are lower, to the end of a higher queue."""
        candidate = self._columns.next[entry] != 0
        if candidate:
            self.remove(entry)
        parent, its, sizes, at = self._index.parent, self._queue, self.sizes, entry
        while its[at] < queue and (above := parent[at]) != NO_ENTRY:
            sizes[its[at]] -= 1
            sizes[queue] += 1
            its[at] = queue
            at = above
        self._orders[queue].inserted(entry)
        if candidate:
            self.add(entry)

    def lower(self, entry: int, queue: int) -> None:
        """Move a candidate, and the blocks before it that have no other child, to the end of a lower queue."""
        self.remove(entry)
        parent, children, its, sizes, at = self._index.parent, self._index.children, self._queue, self.sizes, entry
        before = its[entry]
        while True:
            its[at] = queue
            sizes[before] -= 1
            sizes[queue] += 1
            at = parent[at]
            if children[at] != 1 or its[at] != before or parent[at] == NO_ENTRY:
                break
        self._orders[queue].inserted(entry)
        self.add(entry)

    # --- candidates ------------------------------------------------------------------------------

    def add(self, entry: int) -> None:
        self._orders[self._queue[entry]].add(entry)

    def remove(self, entry: int) -> None:
        self._orders[self._queue[entry]].remove(entry)

    def replaced(self, entry: int, child: int) -> None:
        """`entry` replaces `child` as a candidate: in the same queue, at its place."""
        queue = self._queue[entry]
        if queue == self._queue[child]:
            self._orders[queue].replaced(entry, child)
            return
        self.remove(child)
        stamp = self._columns.stamp
        stamp[entry] = max(stamp[entry], stamp[child])
        self.add(entry)

    def follows(self, entry: int, child: int) -> bool:
        """Whether `entry` would be first in its queue instead of `child`."""
        return self._queue[entry] == self._queue[child] and self._orders[self._queue[entry]].follows(entry, child)
