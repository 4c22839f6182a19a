"""Files of tests/gpu under pytest, each test a check; those that failed once more, each in a process of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gpu.place import ROOT
from gpu.tell import REASON_LINES, check, fact, left_s, skip

# Plugins and warnings of the machine's own packages are not under test here.
OPTIONS = [
    "-q",
    "-m",
    "gpu",
    "-o",
    "addopts=",
    "-o",
    "filterwarnings=",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:valkey",
    "-p",
    "no:benchmark",
]
TEST_LIMIT_S = 60
ALONE_LIMIT_S = 20.0
MOST_ALONE = 3


class Teller:
    """A plugin that tells of each test as it ends."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.skipped: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.skipped:
            reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skipped[reason.removeprefix("Skipped: ")] += 1
        elif report.failed:
            self.failed.append(report.nodeid)
            check(_name(report.nodeid), False, "\n".join(str(report.longrepr).strip().splitlines()[-REASON_LINES:]))
        elif report.when == "call":
            check(_name(report.nodeid), True)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            check(_name(report.nodeid), False, str(report.longrepr)[-800:])
        elif report.skipped:
            reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skipped[f"{_name(report.nodeid)}: {reason.removeprefix('Skipped: ')}"] += 1


def _name(node: str) -> str:
    return node.rpartition("tests/gpu/")[2]


def run(arguments: Sequence[str]) -> None:
    """Run the files, so many tests at a time."""
    import pytest

    workers, *files = arguments
    options = [*OPTIONS, *(f"tests/gpu/{file}" for file in files)]
    if importlib.util.find_spec("pytest_timeout"):
        # A thread ends the process: a signal would wait for the call into the driver that hangs.
        options += ["--timeout", str(TEST_LIMIT_S), "--timeout-method", "thread"]
    else:
        options += ["-o", "timeout="]
    if importlib.util.find_spec("xdist"):
        options += ["-n", workers]  # also for one: a test that ends its process costs only itself
    teller = Teller()
    status = int(pytest.main(options, plugins=[teller]))
    for reason, count in teller.skipped.items():
        skip(f"{count} tests", reason)
    if status not in (0, 1, 5):
        check("pytest ran", False, f"exit status {status}")
    alone = {}
    for node in teller.failed[:MOST_ALONE]:
        if left_s() > ALONE_LIMIT_S + 10:
            alone[_name(node)] = passes_alone(node)
    if alone:
        # Failed among others and good alone: the device was broken by an earlier test, or the tests disturb each other.
        fact("once more, alone", alone)


def passes_alone(node: str) -> str:
    command = [sys.executable, "-m", "pytest", *OPTIONS, "-o", "timeout=", node]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=ALONE_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return "hangs"
    return "passes" if done.returncode == 0 else "fails"
