"""KV blocks in fewer bits: the bytes of each format, and plain torch that writes and reads them.

A block of S slots (`block_size`) is, in memory, one *record* per layer; the records of all layers follow one
another, so that a block stays one run of bytes. H is `kv_heads`, D is `head_dim`. A record holds these
fields in this order, each C-contiguous, little-endian, and is padded with zeros to a multiple of 16 bytes:

    fp8_e4m3   key    u8  [H, S, D]        code of 8 bits; K = float(key) * key_scale[h]
    fp8_e5m2   value  u8  [H, S, D]        V = float(value) * value_scale[h]
               key_scale, value_scale      bf16 [H]: powers of two

    int8       key    i8  [H, S, D]        K = key * key_scale[h, d]           (per channel)
               value  i8  [H, S, D]        V = value * value_scale[h, s]       (per token)
               key_scale                   bf16 [H, D]
               value_scale                 bf16 [H, S]

    int4       key    u8  [H, S, D / 2]    channel c < D/2 in the low half of byte c, channel c + D/2 in the high half
               value  u8  [H, S, D / 2]    the same
               key_step    u8 [H, S / GK, D]    GK slots of a channel are a group: K = (code + zero) * step
               key_zero    i8 [H, S / GK, D]
               value_step  u8 [H, S, D / GV]    GV neighbouring channels of a token are a group
               value_zero  i8 [H, S, D / GV]
               key_base, value_base        u16 [H]: step = float32 with the bits (base - 255 + step) << 19

GK and GV are the largest powers of two up to 32 that divide S and D. Codes are computed so (float32, quotients
correctly rounded, `rint` to even, a scale never below 2^-126, so that zeros need no special case):

    fp8    scale = the smallest power of two with max|x| <= 1.75 * 2^8 * scale (e5m2: 2^15); code = x / scale,
           rounded to even; the division is exact
    int8   scale = max|x| / 127, rounded up to bf16; code = rint(x / scale)
    int4   need = max((max - min) / 15, max|x| / 127), rounded up to 4 bits of mantissa: its bits >> 19 are a number
           of 12 bits; base = the largest of a head (at least 271), step = number - base + 255 (at least 0);
           zero = rint(min / step), code = rint(x / step) - zero, cut to 0..15

All products of a code and its scale are exact in float32, so decoding rounds once, to the model's dtype.
NaN and infinity are not preserved as such: they spread to other elements of the block.

K has channels that are far from zero in every token, V has none: hence K by channel and V by token (KIVI,
arXiv 2402.02750). Each block is independent, so a group never reaches beyond it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

FORMATS = ("fp8_e4m3", "fp8_e5m2", "int8", "int4")
GROUP = 32
RECORD_ALIGNMENT_BYTES = 16
_TINY = 2.0**-126
# dtype, and the exponent of the format's largest number, which is 1.75 * 2^exponent in both.
_FP8 = {"fp8_e4m3": (torch.float8_e4m3fn, 8), "fp8_e5m2": (torch.float8_e5m2, 15)}
# A step of int4 is a byte below the largest one of its head: 255 of them reach down 16 octaves.
_STEP_RANGE = 255
_LEAST_BASE = _STEP_RANGE + (0x00800000 >> 19)


class Field(NamedTuple):
    """A part of a record: `shape` elements of `dtype` from byte `offset` on."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class BlockFormat:
    """The byte format of a block of one layer. `name` is one of FORMATS.

    Raises ValueError for a shape that the format does not support.
    """

    name: str
    block_size: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.name not in FORMATS:
            raise ValueError(f"{self.name!r} is not a KV format: take one of {', '.join(FORMATS)}")
        if self.name == "int4" and self.head_dim % 2:
            raise ValueError(f"int4 needs an even head_dim, not {self.head_dim}: take int8")

    @property
    def key_group(self) -> int:
        """Slots that share a step of int4."""
        return math.gcd(GROUP, self.block_size)

    @property
    def value_group(self) -> int:
        """Channels that share a step of int4."""
        return math.gcd(GROUP, self.head_dim)

    @cached_property
    def fields(self) -> dict[str, Field]:
        """The fields of a record, in their order."""
        slots, heads, channels = self.block_size, self.kv_heads, self.head_dim
        parts: list[tuple[str, tuple[int, ...], torch.dtype]]
        if self.name in _FP8:
            parts = [(name, (heads, slots, channels), torch.uint8) for name in ("key", "value")]
            parts += [(name, (heads,), torch.bfloat16) for name in ("key_scale", "value_scale")]
        elif self.name == "int8":
            parts = [(name, (heads, slots, channels), torch.int8) for name in ("key", "value")]
            parts.append(("key_scale", (heads, channels), torch.bfloat16))
            parts.append(("value_scale", (heads, slots), torch.bfloat16))
        else:
            parts = [(name, (heads, slots, channels // 2), torch.uint8) for name in ("key", "value")]
            key_groups = (heads, slots // self.key_group, channels)
            value_groups = (heads, slots, channels // self.value_group)
            parts += [("key_step", key_groups, torch.uint8), ("key_zero", key_groups, torch.int8)]
            parts += [("value_step", value_groups, torch.uint8), ("value_zero", value_groups, torch.int8)]
            parts += [(name, (heads,), torch.int16) for name in ("key_base", "value_base")]
        fields: dict[str, Field] = {}
        offset = 0
        for name, shape, dtype in parts:
            offset += -offset % dtype.itemsize
            fields[name] = Field(offset, shape, dtype)
            offset += fields[name].bytes
        return fields

    @cached_property
    def record_bytes(self) -> int:
        """Length of the record of one layer."""
        last = list(self.fields.values())[-1]
        end = last.offset + last.bytes
        return end + -end % RECORD_ALIGNMENT_BYTES

    def view(self, records: torch.Tensor, name: str) -> torch.Tensor:
        """A field of `records` (uint8 `[..., record_bytes]`, contiguous records), without a copy: `[..., *shape]`."""
        field = self.fields[name]
        part = records[..., field.offset : field.offset + field.bytes].view(field.dtype)
        return part.view(*records.shape[:-1], *field.shape)

    def encode(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Records, uint8 `[..., record_bytes]`, of K and V, `[..., slot, kv_head, head_dim]` each, in any float."""
        shape = (*key.shape[:-3], self.record_bytes)
        records = torch.zeros(shape, dtype=torch.uint8, device=key.device)
        for part, rows in (("key", key), ("value", value)):
            found = self._encode_part(part, rows.transpose(-3, -2).float())
            for name, content in found.items():
                self.view(records, name).copy_(content)
        return records

    def decode(self, records: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, `[..., kv_head, slot, head_dim]` each, of records (uint8 `[..., record_bytes]`)."""
        return self._decode_part("key", records, dtype), self._decode_part("value", records, dtype)

    def _encode_part(self, part: str, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Fields of K or V, `[..., kv_head, slot, head_dim]`."""
        if self.name in _FP8:
            dtype, exponent = _FP8[self.name]
            scale = _power_of_two(rows.abs().amax(dim=(-2, -1)), exponent)
            codes = (rows / scale[..., None, None]).to(dtype)
            return {part: codes.view(torch.uint8), f"{part}_scale": scale}
        if self.name == "int8":
            axis = -2 if part == "key" else -1
            scale = _up_to_bf16(_divided(rows.abs().amax(dim=axis), 127))
            codes = (rows / scale.unsqueeze(axis)).round_()
            return {part: codes, f"{part}_scale": scale}
        return self._encode_int4(part, rows)

    def _decode_part(self, part: str, records: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        codes = self.view(records, part)
        if self.name in _FP8:
            scale = self.view(records, f"{part}_scale").float()[..., None, None]
            return (_fp8_as_float(codes, self.name) * scale).to(dtype)
        if self.name == "int8":
            scale = self.view(records, f"{part}_scale").float().unsqueeze(-2 if part == "key" else -1)
            return (codes * scale).to(dtype)
        zero = self.view(records, f"{part}_zero")
        step = self._steps(self.view(records, f"{part}_base"), self.view(records, f"{part}_step"))
        numbers = torch.cat([codes & 15, codes >> 4], dim=-1).to(torch.int16)
        values = (self._grouped(part, numbers) + self._group(part, zero)) * self._group(part, step)
        return values.reshape(numbers.shape).to(dtype)

    def _encode_int4(self, part: str, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        grouped = self._grouped(part, rows)
        axis = -2 if part == "key" else -1
        low, high = grouped.amin(dim=axis), grouped.amax(dim=axis)
        need = torch.maximum(_divided(high - low, 15), _divided(torch.maximum(low.abs(), high.abs()), 127))
        number = (need.clamp_min(_TINY).view(torch.int32) + 0x7FFFF) >> 19
        base = number.amax(dim=(-2, -1)).clamp_min(_LEAST_BASE)
        byte = (number - base[..., None, None] + _STEP_RANGE).clamp_min(0)
        step = self._steps(base, byte)
        zero = torch.round(low / step)
        codes = torch.round(grouped / self._group(part, step)) - self._group(part, zero)
        codes = codes.clamp_(0, 15).to(torch.uint8).reshape(rows.shape)
        half = self.head_dim // 2
        packed = codes[..., :half] | codes[..., half:] << 4
        return {part: packed, f"{part}_step": byte, f"{part}_zero": zero, f"{part}_base": base}

    def _grouped(self, part: str, rows: torch.Tensor) -> torch.Tensor:
        """`[..., slot, channel]` with the axis of the groups split in two."""
        *leading, slots, channels = rows.shape
        if part == "key":
            return rows.view(*leading, slots // self.key_group, self.key_group, channels)
        return rows.view(*leading, slots, channels // self.value_group, self.value_group)

    @staticmethod
    def _group(part: str, values: torch.Tensor) -> torch.Tensor:
        """One value for each group, to combine with the result of `_grouped`."""
        return values.unsqueeze(-2 if part == "key" else -1)

    @staticmethod
    def _steps(base: torch.Tensor, byte: torch.Tensor) -> torch.Tensor:
        numbers = base.to(torch.int32)[..., None, None] - _STEP_RANGE + byte
        return (numbers << 19).view(torch.float32)


def _divided(values: torch.Tensor, by: int) -> torch.Tensor:
    """Correctly rounded quotients: on CUDA torch divides by a plain number by multiplying with its reciprocal."""
    return values / torch.full((), by, dtype=values.dtype, device=values.device)


def _power_of_two(largest: torch.Tensor, exponent: int) -> torch.Tensor:
    """The smallest power of two, at least 2^-126, with `largest` <= 1.75 * 2^exponent times it."""
    # Adding a quarter of the mantissa, less one, carries into the exponent from just above 1.75.
    power = ((largest.view(torch.int32) + 0x1FFFFF) >> 23) - exponent
    return (power.clamp_min(1) << 23).view(torch.float32)


def _fp8_as_float(codes: torch.Tensor, name: str) -> torch.Tensor:
    """Fp8 codes as float32, by way of float16 bits, which a CPU casts much faster than float8."""
    if name == "fp8_e5m2":
        return (codes.to(torch.int16) << 8).view(torch.float16).float()
    # A bit less of mantissa and four bits of exponent: 2^8 too small as float16, subnormals included.
    bits = (codes.view(torch.int8).to(torch.int16) << 7) & ~0x4000
    return bits.view(torch.float16).float() * 256


def _up_to_bf16(scale: torch.Tensor) -> torch.Tensor:
    """Positive float32 rounded up to bf16, at least 2^-126."""
    bits = scale.clamp_min(_TINY).view(torch.int32) + 0xFFFF
    return (bits & ~0xFFFF).view(torch.float32)
