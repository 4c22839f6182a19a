"""Attention over the paged KV pool, which transformers calls in place of its own.

transformers passes every layer's query, key and value to the function registered under `NAME`. All sequences of a
forward pass are packed into one row of tokens; the `Batch` that `attend` sets for the thread tells which token belongs
to which sequence and where its K and V are. No mask function is registered under `NAME`, so models make no mask: this
module handles causality and windows, and refuses anything else that a model asks for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from tiercache.engine.kv_pool import BatchSegment, KVPool, LayerPlace
from tiercache.engine.torch_attention import Streaming, TorchPass
from tiercache.errors import ModelRefused

# --- passes over groups of layers --------------------------------------------------------------------
#
# Tokens, positions and lengths are the same for all layers, but their blocks differ. So each group has its
# own pass, over its own block tables, and a layer uses the pass of its group.


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


# --- batches -----------------------------------------------------------------------------------------

NAME = "tiercache"


class Batch:
    """The context for the attention of one forward pass.

    Args:
        pool: the pass writes K and V of its tokens into it.
        segments: in the order of their tokens in the batch, without gaps.
        work: how to attend; by default as fits the pool's device.
        streaming: what layers without a window do instead of full attention, if set.
        others: the same segments with the block tables of the pool's other groups of layers.

    Attributes:
        windows: sliding window of each layer called so far (0 for none).
        plain: False once a layer has asked for a feature that torch's own attention lacks.
    """

    def __init__(
        self,
        pool: KVPool,
        segments: Sequence[BatchSegment],
        work: PassLike | None = None,
        streaming: Streaming | None = None,
        others: Sequence[Sequence[BatchSegment]] = (),
    ) -> None:
        self.pool = pool
        self.segments = segments
        self.others = others
        self.token_count = sum(segment.end - segment.start for segment in segments)
        self.windows: dict[int, int] = {}
        self.plain = True
        self.work: PassLike = work or _pass_over(pool, [segments, *others], streaming)

    @property
    def positions(self) -> torch.Tensor:
        """Position of each token in its sequence, int64 `[token]`."""
        return self.work.positions


def _pass_over(pool: KVPool, groups: Sequence[Sequence[BatchSegment]], streaming: Streaming | None) -> PassLike:
    if streaming is not None:
        return TorchPass(pool, groups[0], streaming)  # the kernels use one query for all keys
    make: Callable[..., PassLike] = TorchPass
    # Triton's interpreter takes tensors on any device, so tests run the kernel path without a GPU.
    if pool.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        from tiercache.engine.cuda_attention import KernelPass

        make = KernelPass
    if len(groups) == 1:
        return make(pool, groups[0])
    count = len(groups[0])
    tails = pool.tails_of([segment for segments in groups for segment in segments])
    parts = [
        make(pool, segments, tails=tails[group * count : (group + 1) * count]) for group, segments in enumerate(groups)
    ]
    return GroupedPass(parts, pool.places)


class _Current(threading.local):
    batch: Batch | None = None


_CURRENT = _Current()


@contextmanager
def attend(batch: Batch) -> Iterator[None]:
    """Forward passes of this thread inside the block attend over `batch`."""
    assert _CURRENT.batch is None, "forward passes do not nest"
    _CURRENT.batch = batch
    try:
        yield
    finally:
        _CURRENT.batch = None


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: `[1, heads, token, head_dim]` in, `[1, token, heads, head_dim]` out.

    Writes K and V into the pool of the batch in place. Raises ModelRefused for an unsupported feature.
    """
    batch = _CURRENT.batch
    if batch is None:
        raise ModelRefused("a model of this engine was called outside of its forward pass")
    layer = _checked_layer(batch, module, key, value, attention_mask, kwargs)
    window = int(kwargs.get("sliding_window") or 0)
    batch.windows[layer] = window
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    batch.plain &= softcap is None and sinks is None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = batch.work.attend(layer, query[0], key[0], value[0], scale=scale, window=window, softcap=softcap, sinks=sinks)
    return out[None], None


def _checked_layer(
    batch: Batch,
    module: torch.nn.Module,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> int:
    """The layer's number in the model; raises ModelRefused if the call asks for an unsupported feature."""
    layout = batch.pool.layout
    layers, kv_heads, head_dim = len(batch.pool.places), layout.kv_heads, layout.head_dim
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or not 0 <= layer < layers:
        raise ModelRefused(f"an attention layer calls itself number {layer} of {layers}: not a plain decoder")
    if key.shape[3] != value.shape[3]:
        raise ModelRefused(
            f"layer {layer} has keys of {key.shape[3]} and values of {value.shape[3]} elements: "
            "only models with equal sizes are served"
        )
    if (key.shape[1], key.shape[3]) != (kv_heads, head_dim):
        raise ModelRefused(
            f"layer {layer} has {key.shape[1]} KV heads of {key.shape[3]}, the config says {kv_heads} of "
            f"{head_dim}: only models with equal layers are served"
        )
    if key.shape[0] != 1 or key.shape[2] != batch.token_count:
        raise ModelRefused(f"layer {layer} attends to {tuple(key.shape)}, not to the tokens of the batch")
    if attention_mask is not None or kwargs.get("position_bias") is not None:
        raise ModelRefused(f"layer {layer} brings its own mask or position bias (ALiBi, T5): not served")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ModelRefused(f"layer {layer} is not causal: only decoders are served")
    return layer


AttentionInterface.register(NAME, paged_attention)
