"""Gather KV blocks out of an engine's paged pool, and scatter them back, byte for byte.

A pool is a few *segments*: a segment holds the same piece of every block at a fixed stride. An
engine that keeps all layers of a block together (block-first) has one segment; an engine with one
tensor per layer (layer-first) has one or two per layer. In the cache a block is its pieces, one
after the other:

    layer-first pool, 2 layers, [2, num_blocks, ...] each        the block in a frame
    segment 0  layer 0 keys    | b0 | b1 | b2 | b3 |
    segment 1  layer 0 values  | b0 | b1 | b2 | b3 |     b2:  | K0 | V0 | K1 | V1 |
    segment 2  layer 1 keys    | b0 | b1 | b2 | b3 |
    segment 3  layer 1 values  | b0 | b1 | b2 | b3 |

`gather_blocks` copies pool -> frames, `scatter_blocks` frames -> pool. Frames are rows of one
uint8 tensor, or any addresses that the device can reach: page-locked host memory that is
registered with CUDA is one, and then the kernel itself crosses the bus.

The plain torch twins at the end index tensors and use no addresses: tests compare the kernel with
them. Read them first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

CHUNK_BYTES = 16 << 10
"""Bytes that one program copies at a time: four 16-byte loads in flight per thread."""
NUM_WARPS = 8
PROGRAMS_PER_PROCESSOR = 8
"""Enough programs of 8 warps to fill a multiprocessor, for copies inside device memory."""
HOST_PROGRAMS = 16
"""This number of programs fills the bus, and leaves the rest of the GPU to the engine."""

BlockIds = Sequence[int] | torch.Tensor


# No variant per divisibility is faster here, and every variant costs a pause to compile.
@triton.jit(
    do_not_specialize=["items", "segments", "chunks"],
    do_not_specialize_on_alignment=["bases", "strides", "lengths", "offsets", "block_ids", "frames"],
)  # type: ignore[untyped-decorator, unused-ignore]
def _copy_blocks(  # type: ignore[no-untyped-def]
    bases,
    strides,
    lengths,
    offsets,
    block_ids,
    frames,
    items,
    segments,
    chunks,
    ELEMENT: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr,
    VECTOR: tl.constexpr,
    CHUNK: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Copy `items` = blocks x segments x chunks of CHUNK elements; any number of programs.

    VECTOR consecutive elements are promised to be aligned together, at both ends and in every
    length: otherwise the compiler makes no 16-byte loads from computed addresses.
    """
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), num_stages=1):
        chunk = item % chunks
        segment = (item // chunks) % segments
        index = item // (chunks * segments)
        block = tl.load(block_ids + index).to(tl.int64)
        pool = (tl.load(bases + segment) + block * tl.load(strides + segment)).to(tl.pointer_type(ELEMENT))
        frame = (tl.load(frames + index) + tl.load(offsets + segment)).to(tl.pointer_type(ELEMENT))
        pool = tl.multiple_of(pool, VECTOR * ELEMENT_BYTES)
        frame = tl.multiple_of(frame, VECTOR * ELEMENT_BYTES)
        length = tl.multiple_of(tl.load(lengths + segment) // ELEMENT_BYTES, VECTOR)
        at = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
        inside = at < length
        if GATHER:
            tl.store(frame + at, tl.load(pool + at, mask=inside), mask=inside)
        else:
            tl.store(pool + at, tl.load(frame + at, mask=inside), mask=inside)


@dataclass(frozen=True, slots=True)
class PoolTable:
    """The addresses of a pool's blocks: one row per segment, in the order of a block's bytes.

    It holds addresses, not tensors: the caller keeps the pool's memory alive.

    Attributes:
        num_blocks: blocks 0 ..< num_blocks exist.
        block_bytes: sum of the segments' lengths.
        bases, strides, lengths, offsets: int64 `[segments]` on `device`: address of block 0's
            piece, bytes from one block's piece to the next, bytes of a piece, and where in a
            block the piece begins.
        align_bytes: largest power of two up to 16 that divides all of these.
        max_length: bytes of the longest piece.
    """

    num_blocks: int
    block_bytes: int
    bases: torch.Tensor
    strides: torch.Tensor
    lengths: torch.Tensor
    offsets: torch.Tensor
    align_bytes: int
    max_length: int

    @property
    def device(self) -> torch.device:
        """The device on which the kernel runs."""
        return self.bases.device

    @classmethod
    def from_segments(
        cls,
        bases: Sequence[int],
        strides: Sequence[int],
        lengths: Sequence[int],
        num_blocks: int,
        device: torch.device | str,
    ) -> PoolTable:
        """Describe a pool by addresses. Raises ValueError if a piece would overlap the next."""
        if not (len(bases) == len(strides) == len(lengths) > 0) or num_blocks < 1:
            raise ValueError("a pool has at least one segment and one block, and a row for each segment")
        if any(not 0 < length <= stride for length, stride in zip(lengths, strides, strict=True)):
            raise ValueError("a segment's length is 1 byte or more and at most its stride")
        offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).tolist()
        rows = torch.tensor([bases, strides, lengths, offsets], dtype=torch.int64).to(device)
        align = math.gcd(16, *bases, *strides, *lengths)
        return cls(num_blocks, sum(lengths), rows[0], rows[1], rows[2], rows[3], align, max(lengths))

    @classmethod
    def from_layers(cls, layers: Sequence[torch.Tensor], block_axis: int = 0) -> PoolTable:
        """Describe tensors with the same blocks along `block_axis` (0, or 1 for `[2, n, ...]`).

        Axes before the block axis become segments. The axes after it must be one dense run of
        memory, in any order; a block's bytes are taken in the order of memory. Raises ValueError.
        """
        bases: list[int] = []
        strides: list[int] = []
        lengths: list[int] = []
        for layer in layers:
            if layer.shape[block_axis] != layers[0].shape[block_axis] or layer.device != layers[0].device:
                raise ValueError("all layers have the same number of blocks and are on one device")
            stride, count = layer.stride(), _dense_elements(layer, block_axis + 1)
            for position in np.ndindex(tuple(layer.shape[:block_axis])):  # a single empty position for axis 0
                at = sum(i * step for i, step in zip(position, stride[:block_axis], strict=True))
                bases.append(layer.data_ptr() + at * layer.element_size())
                strides.append(stride[block_axis] * layer.element_size())
                lengths.append(count * layer.element_size())
        return cls.from_segments(bases, strides, lengths, layers[0].shape[block_axis], layers[0].device)


def _dense_elements(tensor: torch.Tensor, first_axis: int) -> int:
    """Number of elements in the axes from `first_axis`, which must fill one run of memory."""
    count = 1
    for stride, size in sorted(zip(tensor.stride()[first_axis:], tensor.shape[first_axis:], strict=True)):
        if size > 1 and stride != count:
            shape = list(tensor.shape)
            raise ValueError(f"a block is not one run of bytes: shape {shape}, strides {tensor.stride()}")
        count *= size
    return count


def gather_blocks(
    pool: PoolTable, block_ids: BlockIds, frames: torch.Tensor, *, frame_align: int = 1, programs: int = 0
) -> None:
    """Copy blocks `block_ids` of the pool into `frames`, in order; ids may repeat.

    Args:
        block_ids: ints or a 1-D int32/int64 tensor. A list or a CPU tensor is checked against
            the pool (IndexError); ids that are on the GPU already are *not*, and a wrong one
            reads outside the pool.
        frames: uint8 `[n, pool.block_bytes]`, contiguous; or int64 `[n]`: an address per block
            that the device can reach, with room for `block_bytes`.
        frame_align: promise of the caller that addresses in a device tensor are multiples of
            this (1, 2, 4, 8 or 16). Addresses in a CPU tensor are checked instead.
        programs: how many programs share the work; 0 fills the device. Use HOST_PROGRAMS for
            frames in host memory.

    On CUDA the copy is enqueued on the current stream of the pool's device; nothing blocks.
    """
    _launch(pool, block_ids, frames, frame_align, programs, gather=True)


def scatter_blocks(
    pool: PoolTable, block_ids: BlockIds, frames: torch.Tensor, *, frame_align: int = 1, programs: int = 0
) -> None:
    """Copy `frames` into blocks `block_ids` of the pool; the inverse of `gather_blocks`.

    A repeated id would be written twice in an undefined order: a list or CPU tensor with one is
    refused (IndexError).
    """
    _launch(pool, block_ids, frames, frame_align, programs, gather=False)


def _launch(
    pool: PoolTable, block_ids: BlockIds, frames: torch.Tensor, align: int, programs: int, *, gather: bool
) -> None:
    ids = _checked_ids(pool, block_ids, unique=not gather)
    addresses, align = _frame_addresses(pool, frames, align)
    if ids.numel() != addresses.numel():
        raise ValueError(f"{ids.numel()} block ids for {addresses.numel()} frames")
    if ids.numel() == 0:
        return
    align = math.gcd(align, pool.align_bytes)
    chunk_bytes = min(CHUNK_BYTES, triton.next_power_of_2(pool.max_length))
    chunks = -(-pool.max_length // chunk_bytes)
    segments = pool.bases.numel()
    items = ids.numel() * segments * chunks
    if items >= 1 << 31:
        raise ValueError(f"{items} pieces in one launch: copy fewer blocks at a time")
    table = (pool.bases, pool.strides, pool.lengths, pool.offsets, ids, addresses)
    constants = kernel_constants(align, chunk_bytes, gather)
    if pool.device.type == "cuda":
        with torch.cuda.device(pool.device):
            processors = torch.cuda.get_device_properties(pool.device).multi_processor_count
            grid = (min(items, programs or processors * PROGRAMS_PER_PROCESSOR),)
            _copy_blocks[grid](*table, items, segments, chunks, **constants, num_warps=NUM_WARPS)
    else:  # only Triton's interpreter accepts this
        _copy_blocks[(min(items, programs or 3),)](*table, items, segments, chunks, **constants)


def kernel_constants(align: int, chunk_bytes: int, gather: bool) -> dict[str, Any]:
    """Compile-time arguments of the kernel for data that is aligned to `align` bytes (1 to 16)."""
    element_bytes = min(align, 8)
    element = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.uint8}[element_bytes]
    return {
        "ELEMENT": element,
        "ELEMENT_BYTES": element_bytes,
        "VECTOR": align // element_bytes,
        "CHUNK": max(1, chunk_bytes // element_bytes),
        "GATHER": gather,
    }


def _checked_ids(pool: PoolTable, block_ids: BlockIds, *, unique: bool) -> torch.Tensor:
    """Block ids on the pool's device; checked if they came from the host."""
    if isinstance(block_ids, torch.Tensor):
        if block_ids.dtype not in (torch.int32, torch.int64) or block_ids.dim() != 1:
            raise ValueError("block ids are a 1-D int32 or int64 tensor, or a sequence of ints")
        if block_ids.device.type == "cuda":
            return block_ids.contiguous()
        ids = block_ids.contiguous()
    else:
        ids = torch.tensor(block_ids, dtype=torch.int64)
    host: npt.NDArray[np.int64] = ids.numpy()
    if host.size and (host.min() < 0 or host.max() >= pool.num_blocks):
        raise IndexError(f"block ids {host.min()} to {host.max()} for a pool of {pool.num_blocks} blocks")
    if unique and len(np.unique(host)) != host.size:
        raise IndexError("a block id is repeated: two frames cannot be scattered into one block")
    return _upload(ids, pool.device)


def _frame_addresses(pool: PoolTable, frames: torch.Tensor, align: int) -> tuple[torch.Tensor, int]:
    """An address per block on the pool's device, and a number of bytes that divides all of them."""
    if frames.dtype == torch.int64 and frames.dim() == 1:
        if frames.device.type == "cpu":
            align = math.gcd(16, int(np.gcd.reduce(frames.numpy()))) if frames.numel() else 16
        if align not in (1, 2, 4, 8, 16):
            raise ValueError(f"frame_align is {align}: write 1, 2, 4, 8 or 16")
        return _upload(frames.contiguous(), pool.device), align
    if frames.dtype != torch.uint8 or frames.dim() != 2 or not frames.is_contiguous():
        raise ValueError("frames are a contiguous uint8 [n, block_bytes] tensor, or int64 addresses [n]")
    if frames.shape[1] != pool.block_bytes:
        raise ValueError(f"frames of {frames.shape[1]} bytes for blocks of {pool.block_bytes}")
    if frames.device != pool.device and not frames.is_pinned():
        raise ValueError(f"frames on {frames.device} for a pool on {pool.device}: pin or move them")
    rows = torch.arange(frames.shape[0], dtype=torch.int64, device=pool.device)
    return rows * pool.block_bytes + frames.data_ptr(), math.gcd(16, frames.data_ptr(), pool.block_bytes)


def _upload(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small host table on `device`, without waiting for the device."""
    if device.type == "cuda" and table.device.type == "cpu":
        table = table.pin_memory()
    return table.to(device, non_blocking=True)


def gather_blocks_reference(layers: Sequence[torch.Tensor], block_ids: BlockIds, block_axis: int = 0) -> torch.Tensor:
    """The twin of `gather_blocks` in plain torch: uint8 `[n, block_bytes]`.

    `layers` as for `PoolTable.from_layers`, each contiguous.
    """
    ids = torch.as_tensor(block_ids, dtype=torch.int64, device=layers[0].device)
    parts = []
    for layer in layers:
        # clone, not contiguous: axes of size 1 may keep strides that rule out a view as bytes.
        blocks = layer.movedim(block_axis, 0)[ids].clone(memory_format=torch.contiguous_format)
        parts.append(blocks.view(torch.uint8).reshape(len(ids), layer.nbytes // layer.shape[block_axis]))
    return torch.cat(parts, dim=1)


def scatter_blocks_reference(
    layers: Sequence[torch.Tensor], block_ids: BlockIds, frames: torch.Tensor, block_axis: int = 0
) -> None:
    """The twin of `scatter_blocks` in plain torch: writes into `layers`; frames as rows of uint8."""
    ids = torch.as_tensor(block_ids, dtype=torch.int64, device=layers[0].device)
    at = 0
    for layer in layers:
        width = layer.nbytes // layer.shape[block_axis]
        blocks = layer.movedim(block_axis, 0)
        rows = frames[:, at : at + width].clone(memory_format=torch.contiguous_format).view(layer.dtype)
        blocks[ids] = rows.reshape(len(ids), *blocks.shape[1:])
        at += width
