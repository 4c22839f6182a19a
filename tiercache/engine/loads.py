"""Loads of one engine: lookups, how much of what they find is worth loading, and loads in progress.

Lookups ask the daemon in the background, so that a step never waits for it: a sequence that waits for room is looked up
as soon as there is some, and admitted by a later step, when the answer is there or late. If there is no room by then,
the answer is kept for a moment only: it holds a lease, and does not show what the cache gets meanwhile.

A load holds its own reference on every block that it copies into until its last copy has ended, even if the sequence
ends or is preempted meanwhile. A load that failed, was late or fell short is a miss: its tokens are computed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from tiercache.connector.costs import CostModel, LoadChoice, Reach
from tiercache.engine.blocks import BlockManager
from tiercache.engine.cache import GuardedCache, MatchLike, Part, TransferLike
from tiercache.engine.sequence import Sequence
from tiercache.engine.settings import Clock, EngineSettings

LOOKUP_TIMEOUT_S = 1.0
"""How long a sequence waits for a lookup, behind those before it, until it does without the cache."""
LOOKUP_KEPT_S = 1.0
"""How long an answer is kept for a sequence that finds no room; the cache is asked again once there is some."""
_MAX_CUTS = 3
"""Most cuts to query for a sequence with a window; each takes two exchanges with the daemon."""
_MAX_PREFETCHES = 2
"""Prefetches under way: a lookup may have to wait for all of them."""


class CacheHit(NamedTuple):
    """The blocks in the cache that a sequence needs, up to block `end` of its chain.

    The match covers the blocks before `end`; with sinks only the needed ones, all but `skipped`. Of several groups it
    is an `EachMatch` in the end.
    """

    match: Any
    end: int
    skipped: int = 0


class LoadOrder(NamedTuple):
    """The blocks at `positions` of the chain to load into each group, for a sequence, from a match."""

    sequence: Sequence
    hit: CacheHit
    choice: LoadChoice
    positions: list[list[int]]

    @property
    def in_pool(self) -> int:
        """Blocks that every group had in the pool."""
        needed = (len(table.window.needed(self.choice.end)) for table in self.sequence.tables)
        return min(count - len(positions) for count, positions in zip(needed, self.positions, strict=True))

    def is_own(self, cut: int) -> bool:
        """True if the blocks from block `cut` on are not shared: blocks found in the pool are shared."""
        return all([*positions, self.choice.end][0] <= cut for positions in self.positions)

    def end_of(self, good_blocks: list[int]) -> int:
        """The block up to which all groups have what they need, given the good leading blocks of each."""
        end = self.choice.end
        return min([*positions, end][good] for positions, good in zip(self.positions, good_blocks, strict=True))


class LoadResult(NamedTuple):
    """Per group the number of leading blocks proven good. Unless `ended`, the copies may still run."""

    order: LoadOrder
    good_blocks: list[int]
    ended: bool

    @classmethod
    def nothing(cls, order: LoadOrder, *, ended: bool) -> LoadResult:
        """The result of a load without a good block."""
        return cls(order, [0] * len(order.positions), ended)


@dataclass(slots=True)
class _Load:
    order: LoadOrder
    transfer: TransferLike
    block_ids: list[int]  # of all groups
    started_s: float
    deadline_s: float
    wanted: bool = True


@dataclass(slots=True)
class _Lookup:
    transfer: TransferLike  # of a list of hits
    until_s: float
    answered_s: float | None = None  # when the answer was first seen


class Loads:
    """See the module's docstring."""

    def __init__(
        self, blocks: BlockManager, cache: GuardedCache, cost: CostModel, settings: EngineSettings, clock: Clock
    ) -> None:
        self._blocks = blocks
        self._cache = cache
        self._cost = cost
        self._settings = settings
        self._clock = clock
        self._loads: list[_Load] = []
        self._lookups: dict[Sequence, _Lookup] = {}  # of sequences that wait
        self._dropped: list[TransferLike] = []  # lookups of which no sequence wants the hits
        self._prefetches: list[TransferLike] = []

    # --- finding

    def looked_up(self, sequence: Sequence) -> bool:
        """True if it is known what the cache has for a sequence that waits; begins to look it up. Never blocks.

        False for `LOOKUP_TIMEOUT_S` at most: then the sequence does without the cache.
        """
        lookup = self._lookups.get(sequence)
        if lookup is None:
            if not self._may_have(sequence):
                return True
            transfer = self._cache.ask_async(lambda: self._find(sequence), list[CacheHit]())
            lookup = self._lookups[sequence] = _Lookup(transfer, self._clock.now_s() + LOOKUP_TIMEOUT_S)
        if lookup.transfer.done():
            return True
        if self._clock.now_s() < lookup.until_s:
            return False
        self._cache.counters.lookups_given_up_count += 1
        self.drop_lookup(sequence)
        return True

    def drop_lookup(self, sequence: Sequence) -> None:
        """Do without what was, or will be, found for a sequence."""
        lookup = self._lookups.pop(sequence, None)
        if lookup is not None:
            lookup.transfer.cancel()
            self._dropped.append(lookup.transfer)

    def drop_old_answers(self) -> None:
        """Give back what was found for sequences that still wait. To be called after each admission.

        A step that comes later than `LOOKUP_KEPT_S` still finds an answer that the step before it has not seen.
        """
        now_s = self._clock.now_s()
        for sequence, lookup in list(self._lookups.items()):
            if lookup.answered_s is None:
                lookup.answered_s = now_s if lookup.transfer.done() else None
            elif now_s >= lookup.answered_s + LOOKUP_KEPT_S:
                self.drop_lookup(sequence)

    def _may_have(self, sequence: Sequence) -> bool:
        alone = not self._settings.enable_prefix_caching and not sequence.preemptions
        return self._cache.available and len(sequence.chain) > 0 and not alone and not sequence.skip_external

    def _find(self, sequence: Sequence) -> list[CacheHit]:
        """The cache's hits for a sequence, the farthest first, each with its own match. In the background.

        Several for a sequence with windows, which needs other blocks where a load ends before the blocks below DRAM,
        or before those of a shared store.
        """
        chain = sequence.chain
        if sequence.has_sinks:
            hits = [self._match_sinks(sequence)]
        elif sequence.windowed:
            hits = [self._match_windows(sequence, sequence.max_hit_blocks)]
            if hits[0] is not None:
                end, match = hits[0].end, hits[0].match
                nearer = {
                    sequence.usable_hit_blocks(end - blocks) for blocks in (match.shared_blocks, match.below_blocks)
                }
                hits += [self._match_windows(sequence, cut) for cut in sorted(nearer - {0, end}, reverse=True)]
        else:
            match = self._match(chain.packed(sequence.max_hit_blocks))
            hits = [None if match is None else CacheHit(match, match.blocks)]
        return [each for hit in hits if hit is not None and (each := self._match_each(sequence, hit)) is not None]

    def _match_windows(self, sequence: Sequence, most: int) -> CacheHit | None:
        """The last usable cut, up to block `most`, for which the cache has all needed blocks.

        The cache answers with the last cut for which each group has what it needs. If a sequence may not continue from
        there, windows need other blocks at the edge before it, and the cache is asked again.
        """
        cut = sequence.usable_hit_blocks(most)
        for _ in range(_MAX_CUTS):
            match = self._match(sequence.chain.packed(cut)) if cut else None
            if match is None:
                return None
            cut = sequence.usable_hit_blocks(match.blocks)
            if cut == match.blocks:
                return CacheHit(match, cut)
            self._release(match)
        return None

    def _match_sinks(self, sequence: Sequence) -> CacheHit | None:
        """The last usable cut for windows with sinks.

        In a list of keys the cache finds the last place after a whole window. A second query, with the keys of sinks
        and window alone, tells whether it has the blocks for a cut.
        """
        [table] = sequence.tables
        chain, cut = sequence.chain, sequence.usable_hit_blocks(sequence.max_hit_blocks)
        for _ in range(_MAX_CUTS):
            positions = table.window.needed(cut)
            match = self._match(b"".join(map(chain.key, positions))) if positions else None
            if match is None:
                return None
            if match.blocks == len(positions):
                return CacheHit(match, cut, cut - len(positions))
            self._release(match)
            before = self._match(chain.packed(cut - 1))
            if before is None:
                return None
            self._release(before)
            cut = sequence.usable_hit_blocks(before.blocks)
        return None

    def _match_each(self, sequence: Sequence, hit: CacheHit) -> CacheHit | None:
        keys = sequence.chain.packed(hit.end)
        each = self._cache.ask(lambda cache: cache.match_each(hit.match, keys))
        return None if each is None else hit._replace(match=each)

    def _match(self, keys: bytes) -> MatchLike | None:
        match = self._cache.ask(lambda cache: cache.match(keys))
        return match if match is not None and match.blocks else None

    def _release(self, match: MatchLike) -> None:
        self._cache.ask(lambda cache: cache.release(match))

    def prefetch(self, sequence: Sequence) -> bool:
        """Promote the cache's blocks of a sequence to DRAM, in the background; False while others are looked up."""
        self._prefetches = [transfer for transfer in self._prefetches if not transfer.done()]
        if len(self._prefetches) >= _MAX_PREFETCHES or self._pending_lookups:
            return False
        if self._may_have(sequence):
            keys = self._keys_to_prefetch(sequence)
            ask = partial(self._cache.ask, lambda cache: cache.prefetch(keys))
            self._prefetches.append(self._cache.ask_async(ask, None))
        return True

    def _keys_to_prefetch(self, sequence: Sequence) -> bytes:
        chain, cut = sequence.chain, sequence.max_hit_blocks
        if not sequence.windowed:
            return chain.packed(cut)
        if not sequence.has_sinks:
            return chain.packed(sequence.usable_hit_blocks(cut))
        return b"".join(map(chain.key, sequence.tables[0].window.needed(sequence.usable_hit_blocks(cut))))

    def choose(self, sequence: Sequence, kept: int) -> tuple[CacheHit | None, LoadChoice]:
        """The part to load of what was looked up for a sequence, which can begin at block `kept` without a load, and
        the hit for it. Gives up the other hits."""
        hits = self._take_hits(sequence)
        hit_of: dict[int, CacheHit] = {}
        reaches: list[Reach] = []
        for hit in hits:
            dram_end, local_end = hit.end - hit.match.below_blocks, hit.end - hit.match.shared_blocks
            # A match of windows, or of sinks, covers what is needed before its end, and does not serve another cut.
            ends = {hit.end} if sequence.windowed else {dram_end, local_end, hit.end}
            for end in map(sequence.usable_hit_blocks, ends):
                hit_of[end] = hit
                reaches.append(self._reach(sequence, end, dram_end, local_end))
        choice = self._cost.choose(kept, reaches, sum(load.order.choice.load_s for load in self._loads))
        chosen = hit_of[choice.end] if choice.blocks else None
        for hit in hits:
            if hit is not chosen:
                self._cache.release_async(hit.match)
        return chosen, choice

    def _take_hits(self, sequence: Sequence) -> list[CacheHit]:
        """What was looked up for a sequence; nothing if it waits for no answer, because the pool has it all."""
        lookup = self._lookups.get(sequence)
        if lookup is None or not lookup.transfer.done():
            self.drop_lookup(sequence)
            return []
        hits: list[CacheHit] = self._lookups.pop(sequence).transfer.result(0)
        return hits

    def named_end(self, hit: CacheHit) -> int:
        """The end of the blocks of a hit that need no store.

        The daemon does not know what blocks from a shared store are called. Where it publishes KV events, a store names
        them, which copies nothing as long as they are there.
        """
        return hit.end - hit.match.shared_blocks if self._cache.wants_events else hit.end

    def _reach(self, sequence: Sequence, end: int, dram_end: int, local_end: int) -> Reach:
        """The load that ends at block `end`: the blocks needed there that the pool lacks."""
        missing = [position for positions in self.missing(sequence, end) for position in positions]
        dram = sum(position < dram_end for position in missing)
        shared = sum(position >= local_end for position in missing)
        return Reach(end, dram, len(missing) - dram - shared, shared)

    def missing(self, sequence: Sequence, end: int) -> list[list[int]]:
        """The blocks that a load ending at block `end` brings to each group: the needed blocks after those in the
        pool."""
        missing = []
        for group, table in enumerate(sequence.tables):
            positions = table.window.needed(end)
            missing.append(positions[len(self._blocks.find(sequence.chain, positions, group)) :])
        return missing

    # --- loading

    def start(self, order: LoadOrder) -> bool:
        """Start a load into the sequence's blocks; False (and no load) if the cache refused it."""
        sequence, hit, choice, each = order
        begin = choice.end - hit.skipped
        parts = [
            Part(begin - len(positions), [table.ids[position] for position in positions])
            for table, positions in zip(sequence.tables, each, strict=True)
        ]
        patience_s = min(self._cost.patience_s(choice), self._settings.load_timeout_s)
        transfer = self._cache.ask(lambda cache: cache.load_async(hit.match, parts, timeout_s=patience_s))
        self._cache.release_async(hit.match)  # of the groups of which nothing is loaded
        if transfer is None:
            return False
        block_ids = [block_id for part in parts for block_id in part.block_ids]
        self._blocks.hold(block_ids)
        now_s = self._clock.now_s()
        self._loads.append(_Load(order, transfer, block_ids, now_s, now_s + patience_s))
        return True

    def abandon(self, sequence: Sequence) -> None:
        """Give up a sequence's load. Its blocks stay held until the copies have ended."""
        for load in self._loads:
            if load.order.sequence is sequence and load.wanted:
                load.wanted = False
                load.transfer.cancel()

    def poll(self) -> list[LoadResult]:
        """Handle loads that have ended or are too late. Never blocks."""
        self._release_dropped()
        results: list[LoadResult] = []
        now_s = self._clock.now_s()
        for load in list(self._loads):
            if load.transfer.done():
                self._loads.remove(load)
                if load.wanted:
                    results.append(LoadResult(load.order, self._finish(load), ended=True))
                self._blocks.release(load.block_ids)
            elif load.wanted and now_s >= load.deadline_s:
                load.wanted = False
                load.transfer.cancel()
                self._cache.counters.loads_given_up_count += 1
                self._cost.note_given_up(load.order.choice, now_s - load.started_s)
                results.append(LoadResult.nothing(load.order, ended=False))
        return results

    def _release_dropped(self) -> None:
        """Release what was found for sequences that do without it."""
        for transfer in [one for one in self._dropped if one.done()]:
            self._dropped.remove(transfer)
            for hit in transfer.result(0):
                self._cache.release_async(hit.match)

    def _finish(self, load: _Load) -> list[int]:
        choice, transfer, counts = (
            load.order.choice,
            load.transfer,
            [len(positions) for positions in load.order.positions],
        )
        answer: list[int] = self._cache.ask(lambda _: transfer.result(0)) or [0] * len(counts)
        good_blocks = [min(good, count) for good, count in zip(answer, counts, strict=True)]
        note = self._cost.note_load if good_blocks == counts else self._cost.note_miss
        note(choice, transfer.ended_s - transfer.began_s, transfer.ended_s - load.started_s)
        self._cache.counters.loaded += sum(good_blocks)
        self._cache.counters.load_misses += sum(counts) - sum(good_blocks)
        return good_blocks

    @property
    def transfers(self) -> list[TransferLike]:
        """All that may bring something for the next step."""
        return [*(load.transfer for load in self._loads), *self._dropped, *self._pending_lookups]

    @property
    def _pending_lookups(self) -> list[TransferLike]:
        return [one.transfer for one in self._lookups.values() if not one.transfer.done()]

    def holds(self) -> Counter[int]:
        """References held by loads, per block."""
        return Counter(block_id for load in self._loads for block_id in load.block_ids)
