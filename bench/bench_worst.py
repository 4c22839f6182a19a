"""How long one client can hold up all others: the worst request of each kind, while another process pings.

    python bench/bench_worst.py [CASE ...] [--blocks N] [--with SETTING=VALUE ...] [--list]

Each case asks a real daemon with a full index for the most that a request may name (keys, namespaces, leases), or for
what leaves the most work behind (a flush, the end of a session). Two figures for each:

    ping     the longest round trip of another process meanwhile, that pings every 2 ms. On a shared machine a part of
             it is waiting for a core: compare it with the first line, where nothing is asked.
    held     the longest time that the daemon's loop spent on one thing (a request, a tick, a slice of put-off work), in
             milliseconds of its own thread's CPU: what the code costs, even on a machine that others use.

`--with` sets what the daemon runs with; cases that need a setting are left out without it:

    --with nvme=DIR nvme_size=4GiB                           the tier below
    --with kv_events=ipc:///tmp/EVENTS record=FILE           what is told and written down of everything
    --with max_leases_per_session=131072                     one session with a hundred thousand leases

`--rounds N` does each case so many times: `held` is then the median, beside the worst. `--stacks FILE` writes down
where the loop was in each hold of more than 4 ms (and makes it slower).

Prints a table and one JSON object as the last line. The target is for `held`.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple, cast

from common import ROOT, SEED, Daemon, Report, percentile, wait_populated
from worst_bench import Bench
from worst_cases import CASES

from tiercache.client.client import Client

HELD_MS = 5.0
PING_EVERY_S = 0.002
BASELINE_S = 3.0
CASE_S = 20.0
"""Time limit of a case."""
_HOLDS = struct.Struct("<dd64s")  # ms of CPU, ms on the clock, what
_STACKS_MS = 4.0
_SAMPLE_S = 0.0002


class Holds(NamedTuple):
    """The longest hold of the loop since the last look."""

    cpu_ms: float
    wall_ms: float
    what: str


class WatchedDaemon(Daemon):
    """A daemon that records in a file the longest hold of its loop; see `watched_main`."""

    program = (sys.executable, __file__, "--watched")

    def __init__(self, arena: str, **settings: str) -> None:
        descriptor, self._path = tempfile.mkstemp(prefix="tiercache-holds-")
        os.ftruncate(descriptor, _HOLDS.size)
        self._map = mmap.mmap(descriptor, _HOLDS.size)
        os.close(descriptor)
        os.environ["TIERCACHE_BENCH_HOLDS"] = self._path
        super().__init__(arena, **settings)

    def take_holds(self) -> Holds:
        """The longest hold so far; resets it."""
        cpu_ms, wall_ms, what = _HOLDS.unpack_from(self._map)
        self._map[:] = bytes(_HOLDS.size)
        return Holds(cpu_ms, wall_ms, what.rstrip(b"\0").decode())

    def close(self) -> None:
        super().close()
        with suppress(FileNotFoundError):
            os.unlink(self._path)


def watched_main(arguments: list[str]) -> int:
    """The daemon, with its loop watched."""
    import asyncio

    from tiercache.daemon.__main__ import main
    from tiercache.daemon.requests.router import Router
    from tiercache.daemon.requests.service import Service

    with open(os.environ["TIERCACHE_BENCH_HOLDS"], "r+b") as file:
        held = mmap.mmap(file.fileno(), _HOLDS.size)
    cpu_ns, now_ns = time.thread_time_ns, time.perf_counter_ns
    served_cpu = served_wall = 0
    stacks = _Stacks(os.environ["TIERCACHE_BENCH_STACKS"]) if "TIERCACHE_BENCH_STACKS" in os.environ else None

    def note(cpu: int, wall: int, what: str) -> None:
        if stacks is not None:
            stacks.end(cpu / 1e6, what)
        if cpu > 1e6 * cast(float, _HOLDS.unpack_from(held)[0]):
            _HOLDS.pack_into(held, 0, cpu / 1e6, wall / 1e6, what.encode()[:64])

    serve, run, observe = Router._serve_one, asyncio.Handle._run, Service._observe
    kind = "a request"
    parts = _Parts()

    def observe_one(self: Service, session: Any, request: Any, started_ns: int) -> None:
        nonlocal kind
        kind = type(request).__name__
        observe(self, session, request, started_ns)

    def serve_one(self: Router) -> None:
        nonlocal served_cpu, served_wall, kind
        kind = "a request"
        cpu, wall = cpu_ns(), now_ns()
        serve(self)
        cpu, wall = cpu_ns() - cpu, now_ns() - wall
        served_cpu += cpu
        served_wall += wall
        note(cpu, wall, kind)

    def run_one(self: asyncio.Handle) -> None:
        parts.took.clear()
        cpu, wall = cpu_ns() - served_cpu, now_ns() - served_wall
        run(self)
        name = getattr(self._callback, "__qualname__", repr(self._callback))
        note(cpu_ns() - served_cpu - cpu, now_ns() - served_wall - wall, f"{name} {parts.largest()}".strip())

    Router._serve_one = serve_one  # type: ignore[method-assign]
    Service._observe = observe_one  # type: ignore[method-assign]
    asyncio.Handle._run = run_one  # type: ignore[attr-defined]
    parts.watch()
    return main(arguments)


class _Parts:
    """How long each part of one turn of the loop took, without the parts that it calls."""

    def __init__(self) -> None:
        self.took: Counter[str] = Counter()
        self._inside = 0  # time of the parts that the current one has called

    def largest(self) -> str:
        """The part that took longest."""
        return self.took.most_common(1)[0][0] if self.took else ""

    def watch(self) -> None:
        """Time the larger parts of the daemon's work."""
        from tiercache.daemon.cache import Cache
        from tiercache.daemon.events.events import Events
        from tiercache.daemon.ground.slices import Slices
        from tiercache.daemon.requests.reads import ReadRequests
        from tiercache.daemon.requests.router import Router
        from tiercache.daemon.tiers.dram.promotion import Promotion
        from tiercache.daemon.tiers.dram.reads import Reads
        from tiercache.daemon.tiers.dram.space import Space
        from tiercache.daemon.tiers.dram.writes import Writes
        from tiercache.daemon.tiers.nvme.moves.writebehind import WriteBehind
        from tiercache.daemon.tiers.nvme.shelf.shelf import Shelf

        for owner, name in (
            (Cache, "expire"),
            (Cache, "session_lost"),
            (Cache, "process_gone"),
            (Events, "tick"),
            (Promotion, "look_again"),
            (Promotion, "pump"),
            (Promotion, "take_landed"),
            (ReadRequests, "answer_parked"),
            (Reads, "work"),
            (Router, "tick"),
            (Shelf, "work"),
            (Space, "keep_free"),
            (Space, "work"),
            (WriteBehind, "pump"),
            (Writes, "work"),
        ):
            self._time(owner, name, lambda self, name=f"{owner.__name__}.{name}": name)
        self._time(Slices, "work", lambda slices: _named(slices._under_way[0]) if slices._under_way else "")

    def _time(self, owner: type, method: str, name_of: Callable[[Any], str]) -> None:
        call, cpu_ns = getattr(owner, method), time.thread_time_ns

        def timed(its: Any, *args: Any) -> Any:
            name, outer, started_ns = name_of(its), self._inside, cpu_ns()
            self._inside = 0
            try:
                return call(its, *args)
            finally:
                took = cpu_ns() - started_ns
                self.took[name] += took - self._inside
                self._inside = outer + took

        setattr(owner, method, timed)


def _named(steps: Any) -> str:
    """The name of work that is done in slices: its kind of request, or its generator."""
    frame = steps.gi_frame
    request = None if frame is None else frame.f_locals.get("request")
    return cast(str, steps.__qualname__ if request is None else f"a slice of {type(request).__name__}")


class _Stacks:
    """Samples the loop's stack regularly, and reports long holds.

    Each sample sets the timer for the next: a timer that repeats could take all the time of a busy machine for samples.
    """

    def __init__(self, path: str) -> None:
        self._file = open(path, "a")  # noqa: SIM115 (for as long as the daemon lives)
        self._seen: list[str] = []
        signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, _SAMPLE_S)

    def _look(self, number: int, frame: FrameType | None) -> None:
        names = []
        while frame is not None and len(names) < 7:
            names.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
            frame = frame.f_back
        self._seen.append(" < ".join(names))
        signal.setitimer(signal.ITIMER_REAL, _SAMPLE_S)

    def end(self, cpu_ms: float, what: str) -> None:
        """End a hold."""
        seen, self._seen = self._seen, []
        if cpu_ms > _STACKS_MS:
            lines = [f"    {count:3} {stack}" for stack, count in Counter(seen).most_common(6)]
            print(f"{cpu_ms:.1f} ms: {what}", *lines, sep="\n", file=self._file, flush=True)


class Pings:
    """Another process that pings the daemon all the time."""

    def __init__(self, address: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--pings", address],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.take()

    def take(self) -> list[float]:
        """Milliseconds of each ping since the last call."""
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


class Round(NamedTuple):
    """Pings and holds of the loop during one round of a case."""

    pings_ms: list[float]
    held: Holds


def one_round(daemon: WatchedDaemon, pings: Pings, act: Callable[[], Any]) -> Round:
    """Run a case once, and watch pings and the loop meanwhile."""
    pings.take()
    daemon.take_holds()
    act()
    return Round(pings.take(), daemon.take_holds())


def tell(report: Report, name: str, label: str, rounds: list[Round]) -> None:
    """A line or two for a case: the median of its rounds."""
    held_ms, pings_ms = [one.held.cpu_ms for one in rounds], [ping for one in rounds for ping in one.pings_ms]
    worst = max((one.held for one in rounds), key=lambda held: held.cpu_ms)
    _rows.append((name, max(pings_ms), worst))
    said = f"ms held, by {worst.what or 'nothing'}" + ("" if len(rounds) == 1 else f"; worst {worst.cpu_ms:.1f}")
    target = None if name == "idle" else HELD_MS
    report.add(f"{name}_held_ms", label, statistics.median(held_ms), said, at_most=target, samples=held_ms)
    report.add(f"{name}_ping_ms", "", max(pings_ms), f"ms worst ping, p99 {percentile(pings_ms, 0.99):.2f}")


_rows: list[tuple[str, float, Holds]] = []


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", metavar="CASE", help="only these")
    parser.add_argument("--blocks", type=int, default=300_000, help="of 4096 bytes, in DRAM (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="of each case (default: %(default)s)")
    parser.add_argument("--with", dest="settings", action="append", default=[], nargs="+", metavar="SETTING=VALUE")
    parser.add_argument("--stacks", metavar="FILE", help="write down where the loop was in long holds")
    parser.add_argument("--list", action="store_true", help="name the cases")
    options = parser.parse_intermixed_args(arguments)
    settings = {"max_sessions": "64", **dict(one.split("=", 1) for its in options.settings for one in its)}
    if options.list:
        for case in CASES:
            print(f"{case.name:24} {case.label}{f' (with {case.needs})' if case.needs else ''}")
        return
    unknown = set(options.case) - {case.name for case in CASES}
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; --list names them")
    if options.stacks:
        os.environ["TIERCACHE_BENCH_STACKS"] = options.stacks
    possible = [case for case in CASES if not case.needs or case.needs in settings]
    wanted = [case for case in possible if not options.case or case.name in options.case]
    report = Report("bench_worst")
    with WatchedDaemon(f"{options.blocks * 4096 >> 20}MiB", region="64MiB", **settings) as daemon:
        with daemon.connect() as client:
            wait_populated(client)
        bench = Bench(daemon.directory, options.blocks, random.Random(SEED), settings)
        pings = Pings(daemon.directory)
        try:
            tell(report, "idle", "nothing asked", [one_round(daemon, pings, lambda: time.sleep(BASELINE_S))])
            tell(report, "fill", "fill the index", [one_round(daemon, pings, bench.fill)])
            for case in wanted:
                rounds = []
                for _ in range(options.rounds):
                    if not bench.blocks_left(case.least_blocks):
                        bench.settle(CASE_S)
                        bench.fill()
                    act = case.prepare(bench)
                    bench.settle(CASE_S)
                    rounds.append(one_round(daemon, pings, lambda act=act: bench.run(act, CASE_S)))
                    bench.drop_others()
                tell(report, case.name, case.label, rounds)
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
