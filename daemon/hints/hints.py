"""Hints of clients on their way to the blocks: which chains in which tier, including blocks yet to come there.

    hint ─► the last block of the chain in DRAM, and below ─► a mark there (`hinted_policy.py`)
       └──► by its key, for a tier that the block comes to later: by write-behind or promotion
       └──► when the client will be back: promoted before that (`prefetch.py`)

A hint is about the blocks that no other chain shares. It changes no recency and is not kept over a restart; hints about
blocks in no tier are forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from tiercache.daemon.index.chain_ends import ChainEnds
from tiercache.daemon.index.entries import Table
from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import NO_ENTRY, Policy
from tiercache.protocol.messages import KEY_BYTES, Priority

from .chain_hints import LATE_S, LATE_SHARE, HintGroup, Mark
from .hinted_policy import EXPIRE_AT_ONCE, MAX_MARKS, HintedPolicy
from .switched_policy import SwitchedPolicy

MAX_WALK = 8192
"""Blocks that a hint can be about, of all its namespaces together: a walk of a millisecond."""
MAX_WINDOW = 256
"""The same for blocks of windows, each of which is marked: some milliseconds."""
CARRY_S = 60.0
"""How long `done` waits for blocks to reach another tier. A client that asks for them meanwhile cancels it."""


class GivenHint(NamedTuple):
    """One hint, as it came: see the request `Hint`. Times are of the daemon's clock; 0 and infinity mean unsaid."""

    done: bool = False
    back_s: float = 0.0
    late_s: float = 0.0
    until_s: float = math.inf
    priority: Priority | None = None

    @property
    def takes_all(self) -> bool:
        """True if it is about every block, not about keeping what the next request needs."""
        return self.done or self.until_s < math.inf or self.priority is Priority.LOW


def hint_given_at(now_s: float, done: bool, return_in_s: float, ttl_s: float, priority: Priority | None) -> GivenHint:
    """A hint given now; 0 for a time that is not said."""
    late_s = now_s + (1.0 + LATE_SHARE) * return_in_s + LATE_S
    return GivenHint(
        done,
        now_s + return_in_s if return_in_s else 0.0,
        late_s if return_in_s else 0.0,
        now_s + ttl_s if ttl_s else math.inf,
        priority,
    )


class Hints:
    """Hints of all tiers of a daemon. Event loop only; a hint costs a walk over the blocks that it is about."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self.clock_s = clock_s
        self.counts = dict.fromkeys(("hints", "done", "returning", "ttl", "priority", "expired_blocks"), 0)
        """Hints given, by what they said, and blocks that were evicted because of a `ttl`."""
        self._switched: list[SwitchedPolicy] = []
        self._carried: dict[tuple[int, bytes], tuple[float, Mark]] = {}  # until when, by table and key
        self._given = False

    def policy(self, index: Index, plain: Policy, in_hits: bool) -> SwitchedPolicy:
        """`plain` as a policy that takes hints."""
        made = SwitchedPolicy(index, plain, self, in_hits)
        self._switched.append(made)
        if self._given:
            made.follow_hints()
        return made

    @property
    def policies(self) -> list[HintedPolicy]:
        """The policies with hints of all tiers, in use or not."""
        return [policy.hinted for policy in self._switched]

    def forget(self, index: Index) -> None:
        """A tier's index is gone, and its policies with it."""
        self._switched = [policy for policy in self._switched if policy.hinted.index is not index]

    # --- what is said ----------------------------------------------------------------------------

    def count(self, said: GivenHint) -> None:
        """Count a hint."""
        kinds = {"hints": True, "done": said.done, "returning": said.late_s, "ttl": said.until_s < math.inf}
        for name, said_so in {**kinds, "priority": said.priority}.items():
            self.counts[name] += bool(said_so)

    def say(
        self,
        places: Iterable[tuple[Index, Table]],
        keys: bytes,
        first: int,
        said: GivenHint,
        window_blocks: int = 0,
        namespaces: int = 1,
    ) -> int:
        """Apply a hint to the blocks from `first` on of a namespace's chain, in each tier; returns how many are here.

        `places`: where the chain may be. `namespaces`: how many namespaces the hint is about.
        """
        if not self._given:
            self._given = True
            for policy in self._switched:
                policy.follow_hints()
        longest = 0
        for index, table in places:
            if table.windowed:
                marked = MAX_WINDOW if said.takes_all else min(MAX_WINDOW, window_blocks)
                here = self._mark_window(index, table, keys, first, said, max(1, marked // namespaces))
            else:
                here = self._mark_chain(index, table, keys, first, said, max(1, MAX_WALK // namespaces))
            longest = max(longest, here)
        return longest

    def _mark_chain(self, index: Index, table: Table, keys: bytes, first: int, said: GivenHint, most: int) -> int:
        blocks = index.prefix_length(table, keys, len(keys) // KEY_BYTES)
        if blocks > first:
            entry = table.get(keys[(blocks - 1) * KEY_BYTES : blocks * KEY_BYTES])
            self._mark(index, table, entry, said, own_blocks(index, entry, min(blocks - first, most)))
        return blocks

    def _mark_window(self, index: Index, table: Table, keys: bytes, first: int, said: GivenHint, most: int) -> int:
        """Mark blocks of a window: they have no parent, so each is marked, the last ones."""
        blocks, longest = len(keys) // KEY_BYTES, 0
        for number in range(max(first, blocks - most), blocks):
            entry = table.get(keys[number * KEY_BYTES : (number + 1) * KEY_BYTES])
            if entry != NO_ENTRY:
                self._mark(index, table, entry, said, 1)
                longest = number + 1
        return longest

    def _mark(self, index: Index, table: Table, entry: int, said: GivenHint, own: int) -> None:
        policy, now_s = table.policy, self.clock_s()
        assert isinstance(policy, SwitchedPolicy)
        mark = replace(policy.hinted.mark_of(entry) or Mark(), own=own)
        if said.done or said.late_s:
            mark.done, mark.back_s, mark.late_s = said.done, said.back_s, said.late_s
        if said.until_s < math.inf:
            mark.until_s = said.until_s
        mark.priority = said.priority or mark.priority
        policy.hinted.mark(entry, mark)
        carried_s = mark.until_s  # no longer: a client that stores such a block after that has given no hint
        if carried_s == math.inf and mark.priority is Priority.NORMAL:
            carried_s = max(mark.late_s, now_s + CARRY_S)
        self._carry((table.number, index.key[entry]), carried_s, mark)

    def _carry(self, name: tuple[int, bytes], until_s: float, mark: Mark) -> None:
        self._carried.pop(name, None)
        self._carried[name] = until_s, replace(mark)
        if len(self._carried) > MAX_MARKS:
            del self._carried[next(iter(self._carried))]

    def find(self, number: int, key: bytes) -> Mark | None:
        """What was hinted about a block that has come to a tier."""
        until_s, mark = self._carried.get((number, key), (0.0, None))
        return mark if until_s > self.clock_s() else None

    # --- time ------------------------------------------------------------------------------------

    def expire(self, index: Index, tails: ChainEnds) -> int:
        """Evict a slice of the expired, unpinned blocks of one tier; returns how many were evicted."""
        gone = 0
        if not self._given:
            return gone
        tails.lapse()
        now_s = self.clock_s()
        for policy in self.policies:
            if policy.index is not index:
                continue
            policy.expire(now_s)
            while gone < EXPIRE_AT_ONCE and (entry := policy.expired()) != NO_ENTRY:
                index.evict(entry)
                gone += 1
        self.counts["expired_blocks"] += gone
        return gone

    # --- figures ---------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """For `stats`: also how many ends of chains are marked, and how many blocks are kept for that, in all tiers."""
        return {
            **self.counts,
            "marks": sum(policy.marks for policy in self.policies),
            "awaited_blocks": sum(policy.kept_blocks[HintGroup.BACK] for policy in self.policies),
            "high_blocks": sum(policy.kept_blocks[HintGroup.HIGH] for policy in self.policies),
        }


def own_blocks(index: Index, entry: int, most: int) -> int:
    """A block and those before it from which no other chain branches off, counted up to `most`."""
    parent, children, own = index.parent, index.children, 1
    above = parent[entry]
    while own < most and children[above] == 1 and parent[above] != NO_ENTRY:
        above, own = parent[above], own + 1
    return own
