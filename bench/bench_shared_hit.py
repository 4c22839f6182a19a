"""A hit from the shared store over one from DRAM, in time to the first token, with two daemons and a Valkey server.

    python bench/bench_shared_hit.py [--tokens N] [--rounds N]

Host A computes a prompt, and its daemon sends it to the store. Then an engine of host B asks for it again and again,
its pool empty each time:

    shared   its daemon's DRAM is empty: from the store, by TCP on the loopback; sealed, as by default
    dram     from the daemon's DRAM
    stopped  the same, while the store accepts connections and answers nothing

A round is one of each; a figure is the median of the rounds' ratios. Everything is on one machine: the server, both
ends of the connection and the engine share its cores. Prints a table and, last, one JSON object.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from common import Report

from tiercache.client.client import Client
from tiercache.client.launcher import launch
from tiercache.demo.child import none_left
from tiercache.demo.hosts import wait_for_store, write_settings
from tiercache.demo.model import build_model, prompt_tokens
from tiercache.demo.prompt import EngineProcess, arena_bytes_for, prompt_kv_bytes
from tiercache.demo.valkey import ValkeyProcess, server_program
from tiercache.errors import ConfigError

WORKER = "tiercache.demo.worker"
KEYS = ["shared_hit_over_dram_8k", "shared_stopped_hit_over_dram_8k"]


def measure(folder: Path, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Seconds to the first token, by what was measured, of each round."""
    build_model(folder / "model")
    prompt, _ = prompt_tokens(folder / "model", None, tokens)
    kv_bytes, seconds = prompt_kv_bytes(folder / "model", tokens), defaultdict[str, list[float]](list)
    arena_bytes = arena_bytes_for(kv_bytes)
    with ExitStack() as stack:
        store = stack.enter_context(ValkeyProcess(folder, 2 * arena_bytes))
        settings = write_settings(folder, store.url)
        with launch(arena_bytes, run_dir=folder / "a", config=str(settings), grace=0) as a:
            with EngineProcess(WORKER, folder / "model", a.address, 2 * kv_bytes) as engine:
                engine.run("cold", "", prompt)
                engine.ask("drain")
            wait_for_store(a)
        b = stack.enter_context(launch(arena_bytes, run_dir=folder / "b", config=str(settings), grace=0))
        client = stack.enter_context(Client.connect(b.address, name="bench", map_arena=False))
        engine = stack.enter_context(EngineProcess(WORKER, folder / "model", b.address, 2 * kv_bytes))

        def ask(name: str) -> None:
            engine.ask("forget")
            run = engine.run(name, "", prompt)
            assert run.cache_tokens > tokens - 32, f"{name}: only {run.cache_tokens} tokens were a hit"
            seconds[name].append(run.ttft_s)

        for _ in range(rounds):
            client.flush(tier="dram")
            ask("shared")
            ask("dram")
            store.process.send_signal(signal.SIGSTOP)
            ask("stopped")
            store.process.send_signal(signal.SIGCONT)
    return seconds


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, metavar="N")
    parser.add_argument("--rounds", type=int, default=15, metavar="N")
    options = parser.parse_args()
    report = Report("bench_shared_hit")
    try:
        server_program()
    except ConfigError as error:
        report.leave_out(KEYS, str(error))
        report.finish()
        return
    with tempfile.TemporaryDirectory(prefix="tiercache-bench-") as name, none_left():
        seconds = measure(Path(name), options.tokens, options.rounds)
    for key, over, label, most in zip(
        KEYS, ("shared", "stopped"), ("from the store", "from DRAM, store stopped"), (3.0, 1.25), strict=True
    ):
        ratios = [one / dram for one, dram in zip(seconds[over], seconds["dram"], strict=True)]
        report.add(key, f"{label}, over DRAM", statistics.median(ratios), at_most=most, samples=ratios)
    for name, samples in seconds.items():
        report.add(f"{name}_ttft_s", f"  {name}", statistics.median(samples), "s", samples=samples)
    report.finish()


if __name__ == "__main__":
    main()
