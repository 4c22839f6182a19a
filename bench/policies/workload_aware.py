"""Workload-aware: evicts the block least likely to be used within its expected lifetime (Wang et al., USENIX ATC 2025).

"KVCache Cache in the Wild" evicts by (probability of reuse within the expected lifetime, offset in the prompt). Its
workloads are kinds of requests, each with an exponential distribution of reuse times. We see no label, so we use the
kinds that a prompt shows by itself: nothing shared, a shared beginning, and each turn of a conversation
(`reusetimes.py`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from policies.reusetimes import CATEGORIES, ReuseTimes, category
from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import NO_ENTRY, Touch
from tiercache.daemon.policies.lru import LeafLRU

LIFETIME_EVICTIONS = 256
"""The expected lifetime is estimated again after so many evictions."""
LIFETIME_MOST = 1e6


class WorkloadAware:
    """An LRU queue for each category; the first of each are compared. O(categories).

    Use is recorded lazily: a match updates only its deepest block, and a block takes over what its children knew.
    """

    def __init__(self, index: Index, times: ReuseTimes) -> None:
        columns = self._columns = index.columns
        self._index = index
        self._times = times
        self._turnover = times.turnover
        self._orders = [LeafLRU(columns) for _ in range(CATEGORIES)]
        self._category = columns.integers("category", "B")
        self._used_at = columns.floats("used")
        self._offset = columns.integers("offset", "i")
        self._live = 0  # inserted less evicted
        self._evictions = 0
        self._since = self._turnover.now
        self.lifetime = LIFETIME_MOST
        """How many turnovers an unused block stays: the blocks here over the evictions per turnover."""

    # --- what happens to blocks ------------------------------------------------------------------

    def inserted(self, entry: int, stored: bool = False) -> None:
        index, parent = self._index, self._index.parent[entry]
        context = self._times.expected.get(index.key[entry])
        self._category[entry] = category(context.block_class) if context is not None else self._category[parent]
        self._orders[0].inserted(entry)
        self._used_at[entry] = self._turnover.now
        self._offset[entry] = self._offset[parent] + 1 if index.parent[parent] != NO_ENTRY else 0
        self._live += 1

    def inserted_run(self, entries: Sequence[int], stored: bool = False) -> None:
        for entry in entries:
            self.inserted(entry)

    def inserted_many(self, first: int, count: int) -> None:
        self._orders[0].inserted_many(first, count)
        self._category[first : first + count] = array("B", bytes(count))
        self._used_at[first : first + count] = array("d", [self._turnover.now]) * count
        parents, offset = self._index.parent, self._offset
        for entry in range(first, first + count):
            parent = parents[entry]
            offset[entry] = offset[parent] + 1 if parents[parent] != NO_ENTRY else 0
        self._live += count

    def touched(self, entry: int, how: Touch) -> None:
        candidate = self._columns.next[entry] != 0
        if candidate:
            self.remove(entry)
        self._orders[0].inserted(entry)
        if how.counts:
            self._category[entry] = category(how.request_class)
            self._used_at[entry] = self._turnover.now
        if candidate:
            self.add(entry)

    def _gone(self) -> None:
        self._live = max(0, self._live - 1)
        self._evictions += 1
        if self._evictions < LIFETIME_EVICTIONS:
            return
        now = self._turnover.now
        lifetime = min(LIFETIME_MOST, self._live * (now - self._since) / self._evictions)
        known = self.lifetime < LIFETIME_MOST
        self.lifetime = (self.lifetime + lifetime) / 2 if known else lifetime
        self._evictions, self._since = 0, now

    def _take_over(self, entry: int, child: int) -> None:
        """The parent was used whenever its child was."""
        if self._used_at[child] >= self._used_at[entry]:
            self._used_at[entry], self._category[entry] = self._used_at[child], self._category[child]
        self._columns.stamp[entry] = max(self._columns.stamp[entry], self._columns.stamp[child])
        self._gone()

    # --- candidates ------------------------------------------------------------------------------

    def add(self, entry: int) -> None:
        self._orders[self._category[entry]].add(entry)

    def remove(self, entry: int) -> None:
        self._orders[self._category[entry]].remove(entry)

    def follows(self, entry: int, child: int) -> bool:
        """A block that was last used with its child is as likely to be used, and next in its prompt."""
        if self._used_at[entry] > self._used_at[child] or self._columns.stamp[entry] > self._columns.stamp[child]:
            return False
        self._gone()
        return True

    def replaced(self, entry: int, child: int) -> None:
        before = self._category[child]
        if self._columns.stamp[entry] > self._columns.stamp[child]:
            self.remove(child)
            self._take_over(entry, child)
            self.add(entry)
            return
        self._take_over(entry, child)
        if self._category[entry] == before:
            self._orders[before].replaced(entry, child)
        else:
            self.remove(child)
            self.add(entry)

    def evicted(self, entry: int, parent: int) -> None:
        if self._index.parent[parent] == NO_ENTRY:
            self._gone()  # the root, or a block that was dropped
        else:
            self._take_over(parent, entry)

    # --- the next victim -------------------------------------------------------------------------

    def probability(self, entry: int) -> float:
        """Probability that a block of this category, last used with this one, is used within the expected lifetime."""
        its, times = self._category[entry], self._times
        age, rate = max(0.0, self._turnover.now - self._used_at[entry]), float(times.rates[its])
        return float(times.shares[its]) * math.exp(-rate * age) * -math.expm1(-rate * self.lifetime)

    def victim(self) -> int:
        first = [entry for order in self._orders if (entry := order.victim()) != NO_ENTRY]
        if len(first) < 2:
            return first[0] if first else NO_ENTRY
        return min(first, key=lambda entry: (self.probability(entry), -self._offset[entry]))

    def worth(self, entry: int) -> float:
        its, times = self._category[entry], self._times
        age, rate = max(0.0, self._turnover.now - self._used_at[entry]), float(times.rates[its])
        return float(times.shares[its]) * rate * math.exp(-rate * age) * self._turnover.per_s()

    def coldest_stamp(self) -> int | None:
        entry = self.victim()
        return None if entry == NO_ENTRY else self._columns.stamp[entry]
