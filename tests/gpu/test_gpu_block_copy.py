"""The block copy kernels, compiled, on a real device: the interpreter's cases and larger ones."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from block_copy_cases import (
    POOLS,
    PoolCase,
    block_lists,
    check_gather,
    check_repeated_sources,
    check_round_trip,
    check_scatter,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.kernels.block_copy import PoolTable, gather_blocks, scatter_blocks

pytestmark = pytest.mark.gpu

LARGE = [
    PoolCase("8 layers of 16 tokens", (2, 64, 16, 8, 128), layers=8, block_axis=1),
    PoolCase("block-first, 2 MiB", (24, 32, 2, 16, 8, 128)),
    PoolCase("block-first, odd", (64, 100_003), torch.uint8),
]


@pytest.mark.parametrize("case", POOLS + LARGE, ids=lambda case: case.name)
def test_gather_equals_the_twin(case: PoolCase, device: str) -> None:
    for ids in block_lists(case.shape[case.block_axis]):
        check_gather(case, ids, device)


@pytest.mark.parametrize("case", POOLS + LARGE, ids=lambda case: case.name)
def test_scatter_equals_the_twin(case: PoolCase, device: str) -> None:
    for ids in block_lists(case.shape[case.block_axis]):
        check_scatter(case, ids, device)


@pytest.mark.parametrize("case", POOLS + LARGE, ids=lambda case: case.name)
def test_blocks_come_back_elsewhere(case: PoolCase, device: str) -> None:
    check_round_trip(case, device)


@pytest.mark.parametrize("programs", [1, 2, 64])
def test_any_number_of_programs_shares_the_work(programs: int, device: str) -> None:
    check_gather(POOLS[3], [2, 0], device, programs)
    check_scatter(POOLS[6], [2, 0], device, programs)


def test_a_gather_may_repeat_a_block(device: str) -> None:
    check_repeated_sources(device)


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


@settings(max_examples=60, deadline=None, database=None)
@given(
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
    layers=st.integers(1, 3),
    blocks=st.integers(1, 9),
    tail=st.lists(st.integers(1, 33), min_size=1, max_size=3),
    block_axis=st.integers(0, 1),
    data=st.data(),
)
def test_any_shape(
    device: str,
    dtype: torch.dtype,
    layers: int,
    blocks: int,
    tail: list[int],
    block_axis: int,
    data: st.DataObject,
) -> None:
    shape = (2, blocks, *tail) if block_axis else (blocks, *tail)
    case = PoolCase("drawn", shape, dtype, layers, block_axis)
    check_gather(case, data.draw(st.lists(st.integers(0, blocks - 1), max_size=9)), device)
    check_scatter(case, data.draw(st.lists(st.integers(0, blocks - 1), max_size=9, unique=True)), device)
