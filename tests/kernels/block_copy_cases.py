"""Cases for the block copy kernels, shared by the interpreter's tests and those on a GPU.

Each check copies real bytes both ways and compares them with the plain torch twin.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tiercache.kernels.block_copy import (
    PoolTable,
    gather_blocks,
    gather_blocks_reference,
    scatter_blocks,
    scatter_blocks_reference,
)

GUARD = 0xA5
"""Byte that fills everything that a copy must leave alone."""


@dataclass(frozen=True)
class PoolCase:
    """A pool to make: `layers` tensors of `shape`, with the blocks along `block_axis`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    layers: int = 1
    block_axis: int = 0

    def make(self, device: str) -> list[torch.Tensor]:
        """The pool, filled with bytes that differ from place to place (NaNs among them)."""
        generator = torch.Generator().manual_seed(len(self.name))
        made = []
        for _ in range(self.layers):
            items = torch.empty(self.shape, dtype=self.dtype)
            raw = torch.randint(0, 256, (items.nbytes,), dtype=torch.uint8, generator=generator)
            made.append(raw.view(self.dtype).reshape(self.shape).to(device))
        return made


POOLS = [
    PoolCase("block-first bf16", (5, 2, 2, 4, 2, 8)),
    PoolCase("block-first fp32", (5, 2, 3, 4), torch.float32),
    PoolCase("block-first uint8 of 7 bytes", (5, 7), torch.uint8),
    PoolCase("block-first uint8 of 4102 bytes", (3, 4102), torch.uint8),
    PoolCase("block-first fp16 of 20 bytes", (5, 10), torch.float16),
    PoolCase("block-first of one block", (1, 2, 8)),
    PoolCase("layer-first, keys and values apart", (2, 5, 4, 2, 4), layers=3, block_axis=1),
    PoolCase("layer-first, blocks first", (5, 2, 4, 2, 4), layers=3),
    PoolCase("layer-first fp32, odd", (2, 5, 3), torch.float32, layers=2, block_axis=1),
    PoolCase("layer-first of one element", (2, 5, 1), torch.bfloat16, layers=2, block_axis=1),
]


def block_lists(num_blocks: int) -> list[list[int]]:
    """Ids to copy: none, one, all, permuted, and the last one alone."""
    every = list(range(num_blocks))
    return [[], [0], every, every[::-1], [num_blocks - 1], every[1::2]]


def bytes_of(layers: list[torch.Tensor]) -> list[torch.Tensor]:
    """The pool's bytes, as a copy: what must not change, and comparable where floats are NaN."""
    return [layer.view(torch.uint8).clone() for layer in layers]


def check_gather(case: PoolCase, ids: list[int], device: str, programs: int = 0) -> None:
    """Gathered rows equal the twin's, by rows and by addresses, and nothing else is written."""
    layers = case.make(device)
    table = PoolTable.from_layers(layers, case.block_axis)
    before = bytes_of(layers)
    expected = gather_blocks_reference(layers, ids, case.block_axis)
    out = torch.full((len(ids) + 2, table.block_bytes), GUARD, dtype=torch.uint8, device=device)
    gather_blocks(table, ids, out[1:-1], programs=programs)
    assert torch.equal(out[1:-1], expected)
    assert bool((out[0] == GUARD).all())
    assert bool((out[-1] == GUARD).all())

    scattered = torch.full((2 * len(ids), table.block_bytes + 16), GUARD, dtype=torch.uint8, device=device)
    rows = scattered[::2].flip(0)  # a view for the size; the addresses are every second row, backwards
    addresses = [scattered[2 * i].data_ptr() for i in reversed(range(len(rows)))]
    gather_blocks(table, torch.tensor(ids, dtype=torch.int32), torch.tensor(addresses, dtype=torch.int64))
    assert torch.equal(scattered[::2].flip(0)[:, : table.block_bytes], expected)
    assert bool((scattered[1::2] == GUARD).all())
    assert bool((scattered[:, table.block_bytes :] == GUARD).all())
    assert all(torch.equal(a, b) for a, b in zip(before, bytes_of(layers), strict=True))


def check_scatter(case: PoolCase, ids: list[int], device: str, programs: int = 0) -> None:
    """Scattered blocks equal the twin's, other blocks and the source are untouched."""
    ours, theirs = case.make(device), case.make(device)
    table = PoolTable.from_layers(ours, case.block_axis)
    generator = torch.Generator().manual_seed(7)
    frames = torch.randint(0, 256, (len(ids), table.block_bytes), dtype=torch.uint8, generator=generator)
    frames = frames.to(device)
    source = frames.clone()
    scatter_blocks(table, ids, frames, programs=programs)
    scatter_blocks_reference(theirs, ids, frames, case.block_axis)
    assert all(torch.equal(a, b) for a, b in zip(bytes_of(ours), bytes_of(theirs), strict=True))
    assert torch.equal(frames, source)


def check_round_trip(case: PoolCase, device: str) -> None:
    """Blocks gathered, lost and scattered to other places come back byte for byte."""
    layers = case.make(device)
    table = PoolTable.from_layers(layers, case.block_axis)
    every = list(range(table.num_blocks))
    frames = torch.empty((table.num_blocks, table.block_bytes), dtype=torch.uint8, device=device)
    gather_blocks(table, every, frames)
    kept = frames.clone()
    for layer in layers:
        layer.zero_()
    moved = every[1:] + every[:1]
    scatter_blocks(table, moved, frames)
    back = torch.empty_like(frames)
    gather_blocks(table, moved, back)
    assert torch.equal(back, kept)


def check_repeated_sources(device: str) -> None:
    """A gather may name a block more than once."""
    case = POOLS[0]
    check_gather(case, [3, 3, 0, 3], device)
