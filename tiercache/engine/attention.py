"""Attention over the paged KV pool, in the place where transformers calls its attention.

transformers hands every layer's query, key and value to the function registered under
`NAME`. All sequences of a forward pass are packed into one row of tokens; which token belongs
to which sequence and where its K and V live is in the `Batch` that `attend` puts in place for
the thread. No mask function is registered under `NAME`, so models make no mask: causality and
windows are ours, and anything else that a model asks for is refused.

The pool is `[block, layer, 2, slot, kv_head, head_dim]`: one block of all layers is one run of
memory, so that moving it is one copy. A layer's K and V of a sequence are therefore gathered before
they are read: one strided copy where the blocks follow one another. On a CPU, at 8192 tokens, that
adds 0.5% to the attention of a chunk of 512 and half to that of a single token.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from tiercache.errors import ModelRefused

NAME = "tiercache"
# Up to this many query tokens the query heads of a KV head become rows of one matrix: K and V
# are then read once per KV head. Above, matrices are large enough and the mask is what costs.
_ROWS_LIMIT = 64


class Segment(NamedTuple):
    """The tokens `[start, end)` of a sequence, which stand at `[row, row + end - start)` of the batch."""

    row: int
    start: int
    end: int
    block_table: Sequence[int]
    contiguous: bool


class Batch:
    """What the attention of one forward pass needs to know.

    Args:
        pool: `[block, layer, 2, slot, kv_head, head_dim]`; the pass writes K and V of its tokens.
        segments: in the order of their tokens in the batch, without gaps.

    Attributes:
        windows: sliding window of each layer that was called so far (0 for none).
        plain: False once a layer has asked for what torch's own attention does not have.
    """

    def __init__(self, pool: torch.Tensor, segments: Sequence[Segment]) -> None:
        self.pool = pool
        self.segments = segments
        self.windows: dict[int, int] = {}
        self.plain = True
        self.token_count = sum(segment.end - segment.start for segment in segments)
        self._block_size = pool.shape[3]
        positions = torch.cat([torch.arange(segment.start, segment.end) for segment in segments])
        blocks = torch.cat([self._blocks_of_tokens(segment) for segment in segments])
        self.positions = positions.to(pool.device)
        self._block_ids = blocks.to(pool.device)
        self._slots = self.positions % self._block_size
        self._masks: dict[tuple[int, int, int], torch.Tensor] = {}
        self._gathers: dict[tuple[int, int], torch.Tensor] = {}

    def _blocks_of_tokens(self, segment: Segment) -> torch.Tensor:
        first = segment.start // self._block_size
        last = (segment.end - 1) // self._block_size
        table = torch.tensor(segment.block_table[first : last + 1])
        return table[torch.arange(segment.start, segment.end) // self._block_size - first]

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put K and V of the batch's tokens, `[token, kv_head, head_dim]` each, into the pool."""
        self.pool[:, layer, 0][self._block_ids, self._slots] = key
        self.pool[:, layer, 1][self._block_ids, self._slots] = value

    def read(self, layer: int, number: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of tokens `[first, end)` of segment `number`, `[kv_head, token, head_dim]` each."""
        segment = self.segments[number]
        first_block = first // self._block_size
        blocks = -(-segment.end // self._block_size) - first_block
        if segment.contiguous:
            start = segment.block_table[first_block]
            run = self.pool[start : start + blocks, layer]
            key, value = run[:, 0], run[:, 1]
        else:
            ids = self._gathers.get((number, first_block))
            if ids is None:
                table = segment.block_table[first_block : first_block + blocks]
                ids = self._gathers[number, first_block] = torch.tensor(table, device=self.pool.device)
            key, value = (self.pool[:, layer, part].index_select(0, ids) for part in (0, 1))
        tokens = slice(first - first_block * self._block_size, segment.end - first_block * self._block_size)
        return key.flatten(0, 1)[tokens].transpose(0, 1), value.flatten(0, 1)[tokens].transpose(0, 1)

    def mask(self, number: int, first: int, window: int) -> torch.Tensor | None:
        """What to add to the scores of segment `number`, `[query, token]`; None where nothing is hidden."""
        segment = self.segments[number]
        if segment.end - segment.start == 1:
            return None
        wanted = (number, first, window)
        mask = self._masks.get(wanted)
        if mask is None:
            device = self.pool.device
            query = torch.arange(segment.start, segment.end, device=device)[:, None]
            token = torch.arange(first, segment.end, device=device)[None, :]
            hidden = token > query
            if window:
                hidden |= token <= query - window
            mask = torch.zeros(hidden.shape, dtype=self.pool.dtype, device=device)
            mask = self._masks[wanted] = mask.masked_fill_(hidden, -math.inf)
        return mask


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

    Writes K and V into the pool of the batch in place. Raises ModelRefused for what it cannot do.
    """
    batch = _CURRENT.batch
    if batch is None:
        raise ModelRefused("a model of this engine was called outside of its forward pass")
    layer = _checked_layer(batch, module, key, value, attention_mask, kwargs)
    window = int(kwargs.get("sliding_window") or 0)
    batch.windows[layer] = window
    batch.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    plain = softcap is None and sinks is None
    batch.plain &= plain
    out = query.new_empty(1, batch.token_count, query.shape[1], query.shape[3])
    for number, segment in enumerate(batch.segments):
        rows = slice(segment.row, segment.row + segment.end - segment.start)
        first = max(0, segment.start + 1 - window) if window else 0
        k, v = batch.read(layer, number, first)
        mask = batch.mask(number, first, window)
        if plain:
            out[0, rows] = _fused(query[0, :, rows], k, v, mask, scale).transpose(0, 1)
        else:
            out[0, rows] = _spelled_out(query[0, :, rows], k, v, mask, scale, softcap, sinks).transpose(0, 1)
    return out, None


def _checked_layer(
    batch: Batch,
    module: torch.nn.Module,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> int:
    """The layer's place in the pool; raises ModelRefused where the call asks for something we have not."""
    layers, kv_heads, head_dim = batch.pool.shape[1], batch.pool.shape[4], batch.pool.shape[5]
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


def _fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """torch's attention: query `[heads, token, head_dim]`, key and value `[kv_heads, token, head_dim]`."""
    heads, count, head_dim = query.shape
    kv_heads = key.shape[0]
    group = heads // kv_heads
    if count <= _ROWS_LIMIT or query.is_cuda:
        rows = query.reshape(1, kv_heads, group * count, head_dim)
        if mask is not None:
            mask = mask.repeat(group, 1)
        out = F.scaled_dot_product_attention(rows, key[None], value[None], attn_mask=mask, scale=scale)
        return out.reshape(heads, count, head_dim)
    gqa = group > 1
    return F.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask, scale=scale, enable_gqa=gqa
    )[0]


def _spelled_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The same with capped scores (Gemma 2) or a sink per head (GPT-OSS), which torch's does not have."""
    heads, count, head_dim = query.shape
    kv_heads = key.shape[0]
    rows = query.reshape(kv_heads, -1, head_dim)
    scores = (rows @ key.transpose(1, 2)).view(heads, count, -1) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(heads, 1, 1).expand(heads, count, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return (weights.reshape(kv_heads, -1, key.shape[1]) @ value).view(heads, count, head_dim)


AttentionInterface.register(NAME, paged_attention)
