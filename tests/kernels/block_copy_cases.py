"""Tests of the block copy kernels, for the interpreter and for a GPU alike: who imports them has `device`.

Each check copies real bytes and compares them with the plain torch twin.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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


def check_copies(case: PoolCase, device: str) -> None:
    count = case.shape[case.block_axis]
    for ids in block_lists(count):
        check_gather(case, ids, device)
        check_scatter(case, ids, device)
    check_gather(case, [count - 1, 0, count - 1], device)  # a gather may repeat a block


@pytest.mark.parametrize("case", POOLS, ids=lambda case: case.name)
def test_copies_equal_the_twins(case: PoolCase, device: str) -> None:
    check_copies(case, device)


@pytest.mark.parametrize("programs", [1, 2, 64])
def test_any_number_of_programs_shares_the_work(programs: int, device: str) -> None:
    check_gather(POOLS[3], [2, 0], device, programs)
    check_scatter(POOLS[6], [2, 0], device, programs)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
    layers=st.integers(1, 3),
    blocks=st.integers(1, 5),
    tail=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    block_axis=st.integers(0, 1),
    data=st.data(),
)
def test_any_shape(
    device: str, dtype: torch.dtype, layers: int, blocks: int, tail: list[int], block_axis: int, data: st.DataObject
) -> None:
    shape = (2, blocks, *tail) if block_axis else (blocks, *tail)
    case = PoolCase("drawn", shape, dtype, layers, block_axis)
    check_gather(case, data.draw(st.lists(st.integers(0, blocks - 1), max_size=4)), device)
    check_scatter(case, data.draw(st.lists(st.integers(0, blocks - 1), max_size=4, unique=True)), device)
