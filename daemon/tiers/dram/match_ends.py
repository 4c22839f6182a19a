"""Where a match may end: after the longest leading run that all requested namespaces have.

chain    blocks 0 ..< cut. DRAM and the tier below are each prefix-closed, so the longer one counts
window   blocks cut - w ..< cut; each may be in DRAM or in the tier below

block         0  1  2  3  4  5  6      D: in DRAM, N: below
chain         D  D  D  N  N  N  .      DRAM alone: at 3 and before; with what is below: at 6 and before
window of 2   .  .  N  D  D  N  D      DRAM alone: at 5; with what is below: at 4, 5, 6 and 7
                                       both of them: nothing in DRAM alone, at 6 with what is below
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiercache.daemon.ground.slices import LOOKUPS, Steps
from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.index.walks import walk
from tiercache.protocol.messages import KEY_BYTES

from .below import Claim, TierBelow
from .space import Namespace, Space, first_of_window

_CHAINS = 16
"""Chains looked up in the tier below in one slice: each of its directories is asked."""
Lookup = Callable[[bytes], bool]
"""Tells whether a block of a window is here."""


class Cuts:
    """Searches that change nothing, not even recency. Event loop only."""

    def __init__(self, space: Space, below: TierBelow) -> None:
        self._index: Index = space.index
        self._below = below

    def in_dram(self, namespaces: Sequence[Namespace], keys: bytes, limit: int) -> Steps[int]:
        """The longest cut of at most `limit` blocks that DRAM alone has."""
        cut, windowed = limit, []
        for namespace in namespaces:
            if namespace.table.windowed:
                windowed.append(namespace)
                continue
            if namespace.table.unlinking:
                yield from walk(self._index, namespace.table, keys, cut)
                yield
            cut = self._index.prefix_length(namespace.table, keys, cut)
        if not windowed or not cut:
            return cut
        return (yield from _behind_windows(windowed, lambda one: self._index.lookup(one.table), keys, cut, 0))

    def with_below(self, namespaces: Sequence[Namespace], keys: bytes, in_dram: int) -> Steps[tuple[int, int]]:
        """The longest cut of all tiers on this host together, where DRAM alone has `in_dram` blocks; and with what a
        shared store is known to have behind that.
        """
        here = yield from self._on_this_host(namespaces, keys, in_dram)
        claim = None if here * KEY_BYTES == len(keys) else self._below.claim(namespaces, keys)
        if claim is None or claim.end <= here or not self._still_begins(claim, namespaces, keys):
            return here, here
        return here, claim.end

    def _still_begins(self, claim: Claim, namespaces: Sequence[Namespace], keys: bytes) -> bool:
        """True if this host still has what a claim was to be the end of. Blocks of windows are looked for again."""
        for place, namespace in enumerate(namespaces):
            if place in claim.starts:
                start = claim.starts[place]
                if start and self.chain_length(namespace, keys, start) < start:
                    return False
                continue
            here, stored = self._lookup(namespace), claim.stored.get(place, set())
            for number in range(first_of_window(namespace, claim.end), claim.end):
                if number not in stored and not (here and here(keys[number * KEY_BYTES : (number + 1) * KEY_BYTES])):
                    return False
        return True

    def chain_length(self, namespace: Namespace, keys: bytes, limit: int) -> int:
        """How many leading blocks of a chain this host has, in DRAM or below."""
        in_dram = self._index.prefix_length(namespace.table, keys, limit)
        return in_dram if in_dram == limit else max(in_dram, self._chain_length(namespace, keys, limit))

    def _on_this_host(self, namespaces: Sequence[Namespace], keys: bytes, in_dram: int) -> Steps[int]:
        cut = len(keys) // KEY_BYTES
        if not self._below.tiers or in_dram == cut:
            return in_dram
        windowed = []
        for number, namespace in enumerate(namespaces, 1):
            if namespace.table.windowed:
                windowed.append(namespace)
            elif (cut := self._chain_length(namespace, keys, cut)) <= in_dram:
                return in_dram
            if not number % _CHAINS or self._below.local.unlinking:
                yield
        if not windowed:
            return cut
        return (yield from _behind_windows(windowed, self._lookup, keys, cut, in_dram))

    def _chain_length(self, namespace: Namespace, keys: bytes, limit: int) -> int:
        length, table = self._below.local.length(namespace, keys, limit), namespace.table
        if length < limit and table.get(keys[length * KEY_BYTES : (length + 1) * KEY_BYTES]) != NO_ENTRY:
            return max(length, self._index.prefix_length(table, keys, limit))
        return length

    def _lookup(self, namespace: Namespace) -> Lookup | None:
        """A function that tells whether a block is in DRAM or below; None if none is."""
        here, there = self._index.lookup(namespace.table), self._below.local.lookup(namespace)
        if here is None or there is None:
            return here or there
        return lambda key: here(key) or there(key)


def _behind_windows(
    namespaces: Sequence[Namespace], lookup: Callable[[Namespace], Lookup | None], keys: bytes, cut: int, least: int
) -> Steps[int]:
    """The longest cut, at most `cut`, whose windows are complete; `least` is known to be one."""
    # A missing block m rules out every cut in m+1 ..= m+w, so m is the next one to try: a window's first missing block
    # leads furthest, and a list with no block here takes one look-up per window. Blocks seen for one cut are not looked
    # up again: each block is looked up at most once per namespace.
    seen_from = [cut] * len(namespaces)
    lookups = [lookup(one) for one in namespaces]
    if None in lookups:
        return least
    settled, left = False, LOOKUPS
    while cut > least and not settled:
        settled = True
        for place, namespace in enumerate(namespaces):
            number = first = first_of_window(namespace, cut)
            end = min(seen_from[place], cut)
            while number < end:
                if not left:
                    yield
                    lookups, left = [lookup(one) for one in namespaces], LOOKUPS
                here = lookups[place]
                if here is None:
                    return least  # none of it is here
                left -= 1
                if not here(keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]):
                    cut, settled = number, False
                    break
                number += 1
            seen_from[place] = first
    return max(cut, least)
