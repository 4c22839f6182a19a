"""What `tiercache.cuda` decides before it calls the GPU, and what it says where there is none."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from fake_driver import STREAM, FakeDriver, FakeLibrary
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache import cuda
from tiercache.cuda import (
    DMA_MIN_BYTES,
    CudaCopier,
    CudaCopy,
    HostMemory,
    Method,
    Runs,
    block_pieces,
    check_block_ids,
    choose_method,
    merge_runs,
    split_runs,
)
from tiercache.errors import ArenaError, LayoutError

pytestmark = pytest.mark.kernels


def by_cpu(runs: Runs) -> None:
    """Make the copies that runs describe."""
    for source, target, length in runs:
        ctypes.memmove(target, source, length)


def test_neighbours_at_both_ends_become_one_run() -> None:
    assert list(merge_runs([100, 110, 120], [500, 510, 520], 10)) == [(100, 500, 30)]


def test_neighbours_at_one_end_only_stay_apart() -> None:
    assert list(merge_runs([100, 110, 130], [500, 520, 530], 10)) == [
        (100, 500, 10),
        (110, 520, 10),
        (130, 530, 10),
    ]


def test_the_order_of_the_blocks_does_not_hide_neighbours() -> None:
    assert list(merge_runs([120, 100, 110], [520, 500, 510], 10)) == [(100, 500, 30)]


def test_lengths_may_differ() -> None:
    assert list(merge_runs([0, 4, 6], [50, 54, 99], np.array([4, 2, 1]))) == [(0, 50, 6), (6, 99, 1)]


def test_a_source_that_is_copied_twice_is_copied_twice() -> None:
    assert list(merge_runs([0, 0], [50, 54], 4)) == [(0, 50, 4), (0, 54, 4)]


def test_no_blocks_are_no_runs() -> None:
    assert list(merge_runs([], [], 10)) == []


@given(st.permutations(range(8)), st.permutations(range(8)), st.integers(0, 8), st.integers(1, 5))
def test_merged_runs_copy_the_same_bytes(
    sources: list[int], targets: list[int], count: int, length: int
) -> None:
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, 8 * length, dtype=np.uint8)
    target, expected = np.zeros_like(source), np.zeros_like(source)
    for a, b in zip(sources[:count], targets[:count], strict=True):
        expected[b * length : (b + 1) * length] = source[a * length : (a + 1) * length]
    left = source.ctypes.data + np.array(sources[:count], dtype=np.int64) * length
    right = target.ctypes.data + np.array(targets[:count], dtype=np.int64) * length
    by_cpu(merge_runs(left, right, length))
    assert (target == expected).all()


def test_runs_are_cut_where_a_registration_ends() -> None:
    runs = merge_runs([100, 300], [1000, 5000], np.array([100, 10]))
    assert list(split_runs(runs, np.array([130, 150, 200, 301]), host_is_source=True)) == [
        (100, 1000, 30),
        (130, 1030, 20),
        (150, 1050, 50),
        (300, 5000, 1),
        (301, 5001, 9),
    ]
    assert list(split_runs(runs, np.array([1000, 1100, 5000]), host_is_source=False)) == list(runs)


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
    runs = Runs(host, other, length) if host_is_source else Runs(other, host, length)
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


def test_a_store_may_name_a_block_twice() -> None:
    check_block_ids(np.array([1, 1]), np.array([0, 1]), 2, unique=False)


def test_segments_that_overlap_are_refused() -> None:
    with pytest.raises(LayoutError, match="at most their stride"):
        CudaCopier(0, [(0, 8, 16)], 4)


class Event:
    """Done after so many looks; breaks then, if told to."""

    def __init__(self, looks: int, breaks: bool = False) -> None:
        self.looks = looks
        self.breaks = breaks

    def query(self) -> bool:
        self.looks -= 1
        if self.looks < 0 and self.breaks:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return self.looks < 0


def copy_with(event: Event, error: str = "") -> CudaCopy:
    return CudaCopy(event, error)  # type: ignore[arg-type]


def test_a_copy_is_done_when_its_event_is() -> None:
    copy = copy_with(Event(2))
    assert [copy.done() for _ in range(4)] == [False, False, True, True]
    assert copy_with(Event(5)).wait(10.0)
    assert CudaCopy(None).done()


def test_a_copy_that_is_not_done_in_time_is_said_to_be_in_use() -> None:
    copy = copy_with(Event(1 << 60))
    with pytest.raises(ArenaError, match="still in use"):
        copy.wait(0.01)
    assert not copy.done()


def test_a_copy_that_failed_is_done_only_when_its_rest_is_over() -> None:
    copy = copy_with(Event(1), "CUDA_ERROR_INVALID_VALUE in a copy of 7 bytes")
    assert not copy.done()
    with pytest.raises(ArenaError, match="INVALID_VALUE"):
        copy.wait(10.0)
    assert copy.done()


def test_a_copy_on_a_broken_device_is_never_done() -> None:
    copy = copy_with(Event(1, breaks=True))
    with pytest.raises(ArenaError, match="unspecified launch failure"):
        copy.wait(10.0)
    assert not copy.done()
    assert "GPU failed" in copy.error


def ten_copies() -> tuple[np.ndarray, np.ndarray, Runs]:
    """Ten bytes, a place for them in reverse order, and the ten copies."""
    source, target = np.arange(1, 11, dtype=np.uint8), np.zeros(10, dtype=np.uint8)
    there = target.ctypes.data + np.arange(10, dtype=np.int64)[::-1]
    return source, target, merge_runs(source.ctypes.data + np.arange(10), there, 1)


@pytest.mark.parametrize("limit", [1, 3, 5, 10, 4096])
def test_copies_go_in_batches_of_limited_size(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "MAX_BATCH", limit)
    library = FakeLibrary()
    source, target, runs = ten_copies()
    assert cuda.Driver(library).copy(runs, STREAM, batched=True) == ""
    assert (target == source[::-1]).all()
    assert sum(library.batches) == 10
    assert max(library.batches) <= limit


@pytest.mark.parametrize(("has_batches", "batched"), [(True, False), (False, True)])
def test_copies_go_one_by_one_where_there_are_no_batches(has_batches: bool, batched: bool) -> None:
    library = FakeLibrary(has_batches=has_batches)
    source, target, runs = ten_copies()
    driver = cuda.Driver(library)
    assert driver.batches is has_batches
    assert driver.copy(runs, STREAM, batched=batched) == ""
    assert (target == source[::-1]).all()
    assert library.batches == []


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("fail_at", [0, 4, 9])
def test_the_first_failure_ends_the_copies_and_is_named(
    fail_at: int, batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "MAX_BATCH", 4)
    library = FakeLibrary(fail_at)
    _, target, runs = ten_copies()
    error = cuda.Driver(library).copy(runs, STREAM, batched=batched)
    assert error.startswith("CUDA_ERROR_1 in a ")
    assert not batched or f"(copy {fail_at % 4})" in error
    assert np.count_nonzero(target) == fail_at


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    monkeypatch.setattr(cuda, "driver", lambda: made)
    return made


def covers(memory: HostMemory, *addresses: int, length: int = 10) -> bool:
    return memory.registered.covers(np.array(addresses, dtype=np.int64), length)


def test_regions_are_registered_in_chunks(fake: FakeDriver) -> None:
    memory = HostMemory(chunk_bytes=100)
    memory.register(5000, 250)
    memory.register(1000, 100)
    assert fake.held == {5000: 100, 5100: 100, 5200: 50, 1000: 100}
    assert memory.registered.chunks.tolist() == [1000, 5000, 5100, 5200]
    assert covers(memory, 1000, 1090, 5000, 5095, 5240)
    for outside in (999, 1091, 4995, 5241, 9000):
        assert not covers(memory, 1000, outside)
    memory.unregister(5000)
    memory.unregister(5000)
    assert fake.held == {1000: 100}
    assert not covers(memory, 5000)
    assert covers(memory, 1000)


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_a_region_is_registered_whole_or_not_at_all(fake: FakeDriver, fail_at: int) -> None:
    fake.fail_at = fail_at
    memory = HostMemory(chunk_bytes=100)
    with pytest.raises(ArenaError, match="CUDA_ERROR_2"):
        memory.register(5000, 250)
    assert fake.held == {}
    assert not covers(memory, 5000)
    fake.fail_at = -1
    memory.register(5000, 250)
    assert covers(memory, 5000)


@pytest.mark.parametrize(("address", "length"), [(5000, 0), (1000, 100)])
def test_nothing_and_what_is_registered_cannot_be_registered(
    fake: FakeDriver, address: int, length: int
) -> None:
    memory = HostMemory()
    memory.register(1000, 100)
    with pytest.raises(ArenaError, match="registered already"):
        memory.register(address, length)


def test_kernels_keep_away_from_memory_that_is_mapped_elsewhere(fake: FakeDriver) -> None:
    memory = HostMemory()
    memory.register(1000, 100)
    assert memory.registered.mapped_in_place
    fake.in_place = False
    memory.register(5000, 100)
    assert not memory.registered.mapped_in_place
    memory.unregister(5000)
    assert memory.registered.mapped_in_place


def test_without_a_driver_registering_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "driver", lambda: None)
    with pytest.raises(ArenaError, match=r"no driver \(libcuda\.so\.1\)"):
        cuda.register(4096, 4096)
    cuda.unregister(4096)


def test_without_cuda_a_copier_says_what_to_do() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(LayoutError, match="keep the pool on the CPU"):
        CudaCopier("cuda:0", [(0, 8, 8)], 4)
