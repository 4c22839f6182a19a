"""Time to first token of the bundled engine, by where the prompt's KV is.

    python bench/bench_ttft.py [--lengths N ...] [--rounds N] [--dir DIR]

    cold     computed, by an engine without a cache
    store    computed, by one with a cache, which stores every block meanwhile
    pool     the same prompt again: from the engine's own pool
    dram     the pool was emptied: from the daemon's DRAM
    dead     the daemon was killed: computed
    nvme     another daemon on the same directory, its DRAM empty: from NVMe
    hung     that one is stopped by a signal: computed, after the deadline of one request

A round is all of these, one after the other, with one prompt per length not seen before; a ratio is of
two runs of one round. Whether to load or to recompute is left to the engine. The NVMe tier reads past the page
cache (O_DIRECT; a directory that refuses it is refused here). One OpenMP thread, since a daemon runs beside it.

Files lie in a directory of their own below --dir, $TMPDIR or /tmp, at most 4 GiB, and are removed at the end. Prints a
table and, last, one JSON object: `ttft_dram_s` and the like are at 8192 tokens (or the greatest length),
`ttft_dram_1k_s` at 1024.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import logging
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import SEED, Report

from tiercache.client.client import Client
from tiercache.client.launcher import LaunchedDaemon, launch
from tiercache.connector.connector import Connector
from tiercache.demo.model import build_model, prompt_tokens
from tiercache.engine import CacheLike, Engine, EngineSettings, SamplingParams, connect_to
from tiercache.protocol.namespaces import NamespaceSpec

LENGTHS = (1024, 2048, 4096, 8192, 16384)
HEADLINE = 8192
WARM_UP = 1024
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
WHAT = {
    "cold": "no cache",
    "store": "cold, and stored",
    "pool": "from the pool",
    "dram": "from DRAM",
    "nvme": "from NVMe",
    "hung": "daemon hung",
    "dead": "daemon dead",
}
DEADLINE_S = 60.0
POLL_S = 0.01
MIB = 1 << 20


class Run(NamedTuple):
    """One served prompt. CPU is that of this process until its transfers have ended too."""

    ttft_s: float
    cpu_s: float
    pool_tokens: int
    cache_tokens: int
    tokens: list[int]


class Rig:
    """An engine without a cache, one with a daemon, and that daemon. Use it in a `with`."""

    def __init__(self, model: Path, where: Path) -> None:
        self._where = where
        self._stack = ExitStack()
        self._connectors: list[CacheLike] = []
        self._daemon = self._start()
        settings = EngineSettings(kv_cache_memory="256MiB")
        self.plain = self._stack.enter_context(Engine(model, settings))
        self.cached = self._stack.enter_context(Engine(model, settings, self._connect))

    def _connect(self, namespace: NamespaceSpec, pool: torch.Tensor) -> CacheLike:
        self._connectors.append(connect_to(self._where / "run", required=True)(namespace, pool))
        return self._connectors[-1]

    def _start(self) -> LaunchedDaemon:
        return self._stack.enter_context(
            launch(
                "1GiB",
                run_dir=self._where / "run",
                nvme=str(self._where / "nvme"),
                nvme_size="4GiB",
                nvme_segment=256 * MIB,
                grace=0,
            )
        )

    def round(self, prompt: list[int]) -> dict[str, Run]:
        """All runs of one prompt, by name. Raises RuntimeError when a run took its KV from the wrong place."""
        self.plain.reset_pool()
        self.cached.reset_pool()
        runs = {
            "cold": serve(self.plain, prompt),
            "store": serve(self.cached, prompt),
            "pool": serve(self.cached, prompt),
        }
        self.cached.reset_pool()
        runs["dram"] = serve(self.cached, prompt)
        blocks = self._wait_for_disk()
        os.kill(self._daemon.pid, signal.SIGKILL)
        self.cached.reset_pool()
        runs["dead"] = serve(self.cached, prompt)
        self._daemon = self._start()
        self._wait_until(lambda: self._nvme()["blocks"] >= blocks, "the daemon has its blocks back")
        self._wait_for_cache()
        self.cached.reset_pool()
        runs["nvme"] = serve(self.cached, prompt)
        self.cached.reset_pool()
        os.kill(self._daemon.pid, signal.SIGSTOP)
        try:
            runs["hung"] = serve(self.cached, prompt)
        finally:
            os.kill(self._daemon.pid, signal.SIGCONT)
        self._wait_for_cache()
        return checked(runs, len(prompt))

    def _nvme(self) -> dict[str, Any]:
        with Client.connect(self._daemon.address, name="bench", map_arena=False) as client:
            tiers = client.stats()["tiers"]
        nvme = tiers["nvme"]
        if any(not directory["direct"] for directory in nvme["directories"]):
            raise RuntimeError(f"{self._where} refuses O_DIRECT: choose another file system with --dir")
        return {"dram_blocks": tiers["dram"]["blocks"], **nvme}

    def _wait_for_disk(self) -> int:
        """Wait until everything in DRAM is on disk too; returns the number of blocks."""
        self._wait_until(lambda: (now := self._nvme())["blocks"] >= now["dram_blocks"], "the blocks are on disk")
        return self._nvme()["blocks"]

    def _wait_for_cache(self) -> None:
        [connector] = self._connectors
        assert isinstance(connector, Connector)
        self._wait_until(lambda: connector.available, "the engine has found the daemon")

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{what}: not within {DEADLINE_S:.0f} s")
            time.sleep(POLL_S)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def serve(engine: Engine, prompt: list[int]) -> Run:
    """One prompt, and a few tokens."""
    began_s = time.process_time()
    [output] = engine.generate([prompt], GREEDY)
    engine.drain()
    cpu_s = time.process_time() - began_s
    return Run(output.ttft_s, cpu_s, output.pool_hit_tokens, output.external_hit_tokens, output.tokens)


def checked(runs: dict[str, Run], length: int) -> dict[str, Run]:
    """The runs of one prompt. Raises RuntimeError where a run took its KV from another place than its name says."""
    for name, run in runs.items():
        hits = (run.pool_tokens > length // 2, run.cache_tokens > length // 2)
        if hits != (name == "pool", name in ("dram", "nvme")):
            raise RuntimeError(f"{name}: {run.pool_tokens} tokens from the pool, {run.cache_tokens} from the cache")
    return runs


def add_length(report: Report, length: int, rounds: list[dict[str, Run]], *, headline: bool) -> None:
    """The figures of one length."""
    label = f"{length / 1024:g}k"
    place = "" if headline else f"_{label}"
    for name, what in WHAT.items():
        seconds = [runs[name].ttft_s for runs in rounds]
        report.add(f"ttft_{name}{place}_s", f"{label}: {what}", statistics.median(seconds), "s", samples=seconds)

    def add_ratio(key: str, what: str, over: str, under: str, **target: float) -> None:
        ratios = [runs[over].ttft_s / runs[under].ttft_s for runs in rounds]
        bounds = target if headline else {}
        report.add(f"{key}{place}", f"{label}: {what}", statistics.median(ratios), "x", samples=ratios, **bounds)

    add_ratio("store_over_cold", "cold and stored / no cache", "store", "cold", at_most=1.03)
    add_ratio("speedup_pool", "no cache / from the pool", "cold", "pool")
    add_ratio("speedup_dram", "no cache / from DRAM", "cold", "dram", at_least=50)
    add_ratio("speedup_nvme", "no cache / from NVMe", "cold", "nvme")
    add_ratio("hung_over_cold", "daemon hung / no cache", "hung", "cold")
    add_ratio("dead_over_cold", "daemon dead / no cache", "dead", "cold")
    cpu = [runs["store"].cpu_s / runs["cold"].cpu_s for runs in rounds]
    bounds = {"at_most": 1.03} if headline else {}
    what = f"{label}: cold and stored / no cache, CPU"
    report.add(f"store_cpu_ratio{place}", what, statistics.median(cpu), "x", samples=cpu, **bounds)


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="N", help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="a directory on the disk to measure")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    logging.getLogger("tiercache").setLevel(logging.ERROR)  # the cache is down on purpose
    report = Report("bench_ttft")
    lengths = sorted(set(args.lengths))
    found: dict[int, list[dict[str, Run]]] = {length: [] for length in lengths}
    with tempfile.TemporaryDirectory(prefix="tiercache-bench-", dir=args.dir) as folder:
        model = Path(folder) / "model"
        report.note(build_model(model))
        text, _ = prompt_tokens(model, None, max(lengths))
        with Rig(model, Path(folder)) as rig:
            rig.round([255, *text[1:WARM_UP]])
            for number in range(args.rounds):
                for length in lengths:
                    # Another first token, so that nothing matches what an earlier round has stored.
                    runs = rig.round([number, length // 1024 % 256, *text[2:length]])
                    told = ", ".join(f"{name} {run.ttft_s:.3f}" for name, run in runs.items())
                    print(f"{length} tokens, round {number + 1}: {told} s", file=sys.stderr, flush=True)
                    found[length].append(runs)
    headline = HEADLINE if HEADLINE in lengths else lengths[-1]
    for length, rounds in found.items():
        add_length(report, length, rounds, headline=length == headline)
    everything = [runs for rounds in found.values() for runs in rounds]
    same = all(run.tokens == runs["cold"].tokens for runs in everything for run in runs.values())
    report.add("tokens_identical", "the same tokens in all runs (1 is yes)", float(same), at_least=1.0)
    report.finish()


if __name__ == "__main__":
    main()
