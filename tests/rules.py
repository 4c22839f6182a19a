"""Rules of the tests that a program can check; `make lint` runs it. The rules are explained in tests/README.md.

Everywhere: no private attribute of a product class, except in the test folder that mirrors the folder of the class.
In the first ring (all tests without the mark `stress`, `gpu` or `vllm`): no sleeping, no clock in an assertion, and no
deadline below 30 s. A line that needs an exception says so: `# rule: why`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
PRODUCT = ("tiercache", "connectors", "daemon", "kernels", "bench")

LATER_RINGS = {"stress", "gpu", "vllm"}
LEAST_DEADLINE_S = 30
DEADLINE = re.compile(r"(^|_)(timeout|deadline|grace)(_s)?$")
WAITS = {"join", "wait", "result"}
CLOCKS = {
    f"time.{name}{unit}" for name in ("monotonic", "perf_counter", "process_time", "time") for unit in ("", "_ns")
}
EXCEPTION = "# rule:"
WAITING = {TESTS / "waiting.py"}
"""The one place that may sleep: it looks at a condition again and again."""


PUBLIC = {"_replace", "_make", "_asdict", "_fields"}
"""Of named tuples, whatever else has these names."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in PUBLIC


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Names of private functions, classes and attributes that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def mirrored(folder: Path) -> Path:
    """The test folder that mirrors a folder of the product."""
    parts = folder.relative_to(ROOT).parts
    return TESTS.joinpath(*(parts[1:] if parts[0] == "tiercache" else parts))


@cache
def home(folder: Path) -> Path:
    """The nearest test folder at or above `folder` that mirrors a folder of the product."""
    mirrors = {place for places in owners().values() for place in places}
    while folder != TESTS and folder not in mirrors:
        folder = folder.parent
    return folder


@cache
def owners() -> dict[str, set[Path]]:
    """For each private name of the product: the test folders that may use it."""
    found: dict[str, set[Path]] = defaultdict(set)
    for top in PRODUCT:
        for path in (ROOT / top).rglob("*.py"):
            if top == "tiercache" and path.relative_to(ROOT / top).parts[0] in PRODUCT:
                continue  # the same files by way of a symbolic link
            for name in filter(private, defined_names(ast.parse(path.read_text()))):
                found[name].add(mirrored(path.parent))
    return dict(found)


def marks(node: ast.AST) -> set[str]:
    """The names behind `pytest.mark.` in an expression."""
    return {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Attribute) and part.value.attr == "mark"
    }


class Rules(ast.NodeVisitor):
    """What one test file does against the rules, as (line, text)."""

    def __init__(self, path: Path, tree: ast.Module, lines: list[str]) -> None:
        self.path = path
        self.lines = lines
        self.own = set(defined_names(tree))
        self.found: list[tuple[int, str]] = []
        self.later = any(
            isinstance(node, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets)
            and marks(node.value) & LATER_RINGS
            for node in tree.body
        )
        self.visit(tree)

    def say(self, node: ast.expr, text: str) -> None:
        if EXCEPTION not in "".join(self.lines[node.lineno - 1 : node.end_lineno]):
            self.found.append((node.lineno, text))

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        earlier = self.later
        self.later |= any(marks(decorator) & LATER_RINGS for decorator in node.decorator_list)
        self.generic_visit(node)
        self.later = earlier

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _function

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if private(node.attr) and node.attr not in self.own and not self._inside(node.attr):
            self.say(node, f"private attribute {node.attr} of another folder: use a public one, or move the test")
        self.generic_visit(node)

    def _inside(self, name: str) -> bool:
        """True if the name belongs to the folder that this one mirrors, or to nothing of the product."""
        folders = owners().get(name)
        return folders is None or home(self.path.parent) in folders

    def visit_Assert(self, node: ast.Assert) -> None:
        if not self.later and self.path not in WAITING:
            for part in ast.walk(node):
                if isinstance(part, ast.Call) and ast.unparse(part.func) in CLOCKS:
                    self.say(part, "an assertion about the clock: wait for a condition instead")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if not self.later and self.path not in WAITING:
            called = ast.unparse(node.func)
            if called == "time.sleep":
                self.say(node, "time.sleep: wait for a condition (tests/waiting.py), or hold the other side by a gate")
            short = [keyword.value for keyword in node.keywords if keyword.arg and DEADLINE.search(keyword.arg)]
            if isinstance(node.func, ast.Attribute) and node.func.attr in WAITS and len(node.args) == 1:
                short += node.args
            numbers = (value.value for value in short if isinstance(value, ast.Constant))
            for seconds in numbers:
                if isinstance(seconds, (int, float)) and 0 < seconds < LEAST_DEADLINE_S:
                    self.say(node, f"a deadline of {seconds} s: at least {LEAST_DEADLINE_S}, or a fake clock")
        self.generic_visit(node)


def check(path: Path) -> list[str]:
    """The findings of one file, as lines."""
    source = path.read_text()
    rules = Rules(path, ast.parse(source), source.splitlines(keepends=True))
    return [f"{path.relative_to(ROOT)}:{line}: {text}" for line, text in rules.found]


def main(names: list[str]) -> int:
    """Check these files and folders, by default all tests. The exit code is 1 if something was found."""
    places = [Path(name).resolve() for name in names] or [TESTS]
    files = [path for place in places for path in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]
    lines = [line for path in files for line in check(path)]
    print(*lines, sep="\n", end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
