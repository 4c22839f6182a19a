"""Loads of one engine: matches, how much of each is worth loading, and loads in progress.

A load holds its own reference on every block that it copies into until its last copy has ended, even if the sequence
ends or is preempted meanwhile. A load that failed, was late or fell short is a miss: its tokens are computed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from tiercache.engine.blocks import BlockManager
from tiercache.engine.cache import GuardedCache, MatchLike, Part, TransferLike
from tiercache.engine.clock import Clock
from tiercache.engine.cost import CostModel, LoadChoice, Reach
from tiercache.engine.sequence import Sequence
from tiercache.engine.settings import EngineSettings

_MAX_CUTS = 3
"""Most cuts to query for a sequence with a window; each takes two exchanges with the daemon."""


class CacheHit(NamedTuple):
    """The blocks in the cache that a sequence needs, up to block `end` of its chain.

    The match covers the blocks before `end`; with sinks only the needed ones, all but `skipped`.
    """

    match: MatchLike
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
        """Whether the blocks from block `cut` on are not shared: blocks found in the pool are shared."""
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

    # --- finding

    def match(self, sequence: Sequence) -> CacheHit | None:
        """The cache's hit for a sequence, or None. Blocks for one exchange with the daemon, a few with a window."""
        if not self._may_have(sequence):
            return None
        if sequence.has_sinks:
            return self._match_sinks(sequence)
        if sequence.windowed:
            return self._match_windows(sequence)
        match = self._match(sequence.chain.packed(sequence.max_hit_blocks))
        return None if match is None else CacheHit(match, match.blocks)

    def _match_windows(self, sequence: Sequence) -> CacheHit | None:
        """The last usable cut for which the cache has all needed blocks.

        The cache answers with the last cut for which each group has what it needs. If a sequence may not continue from
        there, windows need other blocks at the edge before it, and the cache is asked again.
        """
        cut = sequence.usable_hit_blocks(sequence.max_hit_blocks)
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

    def _match(self, keys: bytes) -> MatchLike | None:
        return self._cache.ask(lambda cache: cache.match(keys))

    def _release(self, match: MatchLike) -> None:
        self._cache.ask(lambda cache: cache.release(match))

    def _may_have(self, sequence: Sequence) -> bool:
        alone = not self._settings.enable_prefix_caching and not sequence.preemptions
        return self._cache.available and len(sequence.chain) > 0 and not alone

    def give_up(self, hit: CacheHit | None) -> None:
        """End the lease of a hit that is not loaded."""
        if hit is not None:
            self._release(hit.match)

    def prefetch(self, sequence: Sequence) -> None:
        """Promote the cache's blocks of a sequence to DRAM. Blocks for one exchange with the daemon."""
        if not self._may_have(sequence):
            return
        chain, cut = sequence.chain, sequence.max_hit_blocks
        if not sequence.windowed:
            keys = chain.packed(cut)
        elif not sequence.has_sinks:
            keys = chain.packed(sequence.usable_hit_blocks(cut))
        else:
            keys = b"".join(map(chain.key, sequence.tables[0].window.needed(sequence.usable_hit_blocks(cut))))
        self._cache.ask(lambda cache: cache.prefetch(keys))

    def choose(self, sequence: Sequence, hit: CacheHit, kept: int) -> tuple[CacheHit | None, LoadChoice]:
        """The part of a hit to load, and the hit for it, if a sequence can begin at block `kept` without a load."""
        dram_end, local_end = hit.end - hit.match.below_blocks, hit.end - hit.match.shared_blocks
        # With sinks the match covers what is needed before its end, and does not serve another cut.
        ends = {hit.end} if sequence.has_sinks else {dram_end, local_end, hit.end}
        queue_s = sum(load.order.choice.load_s for load in self._loads)
        reaches = [self._reach(sequence, sequence.usable_hit_blocks(end), dram_end, local_end) for end in ends]
        choice = self._cost.choose(kept, reaches, queue_s)
        if not (sequence.windowed and choice.blocks and choice.end < hit.end):
            return hit, choice
        # Windows need other blocks before the shorter cut, which are not under the lease.
        self._release(hit.match)
        match = self._match(sequence.chain.packed(choice.end))
        if (
            match is None
            or match.blocks < choice.end
            or match.shared_blocks
            or (match.below_blocks and not choice.nvme_blocks)
        ):
            choice = LoadChoice(kept)
        return None if match is None else CacheHit(match, match.blocks), choice

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
        keys = sequence.chain.packed(choice.end)
        transfer = self._cache.ask(lambda cache: cache.load_async(hit.match, keys, parts, timeout_s=patience_s))
        if transfer is None:
            self._release(hit.match)
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
        return [load.transfer for load in self._loads]

    def holds(self) -> Counter[int]:
        """References held by loads, per block."""
        return Counter(block_id for load in self._loads for block_id in load.block_ids)
