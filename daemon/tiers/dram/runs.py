"""Finds the blocks of a prompt, and pins the entries that hold them.

Pinning one entry holds a chain, its deepest: nothing before it can be evicted while it has a descendant. A windowed
namespace has no chains, so there each block of the window is pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import NamedTuple

from tiercache.daemon.ground.slices import PINS, AnswerNow, Steps, noted
from tiercache.daemon.index.policy import NO_ENTRY, USED
from tiercache.protocol.messages import KEY_BYTES

from .below import TierBelow
from .leases import Owner
from .match_ends import Cuts
from .space import Namespace, Space, first_of_window

MAX_TOGETHER = 64
"""Namespaces that are searched and used in one slice; with more, the search is a slice of its own."""
_TRIES = 4
"""How often a run is searched again after others flush or evict part of it meanwhile."""


class RunBlocks(NamedTuple):
    """Blocks of a leading run: in DRAM, then in a tier below it on this host, then in a store that hosts share."""

    dram: int
    below: int
    shared: int


class Runs:
    """The longest runs that several namespaces have. Event loop only."""

    def __init__(self, space: Space, below: TierBelow) -> None:
        self._space = space
        self._below = below
        self._cuts = Cuts(space, below)
        self._taken: dict[int, list[int]] = {}  # pinned entries meant for a lease, by the list's id
        self._unpinning: list[int] = []  # entries of which one pin each is to be undone

    def peek(self, namespaces: Sequence[Namespace], keys: bytes) -> Steps[RunBlocks]:
        """What `match` would find. Changes nothing, not even recency."""
        blocks = yield from self._cuts.in_dram(namespaces, keys, len(keys) // KEY_BYTES)
        here, total = yield from self._cuts.with_below(namespaces, keys, blocks)
        return RunBlocks(blocks, here - blocks, total - here)

    def lengths(self, namespaces: Sequence[Namespace], keys: bytes) -> list[int]:
        """How many leading blocks of each chain this host has; 0 for a namespace with a window."""
        limit, length = len(keys) // KEY_BYTES, self._cuts.chain_length
        return [0 if one.table.windowed else length(one, keys, limit) for one in namespaces]

    def use(
        self, owner: Owner, namespaces: Sequence[Namespace], keys: bytes, limit: int, pin: bool
    ) -> Steps[tuple[RunBlocks, list[int]]]:
        """The longest run, and the entries that hold its part in DRAM, if they are to be pinned (see `_hold`). The
        policies are told that it is used.
        """
        wide = len(namespaces) > MAX_TOGETHER
        for _ in range(_TRIES):
            blocks, searched_in_slices = yield from noted(self._cuts.in_dram(namespaces, keys, limit))
            (here, total), extended_in_slices = yield from noted(self._cuts.with_below(namespaces, keys, blocks))
            if wide:
                with suppress(AnswerNow):  # then it takes a little longer
                    yield
            use = self._user(namespaces, keys, blocks, total)
            ends, held_in_slices = yield from noted(self._hold(namespaces, keys, blocks, use, pin))
            if ends is not None:
                return RunBlocks(blocks, here - blocks, total - here), ends
            limit = self._shortened(owner, blocks, wide or searched_in_slices or extended_in_slices or held_in_slices)
        self._user(namespaces, keys, 0, 0)([], True)
        return RunBlocks(0, 0, 0), []

    def _user(
        self, namespaces: Sequence[Namespace], keys: bytes, blocks: int, found: int
    ) -> Callable[[list[int], bool], None]:
        """A callback that tells the policies of both tiers what is requested, and which blocks are used.

        The deepest block in each namespace stands for all. Blocks after the first slice are used too, but other
        requests may have come in between, so nothing is learnt from them.
        """
        predictor = self._space.policies.predictor

        def use(entries: list[int], first: bool) -> None:
            if not keys:
                return
            how = USED
            if first:
                self._space.prompts.asked(keys)
                if predictor is not None:
                    how = predictor.asked(keys, blocks, found)
                self._below.matched(namespaces, keys, blocks, found, how)
            for entry in entries:
                self._space.index.touch(entry, how)

        return use

    def take(self, namespaces: Sequence[Namespace], keys: bytes, limit: int) -> Steps[tuple[int, list[int]]]:
        """The longest run of at most `limit` blocks, and the entries whose pins hold all of it, pinned.

        The pins are for a lease or `untake`. Blocks lost between two slices make the run shorter.
        """
        for _ in range(_TRIES):
            blocks, searched_in_slices = yield from noted(self._cuts.in_dram(namespaces, keys, limit))
            ends, held_in_slices = yield from noted(self._hold(namespaces, keys, blocks))
            if ends is not None:
                return blocks, ends
            limit = self._shortened(None, blocks, searched_in_slices or held_in_slices)
        return 0, []

    def _shortened(self, owner: Owner | None, blocks: int, sliced: bool) -> int:
        """How far to search next, after a run of that length turned out to be missing."""
        if sliced:
            return blocks
        # Another namespace cut the search short at a key that this one lacks, although it has a later one: the list is
        # no chain.
        self._space.counters.broken_chains += 1
        if owner is not None:
            owner.broken_chains += 1
        return 0

    # --- pins on entries ---------------------------------------------------------------------------

    def _hold(
        self,
        namespaces: Sequence[Namespace],
        keys: bytes,
        blocks: int,
        use: Callable[[list[int], bool], None] = lambda entries, first: None,
        pin: bool = True,
    ) -> Steps[list[int] | None]:
        """Pin the entries that hold a run: each block of a window, the deepest of a chain.

        None where one is not here (any more). `use` is called with a slice of them at a time, and whether it is the
        first.
        """
        index = self._space.index
        drops, ends, entries = index.drops, list[int](), self._ends(namespaces, keys, blocks)
        if pin and blocks:
            self._taken[id(ends)] = ends
        first, whole = True, False
        try:
            while True:
                some = list(islice(entries, PINS))
                if NO_ENTRY in some:
                    return None
                if first or some:
                    use(some, first)
                if pin:
                    for entry in some:
                        index.pin(entry)
                    ends.extend(some)
                if len(some) < PINS:
                    break
                first = False
                yield
            whole = index.drops == drops or index.all_attached(ends)
            return ends if whole else None
        finally:
            if not whole:
                self.untake(ends)

    def _ends(self, namespaces: Sequence[Namespace], keys: bytes, blocks: int) -> Iterator[int]:
        """Entries, looked up lazily; NO_ENTRY for what is not here."""
        attached = self._space.index.attached
        for namespace in namespaces if blocks else ():
            table = namespace.table
            for number in range(first_of_window(namespace, blocks) if table.windowed else blocks - 1, blocks):
                entry = table.get(keys[number * KEY_BYTES : (number + 1) * KEY_BYTES])
                yield entry if entry != NO_ENTRY and attached(entry) else NO_ENTRY

    def taken_over(self, ends: list[int]) -> None:
        """A lease has these pins now."""
        self._taken.pop(id(ends), None)

    def untake(self, ends: list[int]) -> None:
        """Unpin what was taken and did not become a lease's."""
        if self._taken.pop(id(ends), None) is not None:
            self.unpin(ends)

    def unpin(self, entries: list[int]) -> None:
        """Undo one pin of each; of many, a slice at a time."""
        if len(entries) > PINS:
            self._unpinning.extend(entries)
            self._space.index.note_moved(entries)
            return
        for entry in entries:
            self._space.index.unpin(entry)

    def loose_pins(self) -> Iterator[int]:
        """Entries with a pin that no lease has: not yet, or no longer."""
        return chain(self._unpinning, self._space.index.walked_from, *self._taken.values())

    @property
    def busy(self) -> bool:
        """True if `work` has more to do."""
        return bool(self._unpinning)

    def work(self) -> bool:
        """Undo a slice of pins; True while there is more."""
        for _ in range(min(PINS, len(self._unpinning))):
            self._space.index.unpin(self._unpinning.pop())
        return bool(self._unpinning)
