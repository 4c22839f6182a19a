"""Finds how a model rotates its queries, by running it at other positions (see `tiercache.engine.streaming`)."""

from __future__ import annotations

from typing import Any

import torch

from tiercache.engine.attention import Batch
from tiercache.engine.kv_pool import BatchSegment, KVPool
from tiercache.engine.model import HostedModel
from tiercache.engine.settings import EngineSettings
from tiercache.engine.streaming import Rotation, Streaming
from tiercache.engine.torch_attention import TorchPass
from tiercache.errors import ConfigError

_TOKENS = 24
_BLOCK_SIZE = 8
# Shifts at which the model is run: where angles are exact, and as far as sequences go.
_NEAR = 997
# Largest accepted difference of a layer's queries, relative to their size: nearby by dtype, far away also of angles.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_FAR_TOLERANCE = 5e-2


class _Recorder(TorchPass):
    """A pass with its tokens `shift` positions further on; keeps the queries of layers without a window."""

    def __init__(self, pool: KVPool, segment: BatchSegment, shift: int) -> None:
        super().__init__(pool, [segment])
        self.positions = self.positions + shift
        self.queries: dict[int, torch.Tensor] = {}

    def attend(self, layer: int, query: torch.Tensor, *rest: Any, window: int = 0, **options: Any) -> torch.Tensor:
        if not window:
            self.queries[layer] = query.double()
        return super().attend(layer, query, *rest, window=window, **options)


def find_streaming(model: HostedModel, settings: EngineSettings) -> Streaming | None:
    """How layers without a window attend with `attention_window`; None if that is not set.

    Raises ConfigError for a model with a window in every layer, or whose queries are not turned by fixed angles.
    Takes a few passes of a few tokens.
    """
    if not settings.attention_window:
        return None
    if all(model.shape.windows):
        raise ConfigError(
            f"attention_window is {settings.attention_window}, and every layer of this model has a sliding window of "
            f"its own ({max(model.shape.windows)}): set attention_window to 0"
        )
    try:
        rotations = _find_rotations(model)
    except IndexError:  # a model with a table of positions: it ends before
        rotations = None
    if rotations is None:
        raise ConfigError(
            f"attention_window is {settings.attention_window}, and {type(model.module).__name__} does not turn its "
            "queries by position as rotary embeddings do: set attention_window to 0"
        )
    return Streaming(settings.attention_window, settings.sink_tokens, rotations)


def _find_rotations(model: HostedModel) -> dict[int, Rotation] | None:
    here, near = _queries_at(model, 0), _queries_at(model, _NEAR)
    longest = max(0, model.shape.max_context - _TOKENS)
    far = _queries_at(model, longest)
    tolerance = _TOLERANCE[model.shape.dtype]
    rotations: dict[int, Rotation] = {}
    for layer, query in here.items():
        for rotation in _candidates(model):
            off = _difference(rotation, query, near[layer], _NEAR)
            if off <= tolerance and _difference(rotation, query, far[layer], longest) <= max(tolerance, _FAR_TOLERANCE):
                rotations[layer] = rotation
                break
        else:
            return None
    return rotations


def _queries_at(model: HostedModel, shift: int) -> dict[int, torch.Tensor]:
    """The queries of a short text at positions from `shift` on, by layer."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(model.shape.vocabulary, (_TOKENS,), generator=generator).tolist()
    pool = model.new_pool(_TOKENS // _BLOCK_SIZE, _BLOCK_SIZE)
    segment = BatchSegment(0, 0, _TOKENS, range(_TOKENS // _BLOCK_SIZE))
    work = _Recorder(pool, segment, shift)
    model.forward(Batch(pool, [segment], work), tokens, [])
    return work.queries


def _candidates(model: HostedModel) -> list[Rotation]:
    """Candidates: the frequencies of the model's rotary modules, and no rotation at all."""
    buffers = {name: buffer for name, buffer in model.module.named_buffers() if name.endswith("inv_freq")}
    none = torch.zeros(0, dtype=torch.float64, device=model.device)
    return [*(Rotation(buffer.double()) for buffer in buffers.values()), Rotation(none)]


def _difference(rotation: Rotation, query: torch.Tensor, other: torch.Tensor, shift: int) -> float:
    if 2 * len(rotation.frequencies) > query.shape[-1]:
        return float("inf")
    turned = rotation.turn(query, torch.full(query.shape[-2:-1], shift, device=query.device))
    return float((turned - other).norm() / other.norm())
