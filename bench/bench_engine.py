"""The bundled engine: what the cache costs and brings below it, and what others feel of it.

    ttft        cold prefill with every block stored, over the same prefill without a cache;
                cold prefill over the same prompt from DRAM, and from the engine's own pool
    itl         p99 time between two tokens of running requests while a long prompt comes in, over the
                time of one chunk of that prompt alone
    pressure    conversations whose KV does not fit into the pool: throughput with tiers, over without
    generate    decode and prefill over transformers' generate() at the same batch, by CPU seconds

The candidates of a part take turns in one process. One OpenMP thread, since a daemon runs beside it.
`python bench/bench_engine.py [--parts ttft itl pressure generate] [--tokens N] [--rounds N]`
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
from common import SEED, Report, percentile

from tiercache.cli.demo_model import build_model, prompt_tokens
from tiercache.engine import Engine, EngineSettings, SamplingParams, connect_to
from tiercache.launch import launch

PARTS = ("ttft", "itl", "pressure", "generate")
median = statistics.median


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


def first_token(engine: Engine, tokens: list[int]) -> tuple[float, float, int]:
    """TTFT in seconds, CPU seconds of this process until the transfers have ended, tokens from the cache."""
    cpu_s = time.process_time()
    [output] = engine.generate([tokens], greedy(1))
    engine.drain()
    return output.ttft_s, time.process_time() - cpu_s, output.external_hit_tokens


def measure_ttft(report: Report, model: Path, tokens: list[int], rounds: int) -> None:
    """One long prompt: cold without and with a cache, from DRAM, from the pool."""
    settings = EngineSettings(kv_cache_memory="512MiB")
    without, storing, without_cpu, storing_cpu, dram, pool = [], [], [], [], [], []
    with launch("1GiB") as daemon, Engine(model, settings) as plain, Engine(
        model, settings, connect_to(daemon.address, required=True)
    ) as cached:
        for number in range(rounds + 1):
            # Another first token each round: nothing matches what an earlier round has stored.
            prompt = [number, *tokens[1:]]
            plain.reset_pool()
            cached.reset_pool()
            base_s, base_cpu_s, _ = first_token(plain, prompt)
            store_s, store_cpu_s, hit = first_token(cached, prompt)
            assert hit == 0
            pool_s, _, _ = first_token(cached, prompt)
            cached.reset_pool()
            dram_s, _, hit = first_token(cached, prompt)
            assert hit > 0, "nothing came back from the daemon"
            if number == 0:
                continue  # a warm-up
            without.append(base_s)
            storing.append(store_s)
            without_cpu.append(base_cpu_s)
            storing_cpu.append(store_cpu_s)
            dram.append(dram_s)
            pool.append(pool_s)
    pairs = [store / base for store, base in zip(storing, without, strict=True)]
    cpu_pairs = [store / base for store, base in zip(storing_cpu, without_cpu, strict=True)]
    gains = [store / load for store, load in zip(storing, dram, strict=True)]
    report.add("ttft_cold_s", "cold, no cache", median(without), "s", samples=without)
    report.add("store_ttft_ratio", "cold with store / without, TTFT", median(pairs), at_most=1.03, samples=pairs)
    report.add("store_cpu_ratio", "the same, CPU of the engine", median(cpu_pairs), at_most=1.03, samples=cpu_pairs)
    report.add("ttft_dram_s", "from DRAM", median(dram), "s", samples=dram)
    report.add("ttft_pool_s", "from the engine's pool", median(pool), "s", samples=pool)
    report.add("speedup_dram", "cold / from DRAM, TTFT", median(gains), "x", at_least=50, samples=gains)


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
    """Seconds between tokens of four running requests, as long as `prompt` is computed."""
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
    said, answered = 64, 8
    length = turns * (said + answered)
    settings = EngineSettings(chunk_size=64, pool_blocks=conversations * length // 16 // 4, max_num_seqs=16)
    seconds: dict[str, float] = {}
    spoken: dict[str, list[list[int]]] = {}
    with launch("1GiB") as daemon:
        for name, connect in (("without", None), ("with", connect_to(daemon.address, required=True))):
            with Engine(model, settings, connect) as engine:
                engine.generate([text[-512:]], greedy(2))  # a warm-up
                talks: list[list[int]] = [[] for _ in range(conversations)]
                began_s = time.perf_counter()
                for turn in range(turns):
                    for number, talk in enumerate(talks):
                        at = (number * turns + turn) * said % (len(text) - said)
                        talk += [number, *text[at + 1 : at + said]]
                    for talk, output in zip(talks, engine.generate(talks, greedy(answered)), strict=True):
                        talk += output.tokens
                seconds[name], spoken[name] = time.perf_counter() - began_s, talks
                report.note(f"pressure {name} tiers: {seconds[name]:.1f} s, {_told(engine)}")
    speedup = seconds["without"] / seconds["with"]
    report.add("pressure_speedup", "throughput with tiers / without", speedup, "x", at_least=2.0)
    same = float(spoken["with"] == spoken["without"])
    report.add("tokens_identical", "the same tokens (1 is yes)", same, at_least=1.0)


def _told(engine: Engine) -> str:
    names = ("prefix_cache_hits", "external_prefix_cache_hits", "preemptions", "loads_avoided", "loads_regretted")
    return ", ".join(f"{name} {engine.stats()[name]}" for name in names)


def measure_generate(report: Report, model: Path, text: list[int], rounds: int) -> None:
    """The engine and transformers' generate(), in turns, on prompts of equal length."""
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(model).eval()

    def by_stock(prompts: list[list[int]], count: int) -> float:
        inputs = torch.tensor(prompts)
        began_s = time.process_time()
        with torch.inference_mode():
            mask = torch.ones_like(inputs)
            stock.generate(
                inputs, attention_mask=mask, min_new_tokens=count, max_new_tokens=count, do_sample=False, pad_token_id=0
            )
        return time.process_time() - began_s

    with Engine(model, EngineSettings(kv_cache_memory="1GiB")) as engine:

        def by_engine(prompts: list[list[int]], count: int) -> float:
            engine.reset_pool()
            began_s = time.process_time()
            engine.generate(prompts, greedy(count))
            return time.process_time() - began_s

        def ratio(prompts: list[list[int]], long: int, short: int) -> list[float]:
            """The stock's time for `long - short` further tokens over ours, once per round."""
            found = []
            for _ in range(rounds + 1):
                times = [run(prompts, long) - (run(prompts, short) if short else 0) for run in (by_stock, by_engine)]
                found.append(times[0] / times[1])
            return found[1:]

        for batch in (8, 32):
            prompts = [[number, *text[: 127]] for number in range(batch)]
            ratios = ratio(prompts, 49, 1)
            key, label = f"decode_b{batch}_over_generate", f"decode at batch {batch} / generate()"
            report.add(key, label, median(ratios), "x", at_least=1.0, samples=ratios)
        ratios = ratio([text[:2048]], 1, 0)
        report.add(
            "prefill_over_generate", "prefill of 2048 / generate()", median(ratios), "x", at_least=0.95, samples=ratios
        )


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    report = Report("bench_engine")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        report.note(build_model(model))
        text, _ = prompt_tokens(model, None, max(args.tokens, args.conversations * args.turns * 64))
        if "ttft" in args.parts:
            measure_ttft(report, model, text[: args.tokens], args.rounds)
        if "itl" in args.parts:
            measure_itl(report, model, text[: args.tokens], args.rounds)
        if "pressure" in args.parts:
            measure_pressure(report, model, text, args.conversations, args.turns)
        if "generate" in args.parts:
            measure_generate(report, model, text, args.rounds)
    report.finish()


if __name__ == "__main__":
    main()
