"""The copier's cases without a GPU: kernels in Triton's interpreter, DMA by memmove.

The stand-in for torch.cuda has one stream, on which everything is done at once. What remains for
the GPU to show is order and overlap. Run by `tests/kernels/test_kernels_interpreted.py`, like its neighbour.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np
import pytest
import torch
from connector_cases import ARENA, REGION, check_store_and_load
from copier_cases import POOLS, check_out_and_back, check_transfer_layer
from fake_driver import STREAM, FakeLibrary

import tiercache
from tiercache.copies import cuda, cuda_driver, host_memory
from tiercache.copies import pool as transfer
from tiercache.copies.copy_plan import Method
from tiercache.copies.cuda import CudaCopier
from tiercache.copies.pool import CopyLost, GpuCopier, Limit, Pool
from tiercache.errors import ArenaError, LayoutError

pytestmark = pytest.mark.kernels

assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_kernels_interpreted.py, with TRITON_INTERPRET=1"


class Event:
    """Work is done when it is enqueued, so every event has happened; after `looks` more looks at it."""

    looks = 0

    def record(self, stream: Stream) -> None: ...

    def query(self) -> bool:
        Event.looks -= 1
        return Event.looks < 0


class Stream:
    """The only stream."""

    cuda_stream = STREAM
    device = torch.device("cpu")

    def __init__(self, device: torch.device | None = None) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...


class Driver(cuda_driver.Driver):
    """The real class over a library that copies with memmove."""

    def context(self, device: int) -> Any:
        return contextlib.nullcontext()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """A stand-in for torch.cuda and the driver; counts the copies that are made."""
    made = FakeLibrary()
    driver = Driver(made)
    monkeypatch.setattr(host_memory, "driver", lambda: made.registrar)
    monkeypatch.setattr(cuda, "require_cuda", lambda: driver)
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "current_stream": Stream,
        "synchronize": lambda device: None,
        "device": contextlib.nullcontext,
        "stream": contextlib.nullcontext,
        "is_current_stream_capturing": lambda: made.capturing,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return made


OFTEN = {("block-first, 1 KiB", Method.STAGED), ("layer-first, odd pieces", Method.ZERO_COPY)}


@pytest.mark.parametrize(
    ("pool", "method"),
    [
        pytest.param(pool, method, marks=() if method is None or (pool, method) in OFTEN else pytest.mark.stress)
        for pool in POOLS
        for method in (None, *Method)
    ],
)
def test_blocks_go_out_and_come_back(pool: str, method: Method | None, library: FakeLibrary) -> None:
    check_out_and_back(pool, method, "cpu")
    # Copies by a kernel over the bus leave the DMA engines alone; the other two use nothing else.
    assert (library.copies == 0) == (method is Method.ZERO_COPY or (method is None and pool in BY_KERNEL))


BY_KERNEL = {
    "block-first, 1 KiB",
    "block-first, 4 KiB: frames touch",  # in shuffled frames few neighbours meet
    "block-first, odd",
    "layer-first, odd pieces",
}


def test_the_transfer_layer_copies_in_steps(library: FakeLibrary) -> None:
    arena = check_transfer_layer("cpu", host_memory.process_memory)
    arena.close()


@pytest.mark.parametrize("method", [Method.DIRECT, Method.STAGED], ids=str)
def test_a_copy_that_fails_part_of_the_way_says_so(method: Method, library: FakeLibrary) -> None:
    library.fail_at = 3
    with pytest.raises(ArenaError, match="CUDA_ERROR_1"):
        check_out_and_back("block-first, odd", method, "cpu")


def test_kernels_that_do_not_compile_are_done_without(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiercache.kernels import block_copy

    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(block_copy, "gather_blocks", broken)
    check_out_and_back("layer-first, odd pieces", None, "cpu")
    assert library.copies > 0


def test_a_copy_in_cuda_trouble_fails_and_raises_nothing(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = torch.zeros(4, 64, dtype=torch.uint8)
    copier = CudaCopier("cpu", [(pool.data_ptr(), 64, 64)], 4, method=Method.DIRECT)

    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Stream, "wait_stream", broken)
    copy = copier.copy_out([0], [pool.data_ptr() + 64])
    with pytest.raises(ArenaError, match="out of memory"):
        copy.wait(60.0)
    assert copy.done()
    monkeypatch.setattr(Event, "record", broken)
    copy = copier.copy_out([0], [pool.data_ptr() + 64])
    assert not copy.done()
    assert not copier.idle()
    assert library.copies == 0


def test_nothing_is_copied_inside_of_a_graph(library: FakeLibrary) -> None:
    pool = torch.zeros(4, 64, dtype=torch.uint8)
    copier = CudaCopier("cpu", [(pool.data_ptr(), 64, 64)], 4, method=Method.DIRECT)
    library.capturing = True
    with pytest.raises(LayoutError, match="outside of its capture"):
        copier.mark()
    with pytest.raises(LayoutError, match="outside of its capture"):
        copier.copy_out([0], [pool.data_ptr() + 64])
    assert copier.idle()
    assert library.copies == 0


@pytest.fixture
def stepping(library: FakeLibrary) -> tuple[GpuCopier, Any, Any]:
    """A copier that takes one block at a time, ids and addresses for three."""
    tensor = torch.zeros(6, 64, dtype=torch.uint8)
    pool = Pool.from_blocks(tensor)
    pool.device = "cpu:0"
    copier = GpuCopier(pool)
    copier._step = 1
    ids = np.arange(3)
    return copier, ids, tensor.data_ptr() + 64 * (ids + 3)


def interrupted(copier: GpuCopier, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second copy is submitted, and then the user types Ctrl-C."""
    copy_out, calls = copier._copier.copy_out, []

    def submit(*arguments: Any) -> Any:
        copy = copy_out(*arguments)
        calls.append(copy)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return copy

    monkeypatch.setattr(copier._copier, "copy_out", submit)


def test_an_exception_waits_for_the_copies_before_it(
    stepping: tuple[GpuCopier, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    copier, ids, addresses = stepping
    interrupted(copier, monkeypatch)
    monkeypatch.setattr(Event, "looks", 5)
    with pytest.raises(KeyboardInterrupt):
        copier.copy_out(ids, addresses, Limit())
    assert Event.looks < 0
    assert copier._copier.idle()


def test_a_pool_of_a_lost_copy_is_kept(stepping: tuple[GpuCopier, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    copier, ids, addresses = stepping
    interrupted(copier, monkeypatch)
    kept: list[Pool] = []
    monkeypatch.setattr(transfer, "_lost_pools", kept)

    def broken(event: Event) -> bool:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(Event, "query", broken)
    with pytest.raises(CopyLost):
        copier.copy_out(ids, addresses, Limit())
    assert kept == [copier._pool]


@pytest.mark.parametrize("map_arena", [True, False])
@pytest.mark.parametrize("form", ["block-first, 64 KiB", "layer-first, 4 KiB pieces"])
def test_a_connector_stores_and_loads(form: str, map_arena: bool, library: FakeLibrary) -> None:
    with tiercache.launch(ARENA, region=REGION) as daemon:
        check_store_and_load(daemon.address, form, "cpu:0", map_arena=map_arena)
    assert library.copies > 0
    assert library.registrar.held == {}
