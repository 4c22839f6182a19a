"""Least worth first: evicts the blocks whose class is least likely to be used again soon; see predictor.py."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence

import numpy as np

from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import NO_ENTRY, Touch

from .predictor import Predictor
from .rings import Rings
from .worths import (
    AGES,
    FIRST_AGE,
    Floats,
    age_bucket,
    age_buckets,
    chain_class,
    shared_class,
)

RANK_SHARE = 32
"""Cells are ranked again when this share of them has been emptied."""
RANK_LEAST = 64
"""Or when this number of blocks was evicted, or a quarter of the cells where there are few; and the clock has moved."""
FEW_CELLS = 24
"""Up to this number, cells are ranked one by one."""
MAX_CELLS = 2048
"""More cells than that are made only if they are twice as wide for each further quarter."""
_NOT_ASKED_FOR = chain_class(0, 1, 1)
"""The class of chains stored without a look-up. One class: in how many parts they come says nothing about them."""
_TICK = 1 / 256
"""Turnovers in the interval in which the blocks of a cell were last used."""
_CLASS_SHIFT = 40
_TICK_MASK = (1 << _CLASS_SHIFT) - 1


class LeastWorth:
    """Candidates hang in *cells*: blocks of one class last used at about the same time are worth the same.

    As in LeafLRU, use is recorded lazily: a match updates only its deepest block, and a block takes over what its
    children knew when these are evicted. Cells are ranked by worth now and then, not at each eviction; cells made in
    between are compared with the ranked ones.
    """

    def __init__(self, index: Index, predictor: Predictor) -> None:
        columns = self._columns = index.columns
        self._index = index
        self._predictor = predictor
        self._rings = Rings(columns)
        self._cell = columns.integers("cell", "q")
        self._class = columns.integers("class", "H")
        self._turnover = predictor.turnover
        self._used_at = columns.floats("used")
        self._gap = columns.integers("gap", "B")
        self._uses = columns.integers("uses", "B")
        self._shared = columns.integers("shared", "B")
        self._width = 1  # width of a cell, in ticks
        self._most_cells = MAX_CELLS
        self._ranked: list[int] = []  # ranked cells, the one worth least last
        self._worth: list[float] = []  # worth of each ranked cell
        self._fresh: list[tuple[float, int, int]] = []  # heap of cells made since the last ranking: worth, tick, cell
        self._known: set[int] = set()  # cells in either of those, now or at some time since the last ranking
        self._evictions = 0
        self._ranked_for = 0  # how many evictions ranks are valid for
        self._ranked_until = 0.0  # valid until this time: ages closer to each other than that count as one
        self._version = -1

    # --- what happens to blocks ------------------------------------------------------------------

    def inserted_run(self, entries: Sequence[int], stored: bool = False) -> None:
        columns, index, expected = self._columns, self._index, self._predictor.expected.get
        stamp, classes, used_at = columns.stamp, self._class, self._used_at
        gap, uses, shared, key = self._gap, self._uses, self._shared, index.key
        now, clock, parent = self._turnover.now, columns.clock, index.parent[entries[0]]
        block_class = classes[parent] if index.key[parent] else _NOT_ASKED_FOR
        for entry in entries:
            context = expected(key[entry])
            if context is not None:
                block_class = context.block_class
            clock += 1
            stamp[entry], classes[entry], used_at[entry] = clock, block_class, now
            gap[entry], uses[entry], shared[entry] = AGES - 1, 0, 0
        columns.clock = clock
        if index.children[parent] > 1:
            shared[parent] = 1

    def inserted_many(self, first: int, count: int) -> None:
        columns, now = self._columns, self._turnover.now
        columns.stamp[first : first + count] = array("q", range(columns.clock + 1, columns.clock + count + 1))
        columns.clock += count
        self._used_at[first : first + count] = array("d", [now]) * count
        self._gap[first : first + count] = array("B", [AGES - 1]) * count
        parents = self._index.parent[first : first + count]
        for parent in parents:
            if self._index.children[parent] > 1:
                self._shared[parent] = 1

    def touched(self, entry: int, how: Touch) -> None:
        candidate = self._columns.next[entry] != 0
        if candidate:
            self.remove(entry)
        self._stamp(entry)
        now = self._turnover.now
        if how.counts:
            self._gap[entry] = age_bucket(now - self._used_at[entry])
            self._uses[entry] = min(255, self._uses[entry] + 1)
            self._class[entry] = how.request_class
        self._used_at[entry] = now
        if candidate:
            self.add(entry)

    def _stamp(self, entry: int) -> None:
        columns = self._columns
        columns.clock += 1
        columns.stamp[entry] = columns.clock

    def _take_over(self, entry: int, child: int) -> None:
        """Take over what a child knew: its parent was used whenever the child was."""
        used_at, stamp = self._used_at, self._columns.stamp
        if used_at[child] >= used_at[entry]:
            between = age_bucket(used_at[child] - used_at[entry]) if self._uses[entry] else AGES - 1
            self._gap[entry] = min(self._gap[child], between)
            self._class[entry] = self._class[child]
            used_at[entry] = used_at[child]
        else:
            self._gap[entry] = min(self._gap[entry], age_bucket(used_at[entry] - used_at[child]))
        self._uses[entry] = min(255, self._uses[entry] + self._uses[child])
        stamp[entry] = max(stamp[entry], stamp[child])
        self._evictions += 1

    # --- candidates ------------------------------------------------------------------------------

    def _cell_of(self, entry: int) -> int:
        block_class = self._class[entry]
        if self._shared[entry]:
            block_class = shared_class(self._uses[entry], self._gap[entry])
        tick = min(int(self._used_at[entry] / _TICK), _TICK_MASK)  # idle for weeks: the tick is capped
        return block_class << _CLASS_SHIFT | (tick - tick % self._width)

    def add(self, entry: int) -> None:
        cell = self._cell[entry] = self._cell_of(entry)
        if self._rings.add(cell, entry):
            self._note(cell)

    def remove(self, entry: int) -> None:
        self._rings.remove(self._cell[entry], entry)

    def follows(self, entry: int, child: int) -> bool:
        # If ranks become due, take them before the next eviction, as if each victim had been asked for separately.
        if self._shared[entry] or self._used_at[entry] > self._used_at[child] or self._due(self._evictions + 1):
            return False
        uses, stamp = self._uses, self._columns.stamp
        if uses[entry]:
            between = age_bucket(self._used_at[child] - self._used_at[entry])
            self._gap[child] = min(self._gap[child], between)
            uses[child] = min(255, uses[child] + uses[entry])
        stamp[child] = max(stamp[child], stamp[entry])
        self._evictions += 1
        return True

    def replaced(self, entry: int, child: int) -> None:
        stays = not self._shared[entry] and self._used_at[entry] <= self._used_at[child]
        self._take_over(entry, child)
        if stays:  # same class, and last used at the same time
            cell = self._cell[entry] = self._cell[child]
            self._rings.swap(cell, entry, child)
            return
        self.remove(child)
        self.add(entry)

    def evicted(self, entry: int, parent: int) -> None:
        self._take_over(parent, entry)

    # --- the next victim -------------------------------------------------------------------------

    def _note(self, cell: int) -> None:
        """A cell that had no candidates has some now."""
        if cell in self._known or self._version == -1:
            return
        if len(self._fresh) > 2 * len(self._rings.heads) + RANK_LEAST:
            self._version = -1  # no victim was asked for in a long time: rank all cells at the next request
            self._fresh.clear()
            return
        self._known.add(cell)
        heapq.heappush(self._fresh, (self._worth_of(cell), cell & _TICK_MASK, cell))
        if len(self._rings.heads) > self._most_cells:
            self._width *= 2
            self._most_cells += MAX_CELLS // 4

    def _worth_of(self, cell: int) -> float:
        age = self._turnover.now - (cell & _TICK_MASK) * _TICK
        return self._predictor.worth.item(cell >> _CLASS_SHIFT, age_bucket(age))

    def _due(self, evictions: int) -> bool:
        """True if too many evictions make the ranks too old; they stay valid while the clock stands still."""
        return evictions > self._ranked_for and self._turnover.now >= self._ranked_until

    def _rank(self) -> None:
        """Rank all cells by their present worth."""
        count = len(self._rings.heads)
        self._ranked, self._worth = self._rank_few() if count <= FEW_CELLS else self._rank_many()
        self._fresh, self._known = [], set(self._ranked)
        self._evictions, self._version = 0, self._predictor.version
        self._ranked_until = self._turnover.now + FIRST_AGE
        self._ranked_for = max(min(RANK_LEAST, count // 4), count // RANK_SHARE)
        if count < MAX_CELLS // 2:
            self._width = max(1, self._width // 2)
            self._most_cells = MAX_CELLS

    def _rank_few(self) -> tuple[list[int], list[float]]:
        """Rank a few cells, without numpy: they are ranked at every second eviction; small arrays cost more."""
        ranks = sorted((-self._worth_of(cell), -(cell & _TICK_MASK), cell) for cell in self._rings.heads)
        return [cell for _, _, cell in ranks], [-negative for negative, _, _ in ranks]

    def _rank_many(self) -> tuple[list[int], list[float]]:
        cells = np.fromiter(self._rings.heads, np.int64, len(self._rings.heads))
        ticks = cells & _TICK_MASK
        ages: Floats = np.subtract(self._turnover.now, ticks * _TICK)
        worth = self._predictor.worth[cells >> _CLASS_SHIFT, age_buckets(ages)]
        # Among cells of equal worth the one used last goes last: what was stored a moment ago should be found.
        order = np.lexsort((cells, -ticks, -worth))
        return cells[order].tolist(), worth[order].tolist()

    def victim(self) -> int:
        heads = self._rings.heads
        if not heads:
            return NO_ENTRY
        if self._version != self._predictor.version or self._due(self._evictions):
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
        # Of cells worth the same, the one used longest ago goes first.
        if fresh and (not ranked or fresh[0][:2] <= (self._worth[-1], ranked[-1] & _TICK_MASK)):
            return heads[fresh[0][2]]
        return heads[ranked[-1]]

    def worth(self, entry: int) -> float:
        return self._worth_of(self._cell_of(entry)) * self._turnover.per_s()

    def coldest_stamp(self) -> int | None:
        entry = self.victim()
        return None if entry == NO_ENTRY else self._columns.stamp[entry]
