"""Packages for a machine with a GPU and without a network: wheels gathered here, and installed there.

    python bench/gpu/wheels.py [FOLDER]     fill the folder (.gpu-wheels), for Python 3.12 on x86-64

`install` puts those that the machine lacks into a folder of their own, and changes nothing else on it.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".gpu-wheels"
PYTHON = "3.12"
MOST_BYTES = 60 << 20
NEEDED = ["pyzmq", "msgspec", "msgpack", "xxhash", "lz4", "typer", "rich", "prometheus-client"]
"""What the daemon, the client and the tests import beside numpy, which comes with any torch."""
TESTS = ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis"]
DIRECT = ["kvikio-cu13", "libkvikio-cu13", "rapids-logger", "cuda-pathfinder"]
"""GPUDirect. kvikio names CuPy too, 115 MB without the toolkit, and works without it."""
_TAGS = ("2_28", "2_27", "2_26", "2_24", "2_17", "2014", "1")


def gather(folder: Path = FOLDER) -> int:
    """Download the wheels; returns the bytes of all of them. Raises SystemExit where that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    platforms = [f"--platform=manylinux{'' if len(tag) != 4 else '_'}{tag}_x86_64" for tag in _TAGS]
    for names, required in (([*NEEDED, *TESTS], True), (["--no-deps", *DIRECT], False)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", f"--python-version={PYTHON}", "--implementation=cp", *platforms]
        command += [f"--dest={folder}", *names]
        if subprocess.run(command, check=False).returncode:
            if required:
                raise SystemExit("the wheels could not be downloaded: see pip's message above")
            print("kvikio could not be downloaded: GPUDirect will be skipped", file=sys.stderr)
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    if size > MOST_BYTES:
        raise SystemExit(f"{size >> 20} MiB of wheels in {folder}: more than {MOST_BYTES >> 20} MiB are not carried")
    return size


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def lacking(folder: Path) -> list[Path]:
    """The wheels of packages that this Python does not have, one of each."""
    here = {canonical(one.metadata["Name"] or "") for one in importlib.metadata.distributions()}
    wheels = {canonical(wheel.name.split("-")[0]): wheel for wheel in sorted(folder.glob("*.whl"))}
    return [wheel for name, wheel in wheels.items() if name not in here]


def install(folder: Path, target: Path) -> str:
    """Install what is lacking into `target`, without a network; returns what was done, or why it was not."""
    wheels = lacking(folder)
    if not wheels:
        return "nothing was lacking"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--no-cache-dir", "--disable-pip-version-check", f"--target={target}", *map(str, wheels)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"pip failed: {error}"
    names = ", ".join(wheel.name.split("-")[0] for wheel in wheels)
    if done.returncode:
        return f"pip could not install {names}: {done.stderr.strip()[-500:]}"
    return f"installed {names}"


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    total = gather(where)
    print(f"{len(list(where.glob('*.whl')))} wheels, {total / (1 << 20):.1f} MiB in {where}")
