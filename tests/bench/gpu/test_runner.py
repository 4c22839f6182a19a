"""The runner of `make gpu-check`: a part that hangs, crashes or lies costs only itself, and the results are on disk."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu import runner, tell
from gpu.parts import PARTS, Part

ROOT = Path(__file__).parents[3]
LIMIT_S = 60.0
SAID = f"import json; say = lambda **r: print({tell.MARK!r} + json.dumps(r), flush=True)\n"
GOOD = SAID + "print('..', end='', flush=True); say(kind='check', name='one', passed=True, detail='')\n"
GOOD += "say(kind='fact', name='two', value=2)"


class Run:
    """Parts whose programs are given as text."""

    def __init__(self, folder: Path) -> None:
        self.results = runner.Results(folder, "gpu-test")

    def __call__(self, *programs: str, until_s: float = 2 * LIMIT_S, **others: Any) -> dict[str, dict[str, Any]]:
        parts = [Part(f"part {number}", "", "", LIMIT_S, 1.0) for number, _ in enumerate(programs)]
        parts = [part._replace(**others) for part in parts]  # rule: of NamedTuple
        by_name = {part.name: program for part, program in zip(parts, programs, strict=True)}
        runner.run_all(
            parts,
            self.results,
            lambda part: [sys.executable, "-c", by_name[part.name]],
            time.time() + until_s,
            dict(os.environ),
        )
        return self.results.parts


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.results.close()


def test_a_part_that_crashes_costs_only_itself(run: Run) -> None:
    crash = SAID + "say(kind='figure', name='rate', value=2.0, unit='GB/s', at_least=3, at_most=None, met=False)\n"
    bad = SAID + "say(kind='check', name='bytes', passed=False, detail='wrong')"
    skip, silent = SAID + "say(kind='skip', name='vLLM', why='not installed')", "print('@result {not json')"
    found = run(crash + "print('last words', flush=True); import os; os.abort()", GOOD, bad, skip, silent)
    assert [part["status"] for part in found.values()] == ["failed", "passed", "failed", "skipped", "skipped"]
    assert [part["why"] for part in found.values() if part["status"] != "passed"] == [
        "exit status -6",
        "a check failed",
        "not installed",
        "it said nothing",
    ]
    assert found["part 0"]["last_lines"][0] == "last words"
    assert found["part 0"]["figures"] == {"rate": {"value": 2.0, "unit": "GB/s", "at_least": 3, "met": False}}
    assert runner.summary(found) == {
        "checks_passed": 1,
        "checks_failed": 1,
        "skipped": 1,
        "targets_met": 0,
        "targets_missed": 1,
        "parts_failed": 2,
        "parts_skipped": 2,
    }
    assert "FAILED part 0: exit status -6" in runner.table(found)
    assert "wrong" in runner.table(found)
    whole = run.results.save(device="test")
    assert json.loads(run.results.path.read_text()) == whole
    lines = [json.loads(line) for line in run.results.path.with_suffix(".jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines][:5] == ["figure", "end", "check", "fact", "end"], "written as they come"


@pytest.mark.stress
def test_a_part_that_hangs_is_killed_with_its_children_and_says_where_it_was(run: Run, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    hang = "import subprocess, sys, time\nsleep = [sys.executable, '-c', 'import time; time.sleep(99)']\n"
    hang += "child = subprocess.Popen(sleep)\n"
    hang += f"open({str(pid_file)!r}, 'w').write(str(child.pid))\ndef waiting():\n    time.sleep(99)\nwaiting()"
    found = run(hang, GOOD, limit_s=3.0)
    assert [part["status"] for part in found.values()] == ["failed", "passed"]
    assert found["part 0"]["why"] == "killed after 3 s"
    assert any("waiting" in line for line in found["part 0"]["last_lines"])
    state = Path(f"/proc/{pid_file.read_text()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_every_part_is_there_and_the_least_fits_the_deadline() -> None:
    for part in PARTS:
        assert callable(importlib.import_module(f"gpu.{part.module}").run)
        assert part.least_s <= part.limit_s
    together = [part.least_s for part in PARTS if not part.beside]
    assert sum(together) < 465
    named = {file for part in PARTS if part.module == "gpu_tests" for file in part.arguments[1:]}
    assert named == {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}


def test_without_a_card_it_rehearses_only_when_asked(tmp_path: Path) -> None:
    """One part, in its own process: the stand-ins hold, and the whole ends with a line of JSON."""
    pytest.importorskip("torch")
    command = [sys.executable, str(ROOT / "bench" / "gpu_check.py"), "--rehearse", "--results", str(tmp_path)]
    done = subprocess.run(
        [*command, "--only", "engines"], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["device"] == "rehearsal"
    assert (tmp_path / "gpu-rehearsal.json").is_file()
