"""The cost of being observed: a scrape a second, the dashboard in a browser, histograms, what-if, hot prefixes.

    .venv/bin/python bench/bench_observe.py [overhead] [metrics] [paint] [top]

Two daemons take turns at the transfers of `bench_transfer.py`: one with everything on, its HTTP process scraped every
second and the dashboard open in Chromium; the other without histograms, hot prefixes, what-if and HTTP.
Compared are the daemons' CPU seconds for a round, in pairs of turns; the browser's and the HTTP process's own are not
the daemon's. Then a daemon with 500 000 blocks: `/metrics` over one connection, and the time to the first paint of a
browser with an empty cache. Last, `tiercache top` on its own terminal. Prints a table and one line of JSON.
"""

from __future__ import annotations

import http.client
import os
import pty
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from bench_transfer import MIB, Case, ClientProcess
from chromium import Browser, missing
from common import Daemon, Report, percentile, wait_populated

import tiercache
from tiercache.ground.isolated import python_command

CASES = (Case("2m", 2 * MIB, 64, 0), Case("128k", 128 << 10, 1024, 0))
PAIRS = 80
TURN_S = 0.4
"""Short, so that both meet the same machine, and many."""
SCRAPE_S = 1.0
BLOCKS = 500_000
BLOCK_BYTES = 4096
AT_ONCE = 512
SCRAPES = 40
PAINTS = 7
TOP_S = 20.0
START_S = 15.0


class UnobservedDaemon(Daemon):
    """A daemon that keeps only plain counters; see `unobserved_main`."""

    program = (sys.executable, __file__, "--unobserved")


def unobserved_main(arguments: list[str]) -> int:
    """The daemon without histograms, hot prefixes and what-if: its cost if they did not exist."""
    from tiercache.daemon.__main__ import main
    from tiercache.daemon.observe.reuse import WhatIf
    from tiercache.daemon.observe.traffic import Traffic
    from tiercache.ground.histograms import Histogram

    def nothing(*arguments: Any) -> None:
        return

    for kind, names in ((Histogram, ["observe"]), (Traffic, ["matched", "read"]), (WhatIf, ["looked_up", "stored"])):
        for name in names:
            getattr(kind, name)  # raises when it has been renamed: else two equal daemons would be compared
            setattr(kind, name, nothing)
    return main(arguments)


class Port:
    """The HTTP port over one connection that stays open."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        self._connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=10)

    def get_ms(self, path: str) -> float:
        """Seconds of one request."""
        start_s = time.perf_counter()
        self._connection.request("GET", path)
        answer = self._connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status}")
        return (time.perf_counter() - start_s) * 1e3


def url_of(daemon: Daemon) -> str:
    """The address of its HTTP process, once it listens."""
    deadline_s = time.perf_counter() + START_S
    log = Path(daemon.directory) / "log"
    while not (found := re.search(r"serving (http://\S+) for", log.read_text())):
        if time.perf_counter() > deadline_s:
            raise RuntimeError(f"no HTTP: {log.read_text()}")
        time.sleep(0.01)
    return found[1]


def all_cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process, to the nanosecond, where /proc/stat has hundredths."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in tasks) / 1e9


@contextmanager
def scraped(url: str) -> Iterator[None]:
    """`/metrics` once a second, from a thread of this process."""
    done = threading.Event()
    port = Port(url)

    def scrape() -> None:
        while not done.wait(SCRAPE_S):
            port.get_ms("/metrics")

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def looked_at(url: str, report: Report) -> Iterator[None]:
    """The dashboard, open in a browser that disturbs the measurement as little as possible."""
    if missing():
        report.note(f"the dashboard is not open while the overhead is measured: {missing()}")
        yield
        return
    with closing(Browser()) as browser:
        browser.open(url)
        browser.wait("return document.body.dataset.state === 'live'", "the dashboard lives")
        yield


# --- what the daemon's work costs more ----------------------------------------------------------


class Turns:
    """A daemon and its client. In its turn the client does rounds of stores and loads."""

    def __init__(self, daemon: Daemon, case: Case, number: int) -> None:
        self._daemon = daemon
        with daemon.connect() as client:
            wait_populated(client)
        self._client = ClientProcess(case, daemon.directory, number)
        self._client.hear()
        for _ in range(case.sets + 2):  # the arena is full from here on, and every store evicts
            self._do("store")

    def _do(self, step: str) -> None:
        self._client.say(step)
        self._client.hear()

    def take(self) -> tuple[float, int]:
        """One turn: the daemon's CPU seconds, and for how many rounds."""
        rounds, before_s, end_s = 0, all_cpu_s(self._daemon.pid), time.perf_counter() + TURN_S
        while time.perf_counter() < end_s:
            self._do("store")
            self._do("load")
            rounds += 1
        return all_cpu_s(self._daemon.pid) - before_s, rounds

    def close(self) -> None:
        self._client.close()


def measure_overhead(report: Report) -> None:
    for case in CASES:
        arena = f"{case.ring_bytes // MIB}MiB"
        with ExitStack() as stack:
            watched = stack.enter_context(Daemon(arena, http="127.0.0.1:0"))
            plain = stack.enter_context(UnobservedDaemon(arena))
            url = url_of(watched)
            stack.enter_context(scraped(url))
            stack.enter_context(looked_at(url, report))
            turns = [stack.enter_context(closing(Turns(one, case, 0))) for one in (watched, plain)]
            report_overhead(report, case, turns)
            if case is CASES[0]:
                measure_idle(report, watched.pid, plain.pid)


def report_overhead(report: Report, case: Case, turns: list[Turns]) -> None:
    """Of all turns together, since work that is done once a second is in some turns only. Quartiles are of pairs."""
    pairs = []
    for number in range(PAIRS):
        order = (0, 1) if number % 2 else (1, 0)  # the daemon that goes first
        taken = {who: turns[who].take() for who in order}
        pairs.append((taken[0], taken[1]))
    watched, plain = (sum(pair[who][0] for pair in pairs) / sum(pair[who][1] for pair in pairs) for who in (0, 1))
    over = [(one[0] / one[1]) / (other[0] / other[1]) - 1 for one, other in pairs]
    label = f"daemon's CPU over a plain one, {case.name}"
    report.add(f"overhead_cpu_{case.name}", label, watched / plain - 1, at_most=0.02, samples=over)
    report.add(f"cpu_ms_{case.name}", "  a round of the plain one", plain * 1e3, "ms")


def measure_idle(report: Report, watched: int, plain: int) -> None:
    """Shares of a core of two idle daemons, the first of them scraped and shown on the dashboard."""
    before, start_s = [all_cpu_s(pid) for pid in (watched, plain)], time.perf_counter()
    time.sleep(10)
    shares = [
        (all_cpu_s(pid) - was) / (time.perf_counter() - start_s)
        for pid, was in zip((watched, plain), before, strict=True)
    ]
    report.add("idle_watched", "idle daemon, watched", shares[0], "of a core")
    report.add("idle_plain", "idle daemon, plain", shares[1], "of a core")


# --- a large index ------------------------------------------------------------------------------


def fill(connector: tiercache.Connector) -> None:
    """Store chains of blocks without writing their bytes until there are `BLOCKS`."""
    for _ in range(-(-BLOCKS // AT_ONCE)):
        if connector.store(os.urandom(16 * AT_ONCE), range(AT_ONCE)).stored != AT_ONCE:
            raise RuntimeError("the arena is too small")


def with_many_blocks(report: Report, measures: list[Callable[[Report, Daemon, str], None]]) -> None:
    spec = tiercache.NamespaceSpec(engine="bench/1", layout="x", dtype="uint8", block_size=16, block_bytes=BLOCK_BYTES)
    arena = (BLOCKS + 4 * AT_ONCE) * BLOCK_BYTES
    pool = tiercache.Pool.from_blocks(np.zeros((AT_ONCE, BLOCK_BYTES), np.uint8))
    with Daemon(f"{-(-arena // MIB)}MiB", http="127.0.0.1:0") as daemon:
        with daemon.connect() as client:
            wait_populated(client)
        with tiercache.connect(daemon.directory, namespace=spec, pool=pool, required=True) as connector:
            fill(connector)
            for measure in measures:
                measure(report, daemon, url_of(daemon))


def measure_metrics(report: Report, daemon: Daemon, url: str) -> None:
    port, took = Port(url), []
    with daemon.connect() as client:
        before = {name: client.stats()["latency"]["Stats"][name] for name in ("count", "sum_s")}
        for _ in range(SCRAPES):
            took.append(port.get_ms("/metrics"))
            time.sleep(0.15)
        after = client.stats()["latency"]["Stats"]
    report.add("metrics_ms", "/metrics with 500k blocks", statistics.median(took), "ms", at_most=20.0, samples=took)
    report.add("metrics_ms_p95", "  p95", percentile(took, 0.95), "ms")
    loop_ms = (after["sum_s"] - before["sum_s"]) / (after["count"] - before["count"]) * 1e3
    report.add("stats_loop_ms", "  of it on the daemon's loop, mean", loop_ms, "ms")


def measure_paint(report: Report, daemon: Daemon, url: str) -> None:
    if missing():
        report.leave_out(["first_paint_ms", "first_data_ms"], missing())
        return
    paints, data = [], []
    for _ in range(PAINTS):
        with closing(Browser()) as browser:  # a profile of its own: nothing is in its cache
            browser.open(url)
            browser.wait("return document.body.dataset.state === 'live'", "the dashboard lives")
            paint = "performance.getEntriesByName('first-contentful-paint')[0]"
            paints.append(float(browser.run(f"return {paint}.startTime")))
            asked = "performance.getEntriesByType('resource').find(({ name }) => name.includes('/v1/history'))"
            data.append(float(browser.run(f"return {asked}.responseEnd")))
    median_ms = statistics.median(paints)
    report.add("first_paint_ms", "dashboard: first paint", median_ms, "ms", at_most=1000, samples=paints)
    report.add("first_data_ms", "  figures are there", statistics.median(data), "ms", samples=data)


def measure_top(report: Report, daemon: Daemon, url: str) -> None:
    """`tiercache top` with its defaults; its start is left out."""
    master, terminal = pty.openpty()
    process = subprocess.Popen(
        python_command("tiercache.cli.main", "top", "--address", daemon.directory),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(terminal)
    drawn = threading.Event()
    shown = bytearray()

    def drain() -> None:
        try:
            while part := os.read(master, 65536):
                shown[:] = (shown + part)[-2000:]
                drawn.set()
        except OSError:
            return  # the command has ended

    threading.Thread(target=drain, daemon=True).start()
    try:
        if not drawn.wait(START_S):
            raise RuntimeError("tiercache top draws nothing")
        time.sleep(3)
        before_s, start_s = all_cpu_s(process.pid), time.perf_counter()
        time.sleep(TOP_S)
        if process.poll() is not None:
            raise RuntimeError(f"tiercache top has ended: {bytes(shown).decode(errors='replace')}")
        share = (all_cpu_s(process.pid) - before_s) / (time.perf_counter() - start_s)
        report.add("top_cpu", "tiercache top", share, "of a core", at_most=0.01)
    finally:
        process.terminate()
        process.wait(10)
        os.close(master)


def main() -> None:
    report = Report("bench_observe")
    wanted = sys.argv[1:] or ["overhead", "metrics", "paint", "top"]
    if "overhead" in wanted:
        measure_overhead(report)
    parts = {"metrics": measure_metrics, "paint": measure_paint, "top": measure_top}
    measures = [measure for name, measure in parts.items() if name in wanted]
    if measures:
        with_many_blocks(report, measures)
    report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--unobserved"]:
        sys.exit(unobserved_main(sys.argv[2:]))
    main()
