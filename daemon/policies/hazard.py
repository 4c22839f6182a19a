"""Least worth first: by how soon blocks of their class are likely to be used again; see predictor.py."""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Sequence

import numpy as np

from tiercache.daemon.index import Index
from tiercache.daemon.policies.predictor import AGES, FIRST_AGE_S, Predictor, age_bucket, shared_class
from tiercache.daemon.policies.rings import Rings
from tiercache.daemon.policy import NO_ENTRY

RANK_SHARE = 32
"""Cells are ranked anew when this part of them has been emptied,"""
RANK_LEAST = 64
RANK_S = 0.25
RANK_CELL_S = 5e-5
"""or after this time and so much for each of them, so that it costs no more than 2% of a core."""
MAX_CELLS = 4096
FEW_CELLS = 256
"""Cells are of blocks used within `_WIDTH` ticks: more where there are too many cells, fewer where there are few."""
_TICK_S = 1 / 256
_WIDTH = 64
_CLASS_SHIFT = 40
_TICK_MASK = (1 << _CLASS_SHIFT) - 1


class LeastWorth:
    """Candidates hang in *cells*: those of one class, used last at about the same time, are worth the same.

    As with LeafLRU what is known is kept lazily: a match tells only its deepest block, and a block takes over what
    its children knew when these are evicted. Cells are ranked by their worth now and then, not at each eviction;
    those that come in between are compared with the ranked ones.
    """

    def __init__(self, index: Index, predictor: Predictor) -> None:
        columns = self._columns = index.columns
        self._index = index
        self._predictor = predictor
        self._rings = Rings(columns)
        self._cell = columns.integers("cell", "q")
        self._class = columns.integers("class", "H")
        self._used_s = columns.floats("used")
        self._gap = columns.integers("gap", "B")
        self._uses = columns.integers("uses", "B")
        self._shared = columns.integers("shared", "B")
        self._width = 1  # of cells, in ticks
        self._hurried = False  # most candidates had been used just before the last ranks
        self._ranked: list[int] = []  # cells, the least worth last
        self._worth: list[float] = []  # theirs
        self._fresh: list[tuple[float, int, int]] = []  # cells that came since, a heap: worth, tick, cell
        self._known: set[int] = set()  # cells that are in either, or have been since the last ranks
        self._evictions = 0
        self._ranked_for = 0  # evictions
        self._version = -1
        self._rank_s = 0.0

    # --- what happens to blocks ------------------------------------------------------------------

    def inserted(self, entry: int) -> None:
        predictor, index = self._predictor, self._index
        self._stamp(entry)
        parent = index.parent[entry]
        context = predictor.expected(index.key[entry])
        self._class[entry] = context.block_class if context is not None else self._class[parent]
        self._used_s[entry] = predictor.clock_s()
        self._gap[entry], self._uses[entry], self._shared[entry] = AGES - 1, 0, 0
        if index.children[parent] > 1:
            self._shared[parent] = 1

    def inserted_run(self, entries: Sequence[int]) -> None:
        first = entries[0]
        self.inserted(first)
        columns, key, expected = self._columns, self._index.key, self._predictor.expected
        stamp, classes, used_s = columns.stamp, self._class, self._used_s
        gap, uses, shared = self._gap, self._uses, self._shared
        now_s, block_class, clock = used_s[first], classes[first], columns.clock
        for entry in entries[1:]:
            context = expected(key[entry])
            if context is not None:
                block_class = context.block_class
            clock += 1
            stamp[entry], classes[entry], used_s[entry] = clock, block_class, now_s
            gap[entry], uses[entry], shared[entry] = AGES - 1, 0, 0
        columns.clock = clock

    def inserted_many(self, first: int, count: int) -> None:
        columns, now_s = self._columns, self._predictor.clock_s()
        columns.stamp[first : first + count] = array("q", range(columns.clock + 1, columns.clock + count + 1))
        columns.clock += count
        self._used_s[first : first + count] = array("d", [now_s]) * count
        self._gap[first : first + count] = array("B", [AGES - 1]) * count
        parents = self._index.parent[first : first + count]
        for parent in parents:
            if self._index.children[parent] > 1:
                self._shared[parent] = 1

    def touched(self, entry: int) -> None:
        candidate = self._columns.next[entry] != 0
        if candidate:
            self.remove(entry)
        self._stamp(entry)
        predictor = self._predictor
        now_s, context = predictor.clock_s(), predictor.context
        if context is not None:
            self._gap[entry] = age_bucket(now_s - self._used_s[entry])
            self._uses[entry] = min(255, self._uses[entry] + 1)
            self._class[entry] = context.block_class
        self._used_s[entry] = now_s
        if candidate:
            self.add(entry)

    def _stamp(self, entry: int) -> None:
        columns = self._columns
        columns.clock += 1
        columns.stamp[entry] = columns.clock

    def _take_over(self, entry: int, child: int) -> None:
        """What a child knew is its parent's: it was used whenever that was."""
        used_s, stamp = self._used_s, self._columns.stamp
        if used_s[child] >= used_s[entry]:
            between = age_bucket(used_s[child] - used_s[entry]) if self._uses[entry] else AGES - 1
            self._gap[entry] = min(self._gap[child], between)
            self._class[entry] = self._class[child]
            used_s[entry] = used_s[child]
        else:
            self._gap[entry] = min(self._gap[entry], age_bucket(used_s[entry] - used_s[child]))
        self._uses[entry] = min(255, self._uses[entry] + self._uses[child])
        stamp[entry] = max(stamp[entry], stamp[child])
        self._evictions += 1

    # --- candidates ------------------------------------------------------------------------------

    def _cell_of(self, entry: int) -> int:
        block_class = self._class[entry]
        if self._shared[entry]:
            block_class = shared_class(self._uses[entry], self._gap[entry])
        tick = int(self._used_s[entry] / _TICK_S)
        return block_class << _CLASS_SHIFT | (tick - tick % self._width)

    def add(self, entry: int) -> None:
        cell = self._cell[entry] = self._cell_of(entry)
        if self._rings.add(cell, entry):
            self._note(cell)

    def remove(self, entry: int) -> None:
        self._rings.remove(self._cell[entry], entry)

    def follows(self, entry: int, child: int) -> bool:
        # Once ranks are due they are taken before the next one goes, as if each were asked for.
        if self._shared[entry] or self._used_s[entry] > self._used_s[child] or self._evictions >= self._ranked_for:
            return False
        uses, stamp = self._uses, self._columns.stamp
        if uses[entry]:
            between = age_bucket(self._used_s[child] - self._used_s[entry])
            self._gap[child] = min(self._gap[child], between)
            uses[child] = min(255, uses[child] + uses[entry])
        stamp[child] = max(stamp[child], stamp[entry])
        self._evictions += 1
        return True

    def replaced(self, entry: int, child: int) -> None:
        stays = not self._shared[entry] and self._used_s[entry] <= self._used_s[child]
        self._take_over(entry, child)
        if stays:  # of one class, and used at one time
            cell = self._cell[entry] = self._cell[child]
            self._rings.swap(cell, entry, child)
            return
        self.remove(child)
        self.add(entry)

    def evicted(self, entry: int, parent: int) -> None:
        self._take_over(parent, entry)

    # --- the next victim -------------------------------------------------------------------------

    def _note(self, cell: int) -> None:
        """A cell has candidates that had none."""
        if cell in self._known or self._version == -1:
            return
        if len(self._fresh) > 2 * len(self._rings.heads) + RANK_LEAST:
            self._version = -1  # nobody has asked for long: all are ranked at the next question
            self._fresh.clear()
            return
        self._known.add(cell)
        worth = math.inf if self._hurried and self._age_s(cell) < FIRST_AGE_S else self._worth_of(cell)
        heapq.heappush(self._fresh, (worth, cell & _TICK_MASK, cell))

    def _age_s(self, cell: int) -> float:
        return self._predictor.clock_s() - (cell & _TICK_MASK) * _TICK_S

    def _worth_of(self, cell: int) -> float:
        return self._predictor.worth_rows[cell >> _CLASS_SHIFT][age_bucket(self._age_s(cell))]

    def _rank(self) -> None:
        """All cells by what they are worth now."""
        cells = np.fromiter(self._rings.heads, np.int64, len(self._rings.heads))
        ages_s = self._predictor.clock_s() - (cells & _TICK_MASK) * _TICK_S
        octaves = 2.0 * np.log2(np.maximum(ages_s, FIRST_AGE_S) / FIRST_AGE_S)
        buckets = np.where(ages_s < FIRST_AGE_S, 0, np.minimum(AGES - 1, 1 + octaves.astype(np.int64)))
        worth = self._predictor.worth[cells >> _CLASS_SHIFT, buckets]
        # Of those worth the same, the one that was used last goes first: it has the longest to wait. But where most was
        # used just now, everything turns over within moments and ages say nothing: there that goes last, by its order.
        self._hurried = 2 * int(np.count_nonzero(buckets == 0)) > len(cells)
        if self._hurried:
            worth[buckets == 0] = math.inf
        ticks = cells & _TICK_MASK
        order = np.lexsort((cells, np.where(buckets, ticks, -ticks), -worth))
        self._ranked, self._worth = cells[order].tolist(), worth[order].tolist()
        self._fresh, self._known = [], set(self._ranked)
        self._evictions, self._version = 0, self._predictor.version
        self._ranked_for = max(RANK_LEAST, len(cells) // RANK_SHARE)
        self._rank_s = self._predictor.clock_s() + max(RANK_S, len(cells) * RANK_CELL_S)
        if len(cells) > (FEW_CELLS if self._width < _WIDTH else MAX_CELLS):
            self._width *= 2
        elif self._width > (1 if len(cells) < FEW_CELLS // 2 else _WIDTH):
            self._width //= 2

    def victim(self) -> int:
        heads = self._rings.heads
        if not heads:
            return NO_ENTRY
        stale = self._version != self._predictor.version or self._predictor.clock_s() >= self._rank_s
        if stale or self._evictions > self._ranked_for:
            self._rank()
        ranked, fresh = self._ranked, self._fresh
        while ranked and ranked[-1] not in heads:
            self._known.discard(ranked.pop())
            self._worth.pop()
        while fresh and fresh[0][2] not in heads:
            self._known.discard(heapq.heappop(fresh)[2])
        if not ranked and not fresh:
            self._rank()
            ranked = self._ranked
        if fresh and (not ranked or fresh[0][0] < self._worth[-1]):
            return heads[fresh[0][2]]
        return heads[ranked[-1]]

    def worth(self, entry: int) -> float:
        return self._worth_of(self._cell_of(entry))

    def coldest_stamp(self) -> int | None:
        entry = self.victim()
        return None if entry == NO_ENTRY else self._columns.stamp[entry]
