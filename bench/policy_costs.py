"""What a policy costs: accesses a second, CPU for a block, the policy's own calls, and memory."""

from __future__ import annotations

import statistics
import tracemalloc
from array import array
from collections import defaultdict
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from common import Report
from policies import ALL
from policy_promises import DEFAULT
from policy_runs import BLOCK_BYTES, NVME_TIMES, SAMPLE, Listed, name_of, open_trace, replay

from tiercache.protocol.messages import KEY_BYTES
from tiercache.replay.requests import TraceRequest
from tiercache.replay.simulation import Simulation, Sizes

SPEED_PERCENT = 5.0
PASSES = 3
EVICTING = ("victim", "follows", "replaced", "evicted")
ENGINE_TOKENS = 16
"""Tokens in a block of vLLM, by default; most traces have blocks of 512."""
ENGINE_PROMPTS = 400
"""Prompts that are played in blocks of ENGINE_TOKENS."""


def cost_us(path: Path, engine_blocks: bool) -> float:
    """CPU µs that the default policy takes more than `lru` for each block evicted: whole replays with DRAM alone.

    `engine_blocks`: the first prompts of the trace in blocks as short as an engine's, and not all in the trace's own.
    """
    trace = open_trace(path)
    parts = max(1, next(iter(trace.specs.values())).block_size // ENGINE_TOKENS)
    listed = Listed(trace, parts, ENGINE_PROMPTS) if engine_blocks else Listed(trace)
    took_s, evicted = {}, 1
    for policy in (DEFAULT, "lru"):
        size = Sizes(sizes_of(listed, policy).dram_bytes, policy=policy)
        plays = [replay(listed, size) for _ in range(PASSES)]
        took_s[policy] = min(played.cpu_s for played in plays)
        evicted = max(1, plays[0].tallies.dram_evicted)
    return 1e6 * (took_s[DEFAULT] - took_s["lru"]) / evicted


def add_costs(report: Report, paths: list[Path]) -> float:
    """Report `cost_us` of each trace, in its own blocks and in an engine's. Returns the latter's mean."""
    costs = {engine_blocks: [cost_us(path, engine_blocks) for path in paths] for engine_blocks in (False, True)}
    for engine_blocks, blocks in ((False, "its own"), (True, f"{ENGINE_TOKENS} tokens'")):
        for path, us in zip(paths, costs[engine_blocks], strict=True):
            key = f"cost_us_{'engine' if engine_blocks else 'own'}_{name_of(path)}"
            report.add(key, f"{name_of(path)}: CPU over lru's for each of {blocks} blocks evicted", us, "us")
    return statistics.fmean(costs[True])


class Timed:
    """A policy with timed calls, each recorded with its number of blocks."""

    def __init__(self, policy: Any, samples: dict[str, array[int]]) -> None:
        self._policy = policy
        self._samples = samples

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._policy, name)
        if not callable(method):
            return method
        samples = self._samples[name]

        def timed(*arguments: Any) -> Any:
            start_ns = perf_counter_ns()
            result = method(*arguments)
            took_ns = perf_counter_ns() - start_ns
            samples.append(took_ns // len(arguments[0]) if name == "inserted_run" else took_ns)
            return result

        setattr(self, name, timed)
        return timed


def sizes_of(listed: Listed, policy: str) -> Sizes:
    keys = {request.keys[at : at + KEY_BYTES] for request in listed for at in range(0, len(request.keys), KEY_BYTES)}
    blocks = max(1, round(len(keys) * SPEED_PERCENT / 100))
    return Sizes(blocks * BLOCK_BYTES, blocks * NVME_TIMES * BLOCK_BYTES, policy=policy)


def measure_speed(report: Report, paths: list[Path], policies: list[str]) -> None:
    for path in paths:
        listed = Listed(open_trace(path))
        for policy in policies:
            sizes = sizes_of(listed, policy)
            both, alone = [], []
            for _ in range(PASSES):
                for rates, size in ((both, sizes), (alone, Sizes(sizes.dram_bytes, policy=policy))):
                    played = replay(listed, size)
                    rates.append(played.asked_blocks / played.cpu_s)
            key = f"{policy}_{name_of(path)}"
            report.add(
                f"accesses_per_s_dram_{key}",
                f"{policy}, {name_of(path)}: DRAM alone",
                statistics.median(alone),
                "block accesses/s",
                samples=alone,
            )
            report.add(
                f"accesses_per_s_{key}",
                f"{policy}, {name_of(path)}: DRAM and NVMe",
                statistics.median(both),
                "block accesses/s",
                samples=both,
            )
            report_calls(report, listed, sizes, policy, key)
    for policy in policies:
        measure_memory(report, policy)


def report_calls(report: Report, listed: Listed, sizes: Sizes, policy: str, key: str) -> None:
    """Microseconds of the policy's own calls, clock included; `clock_us` is what the clock takes of that.

    `inserted_run` is for each block of the run. `evicting`: what it takes to choose and give up a block, less the
    clock, all calls for that at their medians, since most blocks go in runs and cost a `follows` only.
    """
    samples: dict[str, array[int]] = defaultdict(lambda: array("q"))
    engine = Simulation(Sizes(sizes.dram_bytes, policy=policy), {1: listed.specs[1]}, policies=ALL)
    space = engine.cache.space
    (namespace,) = space.namespaces.values()
    namespace.table.policy = Timed(namespace.table.policy, samples)
    for request in listed:
        engine.play(request)
    clock = array("q")
    for _ in range(10_000):
        start_ns = perf_counter_ns()
        clock.append(perf_counter_ns() - start_ns)
    report.add(f"clock_us_{key}", f"{policy}: of each of these, the clock", statistics.median(clock) / 1000, "us")
    # Medians, since on a busy machine the sums contain other processes' time.
    evicting = [(len(samples[name]), statistics.median(samples[name])) for name in EVICTING if samples[name]]
    evicting_ns = sum(calls * (took_ns - statistics.median(clock)) for calls, took_ns in evicting)
    report.add(
        f"evicting_us_{key}",
        f"{policy}, {key.removeprefix(policy + '_')}: evicting, for each block",
        evicting_ns / 1000 / max(1, engine.tallies().dram_evicted),
        "us",
    )
    for name, its in sorted(samples.items()):
        if len(its) > 100:
            label = f"{policy}, {key.removeprefix(policy + '_')}: {name}()"
            times = [value / 1000 for value in its]
            report.add(f"{name}_us_{key}", label, statistics.median(times), "us", samples=times)


MEMORY_BLOCKS = 100_000


def measure_memory(report: Report, policy: str) -> None:
    """Bytes of an index full of single blocks, and its growth after as many more have passed through it."""

    def chain(number: int) -> TraceRequest:
        return TraceRequest(number / 1000, number.to_bytes(KEY_BYTES, "little"), 512)

    tracemalloc.start()
    trace = open_trace(SAMPLE)
    engine = Simulation(Sizes(MEMORY_BLOCKS * BLOCK_BYTES, policy=policy), {1: trace.specs[1]}, policies=ALL)
    before = tracemalloc.get_traced_memory()[0]
    for number in range(MEMORY_BLOCKS):
        engine.play(chain(number))
    full = tracemalloc.get_traced_memory()[0]
    for number in range(MEMORY_BLOCKS, 2 * MEMORY_BLOCKS):
        engine.play(chain(number))
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    here = (full - before) / MEMORY_BLOCKS
    report.add(f"bytes_per_block_{policy}", f"{policy}: per block that is here", here, "bytes")
    report.add(
        f"bytes_per_ghost_{policy}",
        f"{policy}: more, per block of as many that have left",
        max(0.0, (after - full) / MEMORY_BLOCKS),
        "bytes",
    )
