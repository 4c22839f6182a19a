"""All checks that need a GPU, in one command and within twelve minutes.

    python bench/gpu_check.py

Runs the tests in tests/gpu, then the GPU benchmarks, each in its own process with a time limit.
Prints their output, writes bench/results/gpu-<device>.json, and prints the same object as
the last line. Exit status 1 if a test failed or a part did not finish. Without CUDA it says so in
one line and exits 0, having run nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TESTS_LIMIT_S = 300
BENCHMARK_LIMIT_S = 210
BENCHMARKS = ("block_copy", "attention")


class Outcome(NamedTuple):
    """How a part ended: exit status (None: killed at its limit), what it printed, seconds."""

    status: int | None
    output: str
    seconds: float


def device_name() -> str | None:
    """Name of the first CUDA device, or None."""
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def run(command: list[str], limit_s: float) -> Outcome:
    """Run a part, showing what it prints when it has ended; kill it at its limit."""
    print(f"$ {' '.join(command)}", flush=True)
    start = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            timeout=limit_s,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as expired:
        printed = expired.stdout or b""
        status, output = None, printed.decode() if isinstance(printed, bytes) else printed
        output += f"\nkilled after {limit_s:.0f} s\n"
    print(output, flush=True)
    return Outcome(status, output, time.monotonic() - start)


def gpu_tests() -> dict[str, Any]:
    """The tests in tests/gpu; those that need a package which is not installed are skipped."""
    # Plugins and warnings of the machine's own packages are not under test here.
    options = ["-o", "addopts=", "-o", "filterwarnings=", "-p", "no:cacheprovider"]
    outcome = run(["-m", "pytest", "-q", "-rfEs", "-m", "gpu", *options, "tests/gpu"], TESTS_LIMIT_S)
    counts = dict.fromkeys(("passed", "failed", "skipped", "error"), 0)
    lines = outcome.output.strip().splitlines()
    for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1] if lines else ""):
        counts[word] = int(number)
    ok = outcome.status == 0 and counts["passed"] > 0
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", outcome.output, re.MULTILINE)
    return {"ok": ok, **counts, "failures": failures, "seconds": round(outcome.seconds, 1)}


def benchmark(script: str) -> dict[str, Any]:
    """One benchmark; its last line is its result."""
    outcome = run([f"bench/{script}"], BENCHMARK_LIMIT_S)
    lines = outcome.output.strip().splitlines()
    result: dict[str, Any] = {"ok": False}
    if outcome.status == 0 and lines and lines[-1].startswith("{"):
        result = {"ok": True, **json.loads(lines[-1])}
    return {**result, "seconds": round(outcome.seconds, 1)}


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


def main() -> int:
    """Run all parts and write the result; see the top of this file."""
    device = device_name()
    if device is None:
        print("no CUDA device: nothing was run (the gpu tests and benchmarks need one)")
        return 0
    result: dict[str, Any] = {
        "device": device,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": "python bench/gpu_check.py",
        "tests": gpu_tests(),
        **{name: benchmark(f"bench_{name}.py") for name in BENCHMARKS},
    }
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    path = ROOT / "bench" / "results" / f"gpu-{slug}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path.relative_to(ROOT)}")
    print(json.dumps(result))
    return 0 if all(result[part]["ok"] for part in ("tests", *BENCHMARKS)) else 1


if __name__ == "__main__":
    sys.exit(main())
