"""Break single lines of the product, one at a time, and see whether the tests notice: `make mutants`.

A break turns a condition round, replaces a comparison or an operator, leaves out a call or an assignment to an
attribute, or loses a returned value. First all tests of the first ring run once, to learn which of them reach which
line, or which file of tests starts a process that does. Then each break is tried by these, the nearest first, and after
them by those of the ring `stress` in the folder that mirrors the broken file's. A break that none notices survives.
Breaks that MUTANTS.md lists, because they change nothing that matters, are not tried.

    make mutants                                   the breaks in NAMED, and a sample of 150 over FOLDERS
    make mutants MUTANTS='--sample 20 --seed 7'    another, smaller sample
    make mutants MUTANTS='--sample 30 daemon/tiers/shared'    of these files and folders only
    make mutants MUTANTS='--named-only'
    make mutants MUTANTS='--tests tests/daemon/index daemon/index'    with these tests alone

Each works on a copy of the tracked and changed files, never on the checkout. The exit code is 1 if fewer than 90% die.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple
from xml.etree import ElementTree

from coverage import CoverageData

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("daemon/tiers", "daemon/index", "tiercache/connector", "connectors/vllm")
WANTED = 0.9
TOPS = ("tiercache", "daemon", "connectors")
FIRST_RING = "not stress and not gpu and not vllm"
GOOD = (0, 5)
"""Exit codes of pytest: all passed, or no test was chosen."""
USAGE = 4
MOST_TESTS = 300
LEARN_S, STAGE_S = 1800, 400
"""Limits of the first run, and of a run that tries a break. A hang is noticed sooner: each test has a limit."""
TEST_S = 100
CURRENT_TEST = "PYTEST_CURRENT_TEST"
"""The variable in which pytest names the test that runs; processes that it starts inherit it."""
MEASURED_CHILDREN = """import os


def pytest_configure() -> None:
    os.environ["COVERAGE_PROCESS_START"] = {!r}
"""
"""A plugin: the processes that tests start are measured, those that run the tests are measured already."""
LOGS = ("log", "logger", "logging", "warnings")
COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
OPERATORS: dict[type[ast.operator], str] = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "*"}


class Mutant(NamedTuple):
    """One break: in `path`, the line `line` becomes `text`."""

    path: str
    line: int
    text: str
    what: str

    def listed(self, source: str) -> str:
        """As MUTANTS.md lists it: its file, the line without the break and with it."""
        return f"- `{self.path}`: `{source.splitlines()[self.line - 1].strip()}` -> `{self.text.strip()}`"


class Named(NamedTuple):
    """A break that once survived all tests: in `path`, `old`, which stands there once, becomes `new`."""

    path: str
    old: str
    new: str


NAMED = (
    Named("daemon/tiers/nvme/moves/flights.py", "void = flushed or", "void ="),
    Named(
        "daemon/tiers/nvme/worker/directory_worker.py",
        "self.queue.disconnect()\n        self.catalog.lost()",
        "self.queue.disconnect(), self.queue.lost()\n        self.catalog.lost()",
    ),
    Named("daemon/tiers/nvme/worker/directory_worker.py", "elif opened.state.fresh:", "elif False:"),
    Named("daemon/tiers/nvme/worker/directory_worker.py", "elif lost:", "elif False:"),
    Named(
        "daemon/tiers/shared/flushes.py",
        "(note := self._notes.get(name)) and note.number <= flushes",
        "(note := self._notes.get(name))",
    ),
    Named(
        "daemon/tiers/shared/epochs.py",
        "if not self._epochs.pending.isdisjoint(self.names):\n            return False",
        "if False:\n            return False",
    ),
    Named(
        "daemon/tiers/dram/growing_leases.py",
        "if not self._reads.is_whole(lease):\n            self._reads.end(lease)  # before",
        "if False:\n            self._reads.end(lease)  # before",
    ),
    Named("daemon/tiers/nvme/moves/flights.py", " and self._flying[parent].number < flight.number", ""),
    Named("daemon/tiers/nvme/worker/directory_worker.py", "if self._fruitless >= MAX_FRUITLESS:", "if False:"),
    Named(
        "daemon/tiers/dram/pending_blocks.py",
        "if not index.attached(parent) or self.is_taken_back(first):",
        "if self.is_taken_back(first):",
    ),
    Named(
        "daemon/index/walks.py",
        "if index.drops != drops or index.state[entry] != LIVE or",
        "if index.state[entry] != LIVE or",
    ),
    Named(
        "daemon/tiers/dram/writes.py",
        "if entry != NO_ENTRY and not self._space.index.attached(entry):",
        "if False:",
    ),
)
"""Each replaces a line of the product by one that is wrong in a way that matters."""
LISTED = re.compile(r"^(- `.+?`: `.+?` -> `.+?`):", re.MULTILINE)


# --- breaks --------------------------------------------------------------------------------------


class Breaks(ast.NodeVisitor):
    """All breaks of one file that stay within a line."""

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        self.lines = source.splitlines()
        self.found: list[Mutant] = []
        self._inside = 0  # functions
        self.visit(ast.parse(source))

    def _replace(self, node: ast.expr | ast.stmt, text: str, what: str) -> None:
        line = self.lines[node.lineno - 1]
        if node.lineno == node.end_lineno and self._inside and line.isascii():
            changed = line[: node.col_offset] + text + line[node.end_col_offset :]
            self.found.append(Mutant(self.path, node.lineno, changed, what))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in ("__repr__", "__str__"):
            return
        self._inside += 1
        for child in node.body:
            self.visit(child)
        self._inside -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Raise(self, node: ast.Raise) -> None:
        """What an error says is not broken."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Assertions check the product themselves."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if not isinstance(node.test, (ast.Constant, ast.Compare)):
            self._replace(node.test, f"not ({ast.unparse(node.test)})", "turned round")
        self.generic_visit(node)

    visit_While = visit_IfExp = visit_If

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            self._replace(node, f"{left} {COMPARISONS[type(node.ops[0])]} {right}", "compared otherwise")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " and " if isinstance(node.op, ast.And) else " or "
        for left_out in range(len(node.values)):
            kept = [ast.unparse(value) for number, value in enumerate(node.values) if number != left_out]
            self._replace(node, f"({word.join(kept)})", f"without {ast.unparse(node.values[left_out])}")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = OPERATORS.get(type(node.op))
        if other and not isinstance(node.left, (ast.Constant, ast.JoinedStr)):
            self._replace(node, f"({ast.unparse(node.left)} {other} {ast.unparse(node.right)})", "computed otherwise")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func).split(".")[0] not in LOGS:
            self._replace(node, "pass", "left out")
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            self._replace(node, "pass", "left out")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace(node, "pass", "left out")
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._replace(node, "pass", "left out")

    def visit_Continue(self, node: ast.Continue | ast.Break) -> None:
        self._replace(node, "pass", "left out")

    visit_Break = visit_Continue

    def visit_Return(self, node: ast.Return) -> None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool):
            self._replace(node.value, str(not node.value.value), "turned round")
        elif node.value is not None and not isinstance(node.value, ast.Constant):
            self._replace(node.value, "None", "lost")
            self.visit(node.value)


def breaks(places: list[str]) -> list[Mutant]:
    """All breaks of these files and folders, but for those that are known to be harmless."""
    found, known = list[Mutant](), set(harmless())
    for place in places:
        path = ROOT / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            source = file.read_text()
            its = Breaks(str(file.relative_to(ROOT)), source).found
            found += [one for one in its if one.listed(source) not in known]
    return found


def harmless() -> list[str]:
    """What MUTANTS.md lists, without the reasons."""
    return LISTED.findall((ROOT / "tests" / "MUTANTS.md").read_text())


def unknown() -> list[str]:
    """What MUTANTS.md lists although there is no such line any more."""
    there = set[str]()
    for path in {one.split("`")[1] for one in harmless()}:
        source = (ROOT / path).read_text() if (ROOT / path).is_file() else ""
        there |= {one.listed(source) for one in Breaks(path, source).found}
    return [one for one in harmless() if one not in there]


def named() -> Iterator[Mutant]:
    """The breaks in NAMED that lie within one line or begin with it."""
    for path, old, new in NAMED:
        source = (ROOT / path).read_text()
        assert source.count(old) == 1, f"{path} has {source.count(old)} times: {old}"
        line = source[: source.index(old)].count("\n")
        text = source.replace(old, new).splitlines()[line]
        yield Mutant(path, line + 1, text, "a break that survived once")


# --- tests ---------------------------------------------------------------------------------------


class Reached(NamedTuple):
    """Which tests of the first ring reach which lines of the product, and how long each takes."""

    tests: dict[tuple[str, int], list[str]]
    seconds: dict[str, float]

    def nearest(self, mutant: Mutant) -> list[str]:
        """The tests that reach a break: those of the mirroring folder first, the quickest of them first."""
        folder = str(mirrored(mutant.path).relative_to(ROOT))
        tests = self.tests.get((mutant.path, mutant.line), [])

        def distance(test: str) -> tuple[bool, float]:
            reported = test.replace("/", ".").replace(".py::", ".").replace("::", ".")  # as its report names it
            return not test.startswith(folder), self.seconds.get(reported, 1.0)

        return sorted(tests, key=distance)[:MOST_TESTS]


def mirrored(path: str) -> Path:
    """The test folder that mirrors the folder of a product file, or the nearest one above it that is there."""
    parts = Path(path).parts[:-1]
    folder = ROOT.joinpath("tests", *(parts[1:] if parts[0] == "tiercache" else parts))
    while not folder.is_dir():
        folder = folder.parent
    return folder


class Workshop:
    """A copy of the checkout in which one break at a time is tried."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
        for name in filter(None, names):
            if os.path.lexists(ROOT / name):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)

    def pytest(self, *arguments: str, limit_s: float = STAGE_S) -> int | None:
        """Run pytest in the copy; its exit code, or None at the limit."""
        environment = os.environ | {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        run = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return run.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)  # with its children
            run.wait()

    def learn(self, tests: str, jobs: int) -> Reached:
        """Run the first ring once. Exits if a test fails, since nothing could be learned from that."""
        report, data = self.folder / "report.xml", self.folder / ".coverage"
        config, of_children = self.folder / "coverage.ini", self.folder / "children.ini"
        config.write_text(f"[run]\nsource = {','.join(TOPS)}\ndata_file = {data}\n")
        of_children.write_text(f"{config.read_text()}parallel = true\nsigterm = true\ncontext = ${{{CURRENT_TEST}-}}\n")
        (self.folder / "measured_children.py").write_text(MEASURED_CHILDREN.format(str(of_children)))
        code = self.pytest(
            *(tests, "-m", FIRST_RING, "-n", str(jobs), "--dist", "worksteal", f"--junitxml={report}"),
            *("-p", "measured_children"),
            *("--cov", "--cov-context=test", "--cov-report=", f"--cov-config={config}"),
            limit_s=LEARN_S,
        )
        cases = ElementTree.parse(report).getroot().iter("testcase")
        seconds, red = dict[str, float](), list[str]()
        for case in cases:
            name = f"{case.get('classname')}.{case.get('name')}"
            seconds[name] = float(case.get("time", 0))
            if case.find("failure") is not None or case.find("error") is not None:
                red.append(name)
        if code != 0:
            sys.exit(f"the first ring fails without any break (exit code {code}): {' '.join(red)}")
        found: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        for part in [data, *self.folder.glob(f"{data.name}.*")]:
            covered = CoverageData(str(part))
            covered.read()
            for file in covered.measured_files():
                if not Path(file).is_relative_to(self.folder):
                    continue  # of a copy that a test has made
                path = str(Path(file).relative_to(self.folder))
                for line, contexts in covered.contexts_by_lineno(file).items():
                    # "test|run" of tests; of their processes, which others of the file may use, "test (setup)".
                    names = {one.rpartition("|")[0] if "|" in one else one.partition("::")[0] for one in contexts}
                    found[path, line] |= names - {""}
        return Reached({place: sorted(names) for place, names in found.items() if names}, seconds)

    def fails(self, *arguments: str) -> bool:
        """Whether tests fail. Raises RuntimeError if pytest does not know them."""
        if (code := self.pytest(*arguments)) == USAGE:
            raise RuntimeError(f"pytest cannot run these: {' '.join(arguments)}")
        return code not in GOOD

    def killed_by(self, mutant: Mutant, reached: Reached) -> str:
        """Which tests notice a break; empty if it survives."""
        file = self.folder / mutant.path
        source = file.read_text()
        lines = source.splitlines()
        lines[mutant.line - 1] = mutant.text
        file.write_text("\n".join(lines) + "\n")
        stop = "-x", "-o", f"timeout={TEST_S}"
        try:
            tests = reached.nearest(mutant)
            if tests and self.fails(*stop, *tests):
                return f"{len(tests)} tests that reach it"
            folder = str(mirrored(mutant.path).relative_to(ROOT))
            if not tests and self.fails(*stop, "-m", FIRST_RING, folder):
                return folder
            if self.fails(*stop, "-m", "stress", folder):
                return f"{folder}, stress"
            return ""
        finally:
            file.write_text(source)


def main() -> int:
    """The exit code is 1 if too many survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", default=list(FOLDERS), help="files and folders to break")
    parser.add_argument("--sample", type=int, default=150, help="breaks that are tried, beside the named ones")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="breaks tried side by side")
    parser.add_argument("--tests", default="tests", help="folder whose tests are used")
    parser.add_argument("--named-only", action="store_true")
    parser.add_argument("--list", action="store_true", help="print the breaks and try none")
    asked = parser.parse_args()
    if stale := unknown():
        sys.exit("tests/MUTANTS.md lists breaks of lines that are not there:\n" + "\n".join(stale))
    rng = random.Random(asked.seed)
    every = breaks(asked.places)
    sample = [] if asked.named_only else rng.sample(every, min(asked.sample, len(every)))
    given = [one for one in named() if any(one.path.startswith(place) for place in asked.places)]
    mutants = given + sorted(sample)
    print(f"{len(mutants)} of {len(every)} breaks (seed {asked.seed})", flush=True)
    if asked.list:
        print(*(f"{one.path}:{one.line}: {one.what}\n    {one.text.strip()}" for one in mutants), sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        return try_all(mutants, asked.tests, asked.jobs, Path(folder))


def try_all(mutants: list[Mutant], tests: str, jobs: int, folder: Path) -> int:
    """Try breaks side by side and print one line for each; the exit code of the whole."""
    begun, free = time.monotonic(), SimpleQueue[Workshop]()
    for number in range(jobs):
        free.put(Workshop(folder / str(number)))
    first = free.get()
    reached = first.learn(tests, jobs + 1)
    free.put(first)
    print(f"{len(reached.tests)} lines are reached by the first ring, {time.monotonic() - begun:.0f} s", flush=True)

    def attempt(mutant: Mutant) -> bool:
        workshop = free.get()
        try:
            by = workshop.killed_by(mutant, reached)
        finally:
            free.put(workshop)
        how = f"({by})" if by else f"\n{mutant.listed((ROOT / mutant.path).read_text())}"
        print(f"{'killed  ' if by else 'SURVIVED'} {mutant.path}:{mutant.line} {mutant.what} {how}", flush=True)
        return bool(by)

    with ThreadPoolExecutor(jobs) as pool:
        killed = sum(pool.map(attempt, mutants))
    share = killed / len(mutants) if mutants else 1.0
    print(f"{killed} of {len(mutants)} killed ({share:.0%}), {time.monotonic() - begun:.0f} s")
    return 0 if share >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
