"""A policy that takes hints: what clients say about the ends of chains takes precedence over the inner policy.

    evicted first     EXPIRED, then DONE, then LOW            whatever the policy thinks
    the policy's      all blocks without a hint
    kept              BACK (a client will return for it), HIGH   apart, up to a share of the tier

As everywhere only candidates are sorted, blocks with no child and no pin, so no hint can break a chain or a lease. Kept
blocks are evicted all the same when there is nothing else, so no hint can keep a store out either. A mark belongs to
the last block of the hinted chain; when that is evicted, the block before it takes the mark over, as far as no other
chain shares it. If the policy predicts uses, awaited blocks are compared with the policy's own victim.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from tiercache.daemon.index.entries import LIVE
from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import NO_ENTRY, Policy, Touch
from tiercache.protocol.messages import Priority

from .chain_hints import HintGroup, Mark

MAX_MARKS = 16_384
"""Marks of one policy; beyond that the oldest is forgotten."""
KEPT_SHARE = 0.25
"""Of the blocks of a tier: how many may be kept as awaited, and as many again for high priority."""
EXPIRE_AT_ONCE = 64
"""Marks that have come due looked at in one go of the loop, and blocks evicted for that."""
_LIMIT_S = 1.0
_FIRST = (HintGroup.EXPIRED, HintGroup.DONE, HintGroup.LOW)
_KEPT = (HintGroup.BACK, HintGroup.HIGH)


class Teller(Protocol):
    """Knows what was hinted."""

    clock_s: Callable[[], float]

    def find(self, number: int, key: bytes) -> Mark | None:
        """What was hinted about a block, by its table and key, that has come to a tier."""


class HintedPolicy:
    """See `Policy`, and the module.

    `in_hits`: the policy's worths are in hits a second. `known_as`: the policy that its tables have.
    """

    def __init__(self, index: Index, inner: Policy, teller: Teller, in_hits: bool, known_as: Policy) -> None:
        self.inner = inner
        self.index = index
        self._columns = index.columns
        self._clock_s = teller.clock_s
        self._in_hits = in_hits
        self._teller = teller
        self._known_as = known_as
        self._marks: dict[int, Mark] = {}
        self._first: dict[HintGroup, dict[int, None]] = {group: {} for group in _FIRST}
        self._kept: dict[HintGroup, dict[int, None]] = {group: {} for group in _KEPT}
        self.kept_blocks = dict.fromkeys(_KEPT, 0)
        self._latest: list[tuple[float, int]] = []  # (-late_s, entry) of BACK
        self._due: list[tuple[float, int]] = []  # when to look at a mark again, and its entry
        self._limit = 0
        self._limit_s = -math.inf

    # --- marks -----------------------------------------------------------------------------------

    def mark(self, entry: int, mark: Mark) -> None:
        """Mark a live block of this policy's, replacing its earlier mark."""
        candidate = self._columns.next[entry] != 0
        if candidate:
            self.remove(entry)
        mark.stamp, mark.group = self._columns.clock, HintGroup.NONE
        self._marks.pop(entry, None)
        if len(self._marks) >= MAX_MARKS:
            self._forget(next(iter(self._marks)))
        self._note(entry, mark)
        if candidate:
            self.add(entry)

    def mark_of(self, entry: int) -> Mark | None:
        """What is known of a live block."""
        return self._marks.get(entry)

    @property
    def marks(self) -> int:
        """How many marks there are."""
        return len(self._marks)

    def _note(self, entry: int, mark: Mark) -> None:
        self._marks[entry] = mark
        for when_s in {mark.until_s, mark.late_s} - {0.0, math.inf}:
            heapq.heappush(self._due, (when_s, entry))
        if len(self._due) > 4 * MAX_MARKS:
            due = ((when_s, entry, self._marks.get(entry)) for when_s, entry in set(self._due))
            self._due = [(when_s, one) for when_s, one, of in due if of and when_s in (of.until_s, of.late_s)]
            heapq.heapify(self._due)

    def _forget(self, entry: int) -> None:
        if self._marks[entry].group is HintGroup.NONE:
            del self._marks[entry]
            return
        self.remove(entry)
        del self._marks[entry]
        self.add(entry)

    def expire(self, now_s: float) -> None:
        """Move marked blocks that have come due to their new group, a slice of them."""
        for _ in range(EXPIRE_AT_ONCE):
            if not self._due or self._due[0][0] > now_s:
                return
            entry = heapq.heappop(self._due)[1]
            mark = self._marks.get(entry)
            if mark is not None and mark.group is not HintGroup.NONE and mark.group_at(now_s) is not mark.group:
                self.remove(entry)
                self.add(entry)

    def expired(self) -> int:
        """A candidate that is of no use any more, or NO_ENTRY."""
        return next(iter(self._first[HintGroup.EXPIRED]), NO_ENTRY)

    # --- candidates ------------------------------------------------------------------------------

    def add(self, entry: int) -> None:
        self.inner.add(entry)
        mark = self._marks.get(entry)
        if mark is not None:
            self._sort(entry, mark)

    def _sort(self, entry: int, mark: Mark) -> None:
        """Move a candidate of the inner policy to the group of its mark."""
        group = mark.group = mark.group_at(self._clock_s())
        if group in self._first:
            self._first[group][entry] = None
        elif group in self._kept:
            self.inner.remove(entry)
            # In a ring of its own, so that everyone sees it as a candidate.
            self._columns.prev[entry] = self._columns.next[entry] = entry + 1
            self._kept[group][entry] = None
            self.kept_blocks[group] += mark.own
            if group is HintGroup.BACK:
                heapq.heappush(self._latest, (-mark.late_s, entry))
                if len(self._latest) > 2 * len(self._kept[group]) + MAX_MARKS:
                    self._latest = [(-self._marks[one].late_s, one) for one in self._kept[group]]
                    heapq.heapify(self._latest)

    def _give_back(self, entry: int, mark: Mark) -> None:
        """Return a candidate to the inner policy, as if it had no mark."""
        group, mark.group = mark.group, HintGroup.NONE
        if group in self._first:
            del self._first[group][entry]
        elif group in self._kept:
            del self._kept[group][entry]
            self.kept_blocks[group] -= mark.own
            self._columns.prev[entry] = self._columns.next[entry] = 0
            self.inner.add(entry)

    def remove(self, entry: int) -> None:
        mark = self._marks.get(entry)
        if mark is not None:
            self._give_back(entry, mark)
        self.inner.remove(entry)

    # --- what happens to blocks ------------------------------------------------------------------

    def _came(self, entry: int) -> None:
        self._marks.pop(entry, None)  # of a block that had this row before
        mark = self._teller.find(self.index.table[entry], self.index.key[entry])
        if mark is not None:
            self._note(entry, replace(mark, stamp=self._columns.clock, group=HintGroup.NONE))

    def inserted_run(self, entries: Sequence[int], stored: bool = False) -> None:
        self.inner.inserted_run(entries, stored)
        for entry in entries:
            self._came(entry)

    def inserted_many(self, first: int, count: int) -> None:
        self.inner.inserted_many(first, count)

    def touched(self, entry: int, how: Touch) -> None:
        mark = self._marks.get(entry)
        if mark is None:
            self.inner.touched(entry, how)
            return
        candidate = mark.group is not HintGroup.NONE
        if candidate:
            self._give_back(entry, mark)
        self.inner.touched(entry, how)
        if how.by_client:
            mark.used()
        if candidate:
            self._sort(entry, mark)

    def follows(self, entry: int, child: int) -> bool:
        """One at a time where there are marks: the inner policy must hear of each."""
        mark = self._marks.get(child)
        if entry in self._marks or not (mark is None or mark.empty):
            return False
        return self.inner.follows(entry, child)

    def replaced(self, entry: int, child: int) -> None:
        mark = self._marks.pop(child, None)
        if mark is not None:
            self._give_back(child, mark)
        self.inner.replaced(entry, child)
        own = self._inherit(entry, mark)
        if own is not None:
            self._sort(entry, own)

    def _inherit(self, entry: int, mark: Mark | None) -> Mark | None:
        """A block takes over the mark of its last child, which is evicted; returns its mark after that."""
        own = self._marks.get(entry)
        if mark is not None and mark.own > 1 and not mark.empty and (own is None or own.stamp <= mark.stamp):
            mark.hand_on(own)
            own = mark
            self._note(entry, own)
        if own is not None and self._columns.stamp[entry] > own.stamp:
            own.used()  # used through another chain
        return own

    def evicted(self, entry: int, parent: int) -> None:
        mark = self._marks.get(entry)
        if mark is not None:
            self._give_back(entry, mark)
            del self._marks[entry]
        self.inner.evicted(entry, parent)
        index = self.index
        if mark is not None and index.children[parent] == 1 and index.state[parent] == LIVE:
            self._inherit(parent, mark)  # which is pinned, and sorted when it is unpinned

    # --- the next victim -------------------------------------------------------------------------

    def victim(self) -> int:
        for group in self._first.values():
            if group:
                return next(iter(group))
        self._let_go()
        entry, awaited = self.inner.victim(), self._latest_back()
        if entry == NO_ENTRY:
            return awaited if awaited != NO_ENTRY else next(iter(self._kept[HintGroup.HIGH]), NO_ENTRY)
        if self._in_hits and awaited != NO_ENTRY and self.worth(awaited) < self.inner.worth(entry):
            return awaited
        return entry

    def _latest_back(self) -> int:
        """Of the awaited blocks the one needed last, or NO_ENTRY."""
        latest, awaited = self._latest, self._kept[HintGroup.BACK]
        while latest:
            late, entry = latest[0]
            if entry in awaited and self._marks[entry].late_s == -late:
                return entry
            heapq.heappop(latest)
        return NO_ENTRY

    def _let_go(self) -> None:
        """Enforce the share: keep the awaited blocks needed first, and those of high priority used last."""
        if not (self._kept[HintGroup.BACK] or self._kept[HintGroup.HIGH]):
            return
        limit = self._limit_now()
        while self.kept_blocks[HintGroup.BACK] > limit:
            self._ease(self._latest_back())
        while self.kept_blocks[HintGroup.HIGH] > limit:
            self._ease(next(iter(self._kept[HintGroup.HIGH])))

    def _limit_now(self) -> int:
        """How many blocks may be kept, counted once a second."""
        now_s = self._clock_s()
        if now_s >= self._limit_s:
            block_counts = (table.blocks for table in self.index.tables.values() if table.policy is self._known_as)
            self._limit, self._limit_s = int(KEPT_SHARE * sum(block_counts)), now_s + _LIMIT_S
        return self._limit

    def room_for(self, late_s: float) -> int:
        """How many more blocks would be kept for a client awaited until then, after those awaited sooner."""
        sooner = (mark.own for one in self._kept[HintGroup.BACK] if (mark := self._marks[one]).late_s <= late_s)
        return self._limit_now() - sum(sooner)

    def _ease(self, entry: int) -> None:
        """Keep it no longer."""
        mark = self._marks[entry]
        self._give_back(entry, mark)
        if mark.late_s:
            mark.used()
        else:
            mark.priority = Priority.NORMAL
        self._sort(entry, mark)

    def worth(self, entry: int) -> float:
        mark, now_s = self._marks.get(entry), self._clock_s()
        group = HintGroup.PLAIN if mark is None else mark.group_at(now_s)
        if group in self._first:
            return 0.0
        if mark is not None and self._in_hits and group in self._kept:
            return 1.0 / mark.wait_s(now_s) if group is HintGroup.BACK else math.inf
        return self.inner.worth(entry)

    def coldest_stamp(self) -> int | None:
        """The inner policy's: that blocks of a young chain go first does not make other, older blocks younger."""
        stamp = self.inner.coldest_stamp()
        if stamp is None and (entry := self.victim()) != NO_ENTRY:
            return self._columns.stamp[entry]
        return stamp

    # --- checking --------------------------------------------------------------------------------

    def check_integrity(self) -> list[str]:
        """Every way in which groups, marks and counts disagree."""
        findings = []
        for group, entries in (*self._first.items(), *self._kept.items()):
            marked = {entry for entry, mark in self._marks.items() if mark.group is group}
            if marked != set(entries):
                findings.append(f"hints: {group.value} blocks are {sorted(entries)}, marked are {sorted(marked)}")
        for group, blocks in self.kept_blocks.items():
            if blocks != sum(self._marks[entry].own for entry in self._kept[group]):
                findings.append(f"hints: {blocks} blocks are counted as {group.value}")
        for entry, mark in self._marks.items():
            if mark.group is not HintGroup.NONE and not self._columns.next[entry]:
                findings.append(f"hints: entry {entry} is {mark.group.value} and no candidate")
        return findings
