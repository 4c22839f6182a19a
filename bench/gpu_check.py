"""All checks that need a GPU, in one command and within eight minutes.

    python bench/gpu_check.py [--deadline S] [--results FOLDER] [--only PART ...] [--rehearse]

Runs the parts of `gpu.parts`, each in a process of its own with a limit, and ends with a table and one line of JSON.
Results: gpu-<card>.json in bench/results, beside it a .jsonl that grows with each result and a .log. Packages that
are lacking come from .gpu-wheels, if `make gpu-wheels` has filled it. Exit status 1 if a check failed or a part did
not finish. Without CUDA it says so in one line and exits 0, having run nothing; --rehearse runs the parts on the CPU,
with stand-ins, to see that they run.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from gpu import wheels  # noqa: E402
from gpu.parts import PARTS, Part  # noqa: E402
from gpu.place import REHEARSAL_VARIABLE  # noqa: E402
from gpu.runner import Results, run_all, table  # noqa: E402

DEADLINE_S = 465.0


def device_name() -> str | None:
    """Name of the first CUDA device, or None. Asked in another process: this one must never start CUDA.

    Raises SystemExit where there is a driver that torch cannot use: that is no machine without a GPU.
    """
    ask = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    try:
        done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        why = "it did not answer within 120 s"
    else:
        if done.stdout.strip():
            return done.stdout.strip()
        why = (done.stderr.strip().splitlines() or ["it finds no CUDA device"])[-1]
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    raise SystemExit(f"there is a CUDA driver, and torch cannot use it: {why}")


def commit() -> str:
    """The commit that is checked out, or `unknown` outside a repository."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def command_of(part: Part) -> list[str]:
    """What runs a part."""
    return [sys.executable, str(ROOT / "bench" / "gpu_check.py"), "--part", part.module, *part.arguments]


def main() -> int:
    """Run all parts and write the results; see the top of this file."""
    begin_s = time.time()
    if sys.argv[1:2] == ["--part"]:
        importlib.import_module(f"gpu.{sys.argv[2]}").run(sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, metavar="S", help="seconds for everything")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results", metavar="FOLDER")
    parser.add_argument("--only", nargs="+", metavar="PART", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with stand-ins")
    options = parser.parse_args()
    device = "rehearsal" if options.rehearse else device_name()
    if device is None:
        print("no CUDA device: nothing was run (the gpu tests and benchmarks need one)")
        return 0
    wanted = [part for part in PARTS if not options.only or part.name in options.only]
    if not wanted:
        parser.error(f"no such part: {' '.join(options.only)}")
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    with tempfile.TemporaryDirectory(prefix="tiercache-gpu-check-") as folder:
        packages = "no .gpu-wheels" if not wheels.FOLDER.is_dir() else wheels.install(wheels.FOLDER, Path(folder))
        print(f"{device}; packages: {packages}", flush=True)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), folder, os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": "1" if options.rehearse else "4",
            REHEARSAL_VARIABLE: "1" if options.rehearse else "",
        }
        results = Results(options.results.resolve(), f"gpu-{slug}")
        about = {
            "device": device,
            "commit": commit(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "command": " ".join(["python", "bench/gpu_check.py", *sys.argv[1:]]),
            "packages": packages,
        }
        try:
            run_all(wanted, results, command_of, begin_s + options.deadline, environment)
        finally:
            whole = results.save(**about, seconds=round(time.time() - begin_s, 1))
            results.close()
    print(table(results.parts))
    print(f"\n{results.path}")
    print(json.dumps({**about, "seconds": whole["seconds"], "summary": whole["summary"]}))
    good = not whole["summary"]["checks_failed"] and not whole["summary"]["parts_failed"]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
