"""Decides whether a load is worth it, from the recent cost of loads and prefill in this engine.

Where computing is faster than a disk or the network, or than the trip for a block or two, loading a hit makes its
request later, and with many of them the engine slower, than without a cache (vLLM's issue 44294). Nothing needs to be
configured for that: both speeds are measured while the engine works. Until they are measured, hits are loaded.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from tiercache.connector.loads import Match

MEASURED_TOKENS = 128
"""Steps of fewer tokens say little about prefill."""
LAST_STEPS = 15
LAST_LOADS = 5
LEAST_SAMPLES = 3
"""The median of fewer could be that of a bad moment."""
ASK_AGAIN = 8
"""One load in this number that would not be worth it is done all the same: the tier may have become fast."""

logger = logging.getLogger("tiercache.connectors.vllm")


class TierBlocks(NamedTuple):
    """Blocks of a match in their order: in DRAM, then on NVMe, then in a store that hosts share."""

    dram: int
    nvme: int = 0
    shared: int = 0


TIER_NAMES = "DRAM", "NVMe", "the shared store"


def tiers_of(match: Match, first: int, end: int) -> TierBlocks:
    """Where blocks `first ..< end` of a match are."""
    dram_end, local_end = match.blocks - match.below_blocks, match.blocks - match.shared_blocks
    in_dram = min(max(0, dram_end - first), end - first)
    local = min(max(0, local_end - first), end - first)
    return TierBlocks(in_dram, local - in_dram, end - first - local)


class _Price:
    """Measured times of loads of about one length from one tier."""

    __slots__ = ("declined", "samples")

    def __init__(self) -> None:
        self.samples: deque[float] = deque(maxlen=LAST_LOADS)  # seconds per block
        self.declined = 0

    def of(self, blocks: int) -> float | None:
        """Seconds for that many blocks; None if too few loads were measured."""
        return median(self.samples) * blocks if len(self.samples) >= LEAST_SAMPLES else None


class EngineCosts:
    """The costs of one engine. Used by vLLM's scheduler thread; each call takes some microseconds at most.

    Both costs are of the work alone, without queueing, so that they compare in a queue too.

    Args:
        block_size: tokens in a block.
        batches: steps that the engine has in flight at the same time (`VllmConfig.max_concurrent_batches`).
        partial: whether a match can be loaded in part; not if a window has left holes in it.

    Attributes:
        declined_blocks: found but not loaded, so far.
    """

    def __init__(self, block_size: int, batches: int = 1, partial: bool = True) -> None:
        self.declined_blocks = 0
        self._block_size = block_size
        self._partial = partial
        self._flight: deque[int] = deque(maxlen=batches)  # tokens of the last steps
        self._witness: str | None = None  # a request of the last step
        self._last_s = 0.0
        self._steps: deque[float] = deque(maxlen=LAST_STEPS)  # seconds per block
        self._block_s: float | None = None
        self._prices: dict[tuple[int, int], _Price] = {}  # by tier, and length to a power of two

    # --- what is measured

    def stepped(self, running: Mapping[str, int], tokens: int, now_s: float) -> None:
        """A step with these requests and tokens has just been scheduled, at `now_s` of a steady clock.

        The time since the step before is the time of the oldest one in flight, if the engine was never idle: a
        request of the last step is in this one too.
        """
        if self._witness not in running:
            self._flight.clear()
        elif len(self._flight) == self._flight.maxlen and self._flight[0] >= MEASURED_TOKENS:
            self._steps.append((now_s - self._last_s) / self._flight[0] * self._block_size)
            if len(self._steps) >= LEAST_SAMPLES:
                self._block_s = median(self._steps)
        self._flight.append(tokens)
        self._witness = next(iter(running), None)
        self._last_s = now_s

    def loaded(self, blocks: TierBlocks, seconds: float) -> None:
        """Note how long a load of these blocks took. The shares of the nearer tiers are known from others."""
        farthest = max(tier for tier, count in enumerate(blocks) if count)
        for tier, count in enumerate(blocks[:farthest]):
            if count:
                seconds -= min(seconds, self._price(tier, count).of(count) or 0.0)
        price = self._price(farthest, blocks[farthest])
        price.samples.append(seconds / blocks[farthest])
        price.declined = 0

    def _price(self, tier: int, blocks: int) -> _Price:
        return self._prices.setdefault((tier, blocks.bit_length()), _Price())

    # --- what follows

    def choose(self, blocks: TierBlocks) -> int:
        """How many leading blocks of a match to load.

        None, or those up to the end of one of the tiers: whichever saves the most time; what is not known yet is
        taken to cost nothing. Counts as a decision: call once per request.
        """
        whole, block_s = sum(blocks), self._block_s
        if block_s is None:
            return whole
        saved_s = [
            count * block_s - (self._price(tier, count).of(count) or 0.0) if count else 0.0
            for tier, count in enumerate(blocks)
        ]
        ends = range(len(blocks) + 1) if self._partial else (0, len(blocks))
        best = max(ends, key=lambda end: (sum(saved_s[:end]), end))
        loaded = sum(blocks[:best])
        if loaded == whole:
            return whole
        slowest = min(range(best, len(blocks)), key=saved_s.__getitem__)
        return self._decline(slowest, blocks, loaded)

    def _decline(self, tier: int, blocks: TierBlocks, best: int) -> int:
        """Load only `best` blocks, because of the price of a tier; but now and then all up to the end of that tier."""
        price, count, whole = self._price(tier, blocks[tier]), blocks[tier], sum(blocks)
        price.declined += 1
        if price.declined % ASK_AGAIN == 0:
            best = sum(blocks[: tier + 1]) if self._partial else whole
        elif price.declined == 1:
            load_ms, compute_ms = (price.of(count) or 0.0) * 1e3, (self._block_s or 0.0) * count * 1e3
            logger.info(
                "%d blocks from %s take %.3g ms, and to compute them %.3g: for now such hits are computed",
                count,
                TIER_NAMES[tier],
                load_ms,
                compute_ms,
            )
        self.declined_blocks += whole - best
        return best
