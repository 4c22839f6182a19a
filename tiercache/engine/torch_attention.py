"""Attention over the pool in plain torch, for CPUs.

A prompt's chunk is read and computed by itself. Sequences of one new token each are read together if their
lengths are similar: on a CPU the calls cost as much as the work. The query heads of a KV head are rows of
one matrix, so that K and V are read once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tiercache.engine.kv_access import Places, ReadGroup, access_to
from tiercache.engine.kv_pool import BatchSegment, KVPool
from tiercache.engine.streaming import Streaming

_ROWS_LIMIT = 64
"""Up to this many query tokens the heads of a KV head become rows. Above, matrices are large enough, and
masks cost the most."""
_CALL_BYTES = 128 << 10
"""Reading this much costs about as much as a call for another group."""
_GROUP_BYTES = 2 << 20
"""Limit of K and V of a group and layer, so that they are still in the processor's cache when used."""


class _Reading(NamedTuple):
    """What to gather for a group, and what to add to its scores; `causal` if that hides only later tokens."""

    places: Places
    mask: torch.Tensor | None
    causal: bool


class TorchPass:
    """One forward pass over `segments`, in the order of their tokens in the batch, without gaps.

    With `streaming`, layers without a window attend as it says. `tails` are the segments' tails, if they were
    taken together with those of other passes.

    Attributes:
        positions: int64 `[token]`.
    """

    def __init__(
        self,
        pool: KVPool,
        segments: Sequence[BatchSegment],
        streaming: Streaming | None = None,
        *,
        tails: Sequence[int] | None = None,
    ) -> None:
        self._streaming = streaming
        self._tails = pool.tails_of(segments) if tails is None else tails
        self._access = access_to(pool, segments, self._tails)
        self._device = pool.device
        positions = [token for one in segments for token in range(one.start, one.end)]
        self.positions = torch.tensor(positions, device=pool.device)
        self._groups = [self._group(segments, chosen) for chosen in _alike(segments, pool.layout.token_bytes)]
        self._plans: dict[tuple[int, int], list[_Reading]] = {}

    def _group(self, segments: Sequence[BatchSegment], chosen: list[int]) -> ReadGroup:
        count = segments[chosen[0]].end - segments[chosen[0]].start
        first = segments[chosen[0]].row
        rows: slice | torch.Tensor = slice(first, first + count * len(chosen))
        if chosen != list(range(chosen[0], chosen[0] + len(chosen))):
            rows = torch.tensor([segments[index].row for index in chosen], device=self._device)
        positions = self.positions[rows].view(len(chosen), count)
        members, tails = [segments[index] for index in chosen], [self._tails[index] for index in chosen]
        return ReadGroup(members, tails, rows, positions)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write K and V of the pass's tokens into the pool, and attend.

        Query is `[head, token, head_dim]`, key and value `[kv_head, token, head_dim]`; returns `[token, head,
        head_dim]`. `sinks` are additional scores for every query of a head, `[head]`.
        """
        self._access.write(layer, key, value)
        heads, count, head_dim = query.shape
        out = query.new_empty((count, heads, head_dim))
        streaming = None if window else self._streaming
        seen = (streaming.window, streaming.sinks) if streaming is not None else (window, 0)
        for group, reading in zip(self._groups, self._plan(*seen, query.dtype), strict=True):
            k, v = self._access.read(layer, reading.places)
            q = query[:, group.rows].view(heads, *group.positions.shape, head_dim).transpose(0, 1)
            if streaming is not None:
                turned = streaming.query_for_sinks(layer, q, group.positions)
                scores = torch.cat(
                    [_scores(turned, k[:, :, : streaming.sinks]), _scores(q, k[:, :, streaming.sinks :])], dim=-1
                )
                result = _weighed(scores * scale, v, reading.mask, softcap, sinks)
            elif softcap is None and sinks is None:
                result = _fused(q, k, v, reading, scale)
            else:
                result = _weighed(_scores(q, k) * scale, v, reading.mask, softcap, sinks)
            result = result.transpose(1, 2).flatten(0, 1)
            if len(self._groups) == 1:
                return result
            out[group.rows] = result
        return out

    def _plan(self, window: int, sinks: int, dtype: torch.dtype) -> list[_Reading]:
        """How each group is read; the same for all layers with the same window and sinks."""
        plan = self._plans.get((window, sinks))
        if plan is None:
            plan = [self._reading(group, window, sinks, dtype) for group in self._groups]
            self._plans[window, sinks] = plan
        return plan

    def _reading(self, group: ReadGroup, window: int, sinks: int, dtype: torch.dtype) -> _Reading:
        places = self._access.places(group, window, sinks)
        mask = _mask(group.positions, places.numbers, window, sinks, dtype)
        unbounded = not window or window >= group.segments[0].end
        return _Reading(places, mask, unbounded and torch.equal(places.numbers, group.positions))


def _alike(segments: Sequence[BatchSegment], token_bytes: int) -> list[list[int]]:
    """Numbers of the segments read together: those with one token and of about the same length."""
    groups = [[index] for index, one in enumerate(segments) if one.end - one.start > 1]
    group: list[int] = []
    longest = 0
    singles = (index for index, one in enumerate(segments) if one.end - one.start == 1)
    for index in sorted(singles, key=lambda index: segments[index].end):
        end = segments[index].end
        padding = (end - longest) * len(group) * token_bytes
        if not group or padding > _CALL_BYTES or end * (len(group) + 1) * token_bytes > _GROUP_BYTES:
            group = []
            groups.append(group)
        group.append(index)
        longest = end
    return [sorted(group) for group in groups]


def _mask(
    positions: torch.Tensor, numbers: torch.Tensor, window: int, sinks: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """What to add to the scores, `[sequence, 1, token, place]`; None if nothing is hidden."""
    query, token = positions[:, :, None], numbers[:, None, :]
    hidden = token > query
    if window:
        hidden |= (token <= query - window) & (token >= sinks)
    if not bool(hidden.any()):
        return None
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden, -math.inf)[:, None]


def _fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, reading: _Reading, scale: float
) -> torch.Tensor:
    """torch's attention: query `[n, head, token, head_dim]`, key and value `[n, kv_head, place, head_dim]`."""
    sequences, heads, count, head_dim = query.shape
    kv_heads = key.shape[1]
    group, mask = heads // kv_heads, reading.mask
    if count <= _ROWS_LIMIT or query.is_cuda:
        rows = query.reshape(sequences, kv_heads, group * count, head_dim)
        if mask is not None and count > 1:
            mask = mask.repeat(1, 1, group, 1)
        out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
        return out.reshape(query.shape)
    # A prompt's first chunk: half of its scores need not be computed at all.
    mask = None if reading.causal else mask
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=reading.causal, scale=scale, enable_gqa=group > 1
    )


def _scores(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Query `[n, head, token, head_dim]` and key `[n, kv_head, place, head_dim]` to `[n, head, token, place]`."""
    sequences, heads, count, head_dim = query.shape
    rows = query.reshape(sequences, key.shape[1], -1, head_dim)
    return (rows @ key.transpose(2, 3)).view(sequences, heads, count, -1)


def _weighed(
    scores: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention from its scores, which may be capped (Gemma 2), have a sink per head (GPT-OSS), or use two queries."""
    sequences, heads, count, places = scores.shape
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, heads, 1, 1).expand(sequences, heads, count, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    weights = weights.reshape(sequences, value.shape[1], -1, places)
    return (weights @ value).view(sequences, heads, count, -1)
