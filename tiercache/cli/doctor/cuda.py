"""Tests whether host memory can be registered with CUDA, in a child process: one with a hung driver is killed."""

from __future__ import annotations

import subprocess
import sys

from tiercache.cli.doctor.findings import Finding, failure, ok, skipped
from tiercache.ground.isolated import python_command

TOPIC = "gpu"
ANSWER_S = 20.0
TRIED_BYTES = 64 << 20
_NO_DRIVER = 3


def examine() -> list[Finding]:
    """The finding, one line. Blocks for at most `ANSWER_S`."""
    command = python_command("tiercache.cli.doctor.cuda")
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
    import os
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


if __name__ == "__main__":
    # Skips the interpreter's own shutdown: a mapping that ctypes refers to cannot be closed.
    status = main()
    sys.stdout.flush()
    import os

    os._exit(status)
