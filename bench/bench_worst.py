"""How long one client can hold up all others: the worst request of each kind, while another process pings.

    python bench/bench_worst.py [CASE ...] [--blocks N] [--with SETTING=VALUE ...] [--list]

Each case asks a real daemon with a full index for the most that a request may name (keys, namespaces, leases), or for
what leaves the most work behind (a flush, the end of a session). Two figures for each:

    ping     the longest round trip of another process meanwhile, that pings every 2 ms. On a shared machine a part of
             it is waiting for a core: compare it with the first line, where nothing is asked.
    held     the longest time that the daemon's loop spent on one thing (a request, a tick, a slice of put-off work), in
             milliseconds of its own thread's CPU: what the code costs, whoever else uses the machine.

`--with` sets what the daemon runs with, `nvme=DIR` and `nvme_size=SIZE`, `record=DIR` or `kv_events=ENDPOINT` say.

Prints a table and one JSON object as the last line. The target is for `held`.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

from common import ROOT, SEED, Daemon, Report, percentile, wait_populated
from worst_cases import CASES, Bench

from tiercache.client import Client

HELD_MS = 5.0
PING_EVERY_S = 0.002
BASELINE_S = 3.0
CASE_S = 20.0
"""After which a case is given up."""
_HOLDS = struct.Struct("<dd48s")  # ms of CPU, ms on the clock, what


class Holds(NamedTuple):
    """The longest hold of the loop since the last look."""

    cpu_ms: float
    wall_ms: float
    what: str


class WatchedDaemon(Daemon):
    """A daemon that notes in a file how long its loop was at one thing; see `watched_main`."""

    program = (sys.executable, __file__, "--watched")

    def __init__(self, arena: str, **settings: str) -> None:
        descriptor, self._path = tempfile.mkstemp(prefix="tiercache-holds-")
        os.ftruncate(descriptor, _HOLDS.size)
        self._map = mmap.mmap(descriptor, _HOLDS.size)
        os.close(descriptor)
        os.environ["TIERCACHE_BENCH_HOLDS"] = self._path
        super().__init__(arena, **settings)

    def take_holds(self) -> Holds:
        """The longest hold so far; begins anew."""
        cpu_ms, wall_ms, what = _HOLDS.unpack_from(self._map)
        self._map[:] = bytes(_HOLDS.size)
        return Holds(cpu_ms, wall_ms, what.rstrip(b"\0").decode())

    def close(self) -> None:
        super().close()
        with suppress(FileNotFoundError):
            os.unlink(self._path)


def watched_main(arguments: list[str]) -> int:
    """The daemon, with a watch on what its loop does."""
    import asyncio

    from tiercache.daemon.__main__ import main
    from tiercache.daemon.router import Router
    from tiercache.daemon.service import Service

    with open(os.environ["TIERCACHE_BENCH_HOLDS"], "r+b") as file:
        held = mmap.mmap(file.fileno(), _HOLDS.size)
    cpu_ns, now_ns = time.thread_time_ns, time.perf_counter_ns
    served_cpu = served_wall = 0

    def note(cpu: int, wall: int, what: str) -> None:
        if cpu > 1e6 * cast(float, _HOLDS.unpack_from(held)[0]):
            _HOLDS.pack_into(held, 0, cpu / 1e6, wall / 1e6, what.encode()[:48])

    serve, run, observe = Router._serve_one, asyncio.Handle._run, Service._observe
    kind = "a request"

    def observe_one(self: Service, session: Any, request: Any, started_ns: int) -> None:
        nonlocal kind
        kind = type(request).__name__
        observe(self, session, request, started_ns)

    def serve_one(self: Router) -> bool:
        nonlocal served_cpu, served_wall, kind
        kind = "a request"
        cpu, wall = cpu_ns(), now_ns()
        found = serve(self)
        cpu, wall = cpu_ns() - cpu, now_ns() - wall
        served_cpu += cpu
        served_wall += wall
        note(cpu, wall, kind)
        return found

    def run_one(self: asyncio.Handle) -> None:
        cpu, wall = cpu_ns() - served_cpu, now_ns() - served_wall
        run(self)
        name = getattr(self._callback, "__qualname__", repr(self._callback))
        note(cpu_ns() - served_cpu - cpu, now_ns() - served_wall - wall, name)

    Router._serve_one = serve_one  # type: ignore[method-assign]
    Service._observe = observe_one  # type: ignore[method-assign]
    asyncio.Handle._run = run_one  # type: ignore[attr-defined]
    return main(arguments)


class Pings:
    """Another process that pings the daemon all the time."""

    def __init__(self, address: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--pings", address], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self.take()

    def take(self) -> list[float]:
        """Milliseconds of each ping since the last time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        return cast("list[float]", json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def pings_main(address: str) -> int:
    """Ping until the end of file; for each line that comes, say how long pings took."""
    os.set_blocking(0, False)
    took: list[float] = []
    with Client.connect(address, name="ping", map_arena=False, request_timeout_s=60.0) as client:
        while True:
            took.append(round(client.ping() * 1e3, 3))
            line = os.read(0, 1) if _readable(0) else None
            if line == b"":
                return 0
            if line:
                print(json.dumps(took), flush=True)
                took = []
            time.sleep(PING_EVERY_S)


def _readable(descriptor: int) -> bool:
    import select

    return bool(select.select([descriptor], [], [], 0)[0])


def measure(report: Report, name: str, label: str, daemon: WatchedDaemon, pings: Pings, act: Callable[[], Any]) -> None:
    """One line: what pings and the loop were like while `act` went on."""
    pings.take()
    daemon.take_holds()
    act()
    took, held = pings.take(), daemon.take_holds()
    worst_ms = max(took)
    _rows.append((name, worst_ms, held))
    target = None if name == "idle" else HELD_MS
    report.add(f"{name}_held_ms", label, held.cpu_ms, f"ms held, by {held.what or 'nothing'}", at_most=target)
    report.add(f"{name}_ping_ms", "", worst_ms, f"ms worst of {len(took)} pings, p99 {percentile(took, 0.99):.2f}")


_rows: list[tuple[str, float, Holds]] = []


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", metavar="CASE", help="only these")
    parser.add_argument("--blocks", type=int, default=300_000, help="of 4096 bytes, in DRAM (default: %(default)s)")
    parser.add_argument("--with", dest="settings", action="append", default=[], metavar="SETTING=VALUE")
    parser.add_argument("--list", action="store_true", help="name the cases")
    options = parser.parse_args(arguments)
    if options.list:
        for case in CASES:
            print(f"{case.name:24} {case.label}")
        return
    unknown = set(options.case) - {case.name for case in CASES}
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; --list names them")
    wanted = [case for case in CASES if not options.case or case.name in options.case]
    report = Report("bench_worst")
    settings = {"max_sessions": "64", **dict(setting.split("=", 1) for setting in options.settings)}
    with WatchedDaemon(f"{options.blocks * 4096 >> 20}MiB", region="64MiB", **settings) as daemon:
        with daemon.connect() as client:
            wait_populated(client)
        bench = Bench(daemon.directory, options.blocks, random.Random(SEED))
        pings = Pings(daemon.directory)
        try:
            measure(report, "idle", "nothing asked", daemon, pings, lambda: time.sleep(BASELINE_S))
            measure(report, "fill", "fill the index", daemon, pings, bench.fill)
            for case in wanted:
                if not bench.blocks_left(case.least_blocks):
                    bench.fill()
                act = case.prepare(bench)
                bench.settle(CASE_S)
                measure(report, case.name, case.label, daemon, pings, lambda act=act: bench.run(act, CASE_S))
                bench.drop_others()
            findings = bench.check()
            if findings:
                raise RuntimeError(f"the daemon's books disagree: {findings}")
        finally:
            bench.close()
            pings.close()
    cases = [row for row in _rows if row[0] != "idle"]
    slowest = max(cases, key=lambda row: row[1])
    held = max(cases, key=lambda row: row[2].cpu_ms)
    report.add("worst_ping_ms", "worst ping of all cases", slowest[1], f"ms, in {slowest[0]}")
    report.add("worst_held_ms", "longest hold of all cases", held[2].cpu_ms, f"ms, in {held[0]}", at_most=HELD_MS)
    report.note(f"a ping takes up to {_rows[0][1]:.1f} ms on this machine when nothing is asked")
    report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watched"]:
        sys.exit(watched_main(sys.argv[2:]))
    if sys.argv[1:2] == ["--pings"]:
        sys.exit(pings_main(sys.argv[2]))
    main(sys.argv[1:])
