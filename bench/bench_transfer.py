"""How close loads and stores come to the memcpy of the process that makes them.

    python bench/bench_transfer.py

Three kinds of processes: this one, which keeps the times, a separate daemon for each case, and one
or two clients. A client loads and stores blocks of a pool by the public API; match, lease,
resolve, copy, release, reserve and commit all count. Between its rounds it measures its own memcpy:
the same pool blocks, in the same order and pieces, from and to shared memory of the same size as
the arena, as far from the caches as the frames of the arena are. Every store is of new keys; the
arena is full from the warm-up on, so every store evicts too.

Prints a table and one JSON object as the last line.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import ROOT, SEED, Daemon, PingWatch, Report, available_bytes, wait_populated

import tiercache
from tiercache.protocol.curve import make_client, make_server

MIB = 1 << 20
TOTAL_BUDGET_S = 80.0
"""No case begins after this."""
SETS = 5
"""The arena holds so many times what one round of all clients moves."""
ALONE_SETS = 16
"""As `SETS`, for a case of a single block."""
CLIENT_TIMEOUT_S = 60.0


class Case(NamedTuple):
    """One case: `rounds` times `blocks` of `block_bytes` each way, by `clients` at once."""

    name: str
    block_bytes: int
    blocks: int
    rounds: int
    clients: int = 1
    pool: str = "numpy"
    map_arena: bool = True
    order: str = "shuffled"
    """`shuffled`: pool blocks as an engine's free list gives them; `ascending`: neighbours."""
    remote: bool = False
    """Connect as a client on another host does: encrypted, by TCP; here over the loopback, on the same cores."""

    @property
    def sets(self) -> int:
        """Rounds after which an arena, or a ring, is full."""
        return SETS if self.blocks > 1 else ALONE_SETS

    @property
    def ring_bytes(self) -> int:
        """What all of these rounds move, one way, for one client."""
        return self.sets * self.blocks * self.block_bytes


CASES = (
    Case("2m", 2 * MIB, 64, 16),
    Case("torch_2m", 2 * MIB, 64, 16, pool="torch"),
    Case("128k", 128 << 10, 1024, 16),
    Case("128k_ascending", 128 << 10, 1024, 10, order="ascending"),
    Case("32m", 32 * MIB, 4, 16),
    Case("one", 2 * MIB, 1, 80),
    Case("two_clients_2m", 2 * MIB, 64, 12, clients=2),
    Case("payload_2m", 2 * MIB, 64, 5, map_arena=False),
    Case("tcp_2m", 2 * MIB, 64, 5, map_arena=False, remote=True),
)


# --- the client's process ------------------------------------------------------------------------


class Ring:
    """Shared memory like the arena's, for the memcpy to compare the cache with."""

    def __init__(self, sets: int, blocks: int, block_bytes: int) -> None:
        self._fd = os.memfd_create("bench")
        os.ftruncate(self._fd, sets * blocks * block_bytes)
        self._map = mmap.mmap(self._fd, sets * blocks * block_bytes)
        self.sets = np.frombuffer(self._map, np.uint8).reshape(sets, blocks, block_bytes)
        self.sets.fill(1)  # every page is there and mapped


class Worker:
    """One client: its pool, its connection, and one timed round after another."""

    def __init__(self, case: Case, address: str, number: int) -> None:
        self._case = case
        self._random = random.Random(SEED + number)
        count = case.blocks
        shape = (2 * count, case.block_bytes)
        pool: Any = np.ones(shape, np.uint8)
        if case.pool == "torch":
            import torch

            torch.set_num_threads(1)
            pool = torch.ones(shape, dtype=torch.uint8)
        self._pool = pool.numpy() if case.pool == "torch" else pool
        spec = tiercache.NamespaceSpec(
            engine="bench", layout="bytes", dtype="uint8", block_size=16, block_bytes=case.block_bytes
        )
        self._connector = tiercache.connect(
            address,
            namespace=spec,
            pool=tiercache.Pool.from_blocks(pool),
            name=f"bench-{number}",
            required=True,
            map_arena=case.map_arena,
            request_timeout_s=10.0,
        )
        ids = list(range(2 * count))
        if case.order == "shuffled":
            self._random.shuffle(ids)
        self._sources, self._targets = ids[:count], ids[count:]
        self._ring = Ring(case.sets, count, case.block_bytes)
        self._stored: list[tuple[bytes, int]] = []
        self._round = 0
        self._await_mapping()

    def _await_mapping(self) -> None:
        """Wait until this process has faulted in its mapping of the arena."""
        while any(thread.name == "tiercache-populate" for thread in threading.enumerate()):
            time.sleep(0.01)

    def steps(self) -> dict[str, Callable[[], float]]:
        """The steps of a round; each returns its seconds."""
        return {
            "copy_out": self._copy_out,
            "store": self._store,
            "copy_in": self._copy_in,
            "load": self._load,
        }

    def _copy_out(self) -> float:
        """memcpy as a store does it: pool blocks to shared memory."""
        target = self._ring.sets[self._round % len(self._ring.sets)]
        pool, sources = self._pool, self._sources
        start = time.perf_counter()
        for place, block in enumerate(sources):
            np.copyto(target[place], pool[block])
        return time.perf_counter() - start

    def _copy_in(self) -> float:
        """memcpy as a load does it: shared memory to pool blocks."""
        source = self._ring.sets[(self._round - 2) % len(self._ring.sets)]
        pool, targets = self._pool, self._targets
        start = time.perf_counter()
        for place, block in enumerate(targets):
            np.copyto(pool[block], source[place])
        return time.perf_counter() - start

    def _store(self) -> float:
        count, stamp = self._case.blocks, self._random.randrange(1, 1 << 32)
        for block in self._sources:
            self._pool[block, :8].view(np.uint64)[0] = stamp + block
            self._pool[block, -8:].view(np.uint64)[0] = stamp - block
        keys = self._random.randbytes(16 * count)
        start = time.perf_counter()
        result = self._connector.store(keys, self._sources)
        took = time.perf_counter() - start
        if result.stored != count:
            raise RuntimeError(f"{result} of {count} blocks: the cache did not keep what was stored")
        self._stored.append((keys, stamp))
        self._round += 1
        return took

    def _load(self) -> float:
        """Load what was stored two rounds ago."""
        keys, stamp = self._stored[-3]
        start = time.perf_counter()
        match = self._connector.match(keys)
        good = self._connector.load(match, self._targets)
        took = time.perf_counter() - start
        if good != self._case.blocks:
            raise RuntimeError(f"{match.blocks} blocks of {self._case.blocks} were found, {good} loaded")
        for source, target in zip(self._sources, self._targets, strict=True):
            first, last = (self._pool[target, at].view(np.uint64)[0] for at in (slice(8), slice(-8, None)))
            if first != stamp + source or last != stamp - source:
                raise RuntimeError(f"block {target} holds other bytes than were stored")
        return took

    def close(self) -> None:
        self._connector.close()


def client_main(argument: str) -> None:
    """A client: one step for each line of input, one line with its seconds for each step."""
    order = json.loads(argument)
    worker = Worker(Case(*order["case"]), order["address"], order["number"])
    steps = worker.steps()
    print("ready", flush=True)
    for line in sys.stdin:
        print(steps[line.strip()](), flush=True)
    worker.close()


# --- the process that keeps the books --------------------------------------------------------------


class ClientProcess:
    """A client in its own process."""

    def __init__(self, case: Case, address: str, number: int) -> None:
        order = json.dumps({"case": list(case), "address": address, "number": number})
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--client", order],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def say(self, word: str) -> None:
        """Begin a step."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        """The client's answer to its last step."""
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise RuntimeError("a client of the benchmark has failed")
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLIENT_TIMEOUT_S)
        finally:
            self._process.kill()


Times = dict[str, list[float]]


@contextmanager
def make_daemon(case: Case) -> Iterator[tuple[Daemon, str]]:
    """A daemon and its address."""
    arena = f"{case.ring_bytes * case.clients // MIB}MiB"
    if not case.remote:
        with Daemon(arena) as daemon:
            yield daemon, daemon.directory
        return
    with tempfile.TemporaryDirectory(prefix="tiercache-bench-keys-") as folder:
        keys, mine = Path(folder) / "keys", Path(folder) / "mine.toml"
        make_server(keys)
        make_client(keys, "bench", mine)
        with closing(socket.create_server(("127.0.0.1", 0))) as taken:
            endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with Daemon(arena, listen=endpoint, curve_keys=str(keys)) as daemon:
            yield daemon, f"{endpoint}?key={mine}"


def run_case(case: Case) -> tuple[list[Times], float]:
    """Seconds of each step in each round, for each client; and the worst ping meanwhile, in ms."""
    with make_daemon(case) as (daemon, address):
        with daemon.connect() as client:
            wait_populated(client)
        clients = [ClientProcess(case, address, number) for number in range(case.clients)]
        try:
            for process in clients:
                process.hear()
            with PingWatch(daemon.directory) as pings:
                # The arena is filled first, so that every later store evicts and every frame is mapped.
                for _ in range(case.sets + 2):
                    _together(clients, ["store", "copy_out"])
                _together(clients, ["load", "copy_in"])
                rounds = [_together(clients, _steps(number)) for number in range(case.rounds)]
            return [_columns(rounds, number) for number in range(case.clients)], pings.worst_ms
        finally:
            for process in clients:
                process.close()


def _together(clients: list[ClientProcess], steps: list[str]) -> dict[str, list[float]]:
    """Have all clients do each step at once; the seconds that each client took."""
    times = {}
    for step in steps:
        for process in clients:
            process.say(step)
        times[step] = [float(process.hear()) for process in clients]
    return times


def _columns(rounds: list[dict[str, list[float]]], client: int) -> Times:
    return {step: [times[step][client] for times in rounds] for step in rounds[0]}


def _steps(number: int) -> list[str]:
    """The order of one round: the cache goes first in every other one."""
    if number % 2:
        return ["store", "copy_out", "load", "copy_in"]
    return ["copy_out", "store", "copy_in", "load"]


def ratios(times: Times, step: str, reference: str) -> list[float]:
    """Speed relative to memcpy, round by round: the two were measured within milliseconds of each other."""
    return [copy / own for copy, own in zip(times[reference], times[step], strict=True)]


TARGETS: dict[str, tuple[float, float]] = {
    "2m": (0.93, 0.90),
    "torch_2m": (0.90, 0.90),
    "128k": (0.85, 0.80),
    "32m": (0.93, 0.90),
}
LABELS = {
    "2m": "2 MiB blocks",
    "torch_2m": "2 MiB blocks, torch",
    "128k": "128 KiB blocks",
    "128k_ascending": "128 KiB, neighbours",
    "32m": "32 MiB blocks",
    "two_clients_2m": "2 MiB, two clients",
    "payload_2m": "2 MiB, payload frames",
    "tcp_2m": "2 MiB, TCP, encrypted",
}


def report_case(report: Report, case: Case, all_times: list[Times]) -> None:
    """Add the figures of one case; of several clients the slowest counts."""
    if case.name == "one":
        _report_one(report, all_times[0])
        return
    goals = TARGETS.get(case.name, (None, None))
    moved = case.blocks * case.block_bytes * case.clients
    key = {"torch_2m": "{}_torch_over_memcpy_2m"}.get(case.name, "")
    if not key:
        before, _, size = case.name.rpartition("_") if case.name != "128k_ascending" else ("", "", case.name)
        key = (f"{before}_" if before else "") + "{}_over_memcpy_" + size
    for step, reference, goal in (("load", "copy_in", goals[0]), ("store", "copy_out", goals[1])):
        samples = min((ratios(times, step, reference) for times in all_times), key=statistics.median)
        label = f"{step} over memcpy, {LABELS[case.name]}"
        median = statistics.median(samples)
        report.add(key.format(step), label, median, at_least=goal, samples=samples)
    for step in ("copy_in", "load", "store"):
        seconds = max(statistics.median(times[step]) for times in all_times)
        name = {"copy_in": "memcpy"}.get(step, step)
        report.add(f"{name}_gb_s_{case.name}", f"  {name}, {LABELS[case.name]}", moved / seconds / 1e9, "GB/s")


def _report_one(report: Report, times: Times) -> None:
    """One block alone: what it costs over its copy, in microseconds."""
    for step, reference, goal in (("load", "copy_in", 200.0), ("store", "copy_out", 350.0)):
        over = [own - copy for own, copy in zip(times[step], times[reference], strict=True)]
        samples = [seconds * 1e6 for seconds in over]
        label = f"one 2 MiB block, {step} over memcpy"
        median = statistics.median(samples)
        report.add(f"{step}_one_overhead_us", label, median, "µs", at_most=goal, samples=samples)
    alone = statistics.median(times["copy_in"]) * 1e6
    report.add("memcpy_one_us", "  memcpy of one 2 MiB block", alone, "µs")


def report_remote(report: Report, local: Times, remote: Times) -> None:
    """Speed of a client on another host, relative to one that maps the arena; of different daemons, in one run."""
    for step in ("load", "store"):
        shared_s = statistics.median(local[step])
        samples = [shared_s / seconds for seconds in remote[step]]
        report.add(
            f"{step}_tcp_over_shared_2m",
            f"{step} by TCP over shared memory, 2 MiB",
            statistics.median(samples),
            samples=samples,
        )


def main() -> None:
    """Run all cases that fit into memory and time."""
    start_s = time.perf_counter()
    report = Report("bench_transfer")
    worst_ms = 0.0
    by_name: dict[str, Times] = {}
    names = sys.argv[1:] or [case.name for case in CASES]
    for case in (case for case in CASES if case.name in names):
        needed = case.clients * 2 * (case.ring_bytes + case.blocks * case.block_bytes)
        if case.pool == "torch" and not _importable("torch"):
            report.note(f"{case.name} left out: torch is not installed")
        elif needed > available_bytes() // 2:
            report.note(f"{case.name} left out: it takes {needed / MIB:.0f} MiB of memory")
        elif time.perf_counter() - start_s > TOTAL_BUDGET_S:
            report.note(f"{case.name} left out: no time left")
        else:
            times, worst = run_case(case)
            worst_ms = max(worst_ms, worst)
            report_case(report, case, times)
            by_name[case.name] = times[0]
    if {"2m", "tcp_2m"} <= by_name.keys():
        report_remote(report, by_name["2m"], by_name["tcp_2m"])
    report.add("worst_ping_ms", "worst ping meanwhile", worst_ms, "ms", at_most=100.0)
    report.finish()


def _importable(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        sys.path.insert(0, str(Path(__file__).parent))
        client_main(sys.argv[2])
    else:
        main()
