"""Tiles of K and V from a paged pool, raw or quantised, for kernels that compute with them.

`kv_formats` defines the bytes of a format; this module is how a kernel reads them. Factors that all channels of a
token share are kept apart from the values, so that a kernel can apply them to the scores or weights of a token
instead of to each of its channels: fp8 values then need no rounding at all.
"""

# What Triton compiles has no types of Python's.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .kv_formats import BlockFormat

RAW, E4M3, E5M2, INT8, INT4 = (tl.constexpr(number) for number in range(5))
_KINDS = {"fp8_e4m3": E4M3.value, "fp8_e5m2": E5M2.value, "int8": INT8.value, "int4": INT4.value}
KEY, VALUE = tl.constexpr(0), tl.constexpr(1)


class TileFormat(NamedTuple):
    """Compile-time facts about a pool. Offsets and `record` are in bytes, 0 for a raw pool.

    A pool is `[block, layer, 2, slot, kv_head, head_dim]` (raw), or uint8 `[block, layer, record]`. Groups are
    of int4; factors say whether tiles of K and V have them.
    """

    kind: int
    layers: int
    block: int
    kv_heads: int
    head_dim: int
    record: int = 0
    value_at: int = 0
    key_scale: int = 0
    value_scale: int = 0
    key_zero: int = 0
    value_zero: int = 0
    key_base: int = 0
    value_base: int = 0
    key_group: int = 1
    value_group: int = 1
    key_factor: bool = False
    value_factor: bool = False

    @classmethod
    def of(cls, pool: torch.Tensor, quantised: BlockFormat | None = None) -> TileFormat:
        """The format of a pool, raw by default."""
        if quantised is None:
            return cls(RAW.value, pool.shape[1], *pool.shape[3:])
        at = {name: field.offset for name, field in quantised.fields.items()}
        return cls(
            _KINDS[quantised.name],
            pool.shape[1],
            quantised.block_size,
            quantised.kv_heads,
            quantised.head_dim,
            record=quantised.record_bytes,
            value_at=at["value"],
            key_scale=at.get("key_scale", at.get("key_step", 0)),
            value_scale=at.get("value_scale", at.get("value_step", 0)),
            key_zero=at.get("key_zero", 0),
            value_zero=at.get("value_zero", 0),
            key_base=at.get("key_base", 0),
            value_base=at.get("value_base", 0),
            key_group=quantised.key_group,
            value_group=quantised.value_group,
            key_factor=quantised.name.startswith("fp8"),
            value_factor=quantised.name != "int4",
        )

    @property
    def dims(self) -> int:
        """Columns of a tile: a power of two, as matrix units want it."""
        halves = 2 if self.kind == INT4.value else 1
        return max(16, halves * int(triton.next_power_of_2(self.head_dim // halves)))


class PagedKv(NamedTuple):
    """A pool as kernels see it, and the tokens that a quantised pool does not hold yet.

    Attributes:
        pool: see `TileFormat`.
        tails: raw `[tail, layer, 2, slot, kv_head, head_dim]`: for each running sequence the tokens after its
        last full block. The pool itself if it is raw.
    """

    pool: torch.Tensor
    tails: torch.Tensor
    format: TileFormat
    tail_format: TileFormat

    @classmethod
    def raw(cls, pool: torch.Tensor) -> PagedKv:
        """A pool `[block, layer, 2, slot, kv_head, head_dim]`."""
        of = TileFormat.of(pool)
        return cls(pool, pool, of, of)

    @classmethod
    def quantised(cls, pool: torch.Tensor, block_format: BlockFormat, tails: torch.Tensor) -> PagedKv:
        """A pool of records, uint8 `[block, layer, record_bytes]`."""
        return cls(pool, tails, TileFormat.of(pool, block_format), TileFormat.of(tails))


@triton.jit
def channels(DIMS: tl.constexpr, F: tl.constexpr):
    """The channel in each column of a tile, at least head_dim if there is none.

    A byte of int4 holds a channel of each half of a head; if the halves are not powers of two, each half of
    the columns ends in padding.
    """
    column = tl.arange(0, DIMS)
    if F.kind == INT4 and F.head_dim != DIMS:
        HALF: tl.constexpr = F.head_dim // 2
        within = column % (DIMS // 2)
        column = tl.where(within < HALF, within + column // (DIMS // 2) * HALF, F.head_dim)
    return column


@triton.jit
def load_tile(pool, block, slot, layer, head, there, channel, PART: tl.constexpr, F: tl.constexpr):
    """K or V of tokens at (block, slot), `[token, channel]`; tokens not `there` are 0 and not read.

    Without the factor of each token, which `load_factor` gives. block is int64 `[token]`, channel `[1, channel]`.
    """
    wanted = there[:, None] & (channel < F.head_dim)
    at = (block * F.layers + layer)[:, None]
    row = (head * F.block + slot)[:, None]
    if F.kind == RAW:
        SIZE: tl.constexpr = F.kv_heads * F.head_dim
        at = at * (2 * F.block * SIZE) + ((slot + PART * F.block) * SIZE)[:, None] + (head * F.head_dim + channel)
        return tl.load(pool + at, mask=wanted, other=0.0)
    elif F.kind == INT4:
        return _int4_tile(pool + at * F.record, row, slot[:, None], head, there, channel, wanted, PART, F)
    else:
        record = pool + at * F.record
        code = tl.load(record + (PART * F.value_at + row * F.head_dim + channel), mask=wanted, other=0)
        code = code.to(tl.int8, bitcast=True)
        if F.kind == E4M3:
            # As float16 with the same exponent bits: 2^8 too small, and exact, subnormals included.
            return ((code.to(tl.int16) << 7) & -0x4001).to(tl.float16, bitcast=True)
        elif F.kind == E5M2:
            return (code.to(tl.int16) << 8).to(tl.float16, bitcast=True)
        elif PART == VALUE:
            return code.to(tl.float32)
        else:
            scale = _load_bf16(record + F.key_scale, head * F.head_dim + channel, wanted)
            return code.to(tl.float32) * scale


@triton.jit
def load_factor(pool, block, slot, layer, head, there, PART: tl.constexpr, F: tl.constexpr):
    """The factor of each row of the tile, float32 `[token]`."""
    record = pool + (block * F.layers + layer) * F.record
    at = F.value_scale if PART == VALUE else F.key_scale
    factor = _load_bf16(record + at, head * F.block + slot if F.kind == INT8 else head, there)
    return factor * 256 if F.kind == E4M3 else factor


@triton.jit
def _int4_tile(record, row, slot, head, there, channel, wanted, PART: tl.constexpr, F: tl.constexpr):
    DIMS: tl.constexpr = channel.shape[1]
    HALF: tl.constexpr = F.head_dim // 2
    byte = tl.arange(0, DIMS // 2)[None, :]
    at = record + (PART * F.value_at + row * HALF + byte)
    packed = tl.load(at, mask=there[:, None] & (byte < HALF), other=0)
    halves = tl.join(packed & 15, packed >> 4)
    code = tl.reshape(tl.permute(halves, (0, 2, 1)), (packed.shape[0], DIMS)).to(tl.float32)
    bases = (record + (F.value_base if PART == VALUE else F.key_base)).to(tl.pointer_type(tl.int16), bitcast=True)
    base = tl.load(bases + head, mask=there[:, None], other=255).to(tl.int32)
    if PART == KEY:
        group = (head * (F.block // F.key_group) + slot // F.key_group) * F.head_dim + channel
        step, zero = _int4_group(record + F.key_scale, record + F.key_zero, base, group, wanted)
    elif F.head_dim == DIMS:
        GROUPS: tl.constexpr = DIMS // F.value_group
        group = row * GROUPS + tl.arange(0, GROUPS)[None, :]
        step, zero = _int4_group(record + F.value_scale, record + F.value_zero, base, group, there[:, None])
        step, zero = _spread(step, F.value_group), _spread(zero, F.value_group)
    else:
        group = row * (F.head_dim // F.value_group) + channel // F.value_group
        step, zero = _int4_group(record + F.value_scale, record + F.value_zero, base, group, wanted)
    return (code + zero) * step


@triton.jit
def _int4_group(steps, zeros, base, group, wanted):
    """Step and zero of groups, float32."""
    step = base - 255 + tl.load(steps + group, mask=wanted, other=0).to(tl.int32)
    zero = tl.load(zeros + group, mask=wanted, other=0).to(tl.int8, bitcast=True)
    return (step << 19).to(tl.float32, bitcast=True), zero.to(tl.float32)


@triton.jit
def _spread(x, TIMES: tl.constexpr):
    """Each column TIMES times, side by side."""
    wide = tl.broadcast_to(x[:, :, None], (x.shape[0], x.shape[1], TIMES))
    return tl.reshape(wide, (x.shape[0], x.shape[1] * TIMES))


@triton.jit
def _load_bf16(address, index, there):
    """Elements of bf16 arrays at byte addresses, as float32; read as integers, which the interpreter handles right.

    The index is added to a pointer of the right width: the compiler then sees what is contiguous.
    """
    bits = tl.load(address.to(tl.pointer_type(tl.int16), bitcast=True) + index, mask=there, other=0)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
