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
import itertools
import json
import os
import random
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import ROOT, SEED, Daemon, Report, available_bytes, percentile, wait_populated
from disk_limit import MIB, DiskLimit, fio_gb_s

import tiercache

DATA_BYTES = 1 << 30
TOTAL_BUDGET_S = 90.0
"""No round begins after this."""
DEADLINE_S = 60.0
POLL_S = 0.008
PING_PAUSE_S = 0.001
COPY_BLOCKS = 64


class Case(NamedTuple):
    """What is stored and loaded in a round; `nvme_bytes` bounds the directory."""

    name: str
    label: str
    block_bytes: int
    rounds: int
    nvme_bytes: int
    keep: bool = False
    """Whether older rounds stay: then the directory is full from the warm-up on, and every write evicts."""

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


# --- the client's process ------------------------------------------------------------------------


class Worker:
    """One client: a pool as large as a round's data, and the steps of a round."""

    def __init__(self, block_bytes: int, blocks: int, address: str) -> None:
        self._block_bytes = block_bytes
        self._blocks = blocks
        self._random = random.Random(SEED + os.getpid())
        self._pool = np.frombuffer(self._random.randbytes(block_bytes * 8), np.uint8)
        self._pool = np.tile(self._pool.reshape(8, block_bytes), (blocks // 8, 1))
        spec = tiercache.NamespaceSpec(
            engine="bench", layout="bytes", dtype="uint8", block_size=16, block_bytes=block_bytes
        )
        self._connector = tiercache.connect(
            address,
            namespace=spec,
            pool=tiercache.Pool.from_blocks(self._pool),
            name="bench",
            required=True,
            request_timeout_s=10.0,
        )
        self._keys = b""
        self._stamp = 0
        self._ids = list(range(blocks))
        self._random.shuffle(self._ids)
        self._await_mapping()

    def _await_mapping(self) -> None:
        """Until this process has faulted in its mapping of the arena."""
        while any(thread.name == "tiercache-populate" for thread in threading.enumerate()):
            time.sleep(0.01)

    def _nvme(self) -> dict[str, Any]:
        stats: dict[str, Any] = self._connector.client.stats()["tiers"]["nvme"]
        return stats

    def _stamps(self) -> np.ndarray[Any, Any]:
        """The first and last word of each block, in the order of the chain."""
        words = self._pool.view(np.uint64)
        return words[self._ids][:, [0, -1]]

    def renew(self) -> dict[str, float]:
        """New content under new keys."""
        self._stamp = self._random.randrange(1, 1 << 62)
        words = self._pool.view(np.uint64)
        for number, block in enumerate(self._ids):
            words[block, 0] = words[block, -1] = self._stamp + number
        self._keys = self._random.randbytes(16 * self._blocks)
        return {}

    def store(self) -> dict[str, float]:
        """Store all blocks; returns when they are in DRAM."""
        result = self._connector.store(self._keys, self._ids)
        if result.stored != self._blocks:
            raise RuntimeError(f"{result} of {self._blocks} blocks")
        return {}

    def write(self) -> dict[str, float]:
        """Store, and wait until everything is on the disk."""
        before = self._nvme()["written_blocks"]
        start = time.perf_counter()
        cpu = time.process_time()
        self.store()
        stored_s = time.perf_counter() - start
        end = start + DEADLINE_S
        while (stats := self._nvme())["written_blocks"] < before + self._blocks:
            idle = stats["write_queue_blocks"] == 0 and stats["write_in_flight_bytes"] == 0
            if time.perf_counter() > end or (idle and self._nvme()["written_blocks"] < before + self._blocks):
                raise RuntimeError(f"not all blocks were written: {stats}")
            time.sleep(POLL_S)
        return {
            "seconds": time.perf_counter() - start,
            "cpu_s": time.process_time() - cpu,
            "stored_s": stored_s,
        }

    def read(self) -> dict[str, float]:
        """Forget DRAM, then load everything back; every block is compared (outside of the timing)."""
        self._connector.flush(tier="dram")
        self._pool.view(np.uint64)[:, [0, -1]] = 0
        before = self._nvme()
        start, cpu = time.perf_counter(), time.process_time()
        match = self._connector.match(self._keys)
        matched_s = time.perf_counter() - start
        good = self._connector.load(match, self._ids, timeout_s=DEADLINE_S)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        if good != self._blocks or match.below_blocks != self._blocks:
            raise RuntimeError(f"{match} of {self._blocks} blocks, {good} loaded: {self._nvme()}")
        wanted = self._stamp + np.arange(self._blocks, dtype=np.uint64)
        if not (self._stamps() == wanted[:, None]).all():
            raise RuntimeError("blocks hold other bytes than were stored")
        after = self._nvme()
        if after["promoted_blocks"] - before["promoted_blocks"] != self._blocks:
            raise RuntimeError("blocks came from elsewhere than the disk")
        rewritten = after["written_bytes"] - before["written_bytes"]
        rewritten += after["write_in_flight_bytes"] + after["write_queue_blocks"] * self._block_bytes
        return {"seconds": seconds, "cpu_s": cpu, "matched_s": matched_s, "rewritten": float(rewritten)}

    def prefetch(self) -> dict[str, float]:
        """Bring everything up from the disk without copying any of it."""
        self._connector.flush(tier="dram")
        before = self._nvme()["promoted_blocks"]
        start = time.perf_counter()
        self._connector.prefetch(self._keys)
        while self._nvme()["promoted_blocks"] < before + self._blocks:
            if time.perf_counter() > start + DEADLINE_S:
                raise RuntimeError(f"not all blocks came up: {self._nvme()}")
            time.sleep(10 * POLL_S)
        return {"seconds": time.perf_counter() - start}

    def copy(self) -> dict[str, float]:
        """The CPU time of copying a round's data once, as loads and stores do."""
        other = np.ones((64, self._block_bytes), np.uint8)
        cpu = time.process_time()
        for number, block in enumerate(self._ids):
            np.copyto(other[number % 64], self._pool[block])
        return {"cpu_s": time.process_time() - cpu}

    def again(self) -> dict[str, float]:
        """Load from DRAM, over and over, until another line comes."""
        self.renew()
        self.store()
        print("copying", flush=True)
        loads = 0
        while not select.select([sys.stdin], [], [], 0)[0]:
            loads += self._connector.load(self._connector.match(self._keys), self._ids) == self._blocks
        return {"loads": loads}

    def forget(self) -> dict[str, float]:
        """Forget everything in all tiers; returns when the slots are free again."""
        self._connector.flush()
        end = time.perf_counter() + DEADLINE_S
        while self._nvme()["bytes"]:
            if time.perf_counter() > end:
                raise RuntimeError(f"slots did not come free: {self._nvme()}")
            time.sleep(POLL_S)
        return {}

    def close(self) -> None:
        """Say good-bye."""
        self._connector.close()


class Pinger:
    """Pings the daemon that is measured and an idle one, every millisecond or so, until another line comes."""

    def __init__(self, address: str, idle: str) -> None:
        from tiercache.client import Client

        self._clients = {
            name: Client.connect(where, name="ping", map_arena=False, request_timeout_s=10.0)
            for name, where in (("busy", address), ("idle", idle))
        }

    def ping(self) -> dict[str, Any]:
        """Round trips in ms."""
        trips: dict[str, list[float]] = {name: [] for name in self._clients}
        turns = itertools.cycle(self._clients.items())
        while not select.select([sys.stdin], [], [], PING_PAUSE_S)[0]:
            name, client = next(turns)
            trips[name].append(client.ping() * 1000)
        return trips

    def close(self) -> None:
        """Say good-bye."""
        for client in self._clients.values():
            client.close()


def child_main(argument: str) -> None:
    """A child: one step for each line of input, one line of JSON for each step."""
    order = json.loads(argument)
    worker: Worker | Pinger
    if order["kind"] == "ping":
        worker = Pinger(order["address"], order["idle"])
    else:
        worker = Worker(order["block_bytes"], order["blocks"], order["address"])
    print("{}", flush=True)
    while line := sys.stdin.readline().strip():
        if line != "stop":
            print(json.dumps(getattr(worker, line)()), flush=True)
    worker.close()


# --- the process that keeps the books --------------------------------------------------------------


class Child:
    """A process that does as it is told. Its first answer is awaited."""

    def __init__(self, kind: str, address: str, block_bytes: int = 0, blocks: int = 0, idle: str = "") -> None:
        order = json.dumps(
            {"kind": kind, "address": address, "block_bytes": block_bytes, "blocks": blocks, "idle": idle}
        )
        self._process = subprocess.Popen(
            [sys.executable, "-u", __file__, "--child", order],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.pid = self._process.pid
        self.hear()

    def say(self, word: str) -> None:
        """Begin a step."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def line(self) -> str:
        """One line of output."""
        assert self._process.stdout is not None
        text = self._process.stdout.readline().strip()
        if not text:
            raise RuntimeError("a process of the benchmark has failed")
        return text

    def hear(self) -> dict[str, Any]:
        """The answer to the last step."""
        answer: dict[str, Any] = json.loads(self.line())
        return answer

    def ask(self, word: str) -> dict[str, Any]:
        """One step."""
        self.say(word)
        return self.hear()

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(DEADLINE_S)
        finally:
            self._process.kill()


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
    """A daemon with one directory that is empty."""
    shutil.rmtree(where / name, ignore_errors=True)
    arena = (DATA_BYTES + 2 * COPY_BLOCKS * case.block_bytes) // MIB + 2
    daemon = Daemon(
        f"{arena}MiB", nvme=str(where / name), nvme_size=f"{case.nvme_bytes // MIB}MiB", nvme_segment="512MiB",
        **settings,
    )  # fmt: skip
    with daemon.connect() as client:
        wait_populated(client)
        deadline = time.perf_counter() + DEADLINE_S
        while not (directories := client.stats()["tiers"]["nvme"]["directories"]):
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
    """While the disk is busy: with nobody else about, and with a client that copies."""
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
    """Add what is asked of all cases together."""
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
    if sys.argv[1:2] == ["--child"]:
        sys.path.insert(0, str(Path(__file__).parent))
        child_main(sys.argv[2])
    else:
        main()
