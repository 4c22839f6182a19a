"""A benchmark of its own file, in the time that is left: its figures, each over its limit on this card."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from gpu.place import ROOT
from gpu.tell import check, fact, figure, left_s, skip


def run(arguments: Sequence[str]) -> None:
    """Run `bench_<name>.py`, whose last line is its result."""
    [name] = arguments
    command = [sys.executable, str(ROOT / "bench" / f"bench_{name}.py"), "--budget", f"{max(left_s() - 15, 5):.0f}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n")
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        check(f"bench_{name}.py ran", False, "\n".join(done.stderr.strip().splitlines()[-8:]))
    elif not lines or not lines[-1].startswith("{"):
        skip(f"bench_{name}.py", lines[-1] if lines else "it printed nothing")
    else:
        TELL[name](json.loads(lines[-1]))


def tell_block_copy(result: dict[str, Any]) -> None:
    """Kernels and copies, each over its limit of the same run."""
    rates = result["gigabytes_per_s"]
    fact("GB/s", rates)
    for name, limit in result["limits"].items():
        if rates.get(limit):
            figure(f"{name}, of {limit}", rates[name] / rates[limit])
    for name in result["skipped"]:
        skip(name, "out of time")


def tell_attention(result: dict[str, Any]) -> None:
    """Decode over the memory's bandwidth, prefill over the matrix units."""
    fact("figures", result["figures"])
    target = result["target"]["decode_over_bandwidth"]
    if result["decode_over_bandwidth"] is not None:
        figure("decode of raw blocks over bandwidth", result["decode_over_bandwidth"], at_least=target)
    for name, one in result["figures"].items():
        figure(f"{name}, of its limit", one["share"])
    for name in result["skipped"]:
        skip(name, "out of time")


TELL = {"block_copy": tell_block_copy, "attention": tell_attention}
