"""What is copied where: merging and cutting of runs, pieces of blocks, the choice of the method."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.copies.copy_plan import (
    DMA_MIN_BYTES,
    CopyRuns,
    Method,
    block_pieces,
    check_block_ids,
    choose_method,
    merge_runs,
    split_runs,
)
from tiercache.errors import LayoutError

pytestmark = pytest.mark.kernels


def by_cpu(runs: CopyRuns) -> None:
    """Make the copies that runs describe."""
    for source, target, length in runs:
        ctypes.memmove(target, source, length)


@given(st.permutations(range(8)), st.permutations(range(8)), st.integers(0, 8), st.integers(1, 5))
def test_merged_runs_copy_the_same_bytes(sources: list[int], targets: list[int], count: int, length: int) -> None:
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, 8 * length, dtype=np.uint8)
    target, expected = np.zeros_like(source), np.zeros_like(source)
    for a, b in zip(sources[:count], targets[:count], strict=True):
        expected[b * length : (b + 1) * length] = source[a * length : (a + 1) * length]
    left = source.ctypes.data + np.array(sources[:count], dtype=np.int64) * length
    right = target.ctypes.data + np.array(targets[:count], dtype=np.int64) * length
    by_cpu(merge_runs(left, right, length))
    assert (target == expected).all()


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40)), min_size=1, max_size=6),
    st.sets(st.integers(0, 120)),
    st.booleans(),
)
def test_cut_runs_are_the_same_bytes_in_pieces(
    ranges: list[tuple[int, int]], cuts: set[int], host_is_source: bool
) -> None:
    host = np.array([start for start, _ in ranges], dtype=np.int64)
    other = np.arange(len(ranges), dtype=np.int64) * 1000
    length = np.array([size for _, size in ranges], dtype=np.int64)
    runs = CopyRuns(host, other, length) if host_is_source else CopyRuns(other, host, length)
    boundaries = np.array(sorted(cuts), dtype=np.int64)
    pieces = list(split_runs(runs, boundaries, host_is_source))
    whole = [(s + i, t + i) for s, t, n in runs for i in range(n)]
    assert [(s + i, t + i) for s, t, n in pieces for i in range(n)] == whole
    for source, target, size in pieces:
        start = source if host_is_source else target
        assert not any(start < cut < start + size for cut in cuts)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.lists(st.integers(0, 4), max_size=5, unique=True),
    st.data(),
)
def test_pieces_carry_whole_blocks(lengths: list[int], ids: list[int], data: st.DataObject) -> None:
    """Blocks gathered by their pieces into frames, and back into another pool, are the same."""
    rng = np.random.default_rng(1)
    layers = [rng.integers(0, 256, (5, length + 1), dtype=np.uint8) for length in lengths]
    emptied = [np.zeros_like(layer) for layer in layers]
    frames = np.zeros((6, sum(lengths) + 3), dtype=np.uint8)
    rows = data.draw(st.permutations(range(6)))[: len(ids)]
    there = np.array([frames[row].ctypes.data for row in rows], dtype=np.int64)
    blocks = np.array(ids, dtype=np.int64)

    def segments(pool: list[np.ndarray]) -> list[tuple[int, int, int]]:
        return [(a.ctypes.data, a.strides[0], n) for a, n in zip(pool, lengths, strict=True)]

    pool, frame, length = block_pieces(segments(layers), blocks, there)
    by_cpu(merge_runs(pool, frame, length))
    for row, block in zip(rows, ids, strict=True):
        expected = np.concatenate([layer[block, :-1] for layer in layers])
        assert (frames[row, : sum(lengths)] == expected).all()
        assert (frames[row, sum(lengths) :] == 0).all()
    pool, frame, length = block_pieces(segments(emptied), blocks, there)
    by_cpu(merge_runs(frame, pool, length))
    for layer, restored in zip(layers, emptied, strict=True):
        assert (restored[ids, :-1] == layer[ids, :-1]).all()
        assert (np.delete(restored, ids, axis=0) == 0).all()
        assert (restored[:, -1] == 0).all()


@pytest.mark.parametrize(
    ("segments", "block_bytes", "mean", "kernels", "method"),
    [
        (1, 2 << 20, 2 << 20, True, Method.DIRECT),
        (64, 2 << 20, 32 << 10, True, Method.DIRECT),
        (64, 512 << 10, 8 << 10, True, Method.STAGED),
        (64, 512 << 10, 8 << 10, False, Method.DIRECT),
        (1, 4 << 10, 64 << 10, True, Method.DIRECT),  # neighbours, merged
        (1, 4 << 10, 4 << 10, True, Method.ZERO_COPY),
        (4, 4 << 10, 1 << 10, True, Method.ZERO_COPY),
        (1, DMA_MIN_BYTES, DMA_MIN_BYTES, True, Method.DIRECT),
    ],
)
def test_the_method_follows_the_size_of_the_pieces(
    segments: int, block_bytes: int, mean: int, kernels: bool, method: Method
) -> None:
    assert choose_method(segments, block_bytes, mean, kernels) is method


@pytest.mark.parametrize(
    ("ids", "frames", "blocks", "unique", "text"),
    [
        ([0, 4], [0, 1], 4, False, "0 to 4 for a pool of 4"),
        ([-1], [0], None, False, "-1 to -1"),
        ([0, 1], [0], 4, False, "2 blocks for 1 frames"),
        ([2, 1, 2], [0, 1, 2], 4, True, "repeated"),
    ],
)
def test_block_ids_that_cannot_be_are_refused(
    ids: list[int], frames: list[int], blocks: int | None, unique: bool, text: str
) -> None:
    with pytest.raises(LayoutError, match=text):
        check_block_ids(np.array(ids), np.array(frames), blocks, unique)
