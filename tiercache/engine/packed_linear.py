"""Linear layers in oneDNN's layout, on CPUs.

torch gives float32 products to MKL, which takes twice as long on processors other than Intel's, and packs the weights
again for every few rows of a decode step. With weights packed once, by oneDNN, a product of 8 rows takes 0.4 of the
time, one of 512 rows half (AMD EPYC, one thread). bfloat16 goes to oneDNN anyway.
"""

from __future__ import annotations

from typing import Any

import torch


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """True if `pack_linears` applies to a model of this dtype on this device."""
    if dtype is not torch.float32 or device.type != "cpu":
        return False
    return hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def pack_linears(module: Any) -> None:
    """Make all plain linear layers below `module` compute with packed copies of their weights.

    The weights themselves stay for other readers; if they are mapped from the model's file they take no
    memory of their own. A later change to them has no effect.
    """
    for layer in _plain_linears(module):
        vars(layer)["forward"] = _Packed(layer)


def own_weights(module: Any, *, packed: bool) -> None:
    """Copy the weights below `module` into memory of their own: transformers maps them from the model's files.

    Through such a map a write to a file changes what the engine computes, under the name of the weights before. With
    `packed`, weights that only `pack_linears` will read stay mapped. Takes as long as reading the files.
    """
    skipped = {id(layer.weight) for layer in _plain_linears(module)} if packed else set()
    for part in module.modules():
        if type(part) is not torch.nn.Linear:  # such as embeddings with the same weight
            skipped -= {id(weight) for weight in part._parameters.values()}
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in skipped:
            tensor.data = tensor.data.clone()


def _plain_linears(module: Any) -> list[torch.nn.Linear]:
    return [layer for layer in module.modules() if type(layer) is torch.nn.Linear]


class _Packed:
    """Replaces the `forward` of a linear layer."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), None)
        self._bias = None if layer.bias is None else layer.bias.detach()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return out
