"""LRU by leaves: evicts the end of the chain that was least recently used."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence

from tiercache.daemon.index.policy import NO_ENTRY, Columns, Touch

from .rings import Rings

_BUCKET_SHIFT = 6


class LeafLRU:
    """LRU by leaves, with recency kept lazily.

    Only the deepest block of a match is stamped: the blocks before it cannot be evicted sooner anyway. A parent takes
    over its last child's stamp if that is later, so a candidate may come in with an old stamp. To keep that O(1),
    candidates hang in buckets of 64 consecutive stamps: exact between buckets, first-in-first-out within one, where a
    parent goes to the front because its chain is already being evicted from the end.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._rings = Rings(columns)
        self._order: list[int] = []

    def inserted(self, entry: int, stored: bool = False) -> None:
        columns = self._columns
        columns.clock += 1
        columns.stamp[entry] = columns.clock

    def inserted_run(self, entries: Sequence[int], stored: bool = False) -> None:
        columns = self._columns
        stamp = columns.stamp
        for clock, entry in enumerate(entries, columns.clock + 1):
            stamp[entry] = clock
        columns.clock += len(entries)

    def inserted_many(self, first: int, count: int) -> None:
        columns = self._columns
        columns.stamp[first : first + count] = array("q", range(columns.clock + 1, columns.clock + count + 1))
        columns.clock += count

    def touched(self, entry: int, how: Touch) -> None:
        candidate = self._columns.next[entry] != 0
        if candidate:
            self.remove(entry)
        self.inserted(entry)
        if candidate:
            self.add(entry)

    def add(self, entry: int) -> None:
        bucket = self._columns.stamp[entry] >> _BUCKET_SHIFT
        if self._rings.add(bucket, entry):
            self._push(bucket)

    def remove(self, entry: int) -> None:
        self._rings.remove(self._columns.stamp[entry] >> _BUCKET_SHIFT, entry)

    def follows(self, entry: int, child: int) -> bool:
        stamp = self._columns.stamp
        return stamp[entry] <= stamp[child]

    def replaced(self, entry: int, child: int) -> None:
        stamp = self._columns.stamp
        if stamp[entry] > stamp[child]:
            self.remove(child)
            self.add(entry)
            return
        stamp[entry] = stamp[child]
        self._rings.swap(stamp[child] >> _BUCKET_SHIFT, entry, child)

    def evicted(self, entry: int, parent: int) -> None:
        """Nothing to record: the parent has other children, and those are younger."""

    def _push(self, bucket: int) -> None:
        # Empty buckets leave their number behind. They are swept when most of the buckets are empty.
        heads = self._rings.heads
        if len(self._order) > 2 * len(heads) + 64:
            self._order = sorted(heads)
        else:
            heapq.heappush(self._order, bucket)

    def victim(self) -> int:
        order, heads = self._order, self._rings.heads
        while order:
            head = heads.get(order[0], NO_ENTRY)
            if head != NO_ENTRY:
                return head
            heapq.heappop(order)
        return NO_ENTRY

    def worth(self, entry: int) -> float:
        return 0.0

    def coldest_stamp(self) -> int | None:
        entry = self.victim()
        return None if entry == NO_ENTRY else self._columns.stamp[entry]
