"""Candidates in rings: buckets of equally good candidates, in order of arrival."""

from __future__ import annotations

from tiercache.daemon.index.policy import NO_ENTRY, Columns


class Rings:
    """Which candidates are in which bucket. O(1); the first of a bucket is evicted next.

    A bucket is a ring: prev and next hold entry id + 1, so that 0 means "in no ring".
    """

    __slots__ = ("columns", "heads")

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.heads: dict[int, int] = {}
        """The first entry of each non-empty bucket."""

    def add(self, bucket: int, entry: int) -> bool:
        """Append an entry to a bucket; True if it is the first one there."""
        columns = self.columns
        head = self.heads.get(bucket, NO_ENTRY)
        if head == NO_ENTRY:
            columns.prev[entry] = columns.next[entry] = entry + 1
            self.heads[bucket] = entry
            return True
        tail = columns.prev[head] - 1
        columns.prev[entry] = tail + 1
        columns.next[entry] = head + 1
        columns.next[tail] = columns.prev[head] = entry + 1
        return False

    def remove(self, bucket: int, entry: int) -> None:
        """Take an entry out of its bucket."""
        columns = self.columns
        before, after = columns.prev[entry] - 1, columns.next[entry] - 1
        assert before != NO_ENTRY, "remove() of a block that is not a candidate"
        if after == entry:
            del self.heads[bucket]
        else:
            columns.next[before] = after + 1
            columns.prev[after] = before + 1
            if self.heads[bucket] == entry:
                self.heads[bucket] = after
        columns.prev[entry] = columns.next[entry] = 0

    def swap(self, bucket: int, entry: int, other: int) -> None:
        """Put `entry` in the place of `other`: its chain is being evicted from the end."""
        columns = self.columns
        before, after = columns.prev[other] - 1, columns.next[other] - 1
        if after == other:
            columns.prev[entry] = columns.next[entry] = entry + 1
        else:
            columns.prev[entry], columns.next[entry] = before + 1, after + 1
            columns.next[before] = columns.prev[after] = entry + 1
        if self.heads[bucket] == other:
            self.heads[bucket] = entry
        columns.prev[other] = columns.next[other] = 0
