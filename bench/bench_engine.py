"""What the cache costs and brings below the bundled engine.

    store cost   cold prefill with every block stored, over the same prefill without a cache
    load gain    cold prefill over the same prompt from DRAM, and from the engine's own pool

Two engines in one process, with and without a connector, take turns; ratios are of medians. One
OpenMP thread, since a daemon runs beside it. `python bench/bench_engine.py [--tokens N] [--rounds N]`
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
from common import Report

from tiercache.cli.demo_model import build_model, prompt_tokens
from tiercache.engine import Engine, EngineSettings, SamplingParams, connect_to
from tiercache.launch import launch


def first_token(engine: Engine, tokens: list[int]) -> tuple[float, float, int]:
    """TTFT in seconds, CPU seconds of this process until the transfers have ended, tokens from the cache."""
    cpu_s = time.process_time()
    [output] = engine.generate([tokens], SamplingParams(max_tokens=1, ignore_eos=True))
    engine.drain()
    return output.ttft_s, time.process_time() - cpu_s, output.external_hit_tokens


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("bench_engine")
    with tempfile.TemporaryDirectory() as folder, launch("1GiB") as daemon:
        model = Path(folder) / "model"
        report.note(build_model(model))
        tokens, _ = prompt_tokens(model, None, args.tokens)
        settings = EngineSettings(pool_bytes=512 << 20)
        plain = Engine(model, settings)
        cached = Engine(model, settings, connect_to(daemon.address, required=True))
        without, storing, without_cpu, storing_cpu, dram, pool = [], [], [], [], [], []
        for number in range(args.rounds + 1):
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
        cached.close()
        plain.close()
    pairs = [store / base for store, base in zip(storing, without, strict=True)]
    cpu_pairs = [store / base for store, base in zip(storing_cpu, without_cpu, strict=True)]
    gains = [store / load for store, load in zip(storing, dram, strict=True)]
    median = statistics.median
    report.add("cold_ttft_s", "cold, no cache", median(without), "s", samples=without)
    report.add("store_ttft_ratio", "cold with store / without, TTFT", median(pairs), at_most=1.03, samples=pairs)
    report.add("store_cpu_ratio", "the same, CPU of the engine", median(cpu_pairs), at_most=1.03, samples=cpu_pairs)
    report.add("dram_ttft_s", "from DRAM", median(dram), "s", samples=dram)
    report.add("pool_ttft_s", "from the engine's pool", median(pool), "s", samples=pool)
    report.add("speedup_dram", "cold / from DRAM, TTFT", median(gains), "x", at_least=50, samples=gains)
    report.finish()


if __name__ == "__main__":
    main()
