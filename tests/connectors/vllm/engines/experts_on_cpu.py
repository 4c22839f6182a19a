"""Our connector, with what vLLM's CPU build lacks of experts that are divided among ranks.

- Its kernel takes the numbers of a rank's own experts, and is given those of all experts: it then reads memory that is
  not its own. Here the experts of other ranks get no weight, and the rank's own are numbered as the kernel has them.
- Engines with data parallelism gather the tokens of all ranks, of each as many as it has, then sum up what the experts
  make of them, and each takes its own. Both are missing.

Each rank is a process that vLLM starts: it imports this with the connector, before the first step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from tiercache.connectors.vllm_v1 import TierCacheConnector

__all__ = ["TierCacheConnector"]

_apply = CPUUnquantizedExperts.apply


def _apply_own(self: Any, **arguments: Any) -> None:
    places, numbers = arguments["expert_map"], arguments["topk_ids"]
    own = places[numbers.long()]
    weights = torch.where(own < 0, 0.0, arguments["topk_weights"])
    _apply(self, **{**arguments, "topk_ids": own.clamp(min=0).to(numbers.dtype), "topk_weights": weights})


def _all_gatherv(self: Any, rows: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """The rows of all ranks, one rank after another. `sizes`: how many each has; None if all have as many."""
    if isinstance(rows, list):
        return [_all_gatherv(self, part, dim, sizes) for part in rows]
    assert dim == 0
    sizes = sizes or [len(rows)] * self.world_size
    padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(gathered, padded, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])


def _reduce_scatterv(self: Any, rows: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """This rank's rows of the sum over all ranks."""
    assert dim == 0
    total = rows.clone()
    distributed.all_reduce(total, group=self.device_group)
    return total.split(sizes or len(total) // self.world_size)[self.rank_in_group]


CPUUnquantizedExperts.apply = _apply_own
CpuCommunicator.all_gatherv = _all_gatherv
CpuCommunicator.reduce_scatterv = _reduce_scatterv
