"""Writing K and V of packed tokens into the paged KV pool.

In a raw pool, or the raw tails of a quantised one, tokens are copied to their slots (`write_tokens`). A
quantised pool takes whole blocks (`write_blocks`): one program holds all tokens of a block and one head in registers,
new tokens from the batch and older ones from the tail, and writes their bytes as `kv_formats` describes them,
bit for bit. The twin of these is `BlockFormat.encode`; what is only copied needs none.
"""

# What Triton compiles has no types of Python's.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .kv_tiles import E4M3, INT4, INT8, KEY, VALUE, PagedKv, TileFormat, channels, load_tile

_TINY = tl.constexpr(2.0**-126)
_LEAST_BASE = tl.constexpr(255 + (0x00800000 >> 19))
_ROUND = tl.constexpr(1.5 * 2**23)
"""Added to a float32 below 2^22 and subtracted again, it leaves the nearest integer, ties to even."""


@triton.jit(do_not_specialize=["layer"])
def _write_tokens(
    pool,
    slots,
    key,
    value,
    layer,
    key_head_stride,
    key_token_stride,
    value_head_stride,
    value_token_stride,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    F: tl.constexpr,
):
    """Program (token): write K and V of one token into its slot of a raw `pool`; skips a slot below 0."""
    token = tl.program_id(0)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    SIZE: tl.constexpr = F.kv_heads * F.head_dim
    head, channel = tl.arange(0, HEADS)[:, None], tl.arange(0, DIMS)[None, :]
    there = (head < F.kv_heads) & (channel < F.head_dim)
    place = (slot // F.block * F.layers + layer) * (2 * F.block * SIZE) + slot % F.block * SIZE
    to = pool + place + head * F.head_dim + channel
    k = tl.load(key + token.to(tl.int64) * key_token_stride + head * key_head_stride + channel, mask=there)
    v = tl.load(value + token.to(tl.int64) * value_token_stride + head * value_head_stride + channel, mask=there)
    tl.store(to, k.to(pool.dtype.element_ty), mask=there)
    tl.store(to + F.block * SIZE, v.to(pool.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["layer"])
def _write_blocks(
    pool,
    tails,
    segments,
    tables,
    items,
    key,
    value,
    layer,
    key_head_stride,
    key_token_stride,
    value_head_stride,
    value_token_stride,
    SLOTS: tl.constexpr,
    DIMS: tl.constexpr,
    F: tl.constexpr,
    T: tl.constexpr,
):
    """Program (item, kv_head): write one block of a segment, if it is full, as part of its layer's record."""
    head = tl.program_id(1)
    segment = segments + tl.load(items + 2 * tl.program_id(0)) * 5
    number = tl.load(items + 2 * tl.program_id(0) + 1)
    row, start, end = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
    if (number + 1) * F.block > end:
        return
    block = tl.load(tables + tl.load(segment + 3) + number).to(tl.int64)
    record = pool + (block * F.layers + layer) * F.record

    slot, channel = tl.arange(0, SLOTS), channels(DIMS, F)[None, :]
    token = number * F.block + slot
    old = token < start
    new = (slot < F.block) & (token >= start)
    tail = tl.zeros([SLOTS], tl.int64) + tl.load(segment + 4)
    mask = new[:, None] & (channel < F.head_dim)
    at = (row + token - start).to(tl.int64)[:, None]
    k = tl.load(key + at * key_token_stride + (head * key_head_stride + channel), mask=mask, other=0.0).to(tl.float32)
    k += load_tile(tails, tail, slot, layer, head, old, channel, KEY, T).to(tl.float32)
    _encode(record, k, head, slot, channel, KEY, F)
    v = tl.load(value + at * value_token_stride + (head * value_head_stride + channel), mask=mask, other=0.0)
    v = v.to(tl.float32) + load_tile(tails, tail, slot, layer, head, old, channel, VALUE, T).to(tl.float32)
    _encode(record, v, head, slot, channel, VALUE, F)


@triton.jit
def _encode(record, x, head, slot, channel, PART: tl.constexpr, F: tl.constexpr):
    """Store K or V of one block and head, float32 `[slot, channel]` with zeros for padding, into a record."""
    at = PART * F.value_at + (head * F.block + slot[:, None]) * F.head_dim + channel
    inside = (slot[:, None] < F.block) & (channel < F.head_dim)
    if F.kind == INT4:
        _encode_int4(record, x, head, slot[:, None], channel, PART, F)
    elif F.kind == INT8 and PART == KEY:
        scale = _up_to_bf16(_divided(tl.max(tl.abs(x), axis=0), 127.0))[None, :]
        _store_bf16(record + F.key_scale, head * F.head_dim + channel, scale, channel < F.head_dim)
        tl.store(record + at, _as_byte(_rounded(_divided(x, scale))), mask=inside)
    elif F.kind == INT8:
        scale = _up_to_bf16(_divided(tl.max(tl.abs(x), axis=1), 127.0))
        _store_bf16(record + F.value_scale, head * F.block + slot, scale, slot < F.block)
        tl.store(record + at, _as_byte(_rounded(_divided(x, scale[:, None]))), mask=inside)
    else:
        EXPONENT: tl.constexpr = 8 if F.kind == E4M3 else 15
        largest = tl.max(tl.max(tl.abs(x), axis=1), axis=0)
        # A quarter of the mantissa, less one, carries into the exponent from just above 1.75.
        power = tl.maximum(((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - EXPONENT, 1)
        scale = (power << 23).to(tl.float32, bitcast=True)
        _store_bf16(record + (F.value_scale if PART == VALUE else F.key_scale), head, scale, True)
        tl.store(record + at, _fp8(_divided(x, scale), F), mask=inside)


@triton.jit
def _encode_int4(record, x, head, slot, channel, PART: tl.constexpr, F: tl.constexpr):
    if PART == VALUE:
        low, high = _group_bounds(x, channel // F.value_group, 1, F.head_dim // F.value_group)
        group = (head * F.block + slot) * (F.head_dim // F.value_group) + channel // F.value_group
        first = channel % F.value_group == 0
    else:
        low, high = _group_bounds(x, slot // F.key_group, 0, F.block // F.key_group)
        group = (head * (F.block // F.key_group) + slot // F.key_group) * F.head_dim + channel
        first = slot % F.key_group == 0
    need = tl.maximum(_divided(high - low, 15.0), _divided(tl.maximum(tl.abs(low), tl.abs(high)), 127.0))
    number = (tl.maximum(need, _TINY).to(tl.int32, bitcast=True) + 0x7FFFF) >> 19
    base = tl.maximum(tl.max(tl.max(number, axis=1), axis=0), _LEAST_BASE)
    byte = tl.maximum(number - base + 255, 0)
    step = ((base - 255 + byte) << 19).to(tl.float32, bitcast=True)
    zero = _rounded(_divided(low, step))
    code = tl.minimum(tl.maximum(_rounded(_divided(x, step)) - zero, 0.0), 15.0).to(tl.int32)

    first &= (slot < F.block) & (channel < F.head_dim)
    tl.store(record + ((F.value_scale if PART == VALUE else F.key_scale) + group), byte.to(tl.uint8), mask=first)
    tl.store(record + ((F.value_zero if PART == VALUE else F.key_zero) + group), _as_byte(zero), mask=first)
    base_at = record + ((F.value_base if PART == VALUE else F.key_base) + 2 * head)
    tl.store(base_at.to(tl.pointer_type(tl.int16), bitcast=True), base.to(tl.int16))
    HALF: tl.constexpr = F.head_dim // 2
    COLUMNS: tl.constexpr = x.shape[1] // 2
    low_half, high_half = tl.split(tl.permute(tl.reshape(code, (x.shape[0], 2, COLUMNS)), (0, 2, 1)))
    column = tl.arange(0, COLUMNS)[None, :]
    at = record + (PART * F.value_at + (head * F.block + slot) * HALF + column)
    tl.store(at, (low_half | high_half << 4).to(tl.uint8), mask=(slot < F.block) & (column < HALF))


@triton.jit
def _group_bounds(x, group, AXIS: tl.constexpr, GROUPS: tl.constexpr):
    """Minimum and maximum of each element's group, along the axis that the groups divide; 0 outside of all."""
    low, high = tl.zeros(x.shape, tl.float32), tl.zeros(x.shape, tl.float32)
    for number in tl.static_range(GROUPS):
        mine = tl.broadcast_to(group == number, x.shape)
        least = tl.expand_dims(tl.min(tl.where(mine, x, float("inf")), axis=AXIS), AXIS)
        most = tl.expand_dims(tl.max(tl.where(mine, x, float("-inf")), axis=AXIS), AXIS)
        low, high = tl.where(mine, least, low), tl.where(mine, most, high)
    return low, high


@triton.jit
def _fp8(x, F: tl.constexpr):
    """Codes of numbers within the format's range, rounded to even, by integer arithmetic, which any GPU has."""
    MANTISSA: tl.constexpr = 3 if F.kind == E4M3 else 2
    BIAS: tl.constexpr = 7 if F.kind == E4M3 else 15
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    normal = ((bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # Below the least normal number, an addition aligns the mantissa with the codes and rounds it.
    ANCHOR: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    ANCHOR_BITS: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    tiny = (tl.abs(x) + ANCHOR).to(tl.int32, bitcast=True) - ANCHOR_BITS
    code = tl.where(bits < ((128 - BIAS) << 23), tiny, normal)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _divided(x, by):
    """Correctly rounded quotients; `/` on a GPU does not round correctly."""
    return tl.div_rn(x, tl.zeros(x.shape, tl.float32) + by)


@triton.jit
def _rounded(x):
    """The nearest integers of numbers below 2^22, ties to even."""
    return (x + _ROUND) - _ROUND


@triton.jit
def _as_byte(x):
    """Whole numbers from -128 to 127 as bytes."""
    return x.to(tl.int32).to(tl.uint8)


@triton.jit
def _up_to_bf16(scale):
    """Positive float32 rounded up to bf16, at least 2^-126."""
    return ((tl.maximum(scale, _TINY).to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _store_bf16(address, index, x, mask):
    """Store numbers that bf16 can represent as elements of an array at a byte address."""
    bits = (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    tl.store(address.to(tl.pointer_type(tl.int16), bitcast=True) + index, bits, mask=mask)


def write_tokens(pool: torch.Tensor, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Copy K and V of the batch's tokens to their slots of a raw pool, or of tails.

    Args:
        pool: `[block, layer, 2, slot, kv_head, head_dim]`, contiguous.
        slots: int32 `[token]`: `block * block_size + slot`, each at most once; -1 leaves a token out. Not checked.
        key, value: `[kv_head, token, head_dim]`, dense in the last axis.

    Enqueued on the current stream; nothing blocks. Raises ValueError.
    """
    _check(key, value)
    of = TileFormat.of(pool)
    _write_tokens[(slots.numel(),)](
        pool,
        slots,
        key,
        value,
        layer,
        *key.stride()[:2],
        *value.stride()[:2],
        HEADS=triton.next_power_of_2(of.kv_heads),
        DIMS=triton.next_power_of_2(of.head_dim),
        F=of,
        num_warps=4,
    )


def write_blocks(
    kv: PagedKv,
    layer: int,
    segments: torch.Tensor,
    tables: torch.Tensor,
    items: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Quantise blocks that the batch's tokens have filled, into the records of a layer.

    Args:
        kv: a quantised pool, with the older tokens of the blocks in its tails.
        segments, tables: as for `paged_attention`.
        items: int32 `[item, 2]`: segment, and number of the block in its table. Skips blocks that are not full
        at the segment's end.
        key, value: of the whole batch, `[kv_head, token, head_dim]`, dense in the last axis.

    Enqueued on the current stream; nothing blocks. Raises ValueError.
    """
    _check(key, value)
    of = kv.format
    _write_blocks[(items.shape[0], of.kv_heads)](
        kv.pool,
        kv.tails,
        segments,
        tables,
        items,
        key,
        value,
        layer,
        *key.stride()[:2],
        *value.stride()[:2],
        SLOTS=triton.next_power_of_2(of.block),
        DIMS=of.dims,
        F=of,
        T=kv.tail_format,
        num_warps=4,
        enable_fp_fusion=False,  # a fused product would be rounded once, and the twin rounds twice
    )


def _check(key: torch.Tensor, value: torch.Tensor) -> None:
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError("key and value must be dense in their last axis")
