"""Lane sums of blocks where they are, in device memory: the part of a checksum that touches the bytes.

`tiercache.protocol.checksums` defines the sum and computes it with numpy. Here a Triton kernel gives the same bits,
for blocks that arrived in device memory without passing through the host:

    program (block, stripe)   4096 lanes of 4 bytes ─► Σ lane * key ─► mix with the stripe's number
    then                      partial [blocks, stripes] ─► sum of each row, mod 2^64

`tiercache.protocol.checksums.finish_lanes` adds the seed, on the host. Tests compare the kernel with the plain torch
twin at the end, and the twin with numpy.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from tiercache.protocol.checksums import (
    GOLDEN,
    LANE_BYTES,
    MIX_FACTORS,
    MIX_SHIFTS,
    STRIPE_BYTES,
    STRIPE_LANES,
    lane_keys,
)

NUM_WARPS = 8
ALIGN_BYTES = 16


def _signed(value: int) -> int:
    """The int64 with the same bits: torch and Triton have no other constants of that width."""
    return value - (1 << 64) if value >> 63 else value


# Named constants of a kernel must be constexpr; unsigned ones do not fit int64 and are written as signed.
_GOLDEN = tl.constexpr(_signed(GOLDEN))
_FACTOR_1 = tl.constexpr(_signed(MIX_FACTORS[0]))
_FACTOR_2 = tl.constexpr(_signed(MIX_FACTORS[1]))
_SHIFT_1 = tl.constexpr(MIX_SHIFTS[0])
_SHIFT_2 = tl.constexpr(MIX_SHIFTS[1])
_SHIFT_3 = tl.constexpr(MIX_SHIFTS[2])


# The keys are our own tensor and always aligned; the kernel states all other alignment itself.
@triton.jit(
    do_not_specialize=["vectors", "stripes"],
    do_not_specialize_on_alignment=["addresses", "partial"],
)  # type: ignore[untyped-decorator, unused-ignore]
def _sum_stripes(  # type: ignore[no-untyped-def]
    addresses, keys, partial, vectors, stripes, STRIPE: tl.constexpr, VECTOR: tl.constexpr
):
    """Sum one stripe of one block of `vectors` times VECTOR lanes: program (block, stripe)."""
    block = tl.program_id(0)
    stripe = tl.program_id(1)
    base = tl.multiple_of(tl.load(addresses + block).to(tl.pointer_type(tl.int32)), VECTOR * 4)
    within = tl.arange(0, STRIPE)
    at = stripe * STRIPE + within
    inside = at < vectors * VECTOR
    lane = tl.load(base + at, mask=inside, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
    total = tl.sum(lane * tl.load(keys + within), axis=0)
    value = total + (stripe + 1).to(tl.int64) * _GOLDEN
    # Logical shifts, not arithmetic ones: through uint64 and back.
    value = (value ^ (value.to(tl.uint64) >> _SHIFT_1).to(tl.int64)) * _FACTOR_1
    value = (value ^ (value.to(tl.uint64) >> _SHIFT_2).to(tl.int64)) * _FACTOR_2
    value = value ^ (value.to(tl.uint64) >> _SHIFT_3).to(tl.int64)
    tl.store(partial + block * stripes + stripe, value)


def kernel_constants() -> dict[str, Any]:
    """Compile-time arguments of the kernel."""
    return {"STRIPE": STRIPE_LANES, "VECTOR": ALIGN_BYTES // LANE_BYTES}


@cache
def _keys_on(device: str) -> torch.Tensor:
    return torch.from_numpy(lane_keys().view("int64").copy()).to(device)


def lane_sums(addresses: torch.Tensor, length: int) -> torch.Tensor:
    """The lane sum of each block, as int64 `[n]` (the bits are an unsigned number's).

    Args:
        addresses: int64 `[n]` on the device: where each block begins, a multiple of 16. The blocks
            are neither checked nor kept alive; a wrong address crashes the process.
        length: bytes of every block, a multiple of 16.

    Enqueued on the current stream of the device; nothing blocks. Raises ValueError.
    """
    if addresses.dtype != torch.int64 or addresses.dim() != 1:
        raise ValueError("addresses are a 1-D int64 tensor on the device")
    if length <= 0 or length % ALIGN_BYTES:
        raise ValueError(f"blocks of {length} bytes: must be a multiple of {ALIGN_BYTES}")
    blocks, stripes = addresses.numel(), -(-length // STRIPE_BYTES)
    partial = torch.empty((blocks, stripes), dtype=torch.int64, device=addresses.device)
    if blocks:
        keys = _keys_on(str(addresses.device))
        grid = (blocks, stripes)
        table = (addresses.contiguous(), keys, partial, length // ALIGN_BYTES, stripes)
        if addresses.device.type == "cuda":
            with torch.cuda.device(addresses.device):
                _sum_stripes[grid](*table, **kernel_constants(), num_warps=NUM_WARPS)
        else:  # only Triton's interpreter accepts this
            _sum_stripes[grid](*table, **kernel_constants())
    return partial.sum(dim=1)


def lane_sums_reference(blocks: torch.Tensor) -> torch.Tensor:
    """The twin of `lane_sums` in plain torch, for blocks as rows of uint8 `[n, length]` on any device."""
    count, length = blocks.shape
    stripes = -(-length // STRIPE_BYTES)
    padded = torch.zeros((count, stripes * STRIPE_BYTES), dtype=torch.uint8, device=blocks.device)
    padded[:, :length] = blocks
    lanes = padded.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    value = (lanes.view(count, stripes, STRIPE_LANES) * _keys_on(str(blocks.device))).sum(dim=2)
    value = value + torch.arange(1, stripes + 1, device=blocks.device) * _signed(GOLDEN)
    for shift, factor in zip(MIX_SHIFTS[:2], MIX_FACTORS, strict=True):
        value = (value ^ _shifted(value, shift)) * _signed(factor)
    return (value ^ _shifted(value, MIX_SHIFTS[2])).sum(dim=1)


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical right shift, which fills with zeros."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
