"""Import rules: folders import from floors below theirs, and heavy packages stay where they belong.

And the tests' house: its folders mirror the product's.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

FLOORS = """
tiercache.errors
tiercache.ground
tiercache.config
tiercache.protocol
tiercache.kernels
tiercache.copies
tiercache.client
tiercache.connector
tiercache
tiercache.connectors | tiercache.engine | tiercache.daemon
tiercache.http | tiercache.plan
tiercache.serve | tiercache.replay
tiercache.demo
tiercache.cli
"""
"""The folders, the lowest first: each imports from itself and from floors below, never from its own floor's others."""

DAEMON_FLOORS = """
tiercache.daemon.ground
tiercache.daemon.helper_processes
tiercache.daemon.events
tiercache.daemon.index
tiercache.daemon.hints
tiercache.daemon.policies
tiercache.daemon.tiers
tiercache.daemon.observe
tiercache.daemon.requests
tiercache.daemon
"""
"""Those of the daemon: the files directly in daemon/ put them together, and are on top."""

MAY_KNOW_ABOVE = "tiercache.daemon.requests", "tiercache.daemon"
"""Requests are answered from what these put together; nothing below them knows it."""

TIER_FLOORS = """
tiercache.daemon.tiers.dram | tiercache.daemon.tiers.forms
tiercache.daemon.tiers.nvme | tiercache.daemon.tiers.shared
tiercache.daemon.tiers
"""
"""Those of the tiers: DRAM knows one thing below it; the files directly in tiers/ put them together."""

NVME_FLOORS = """
tiercache.daemon.tiers.nvme.disk
tiercache.daemon.tiers.nvme.catalog
tiercache.daemon.tiers.nvme.shelf
tiercache.daemon.tiers.nvme.check | tiercache.daemon.tiers.nvme.moves | tiercache.daemon.tiers.nvme.worker
tiercache.daemon.tiers.nvme.direct | tiercache.daemon.tiers.nvme.opening
tiercache.daemon.tiers.nvme
"""
"""Those of the NVMe tier: the files directly in nvme/ put them together."""

HOUSES = [
    {folder: floor for floor, line in enumerate(text.split("\n")) for folder in line.split(" | ") if folder}
    for text in (FLOORS, DAEMON_FLOORS, TIER_FLOORS, NVME_FLOORS)
]

HEAVY = {"torch", "triton", "transformers", "safetensors", "kvikio", "vllm", "sglang"}
MAY_IMPORT_HEAVY = {
    "tiercache.kernels": {"torch", "triton"},
    "tiercache.copies.cuda": {"torch"},
    "tiercache.copies.cuda_lane": {"torch"},
    "tiercache.connector.direct.probe": {"kvikio"},
    "tiercache.connector.direct.probe_stage": {"kvikio", "torch"},
    "tiercache.connector.direct.backend": {"kvikio", "torch"},
    "tiercache.engine": {"torch", "triton", "transformers", "safetensors"},
    "tiercache.connectors": {"torch", "transformers", "vllm", "sglang"},
    "tiercache.demo.worker": {"torch", "transformers"},  # the main module of a process of its own
    "tiercache.demo.vllm_worker": {"vllm"},  # of another, in its functions: the demo asks it whether there is a vLLM
}
MAY_IMPORT_HEAVY_LAZILY = {"tiercache.cli": {"torch", "transformers"}, "tiercache.demo": {"torch", "transformers"}}
LAZY_IN_THE_DAEMON = {("tiercache.daemon.tiers.forms.codecs", "numpy")}
"""Only where a codec other than raw is in use."""
ON_DEMAND = {f"tiercache.daemon.policies.{name}" for name in ("hazard", "predictor", "worths")}
"""Loaded only by a daemon whose `policy` needs them: these may use numpy, and nothing loads them at its top."""
NOT_IN_THE_DAEMON = {*HEAVY, "numpy", "typer", "rich", "tiercache.protocol.keys"}
"""The daemon is small enough for a sidecar: numpy alone would be a third of its memory."""


class Import(NamedTuple):
    """`importer` imports `module`; lazily when inside a function."""

    importer: str
    module: str
    lazy: bool


def modules() -> dict[str, Path]:
    """Every module of the package, by its name."""
    found = {}
    folders = ("tiercache", "connectors", "daemon", "kernels")
    for folder in folders:
        package = folder if folder == "tiercache" else f"tiercache.{folder}"
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if folder == "tiercache" and parts[0] in folders:
                continue  # the same files by way of a symbolic link
            name = ".".join((package, *parts)).removesuffix(".__init__")
            found[name] = path
    return found


def imports(importer: str, source: str, known: set[str]) -> Iterator[Import]:
    """All imports of a source text: at the top, inside functions, and by name with `import_module`."""

    is_package = any(one.startswith(f"{importer}.") for one in known)
    folder = importer if is_package else importer.rpartition(".")[0]

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inner = lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for name in _imported(child, folder, known):
                yield Import(importer, name, inner)
            yield from visit(child, inner)

    yield from visit(ast.parse(source), False)


def _imported(node: ast.AST, folder: str, known: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level <= 1, "import from other folders by their full names"
        source = ".".join(filter(None, (folder if node.level else "", node.module)))
        for alias in node.names:
            inner = f"{source}.{alias.name}"
            yield inner if inner in known else source
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("import_module", "__import__"):
            yield str(node.args[0].value)


def test_the_same_folder_is_imported_by_a_dot() -> None:
    """Where a folder is reached by a symbolic link, tools follow imports within it only so."""
    full = []
    for importer, path in modules().items():
        folder = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
        if importer.startswith(("tiercache.daemon", "tiercache.connectors", "tiercache.kernels")):
            found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
            full += [f"{importer}: {node.module}" for node in found if is_in(str(node.module), folder)]
    assert full == []


def is_in(module: str, folder: str) -> bool:
    """Whether a module is a file of this folder itself."""
    return module == folder or module.rpartition(".")[0] == folder


def unit(module: str, house: dict[str, int] = HOUSES[0]) -> str:
    """The folder of a package in which a module is; "" for a module outside."""
    while module and module not in house:
        module = module.rpartition(".")[0]
    return module


def upwards(found: Import) -> str | None:
    """Whether an import goes up in one of the houses, in words."""
    for house in HOUSES:
        importer, imported = unit(found.importer, house), unit(found.module, house)
        if not importer or not imported or importer == imported:
            continue
        if house[imported] >= house[importer] and (importer, imported) != MAY_KNOW_ABOVE:
            return f"{importer} imports {imported}, which is not below it"
    return None


def problem(found: Import) -> str | None:
    """What is wrong with an import, or None."""
    importer, package = unit(found.importer), found.module.split(".")[0]
    if package in HEAVY:
        allowed = MAY_IMPORT_HEAVY.get(importer, set()) | MAY_IMPORT_HEAVY.get(found.importer, set())
        if found.lazy:
            allowed = allowed | MAY_IMPORT_HEAVY_LAZILY.get(importer, set())
        return None if package in allowed else f"{package} is not for {importer}"
    if found.lazy and (found.importer, package) in LAZY_IN_THE_DAEMON:
        return None
    if found.importer in ON_DEMAND and package == "numpy":
        return None
    if found.module in ON_DEMAND and found.importer not in ON_DEMAND and not found.lazy:
        return f"{found.module} is loaded on demand only"
    if importer == "tiercache.daemon" and {package, found.module} & NOT_IN_THE_DAEMON:
        return f"{found.module} is not for the daemon"
    if package != "tiercache" or found.module == "tiercache":
        return None
    return upwards(found)


@cache
def all_imports() -> list[Import]:
    known = modules()
    return [edge for name, path in known.items() for edge in imports(name, path.read_text(), set(known))]


def test_every_folder_has_a_floor() -> None:
    for house, depth in zip(HOUSES, (2, 3, 4, 5), strict=True):
        top = next(iter(house)).rpartition(".")[0]
        names = {name for name in modules() if name.startswith(f"{top}.") and name.count(".") >= depth}
        assert {".".join(name.split(".")[:depth]) for name in names} - set(house) == set()


def test_every_import_goes_down() -> None:
    found = all_imports()
    assert len(found) > 50
    assert [f"{edge}: {text}" for edge in found if (text := problem(edge))] == []


def test_no_two_files_import_each_other_whichever_way_round() -> None:
    """Nor three, and so on: also within functions, and for type checkers alone."""
    known = modules()
    below: dict[str, set[str]] = {name: set() for name in known}
    for edge in all_imports():
        if edge.module in known and edge.module != edge.importer:
            below[edge.importer].add(edge.module)
    while free := [name for name, others in below.items() if not others]:
        for name in free:
            del below[name]
        for others in below.values():
            others.difference_update(free)
    assert below == {}, "each of these is in a circle, or above one"


def loaded_by(*names: str) -> set[str]:
    """Modules, and their top-level packages, that are in memory after importing `names` in a fresh interpreter."""
    code = f"import sys, {', '.join(names)}\nprint(*sys.modules, *{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_what_starts_often_is_light() -> None:
    """While the worker process of a directory starts, the blocks of its directory are misses."""
    assert loaded_by("tiercache") & {*HEAVY, "typer", "rich"} == set()
    daemon = [name for name in modules() if unit(name) == "tiercache.daemon" and name not in ON_DEMAND]
    assert loaded_by(*daemon) & NOT_IN_THE_DAEMON == set()
    worker = loaded_by("tiercache.daemon.tiers.nvme.worker.child")
    assert worker & {*NOT_IN_THE_DAEMON, "asyncio", "zmq", "subprocess", "cryptography"} == set()
    assert [name for name in worker if name.startswith("tiercache.protocol.messages")] == []


# --- the tests' house --------------------------------------------------------------------------------

NO_MIRRORS = {"gpu", "engines", "faults"}
"""Folders of tests that mirror no folder of the product: what only runs on a device, or in a whole engine, and violence
against a whole daemon with its clients, disks and hosts."""


def mirrored(folder: Path) -> Path:
    """The folder of the product whose tests are in a folder of the tests."""
    parts = folder.relative_to(ROOT / "tests").parts
    inside = ROOT.joinpath("tiercache", *parts)
    return inside if inside.is_dir() else ROOT.joinpath(*parts)


def misplaced(path: Path) -> str | None:
    """What is wrong with the place or the name of a test file, or None.

    `A/B/test_c.py` and `A/B/test_c_more.py` test `A/B/c.py`, or a folder `A/B/c`; `A/B/test_b.py` all of `A/B`.
    """
    folder = mirrored(path.parent)
    if not folder.is_dir():
        return f"there is no {folder.relative_to(ROOT)}"
    subjects = {one.stem.strip("_") for one in folder.iterdir() if one.suffix == ".py" or one.is_dir()}
    name = path.stem.removeprefix("test_")
    if not any(name == subject or name.startswith(f"{subject}_") for subject in {*subjects, folder.name}):
        return f"there is no {name}.py in {folder.relative_to(ROOT)}"
    return None


def test_the_tests_mirror_the_product() -> None:
    tests = ROOT / "tests"
    found = {path.relative_to(tests): path for path in tests.rglob("test_*.py") if path.parent != tests}
    wrong = {str(name): misplaced(path) for name, path in found.items() if not NO_MIRRORS & {*name.parts}}
    wrong = {name: text for name, text in wrong.items() if text}
    assert wrong == {}


def test_modules_that_help_tests_have_a_name_of_their_own() -> None:
    """Tests import them by name, from any folder."""
    names: dict[str, Path] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if not path.name.startswith(("test_", "conftest")) and "fakes" not in path.parts:
            assert path.stem not in names, f"{path} and {names[path.stem]}"
            assert path.stem not in sys.stdlib_module_names
            names[path.stem] = path


def test_modules_that_are_named_in_text_are_there() -> None:
    """Those that a process of its own runs, for example: nobody imports them, so no other check would miss them."""
    named = re.compile(r'(?<!getLogger\()"(tiercache(?:\.\w+)+)"')
    for top in ("tiercache", "daemon", "connectors", "kernels"):
        for path in (ROOT / top).rglob("*.py"):
            for name in named.findall(path.read_text()):
                place = ROOT.joinpath(*name.split("."))
                assert place.is_dir() or place.with_suffix(".py").is_file(), f"{path} names {name}"
