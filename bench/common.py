"""Shared by the benchmarks: daemons to measure, medians, and the report.

A report is a table for people and, as the last line of output, one JSON object with the same
figures, their targets and spread, and the machine.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tiercache.client.client import Client  # noqa: E402
from tiercache.errors import TierCacheError  # noqa: E402
from tiercache.ground.isolated import python_command  # noqa: E402

SEED = 20261120
BUSY_LOAD_PER_CORE = 0.5
"""Above this much other load at the start, the table says that the machine was busy."""
PING_EVERY_S = 0.02


class Figure(NamedTuple):
    """One line of a report."""

    key: str
    label: str
    value: float
    unit: str
    at_least: float | None
    at_most: float | None
    spread: tuple[float, float] | None

    @property
    def met(self) -> bool | None:
        """Whether the target was reached; None without a target."""
        if self.at_least is not None:
            return self.value >= self.at_least
        return None if self.at_most is None else self.value <= self.at_most


class Report:
    """Collects figures; prints them as a table and as JSON."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._figures: list[Figure] = []
        self._left_out: list[str] = []
        self._notes: list[str] = []
        self._start_s = time.perf_counter()
        self._load = os.getloadavg()[0]

    def add(
        self,
        key: str,
        label: str,
        value: float,
        unit: str = "",
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        samples: Sequence[float] = (),
    ) -> None:
        """One figure. `samples`, of which it is the median, give the spread (quartiles)."""
        spread = quartiles(samples) if len(samples) > 1 else None
        self._figures.append(Figure(key, label, value, unit, at_least, at_most, spread))

    def leave_out(self, keys: Sequence[str], reason: str) -> None:
        """Add figures that could not be measured: null in the JSON, and a note."""
        self._left_out += keys
        self.note(f"not measured: {', '.join(keys)}: {reason}")

    def note(self, text: str) -> None:
        """A line below the table, and in the JSON."""
        self._notes.append(text)

    def finish(self) -> None:
        """Print everything."""
        if self._load > BUSY_LOAD_PER_CORE * (os.cpu_count() or 1):
            self.note(f"the machine was busy: load average {self._load:.2f} when this began")
        width = max((len(figure.label) for figure in self._figures), default=0)
        print(f"\n{self._name}\n{'':{width}}  {'measured':>10}  {'quartiles':>15}  {'target':>10}  met")
        for figure in self._figures:
            spread = "" if figure.spread is None else f"{_short(figure.spread[0])}-{_short(figure.spread[1])}"
            target = "" if figure.at_least is None else f">= {_short(figure.at_least)}"
            target = target if figure.at_most is None else f"<= {_short(figure.at_most)}"
            met = {None: "", True: "yes", False: "NO"}[figure.met]
            value = _short(figure.value)
            print(f"{figure.label:{width}}  {value:>10}  {spread:>15}  {target:>10}  {met:3}  {figure.unit}")
        for note in self._notes:
            print(f"note: {note}")
        print(json.dumps(self._as_json()), flush=True)

    def _as_json(self) -> dict[str, Any]:
        result: dict[str, Any] = {"bench": self._name}
        result.update((figure.key, _rounded(figure.value)) for figure in self._figures)
        result.update(dict.fromkeys(self._left_out))
        result["targets"] = {
            figure.key: {
                "at_least" if figure.at_least is not None else "at_most": figure.at_least or figure.at_most,
                "met": figure.met,
            }
            for figure in self._figures
            if figure.met is not None
        }
        spreads = ((figure.key, figure.spread) for figure in self._figures if figure.spread)
        result["quartiles"] = {key: [_rounded(low), _rounded(high)] for key, (low, high) in spreads}
        result["notes"] = self._notes
        result["hardware"] = hardware()
        result["load_average"] = [round(self._load, 2), round(os.getloadavg()[0], 2)]
        result["commit"] = commit()
        result["seed"] = SEED
        result["command"] = " ".join([Path(sys.executable).name, *sys.argv])
        result["wall_s"] = round(time.perf_counter() - self._start_s, 1)
        return result


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """First and third quartile of at least two samples."""
    cuts = statistics.quantiles(samples, n=4, method="inclusive")
    return cuts[0], cuts[2]


def percentile(samples: Sequence[float], share: float) -> float:
    """The value that a share (0 to 1) of the samples do not exceed."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def hardware() -> dict[str, Any]:
    """The facts of this machine that matter for memory and messages."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit that is checked out, with `+` when files differ from it; empty outside a checkout."""
    if shutil.which("git") is None:
        return ""
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changes = subprocess.run(["git", "-C", ROOT, "status", "--porcelain"], capture_output=True, text=True)
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")


def available_bytes() -> int:
    """Memory that a benchmark may take."""
    from tiercache.copies.arena import available_bytes as available

    return available()


class Daemon:
    """A daemon started without waiting for it, so that its first seconds can be measured.

    It ends with this process, or with `close`.
    """

    program: tuple[str, ...] = tuple(python_command("tiercache.daemon"))

    def __init__(self, arena: str, **settings: str) -> None:
        self.directory = tempfile.mkdtemp(prefix="tiercache-bench-")
        command = [*self.program, "--run-dir", self.directory, "--arena", arena]
        for key, value in settings.items():
            command += [f"--{key.replace('_', '-')}", value]
        its, self._pipe = os.pipe2(os.O_CLOEXEC)
        self.started_s = time.perf_counter()
        self._process = subprocess.Popen(
            [*command, "--parent-fd", str(its)],
            cwd=ROOT,
            pass_fds=[its],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(Path(self.directory) / "log").open("wb"),
        )
        os.close(its)
        self.pid = self._process.pid

    def connect(self, *, map_arena: bool = False, timeout_s: float = 10.0) -> Client:
        """Connect a client as soon as the daemon answers; tries every millisecond."""
        deadline_s = time.perf_counter() + timeout_s
        while True:
            if self._process.poll() is not None:
                raise RuntimeError((Path(self.directory) / "log").read_text(errors="replace"))
            client = Client(self.directory, name="bench", map_arena=map_arena, request_timeout_s=5.0)
            client.start(0.0, required=False)
            if client.alive:
                return client
            client.close()
            if time.perf_counter() > deadline_s:
                raise RuntimeError("the daemon does not answer")
            time.sleep(0.001)

    def __enter__(self) -> Daemon:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the daemon and remove its directory. Idempotent."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            shutil.rmtree(self.directory, ignore_errors=True)


def wait_populated(client: Client, timeout_s: float = 60.0) -> None:
    """Wait until the whole arena has its memory."""
    deadline_s = time.perf_counter() + timeout_s
    while (arena := client.stats()["arena"])["populated_bytes"] < arena["bytes"]:
        if time.perf_counter() > deadline_s:
            raise RuntimeError("the arena is not populated in time; is there enough memory?")
        time.sleep(0.01)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def threads_cpu_us(pid: int) -> float:
    """CPU microseconds of a process's present threads so far, to the nanosecond."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e3


def rss_besides_arena_bytes(pid: int) -> int:
    """Resident memory of a process without the shared memory that it maps."""
    values = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "RssShmem"):
            values[name] = int(value.split()[0]) * 1024
    return values["VmRSS"] - values["RssShmem"]


class PingWatch:
    """Pings a daemon every 20 ms in a thread while something else is measured.

    Attributes:
        worst_ms: the longest round trip so far, in milliseconds.
    """

    def __init__(self, address: str | Path) -> None:
        self.worst_ms = 0.0
        self.count = 0
        self._stop = threading.Event()
        self._client = Client.connect(address, name="ping", map_arena=False, request_timeout_s=10.0)
        self._thread = threading.Thread(target=self._run, name="bench-ping", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(PING_EVERY_S):
            try:
                took_ms = self._client.ping() * 1000
            except TierCacheError:
                took_ms = 10_000.0
            self.worst_ms = max(self.worst_ms, took_ms)
            self.count += 1

    def __enter__(self) -> PingWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()
