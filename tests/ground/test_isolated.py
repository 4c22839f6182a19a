"""Children import what their parent imports, and nothing of the folder they are started in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

import tiercache
from tiercache.cli.doctor import gpu as doctor_gpu
from tiercache.connector.direct import probe as gds_probe
from tiercache.demo.child import Child
from tiercache.ground.isolated import quick_command

ROOT = Path(__file__).resolve().parents[2]
WANTED = ("tiercache", "msgspec", "zmq", "numpy", "uvicorn", "json", "logging", "typing", "runpy", "sitecustomize")


@pytest.fixture
def proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory is full of modules that write to this file when they are imported, and then fail."""
    folder, proof = tmp_path / "cwd", tmp_path / "proof"
    folder.mkdir()
    for name in WANTED:
        code = f"import sys\nopen({str(proof)!r}, 'a').write({name!r} + ' in ' + repr(sys.orig_argv) + chr(10))\n"
        folder.joinpath(f"{name}.py").write_text(code + f"raise ImportError('the {name} of the current directory')\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return proof


def test_no_child_imports_from_the_current_directory(proof: Path, tmp_path: Path) -> None:
    with tiercache.launch("2MiB", http="127.0.0.1:0") as daemon:
        wait_until(lambda: "serving http://" in daemon.log.read_text() or proof.exists(), "HTTP is served")
    assert gds_probe.probe_gds(tmp_path).host_bytes_per_s > 0
    assert doctor_gpu.examine()
    with Child("tiercache.cli.main", "--help", log=tmp_path / "help") as child:
        assert child.process.wait(60) == 0
    done = subprocess.run(quick_command("tiercache.cli.main"), capture_output=True, text=True, timeout=60, check=False)
    assert "Usage: tiercache" in done.stdout, done
    assert not proof.exists(), proof.read_text()


@pytest.mark.parametrize("flags", [(), ("-I",), ("-E",), ("-P",)])
def test_a_child_has_the_package_of_its_parent(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Also where only the parent knows where the package is, as in a script beside it."""
    if flags == ("-P",) and sys.version_info < (3, 11):
        pytest.skip("Python has -P from 3.11 on")
    other = tmp_path / "other"
    other.mkdir()
    other.joinpath("probe.py").write_text("import sys, tiercache\nprint(tiercache.__file__, sys.argv)\n")
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import subprocess, tiercache.ground.isolated as isolated\n"
        "print(isolated.python_command('probe', 'a b', '-m'))\n"
        "subprocess.run(isolated.python_command('probe', 'a b', '-m'))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(other)}
    command = [sys.executable, *flags, "-c", code]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    if flags in ((), ("-P",)):
        assert f"{ROOT / 'tiercache' / '__init__.py'} " in done.stdout, done
        assert "'a b', '-m']" in done.stdout.splitlines()[-1]
    else:  # the parent looks at no environment, so the child does not either
        assert "No module named probe" in done.stderr or "No module named 'probe'" in done.stderr


def test_modules_are_started_in_one_place_only() -> None:
    """`-m` beside an interpreter would import from the current directory."""
    places = []
    for folder in ("tiercache", "daemon", "connectors", "kernels", "bench"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if re.search(r"""["']-m["'],\s*f?["']tiercache""", path.read_text()) and not path.is_symlink():
                places.append(str(path.relative_to(ROOT)))
    assert places == [], "use tiercache.ground.isolated.python_command"
