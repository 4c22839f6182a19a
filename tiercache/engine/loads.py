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
from tiercache.engine.cost import CostModel, LoadChoice
from tiercache.engine.sequence import Sequence
from tiercache.engine.settings import EngineSettings


class LoadOrder(NamedTuple):
    """The blocks of `choice` are to be loaded for a sequence, from what `match` found."""

    sequence: Sequence
    match: MatchLike
    choice: LoadChoice


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

    def match(self, sequence: Sequence) -> MatchLike | None:
        """What the cache has of a sequence, or None. Blocks for one exchange with the daemon."""
        if not self._may_have(sequence):
            return None
        return self._cache.ask(lambda cache: cache.match(sequence.chain.packed(sequence.max_hit_blocks)))

    def _may_have(self, sequence: Sequence) -> bool:
        alone = not self._settings.enable_prefix_caching and not sequence.preemptions
        return self._cache.available and len(sequence.chain) > 0 and not alone

    def give_up(self, match: MatchLike | None) -> None:
        """End the lease of a match that is not loaded."""
        if match is not None:
            self._cache.ask(lambda cache: cache.release(match))

    def prefetch(self, sequence: Sequence) -> None:
        """Bring what the cache has of a sequence up to DRAM. Blocks for one exchange with the daemon."""
        if self._may_have(sequence):
            self._cache.ask(lambda cache: cache.prefetch(sequence.chain.packed(sequence.max_hit_blocks)))

    def choose(self, sequence: Sequence, match: MatchLike, kept: int, found: int) -> LoadChoice:
        """What of a match to load, where the pool has `found` blocks and can give `kept` without a load."""
        dram_end = match.blocks - match.below_blocks
        reaches = [sequence.usable_hit_blocks(end) for end in (dram_end, match.blocks)]
        queue_s = sum(load.order.choice.load_s for load in self._loads)
        return self._cost.choose(kept, found, reaches, dram_end, queue_s)

    # --- loading

    def start(self, order: LoadOrder) -> bool:
        """Begin a load into the sequence's blocks; False (and no load) if the cache refused it."""
        choice = order.choice
        block_ids = order.sequence.block_table[choice.first : choice.end]
        patience_s = min(self._cost.patience_s(choice), self._settings.load_timeout_s)
        transfer = self._cache.ask(
            lambda cache: cache.load_async(order.match, block_ids, first=choice.first, timeout_s=patience_s)
        )
        if transfer is None:
            self.give_up(order.match)
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
