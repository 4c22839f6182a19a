"""How fast blocks move on a GPU: kernels inside device memory, and every way across the bus.

    python bench/bench_block_copy.py [--budget S]

Prints a table and one JSON object as the last line. Each figure stands beside its limit from the
same run: the device's own memcpy for kernels, one large copy of pinned memory for the bus. Rates
count the bytes of the blocks, once. Without CUDA it says so and does nothing.
"""

from __future__ import annotations

import argparse
import json
import mmap
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SEED = 1
CASE_BUDGET_S = 2.0
"""Time limit for the rounds of one figure."""
TOTAL_BUDGET_S = 150.0
"""No case begins after this, unless told otherwise."""
ROUNDS = (3, 20)
"""At least and at most so many rounds; the median counts."""
ARENA_BYTES = 1 << 30
SAMPLE_BYTES = 512 << 20
WAIT_S = 30.0


class Figure(NamedTuple):
    """One line of the table. `limit` names the figure to compare it with."""

    name: str
    gigabytes_per_s: float
    limit: str = ""


class Bench:
    """Times cases within the budget and keeps their figures."""

    def __init__(self, budget_s: float) -> None:
        self.figures: list[Figure] = []
        self.skipped: list[str] = []
        self._budget_s = budget_s
        self._case_s = CASE_BUDGET_S * min(1.0, budget_s / TOTAL_BUDGET_S)
        self._start_s = time.perf_counter()

    def time(self, name: str, length: int, run: Callable[[], object], limit: str = "") -> None:
        """Median time of `run`, which moves `length` bytes and returns when they have arrived."""
        begin = time.perf_counter()
        if begin - self._start_s > self._budget_s:
            self.skipped.append(name)
            return
        run()
        times: list[float] = []
        while len(times) < ROUNDS[0] or (len(times) < ROUNDS[1] and time.perf_counter() - begin < self._case_s):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        self.figures.append(Figure(name, length / statistics.median(times) / 1e9, limit))

    def table(self) -> str:
        """The figures for people."""
        rates = {figure.name: figure.gigabytes_per_s for figure in self.figures}
        lines = [f"{'what':58} {'GB/s':>8}  of the limit"]
        for name, rate, limit in self.figures:
            share = f"{rate / rates[limit]:6.2f} of {limit}" if limit in rates else ""
            lines.append(f"{name:58} {rate:8.1f}  {share}")
        lines += [f"{name:58}  skipped: out of time" for name in self.skipped]
        return "\n".join(lines)


def bench_kernels(bench: Bench) -> None:
    """Gather and scatter inside device memory, against the device's memcpy and torch's indexing."""
    import torch

    from tiercache.kernels import block_copy

    source = torch.empty(SAMPLE_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def memcpy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    bench.time("device memcpy", SAMPLE_BYTES, memcpy)
    shuffle = random.Random(SEED)
    for name, segments, piece in [
        ("layer-first, 64 pieces of 4 KiB", 64, 4 << 10),
        ("layer-first, 64 pieces of 32 KiB", 64, 32 << 10),
        ("layer-first, 64 pieces of 32775 B", 64, (32 << 10) + 7),
        ("block-first, 2 MiB", 1, 2 << 20),
    ]:
        blocks = SAMPLE_BYTES // (segments * piece)
        layers = [source[: blocks * segments * piece].view(segments, blocks, piece)]
        table = block_copy.PoolTable.from_layers(layers, 1)
        frames = target[: blocks * table.block_bytes].view(blocks, table.block_bytes)
        ids = torch.tensor(shuffle.sample(range(blocks), blocks), device="cuda")
        moved = blocks * table.block_bytes
        twin: list[Any] = []

        def gather(table: Any = table, ids: Any = ids, frames: Any = frames) -> None:
            block_copy.gather_blocks(table, ids, frames)
            torch.cuda.synchronize()

        def scatter(table: Any = table, ids: Any = ids, frames: Any = frames) -> None:
            block_copy.scatter_blocks(table, ids, frames)
            torch.cuda.synchronize()

        def index(layers: Any = layers, ids: Any = ids, twin: list[Any] = twin) -> None:
            twin[:] = [layers[0].index_select(1, ids)]
            torch.cuda.synchronize()

        bench.time(f"gather, {name}", moved, gather, "device memcpy")
        bench.time(f"scatter, {name}", moved, scatter, "device memcpy")
        bench.time(f"torch index_select, {name}", moved, index, "device memcpy")


class BusCase(NamedTuple):
    """A pool of `segments` pieces of `piece` bytes per block, copied by `method` (None: as chosen)."""

    segments: int
    piece: int
    method: str | None
    batched: bool = True


def size_name(length: int) -> str:
    """`4 KiB`, `2 MiB`."""
    return f"{length >> 20} MiB" if length >= 1 << 20 else f"{length >> 10} KiB"


BUS_CASES = [
    *(BusCase(1, piece, "direct", batched) for batched in (True, False) for piece in (128 << 10, 2 << 20, 32 << 20)),
    *(
        BusCase(1, piece, method)
        for piece in (4 << 10, 16 << 10, 28 << 10, 64 << 10)
        for method in ("direct", "zero_copy")
    ),
    *(
        BusCase(64, piece, method)
        for piece in (4 << 10, 16 << 10, 32 << 10, 64 << 10)
        for method in ("direct", "staged", "zero_copy")
    ),
    *(BusCase(64, piece, None) for piece in (4 << 10, 32 << 10)),
]


def bench_bus(bench: Bench) -> None:
    """Blocks between a device pool and shuffled frames of a registered arena, both ways."""
    import numpy as np
    import torch

    from tiercache.copies.host_memory import PIN_CHUNK_BYTES, HostMemory

    arena = mmap.mmap(-1, ARENA_BYTES)
    frames = np.frombuffer(arena, dtype=np.uint8)
    frames[:] = 0  # so that registering is not charged for fresh pages
    memory = HostMemory()
    start = time.perf_counter()
    memory.register(frames.ctypes.data, ARENA_BYTES)
    bench.figures.append(Figure("registering host memory", ARENA_BYTES / (time.perf_counter() - start) / 1e9))
    device = torch.empty(SAMPLE_BYTES, dtype=torch.uint8, device="cuda").random_()
    host = torch.from_numpy(frames)[: min(PIN_CHUNK_BYTES, SAMPLE_BYTES)]

    def to_device() -> None:
        for at in range(0, SAMPLE_BYTES, len(host)):  # a copy stays inside one registration
            device[at : at + len(host)].copy_(host, non_blocking=True)
        torch.cuda.synchronize()

    def to_host() -> None:
        for at in range(0, SAMPLE_BYTES, len(host)):
            host.copy_(device[at : at + len(host)], non_blocking=True)
        torch.cuda.synchronize()

    bench.time("pinned memcpy H2D", SAMPLE_BYTES, to_device)
    bench.time("pinned memcpy D2H", SAMPLE_BYTES, to_host)
    for case in BUS_CASES:
        bench_bus_case(bench, case, device, frames, memory)
    torch.cuda.synchronize()
    memory.unregister(frames.ctypes.data)


def bench_bus_case(bench: Bench, case: BusCase, device: Any, frames: Any, memory: Any) -> None:
    """Both directions of one case, after a check that the bytes come back right."""
    import numpy as np
    import torch

    from tiercache.copies.copy_plan import Method
    from tiercache.copies.cuda import CudaCopier

    block_bytes = case.segments * case.piece
    frame_bytes = -(-block_bytes // 4096) * 4096
    blocks = SAMPLE_BYTES // block_bytes
    layer_bytes = blocks * case.piece
    segments = [(device.data_ptr() + s * layer_bytes, case.piece, case.piece) for s in range(case.segments)]
    method = None if case.method is None else Method(case.method)
    copier = CudaCopier("cuda:0", segments, blocks, method=method, memory=memory)
    if not case.batched:
        copier._driver = without_batches(copier._driver)
    # At most 4096 blocks a round: enough to fill the bus, and tiny blocks do not take forever.
    count = min(blocks, 4096)
    shuffle = random.Random(SEED)
    ids = np.array(shuffle.sample(range(blocks), count), dtype=np.int64)
    places = np.array(shuffle.sample(range(ARENA_BYTES // frame_bytes), count), dtype=np.int64)
    there = frames.ctypes.data + places * frame_bytes
    pool = device[: blocks * block_bytes].view(case.segments, blocks, case.piece)

    copier.copy_out(ids, there).wait(WAIT_S)
    for position in (0, count // 2, count - 1):
        at = int(places[position]) * frame_bytes
        expected = pool[:, int(ids[position])].reshape(-1).cpu().numpy()
        assert (frames[at : at + block_bytes] == expected).all(), f"wrong bytes by {case}"
    before = int(device.sum(dtype=torch.int64))
    copier.copy_in(there, ids).wait(WAIT_S)
    assert int(device.sum(dtype=torch.int64)) == before, f"wrong bytes back by {case}"

    way = (case.method or "as chosen") + ("" if case.batched else ", one by one")
    pieces = size_name(case.piece) if case.segments == 1 else f"{case.segments} x {size_name(case.piece)}"
    moved = count * block_bytes
    name = f"blocks of {pieces}, {way}"
    bench.time(f"load {name}", moved, lambda: copier.copy_in(there, ids).wait(WAIT_S), "pinned memcpy H2D")
    bench.time(f"store {name}", moved, lambda: copier.copy_out(ids, there).wait(WAIT_S), "pinned memcpy D2H")


def without_batches(found: Any) -> Any:
    """The driver's interface before CUDA 12.8."""
    old = type(found)()
    old._batch = None
    return old


def main() -> int:
    """Run everything; returns 0 also without CUDA."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=TOTAL_BUDGET_S, metavar="S", help="seconds for all cases")
    budget_s = parser.parse_args().budget
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return 0
    bench = Bench(budget_s)
    bench_kernels(bench)
    torch.cuda.empty_cache()
    bench_bus(bench)
    print(bench.table())
    result = {
        "benchmark": "block_copy",
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "seed": SEED,
        "command": "python bench/bench_block_copy.py",
        "gigabytes_per_s": {f.name: round(f.gigabytes_per_s, 2) for f in bench.figures},
        "limits": {f.name: f.limit for f in bench.figures if f.limit},
        "skipped": bench.skipped,
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
