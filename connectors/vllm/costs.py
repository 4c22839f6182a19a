"""Decides whether a load is worth it, from the recent cost of loads and prefill in this engine.

Where computing is faster than a disk or the network, or than the trip for a block or two, loading a hit makes its
request later, and with many of them the engine slower, than without a cache (vLLM's issue 44294). Nothing needs to be
configured for that: both speeds are measured while the engine works.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

from tiercache.connector.costs import CostModel, LoadChoice, Reach
from tiercache.connector.loads import Match

MEASURED_TOKENS = 128
"""Steps of fewer tokens say little about prefill."""

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


class EngineCosts:
    """The costs of one engine. Used by vLLM's scheduler thread; each call takes some microseconds at most.

    Both costs are of the work alone, without queueing, so that they compare in a queue too.

    Args:
        block_size: tokens in a block.
        block_bytes: bytes of a block in all groups of layers of one rank.
        batches: steps that the engine has in flight at the same time (`VllmConfig.max_concurrent_batches`).
        partial: whether a match can be loaded in part; not if a window has left holes in it.

    Attributes:
        declined_blocks: found but not loaded, so far.
    """

    def __init__(self, block_size: int, block_bytes: int, batches: int = 1, partial: bool = True) -> None:
        self.declined_blocks = 0
        self._block_size = block_size
        self._partial = partial
        self._model = CostModel(block_size, block_bytes)
        self._flight: deque[int] = deque(maxlen=batches)  # tokens of the last steps
        self._witness: str | None = None  # a request of the last step
        self._last_s = 0.0
        self._too_slow: set[int] = set()  # tiers of which the log says so

    def stepped(self, running: Mapping[str, int], tokens: int, now_s: float) -> None:
        """A step with these requests and tokens has just been scheduled, at `now_s` of a steady clock.

        The time since the step before is the time of the oldest one in flight, if the engine was never idle: a
        request of the last step is in this one too.
        """
        if self._witness not in running:
            self._flight.clear()
        elif len(self._flight) == self._flight.maxlen and self._flight[0] >= MEASURED_TOKENS:
            self._model.note_prefill(self._flight[0], 0, now_s - self._last_s)
        self._flight.append(tokens)
        self._witness = next(iter(running), None)
        self._last_s = now_s

    def loaded(self, blocks: TierBlocks, seconds: float, failed: bool = False) -> None:
        """Note how long a load of these blocks took, or until it failed."""
        note = self._model.note_miss if failed else self._model.note_load
        note(LoadChoice(sum(blocks), *blocks, load_s=self._model.load_s(*blocks)), seconds, waited_s=0.0)

    def choose(self, blocks: TierBlocks) -> int:
        """How many leading blocks of a match to load: none, or those up to the end of one of the tiers.

        See `CostModel`. Counts as a decision: call once per request.
        """
        whole = sum(blocks)
        if self._partial:
            ends = list(accumulate(blocks))
            reaches = [Reach(end, *blocks[: tier + 1]) for tier, end in enumerate(ends)]
        else:
            ends, reaches = [whole] * len(blocks), [Reach(whole, *blocks)]
        figures = [self._load_and_compute_s(tier, count) for tier, count in enumerate(blocks)]
        end = self._model.choose(0, reaches, 0.0).end
        self.declined_blocks += whole - end
        for tier, (load_s, compute_s) in enumerate(figures):
            if ends[tier] <= end and blocks[tier]:
                self._too_slow.discard(tier)
            elif load_s > compute_s and tier not in self._too_slow:
                self._too_slow.add(tier)
                logger.info(
                    "%d blocks from %s take %.3g ms, and to compute them %.3g: for now such hits are computed",
                    blocks[tier],
                    TIER_NAMES[tier],
                    load_s * 1e3,
                    compute_s * 1e3,
                )
        return end

    def _load_and_compute_s(self, tier: int, count: int) -> tuple[float, float]:
        alone = [count if one == tier else 0 for one in range(len(TIER_NAMES))]
        return self._model.load_s(*alone), self._model.prefill_s(0, count * self._block_size)
