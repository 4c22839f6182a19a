"""How much of the best possible each eviction policy gets, and what it costs: the daemon's, and those in `policies/`.

    TIERCACHE_TRACES=traces .venv/bin/python bench/bench_policies.py               # every policy
    .venv/bin/python bench/bench_policies.py --policy lru --jobs 2 --only claude   # one, on traces of that name
    .venv/bin/python bench/bench_policies.py --speed

Each trace (JSON lines as Mooncake's; without TIERCACHE_TRACES a small sample) is played by `tiercache.replay` on caches
whose DRAM has 1, 2, 5, 10 and 20% of its different blocks and whose NVMe has five times that. Hit rates are shares of
full blocks. MIN is the offline optimum of a cache as large as DRAM, and of one as large as both tiers; a share is a
policy's hits over MIN's. MIN knows no room for what is on its way, so DRAM gets headroom for the longest request beside
its size (the daemon's setting `headroom`); `--tight` leaves that out. The means are over the cells of 1, 2 and 5%.

`--budget W` plays each cell once more with a write budget by which at most W blocks can be written to NVMe for each
block asked for (the daemon's setting `nvme_write_budget`, of which two hours' worth are there from the start), and
says which share of both tiers' hits that costs.

`--promises` checks what holds for every policy and for the default one, on these traces at three paces and on small
workloads, and prints a row for each: see `policy_promises.py`.

`--speed`: block accesses a second of a whole replay, microseconds per block that a policy is told of or evicts, and
bytes per block that is here and per one that is remembered only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tracemalloc
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

from common import ROOT, SEED, Report
from policies import ALL
from policy_promises import DEFAULT, DIVISORS, Promise, Rates, of_cost, of_means, on_small_workloads, on_traces
from traces import trace_files

from tiercache.protocol.messages import KEY_BYTES
from tiercache.protocol.namespaces import NamespaceSpec
from tiercache.replay.fast_cache import FastCache
from tiercache.replay.formats.mooncake import Mooncake
from tiercache.replay.formats.trace import Trace
from tiercache.replay.optimum import Accesses
from tiercache.replay.played import Played, Requests, engine_for, play
from tiercache.replay.requests import Request
from tiercache.replay.simulation import Sizes

PERCENTS = (1.0, 2.0, 5.0, 10.0, 20.0)
MEAN_PERCENTS = (1.0, 2.0, 5.0)
NVME_TIMES = 5
BLOCK_BYTES = 64 << 20
"""Bytes of 512 tokens of an 8B model; the NVMe tier keeps one such block free ahead."""
SAMPLE = ROOT / "tests" / "replay" / "sample.jsonl.gz"
SPEED_PERCENT = 5.0
PASSES = 3
EVICTING = ("victim", "follows", "replaced", "evicted")
DEPTH_S = 7_200.0
DAY_S = 86_400.0


class Cell(NamedTuple):
    """One trace on one size of cache with one policy; rates and MIN's in shares of full blocks."""

    trace: str
    percent: float
    policy: str
    dram_blocks: int
    dram: float
    total: float
    min_dram: float
    min_total: float
    nvme_writes: float
    accesses_per_s: float
    budget: float = 0.0
    """Writes for each block asked for; 0 for no limit."""

    @property
    def name(self) -> str:
        return f"{self.policy}@{self.budget:g}" if self.budget else self.policy

    @property
    def share_dram(self) -> float:
        return self.dram / self.min_dram if self.min_dram else 1.0

    @property
    def share_total(self) -> float:
        return self.total / self.min_total if self.min_total else 1.0


class Best(NamedTuple):
    """MIN for one trace: unique and asked blocks, and by percent DRAM's blocks and the hits for DRAM and for both."""

    unique_blocks: int
    asked_blocks: int
    hits: dict[float, tuple[int, int, int]]
    longest: int
    seconds: float

    def budget_bytes_per_day(self, writes_per_block: float) -> int:
        """The daemon's setting for that limit; its bucket is full at first."""
        return int(writes_per_block * self.asked_blocks * BLOCK_BYTES / (DEPTH_S + self.seconds) * DAY_S)


class PolicyReport(Report):
    """With every cell in the JSON."""

    cells: list[dict[str, Any]]
    promises: list[dict[str, Any]]

    def _as_json(self) -> dict[str, Any]:
        return {**super()._as_json(), "cells": self.cells, "promises": self.promises}


def open_trace(path: Path) -> Trace:
    return Trace(path, [Mooncake()], lambda tokens: BLOCK_BYTES)


class Faster:
    """A trace with its times divided."""

    def __init__(self, trace: Trace, divisor: float) -> None:
        self._trace = trace
        self._divisor = divisor

    @property
    def specs(self) -> Mapping[int, NamespaceSpec]:
        return self._trace.specs

    def __iter__(self) -> Iterator[Request]:
        return (request._replace(time_s=request.time_s / self._divisor) for request in self._trace)


def replay(requests: Requests, sizes: Sizes, exact: bool = False) -> Played:
    """`play`, with any of the policies compared."""
    start_s = next(iter(requests)).time_s
    return play(requests, sizes, engine=engine_for(sizes, exact, start_s, ALL))


def name_of(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl")


def best_of(path: Path, percents: tuple[float, ...]) -> Best:
    """MIN at each size. Runs in its own process."""
    accesses = Accesses(open_trace(path))
    hits = {}
    for percent in percents:
        blocks = max(1, round(accesses.unique_blocks * percent / 100))
        both = accesses.best_hits(blocks * (1 + NVME_TIMES))
        hits[percent] = blocks, accesses.best_hits(blocks), both
    times_s = [request.time_s for request in open_trace(path)]
    return Best(accesses.unique_blocks, accesses.asked_blocks, hits, accesses.longest, max(times_s) - min(times_s))


def one_cell(
    path: Path,
    percent: float,
    policy: str,
    best: Best,
    exact: bool,
    tight: bool,
    budget: float = 0.0,
    divisor: float = 1.0,
) -> Cell:
    """One replay, with times divided by that. Runs in its own process."""
    blocks, min_dram, min_total = best.hits[percent]
    headroom_bytes = 0 if tight else best.longest * BLOCK_BYTES
    sizes = Sizes(
        blocks * BLOCK_BYTES + headroom_bytes,
        blocks * NVME_TIMES * BLOCK_BYTES,
        policy=policy,
        headroom_bytes=headroom_bytes,
        nvme_write_budget_bytes=best.budget_bytes_per_day(budget),
    )
    played = replay(Faster(open_trace(path), divisor), sizes, exact=exact)
    asked = max(1, best.asked_blocks)
    return Cell(
        name_of(path),
        percent,
        policy,
        blocks,
        played.block_rate("dram"),
        played.block_rate("dram", "nvme"),
        min_dram / asked,
        min_total / asked,
        played.tallies.nvme_written / asked,
        asked / played.cpu_s,
        budget,
    )


def compare(
    paths: list[Path],
    policies: list[str],
    percents: tuple[float, ...],
    budgets: list[float],
    jobs: int,
    exact: bool,
    tight: bool,
) -> list[Cell]:
    """All cells, printed trace by trace as they come."""
    cells: list[Cell] = []
    with ProcessPoolExecutor(jobs) as pool:
        bests = [pool.submit(best_of, path, percents) for path in paths]
        for path, future in zip(paths, bests, strict=True):
            best = future.result()
            jobs_of = [
                pool.submit(one_cell, path, percent, policy, best, exact, tight, budget)
                for percent in percents
                for policy in policies
                for budget in [0.0, *budgets]
            ]
            its = [job.result() for job in jobs_of]
            cells += its
            print_trace(its, best)
    return cells


def print_trace(cells: list[Cell], best: Best) -> None:
    print(f"\n{cells[0].trace}: {best.asked_blocks} full blocks asked for, {best.unique_blocks} different ones")
    print(
        f"{'size':>5} {'blocks':>7}  {'policy':12} {'DRAM %':>7} {'of MIN':>7} {'share':>6}"
        f" {'both %':>7} {'of MIN':>7} {'share':>6} {'writes':>7} {'k/s':>6}"
    )
    for cell in cells:
        print(
            f"{cell.percent:4g}% {cell.dram_blocks:7d}  {cell.name:12}"
            f" {100 * cell.dram:7.2f} {100 * cell.min_dram:7.2f} {cell.share_dram:6.3f}"
            f" {100 * cell.total:7.2f} {100 * cell.min_total:7.2f} {cell.share_total:6.3f}"
            f" {cell.nvme_writes:7.3f} {cell.accesses_per_s / 1000:6.0f}"
        )
    sys.stdout.flush()


def add_means(report: Report, cells: list[Cell], policies: list[str]) -> None:
    for policy in policies:
        end = "" if len(policies) == 1 else f"_{policy}"
        its = [cell for cell in cells if cell.name == policy and cell.percent in MEAN_PERCENTS]
        for key, shares in (("dram", [cell.share_dram for cell in its]), ("total", [cell.share_total for cell in its])):
            if shares:
                label = f"{policy}: share of MIN's hits, {'DRAM' if key == 'dram' else 'DRAM and NVMe'}"
                report.add(f"mean_share_of_min_{key}{end}", label, statistics.fmean(shares), samples=shares)


def add_budgets(report: Report, cells: list[Cell], policies: list[str], budgets: list[float]) -> None:
    """The share of both tiers' hits, and of writes, that is left under each budget."""
    unlimited = {(cell.trace, cell.percent, cell.policy): cell for cell in cells if not cell.budget}
    for policy in policies:
        for budget in budgets:
            pairs = [
                (cell, unlimited[cell.trace, cell.percent, policy])
                for cell in cells
                if (cell.policy, cell.budget) == (policy, budget)
            ]
            losses = [1.0 - cell.total / free.total for cell, free in pairs if free.total]
            written = [cell.nvme_writes for cell, _ in pairs]
            key, label = f"{policy}_{budget:g}", f"{policy}, at most {budget:g} writes for a block"
            lost = statistics.fmean(losses)
            report.add(f"lost_hits_{key}", f"{label}: share of both tiers' hits lost", lost, samples=losses)
            report.add(f"writes_{key}", f"{label}: writes for a block", statistics.fmean(written), samples=written)


# --- promises ------------------------------------------------------------------------------------


def rates_of(cells: list[Cell], policy: str) -> Rates:
    its = [cell for cell in cells if cell.policy == policy and not cell.budget]
    return {(cell.trace, cell.percent): (cell.dram, cell.total) for cell in its}


def check_promises(
    paths: list[Path], cells: list[Cell], percents: tuple[float, ...], jobs: int, tight: bool
) -> list[Promise]:
    """See `policy_promises`; those of cells that were not played are left out."""
    rows = on_small_workloads()
    at_pace = {1.0: rates_of(cells, DEFAULT)}
    if at_pace[1.0]:
        with ProcessPoolExecutor(jobs) as pool:
            bests = dict(zip(paths, pool.map(best_of, paths, [percents] * len(paths)), strict=True))
            for divisor in DIVISORS[1:]:
                its = [
                    pool.submit(one_cell, path, percent, DEFAULT, bests[path], False, tight, 0.0, divisor)
                    for path in paths
                    for percent in percents
                ]
                at_pace[divisor] = rates_of([job.result() for job in its], DEFAULT)
        rows += on_traces(at_pace, rates_of(cells, "lru"))
    means = [cell for cell in cells if cell.name == DEFAULT and cell.percent in MEAN_PERCENTS]
    if len({cell.percent for cell in means}) == len(MEAN_PERCENTS):
        dram, both = ([getattr(cell, f"share_{tier}") for cell in means] for tier in ("dram", "total"))
        rows += of_means(statistics.fmean(dram), statistics.fmean(both))
    return rows + of_cost(cost_us(Listed(open_trace(paths[0]))))


def cost_us(listed: Listed) -> float:
    """CPU of the default policy for a block that comes and goes, beyond that of lru: whole replays of DRAM alone."""
    took_s, moved = {}, 1
    for policy in (DEFAULT, "lru"):
        size = Sizes(sizes_of(listed, policy).dram_bytes, policy=policy)
        plays = [replay(listed, size) for _ in range(PASSES)]
        took_s[policy] = min(played.cpu_s for played in plays)
        moved = max(1, plays[0].tallies.dram_evicted)
    return 1e6 * (took_s[DEFAULT] - took_s["lru"]) / moved


def print_promises(rows: list[Promise]) -> None:
    print("\npromises")
    for row in rows:
        bound = f"{'>=' if row.least else '<='} {row.bound:g}"
        print(f"{row.name:20} {row.what:75.75} {row.value:9.4f} {bound:>8}  {'pass' if row.kept else 'FAIL'}")
    sys.stdout.flush()


# --- speed ---------------------------------------------------------------------------------------


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


class Listed:
    """A trace in memory, so that reading it is not measured."""

    def __init__(self, trace: Trace) -> None:
        self._requests = list(trace)
        self.specs = trace.specs

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


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
    engine = FastCache(Sizes(sizes.dram_bytes, policy=policy), policies=ALL)
    engine.declare(1, listed.specs[1])
    engine._dram.policy = engine._dram.table.policy = Timed(engine._dram.policy, samples)
    for request in listed:
        engine.play(request)
    clock = array("q")
    for _ in range(10_000):
        start_ns = perf_counter_ns()
        clock.append(perf_counter_ns() - start_ns)
    report.add(f"clock_us_{key}", f"{policy}: of each of these, the clock", statistics.median(clock) / 1000, "us")
    # By medians: on a busy machine the sums are those of what came between.
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
    """Bytes of an index full of single blocks, and what it has grown by when as many have passed through it."""

    def chain(number: int) -> Request:
        return Request(number / 1000, number.to_bytes(KEY_BYTES, "little"), 512)

    tracemalloc.start()
    engine = FastCache(Sizes(MEMORY_BLOCKS * BLOCK_BYTES, policy=policy), policies=ALL)
    trace = open_trace(SAMPLE)
    engine.declare(1, trace.specs[1])
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", action="append", choices=sorted(ALL), help="default: all")
    parser.add_argument("--only", default="", help="traces whose name contains this")
    parser.add_argument("--percent", type=float, action="append", help="sizes of DRAM, default: 1 2 5 10 20")
    parser.add_argument("--budget", type=float, action="append", help="writes to NVMe for each block asked for, too")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--tight", action="store_true", help="without room beside DRAM for the request at hand")
    parser.add_argument("--exact", action="store_true", help="on the whole of the daemon's cache, much slower")
    parser.add_argument("--promises", action="store_true", help="check what the policies promise, too")
    parser.add_argument("--speed", action="store_true", help="measure what policies cost instead")
    options = parser.parse_args()
    paths = [path for path in trace_files() or [SAMPLE] if options.only in path.name]
    if not paths:
        sys.exit(f"no trace in TIERCACHE_TRACES has {options.only!r} in its name")
    policies = options.policy or list(ALL)
    report = PolicyReport("policies")
    report.cells, report.promises = [], []
    if options.speed:
        measure_speed(report, paths, policies)
    else:
        budgets = options.budget or []
        percents = tuple(options.percent or PERCENTS)
        cells = compare(paths, policies, percents, budgets, options.jobs, options.exact, options.tight)
        add_means(report, cells, policies)
        add_budgets(report, cells, policies, budgets)
        report.cells = [
            {**cell._asdict(), "share_dram": cell.share_dram, "share_total": cell.share_total} for cell in cells
        ]
        if options.promises:
            rows = check_promises(paths, cells, percents, options.jobs, options.tight)
            print_promises(rows)
            report.promises = [{**row._asdict(), "pass": row.kept} for row in rows]
        report.cells = json.loads(json.dumps(report.cells), parse_float=lambda text: round(float(text), 5))
    report.note(f"hit rates by full blocks; NVMe {NVME_TIMES} times DRAM; seed {SEED} is not used: nothing is random")
    report.finish()


if __name__ == "__main__":
    main()
