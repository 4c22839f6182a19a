"""Loads of one engine: what is found in the cache, how much of it is worth loading, and what is under way.

A load's blocks belong to it until its last copy has ended. So it has its own reference on every block
that it copies into, whatever becomes of the sequence meanwhile. A load that failed, was late or came short
is a miss: its tokens are computed.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from tiercache.engine.blocks import BlockManager
from tiercache.engine.cache import GuardedCache, MatchLike, TransferLike
from tiercache.engine.cost import CostModel, LoadChoice, Reach
from tiercache.engine.sequence import Sequence
from tiercache.engine.settings import EngineSettings

_MAX_CUTS = 3
"""Cuts that a cache is asked for, of a sequence with a window; each takes two exchanges with the daemon."""


class CacheHit(NamedTuple):
    """What the cache has that a sequence needs, up to block `end` of its chain.

    The match is over the blocks that a sequence needs to go on from there: all but `skipped` of those before it.
    """

    match: MatchLike
    end: int
    skipped: int = 0


class LoadOrder(NamedTuple):
    """The blocks of `choice` are to be loaded for a sequence, from what was found."""

    sequence: Sequence
    hit: CacheHit
    choice: LoadChoice

    @property
    def numbers(self) -> list[int]:
        """Which blocks of the chain these are."""
        return self.sequence.window.needed(self.choice.end)[self.choice.first - self.choice.end :]


class LoadResult(NamedTuple):
    """`good_blocks` leading blocks of the order are proven good. Unless `ended`, the copies may still run."""

    order: LoadOrder
    good_blocks: int
    ended: bool


@dataclass(slots=True)
class _Load:
    order: LoadOrder
    transfer: TransferLike
    block_ids: list[int]
    started_s: float
    deadline_s: float
    wanted: bool = True


class Loads:
    """See the module."""

    def __init__(self, blocks: BlockManager, cache: GuardedCache, cost: CostModel, settings: EngineSettings) -> None:
        self._blocks = blocks
        self._cache = cache
        self._cost = cost
        self._settings = settings
        self._loads: list[_Load] = []

    # --- finding

    def match(self, sequence: Sequence) -> CacheHit | None:
        """What the cache has of a sequence, or None. Blocks for one exchange with the daemon, a few with a window."""
        if not self._may_have(sequence):
            return None
        if sequence.window.size:
            return self._match_window(sequence)
        match = self._match(sequence.chain.packed(sequence.max_hit_blocks))
        return None if match is None else CacheHit(match, match.blocks)

    def _match_window(self, sequence: Sequence) -> CacheHit | None:
        """The last cut that may be gone on from of which the cache has all that is needed.

        It keeps such blocks without those before them. Of a list of keys it finds the last place behind a whole
        window; whether the blocks for a cut are there, it is asked with these alone: sinks and window.
        """
        chain, cut = sequence.chain, sequence.usable_hit_blocks(sequence.max_hit_blocks)
        for _ in range(_MAX_CUTS):
            numbers = sequence.window.needed(cut)
            match = self._match(b"".join(map(chain.key, numbers))) if numbers else None
            if match is None:
                return None
            if match.blocks == len(numbers):
                return CacheHit(match, cut, cut - len(numbers))
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
        """End the lease of what is not loaded."""
        if hit is not None:
            self._release(hit.match)

    def prefetch(self, sequence: Sequence) -> None:
        """Bring what the cache has of a sequence up to DRAM. Blocks for one exchange with the daemon."""
        # What windows need is never below it.
        if self._may_have(sequence) and not sequence.window.size:
            self._cache.ask(lambda cache: cache.prefetch(sequence.chain.packed(sequence.max_hit_blocks)))

    def choose(self, sequence: Sequence, hit: CacheHit, kept: int) -> LoadChoice:
        """What of a hit to load, where a sequence can begin at block `kept` without a load."""
        dram_end = hit.end - hit.match.below_blocks
        ends = {sequence.usable_hit_blocks(end) for end in (dram_end, hit.end)}
        queue_s = sum(load.order.choice.load_s for load in self._loads)
        return self._cost.choose(kept, [self._reach(sequence, end) for end in ends], dram_end, queue_s)

    def _reach(self, sequence: Sequence, end: int) -> Reach:
        """The load that ends at block `end`: it begins behind what the pool has of what is needed."""
        numbers = sequence.window.needed(end)
        return Reach(end, end - len(numbers) + len(self._blocks.find(sequence.chain, numbers)))

    # --- loading

    def start(self, order: LoadOrder) -> bool:
        """Begin a load into the sequence's blocks; False (and no load) if the cache refused it."""
        match, first = order.hit.match, order.choice.first - order.hit.skipped
        block_ids = [order.sequence.block_table[number] for number in order.numbers]
        patience_s = min(self._cost.patience_s(order.choice), self._settings.load_timeout_s)
        transfer = self._cache.ask(
            lambda cache: cache.load_async(match, block_ids, first=first, timeout_s=patience_s)
        )
        if transfer is None:
            self._release(match)
            return False
        self._blocks.hold(block_ids)
        now_s = time.monotonic()
        self._loads.append(_Load(order, transfer, block_ids, now_s, now_s + patience_s))
        return True

    def abandon(self, sequence: Sequence) -> None:
        """The sequence no longer wants its load. Its blocks stay held until the copies have ended."""
        for load in self._loads:
            if load.order.sequence is sequence and load.wanted:
                load.wanted = False
                load.transfer.cancel()

    def poll(self) -> list[LoadResult]:
        """Take note of all loads that have ended or are too late. Never blocks."""
        results: list[LoadResult] = []
        now_s = time.monotonic()
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
                results.append(LoadResult(load.order, 0, ended=False))
        return results

    def _finish(self, load: _Load) -> int:
        choice, transfer, count = load.order.choice, load.transfer, len(load.block_ids)
        good = min(self._cache.ask(lambda _: int(transfer.result(0))) or 0, count)
        note = self._cost.note_load if good == count else self._cost.note_miss
        note(choice, transfer.ended_s - transfer.began_s, transfer.ended_s - load.started_s)
        self._cache.counters.loaded += good
        self._cache.counters.load_misses += count - good
        return good

    @property
    def transfers(self) -> list[TransferLike]:
        return [load.transfer for load in self._loads]

    def holds(self) -> Counter[int]:
        """References that loads have, per block."""
        return Counter(block_id for load in self._loads for block_id in load.block_ids)
