"""How close the NVMe tier comes to its disk, and what that costs.

    python bench/bench_nvme.py [--dir DIR] [--rounds N] [--workers W] [--io IO] [--sealed] [case ...]

A client process stores blocks through the public API; the clock stops when the daemon says that all
of them are on the disk. Then DRAM is flushed, and the clock runs again while the client loads them
back into its pool: match, promotion, checksum, copy, release. Right before and right after each pass
the disk itself is measured with a plain loop of as many threads (`disk_limit.py`), since shared disks drift;
a pass is held against the mean of those two. Every block is compared at both ends.

CPU time is that of the daemon, its worker processes and the client besides its copy; the daemon's own share, its
workers' and that of its loop's thread (for each block) are told as well. What the benchmark's own requests for
statistics cost is taken off: they ask whether all is written.

`--workers off|on|both` and `--io threads|aio|both` choose what does the I/O (`nvme_workers`, `nvme_io`); with `both`,
daemons of each kind take turns, so that their figures can be compared. Without them the daemon chooses. Figures of
others than the daemon's own threads have `_workers`, `_threads` or `_aio` at the end of their keys.

The cases `two_...` compare two directories on the same disk with one: sixteen chains, which are read all at once. Those
of `two_head_...` have their first sixteen blocks in common, as prompts of one service do. The case `room` stores short
chains with one beginning in one directory and in two of the same size, twice what they hold, and counts how many are
left: `room_two_over_one`.

In a further phase the disk is kept busy while a process of its own pings the daemon, and in turn with it a second
one that has nothing to do: what that one's pings take is the machine's, the rest is ours.

With --sealed a second daemon, whose blocks are encrypted (`nvme_key`), takes turns with the first: the ratios say what
that costs.

Files lie in a directory of their own below --dir, $TMPDIR, or the checkout's parent, and are removed at the end: 1 GiB,
and 2.6 GiB for each daemon that takes turns. Prints a table and one JSON object as the last line, from which
`four_drives.py` calculates what a host with four drives would get.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

from common import ROOT, Daemon, Report, available_bytes, percentile
from disk_limit import MIB, DiskLimit, fio_gb_s
from nvme_rigs import (
    CHAINS_OF_SEVERAL,
    DATA_BYTES,
    HEAD,
    Carrier,
    Case,
    Rig,
    Round,
    carriers,
    make_daemon,
    make_key_file,
    medians,
    paired_ratios,
    take_turns,
)
from nvme_worker import COPY_BLOCKS, Child

from tiercache.daemon.tiers.nvme.moves.placement import COPIED_SHARE

TOTAL_BUDGET_S = 90.0
"""For each carrier: no round begins after this."""

CASES = (
    Case("2m", "2 MiB", 2 * MIB, 5, 2600 * MIB),
    Case("512k", "512 KiB", 512 << 10, 3, 2600 * MIB),
    Case("128k", "128 KiB", 128 << 10, 5, 2600 * MIB),
    Case("full_2m", "2 MiB, full directory", 2 * MIB, 2, 1560 * MIB, keep=True),
    Case("full_128k", "128 KiB, full directory", 128 << 10, 3, 1560 * MIB, keep=True),
)
TWO_CASES = (
    Case("two_2m", "2 MiB, two directories", 2 * MIB, 3, 2600 * MIB, chains=CHAINS_OF_SEVERAL),
    Case("two_128k", "128 KiB, two directories", 128 << 10, 3, 2600 * MIB, chains=CHAINS_OF_SEVERAL),
    Case("two_head_2m", "2 MiB, one beginning", 2 * MIB, 3, 2600 * MIB, chains=CHAINS_OF_SEVERAL, head=HEAD),
    Case("two_head_128k", "128 KiB, one beginning", 128 << 10, 3, 2600 * MIB, chains=CHAINS_OF_SEVERAL, head=HEAD),
)
ROOM_CASE = Case("room", "room for chains with one beginning", 128 << 10, 1, 512 * MIB, chains=511, head=HEAD)
ROOM_SETTINGS = {"nvme_segment": "32MiB"}


class Targets(NamedTuple):
    """Of a case; None where there is none."""

    write: float | None = None
    read: float | None = None
    cpu_s_per_gb: float | None = None
    own_cpu_s_per_gb: float | None = None
    """With workers."""


TARGETS = {
    "2m": Targets(0.95, 0.95, 0.25, 0.06),
    "128k": Targets(0.75, 0.90, 0.5, 0.2),
    "full_128k": Targets(write=0.5),
}
LOOP_US_PER_BLOCK = 12.0
TWO_OVER_ONE = 1.0
ROOM_TWO_OVER_ONE = 1.8
PING_OVER_IDLE = 1.15


# --- rounds ---------------------------------------------------------------------------------------


def run_case(
    case: Case, where: Path, disk: DiskLimit, kinds: Sequence[Carrier], end_s: float
) -> dict[Carrier, tuple[list[Round], list[Round]]]:
    """Write and read passes of each carrier, by turns."""
    with ExitStack() as stack:
        rigs = {its: Rig(stack, where, case, f"nvme{its.suffix}", its.settings) for its in kinds}
        take_turns(list(rigs.values()), case.rounds, disk, end_s)
    return {its: (rig.writes, rig.reads) for its, rig in rigs.items()}


def run_two(report: Report, case: Case, where: Path, disk: DiskLimit, kinds: Sequence[Carrier], end_s: float) -> None:
    """One directory and two on the same disk, by turns, one carrier after another."""
    for its in kinds:
        with ExitStack() as stack:
            one, two = (Rig(stack, where, case, f"nvme-of-{count}", its.settings, count) for count in (1, 2))
            take_turns([one, two], case.rounds, disk, end_s)
        report_case(report, case, its, two.writes, two.reads)
        for step, over, under in (("write", two.writes, one.writes), ("read", two.reads, one.reads)):
            ratios = paired_ratios(over, under)
            report.add(
                f"{step}_two_over_one_{case.name.removeprefix('two_')}{its.suffix}",
                f"{step}, two directories over one, {case.label.partition(',')[0]}{its.label}",
                statistics.median(ratios),
                at_least=TWO_OVER_ONE,
                samples=ratios,
            )


def run_room(report: Report, where: Path) -> None:
    """How many chains with one beginning two directories keep, and how many one of them."""
    case, found = ROOM_CASE, dict[int, dict[str, float]]()
    for count in (1, 2):
        sized = case._replace(nvme_bytes=count * case.nvme_bytes)
        with make_daemon(where, sized, f"nvme-room-{count}", {}, count) as daemon:
            client = Child(
                "client", daemon.directory, case.block_bytes, case.blocks, chains=case.chains, head=case.head
            )
            with closing(client):
                found[count] = client.ask("fill")
    ratio = found[2]["found"] / found[1]["found"]
    report.add("room_two_over_one", f"{case.label}, two directories over one", ratio, at_least=ROOM_TWO_OVER_ONE)
    for count, its in found.items():
        report.add(f"room_chains_{count}", f"  chains that {count} kept of {its['stored']:.0f}", its["found"], "")
    report.add("room_copied_share", "  of all bytes written, copies", found[2]["copied"], at_most=1 / COPIED_SHARE)


def run_sealed(report: Report, case: Case, where: Path, disk: DiskLimit, its: Carrier) -> None:
    """Rounds of a daemon that writes blocks as they are, and of one that encrypts them, in turn."""
    key = str(make_key_file(where / f"key-{case.name}{its.suffix}"))
    settings: dict[str, Mapping[str, str]] = {"plain": its.settings, "sealed": {**its.settings, "nvme_key": key}}
    with ExitStack() as stack:
        rigs = {name: Rig(stack, where, case, f"nvme-{name}", some) for name, some in settings.items()}
        take_turns(list(rigs.values()), case.rounds, disk, float("inf"))
    for step in ("write", "read"):
        passes = {name: rig.writes if step == "write" else rig.reads for name, rig in rigs.items()}
        ratios = paired_ratios(passes["sealed"], passes["plain"])
        label = f"{step}, encrypted over plain, {case.label}{its.label}"
        key_of = f"{step}_sealed_over_plain_{case.name}{its.suffix}"
        report.add(key_of, label, statistics.median(ratios), samples=ratios)
        for name, rounds in passes.items():
            add_median(report, f"gb_s_{step}_{name}_{case.name}{its.suffix}", f"  {name}", rounds, "gb_s", "GB/s")
            key_of = f"cpu_s_per_gb_{step}_{name}_{case.name}{its.suffix}"
            add_median(report, key_of, "    CPU", rounds, "cpu_s_per_gb", "s/GB")


# --- pings ----------------------------------------------------------------------------------------

Trips = dict[str, list[float]]
"""Round trips in ms, of the `busy` daemon and the `idle` one."""


def run_pings(case: Case, where: Path, rounds: int, its: Carrier) -> tuple[Trips, Trips]:
    """Pings while the disk is busy: without other clients, and with a client that copies."""
    alone: Trips = {"busy": [], "idle": []}
    beside: Trips = {"busy": [], "idle": []}
    with make_daemon(where, case, "nvme-pings", its.settings) as daemon, Daemon("64MiB") as idle:
        idle.connect().close()
        client = Child("client", daemon.directory, case.block_bytes, case.blocks)
        copier = Child("client", daemon.directory, case.block_bytes, COPY_BLOCKS)
        pinger = Child("ping", daemon.directory, idle=idle.directory)
        try:
            for number in range(2 * rounds):
                client.ask("renew")
                client.ask("forget")
                if number % 2:
                    copier.say("again")
                    copier.line()
                trips = beside if number % 2 else alone
                for step in ("write", "prefetch"):
                    pinger.say("ping")
                    client.ask(step)
                    pinger.say("stop")
                    for name, more in pinger.hear().items():
                        trips[name] += more
                if number % 2:
                    copier.say("stop")
                    copier.hear()
        finally:
            for child in (client, copier, pinger):
                child.close()
    return alone, beside


def report_pings(
    report: Report, key: str, label: str, trips: Trips, goal_ms: float, its: Carrier, over_idle: float | None = None
) -> None:
    """Add the figures of one load; `over_idle`: the target for the ratio to the idle daemon's."""
    busy, idle = (percentile(trips[name], 0.99) for name in ("busy", "idle"))
    end = its.suffix
    report.add(key + end, label + its.label, busy, "ms", at_most=goal_ms)
    p50 = statistics.median(trips["busy"])
    report.add(key.replace("p99", "p50") + end, f"  p50 of {len(trips['busy'])}", p50, "ms")
    report.add(key.replace("p99", "worst") + end, "  worst", max(trips["busy"]), "ms")
    report.add(f"{key}_idle{end}", "  p99 of a daemon that is idle meanwhile", idle, "ms")
    report.add(f"{key}_over_idle{end}", "  over that one's", busy / idle, at_most=over_idle)


# --- report ---------------------------------------------------------------------------------------


def add_median(
    report: Report, key: str, label: str, rounds: Sequence[Round], name: str, unit: str, at_most: float | None = None
) -> None:
    """Add the median of an attribute of rounds."""
    median, values = medians(rounds, name)
    report.add(key, label, median, unit, at_most=at_most, samples=values)


def report_case(report: Report, case: Case, its: Carrier, writes: Sequence[Round], reads: Sequence[Round]) -> None:
    """Add the figures of one case."""
    goals = TARGETS.get(case.name, Targets())
    workers = any(one.cpu.workers_s for one in writes)
    for step, rounds, goal in (("write", writes, goals.write), ("read", reads, goals.read)):
        if not rounds:
            continue
        end = f"{step}_{case.name}{its.suffix}"
        median, ratios = medians(rounds, "ratio")
        key = f"{step}_over_device_{case.name}{its.suffix}"
        label = f"{step} over the disk's limit, {case.label}{its.label}"
        report.add(key, label, median, at_least=goal, samples=ratios)
        add_median(report, f"{step}_gb_s_{case.name}{its.suffix}", "  that is", rounds, "gb_s", "GB/s")
        add_median(report, f"disk_{step}_gb_s_{case.name}{its.suffix}", "  of the disk's", rounds, "disk_gb_s", "GB/s")
        label = "  CPU besides the client's copy"
        add_median(report, f"cpu_s_per_gb_{end}", label, rounds, "cpu_s_per_gb", "s/GB", goals.cpu_s_per_gb)
        own = goals.own_cpu_s_per_gb if workers else None
        add_median(report, f"own_cpu_s_per_gb_{end}", "  the daemon's own", rounds, "own_cpu_s_per_gb", "s/GB", own)
        if workers:
            label = "  its workers'"
            add_median(report, f"worker_cpu_s_per_gb_{end}", label, rounds, "worker_cpu_s_per_gb", "s/GB")
        label = "  the loop, for each block"
        add_median(report, f"loop_us_per_block_{end}", label, rounds, "loop_us_per_block", "us", LOOP_US_PER_BLOCK)


def report_rewrites(report: Report, reads: Sequence[Round]) -> None:
    """Add what was written while blocks were read, in all cases together."""
    if reads:
        rewritten = max(one.answer["rewritten"] for one in reads)
        report.add("rewrite_bytes_on_read", "bytes written while reading", rewritten, "B", at_most=0)


def run_all(report: Report, where: Path, wanted: Sequence[str], kinds: Sequence[Carrier], rounds: int | None) -> None:
    """The cases that are wanted, one after another."""
    end_s = time.perf_counter() + TOTAL_BUDGET_S * len(kinds)
    disk = DiskLimit(where / "plain", DATA_BYTES)
    all_reads: list[Round] = []
    for case in (case._replace(rounds=rounds or case.rounds) for case in CASES if case.name in wanted):
        for its, (writes, reads) in run_case(case, where, disk, kinds, end_s).items():
            report_case(report, case, its, writes, reads)
            all_reads += reads
    for case in (case._replace(rounds=rounds or case.rounds) for case in TWO_CASES if case.name in wanted):
        run_two(report, case, where, disk, kinds, end_s)
    if ROOM_CASE.name in wanted:
        run_room(report, where)
    for direction in ("write", "read"):
        fio = fio_gb_s(where / "plain", DATA_BYTES, 2 * MIB, direction)
        if fio is not None:
            report.add(f"fio_{direction}_gb_s_2m", f"fio, {direction}, 2 MiB", fio, "GB/s")
    disk.close()
    report_rewrites(report, all_reads)
    for its in kinds if "pings" in wanted else ():
        alone, beside = run_pings(CASES[0], where, rounds or 3, its)
        report_pings(report, "ping_p99_ms_disk_busy", "ping p99, disk busy", alone, 2.0, its, PING_OVER_IDLE)
        label = "ping p99, disk busy, a client copies"
        report_pings(report, "ping_p99_ms_disk_busy_copying", label, beside, 5.0, its)


def all_sealed(
    report: Report, where: Path, wanted: Sequence[str], kinds: Sequence[Carrier], rounds: int | None
) -> None:
    """Encrypted blocks beside plain ones, in the cases that are wanted."""
    disk = DiskLimit(where / "plain", DATA_BYTES)
    for case in (case for case in CASES if case.name in wanted):
        for its in kinds:
            run_sealed(report, case._replace(rounds=rounds or case.rounds, keep=False), where, disk, its)
    disk.close()


def main() -> None:
    """All cases, one after another."""
    names = [case.name for case in (*CASES, *TWO_CASES, ROOM_CASE)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, help="a directory on the disk to measure")
    parser.add_argument("--rounds", type=int, help="rounds of each case")
    parser.add_argument("--workers", choices=("off", "on", "both"), default="", help="a process for each directory")
    parser.add_argument("--io", choices=("threads", "aio", "both"), default="", help="what carries I/O in a process")
    parser.add_argument("--sealed", action="store_true", help="compare with encrypted blocks, and nothing else")
    parser.add_argument("cases", nargs="*", help=f"{', '.join(names)}, pings; default: all")
    options = parser.parse_args()
    if unknown := set(options.cases) - {*names, "pings"}:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    kinds = carriers(options.workers, options.io)
    needed = (2 * max(2, len(kinds)) + 1) * DATA_BYTES
    if available_bytes() < needed:
        sys.exit(f"this takes {needed >> 30} GiB of memory")
    report = Report("bench_nvme")
    base = options.dir or Path(os.environ.get("TMPDIR", ROOT.parent))
    where = Path(tempfile.mkdtemp(prefix="tiercache-bench-nvme-", dir=base))
    run = all_sealed if options.sealed else run_all
    try:
        run(report, where, options.cases or [*names, "pings"], kinds, options.rounds)
    finally:
        shutil.rmtree(where, ignore_errors=True)
    report.finish()


if __name__ == "__main__":
    main()
