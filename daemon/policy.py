"""Which block goes first when room is needed.

A policy only ever sees *candidates*: blocks with no child and no pin, so whatever it answers keeps
the index prefix-closed. There is one policy object per size class, all over the same columns.
"""

from __future__ import annotations

import heapq
from array import array
from typing import Protocol

NO_ENTRY = -1
"""In columns of entry ids: there is none."""

_BUCKET_SHIFT = 6


class Columns:
    """What policies keep per entry, by entry id; grown together with the index."""

    __slots__ = ("clock", "next", "prev", "stamp")

    def __init__(self) -> None:
        self.clock = 0
        self.stamp = array("q")
        self.prev = array("i")
        self.next = array("i")

    def grow(self, count: int) -> None:
        """Room for `count` more entries."""
        self.stamp.frombytes(bytes(8 * count))
        self.prev.frombytes(bytes(4 * count))
        self.next.frombytes(bytes(4 * count))


class Policy(Protocol):
    """The decisions of an eviction policy. All methods are called on the event loop: O(1), no blocking."""

    def inserted(self, entry: int) -> None:
        """A new block; it is not a candidate yet."""

    def inserted_many(self, first: int, count: int) -> None:
        """As `inserted`, for the entries `first ..< first + count` in turn."""

    def touched(self, entry: int) -> None:
        """A match ended at this block (its ancestors are not touched one by one)."""

    def replaced(self, entry: int, child: int) -> None:
        """`child`, a candidate and the last child of `entry`, is evicted; `entry` is one instead."""

    def follows(self, entry: int, child: int) -> bool:
        """Whether `entry`, a candidate in the place of `child`, the victim, would be the next victim."""

    def add(self, entry: int) -> None:
        """The block has become a candidate."""

    def remove(self, entry: int) -> None:
        """The block, a candidate until now, is none any more (pinned, got a child, or lost)."""

    def victim(self) -> int:
        """The candidate to evict next, still a candidate, or NO_ENTRY."""

    def coldest_stamp(self) -> int | None:
        """The age of `victim()` on the clock that all size classes share; None without candidates."""


class LeafLRU:
    """Least recently used first, by leaves, with recency kept lazily.

    Only the deepest block of a match is stamped, since everything before it cannot be evicted
    sooner anyway; a parent takes over its last child's stamp when that is the later one. So a
    candidate may come in with an old stamp. To keep that O(1), candidates hang in buckets of 64
    consecutive stamps: exact between buckets, first-in-first-out within one, where a parent goes
    to the front because its chain was already being eaten from the tail.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._heads: dict[int, int] = {}
        self._order: list[int] = []

    def inserted(self, entry: int) -> None:
        columns = self._columns
        columns.clock += 1
        columns.stamp[entry] = columns.clock

    def inserted_many(self, first: int, count: int) -> None:
        columns = self._columns
        columns.stamp[first : first + count] = array("q", range(columns.clock + 1, columns.clock + count + 1))
        columns.clock += count

    def touched(self, entry: int) -> None:
        candidate = self._columns.next[entry] != 0
        if candidate:
            self.remove(entry)
        self.inserted(entry)
        if candidate:
            self.add(entry)

    # A bucket is a ring: prev and next hold entry id + 1, so that 0 means "in no ring".

    def add(self, entry: int) -> None:
        columns = self._columns
        bucket = columns.stamp[entry] >> _BUCKET_SHIFT
        head = self._heads.get(bucket, NO_ENTRY)
        if head == NO_ENTRY:
            columns.prev[entry] = columns.next[entry] = entry + 1
            self._heads[bucket] = entry
            self._push(bucket)
            return
        tail = columns.prev[head] - 1
        columns.prev[entry] = tail + 1
        columns.next[entry] = head + 1
        columns.next[tail] = columns.prev[head] = entry + 1

    def remove(self, entry: int) -> None:
        columns = self._columns
        bucket = columns.stamp[entry] >> _BUCKET_SHIFT
        before, after = columns.prev[entry] - 1, columns.next[entry] - 1
        assert before != NO_ENTRY, "remove() of a block that is no candidate"
        if after == entry:
            del self._heads[bucket]
        else:
            columns.next[before] = after + 1
            columns.prev[after] = before + 1
            if self._heads[bucket] == entry:
                self._heads[bucket] = after
        columns.prev[entry] = columns.next[entry] = 0

    def follows(self, entry: int, child: int) -> bool:
        stamp = self._columns.stamp
        return stamp[entry] <= stamp[child]

    def replaced(self, entry: int, child: int) -> None:
        columns = self._columns
        stamp = columns.stamp
        if stamp[entry] > stamp[child]:
            self.remove(child)
            self.add(entry)
            return
        bucket = stamp[entry] = stamp[child]
        bucket >>= _BUCKET_SHIFT
        before, after = columns.prev[child] - 1, columns.next[child] - 1
        if after == child:
            columns.prev[entry] = columns.next[entry] = entry + 1
        else:
            columns.prev[entry], columns.next[entry] = before + 1, after + 1
            columns.next[before] = columns.prev[after] = entry + 1
        if self._heads[bucket] == child:
            self._heads[bucket] = entry
        columns.prev[child] = columns.next[child] = 0

    def _push(self, bucket: int) -> None:
        # Buckets that ran empty leave their number behind; swept when most of them are such.
        if len(self._order) > 2 * len(self._heads) + 64:
            self._order = sorted(self._heads)
        else:
            heapq.heappush(self._order, bucket)

    def victim(self) -> int:
        order = self._order
        while order:
            head = self._heads.get(order[0], NO_ENTRY)
            if head != NO_ENTRY:
                return head
            heapq.heappop(order)
        return NO_ENTRY

    def coldest_stamp(self) -> int | None:
        entry = self.victim()
        return None if entry == NO_ENTRY else self._columns.stamp[entry]


POLICIES = {"lru": LeafLRU}
"""By the name that the setting `policy` takes."""
