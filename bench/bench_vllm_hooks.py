"""What the connector costs vLLM's scheduler: microseconds of its hooks, and steps per second of a decoding batch.

    hooks   batches of requests not seen before, then the same from DRAM, so that every hook is called
            hundreds of times, in the process in which worker and client threads run too
    idle    a batch that only decodes, with and without the connector, in turns: nothing to find or store

Beside what a hook took on the clock stands what its thread ran meanwhile: on a machine with other work, the difference
is that other work. Four minutes at most where two cores have little else to do.

The model and the engines are those of bench_vllm.py. Needs the environment of `make test-vllm`:
`PYTHONPATH=. .venv-vllm/bin/python bench/bench_vllm_hooks.py [--batches N] [--rounds N]`
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench_vllm import (
    BLOCK,
    NUMBER_BYTES,
    Candidate,
    add_hooks,
    build_model,
    connected,
    fastest_dtype,
    our_transfer,
    prompt_of,
    wait_for,
)
from common import Report

import tiercache

BATCH = 8
PROMPT_BLOCKS = 4
DECODED_TOKENS = 65


def call_hooks(engine: Candidate, client: tiercache.Client, batches: int) -> None:
    """Run every batch once unknown and once from DRAM."""
    prompts = [
        [prompt_of(PROMPT_BLOCKS * BLOCK, f"hooks {batch} {number}") for number in range(BATCH)]
        for batch in range(batches)
    ]
    for batch in prompts:
        engine.ask("run", prompts=batch, tokens=2)
    stored = batches * BATCH * PROMPT_BLOCKS
    wait_for(lambda: int(client.stats()["tiers"]["dram"]["blocks"]) >= stored, "all blocks to be stored")
    assert engine.ask("forget")["done"]
    for batch in prompts:
        assert min(engine.ask("run", prompts=batch, tokens=2)["cached"]) == PROMPT_BLOCKS * BLOCK


def decode(engine: Candidate, number: int) -> float:
    """Steps per second of a batch whose prompts are shorter than a block, so that nothing is found or stored."""
    prompts = [prompt_of(BLOCK // 2, f"decode {number} {place}") for place in range(BATCH)]
    return DECODED_TOKENS / float(engine.ask("run", prompts=prompts, tokens=DECODED_TOKENS)["seconds"])


def add_decoding(report: Report, engines: dict[str, Candidate], rounds: int) -> None:
    """Steps per second of both engines, in turns."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(-1, rounds):  # the first is a warm-up
        for name in sorted(engines, reverse=bool(number % 2)):
            rate = decode(engines[name], number)
            rates[name] += [rate] if number >= 0 else []
    ratios = [a / b for a, b in zip(rates["ours"], rates["plain"], strict=True)]
    report.add(
        "steps_per_s",
        "decoding steps, with the connector",
        statistics.median(rates["ours"]),
        "/s",
        samples=rates["ours"],
    )
    report.add(
        "steps_over_no_connector",
        "the same, over those without",
        statistics.median(ratios),
        at_least=0.99,
        samples=ratios,
    )


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=20, help=f"of {BATCH} requests, each run twice")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=NUMBER_BYTES, default=fastest_dtype())
    args = parser.parse_args()
    report = Report("bench_vllm_hooks")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        build_model(folder / "model", args.dtype)
        daemon = stack.enter_context(tiercache.launch("1GiB"))
        client = stack.enter_context(connected(daemon))
        engines = {
            name: Candidate(folder / "model", args.dtype, transfer, folder / name)
            for name, transfer in (("plain", None), ("ours", our_transfer(daemon)))
        }
        for engine in engines.values():
            stack.callback(engine.close)
        add_decoding(report, engines, args.rounds)
        call_hooks(engines["ours"], client, args.batches)
        hooks = engines["ours"].ask("hooks")
        add_hooks(report, hooks, "hook")
        total_us = sum(figures["wall"]["sum"] for name, figures in hooks.items() if name != "nothing")
        report.add("hooks_ms", "all hooks together", total_us / 1000, "ms")
        report.note(f"numbers of {args.dtype}")
    report.finish()


if __name__ == "__main__":
    main()
