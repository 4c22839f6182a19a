"""Attention of packed query tokens over the paged KV pool: decode and chunked prefill in one kernel.

The new tokens `[start, end)` of a sequence attend to all of its tokens `[0, end)`, whose K and V are already
in the pool. The rows of a tile are query tokens times the query heads of one KV head, so that K and V are
read once for all of them; decode is the case of a single token. If the tiles do not fill the GPU (a few long
contexts), several programs share the tokens of a tile, and a second kernel combines their parts:

    program (kv_head, tile, split)    tokens of the split, TILE at a time ─► running maximum, sum and P·V
    if split: parts, stats            one part per split, not normalised
    program (kv_head, tile)           parts of the tile ─► output

The softmax is computed in one pass with a running maximum, as in "FlashAttention" (Dao et al., 2022); to split
the context and combine is from "Flash-Decoding" (Dao et al., 2023). A quantised pool holds full blocks only; the
tokens after them are in raw tails. `paged_attention_reference` is the twin in plain torch.
"""

# What Triton compiles has no types of Python's.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .kv_tiles import KEY, RAW, VALUE, PagedKv, channels, load_factor, load_tile
from .tile_shapes import TileShape

SEGMENT_FIELDS = 5
"""Fields of a segment: its first row in the batch, start, end, place of its blocks in `tables`, tail."""
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _token_range(start, end, first, QUERIES: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Tokens `[low, high)` that any query of a tile sees; low is a multiple of TILE."""
    low = 0
    if WINDOW > 0:
        low = tl.maximum(start + first + 1 - WINDOW, 0) // TILE * TILE
    return low, tl.minimum(start + first + QUERIES, end)


@triton.jit
def _in_pool(high, end, F: tl.constexpr):
    """The end of the tokens below `high` that are in the pool: all, or if it is quantised those of full blocks."""
    if F.kind != RAW:
        high = tl.minimum(high, end // F.block * F.block)
    return high


@triton.jit
def _split_size(low, high, splits, TILE: tl.constexpr):
    """Tokens of each split, a positive multiple of TILE; the last splits may have none."""
    return tl.maximum(tl.cdiv(tl.cdiv(high - low, splits), TILE), 1) * TILE


@triton.jit(do_not_specialize=["layer"])
def _attend(
    out,
    parts,
    stats,
    query,
    pool,
    tails,
    segments,
    tables,
    tiles,
    sinks,
    layer,
    token_stride,
    head_stride,
    scale,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    TAIL: tl.constexpr,
    DIMS: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
    F: tl.constexpr,
    T: tl.constexpr,
):
    """Program (kv_head, tile, split); see the top of this file. A segment of no tokens gets zeros.

    Row r of a tile is query token `first + r // GROUP` of the segment and head `r % GROUP` of the KV head's
    group. F is the format of the pool and T that of the tails, TAIL tokens at a time.
    """
    kv_head, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    QUERIES: tl.constexpr = ROWS // GROUP
    segment = segments + tl.load(tiles + 2 * tile) * 5
    first = tl.load(tiles + 2 * tile + 1)
    row, start, end = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
    table = tables + tl.load(segment + 3)

    low, high = _token_range(start, end, first, QUERIES, WINDOW, TILE)
    pooled = _in_pool(high, end, F)
    size = _split_size(low, pooled, tl.num_programs(2), TILE)
    begin = low + split * size
    if SPLIT and split > 0 and begin >= pooled:
        return

    rows, channel = tl.arange(0, ROWS), channels(DIMS, F)[None, :]
    query_token = first + rows // GROUP
    position = start + query_token
    head = kv_head * GROUP + rows % GROUP
    in_group = rows < QUERIES * GROUP
    in_head = channel < F.head_dim
    q_at = (row + query_token).to(tl.int64) * token_stride + head.to(tl.int64) * head_stride
    mine = in_group & (position < end)
    q = tl.load(query + q_at[:, None] + channel, mask=mine[:, None] & in_head, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    stop = tl.minimum(begin + size, pooled)
    for at in tl.range(begin, stop, TILE):
        token = at + tl.arange(0, TILE)
        there = token < stop
        if WINDOW > 0:
            there &= token > start + first - WINDOW  # the table may have no block for earlier tokens
        block = tl.load(table + token // F.block, mask=there, other=0).to(tl.int64)
        slot = token % F.block
        top, total, acc = _take(
            q,
            pool,
            token,
            there,
            block,
            slot,
            layer,
            kv_head,
            channel,
            position,
            top,
            total,
            acc,
            scale,
            SOFTCAP,
            WINDOW,
            F,
        )
    if F.kind != RAW:
        # The raw tokens after the last full block: the first split takes them.
        tail = tl.load(segment + 4).to(tl.int64)
        for at in tl.range(pooled, tl.where(split == 0, high, pooled), TAIL):
            token = at + tl.arange(0, TAIL)
            there = token < high
            slot = token - pooled
            block = tl.zeros([TAIL], tl.int64) + tail
            top, total, acc = _take(
                q,
                tails,
                token,
                there,
                block,
                slot,
                layer,
                kv_head,
                channel,
                position,
                top,
                total,
                acc,
                scale,
                SOFTCAP,
                WINDOW,
                T,
            )

    kept = in_group & (position < tl.maximum(end, start + 1))
    HEADS: tl.constexpr = F.kv_heads * GROUP
    if SPLIT:
        part = ((tile * F.kv_heads + kv_head) * tl.num_programs(2) + split).to(tl.int64)
        stat = stats + part * (2 * ROWS) + rows
        tl.store(stat, top)
        tl.store(stat + ROWS, total)
        columns = rows[:, None] * DIMS + tl.arange(0, DIMS)[None, :]
        tl.store(parts + part * (ROWS * DIMS) + columns, acc, mask=kept[:, None] & in_head)
    else:
        if SINKS:
            top, total, acc = _with_sinks(sinks + head, in_group, top, total, acc)
        _store_rows(out, (row + query_token).to(tl.int64) * HEADS + head, channel, F.head_dim, kept, total, acc)


@triton.jit
def _take(
    q,
    pool,
    token,
    there,
    block,
    slot,
    layer,
    kv_head,
    channel,
    position,
    top,
    total,
    acc,
    scale,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    F: tl.constexpr,
):
    """Add tokens to the running softmax: its maximum, sum and P·V for each row, not normalised.

    Maxima are in units of log 2, since the hardware has exp2.
    """
    k = load_tile(pool, block, slot, layer, kv_head, there, channel, KEY, F)
    v = load_tile(pool, block, slot, layer, kv_head, there, channel, VALUE, F)
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
    if F.key_factor:
        scores *= load_factor(pool, block, slot, layer, kv_head, there, KEY, F)[None, :]
    if SOFTCAP > 0:
        scores = _capped(scores, SOFTCAP)
    seen = there[None, :] & (token[None, :] <= position[:, None])
    if WINDOW > 0:
        seen &= token[None, :] > position[:, None] - WINDOW
    scores = tl.where(seen, scores * _LOG2_E, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    # A row that has seen no token yet has no maximum to subtract.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(top - shift)
    total = total * fade + tl.sum(weights, axis=1)
    if F.value_factor:
        weights *= load_factor(pool, block, slot, layer, kv_head, there, VALUE, F)[None, :]
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit
def _capped(scores, SOFTCAP: tl.constexpr):
    """SOFTCAP * tanh(scores / SOFTCAP), by way of exp2: correct for scores of any size."""
    return SOFTCAP - 2 * SOFTCAP / (tl.exp2(scores * (2 * _LOG2_E / SOFTCAP)) + 1)


@triton.jit
def _with_sinks(sinks, there, top, total, acc):
    """Add one more score per row, without a V, to the sums."""
    sink = tl.load(sinks, mask=there, other=0.0).to(tl.float32) * _LOG2_E
    new_top = tl.maximum(top, sink)
    fade = tl.exp2(top - new_top)
    return new_top, total * fade + tl.exp2(sink - new_top), acc * fade[:, None]


@triton.jit
def _store_rows(out, place, channel, HEAD_DIM: tl.constexpr, kept, total, acc):
    """Normalise the rows and store them into row `place` of `[token * head, head_dim]`."""
    mean = acc / tl.where(total > 0, total, 1.0)[:, None]
    mask = kept[:, None] & (channel < HEAD_DIM)
    tl.store(out + place[:, None] * HEAD_DIM + channel, mean.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["splits"])
def _combine(
    out,
    parts,
    stats,
    segments,
    tiles,
    sinks,
    splits,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
    F: tl.constexpr,
):
    """Program (kv_head, tile): combine the parts that `_attend` left of a tile."""
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    QUERIES: tl.constexpr = ROWS // GROUP
    segment = segments + tl.load(tiles + 2 * tile) * 5
    first = tl.load(tiles + 2 * tile + 1)
    row, start, end = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
    low, high = _token_range(start, end, first, QUERIES, WINDOW, TILE)
    pooled = _in_pool(high, end, F)
    used = tl.maximum(tl.cdiv(pooled - low, _split_size(low, pooled, splits, TILE)), 1)

    rows, channel = tl.arange(0, ROWS), channels(DIMS, F)[None, :]
    query_token = first + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    in_group = rows < QUERIES * GROUP
    kept = in_group & (start + query_token < tl.maximum(end, start + 1))
    wanted = kept[:, None] & (channel < F.head_dim)
    columns = rows[:, None] * DIMS + tl.arange(0, DIMS)[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    part = ((tile * F.kv_heads + kv_head) * splits).to(tl.int64)
    for number in tl.range(0, used):
        stat = stats + (part + number) * (2 * ROWS) + rows
        part_top = tl.load(stat)
        part_acc = tl.load(parts + (part + number) * (ROWS * DIMS) + columns, mask=wanted, other=0.0)
        new_top = tl.maximum(top, part_top)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade, part_fade = tl.exp2(top - shift), tl.exp2(part_top - shift)
        total = total * fade + tl.load(stat + ROWS) * part_fade
        acc = acc * fade[:, None] + part_acc * part_fade[:, None]
        top = new_top
    if SINKS:
        top, total, acc = _with_sinks(sinks + head, in_group, top, total, acc)
    HEADS: tl.constexpr = F.kv_heads * GROUP
    _store_rows(out, (row + query_token).to(tl.int64) * HEADS + head, channel, F.head_dim, kept, total, acc)


def paged_attention(
    query: torch.Tensor,
    kv: PagedKv,
    segments: torch.Tensor,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    *,
    layer: int,
    shape: TileShape,
    splits: int,
    scale: float,
    window: int = 0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend from the tokens of `tiles` to the K and V of their sequences in `kv`, and write `out`.

    Args:
        query: `[head, token, head_dim]` of the batch, dense in the last axis.
        kv: has K and V of all tokens, those of full blocks in the pool.
        segments: int32 `[segment, 5]`: first row in the batch, start, end, place in `tables`, tail. A segment
            with end 0 has one row, which gets zeros.
        tables: int32, the block tables, one after the other. Nothing is checked on the device.
        tiles: int32 `[tile, 2]`, from `tiles_of` with `shape.rows // group` queries.
        out: `[token, head, head_dim]`, contiguous; rows of other tiles are left alone.
        splits: programs that share the tokens of each tile. It changes the last bits of the result.
        scale: factor of the scores. window: tokens that a query sees, including itself, 0 for all.
        softcap: scores are `softcap * tanh(scores / softcap)`. sinks: `[head]`, an additional score each.

    Enqueued on the current stream; nothing blocks. Raises ValueError.
    """
    heads, _, head_dim = query.shape
    kv_heads = kv.format.kv_heads
    if query.stride(2) != 1 or not out.is_contiguous():
        raise ValueError("query must be dense in its last axis, out in all")
    if heads % kv_heads or shape.rows < heads // kv_heads or kv.format.head_dim != head_dim:
        raise ValueError(f"{heads} heads of {head_dim} do not fit {kv_heads} KV heads of {kv.format.head_dim}")
    common = {
        "WINDOW": window,
        "SINKS": sinks is not None,
        "GROUP": heads // kv_heads,
        "ROWS": shape.rows,
        "TILE": shape.tile,
        "DIMS": kv.format.dims,
        "F": kv.format,
    }
    parts = stats = out
    if splits > 1:
        programs = tiles.shape[0] * kv_heads * splits
        parts = out.new_empty((programs, shape.rows, kv.format.dims), dtype=torch.float32)
        stats = out.new_empty((programs, 2, shape.rows), dtype=torch.float32)
    grid = (kv_heads, tiles.shape[0], splits)
    sinks = out if sinks is None else sinks  # an unused argument must still be a tensor
    _attend[grid](
        out,
        parts,
        stats,
        query,
        kv.pool,
        kv.tails,
        segments,
        tables,
        tiles,
        sinks,
        layer,
        query.stride(1),
        query.stride(0),
        scale,
        SOFTCAP=softcap or 0.0,
        TAIL=max(16, triton.next_power_of_2(kv.format.block)),
        SPLIT=splits > 1,
        UPCAST=not query.is_cuda,
        T=kv.tail_format,
        **common,
        num_warps=shape.warps,
        num_stages=shape.stages,
        enable_fp_fusion=True,
    )
    if splits > 1:
        _combine[grid[:2]](
            out,
            parts,
            stats,
            segments,
            tiles,
            sinks,
            splits,
            **common,
            num_warps=shape.warps,
            enable_fp_fusion=True,
        )


def paged_attention_reference(
    query: torch.Tensor,
    key: Sequence[torch.Tensor],
    value: Sequence[torch.Tensor],
    starts: Sequence[int],
    *,
    scale: float,
    window: int = 0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The twin of `paged_attention` in plain torch, float32 `[token, head, head_dim]`.

    `key` and `value` hold all tokens of each sequence, `[token, kv_head, head_dim]`; its queries are the tokens
    from `starts` on.
    """
    parts, row, heads = [], 0, query.shape[0]
    for k, v, start in zip(key, value, starts, strict=True):
        end = k.shape[0]
        rows = query[:, row : row + end - start].float()
        row += end - start
        k, v = (part.float().repeat_interleave(heads // part.shape[1], dim=1) for part in (k, v))
        scores = torch.einsum("hqd,khd->hqk", rows, k) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        distance = torch.arange(start, end, device=k.device)[:, None] - torch.arange(end, device=k.device)[None, :]
        hidden = (distance < 0) | (distance >= window if window else False)
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            extra = sinks.float().view(heads, 1, 1).expand(heads, end - start, 1)
            scores = torch.cat([scores, extra], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :end]
        parts.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(parts)
