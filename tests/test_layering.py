"""Who may import whom: a module imports its own layer or lower, and heavy packages stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent

LAYERS: dict[str, float] = {
    "tiercache.errors": 0, "tiercache.units": 0, "tiercache.isolated": 0, "tiercache.forks": 0, "tiercache.extras": 0,
    "tiercache.arguments": 1, "tiercache.config": 1, "tiercache.messages": 1, "tiercache.keys": 1,
    "tiercache.layout": 1, "tiercache.curve": 1, "tiercache.checksum": 1, "tiercache.metrics": 1,
    "tiercache.listening": 1, "tiercache.hints": 1, "tiercache.setting_kinds": 1, "tiercache.settings": 1,
    "tiercache.settings_schema": 1,
    "tiercache.uninterrupted": 1,
    "tiercache.wire": 2, "tiercache.arena": 2, "tiercache.kernels": 2, "tiercache.gds_probe": 2,
    "tiercache.gds_stage": 2, "tiercache.gds_backend": 2,
    "tiercache.channel": 2, "tiercache.copy_plan": 2, "tiercache.cuda_driver": 2, "tiercache.host_memory": 2,
    "tiercache.cuda_lane": 2, "tiercache.cuda": 2, "tiercache.memcpy": 2,
    "tiercache.mapping": 3, "tiercache.session": 3, "tiercache.client": 3, "tiercache.transfer": 3,
    "tiercache.leases": 3, "tiercache.moves": 3, "tiercache.jobs": 3,
    "tiercache.gds": 3, "tiercache.gds_moves": 3, "tiercache.direct": 3,
    "tiercache.loading": 4, "tiercache.storing": 4, "tiercache.direct_store": 4, "tiercache.connector": 4,
    "tiercache.launch": 4, "tiercache": 4,
    "tiercache.engine": 5, "tiercache.connectors": 5, "tiercache.daemon": 5,
    "tiercache.serve": 6, "tiercache.http": 6, "tiercache.cli": 6, "tiercache.replay": 6,
}  # fmt: skip
"""A new module gets its layer here. A package's layer is that of all its modules."""

APART = {"tiercache.engine", "tiercache.connectors", "tiercache.daemon"}
"""One layer, and yet none imports another."""

HEAVY = {"torch", "triton", "transformers", "safetensors", "kvikio", "vllm"}
MAY_IMPORT_HEAVY = {
    "tiercache.kernels": {"torch", "triton"},
    "tiercache.cuda": {"torch"},
    "tiercache.cuda_lane": {"torch"},
    "tiercache.gds_probe": {"kvikio"},
    "tiercache.gds_stage": {"kvikio", "torch"},
    "tiercache.gds_backend": {"kvikio", "torch"},
    "tiercache.engine": {"torch", "triton", "transformers", "safetensors"},
    "tiercache.connectors": {"torch", "transformers", "vllm"},
    "tiercache.cli.demo_worker": {"torch", "transformers"},  # the main module of a process of its own
    "tiercache.cli.demo_vllm": {"vllm"},  # of another, in its functions: the demo asks it whether there is a vLLM
}
MAY_IMPORT_HEAVY_LAZILY = {"tiercache.cli": {"torch", "transformers"}}
LAZY_IN_THE_DAEMON = {("tiercache.daemon.nvme.codecs", "numpy")}
"""Only where a codec other than raw is in use."""
ON_DEMAND = {f"tiercache.daemon.policies.{name}" for name in ("hazard", "predictor", "reusetimes", "sketch", "worths")}
"""Loaded only by a daemon whose `policy` needs them: these may use numpy, and nothing loads them at its top."""
NEEDS_ON_DEMAND = {f"tiercache.daemon.policies.{name}" for name in ("workload_aware", "wtinylfu")}
"""The policies that do so."""
NOT_IN_THE_DAEMON = {*HEAVY, "numpy", "typer", "rich", "tiercache.keys"}
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

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inner = lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for name in _imported(child, known):
                yield Import(importer, name, inner)
            yield from visit(child, inner)

    yield from visit(ast.parse(source), False)


def _imported(node: ast.AST, known: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "import from the package by its full name"
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if inner in known else str(node.module)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("import_module", "__import__"):
            yield str(node.args[0].value)


def unit(module: str) -> str:
    """The entry of LAYERS that a module falls under."""
    short = ".".join(module.split(".")[:2])
    return short if module != "tiercache" else module


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
    if found.module in ON_DEMAND and found.importer not in {*ON_DEMAND, *NEEDS_ON_DEMAND} and not found.lazy:
        return f"{found.module} is loaded on demand only"
    if importer == "tiercache.daemon" and {package, unit(found.module)} & NOT_IN_THE_DAEMON:
        return f"{found.module} is not for the daemon"
    if package != "tiercache" or found.module == "tiercache":
        return None
    imported = unit(found.module)
    for name in (importer, imported):
        if name not in LAYERS:
            return f"{name} has no layer: give it one in tests/test_layering.py"
    if LAYERS[imported] > LAYERS[importer]:
        return f"layer {LAYERS[importer]} imports layer {LAYERS[imported]}"
    if importer != imported and {importer, imported} <= APART:
        return f"{importer} and {imported} never import each other"
    return None


def test_every_module_has_a_layer() -> None:
    assert [name for name in modules() if unit(name) not in LAYERS] == []


def test_every_import_goes_to_its_own_layer_or_lower() -> None:
    known = modules()
    found = [edge for name, path in known.items() for edge in imports(name, path.read_text(), set(known))]
    assert len(found) > 50
    assert [f"{edge}: {text}" for edge in found if (text := problem(edge))] == []


@pytest.mark.parametrize(
    ("importer", "source", "words"),
    [
        ("tiercache.units", "import tiercache.config", "layer 0 imports layer 1"),
        ("tiercache.wire", "def f():\n    from tiercache import client", "layer 2 imports layer 3"),
        ("tiercache.daemon.server", "import tiercache.engine.blocks", "never import each other"),
        ("tiercache.client", "importlib.import_module('tiercache.cli.main')", "imports layer 6"),
        ("tiercache.connector", "def f():\n    import torch.cuda", "torch is not for"),
        ("tiercache.daemon.index", "def f():\n    import numpy", "not for the daemon"),
        ("tiercache.daemon.index", "from tiercache.keys import KeyChain", "not for the daemon"),
        ("tiercache.client", "import tiercache.brandnew", "has no layer"),
    ],
)  # fmt: skip
def test_wrong_imports_are_found(importer: str, source: str, words: str) -> None:
    found = [text for edge in imports(importer, source, {"tiercache.client"}) if (text := problem(edge))]
    assert len(found) == 1
    assert words in found[0]


def loaded_by(*names: str) -> set[str]:
    """Top-level packages that are in memory after importing `names` in a fresh interpreter."""
    code = f"import sys, {', '.join(names)}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_tiercache_is_light() -> None:
    assert loaded_by("tiercache") & {*HEAVY, "typer", "rich"} == set()


def test_the_daemon_is_light() -> None:
    on_demand = {*ON_DEMAND, *NEEDS_ON_DEMAND}
    names = [name for name in modules() if unit(name) == "tiercache.daemon" and name not in on_demand]
    assert loaded_by(*names) & NOT_IN_THE_DAEMON == set()


def test_no_two_files_of_tests_have_the_same_name() -> None:
    """pytest imports them by their names alone, and folders are run together."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []
