"""The wheel, the checkout's links and the declared dependencies."""

from __future__ import annotations

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
    options = ["--quiet", "--no-deps", "--no-index", "--target", str(target)]
    run(sys.executable, "-m", "pip", "install", *options, str(wheel), cwd=target)
    return target


def test_the_wheel_holds_every_module_once_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    code = sorted(name for name in names if ".dist-info/" not in name)
    page = [f"tiercache/http/static/{path.name}" for path in (ROOT / "tiercache" / "http" / "static").iterdir()]
    assert code == sorted([*map(installed_name, python_files()), "tiercache/py.typed", *page])
    assert len(names) == len(set(names))
    tops = {name.split("/")[0] for name in names}
    assert tops == {"tiercache", f"tiercache_kv-{tiercache.__version__}.dist-info"}


@pytest.mark.stress
def test_the_installed_package_runs_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'triton', 'transformers', 'kvikio')))\n"
        "import tiercache, tiercache.connector.connector, tiercache.daemon, tiercache.cli.app\n"
        "from tiercache.ground.extras import install_extra\n"
        "print(tiercache.__file__, *tiercache.daemon.__path__)\n"
        "print(install_extra('http')); print(install_extra('nothing'))\n"
        "from tiercache.cli.main import main; main(['daemon', '--help'])"
    )
    out = run(sys.executable, "-c", code, cwd=tmp_path, python_path=installed)
    places, line, unknown, as_command = out.split("\n", 3)
    assert places.split() == [str(installed / "tiercache" / "__init__.py"), str(installed / "tiercache" / "daemon")]
    packages = PROJECT["optional-dependencies"]["http"]
    assert shlex.split(line) == [sys.executable, "-m", "pip", "install", *packages], "those of a wheel, by name"
    assert "pyproject.toml" in unknown
    assert "--arena" in as_command
    assert as_command == run(sys.executable, "-m", "tiercache.daemon", "--help", cwd=tmp_path, python_path=installed)


FROM_AN_INDEX = re.compile(
    r"""(\binstall\b|--with|requirement)[^\n#]*?[\s'"=]tiercache(-kv)?(\[[\w,-]*\])?\s*([=<>~!@'"`)]|$)|[\s'"]tiercache(-kv)?\[[a-z]"""
)
"""Lines with which pip would look for us on an index, where the name belongs to another project, or could."""


def asks_an_index(line: str) -> bool:
    return bool(FROM_AN_INDEX.search(line.replace("helm install", "")))


def test_nothing_installs_the_package_of_that_name_on_pypi() -> None:
    assert asks_an_index("RUN pip install --quiet 'tiercache[http,zstd]'")
    assert not asks_an_index("helm install tiercache daemon/deploy/helm/tiercache --set arena=64GiB")
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
        bad += [f"{name}: {line}" for line in lines if asks_an_index(line)]
    assert bad == []


def test_links_are_tracked_and_relative() -> None:
    for name in OUTER:
        assert os.readlink(ROOT / "tiercache" / name) == f"../{name}"
        assert not (ROOT / name / "__init__.py").exists()
        if (ROOT / ".git").exists():
            entry = run("git", "ls-files", "--stage", f"tiercache/{name}", cwd=ROOT)
            assert entry.startswith("120000 "), f"tiercache/{name} is not tracked as a symbolic link"


def requirements(extra: str | None = None) -> set[str]:
    """Names that the base install or an extra asks for, in lower case."""
    lines = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    return {re.split(r"[<>=!~;\[ ]", line)[0].lower() for line in lines}


def test_the_base_install_is_enough_for_daemon_and_client() -> None:
    known = {IMPORT_NAMES.get(name, name) for name in requirements()} | {"tiercache", "tomllib"}
    known |= set(sys.stdlib_module_names)
    imported = re.compile(r"^ *(?:from ([\w.]+) import|import ([\w.]+))", re.MULTILINE)
    missing = set()
    for name in python_files():
        if not name.startswith(OPTIONAL):
            found = imported.findall((ROOT / name).read_text())
            missing |= {
                f"{name}: {first or second}"
                for first, second in found
                if not first.startswith(".") and (first or second).split(".")[0] not in known
            }
    assert missing == set()
