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
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from common import SEED, Report
from policies import ALL
from policy_costs import add_costs, measure_speed
from policy_promises import DEFAULT, DIVISORS, Promise, Rates, of_cost, of_means, on_small_workloads, on_traces
from policy_runs import BLOCK_BYTES, NVME_TIMES, SAMPLE, Faster, name_of, open_trace, replay
from traces import trace_files

from tiercache.replay.optimum import Accesses
from tiercache.replay.simulation import Sizes

PERCENTS = (1.0, 2.0, 5.0, 10.0, 20.0)
MEAN_PERCENTS = (1.0, 2.0, 5.0)
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
        """The daemon's setting for that limit; its token bucket starts full."""
        return int(writes_per_block * self.asked_blocks * BLOCK_BYTES / (DEPTH_S + self.seconds) * DAY_S)


class PolicyReport(Report):
    """The JSON with every cell."""

    cells: list[dict[str, Any]]
    promises: list[dict[str, Any]]

    def _as_json(self) -> dict[str, Any]:
        return {**super()._as_json(), "cells": self.cells, "promises": self.promises}


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
    tight: bool,
    budget: float = 0.0,
    divisor: float = 1.0,
) -> Cell:
    """One replay, with all times divided by a factor. Runs in its own process."""
    blocks, min_dram, min_total = best.hits[percent]
    headroom_bytes = 0 if tight else best.longest * BLOCK_BYTES
    sizes = Sizes(
        blocks * BLOCK_BYTES + headroom_bytes,
        blocks * NVME_TIMES * BLOCK_BYTES,
        policy=policy,
        headroom_bytes=headroom_bytes,
        nvme_write_budget_bytes=best.budget_bytes_per_day(budget),
    )
    played = replay(Faster(open_trace(path), divisor), sizes)
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
    tight: bool,
) -> list[Cell]:
    """All cells, printed trace by trace as they come."""
    cells: list[Cell] = []
    with ProcessPoolExecutor(jobs) as pool:
        bests = [pool.submit(best_of, path, percents) for path in paths]
        for path, future in zip(paths, bests, strict=True):
            best = future.result()
            jobs_of = [
                pool.submit(one_cell, path, percent, policy, best, tight, budget)
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
    report: Report, paths: list[Path], cells: list[Cell], percents: tuple[float, ...], jobs: int, tight: bool
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
    return rows + of_cost(add_costs(report, paths))


def print_promises(rows: list[Promise]) -> None:
    print("\npromises")
    for row in rows:
        bound = f"{'>=' if row.least else '<='} {row.bound:g}"
        print(f"{row.name:20} {row.what:75.75} {row.value:9.4f} {bound:>8}  {'pass' if row.kept else 'FAIL'}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", action="append", choices=sorted(ALL), help="default: all")
    parser.add_argument("--only", default="", help="traces whose name contains this")
    parser.add_argument("--percent", type=float, action="append", help="sizes of DRAM, default: 1 2 5 10 20")
    parser.add_argument("--budget", type=float, action="append", help="writes to NVMe for each block asked for, too")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--tight", action="store_true", help="without room beside DRAM for the request at hand")
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
        cells = compare(paths, policies, percents, budgets, options.jobs, options.tight)
        add_means(report, cells, policies)
        add_budgets(report, cells, policies, budgets)
        report.cells = [
            {**cell._asdict(), "share_dram": cell.share_dram, "share_total": cell.share_total} for cell in cells
        ]
        if options.promises:
            rows = check_promises(report, paths, cells, percents, options.jobs, options.tight)
            print_promises(rows)
            report.promises = [{**row._asdict(), "pass": row.kept} for row in rows]
        report.cells = json.loads(json.dumps(report.cells), parse_float=lambda text: round(float(text), 5))
    report.note(f"hit rates by full blocks; NVMe {NVME_TIMES} times DRAM; seed {SEED} is not used: nothing is random")
    report.finish()


if __name__ == "__main__":
    main()
