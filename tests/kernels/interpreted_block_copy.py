"""The kernels' cases in Triton's interpreter.

Not collected by itself: TRITON_INTERPRET=1 must be set before the kernels are decorated, so
`test_kernels_interpreted.py` runs this file in a process of its own.
"""

from __future__ import annotations

import os

import pytest
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

pytestmark = pytest.mark.kernels

assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_kernels_interpreted.py, with TRITON_INTERPRET=1"


@pytest.mark.parametrize("case", POOLS, ids=lambda case: case.name)
def test_gather_equals_the_twin(case: PoolCase) -> None:
    for ids in block_lists(case.shape[case.block_axis]):
        check_gather(case, ids, "cpu")


@pytest.mark.parametrize("case", POOLS, ids=lambda case: case.name)
def test_scatter_equals_the_twin(case: PoolCase) -> None:
    for ids in block_lists(case.shape[case.block_axis]):
        check_scatter(case, ids, "cpu")


@pytest.mark.parametrize("case", POOLS, ids=lambda case: case.name)
def test_blocks_come_back_elsewhere(case: PoolCase) -> None:
    check_round_trip(case, "cpu")


@pytest.mark.parametrize("programs", [1, 2, 64])
def test_any_number_of_programs_shares_the_work(programs: int) -> None:
    check_gather(POOLS[3], [2, 0], "cpu", programs)
    check_scatter(POOLS[6], [2, 0], "cpu", programs)


def test_a_gather_may_repeat_a_block() -> None:
    check_repeated_sources("cpu")


@settings(max_examples=15, deadline=None, database=None)
@given(
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
    layers=st.integers(1, 3),
    blocks=st.integers(1, 5),
    tail=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    block_axis=st.integers(0, 1),
    data=st.data(),
)
def test_any_shape(
    dtype: torch.dtype, layers: int, blocks: int, tail: list[int], block_axis: int, data: st.DataObject
) -> None:
    shape = (2, blocks, *tail) if block_axis else (blocks, *tail)
    case = PoolCase("drawn", shape, dtype, layers, block_axis)
    check_gather(case, data.draw(st.lists(st.integers(0, blocks - 1), max_size=4)), "cpu")
    check_scatter(case, data.draw(st.lists(st.integers(0, blocks - 1), max_size=4, unique=True)), "cpu")
