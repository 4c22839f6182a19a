"""The wheel, the checkout's links and the declared dependencies."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tiercache
from tiercache.config.settings import SETTINGS
from tiercache.ground import extras

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).resolve().parent.parent
OUTER = ("connectors", "daemon", "kernels")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMPORT_NAMES = {"pyzmq": "zmq", "prometheus-client": "prometheus_client"}
OPTIONAL = (
    "connectors/",
    "kernels/",
    "tiercache/engine/",
    "tiercache/copies/cuda",
    "tiercache/connector/direct/",
    "tiercache/demo/",
    "tiercache/cli/demo",
    "tiercache/serve/",
    "tiercache/cli/serve",
    "tiercache/http/",
    "tiercache/cli/affinity",
    "daemon/tiers/forms/cipher.py",
    "daemon/tiers/shared/stores/objects/",
    "tiercache/replay/plot.py",
)
"""Modules that need an extra; everything else works with the base install."""


def run(*command: str, cwd: Path, python_path: Path | None = None) -> str:
    """Output of a command that must succeed; nothing of the checkout is on its path."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TIERCACHE_"))}
    if python_path:
        env["PYTHONPATH"] = str(python_path)
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def python_files() -> list[str]:
    """Every module, by its path in the repository, without the ways through symbolic links."""
    paths = [path for folder in ("tiercache", *OUTER) for path in (ROOT / folder).rglob("*.py")]
    names = sorted(str(path.relative_to(ROOT)) for path in paths)
    return [name for name in names if not name.startswith(tuple(f"tiercache/{outer}/" for outer in OUTER))]


def installed_name(name: str) -> str:
    """Where a file of the repository is in the distribution."""
    return name if name.startswith("tiercache/") else f"tiercache/{name}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources: what an earlier build left must not get into it."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    for name in ("tiercache", *OUTER):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), cwd=copy)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content, as pip puts it there."""
    target = tmp_path_factory.mktemp("installed")
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
        str(wheel),
        cwd=target,
    )
    return target


def test_the_wheel_holds_every_module_once_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    code = sorted(name for name in names if ".dist-info/" not in name)
    page = [f"tiercache/http/static/{path.name}" for path in (ROOT / "tiercache" / "http" / "static").iterdir()]
    assert code == sorted([*map(installed_name, python_files()), "tiercache/py.typed", *page])
    assert len(names) == len(set(names))
    tops = {name.split("/")[0] for name in names}
    assert tops == {"tiercache", f"tiercache_kv-{tiercache.__version__}.dist-info"}


def test_the_installed_package_runs_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'triton', 'transformers', 'kvikio')))\n"
        "import tiercache, tiercache.client.client, tiercache.connector.connector, tiercache.daemon\n"
        "import tiercache.cli.app\n"
        "print(tiercache.__file__, *tiercache.daemon.__path__)"
    )
    places = run(sys.executable, "-c", code, cwd=tmp_path, python_path=installed).split()
    assert places == [str(installed / "tiercache" / "__init__.py"), str(installed / "tiercache" / "daemon")]


def test_the_installed_daemon_explains_itself(installed: Path, tmp_path: Path) -> None:
    as_module = run(sys.executable, "-m", "tiercache.daemon", "--help", cwd=tmp_path, python_path=installed)
    as_command = run(
        sys.executable, "-m", "tiercache.cli.main", "daemon", "--help", cwd=tmp_path, python_path=installed
    )
    assert as_module == as_command
    assert "--arena" in as_module
    assert "tiercache daemon --" in as_module.rstrip().splitlines()[-1]


# --- what to do about a package that is missing -----------------------------------------------------


def test_a_checkout_gets_its_extras_from_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    line = extras.install_extra("engine", "serve")
    assert shlex.split(line) == ["/venv/bin/python", "-m", "pip", "install", "--editable", f"{ROOT}[engine,serve]"]
    assert extras.install_packages("lz4") == "/venv/bin/python -m pip install lz4"


def test_a_wheel_gets_the_packages_of_its_extras(installed: Path, tmp_path: Path) -> None:
    code = "from tiercache.ground.extras import *; print(install_extra('http')); print(install_extra('nothing'))"
    line, unknown = run(sys.executable, "-c", code, cwd=tmp_path, python_path=installed).splitlines()
    wanted = PROJECT["optional-dependencies"]["http"]
    assert shlex.split(line) == [sys.executable, "-m", "pip", "install", *wanted]
    assert "pyproject.toml" in unknown


def test_without_pip_it_is_said_what_goes_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert extras.install_packages("lz4", "zstandard") == f"install lz4 zstandard into {sys.prefix}"


def test_every_extra_that_is_named_exists() -> None:
    known = set(PROJECT["optional-dependencies"])
    for name in python_files():
        for arguments in re.findall(r"install_extra\(([^)]*)\)", (ROOT / name).read_text()):
            assert set(re.findall(r"""["'](\w+)["']""", arguments)) <= known, name
    for setting in SETTINGS.values():
        assert set(re.findall(r"extra (\w+)", setting.doc)) <= known, setting.key


FROM_AN_INDEX = re.compile(
    r"""(\binstall\b|--with|requirement)[^\n#]*?[\s'"=]tiercache(-kv)?(\[[\w,-]*\])?\s*([=<>~!@'"`)]|$)|[\s'"]tiercache(-kv)?\[[a-z]"""
)
"""Lines with which pip would look for us on an index, where the name belongs to another project, or could."""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("pip install tiercache", True),
        ("RUN pip install --quiet 'tiercache[http,zstd]'", True),
        ("uv pip install tiercache==0.1.0", True),
        ("pip install tiercache-kv", True),
        ("needs the extra: 'tiercache[gpu]'", True),
        ("/opt/tiercache/bin/pip install '.[http]'", False),
        ("pip install 'dist/tiercache_kv-0.2.0-py3-none-any.whl[http]'", False),
        ("helm install tiercache daemon/deploy/helm/tiercache --set arena=64GiB", False),
    ],
)
def test_lines_that_ask_an_index_are_noticed(line: str, found: bool) -> None:
    assert bool(FROM_AN_INDEX.search(line.replace("helm install", ""))) == found


def test_nothing_installs_the_package_of_that_name_on_pypi() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no repository: which files are ours is not known")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    assert len(listed) > 300
    bad = []
    for name in listed:
        path = ROOT / name
        if name == "tests/test_packaging.py" or path.is_symlink() or not path.is_file():
            continue
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        bad += [f"{name}: {line}" for line in lines if FROM_AN_INDEX.search(line.replace("helm install", ""))]
    assert bad == []


def test_links_are_tracked_and_relative() -> None:
    for name in OUTER:
        assert os.readlink(ROOT / "tiercache" / name) == f"../{name}"
        assert not (ROOT / name / "__init__.py").exists()
        if (ROOT / ".git").exists():
            entry = run("git", "ls-files", "--stage", f"tiercache/{name}", cwd=ROOT)
            assert entry.startswith("120000 "), f"tiercache/{name} is not tracked as a symbolic link"


@pytest.mark.parametrize("name", OUTER)
def test_a_package_of_the_same_name_wins_over_our_folder(name: str, tmp_path: Path) -> None:
    theirs = tmp_path / name / "__init__.py"
    theirs.parent.mkdir()
    theirs.touch()
    code = f"import sys; assert sys.path[0] == ''; import {name}; print({name}.__file__)"
    assert run(sys.executable, "-c", code, cwd=ROOT, python_path=tmp_path).strip() == str(theirs)


def requirements(extra: str | None = None) -> set[str]:
    """Names that the base install or an extra asks for, in lower case."""
    lines = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    return {re.split(r"[<>=!~;\[ ]", line)[0].lower() for line in lines}


def test_the_base_install_is_enough_for_daemon_and_client() -> None:
    declared = {IMPORT_NAMES.get(name, name) for name in requirements()} | {"tiercache"}
    missing = set()
    for name in python_files():
        if name.startswith(OPTIONAL):
            continue
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            tops = {module.split(".")[0] for module in found} - set(sys.stdlib_module_names) - {"tomllib"}
            missing |= {f"{name}: {top}" for top in tops - declared}
    assert missing == set()


def test_constraints_hold_what_setup_installs_by_name() -> None:
    pinned = set(re.findall(r"^([a-z0-9-]+)[=<>]", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    wanted = requirements().union(*(requirements(extra) for extra in ("engine", "test", "stress", "dev")))
    assert wanted - pinned == set()


def test_integration_runs_each_ring_once() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"^make .*", script, re.MULTILINE) == [
        "make test",
        "make test-sglang",
        "make test-vllm",
        "make stress",
    ]


def test_make_test_runs_pytest() -> None:
    for target in ("test", "stress"):
        assert " -m pytest " in run("make", "--dry-run", "--no-print-directory", target, cwd=ROOT)
