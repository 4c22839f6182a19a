"""A forward pass over blocks that hold one group of layers each (see `tiercache.engine.layer_groups`).

Tokens, positions and lengths are the same for all layers, but their blocks differ. So each group has its
own pass, over its own block tables, and a layer uses the pass of its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from tiercache.engine.layer_groups import LayerPlace


class PassLike(Protocol):
    """Writes K and V of one forward pass and attends (see `TorchPass`, and `KernelPass` for CUDA)."""

    @property
    def positions(self) -> torch.Tensor: ...
    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int = ...,
        softcap: float | None = ...,
        sinks: torch.Tensor | None = ...,
    ) -> torch.Tensor: ...


class GroupedPass:
    """`parts` are the passes of the groups, `places` the place of each layer of the model."""

    def __init__(self, parts: Sequence[PassLike], places: Sequence[LayerPlace]) -> None:
        self.parts = parts
        self._places = places

    @property
    def positions(self) -> torch.Tensor:
        """Position of each token in its sequence, int64 `[token]`."""
        return self.parts[0].positions

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """See `PassLike.attend`; `layer` is a layer of the model."""
        group, place = self._places[layer]
        return self.parts[group].attend(place, query, key, value, **options)
