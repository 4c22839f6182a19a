"""How close the NVMe tier comes to its disk, and what that costs.

    python bench/bench_nvme.py [--dir DIR] [--rounds N] [--sealed] [case ...]

A client process stores blocks through the public API; the clock stops when the daemon says that all
of them are on the disk. Then DRAM is flushed, and the clock runs again while the client loads them
back into its pool: match, promotion, checksum, copy, release. Right before and right after each pass
the disk itself is measured with a plain loop of as many threads (`disk_limit.py`), since shared disks drift;
a pass is held against the mean of those two. Every block is compared at both ends.

In a further phase the disk is kept busy while a process of its own pings the daemon, and in turn with it a second
one that has nothing to do: what that one's pings take is the machine's, the rest is ours.

With --sealed a second daemon, whose blocks are encrypted (`nvme_key`), takes turns with the first: the ratios say what
that costs.

Files lie in a directory of their own below --dir, $TMPDIR, or the checkout's parent, at most 4 GiB, and are
removed at the end. Prints a table and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT, Daemon, Report, available_bytes, percentile, wait_populated
from disk_limit import MIB, DiskLimit, fio_gb_s
from nvme_worker import COPY_BLOCKS, DEADLINE_S, Child

DATA_BYTES = 1 << 30
TOTAL_BUDGET_S = 90.0
"""No round begins after this."""


class Case(NamedTuple):
    """The data stored and loaded in a round; `nvme_bytes` bounds the directory."""

    name: str
    label: str
    block_bytes: int
    rounds: int
    nvme_bytes: int
    keep: bool = False
    """Whether the blocks of older rounds stay: then the directory is full after the warm-up, and every write evicts."""

    @property
    def blocks(self) -> int:
        return DATA_BYTES // self.block_bytes


CASES = (
    Case("2m", "2 MiB", 2 * MIB, 5, 2600 * MIB),
    Case("128k", "128 KiB", 128 << 10, 5, 2600 * MIB),
    Case("full_2m", "2 MiB, full directory", 2 * MIB, 2, 1560 * MIB, keep=True),
    Case("full_128k", "128 KiB, full directory", 128 << 10, 3, 1560 * MIB, keep=True),
)
TARGETS = {"2m": 0.90, "128k": 0.70}


# --- rounds ---------------------------------------------------------------------------------------


def exact_cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, by its clock (Linux numbers these after the process)."""
    return time.clock_gettime((~pid << 3) | 2)


class Round(NamedTuple):
    """One pass: GB/s of the tier and of the disk around it, CPU seconds for each GB besides the client's copy."""

    gb_s: float
    disk_gb_s: float
    cpu_s_per_gb: float
    answer: dict[str, Any]

    @property
    def ratio(self) -> float:
        return self.gb_s / self.disk_gb_s


def measured(step: str, client: Child, daemon: Daemon, disk: DiskLimit, block_bytes: int, copy_cpu_s: float) -> Round:
    """One pass of the tier between two of the disk."""
    plain = disk.write_gb_s if step == "write" else disk.read_gb_s
    before = plain(block_bytes)
    daemon_cpu = exact_cpu_s(daemon.pid)
    answer = client.ask(step)
    cpu = exact_cpu_s(daemon.pid) - daemon_cpu + answer["cpu_s"] - copy_cpu_s
    limit = (before + plain(block_bytes)) / 2
    return Round(DATA_BYTES / answer["seconds"] / 1e9, limit, cpu / (DATA_BYTES / 1e9), answer)


def make_daemon(where: Path, case: Case, name: str = "nvme", **settings: str) -> Daemon:
    """A daemon with one empty directory."""
    shutil.rmtree(where / name, ignore_errors=True)
    arena = (DATA_BYTES + 2 * COPY_BLOCKS * case.block_bytes) // MIB + 2
    daemon = Daemon(
        f"{arena}MiB",
        nvme=str(where / name),
        nvme_size=f"{case.nvme_bytes // MIB}MiB",
        nvme_segment="512MiB",
        **settings,
    )
    with daemon.connect() as client:
        wait_populated(client)
        deadline = time.perf_counter() + DEADLINE_S
        while (directories := client.stats()["tiers"]["nvme"]["directories"])[0]["state"] != "ok":
            if time.perf_counter() > deadline:
                raise RuntimeError("the directory does not open")
            time.sleep(0.01)
        if not directories[0]["direct"]:
            raise RuntimeError("this file system refuses O_DIRECT: choose another one with --dir")
    return daemon


def run_case(case: Case, where: Path, disk: DiskLimit, end_s: float) -> tuple[list[Round], list[Round]]:
    """Write and read passes of all rounds."""
    writes, reads = [], []
    with make_daemon(where, case) as daemon:
        client = Child("client", daemon.directory, case.block_bytes, case.blocks)
        try:
            for word in ("renew", "write", "read"):  # the first writes into a segment cost more
                client.ask(word)
            if case.keep:
                for word in ("renew", "write"):
                    client.ask(word)
            copy = min(client.ask("copy")["cpu_s"] for _ in range(2))
            for number in range(case.rounds):
                if time.perf_counter() > end_s and number > 1:
                    break
                if not case.keep:
                    client.ask("forget")
                client.ask("renew")
                writes.append(measured("write", client, daemon, disk, case.block_bytes, copy))
                if not case.keep:
                    reads.append(measured("read", client, daemon, disk, case.block_bytes, copy))
        finally:
            client.close()
    return writes, reads


def run_sealed(report: Report, case: Case, where: Path, disk: DiskLimit) -> None:
    """Rounds of a daemon that writes blocks as they are, and of one that encrypts them, in turn."""
    key = where / "key"
    key.touch(mode=0o600)
    key.write_text(os.urandom(32).hex())
    passes: dict[str, tuple[list[Round], list[Round]]] = {"plain": ([], []), "sealed": ([], [])}
    with ExitStack() as stack:
        clients = {}
        for name, settings in (("plain", {}), ("sealed", {"nvme_key": str(key)})):
            daemon = stack.enter_context(make_daemon(where, case, f"nvme-{name}", **settings))
            client = stack.enter_context(closing(Child("client", daemon.directory, case.block_bytes, case.blocks)))
            for word in ("renew", "write", "read"):
                client.ask(word)
            clients[name] = daemon, client, min(client.ask("copy")["cpu_s"] for _ in range(2))
        for number in range(case.rounds):
            for name in ("plain", "sealed") if number % 2 else ("sealed", "plain"):
                daemon, client, copy = clients[name]
                client.ask("forget")
                client.ask("renew")
                for step, rounds in zip(("write", "read"), passes[name], strict=True):
                    rounds.append(measured(step, client, daemon, disk, case.block_bytes, copy))
    for at, step in enumerate(("write", "read")):
        plain, sealed = passes["plain"][at], passes["sealed"][at]
        ratios = [other.gb_s / one.gb_s for one, other in zip(plain, sealed, strict=True)]
        label = f"{step}, encrypted over plain, {case.label}"
        report.add(f"{step}_sealed_over_plain_{case.name}", label, statistics.median(ratios), samples=ratios)
        for name, rounds in (("plain", plain), ("sealed", sealed)):
            speeds, costs = [one.gb_s for one in rounds], [one.cpu_s_per_gb for one in rounds]
            key_of = f"{step}_{name}_{case.name}"
            report.add(f"gb_s_{key_of}", f"  {name}", statistics.median(speeds), "GB/s", samples=speeds)
            report.add(f"cpu_s_per_gb_{key_of}", "    CPU", statistics.median(costs), "s/GB", samples=costs)


Trips = dict[str, list[float]]
"""Round trips in ms, of the `busy` daemon and the `idle` one."""


def run_pings(case: Case, where: Path, rounds: int) -> tuple[Trips, Trips]:
    """Pings while the disk is busy: without other clients, and with a client that copies."""
    alone: Trips = {"busy": [], "idle": []}
    beside: Trips = {"busy": [], "idle": []}
    with make_daemon(where, case) as daemon, Daemon("64MiB") as idle:
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


def report_pings(report: Report, key: str, label: str, trips: Trips, goal_ms: float) -> None:
    """Add the figures of one load."""
    busy, idle = (percentile(trips[name], 0.99) for name in ("busy", "idle"))
    report.add(key, label, busy, "ms", at_most=goal_ms)
    report.add(key.replace("p99", "p50"), f"  p50 of {len(trips['busy'])}", statistics.median(trips["busy"]), "ms")
    report.add(key.replace("p99", "worst"), "  worst", max(trips["busy"]), "ms")
    report.add(f"{key}_idle", "  p99 of a daemon that is idle meanwhile", idle, "ms")
    report.add(f"{key}_over_idle", "  over that one's", busy / idle)


def report_case(report: Report, case: Case, writes: list[Round], reads: list[Round]) -> None:
    """Add the figures of one case."""
    for step, rounds in (("write", writes), ("read", reads)):
        if not rounds:
            continue
        ratios = [one.ratio for one in rounds]
        report.add(
            f"{step}_over_device_{case.name}",
            f"{step} over the disk's limit, {case.label}",
            statistics.median(ratios),
            at_least=TARGETS.get(case.name),
            samples=ratios,
        )
        speeds = [one.gb_s for one in rounds]
        report.add(f"{step}_gb_s_{case.name}", "  that is", statistics.median(speeds), "GB/s", samples=speeds)
        limits = [one.disk_gb_s for one in rounds]
        disk = statistics.median(limits)
        report.add(f"disk_{step}_gb_s_{case.name}", "  of the disk's", disk, "GB/s", samples=limits)
        costs = [one.cpu_s_per_gb for one in rounds]
        report.add(
            f"cpu_s_per_gb_{step}_{case.name}",
            "  CPU besides the client's copy",
            statistics.median(costs),
            "s/GB",
            samples=costs,
        )


def report_summary(report: Report, by_case: dict[str, tuple[list[Round], list[Round]]]) -> None:
    """Add the targets for all cases together."""
    rewritten = [one.answer["rewritten"] for _, reads in by_case.values() for one in reads]
    if rewritten:
        report.add("rewrite_bytes_on_read", "bytes written while reading", max(rewritten), "B", at_most=0)
    if "2m" in by_case:
        writes, reads = by_case["2m"]
        costs = [statistics.median(one.cpu_s_per_gb for one in rounds) for rounds in (writes, reads)]
        report.add("cpu_s_per_gb", "CPU, 2 MiB, the dearer way", max(costs), "s/GB", at_most=0.25)


def main() -> None:
    """All cases, one daemon after another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, help="a directory on the disk to measure")
    parser.add_argument("--rounds", type=int, help="rounds of each case")
    parser.add_argument("--sealed", action="store_true", help="compare with encrypted blocks, and nothing else")
    parser.add_argument("cases", nargs="*", help=f"{', '.join(case.name for case in CASES)}, pings; default: all")
    options = parser.parse_args()
    start_s = time.perf_counter()
    if available_bytes() < 5 * DATA_BYTES:
        sys.exit(f"this takes {5 * DATA_BYTES >> 30} GiB of memory")
    report = Report("bench_nvme")
    base = options.dir or Path(os.environ.get("TMPDIR", ROOT.parent))
    where = Path(tempfile.mkdtemp(prefix="tiercache-bench-nvme-", dir=base))
    wanted = options.cases or [*(case.name for case in CASES), "pings"]
    by_case = {}
    try:
        disk = DiskLimit(where / "plain", DATA_BYTES)
        for case in (case for case in CASES if case.name in wanted):
            case = case._replace(rounds=options.rounds or case.rounds)
            if options.sealed:
                run_sealed(report, case._replace(keep=False), where, disk)
                continue
            by_case[case.name] = run_case(case, where, disk, start_s + TOTAL_BUDGET_S)
            report_case(report, case, *by_case[case.name])
        for direction in () if options.sealed else ("write", "read"):
            fio = fio_gb_s(where / "plain", DATA_BYTES, 2 * MIB, direction)
            if fio is not None:
                report.add(f"fio_{direction}_gb_s_2m", f"fio, {direction}, 2 MiB", fio, "GB/s")
        disk.close()
        report_summary(report, by_case)
        if "pings" in wanted and not options.sealed:
            alone, beside = run_pings(CASES[0], where, options.rounds or 3)
            report_pings(report, "ping_p99_ms_disk_busy", "ping p99, disk busy", alone, 2.0)
            report_pings(report, "ping_p99_ms_disk_busy_copying", "ping p99, disk busy, a client copies", beside, 5.0)
    finally:
        shutil.rmtree(where, ignore_errors=True)
    report.finish()


if __name__ == "__main__":
    main()
