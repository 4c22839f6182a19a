"""Runs parts: each a process of its own with a limit, so that one that hangs or crashes costs only itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from gpu.parts import Part
from gpu.tell import LIMIT_VARIABLE, MARK

ROOT = Path(__file__).resolve().parents[2]
LAST_LINES = 25
"""Last lines of a failed part's output, in the results."""
_TRACE_S = 2.0
"""A part that is killed has so long to print where its threads are."""


class Results:
    """Everything found so far, also on disk: `<name>.jsonl` grows with each result, and `<name>.log` has all output."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{name}.json"
        self.parts: dict[str, dict[str, Any]] = {}
        self._lines = (folder / f"{name}.jsonl").open("w")
        self._log = (folder / f"{name}.log").open("w")
        self._lock = threading.Lock()

    def begin(self, part: str) -> None:
        self.parts[part] = {"status": "running", "checks": {}, "figures": {}, "facts": {}, "skipped": {}}

    def add(self, part: str, result: dict[str, Any]) -> None:
        """A result of a part, kept and shown."""
        with self._lock:
            self._write(self._lines, json.dumps({"part": part, **result}))
            found = self.parts[part]
            name = result.get("name", "")
            if result["kind"] == "check":
                found["checks"][name] = result["detail"] if not result["passed"] else True
                if not result["passed"]:
                    print(f"  FAILED {part}: {name}: {_last_line(result['detail'])}", flush=True)
            elif result["kind"] == "figure":
                keys = ("value", "unit", "at_least", "at_most", "met")
                found["figures"][name] = {key: result[key] for key in keys if result[key] not in (None, "")}
            elif result["kind"] == "fact":
                found["facts"][name] = result["value"]
            else:
                found["skipped"][name] = result["why"]

    def end(self, part: str, **how: Any) -> None:
        """How a part ended."""
        with self._lock:
            self.parts[part].update(how)
            self._write(self._lines, json.dumps({"part": part, "kind": "end", **how}))

    def log(self, part: str, line: str) -> None:
        with self._lock:
            self._write(self._log, f"{part}: {line}")

    @staticmethod
    def _write(file: TextIO, line: str) -> None:
        if file.closed:  # a reader that outlives its part
            return
        file.write(line + "\n")
        file.flush()

    def close(self) -> None:
        """Nothing more is added."""
        self._lines.close()
        self._log.close()

    def save(self, **about: Any) -> dict[str, Any]:
        """Write all of it as one object, and return that."""
        whole = {**about, "summary": summary(self.parts), "parts": self.parts}
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(whole, indent=1) + "\n")
        temporary.replace(self.path)
        return whole


def summary(parts: dict[str, dict[str, Any]]) -> dict[str, int]:
    """How many checks and targets were met and missed, and how parts ended."""
    checks = [outcome for part in parts.values() for outcome in part["checks"].values()]
    figures = [one["met"] for part in parts.values() for one in part["figures"].values() if "met" in one]
    return {
        "checks_passed": sum(outcome is True for outcome in checks),
        "checks_failed": sum(outcome is not True for outcome in checks),
        "skipped": sum(len(part["skipped"]) for part in parts.values()),
        "targets_met": sum(figures),
        "targets_missed": len(figures) - sum(figures),
        "parts_failed": sum(part["status"] == "failed" for part in parts.values()),
        "parts_skipped": sum(part["status"] == "skipped" for part in parts.values()),
    }


def run_all(
    parts: Sequence[Part],
    results: Results,
    command: Callable[[Part], list[str]],
    until_s: float,
    environment: dict[str, str],
) -> None:
    """Run the parts in order until `until_s` (time.time()); those side by side together."""
    groups: list[list[Part]] = []
    for part in parts:
        if part.beside and groups:
            groups[-1].append(part)
        else:
            groups.append([part])
    for number, group in enumerate(groups):
        later_s = sum(max(part.least_s for part in later) for later in groups[number + 1 :])
        left_s = until_s - time.time()
        threads = []
        for part in group:
            results.begin(part.name)
            if left_s < part.least_s:
                why = f"out of time: {part.least_s:.0f} s are the least, {max(left_s, 0):.0f} s were left"
                results.add(part.name, {"kind": "skip", "name": part.name, "why": why})
                results.end(part.name, status="skipped", seconds=0.0, why=why)
                continue
            # What later parts need at least is theirs, and what no part can do without is this one's.
            limit_s = min(part.limit_s, max(left_s - later_s, part.least_s))
            threads.append(threading.Thread(target=run_part, args=(part, results, command(part), limit_s, environment)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def run_part(part: Part, results: Results, command: list[str], limit_s: float, environment: dict[str, str]) -> None:
    """Run one part to its end, or to its limit."""
    print(f"{part.name}: {part.what} (at most {limit_s:.0f} s)", flush=True)
    begin_s = time.time()
    settings = {LIMIT_VARIABLE: str(begin_s + limit_s), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    last: deque[str] = deque(maxlen=LAST_LINES)
    try:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | settings,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        results.end(part.name, status="failed", seconds=0.0, why=str(error))
        return
    reader = threading.Thread(target=_read, args=(process, part.name, results, last), daemon=True)
    reader.start()
    why = ""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        why = f"killed after {limit_s:.0f} s"
        _kill(process)
    else:
        _signal(process, signal.SIGKILL)  # what it may have left running
    reader.join(5.0)  # a process that cannot be killed keeps the pipe open
    found = results.parts[part.name]
    if not why and process.returncode:
        why = f"exit status {process.returncode}"
    if not why and any(outcome is not True for outcome in found["checks"].values()):
        why = "a check failed"
    nothing = not (found["checks"] or found["figures"] or found["facts"])
    status = "failed" if why else "skipped" if nothing else "passed"
    if not why and nothing:
        why = next(iter(found["skipped"].values()), "it said nothing")
    more = {"last_lines": list(last)} if status == "failed" else {}
    results.end(part.name, status=status, seconds=round(time.time() - begin_s, 1), why=why, **more)
    print(f"{part.name}: {status}{f' ({why})' if why else ''} in {time.time() - begin_s:.1f} s", flush=True)


def _read(process: subprocess.Popen[str], part: str, results: Results, last: deque[str]) -> None:
    assert process.stdout is not None
    with process.stdout as output:
        for line in output:
            line = line.rstrip("\n")
            before, mark, result = line.partition(MARK)  # a test runner's dots may stand before it
            if mark:
                try:
                    results.add(part, json.loads(result))
                    line = before
                except (ValueError, KeyError):
                    pass  # what is no result is output like any other
            if mark and not line:
                continue
            last.append(line)
            results.log(part, line)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a part and what it has started; its interpreter prints where it was."""
    process.send_signal(signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_TRACE_S)
    _signal(process, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel
        process.wait(5.0)


def _signal(process: subprocess.Popen[str], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:200]


def table(parts: dict[str, dict[str, Any]]) -> str:
    """For people: figures and failures of each part, then a line for each part."""
    lines: list[str] = []
    for name, part in parts.items():
        if part["figures"]:
            lines.append(f"\n{name}")
        for label, one in part["figures"].items():
            target = (
                f">= {one['at_least']:g}" if "at_least" in one else f"<= {one['at_most']:g}" if "at_most" in one else ""
            )
            met = {True: "yes", False: "NO", None: ""}[one.get("met")]
            lines.append(f"  {label:58} {one['value']:>10.4g} {one.get('unit', ''):9} {target:>9} {met}")
    for name, part in parts.items():
        failed = {label: why for label, why in part["checks"].items() if why is not True}
        if not failed and part["status"] != "failed":
            continue
        lines.append(f"\nFAILED {name}: {part.get('why', '')}")
        for label, why in list(failed.items())[:8]:
            lines += [f"  {label}", *(f"    {line[:200]}" for line in why.splitlines()[-4:])]
        if not failed:
            lines += [f"    {line[:200]}" for line in part.get("last_lines", [])[-8:]]
    lines.append(f"\n{'part':18} {'status':8} {'passed':>6} {'failed':>6} {'skipped':>7} {'seconds':>7}")
    for name, part in parts.items():
        passed = sum(outcome is True for outcome in part["checks"].values())
        counts = f"{passed:6} {len(part['checks']) - passed:6} {len(part['skipped']):7} {part.get('seconds', 0):7.1f}"
        lines.append(f"{name:18} {part['status']:8} {counts}  {part.get('why', '')}")
        lines += [f"    skipped {label}: {why}"[:200] for label, why in part["skipped"].items() if label != name][:4]
    return "\n".join(lines)
