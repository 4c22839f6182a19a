"""The bundled engine: what a long prompt does to others, what the cache brings under pressure, transformers beside it.

    itl         p99 time between two tokens of running requests while a long prompt comes in, over the
                time of one chunk of that prompt alone
    pressure    conversations whose KV does not fit into the pool: throughput with tiers, over without
    generate    decode and prefill over transformers' generate() and generate_batch(), for models of two sizes
                (see `against_transformers`)

The candidates of a part take turns in one process. One OpenMP thread, since a daemon runs beside it.
`python bench/bench_engine.py [--parts itl pressure generate] [--sizes 20M 100M] [--rounds N]`
Time to first token has a benchmark of its own, `bench_ttft.py`.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from against_transformers import measure
from common import SEED, Report, percentile

from tiercache.client.launcher import launch
from tiercache.demo.model import SIZES, build_model, prompt_tokens
from tiercache.engine import Engine, EngineSettings, SamplingParams, connect_to

PARTS = ("itl", "pressure", "generate")
LONG = 8192
SAID, ANSWERED = 120, 8
"""Tokens of one turn of a conversation."""
median = statistics.median


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


def measure_itl(report: Report, model: Path, tokens: list[int], rounds: int) -> None:
    """Four requests decode while a long prompt comes in."""
    ratios: list[float] = []
    with Engine(model, EngineSettings(kv_cache_memory="512MiB")) as engine:
        engine.generate([tokens[:1024]], greedy(2))  # a warm-up
        for number in range(rounds):
            engine.reset_pool()
            [alone] = engine.generate([[number, *tokens[1:]]], greedy(1))
            chunk_s = alone.ttft_s / -(-len(tokens) // engine.settings.chunk_size)
            engine.reset_pool()
            ratios.append(percentile(_gaps(engine, [number, *tokens[1:]]), 0.99) / chunk_s)
    report.add("itl_p99_over_chunk", "p99 ITL under a prompt / a chunk", median(ratios), at_most=2.0, samples=ratios)


def _gaps(engine: Engine, prompt: list[int]) -> list[float]:
    """Seconds between tokens of four running requests, while `prompt` is computed."""
    running = [engine.add_request(prompt[100 * number : 100 * number + 64], greedy(400)) for number in range(1, 5)]
    last_s = {}
    while len(last_s) < len(running):
        last_s |= {output.request_id: time.perf_counter() for output in engine.step()}
    long = engine.add_request(prompt, greedy(1))
    gaps = []
    while True:
        outputs = engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            if output.request_id in last_s:
                gaps.append(now_s - last_s[output.request_id])
                last_s[output.request_id] = now_s
        if any(output.request_id == long for output in outputs):
            break
    for request_id in running:
        engine.abort(request_id)
    return gaps


def measure_pressure(report: Report, model: Path, text: list[int], conversations: int, turns: int) -> None:
    """Conversations take turns; the pool holds a quarter of their KV."""
    length = turns * (SAID + ANSWERED)
    settings = EngineSettings(chunk_size=64, pool_blocks=conversations * length // 16 // 4, max_num_seqs=16)
    took: dict[str, tuple[float, float]] = {}
    spoken: dict[str, list[list[int]]] = {}
    with launch("1GiB") as daemon:
        for name, connect in (("without", None), ("with", connect_to(daemon.address, required=True))):
            with Engine(model, settings, connect) as engine:
                engine.generate([text[-512:]], greedy(2))  # a warm-up
                began = time.perf_counter(), time.process_time()
                spoken[name] = _converse(engine, text, conversations, turns)
                took[name] = time.perf_counter() - began[0], time.process_time() - began[1]
                report.note(f"pressure {name} tiers: {took[name][0]:.1f} s, CPU {took[name][1]:.1f} s, {_told(engine)}")
    wall, cpu = (without / having for without, having in zip(took["without"], took["with"], strict=True))
    report.add("pressure_speedup", "throughput with tiers / without", wall, "x", at_least=2.0)
    report.add("pressure_cpu_speedup", "the same by CPU of the engine", cpu, "x")
    same = float(spoken["with"] == spoken["without"])
    report.add("tokens_identical", "the same tokens (1 is yes)", same, at_least=1.0)


def _converse(engine: Engine, text: list[int], conversations: int, turns: int) -> list[list[int]]:
    """The whole text of each conversation, after all turns of all conversations."""
    talks: list[list[int]] = [[] for _ in range(conversations)]
    for turn in range(turns):
        for number, talk in enumerate(talks):
            at = (number * turns + turn) * SAID % (len(text) - SAID)
            talk += [number, *text[at + 1 : at + SAID]]
        for talk, output in zip(talks, engine.generate(talks, greedy(ANSWERED)), strict=True):
            talk += output.tokens
    return talks


def _told(engine: Engine) -> str:
    names = ("prefix_cache_hits", "external_prefix_cache_hits", "preemptions", "loads_avoided", "loads_regretted")
    return ", ".join(f"{name} {engine.stats()[name]}" for name in names)


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=tuple(SIZES), help="of the part generate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    report = Report("bench_engine")
    with tempfile.TemporaryDirectory() as folder:
        models = {size: Path(folder) / size for size in {"20M", *args.sizes}}
        for size, model in models.items():
            build_model(model, size)
        text, _ = prompt_tokens(models["20M"], None, max(LONG, args.conversations * args.turns * SAID))
        if "itl" in args.parts:
            measure_itl(report, models["20M"], text[:LONG], args.rounds)
        if "pressure" in args.parts:
            measure_pressure(report, models["20M"], text, args.conversations, args.turns)
        if "generate" in args.parts:
            for size in args.sizes:
                measure(report, models[size], text, size, args.rounds)
    report.note("random-initialised Llamas in fp32, 20M unless named otherwise; one thread")
    report.finish()


if __name__ == "__main__":
    main()
