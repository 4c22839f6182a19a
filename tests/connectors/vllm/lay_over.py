"""Makes an environment with another version of vLLM for a CPU: its Python over the binaries of one that has been built.

    python tests/connectors/vllm/lay_over.py 0.33.0 .venv-vllm .venv-vllm-0.33

For versions without a wheel for the CPU. Run by the Python of the environment that has the binaries, whose packages the
new one shares: it has some 60 MB of its own, with what `requirements-<version>.txt` adds.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

LEFT_OUT = (".so", ".h", ".hpp", ".cuh", ".cu", ".inl", "/vllm-rs", "/RECORD")
"""Kernels for GPUs and their sources."""


def packages_of(environment: Path) -> Path:
    """Where an environment has its packages."""
    (folder,) = environment.resolve().glob("lib/python3.*/site-packages")
    return folder


def lay_over(version: str, base: Path, made: Path) -> None:
    """Make the environment, or complete it."""
    venv.create(made, symlinks=True)
    packages, shared = packages_of(made), packages_of(base)
    (packages / "shared.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n")
    with tempfile.TemporaryDirectory(dir=made) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*pip, "--dest", folder, f"vllm=={version}"], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages, [name for name in archive.namelist() if not name.endswith(LEFT_OUT)])
    added = Path(__file__).with_name(f"requirements-{made.name.rpartition('-')[2]}.txt")
    if added.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(packages)]
        subprocess.run([*pip, "--requirement", str(added)], check=True)
    for library in (shared / "vllm").glob("*.so"):
        (packages / "vllm" / library.name).unlink(missing_ok=True)
        (packages / "vllm" / library.name).symlink_to(library)
    described = packages / f"vllm-{version}.dist-info" / "METADATA"
    text = described.read_text().replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1)
    described.write_text(text)  # vLLM knows by this that it runs on a CPU


if __name__ == "__main__":
    lay_over(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
