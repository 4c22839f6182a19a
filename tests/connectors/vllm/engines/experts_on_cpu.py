"""Our connector, with what vLLM's CPU build lacks of experts that are divided among ranks.

Its kernel takes the numbers of a rank's own experts, and is given those of all experts: it then reads memory that is
not its own. Here the experts of other ranks get no weight, and the rank's own are numbered as the kernel has them.

Each rank is a process that vLLM starts: it imports this with the connector, before the first step.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from tiercache.connectors.vllm_v1 import TierCacheConnector

__all__ = ["TierCacheConnector"]

_apply = CPUUnquantizedExperts.apply


def _apply_own(self: Any, **arguments: Any) -> None:
    places, numbers = arguments["expert_map"], arguments["topk_ids"]
    own = places[numbers.long()]
    weights = torch.where(own < 0, 0.0, arguments["topk_weights"])
    _apply(self, **{**arguments, "topk_ids": own.clamp(min=0).to(numbers.dtype), "topk_weights": weights})


CPUUnquantizedExperts.apply = _apply_own
