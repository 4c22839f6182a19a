"""Blocks between host and device: each way and both, over the pinned peak of the same run, and beside compute."""

from __future__ import annotations

import mmap
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from gpu.place import DEVICE, MIB, REHEARSAL, seconds, sized, stand_ins
from gpu.tell import checking, fact, figure, left_s

POOL_BYTES = sized(1024 * MIB, 64 * MIB)
BLOCKS = {"128 KiB": 128 << 10, "2 MiB": 2 * MIB, "16 MiB": 16 * MIB}
ROUNDS = sized(7, 2)
WAIT_S = 20.0
SIZE = sized(8192, 128)
PRODUCTS = sized(150, 4)


def median_s(run: Callable[[], object]) -> float:
    run()
    return statistics.median(seconds(run) for _ in range(ROUNDS))


class Rig:
    """A pool on the device, and as much registered memory."""

    def __init__(self) -> None:
        import numpy as np
        import torch

        from tiercache.copies.host_memory import HostMemory

        self.area = mmap.mmap(-1, POOL_BYTES)
        self.frames = np.frombuffer(self.area, dtype=np.uint8)
        self.frames[:] = 0x5A
        self.memory = HostMemory()
        self.memory.register(self.frames.ctypes.data, POOL_BYTES)
        self.pool = torch.randint(0, 256, (POOL_BYTES,), dtype=torch.uint8, device=DEVICE)

    def close(self) -> None:
        self.memory.unregister(self.frames.ctypes.data)


def run(_: Sequence[str]) -> None:
    """Peaks first, then blocks of each size, then both beside products of matrices."""
    stand_ins()
    rig = Rig()
    peaks = pinned_peaks()
    for name, length in BLOCKS.items():
        with checking(f"blocks of {name} arrive unchanged"):
            blocks(rig, name, length, peaks)
    if left_s() > 10:
        with checking("copies beside compute"):
            beside_compute(rig)
    rig.close()


def pinned_peaks() -> dict[str, float]:
    """Bytes per second of one large copy of pinned memory, each way and both at once."""
    import torch

    size = POOL_BYTES // 4
    device = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=not REHEARSAL) for _ in range(2)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def load() -> None:
        device[0].copy_(host[0], non_blocking=True)

    def store() -> None:
        host[1].copy_(device[1], non_blocking=True)

    def both() -> None:
        for stream, copy in zip(streams, (load, store), strict=True):
            with torch.cuda.stream(stream):
                copy()

    found = {"load": size / median_s(load), "store": size / median_s(store), "both": 2 * size / median_s(both)}
    for name, rate in found.items():
        figure(f"pinned peak, {name}", rate / 1e9, "GB/s")
    return found


def blocks(rig: Rig, name: str, length: int, peaks: dict[str, float]) -> None:
    """Rates of blocks of one size, in shuffled frames."""
    import numpy as np
    import torch

    from tiercache.copies.cuda import CudaCopier

    count = POOL_BYTES // length
    copier = CudaCopier(DEVICE, [(rig.pool.data_ptr(), length, length)], count, memory=rig.memory, owner=rig.pool)
    shuffle = random.Random(1)
    ids, places = (np.array(shuffle.sample(range(count), count), dtype=np.int64) for _ in range(2))
    there = rig.frames.ctypes.data + places * length
    half = count // 2

    def load() -> None:
        copier.copy_in(there, ids).wait(WAIT_S)

    def store() -> None:
        copier.copy_out(ids, there).wait(WAIT_S)

    def both() -> None:
        copies = copier.copy_in(there[:half], ids[:half]), copier.copy_out(ids[half:], there[half:])
        for copy in copies:
            copy.wait(WAIT_S)

    before = rig.pool.clone()
    store()
    by_frame = torch.empty_like(before).view(count, length)
    by_frame[torch.from_numpy(places).to(DEVICE)] = before.view(count, length)[torch.from_numpy(ids).to(DEVICE)]
    assert torch.equal(torch.from_numpy(rig.frames), by_frame.view(-1).cpu()), "stored bytes differ"
    rig.pool.zero_()
    load()
    assert torch.equal(rig.pool, before), "loaded bytes differ"
    for way, copy, bytes_moved in (("load", load, count * length), ("store", store, count * length)):
        rate = bytes_moved / median_s(copy)
        figure(f"{way} blocks of {name}", rate / 1e9, "GB/s")
        figure(f"{way} blocks of {name} over the peak", rate / peaks[way], at_least=0.9)
    rate = count * length / median_s(both)
    figure(f"load and store blocks of {name} at once", rate / 1e9, "GB/s")
    figure(
        f"load and store blocks of {name} over one way's peak", rate / min(peaks["load"], peaks["store"]), at_least=1.6
    )
    assert torch.equal(rig.pool, before), "bytes differ after loads and stores at once"


def beside_compute(rig: Rig) -> None:
    """Products of matrices alone, and while blocks of 2 MiB go both ways all the time."""
    import numpy as np
    import torch

    from tiercache.copies.cuda import CudaCopier

    dtype = torch.float32 if REHEARSAL else torch.bfloat16
    left, right = (torch.randn((SIZE, SIZE), device=DEVICE, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    length = BLOCKS["2 MiB"]
    count = POOL_BYTES // length
    copier = CudaCopier(DEVICE, [(rig.pool.data_ptr(), length, length)], count, memory=rig.memory, owner=rig.pool)
    idle, half = copier.mark(), count // 2
    ids = np.arange(count, dtype=np.int64)
    there = rig.frames.ctypes.data + ids * length
    stop, moved, problems = threading.Event(), [0], list[BaseException]()

    def copy_all_the_time() -> None:
        try:
            while not stop.is_set():
                copies = (
                    copier.copy_in(there[:half], ids[:half], idle),
                    copier.copy_out(ids[half:], there[half:], idle),
                )
                for copy in copies:
                    copy.wait(WAIT_S)
                moved[0] += count * length
        except BaseException as problem:  # noqa: BLE001 - raised below
            problems.append(problem)

    def products() -> None:
        for _ in range(PRODUCTS):
            torch.mm(left, right, out=out)

    alone = [on_device_s(products) for _ in range(4)][1:]
    thread = threading.Thread(target=copy_all_the_time)
    thread.start()
    begin = time.perf_counter()
    try:
        beside = [on_device_s(products) for _ in range(4)][1:]
    finally:
        took = time.perf_counter() - begin
        stop.set()
        thread.join(WAIT_S)
    assert not problems, problems
    again = [on_device_s(products) for _ in range(3)]
    fact("seconds of the products", {"alone": alone, "beside copies": beside, "alone again": again})
    figure("product of matrices", 2 * SIZE**3 * PRODUCTS / statistics.median(alone) / 1e12, "TFLOP/s")
    figure("copies beside it, both ways", moved[0] / took / 1e9, "GB/s")
    slower = statistics.median(beside) / statistics.median([*alone, *again])
    figure("products beside copies over alone", slower, "x", at_most=1.05)


def on_device_s(run: Callable[[], Any]) -> float:
    """Time of `run` on the current stream by the device's clock: copies on other streams are not waited for."""
    if REHEARSAL:
        return seconds(run)
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
