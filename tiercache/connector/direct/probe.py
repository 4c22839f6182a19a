"""Probes, in processes of its own, whether GPUDirect Storage works on a directory, and whether it is worth using.

    stage posix           O_DIRECT reads into host memory: does the directory work at all, how fast
    stage gds             kvikio with cuFile's compatibility mode forbidden: really disk to device
    stage cufile-compat   kvikio, with cuFile's own bounce buffer

The first of the last two that works is measured against the bounce through page-locked host memory, each direction by
itself, on a file in that very directory. A stage that hangs is killed, which a thread could not be. The code of that
process is in `tiercache.connector.direct.probe_stage`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from tiercache.copies.cuda_driver import driver
from tiercache.ground import forks
from tiercache.ground.extras import install_extra
from tiercache.ground.isolated import python_command

STAGE_TIMEOUT_S = 30.0
"""Importing torch and making a CUDA context takes seconds; moving 64 MiB less than one."""


class Mode(str, Enum):
    """How blocks get from a directory to a GPU."""

    GDS = "gds"
    """Disk to device memory."""
    COMPAT = "cufile-compat"
    """cuFile reads into host memory and copies."""
    POSIX = "posix"
    """Not by cuFile: the daemon reads into its arena, and the client copies from there."""


@dataclass(frozen=True, slots=True)
class GdsProbe:
    """Result of a probe of one directory. Rates are bytes per second, 0 where nothing was measured.

    Attributes:
        mode: the best that works.
        reason: why it is nothing better; empty for `gds`.
        direct_bytes_per_s, direct_write_bytes_per_s: that mode, into and out of device memory.
        bounce_bytes_per_s, bounce_write_bytes_per_s: through page-locked host memory, the copy included.
        host_bytes_per_s: O_DIRECT into host memory, no GPU involved.
        write_reason: why that mode only reads; empty where it writes too.
    """

    directory: str
    mode: Mode
    reason: str
    direct_bytes_per_s: float = 0.0
    bounce_bytes_per_s: float = 0.0
    host_bytes_per_s: float = 0.0
    direct_write_bytes_per_s: float = 0.0
    bounce_write_bytes_per_s: float = 0.0
    write_reason: str = ""

    @property
    def use_direct(self) -> bool:
        """True if reading directly is possible, and not slower than the bounce."""
        return self.mode is not Mode.POSIX and self.direct_bytes_per_s >= self.bounce_bytes_per_s > 0

    @property
    def use_direct_store(self) -> bool:
        """True if writing directly is possible, and not slower than the bounce."""
        works = self.mode is not Mode.POSIX and not self.write_reason
        return works and self.direct_write_bytes_per_s >= self.bounce_write_bytes_per_s > 0

    @property
    def why_not(self) -> str:
        """Why direct reads are not used."""
        return self._slower(self.direct_bytes_per_s, self.bounce_bytes_per_s)

    @property
    def why_not_store(self) -> str:
        """Why direct writes are not used."""
        return self.write_reason or self._slower(self.direct_write_bytes_per_s, self.bounce_write_bytes_per_s)

    def _slower(self, direct_bytes_per_s: float, bounce_bytes_per_s: float) -> str:
        slow = f"{direct_bytes_per_s / 1e9:.2f} GB/s are less than {bounce_bytes_per_s / 1e9:.2f} by the bounce"
        return self.reason if self.mode is Mode.POSIX else f"{self.mode.value}: {slow}"


_probes: dict[str, GdsProbe] = {}
_probing = threading.Lock()


@forks.in_child
def _forget_probing() -> None:
    """After a fork: the probing thread does not exist in the child."""
    global _probing
    _probing = threading.Lock()


def probe_gds(directory: str | Path, timeout_s: float = STAGE_TIMEOUT_S) -> GdsProbe:
    """Probe a directory, or return this process's earlier result. Raises nothing.

    Writes and removes a file of 64 MiB there. Blocks for at most about three times `timeout_s`.
    """
    name = os.path.realpath(directory)
    with _probing:
        if name not in _probes:
            _probes[name] = _probe(name, timeout_s)
        return _probes[name]


def _probe(directory: str, timeout_s: float) -> GdsProbe:
    host = _run_stage(directory, Mode.POSIX, timeout_s)
    if "error" in host:
        return GdsProbe(directory, Mode.POSIX, host["error"])
    if driver() is None:
        return GdsProbe(directory, Mode.POSIX, "no cuda: there is no libcuda.so.1", 0, 0, host["host"])
    if importlib.util.find_spec("kvikio") is None:
        reason = f"kvikio is not installed: {install_extra('gpu')}"
        return GdsProbe(directory, Mode.POSIX, reason, 0, 0, host["host"])
    reasons: list[str] = []
    for mode in (Mode.GDS, Mode.COMPAT):
        found = _run_stage(directory, mode, timeout_s)
        if "error" not in found:
            rates = found["direct"], found["bounce"], host["host"], found["direct_write"], found["bounce_write"]
            return GdsProbe(directory, mode, "; ".join(reasons), *rates, found["write_error"])
        reasons.append(f"{mode.value}: {found['error']}")
    return GdsProbe(directory, Mode.POSIX, "; ".join(reasons), 0, 0, host["host"])


def _run_stage(directory: str, mode: Mode, timeout_s: float) -> dict[str, Any]:
    """Run one stage in a process of its own: returns its figures, or `error`."""
    with tempfile.TemporaryDirectory(prefix="tiercache-gds-") as scratch:
        environment = dict(os.environ)
        if mode is not Mode.POSIX:
            environment |= kvikio_environment(mode, scratch)
        command = python_command("tiercache.connector.direct.probe_stage", mode.value, directory)
        process = subprocess.Popen(
            command,
            cwd=scratch,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            _reap(process)
            _remove_left(directory, process.pid)
            return {"error": f"it hung and was killed after {timeout_s:g} s"}
        try:
            found: dict[str, Any] = json.loads(output.splitlines()[-1])
        except (IndexError, ValueError):
            _remove_left(directory, process.pid)
            last = errors.decode(errors="replace").strip().splitlines()[-1:]
            found = {"error": f"its process ended with status {process.returncode}: {' '.join(last)[:300]}"}
        return found


class DeviceBytes:
    """Device memory by its address, as kvikio and others take arrays (the CUDA array interface)."""

    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def kvikio_environment(mode: Mode, scratch: str) -> dict[str, str]:
    """Settings under which kvikio does as `mode` says or fails, instead of silently using something slower.

    cuFile's settings and log go to `scratch`; by default it logs into the current directory.
    """
    path = os.path.join(scratch, "cufile.json")
    strict = mode is Mode.GDS
    with open(path, "w") as file:
        json.dump({"logging": {"dir": scratch}, "properties": {"allow_compat_mode": not strict}}, file)
    return {"KVIKIO_COMPAT_MODE": "OFF", "CUFILE_ENV_PATH_JSON": path}


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for a killed process, unless it is stuck in the kernel (a disk that hangs)."""
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    try:
        process.wait(2.0)
    except subprocess.TimeoutExpired:
        threading.Thread(target=process.wait, name="gds-probe-reaper", daemon=True).start()


def file_name(directory: str, pid: int) -> Path:
    """The file that a stage in process `pid` works with."""
    return Path(directory) / f"gds-probe-{pid}.tmp"


def _remove_left(directory: str, pid: int) -> None:
    file_name(directory, pid).unlink(missing_ok=True)
