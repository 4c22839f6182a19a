"""Pools, runs and the CPU copier."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.copies.pool import MERGE_BYTES, CpuCopier, Limit, Pool
from tiercache.errors import LayoutError


def addresses(array: np.ndarray, rows: list[int]) -> np.ndarray:
    return array.ctypes.data + np.array(rows, np.int64) * array.strides[0]


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((4, 8, 8), np.uint8).transpose(0, 2, 1), "swapped axes"),
        (np.zeros((4, 8, 8), np.uint8)[:, :, :4], "gaps"),
        (np.lib.stride_tricks.as_strided(np.zeros(64, np.uint8), (4, 8), (4, 1)), "overlap"),
        (np.zeros((4, 8), np.uint8)[::-1], "overlap"),
        (np.zeros((0, 8), np.uint8), "no blocks"),
        (np.zeros((8, 0), np.uint8), "no blocks"),
        (np.zeros((), np.uint8), "no block axis"),
        ([1, 2, 3], "numpy arrays or torch tensors, not list"),
    ],
)
def test_pools_that_cannot_be_served(array: object, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        Pool.from_blocks(array)


def test_layers_must_agree() -> None:
    with pytest.raises(LayoutError, match="5 blocks on cpu, array 0 has 4"):
        Pool.from_layers([np.zeros((4, 8)), np.zeros((5, 8))])
    with pytest.raises(LayoutError, match="at least one array"):
        Pool.from_layers([])
    with pytest.raises(LayoutError, match="block_axis is 2"):
        Pool.from_layers([np.zeros((4, 8))], block_axis=2)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(4, 12), st.integers(1, 4)), min_size=2, max_size=3),
    st.integers(1, 4),
)
def test_parts_of_a_pool_share_no_memory(parts: list[tuple[int, int, int]], blocks: int) -> None:
    """Against a set of bytes; strides are at least as long as parts."""
    memory = np.zeros(200, np.uint8)
    arrays = [
        np.lib.stride_tricks.as_strided(memory[base:], (blocks, length), (stride, 1)) for base, stride, length in parts
    ]
    taken = [
        base + block * stride + at for base, stride, length in parts for block in range(blocks) for at in range(length)
    ]
    if len(set(taken)) == len(taken):
        assert Pool.from_layers(arrays).block_bytes == sum(length for _, _, length in parts)
    else:
        with pytest.raises(LayoutError, match="parts of the pool overlap"):
            Pool.from_layers(arrays)


def test_block_ids_are_checked() -> None:
    pool = Pool.from_blocks(np.zeros((4, 8), np.uint8))
    assert pool.check_ids([3, 3]).tolist() == [3, 3]
    for ids in ([4], [-1]):
        with pytest.raises(LayoutError, match="0 to 3"):
            pool.check_ids(ids)
    with pytest.raises(LayoutError, match="twice"):
        pool.check_ids([3, 3], writing=True)
    for wrong in (np.zeros((2, 2), np.int64), [0.9, 1.2], [True, False], ["1"], 3):
        with pytest.raises(LayoutError, match="flat list of integers"):
            pool.check_ids(wrong)  # type: ignore[arg-type]
    assert pool.check_ids([]).tolist() == []
    frozen = np.zeros((4, 8), np.uint8)
    frozen.flags.writeable = False
    assert Pool.from_blocks(frozen).check_ids([1]).tolist() == [1]
    with pytest.raises(LayoutError, match="read-only"):
        Pool.from_blocks(frozen).check_ids([1], writing=True)


@settings(max_examples=100, deadline=None)
@given(st.permutations(range(12)), st.permutations(range(12)), st.integers(0, 12), st.booleans(), st.booleans())
def test_copies_are_exact(ids: list[int], rows: list[int], count: int, layered: bool, into: bool) -> None:
    """Against numpy's own indexing, for contiguous and for layered pools, in both directions."""
    rng = np.random.default_rng(len(ids) + count)
    layers = [rng.integers(0, 256, (12, 24), np.uint8) for _ in range(2 if layered else 1)]
    pool = Pool.from_layers(layers)
    frames = rng.integers(0, 256, (12, pool.block_bytes), np.uint8)
    ids, rows = ids[:count], rows[:count]
    expected_frames, expected_pool = frames.copy(), np.concatenate(layers, axis=1)
    copier = CpuCopier(pool)
    if into:
        expected_pool[ids] = frames[rows]
        done = copier.copy_in(addresses(frames, rows), np.array(ids, np.int64), Limit())
    else:
        expected_frames[rows] = expected_pool[ids]
        done = copier.copy_out(np.array(ids, np.int64), addresses(frames, rows), Limit())
    assert done == count
    assert np.array_equal(frames, expected_frames)
    assert np.array_equal(np.concatenate(layers, axis=1), expected_pool)


class StopAfter(Limit):
    """A limit that is reached after a number of questions."""

    def __init__(self, questions: int) -> None:
        super().__init__()
        self.left = questions

    def reached(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("layered", [False, True])
def test_a_stopped_copy_says_how_many_leading_blocks_are_complete(
    layered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiercache.copies.memcpy.SHARED_FROM_BYTES", 1 << 40)  # two threads: see test_memcpy
    half = MERGE_BYTES // 2
    pools = [np.zeros((6, half // (1 + layered)), np.uint8) for _ in range(1 + layered)]
    source = np.ones((6, half), np.uint8)
    ids = np.arange(6)
    done = CpuCopier(Pool.from_layers(pools)).copy_in(addresses(source, [0, 1, 2, 3, 4, 5]), ids, StopAfter(2))
    assert done == (2 if layered else 4)  # a run is two blocks; layered pools go block by block
    assert pools[0][:, 0].tolist() == [1] * done + [0] * (6 - done)


@pytest.mark.engine
def test_torch_tensors_are_addressed_like_arrays() -> None:
    import torch

    tensor = torch.zeros(4, 2, 8, dtype=torch.bfloat16)
    pool = Pool.from_blocks(tensor)
    assert (pool.segments, pool.device) == (((tensor.data_ptr(), 32, 32),), "cpu")
    with pytest.raises(LayoutError, match="swapped axes"):
        Pool.from_blocks(tensor.transpose(1, 2))
    with pytest.raises(LayoutError, match="overlap"):
        Pool.from_blocks(torch.zeros(1, 8).expand(4, 8))
    with pytest.raises(LayoutError, match="only cpu and cuda"):
        Pool.from_blocks(torch.zeros(4, 8, device="meta"))
    with pytest.raises(LayoutError, match="dense"):
        Pool.from_blocks(torch.zeros(4, 8).to_sparse())
