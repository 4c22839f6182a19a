"""The value of hits: prefill work saved, and the time to the first token.

    without a cache   compute(prompt)
    with a cache      load(DRAM's part) + load(NVMe's part) + load(the shared store's part)
                      + compute(the rest, on top of what was loaded)

Where there is a shared store, a prompt that its host lacks a part of takes a round trip to look up, and the fetch takes
another.

A request is alone on its GPU: no queue, no batch, and nothing overlaps. So the times compare caches; they are not those
of a busy engine. The last token of a prompt is computed in any case. Work is counted as `tiercache plan` does.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tiercache.plan.model import Model
from tiercache.replay.requests import TraceRequest
from tiercache.replay.simulation import Outcome

_STEP = math.log(1.01)


@dataclass(frozen=True)
class Costs:
    """Cost of a model's prompts on this machine: work per second, and bytes per second from each tier."""

    model: Model
    flops_per_s: float
    dram_bytes_per_s: float
    nvme_bytes_per_s: float
    shared_bytes_per_s: float = 1.25e9
    shared_round_trip_s: float = 0.0005


class Spread:
    """Mean and percentiles of many times in little memory; percentiles are accurate to 1%."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._sum_s = 0.0
        self._count = 0

    def add(self, seconds: float) -> None:
        """Add one time, above 0."""
        self._counts[round(math.log(seconds) / _STEP)] += 1
        self._sum_s += seconds
        self._count += 1

    @property
    def mean_s(self) -> float:
        """The mean; 0 if there are no times."""
        return self._sum_s / self._count if self._count else 0.0

    def percentile_s(self, share: float) -> float:
        """The time that this share of the times do not exceed; 0 if there are no times."""
        left = share * self._count
        for bucket, count in sorted(self._counts.items()):
            left -= count
            if left <= 0:
                return math.exp(bucket * _STEP)
        return 0.0

    def as_tree(self) -> dict[str, float]:
        """For JSON."""
        return {"mean_s": self.mean_s, "p50_s": self.percentile_s(0.5), "p90_s": self.percentile_s(0.9)}


class Estimate:
    """Adds up the requests of one replay. `shared`: whether there is a shared store."""

    def __init__(self, costs: Costs, shared: bool = False) -> None:
        self._costs = costs
        self._shared = shared
        self.flops = 0.0
        """Work of all prompts from scratch, and the part saved by hits."""
        self.saved_flops = 0.0
        self.without = Spread()
        """Time to the first token with only the engine's own pool."""
        self.with_cache = Spread()
        self._pairs: Counter[int] = Counter()
        for layer in costs.model.layers:
            self._pairs[layer.window] += layer.attention_flops_per_token_pair

    def prefill_flops(self, tokens: int) -> float:
        """As `Model.prefill_flops`, computed for all layers with the same window at once."""
        flops = 2.0 * self._costs.model.active_parameters * tokens
        for window, pair_flops in self._pairs.items():
            seen = min(window or tokens, tokens)
            flops += pair_flops * (seen * (seen + 1) / 2 + (tokens - seen) * seen)
        return flops

    def add(self, request: TraceRequest, block_tokens: int, token_bytes: float, in_gpu: int, outcome: Outcome) -> None:
        """Add one prompt, the size of its KV, and the blocks that the GPU and the tiers had as leading runs."""
        tokens, costs = max(1, request.input_tokens), self._costs
        gpu = min(in_gpu * block_tokens, tokens - 1)
        dram = max(gpu, min(outcome.dram * block_tokens, tokens - 1))
        nvme = max(dram, min((outcome.dram + outcome.nvme) * block_tokens, tokens - 1))
        shared = max(nvme, min(outcome.found * block_tokens, tokens - 1))
        whole, own, hit = self.prefill_flops(tokens), self.prefill_flops(gpu), self.prefill_flops(shared)
        self.flops += whole
        self.saved_flops += hit
        dram_s = (dram - gpu) * token_bytes / costs.dram_bytes_per_s
        slower = min(costs.dram_bytes_per_s, costs.nvme_bytes_per_s)
        nvme_s = (nvme - dram) * token_bytes / slower
        slower = min(costs.dram_bytes_per_s, costs.shared_bytes_per_s)
        shared_s = (shared - nvme) * token_bytes / slower
        if self._shared:
            looked_up = outcome.dram + outcome.nvme < request.blocks
            shared_s += (looked_up + (shared > nvme)) * costs.shared_round_trip_s
        self.without.add((whole - own) / costs.flops_per_s)
        self.with_cache.add(dram_s + nvme_s + shared_s + (whole - hit) / costs.flops_per_s)

    def as_tree(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "prefill_flops": self.flops,
            "saved_flops": self.saved_flops,
            "saved_share": self.saved_flops / self.flops if self.flops else 0.0,
            "ttft_without": self.without.as_tree(),
            "ttft_with": self.with_cache.as_tree(),
        }
