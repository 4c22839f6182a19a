"""Cases for `tiercache.copies.cuda.CudaCopier`, shared by the tests on a GPU and those on a stand-in."""

from __future__ import annotations

import mmap
import random
from collections.abc import Sequence

import numpy as np
import torch
from block_copy_cases import GUARD, PoolCase

from tiercache.copies.copy_plan import Method
from tiercache.copies.cuda import CudaCopier
from tiercache.copies.host_memory import HostMemory
from tiercache.copies.pool import GpuCopier, Limit, Pool, Segment
from tiercache.kernels.block_copy import gather_blocks_reference

WAIT_S = 30.0


class Arena:
    """Frames in shared memory, registered in chunks unless told not to."""

    def __init__(self, count: int, frame_bytes: int, chunk_bytes: int = 1 << 20, registered: bool = True) -> None:
        self.frame_bytes = -(-frame_bytes // 4096) * 4096
        self.map = mmap.mmap(-1, count * self.frame_bytes)
        self.bytes = np.frombuffer(self.map, dtype=np.uint8).reshape(count, self.frame_bytes)
        self.bytes[:] = GUARD
        self.memory = HostMemory(chunk_bytes)
        if registered:
            self.memory.register(self.bytes.ctypes.data, self.bytes.nbytes)

    def addresses(self, frames: list[int]) -> list[int]:
        """Where these frames begin."""
        return [self.bytes.ctypes.data + frame * self.frame_bytes for frame in frames]

    def close(self) -> None:
        """Unregister; the mapping goes with the last array."""
        self.memory.unregister(self.bytes.ctypes.data)


POOLS = {
    case.name: case
    for case in (
        PoolCase("block-first, 64 KiB", (24, 2, 16, 8, 128)),
        PoolCase("block-first, 1 KiB", (24, 512)),
        PoolCase("block-first, 4 KiB: frames touch", (24, 2048)),
        PoolCase("block-first, odd", (24, 3333)),
        PoolCase("layer-first, 4 KiB pieces", (2, 24, 16, 128), layers=8, block_axis=1),
        PoolCase("layer-first, 64 KiB pieces", (2, 24, 32, 8, 128), layers=2, block_axis=1),
        PoolCase("layer-first, odd pieces", (2, 24, 111), layers=3, block_axis=1),
    )
}
"""Pools of 24 blocks."""


def segments_of(layers: list[torch.Tensor], block_axis: int) -> Sequence[Segment]:
    pool = Pool.from_layers(layers, block_axis)
    return pool.segments


def check_out_and_back(pool: str, method: Method | None, device: str, *, registered: bool = True) -> Arena:
    """Blocks go to shuffled frames and come back into other blocks; nothing else changes."""
    layers, axis = POOLS[pool].make(device), POOLS[pool].block_axis
    segments = segments_of(layers, axis)
    block_bytes = sum(length for _, _, length in segments)
    arena = Arena(40, block_bytes, chunk_bytes=64 << 10, registered=registered)
    copier = CudaCopier(
        device, segments, 24, method=method, staging_bytes=5 * block_bytes, memory=arena.memory, owner=layers
    )
    shuffle = random.Random(5)
    ids, frames = shuffle.sample(range(24), 17), shuffle.sample(range(40), 17)
    expected = gather_blocks_reference(layers, ids, axis).cpu().numpy()

    assert copier.copy_out(ids, arena.addresses(frames)).wait(WAIT_S)
    assert (arena.bytes[frames, :block_bytes] == expected).all()
    assert (arena.bytes[frames, block_bytes:] == GUARD).all()
    others = [frame for frame in range(40) if frame not in frames]
    assert (arena.bytes[others] == GUARD).all()

    for layer in layers:
        layer.view(torch.uint8).fill_(GUARD)
    moved = ids[1:] + ids[:1]
    assert copier.copy_in(arena.addresses(frames), moved).wait(WAIT_S)
    assert copier.idle()
    restored = gather_blocks_reference(layers, range(24), axis).cpu().numpy()
    assert (restored[moved] == expected).all()
    untouched = [block for block in range(24) if block not in ids]
    assert (restored[untouched] == GUARD).all()
    return arena


def check_transfer_layer(device: str, registered: HostMemory) -> Arena:
    """The engine-neutral copier on top: steps of a few blocks, in order, complete."""
    layers = PoolCase("steps", (2, 24, 16, 8), layers=3).make(device)
    pool = Pool.from_layers(layers, block_axis=1)
    copier = GpuCopier(pool)
    copier._step = 5
    arena = Arena(24, pool.block_bytes, registered=False)
    arena.memory = registered
    arena.memory.register(arena.bytes.ctypes.data, arena.bytes.nbytes)
    there = np.array(arena.addresses(list(range(24))), dtype=np.int64)
    every = np.arange(24, dtype=np.int64)
    expected = gather_blocks_reference(layers, range(24), 1).cpu().numpy()

    assert copier.copy_out(every, there, Limit(), copier.mark()) == 24
    assert (arena.bytes[:, : pool.block_bytes] == expected).all()
    assert copier.copy_in(there, every[::-1], Limit()) == 24
    assert (gather_blocks_reference(layers, range(24), 1).cpu().numpy() == expected[::-1]).all()
    stopped = Limit()
    stopped.stopped = True
    assert copier.copy_out(every, there, stopped) == 0
    return arena
