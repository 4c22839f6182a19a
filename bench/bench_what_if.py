"""How close the daemon's estimate for other cache sizes comes to a full simulation, and what it costs.

    TIERCACHE_TRACES=traces .venv/bin/python bench/bench_what_if.py       # all traces in a directory
    .venv/bin/python bench/bench_what_if.py                               # a made-up one alone

Each trace is played into LRU caches of 1, 2, 5, 10 and 20% of its different blocks, every block simulated, and into the
estimate, with its own bounds and with keys of several seeds: each seed is another sample. An error is the difference of
two hit rates in points, the worst one of all sizes. Prints a table for each trace, then figures and a line of JSON.

What it costs a daemon is measured on two of them, one with the estimate and one without, which take turns at the
transfers of bench_transfer.py: new chains stored and loaded as fast as one client can.
"""

from __future__ import annotations

import statistics
import time
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from common import SEED, Report
from traces import Request, asked_blocks, block_keys, lru_hits, made_up_trace, read_trace, trace_files, unique_blocks

import tiercache
from tiercache.daemon.ground.counters import Counters
from tiercache.daemon.observe import reuse
from tiercache.daemon.observe.reuse import WhatIf
from tiercache.daemon.observe.reuse_curve import WINDOW_S
from tiercache.daemon.policies import Policies
from tiercache.daemon.tiers.dram.space import Namespace, Space
from tiercache.protocol.messages import KEY_BYTES
from tiercache.protocol.namespaces import NamespaceSpec

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2)
SEEDS = 5
BLOCK_BYTES = 65536
SPEC = NamespaceSpec(engine="bench/1", layout="x", dtype="uint8", block_size=512, block_bytes=BLOCK_BYTES)
AT_MOST_POINTS = 2.0
TURNS = 20
ROUNDS = 30


class Estimate(NamedTuple):
    """Hit rates by size, the samples that they come from, and CPU time."""

    hit_rates: list[float]
    samples: int
    rate: float
    cpu_us_per_request: float


def namespace() -> Namespace:
    return Space(Policies("lru", time.monotonic), Counters()).open_namespace(SPEC)


def estimate(trace: list[Request], sizes: list[int], seed: int) -> Estimate:
    """The daemon's estimate after the trace, for a daemon with the middle one of `sizes` (in blocks)."""
    now_s = trace[0].time_s
    # The estimate tracks what 8 times the DRAM has: with this DRAM it tracks more than the largest size here.
    what_if = WhatIf(lambda: now_s, sizes[-1] * BLOCK_BYTES)
    keys_of, space, took_s = block_keys(seed), namespace(), 0.0
    for request in trace:
        now_s = request.time_s
        keys = keys_of(request.blocks)
        start_s = time.thread_time()
        what_if.looked_up([space], keys, 0, 0)
        what_if.stored(space, b"", keys)
        took_s += time.thread_time() - start_s
    findings = what_if.stack.check_integrity()
    if findings:
        raise RuntimeError(f"the sample contradicts itself: {findings}")
    rates = what_if.lookups.hit_rates([size * BLOCK_BYTES for size in sizes])
    stats = what_if.stats()
    return Estimate(rates, stats["sampled_blocks"], stats["sample_rate"], took_s / len(trace) * 1e6)


def compare(report: Report, name: str, trace: list[Request]) -> float:
    """Print the table of one trace; returns the worst error in points."""
    asked, unique = sum(asked_blocks(trace)), unique_blocks(trace)
    sizes = [max(1, int(unique * share)) for share in SHARES]
    full = [lru_hits(trace, size) / asked for size in sizes]
    found = [estimate(trace, sizes, seed) for seed in range(SEEDS)]
    errors = [[abs(rate - true) * 100 for rate, true in zip(one.hit_rates, full, strict=True)] for one in found]
    print(
        f"\n{name}: {len(trace):,} requests, {asked:,} blocks, {unique:,} different ones; "
        f"rate 1/{1 / found[0].rate:.0f}, {found[0].samples:,} samples"
    )
    print(f"{'size':>6} {'simulated':>10} {'estimated':>10} {'worst error of ' + str(SEEDS):>18}")
    for at, share in enumerate(SHARES):
        worst = max(one[at] for one in errors)
        print(f"{share:6.0%} {full[at]:10.1%} {found[0].hit_rates[at]:10.1%} {worst:11.2f} points")
    worst_of = [max(one) for one in errors]
    report.add(
        f"{name}_points", f"{name}: worst error of {SEEDS} samples", max(worst_of), "points", at_most=AT_MOST_POINTS
    )
    cpu = [one.cpu_us_per_request for one in found]
    report.add(f"{name}_cpu_us", "  CPU for a look-up and a store", statistics.median(cpu), "us", samples=cpu)
    return max(worst_of)


def daemon_cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process, to the nanosecond (proc(5), schedstat)."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def cost_to_a_daemon(report: Report, key: str, blocks: int, block_bytes: int) -> None:
    """The estimate's share of a daemon's CPU time while chains of `blocks` blocks come and go."""
    spec = msgspec.structs.replace(SPEC, block_bytes=block_bytes)
    pool = np.ones((blocks, block_bytes), np.uint8)
    places, fresh = list(range(blocks)), count()

    def rounds(connector: tiercache.Connector) -> None:
        for _ in range(ROUNDS):
            chain = tiercache.KeyChain(tiercache.root_key(f"bench {next(fresh)}"), 1)
            chain.extend(range(blocks + 1))
            keys = chain.packed()[: blocks * KEY_BYTES]
            if connector.match(keys).blocks or connector.store(keys, places).stored != blocks:
                raise RuntimeError("a new chain was not new, or was not stored")
            if connector.load(connector.match(keys), places) != blocks:
                raise RuntimeError("a chain that was stored just now could not be loaded")

    with tiercache.launch("512MiB", what_if="yes") as on, tiercache.launch("512MiB", what_if="no") as off:
        sides = [
            (
                daemon,
                tiercache.connect(
                    daemon.address,
                    namespace=spec,
                    required=True,
                    request_timeout_s=10.0,
                    pool=tiercache.Pool.from_blocks(pool),
                ),
            )
            for daemon in (on, off)
        ]
        took: list[list[float]] = [[], []]
        for turn in range(TURNS):
            for side in (0, 1) if turn % 2 else (1, 0):
                before_s = daemon_cpu_s(sides[side][0].pid)
                rounds(sides[side][1])
                took[side].append((daemon_cpu_s(sides[side][0].pid) - before_s) / ROUNDS / blocks * 1e6)
        stats = sides[0][1].stats()["daemon"]["what_if"]
        for _, connector in sides:
            connector.close()
    more = (sum(took[0]) / sum(took[1]) - 1) * 100  # of all turns: the rate of the sample falls from turn to turn
    ratios = [(with_it / without - 1) * 100 for with_it, without in zip(*took, strict=True)]
    label = f"{blocks} blocks of {block_bytes >> 10} KiB: CPU of the daemon"
    report.add(f"{key}_percent", label + " more", more, "%", at_most=2.0, samples=ratios)
    report.add(f"{key}_us", "  without, for a block", statistics.median(took[1]), "us", samples=took[1])
    report.add(f"{key}_rate", "  rate of the sample at the end, one in", 1 / stats["sample_rate"], "blocks")


def main() -> None:
    report = Report("bench_what_if")
    cost_to_a_daemon(report, "cpu_2m", 64, 2 << 20)
    cost_to_a_daemon(report, "cpu_128k", 1024, 128 << 10)
    traces: list[tuple[str, list[Request]]] = [("made_up", made_up_trace(SEED))]
    traces += [(Path(path.name.removesuffix(".gz")).stem, read_trace(path)) for path in trace_files()]
    worst = [compare(report, name, trace) for name, trace in traces]
    report.add("worst_points", "worst error of all", max(worst), "points", at_most=AT_MOST_POINTS)
    report.note(
        f"at most {reuse.MAX_SAMPLES} samples, {reuse.MAX_SAMPLES_PER_REQUEST} of a request, "
        f"{reuse.MAX_SAMPLES_PER_S} a second in {reuse.MAX_REQUESTS_PER_S} requests; "
        f"window {WINDOW_S / 3600:.0f} h"
    )
    if len(traces) == 1:
        report.note("TIERCACHE_TRACES names no traces: the made-up one only")
    report.finish()


if __name__ == "__main__":
    main()
