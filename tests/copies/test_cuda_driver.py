"""Calls of the CUDA driver on a stand-in: when a copy is over, and the error without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from fake_driver import STREAM, FakeLibrary

from tiercache.copies import cuda_driver
from tiercache.copies.copy_plan import CopyRuns, merge_runs
from tiercache.copies.cuda import CudaCopier
from tiercache.copies.cuda_driver import Driver
from tiercache.copies.cuda_lane import CudaCopy
from tiercache.errors import ArenaError, LayoutError

pytestmark = pytest.mark.kernels


def ten_copies() -> tuple[np.ndarray, np.ndarray, CopyRuns]:
    """Ten bytes, a place for them in reverse order, and the ten copies."""
    source, target = np.arange(1, 11, dtype=np.uint8), np.zeros(10, dtype=np.uint8)
    there = target.ctypes.data + np.arange(10, dtype=np.int64)[::-1]
    return source, target, merge_runs(source.ctypes.data + np.arange(10), there, 1)


@pytest.mark.parametrize(
    ("limit", "has_batches", "batched"),
    [*((limit, True, True) for limit in (1, 3, 5, 10, 4096)), (4096, True, False), (4096, False, True)],
)
def test_copies_go_in_batches_of_limited_size_or_one_by_one(
    limit: int, has_batches: bool, batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "MAX_BATCH", limit)
    library = FakeLibrary(has_batches=has_batches)
    source, target, runs = ten_copies()
    driver = Driver(library)
    assert driver.batches is has_batches
    assert driver.copy(runs, STREAM, batched=batched) == ""
    assert (target == source[::-1]).all()
    assert sum(library.batches) == (10 if has_batches and batched else 0)
    assert max(library.batches, default=0) <= limit


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("fail_at", [0, 4, 9])
def test_the_first_failure_ends_the_copies_and_is_named(
    fail_at: int, batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "MAX_BATCH", 4)
    library = FakeLibrary(fail_at)
    _, target, runs = ten_copies()
    error = Driver(library).copy(runs, STREAM, batched=batched)
    assert error.startswith("CUDA_ERROR_1 in a ")
    assert not batched or f"(copy {fail_at % 4})" in error
    assert np.count_nonzero(target) == fail_at


def test_a_thread_leaves_captures_alone_for_a_while() -> None:
    library = FakeLibrary()
    with Driver(library).beside_captures():
        assert library.capture_mode == 2  # CU_STREAM_CAPTURE_MODE_RELAXED
    assert library.capture_mode == 0


class Event:
    """An event that is done after `looks` looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_a_copy_is_done_when_its_event_is_though_it_failed_or_is_late() -> None:
    copy = CudaCopy(Event(2))
    assert [copy.done() for _ in range(4)] == [False, False, True, True]
    assert CudaCopy(Event(5)).wait(60.0)
    assert CudaCopy(None).done()
    late = CudaCopy(Event(1 << 60))
    with pytest.raises(ArenaError, match="still in use"):
        late.wait(0.0)
    assert not late.done()
    failed = CudaCopy(Event(1), "CUDA_ERROR_INVALID_VALUE in a copy of 7 bytes")
    assert not failed.done()
    with pytest.raises(ArenaError, match="INVALID_VALUE"):
        failed.wait(60.0)
    assert failed.done()


def test_without_cuda_a_copier_says_what_to_do() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(LayoutError, match="keep the pool on the CPU"):
        CudaCopier("cuda:0", [(0, 8, 8)], 4)
