"""Tests CUDA's registration of host memory, and GPUDirect Storage, in child processes that are killed if they hang."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from tiercache.cli.doctor.findings import Finding, failure, ok, skipped, warning
from tiercache.cli.report import Section, print_sections
from tiercache.connector.direct.probe import GdsProbe, Mode, probe_gds
from tiercache.ground.isolated import python_command
from tiercache.ground.units import format_bytes

TOPIC = "gpu"
ANSWER_S = 20.0
TRIED_BYTES = 64 << 20
_NO_DRIVER = 3


def examine() -> list[Finding]:
    """The finding, one line. Blocks for at most `ANSWER_S`."""
    command = python_command("tiercache.cli.doctor.gpu")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        remedy = "check that nvidia-smi answers, and look at dmesg"
        return [failure(TOPIC, "CUDA registration", f"the driver does not answer within {ANSWER_S:.0f} s", remedy)]
    said = (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()[-1]
    if done.returncode == _NO_DRIVER:
        return [skipped(TOPIC, "CUDA registration", "no driver (libcuda.so.1) or no device here")]
    if done.returncode:
        remedy = "raise the limit on locked memory of the engine's container (ulimit -l): copies are slower otherwise"
        return [failure(TOPIC, "CUDA registration", said, remedy)]
    return [ok(TOPIC, "CUDA registration", said)]


def main() -> int:
    """Register 64 MiB of shared memory and print how fast that was; exit status 3 if there is no driver."""
    import ctypes
    import mmap
    import time

    from tiercache.copies.cuda_driver import driver

    found = driver()
    if found is None:
        return _NO_DRIVER
    fd = os.memfd_create("tiercache-doctor")
    os.ftruncate(fd, TRIED_BYTES)
    area = mmap.mmap(fd, TRIED_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    try:
        context = found.any_context()
    except Exception as error:  # noqa: BLE001 - a driver without a device has its own ways to say so
        print(error)
        return _NO_DRIVER
    with context:
        started_s = time.perf_counter()
        code = found.register(address, TRIED_BYTES)
        took_s = time.perf_counter() - started_s
        if code:
            print(f"{TRIED_BYTES >> 20} MiB cannot be registered: {found.error_name(code)}")
            return 1
        found.unregister(address)
    print(f"works, {TRIED_BYTES / took_s / 1e9:.1f} GB/s")
    return 0


# --- GPUDirect Storage -------------------------------------------------------------------------------

__all__ = ["as_tree", "finding", "print_probe", "probe_gds"]

_WAYS = {
    Mode.GDS: "disk to GPU memory (gds)",
    Mode.COMPAT: "through cuFile's own bounce buffer (cufile-compat)",
    Mode.POSIX: "through host memory only (posix)",
}


def finding(probe: GdsProbe) -> Finding:
    """The line about GPUDirect."""
    name = f"GPUDirect on {probe.directory}"
    figure = _WAYS[probe.mode] + (f": {probe.reason}" if probe.reason else "")
    if probe.host_bytes_per_s <= 0:
        return failure("gpu", name, figure, "name a directory that exists and can be written to")
    if probe.mode is Mode.POSIX:
        return warning("gpu", name, figure, "only speed is lost: blocks go through the daemon's memory")
    return ok("gpu", name, figure)


def as_tree(probe: GdsProbe) -> dict[str, Any]:
    """All figures, for JSON."""
    uses = {"use_direct": probe.use_direct, "use_direct_store": probe.use_direct_store}
    return {**asdict(probe), "mode": probe.mode.value, **uses}


def print_probe(probe: GdsProbe) -> None:
    """Print all figures as a table."""
    rows = [("blocks go", _WAYS[probe.mode])]
    if probe.reason:
        rows.append(("because", probe.reason))
    rates = {
        "read to the GPU": probe.direct_bytes_per_s,
        "read by way of page-locked memory": probe.bounce_bytes_per_s,
        "read to host memory": probe.host_bytes_per_s,
        "written from the GPU": probe.direct_write_bytes_per_s,
        "written by way of page-locked memory": probe.bounce_write_bytes_per_s,
    }
    rows += [(name, f"{format_bytes(rate)}/s" if rate else "not measured") for name, rate in rates.items()]
    if probe.write_reason:
        rows.append(("writing fails", probe.write_reason))
    rows.append(('gds="auto" uses it', "yes" if probe.use_direct else "no"))
    rows.append(("gds_store=True uses it", "yes" if probe.use_direct_store else "no"))
    print_sections([Section(f"GPUDirect on {probe.directory}", ("", ""), rows)])


if __name__ == "__main__":
    # Skips the interpreter's own shutdown: a mapping that ctypes refers to cannot be closed.
    status = main()
    sys.stdout.flush()
    os._exit(status)
