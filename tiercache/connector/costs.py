"""Load or recompute: estimates the cost of both in one engine on this machine, from past samples.

A load of blocks `[first, end)` costs a latency and a time per block: one pair for blocks in DRAM, one for those that
are promoted from NVMe, one for those that come over the network from a shared store. Computing costs a time per token
that grows with the context, since attention does. Each is a straight line, fitted to samples that lose weight with age.

How much of a match to load: the deeper a block lies the more its load saves, and each costs the same. So the best place
to stop is one of the ends: nothing, all that is in DRAM, all that is on this host, everything.

Three rules keep a wrong estimate from staying wrong, or from costing much:

- Until computing has been measured, everything is loaded; a tier that was never tried costs nothing.
- A load left out makes the estimate that spoke against it a tenth smaller. So a tier that was slow is
  tried again, after few requests if it was a little too slow, after many if it was far too slow.
- A load that has taken as long as computing would have is given up. Waiting and then computing
  takes at most twice the time of the better choice (the ski-rental argument: Karlin, Manasse,
  Rudolph and Sleator, Competitive Snoopy Caching, 1988).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

# Factor by which each sample of weight 1 reduces the weight of earlier ones.
_KEPT_WEIGHT = 0.8
# Factor by which a load left out reduces the estimate against it.
_KEPT_DOUBT = 0.9
# Cap on the first slow load in a row: one stall of the machine does not make a tier slow.
_STALL_TIMES_EXPECTED = 4.0
_STALL_OVER_EXPECTED_S = 0.01
# A load that was given up counts as its waiting time, times this: its full duration is unknown.
_GIVEN_UP_TIMES = 8.0
# Slopes used while all samples have about the same length: the speed of a good machine.
_DRAM_LATENCY_S, _DRAM_BYTES_PER_S = 0.0005, 4e9
_NVME_LATENCY_S, _NVME_BYTES_PER_S = 0.001, 1e9
_SHARED_LATENCY_S, _SHARED_BYTES_PER_S = 0.002, 1e9
# Differences that determine a slope: of contexts in tokens, of loads in blocks.
_CONTEXT_SPREAD, _LOAD_SPREAD = 128, 16
# Tokens of prefill that are a sample of weight 1.
_PREFILL_TOKENS = 512
# The most that one sample of it weighs: none decides alone.
_PREFILL_WEIGHT = 2.0
# Below this, giving up a load gains nothing noticeable.
_LEAST_PATIENCE_S = 0.25


class FittedLine:
    """`y = intercept + slope * x` by weighted least squares, with fading weights.

    Without samples it is the given line. The given slope also fills in while all samples have about the same x (closer
    than `spread`).
    """

    def __init__(self, intercept: float, slope: float, spread: float) -> None:
        self._intercept = intercept
        self._slope = slope
        self._ridge = spread * spread
        self.weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float, weight: float = 1.0) -> None:
        kept = _KEPT_WEIGHT**weight
        self.weight = self.weight * kept + weight
        self._x = self._x * kept + weight * x
        self._y = self._y * kept + weight * y
        self._xx = self._xx * kept + weight * x * x
        self._xy = self._xy * kept + weight * x * y

    def at(self, x: float) -> float:
        if not self.weight:
            return self._intercept + self._slope * x
        mean_x, mean_y = self._x / self.weight, self._y / self.weight
        variance = max(0.0, self._xx / self.weight - mean_x * mean_x)
        covariance = self._xy / self.weight - mean_x * mean_y
        slope = max(0.0, (covariance + self._ridge * self._slope) / (variance + self._ridge))
        if slope * mean_x > mean_y:
            slope = mean_y / mean_x  # times are not negative: through the origin
        return mean_y + slope * (x - mean_x)

    def shrink(self, factor: float) -> None:
        self._y *= factor
        self._xy *= factor

    def forget(self) -> None:
        self.weight = self._x = self._y = self._xx = self._xy = 0.0


class Reach(NamedTuple):
    """A possible end of a load: block `end` of the chain, with the blocks of all groups from each tier."""

    end: int
    dram_blocks: int
    nvme_blocks: int = 0
    shared_blocks: int = 0


class LoadChoice(NamedTuple):
    """A decision to load what a sequence needs to continue from block `end`: no blocks if the pool has them all.

    `load_s` is the expected time of the load and `saved_s` the computing time it saves, infinite while unknown.
    """

    end: int
    dram_blocks: int = 0
    nvme_blocks: int = 0
    shared_blocks: int = 0
    load_s: float = 0.0
    saved_s: float = 0.0

    @property
    def blocks(self) -> int:
        return self.dram_blocks + self.nvme_blocks + self.shared_blocks


class CostModel:
    """Running estimates of one engine, for blocks of `block_size` tokens and `block_bytes` bytes.

    Attributes:
        loads_avoided: loads left out, or cut down to what nearer tiers have, because computing was expected to
            be faster.
        loads_regretted: loads that took longer than computing would have, by the estimate they were begun with.
    """

    def __init__(self, block_size: int, block_bytes: int) -> None:
        self.loads_avoided = 0
        self.loads_regretted = 0
        self._block_size = block_size
        self._stalled = self._step_stalled = False
        self._unnoted: list[tuple[int, int]] = []
        self._unnoted_s = 0.0
        self._prefill = FittedLine(0.0, 0.0, _CONTEXT_SPREAD)
        self._dram = FittedLine(_DRAM_LATENCY_S, block_bytes / _DRAM_BYTES_PER_S, _LOAD_SPREAD)
        self._nvme = FittedLine(_NVME_LATENCY_S, block_bytes / _NVME_BYTES_PER_S, _LOAD_SPREAD)
        self._shared = FittedLine(_SHARED_LATENCY_S, block_bytes / _SHARED_BYTES_PER_S, _LOAD_SPREAD)

    def prefill_s(self, start: int, end: int) -> float:
        """Expected seconds of computing tokens `[start, end)`; infinite until computing has been measured."""
        if end <= start:
            return 0.0
        if not self._prefill.weight:
            return math.inf
        return (end - start) * self._prefill.at((start + end) / 2)

    def load_s(self, dram_blocks: int, nvme_blocks: int = 0, shared_blocks: int = 0) -> float:
        """Expected seconds of a load of that many blocks, from its start; nothing for a tier that was never tried."""
        parts = zip((self._dram, self._nvme, self._shared), (dram_blocks, nvme_blocks, shared_blocks), strict=True)
        return sum(line.at(blocks) for line, blocks in parts if blocks and line.weight)

    def choose(self, kept: int, reaches: Iterable[Reach], queue_s: float) -> LoadChoice:
        """The best load for a sequence, in blocks of its chain.

        Args:
            kept: blocks that need not be computed if nothing is loaded.
            reaches: possible ends of the load.
            queue_s: remaining time of the loads before this one.
        """
        none = LoadChoice(kept)
        choices = [self._choice(kept, reach, queue_s) for reach in sorted(set(reaches)) if reach.end > kept]
        if not choices:
            return none
        best = max([none, *choices], key=lambda choice: (choice.saved_s - choice.load_s, choice.end))
        widest = choices[-1]
        if best.end < widest.end:
            self.loads_avoided += 1
            self._doubt(best, widest)
        return best

    def _doubt(self, best: LoadChoice, widest: LoadChoice) -> None:
        """Make the estimates smaller that spoke against the rest: of tiers that take longer than to compute it."""
        left_out = widest.blocks - best.blocks
        block_s = (widest.saved_s - best.saved_s) / left_out if left_out else 0.0
        for line, most, loaded in (
            (self._dram, widest.dram_blocks, best.dram_blocks),
            (self._nvme, widest.nvme_blocks, best.nvme_blocks),
            (self._shared, widest.shared_blocks, best.shared_blocks),
        ):
            if most > loaded and line.at(most - loaded) > (most - loaded) * block_s:
                line.shrink(_KEPT_DOUBT)

    def _choice(self, kept: int, reach: Reach, queue_s: float) -> LoadChoice:
        saved_s = self.prefill_s(kept * self._block_size, reach.end * self._block_size)
        load_s = self.load_s(reach.dram_blocks, reach.nvme_blocks, reach.shared_blocks)
        return LoadChoice(*reach, queue_s + load_s, saved_s)

    def patience_s(self, choice: LoadChoice) -> float:
        """Seconds after which a load is given up; infinite until computing has been measured."""
        return max(choice.saved_s, _LEAST_PATIENCE_S)

    def note_step(self, spans: Iterable[tuple[int, int]], seconds: float, waited: bool) -> None:
        """Add a step that computed tokens `[start, end)` of sequences. Unless it `waited`, the device is still busy."""
        self._unnoted += [(start, end) for start, end in spans if end - start > 1]
        self._unnoted_s += seconds
        if not waited:
            return
        tokens = sum(end - start for start, end in self._unnoted)
        if tokens:
            context = sum((end - start) * (start + end) / 2 for start, end in self._unnoted) / tokens
            self.note_prefill(tokens, context, self._unnoted_s)
        self._unnoted, self._unnoted_s = [], 0.0

    def note_prefill(self, tokens: int, context: float, seconds: float) -> None:
        """Add a sample: `tokens` of prompts computed in `seconds`, at a mean context of that many tokens.

        The first slow one in a row may be a stall; a fast one shows that those before it were: something was compiled.
        """
        line, token_s = self._prefill, seconds / tokens
        if line.weight:
            expected_s = line.at(context)
            stalled, self._step_stalled = self._step_stalled, token_s > _STALL_TIMES_EXPECTED * expected_s
            if self._step_stalled and not stalled:
                token_s = _STALL_TIMES_EXPECTED * expected_s
            elif _STALL_TIMES_EXPECTED * token_s < expected_s:
                line.forget()
        line.add(context, token_s, weight=min(_PREFILL_WEIGHT, tokens / _PREFILL_TOKENS))

    def note_load(self, choice: LoadChoice, seconds: float, waited_s: float) -> None:
        """Add a load that took `seconds` from start to end, and for which its sequence waited.

        What the nearer tiers were not expected to take is a sample of the farthest one.
        """
        self.loads_regretted += waited_s > choice.saved_s
        dram, nvme, shared = choice.dram_blocks, choice.nvme_blocks, choice.shared_blocks
        stall_s = _STALL_TIMES_EXPECTED * self.load_s(dram, nvme, shared) + _STALL_OVER_EXPECTED_S
        stalled, self._stalled = self._stalled, seconds > stall_s
        if self._stalled and not stalled:
            seconds = stall_s
        if shared:
            self._shared.add(shared, max(0.0, seconds - self.load_s(dram, nvme)))
        elif nvme:
            self._nvme.add(nvme, max(0.0, seconds - self.load_s(dram)))
        else:
            self._dram.add(dram, seconds)

    def note_given_up(self, choice: LoadChoice, waited_s: float) -> None:
        """Add a load that was given up after `waited_s`."""
        self.note_load(choice, _GIVEN_UP_TIMES * waited_s, waited_s)

    def note_miss(self, choice: LoadChoice, seconds: float, waited_s: float) -> None:
        """Add a load that brought too few blocks. That says nothing about its speed, unless it was slow as well."""
        if 0 < choice.load_s < seconds:
            self.note_load(choice, seconds, waited_s)
