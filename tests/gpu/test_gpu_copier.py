"""`tiercache.copies.cuda` on a real device: registered memory, and copies both ways by every method."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from block_copy_cases import GUARD, PoolCase
from copier_cases import POOLS, WAIT_S, Arena, check_out_and_back, check_transfer_layer, segments_of

from tiercache.copies.copy_plan import Method
from tiercache.copies.cuda import CudaCopier
from tiercache.copies.cuda_lane import CudaCopy
from tiercache.copies.host_memory import HostMemory, process_memory
from tiercache.errors import ArenaError

pytestmark = pytest.mark.gpu


@pytest.fixture
def arenas() -> Iterator[list[Arena]]:
    """Arenas put in here are unregistered at the end."""
    made: list[Arena] = []
    yield made
    torch.cuda.synchronize()
    for arena in made:
        arena.close()


def pages(length: int) -> np.ndarray:
    """Zeros that begin and end with a page, like the arena."""
    return np.frombuffer(mmap.mmap(-1, length), dtype=np.uint8)


@pytest.mark.parametrize("method", [None, *Method], ids=str)
@pytest.mark.parametrize("pool", POOLS)
def test_blocks_go_out_and_come_back(pool: str, method: Method | None, device: str, arenas: list[Arena]) -> None:
    arenas.append(check_out_and_back(pool, method, device))


def test_the_transfer_layer_copies_in_steps(device: str, arenas: list[Arena]) -> None:
    arenas.append(check_transfer_layer(device, process_memory))


@pytest.mark.parametrize("pool", ["block-first, 64 KiB", "layer-first, 4 KiB pieces"])
def test_memory_that_is_not_registered_works_too(pool: str, device: str) -> None:
    check_out_and_back(pool, None, device, registered=False)


def test_a_copy_that_the_driver_refuses_fails_without_harm(device: str, arenas: list[Arena]) -> None:
    """A range that leaves its device allocation: an error in words, and the next copy works."""
    torch.cuda.empty_cache()  # so that the pool is an allocation of its own
    layers = PoolCase("2 blocks", (2, 8 << 20)).make(device)
    base, stride, length = segments_of(layers, 0)[0]
    arena = Arena(1, length + (8 << 20), chunk_bytes=64 << 20)
    arenas.append(arena)
    broken = CudaCopier(device, [(base + stride, length + (8 << 20), length + (8 << 20))], memory=arena.memory)
    copy = broken.copy_out([0], arena.addresses([0]))
    with pytest.raises(ArenaError, match="CUDA_ERROR"):
        copy.wait(WAIT_S)
    assert copy.done()
    assert (arena.bytes[0] == GUARD).all()
    sound = CudaCopier(device, [(base, stride, length)], 2, memory=arena.memory)
    assert sound.copy_out([1], arena.addresses([0])).wait(WAIT_S)
    assert (arena.bytes[0, :length] == layers[0][1].view(torch.uint8).cpu().numpy()).all()


def test_registering_twice_fails_and_leaves_no_error_behind(device: str) -> None:
    """A failure of the runtime's own call would come back from the next kernel launch."""
    memory = pages(1 << 20)
    first, second = HostMemory(), HostMemory()
    first.register(memory.ctypes.data, memory.nbytes)
    with pytest.raises(ArenaError, match="ALREADY_REGISTERED"):
        second.register(memory.ctypes.data, memory.nbytes)
    assert float(torch.ones(8, device=device).sum()) == 8.0
    torch.cuda.synchronize()
    first.unregister(memory.ctypes.data)
    second.register(memory.ctypes.data, memory.nbytes)
    assert second.registered.mapped_in_place
    second.unregister(memory.ctypes.data)


def test_registering_and_waiting_in_a_thread_do_not_spoil_a_capture(device: str) -> None:
    """An engine captures its graphs after it has connected: the arena is being registered then."""
    memory = pages(32 << 20)
    counter = torch.zeros(1, device=device)
    event = torch.cuda.Event()
    event.record()
    torch.cuda.synchronize()
    stop = threading.Event()
    rounds: list[bool] = []

    def work() -> None:
        registry = HostMemory(1 << 20)
        while not stop.is_set():
            registry.register(memory.ctypes.data, memory.nbytes)
            registry.unregister(memory.ctypes.data)
            rounds.append(CudaCopy(event).done())

    thread = threading.Thread(target=work)
    thread.start()
    graphs = [torch.cuda.CUDAGraph() for _ in range(5)]
    try:
        for graph in graphs:
            with torch.cuda.graph(graph):
                counter.add_(1)
                wanted, deadline = len(rounds) + 2, time.monotonic() + WAIT_S
                while len(rounds) < wanted:
                    assert time.monotonic() < deadline
    finally:
        stop.set()
        thread.join(WAIT_S)
    for graph in graphs:
        graph.replay()
    assert float(counter.sum()) == 5.0
    assert all(rounds)
