"""Requests that come together to real vLLM, with tiercache and without: shared beginnings, and a daemon that is slow.

    convoy     32 prompts with one common beginning, which only DRAM has
    slow       32 prompts not seen before, while the daemon takes 0.2 s for each lookup
    pulses     32 known prompts, while the daemon runs 20 ms of every 120

vLLM without a connector computes the same prompts in turn with it; its own prefix cache, which has been forgotten
each time, shares the common beginning among the 32. Seconds are those of `LLM.generate` for one token of all of
them. Model and environment are those of `bench_vllm.py`:
`PYTHONPATH=. .venv-vllm/bin/python bench/bench_vllm_convoy.py [--tokens N] [--rounds N]`
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench_vllm import BLOCK, Candidate, build_model, fastest_dtype, prompt_of, wait_for
from common import Report

import tiercache
from tiercache.client.launcher import LaunchedDaemon

REQUESTS = 32
OWN_TOKENS = 20
SLOW_TOKENS = 256
SLOW = """
import os, sys, time
from pathlib import Path
from tiercache.daemon.tiers.dram.reads import Reads
match = Reads.match
def slow(*arguments, **options):
    time.sleep(0.2 * Path(sys.argv[2], "slow").exists())
    return match(*arguments, **options)
Reads.match = slow
from tiercache.daemon.__main__ import main
sys.exit(main())
"""


class Bench:
    """A daemon that can be made slow, an engine with it, and one without."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        dtype = fastest_dtype()
        build_model(folder / "model", dtype)
        self.run_dir = folder / "run"
        self.run_dir.mkdir(mode=0o700)
        command = [sys.executable, "-c", SLOW, "--run-dir", str(self.run_dir), "--arena", "1GiB"]
        self.daemon = stack.enter_context(LaunchedDaemon(self.run_dir, False, folder / "daemon.log", command))
        ours = {
            "kv_connector": "TierCacheConnector",
            "kv_connector_module_path": "tiercache.connectors.vllm_v1",
            "kv_connector_extra_config": {"address": str(self.run_dir)},
        }
        self.ours, self.plain = (
            Candidate(folder / "model", dtype, transfer, folder / f"engine {transfer is None}")
            for transfer in (ours, None)
        )
        for engine in (self.ours, self.plain):
            stack.callback(engine.close)
            engine.ask("run", prompts=[prompt_of(500, "warm-up")], tokens=1)

    def stored_blocks(self) -> int:
        with tiercache.Client.connect(self.run_dir, map_arena=False) as client:
            return int(client.stats()["tiers"]["dram"]["blocks"])

    def store(self, prompts: list[list[int]]) -> None:
        """Have all full blocks of these in DRAM, and nothing else."""
        with tiercache.Client.connect(self.run_dir, map_arena=False) as client:
            client.flush()
        blocks = sum(len(ids) // BLOCK for ids in prompts)  # they have no common beginnings

        def stored() -> bool:
            assert self.ours.ask("forget")["done"]
            self.ours.ask("run", prompts=prompts, tokens=1)
            return self.stored_blocks() >= blocks

        wait_for(stored, "all blocks to be in DRAM")

    def both(self, prompts: list[list[int]]) -> tuple[float, float]:
        """Seconds with the cache and without. Raises RuntimeError where the tokens differ."""
        answers = []
        for engine in (self.ours, self.plain):
            assert engine.ask("forget")["done"]
            answers.append(engine.ask("run", prompts=prompts, tokens=1))
        if answers[0]["tokens"] != answers[1]["tokens"]:
            raise RuntimeError("the tokens differ")
        return answers[0]["seconds"], answers[1]["seconds"]

    @contextmanager
    def pulses(self) -> Iterator[None]:
        over = threading.Event()

        def pulse() -> None:
            while not over.wait(0.02):
                os.kill(self.daemon.pid, signal.SIGSTOP)
                over.wait(0.1)
                os.kill(self.daemon.pid, signal.SIGCONT)

        thread = threading.Thread(target=pulse)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def one_round(self, tokens: int, number: int) -> dict[str, tuple[float, float]]:
        common = prompt_of(tokens, f"common {number}")
        convoy = [common + prompt_of(OWN_TOKENS, f"own {number} {each}") for each in range(REQUESTS)]
        self.store([common])
        results = {"convoy": self.both(convoy)}
        (self.run_dir / "slow").touch()
        results["slow"] = self.both([prompt_of(SLOW_TOKENS, f"slow {number} {each}") for each in range(REQUESTS)])
        (self.run_dir / "slow").unlink()
        known = [prompt_of(SLOW_TOKENS, f"known {number} {each}") for each in range(REQUESTS)]
        self.store(known)
        with self.pulses():
            results["pulses"] = self.both(known)
        return results


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of the common beginning (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # all processes end with this one
    report, found = Report("bench_vllm_convoy"), dict[str, list[Any]]()
    with ExitStack() as stack:
        bench = Bench(stack, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        for number in range(args.rounds):
            for case, pair in bench.one_round(args.tokens, number).items():
                found.setdefault(case, []).append(pair)
    for case, pairs in found.items():
        for name, place in (("ours", 0), ("plain", 1)):
            values = [pair[place] for pair in pairs]
            report.add(f"{case}_{name}_s", f"{case}, {name}", statistics.median(values), "s", samples=values)
        ratios = [ours / plain for ours, plain in pairs]
        report.add(f"{case}_over_plain", f"{case}, over recomputing", statistics.median(ratios), samples=ratios)
    report.finish()


if __name__ == "__main__":
    main()
