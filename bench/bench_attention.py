"""How close decode attention comes to the memory bandwidth of a GPU, for each format of the KV pool.

    python bench/bench_attention.py [--budget S]

Decoding reads K and V of the whole context once and does little else, so the limit is the memory: bytes of the
contexts' blocks over time, beside a read of as many bytes by torch's sum in the same run. Contexts are of
8192 tokens in shuffled blocks of 16, heads as in Llama 3 8B (32 query heads, 8 KV heads of 128, bfloat16). Prefill
of a chunk of 2048 behind 6144 tokens stands beside torch's own attention, and its rate over that of a large product of
matrices. Prints a table and one JSON object as
the last line. Without CUDA it says so and does nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SEED = 1
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16
CONTEXT, CHUNK = 8192, 2048
BATCHES = (1, 8, 32)
ROUNDS = 20
TARGET = 0.8
"""Target: the share of the bandwidth, for raw blocks and the largest batch."""


class Figure(NamedTuple):
    """One line of the table: rate in GB/s or TFLOP/s, and the share of the limit that it reaches."""

    name: str
    rate: float
    unit: str
    share: float


def seconds(run: Callable[[], object]) -> float:
    """Median time of `run` on the device, with its caches flushed before."""
    import torch

    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    run()
    times = []
    for _ in range(ROUNDS):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def make_pass(name: str, count: int, start: int, end: int) -> Any:
    """Tables for `count` sequences whose tokens `[start, end)` are new, over a full pool of one layer."""
    import torch

    from tiercache.engine.cuda_attention import KernelTables
    from tiercache.engine.kv_pool import BatchSegment, KVLayout, KVPool

    blocks = CONTEXT // BLOCK
    layout = KVLayout(1, BLOCK, KV_HEADS, HEAD_DIM, torch.bfloat16, name)
    pool = KVPool(layout, count * blocks, count, torch.device("cuda"))
    fill(pool)
    ids = torch.randperm(count * blocks, generator=torch.Generator().manual_seed(SEED)).tolist()
    segments = [
        BatchSegment(number * (end - start), start, end, ids[number * blocks : (number + 1) * blocks])
        for number in range(count)
    ]
    return KernelTables(pool, segments, [0] * count if name == "raw" else range(1, count + 1))


def fill(pool: Any) -> None:
    """Blocks of numbers like a model's."""
    import torch

    block_format = pool.layout.block_format
    for block in range(0, len(pool.blocks), 512):
        part = pool.blocks[block : block + 512]
        content = torch.randn((len(part), 2, BLOCK, KV_HEADS, HEAD_DIM), dtype=torch.bfloat16, device="cuda")
        if block_format is None:
            part[:, 0] = content
        else:
            part[:, 0] = block_format.encode(content[:, 0], content[:, 1])


def rows_of(count: int) -> tuple[Any, Any, Any]:
    """Query, K and V of `count` new tokens, as a model gives them."""
    import torch

    return tuple(
        torch.randn((count, heads, HEAD_DIM), dtype=torch.bfloat16, device="cuda").transpose(0, 1)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )  # type: ignore[return-value]


def bench_decode(name: str, count: int, bandwidth: float) -> Figure:
    """One new token for each of `count` sequences; the blocks' bytes over the time of writing and attending."""
    import torch

    end = CONTEXT - BLOCK // 2  # in the middle of a block, where most steps are
    tables = make_pass(name, count, end - 1, end)
    query, key, value = rows_of(count)
    graph = torch.cuda.CUDAGraph()  # as the engine runs it, so that kernel launches are not measured
    tables.attend(0, query, key, value, scale=HEAD_DIM**-0.5)
    with torch.cuda.graph(graph):
        tables.attend(0, query, key, value, scale=HEAD_DIM**-0.5)
    rate = tables.pool.blocks.nbytes / seconds(graph.replay) / 1e9
    return Figure(f"decode {name}, {count} contexts", rate, "GB/s", rate / bandwidth)


def bench_prefill(name: str) -> Figure:
    """A chunk behind a long context, in TFLOP/s of the scores that count, beside torch's attention."""
    import torch

    start = CONTEXT - CHUNK
    tables = make_pass(name, 1, start, CONTEXT)
    query, key, value = rows_of(CHUNK)
    took = seconds(lambda: tables.attend(0, query, key, value, scale=HEAD_DIM**-0.5))
    whole_key, whole_value = (
        torch.randn((1, HEADS, CONTEXT, HEAD_DIM), dtype=torch.bfloat16, device="cuda") for _ in range(2)
    )
    mask = torch.ones(CHUNK, CONTEXT, dtype=torch.bool, device="cuda").tril(start)
    attend = torch.nn.functional.scaled_dot_product_attention
    torchs = seconds(lambda: attend(query[None], whole_key, whole_value, attn_mask=mask))
    work = 4 * HEADS * HEAD_DIM * CHUNK * (start + CHUNK / 2)
    return Figure(f"prefill {name}, {CHUNK} behind {start}", work / took / 1e12, "TFLOP/s", torchs / took)


def read_bandwidth() -> float:
    """GB/s of reading memory once, by torch's sum."""
    import torch

    data = torch.ones(512 << 20, dtype=torch.float32, device="cuda")
    return data.nbytes / seconds(lambda: data.sum()) / 1e9


def product_rate() -> float:
    """TFLOP/s of a product of two large matrices in bfloat16."""
    import torch

    size = 8192
    left, right = (torch.randn((size, size), dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * size**3 / seconds(lambda: left @ right) / 1e12


def main() -> int:
    """Run everything; returns 0 also without CUDA."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=300.0, metavar="S", help="no format begins after this")
    until_s = time.monotonic() + parser.parse_args().budget
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return 0
    from tiercache.kernels.kv_formats import FORMATS

    bandwidth, product = read_bandwidth(), product_rate()
    figures = [Figure("read of device memory", bandwidth, "GB/s", 1.0), Figure("product", product, "TFLOP/s", 1.0)]
    skipped = []
    for name in ("raw", *FORMATS):
        if name != "raw" and time.monotonic() > until_s:
            skipped.append(name)
            continue
        figures += [bench_decode(name, count, bandwidth) for count in BATCHES]
        prefill = bench_prefill(name)
        figures += [prefill, Figure(f"prefill {name} over a product", prefill.rate, "TFLOP/s", prefill.rate / product)]
        torch.cuda.empty_cache()
    print(f"{'what':40} {'rate':>9}          of the limit (prefill: of torch's attention)")
    for figure in figures:
        print(f"{figure.name:40} {figure.rate:9.1f} {figure.unit:8} {figure.share:6.2f}")
    reached = next(one.share for one in figures if one.name == f"decode raw, {BATCHES[-1]} contexts")
    result = {
        "benchmark": "attention",
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "seed": SEED,
        "command": "python bench/bench_attention.py",
        "decode_over_bandwidth": round(reached, 3),
        "skipped": skipped,
        "target": {"decode_over_bandwidth": TARGET, "met": reached >= TARGET},
        "figures": {name: {unit: round(rate, 2), "share": round(share, 3)} for name, rate, unit, share in figures},
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
