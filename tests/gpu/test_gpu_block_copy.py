"""The block copy kernels, compiled, on a real device: the interpreter's cases and larger ones."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from block_copy_cases import *  # noqa: F403 - the tests
from block_copy_cases import POOLS, PoolCase, check_copies

from tiercache.kernels.block_copy import PoolTable, gather_blocks, scatter_blocks

pytestmark = pytest.mark.gpu

LARGE = [
    PoolCase("8 layers of 16 tokens", (2, 64, 16, 8, 128), layers=8, block_axis=1),
    PoolCase("block-first, 2 MiB", (24, 32, 2, 16, 8, 128)),
    PoolCase("block-first, odd", (64, 100_003), torch.uint8),
]


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_larger_copies_equal_the_twins(case: PoolCase, device: str) -> None:
    check_copies(case, device)


def test_ids_and_addresses_may_be_on_the_device(device: str) -> None:
    layers = POOLS[0].make(device)
    table = PoolTable.from_layers(layers)
    ids = torch.tensor([4, 1], dtype=torch.int32, device=device)
    out = torch.zeros(2, table.block_bytes, dtype=torch.uint8, device=device)
    rows = torch.tensor([out[0].data_ptr(), out[1].data_ptr()], device=device)
    gather_blocks(table, ids, rows, frame_align=16)
    assert torch.equal(out, layers[0].view(torch.uint8).reshape(5, -1)[[4, 1]])


def test_frames_may_be_in_pinned_host_memory(device: str) -> None:
    layers = POOLS[6].make(device)
    table = PoolTable.from_layers(layers, 1)
    here = torch.empty(5, table.block_bytes, dtype=torch.uint8, device=device)
    there = torch.empty(5, table.block_bytes, dtype=torch.uint8, pin_memory=True)
    gather_blocks(table, range(5), here)
    gather_blocks(table, range(5), there)
    torch.cuda.synchronize()
    assert torch.equal(here.cpu(), there)
    scatter_blocks(table, [1, 2, 3, 4, 0], there)
    gather_blocks(table, [1, 2, 3, 4, 0], here)
    assert torch.equal(here.cpu(), there)


def test_frames_in_pageable_memory_are_refused(device: str) -> None:
    table = PoolTable.from_layers(POOLS[0].make(device))
    with pytest.raises(ValueError, match="pin or move"):
        gather_blocks(table, [0], torch.empty(1, table.block_bytes, dtype=torch.uint8))
