"""Does GPUDirect Storage work on a directory, and is it worth using there? Tried in processes of its own.

    stage posix           O_DIRECT reads into host memory: does the directory work at all, how fast
    stage gds             kvikio with cuFile's compatibility mode forbidden: really disk to device
    stage cufile-compat   kvikio, with cuFile's own bounce buffer

The first of the last two that works is measured against the bounce through page-locked host memory,
on a file in that very directory. A stage that hangs is killed, which no thread could be.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from tiercache.cuda_driver import driver

STAGE_TIMEOUT_S = 30.0
"""Importing torch and making a CUDA context takes seconds; reading 64 MiB less than one."""
FILE_BYTES = 64 << 20
PIECE_BYTES = 2 << 20
THREADS = 8
ROUNDS = 3


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
    """What was found out about a directory. Rates are bytes per second, 0 where nothing was measured.

    Attributes:
        mode: the best that works.
        reason: why it is nothing better; empty for `gds`.
        direct_bytes_per_s: that mode, into device memory.
        bounce_bytes_per_s: by way of page-locked host memory, the copy included.
        host_bytes_per_s: O_DIRECT into host memory, no GPU involved.
    """

    directory: str
    mode: Mode
    reason: str
    direct_bytes_per_s: float = 0.0
    bounce_bytes_per_s: float = 0.0
    host_bytes_per_s: float = 0.0

    @property
    def use_direct(self) -> bool:
        """Whether reading directly is possible, and not slower than the bounce."""
        return self.mode is not Mode.POSIX and self.direct_bytes_per_s >= self.bounce_bytes_per_s > 0


_probes: dict[str, GdsProbe] = {}
_probing = threading.Lock()


def probe_gds(directory: str | Path, timeout_s: float = STAGE_TIMEOUT_S) -> GdsProbe:
    """Probe a directory, or return what this process found out before. Raises nothing.

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
        reason = "kvikio is not installed: pip install 'tiercache[gpu]'"
        return GdsProbe(directory, Mode.POSIX, reason, 0, 0, host["host"])
    reasons: list[str] = []
    for mode in (Mode.GDS, Mode.COMPAT):
        found = _run_stage(directory, mode, timeout_s)
        if "error" not in found:
            return GdsProbe(directory, mode, "; ".join(reasons), found["direct"], found["bounce"], host["host"])
        reasons.append(f"{mode.value}: {found['error']}")
    return GdsProbe(directory, Mode.POSIX, "; ".join(reasons), 0, 0, host["host"])


def _run_stage(directory: str, mode: Mode, timeout_s: float) -> dict[str, Any]:
    """One stage in a process of its own: its figures, or `error`."""
    with tempfile.TemporaryDirectory(prefix="tiercache-gds-") as scratch:
        path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path}
        if mode is not Mode.POSIX:
            environment |= kvikio_environment(mode, scratch)
        command = [sys.executable, "-m", "tiercache.gds_probe", mode.value, directory]
        process = subprocess.Popen(
            command, cwd=scratch, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
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
            "shape": (length,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip


def kvikio_environment(mode: Mode, scratch: str) -> dict[str, str]:
    """Settings under which kvikio does as `mode` says or fails, instead of something slower in silence.

    cuFile's settings and log go to `scratch`; by default it logs into the current directory.
    """
    path = os.path.join(scratch, "cufile.json")
    strict = mode is Mode.GDS
    with open(path, "w") as file:
        json.dump({"logging": {"dir": scratch}, "properties": {"allow_compat_mode": not strict}}, file)
    return {"KVIKIO_COMPAT_MODE": "OFF", "CUFILE_ENV_PATH_JSON": path}


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Take leave of a killed process, unless the kernel does not let go of it (a disk that hangs)."""
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    try:
        process.wait(2.0)
    except subprocess.TimeoutExpired:
        threading.Thread(target=process.wait, name="gds-probe-reaper", daemon=True).start()


def _file_name(directory: str, pid: int) -> Path:
    return Path(directory) / f"gds-probe-{pid}.tmp"


def _remove_left(directory: str, pid: int) -> None:
    _file_name(directory, pid).unlink(missing_ok=True)


# --- in the process of a stage -------------------------------------------------------------------


def _main(mode: Mode, directory: str) -> None:
    """Run a stage and print one line of JSON."""
    try:
        with _test_file(directory) as path:
            found = _measure_host(path) if mode is Mode.POSIX else _measure_device(path)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        text = f"{error.strerror} ({error.filename})" if isinstance(error, OSError) and error.filename else str(error)
        found = {"error": " ".join(text.split())[:300] or type(error).__name__}
    print(json.dumps(found), flush=True)


@contextmanager
def _test_file(directory: str) -> Iterator[str]:
    """A file of random pages, on the disk and not in the page cache."""
    path = _file_name(directory, os.getpid())
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    try:
        with mmap.mmap(-1, PIECE_BYTES) as area:
            for offset in range(0, FILE_BYTES, PIECE_BYTES):
                area[:] = os.urandom(4096) * (PIECE_BYTES // 4096)
                os.pwritev(fd, [area], offset)
        os.fsync(fd)
        yield str(path)
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def _rate(read_piece: Callable[[int, int], None], finish: Callable[[], None] = lambda: None) -> float:
    """Bytes per second of the best round; `read_piece(worker, offset)` is called by THREADS threads."""
    best_s = float("inf")
    for _ in range(ROUNDS):
        problems: list[Exception] = []

        def work(worker: int, problems: list[Exception] = problems) -> None:
            try:
                for offset in range(worker * PIECE_BYTES, FILE_BYTES, THREADS * PIECE_BYTES):
                    read_piece(worker, offset)
            except (OSError, RuntimeError, ValueError) as error:
                problems.append(error)

        threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(THREADS)]
        start_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]
        finish()
        best_s = min(best_s, time.perf_counter() - start_s)
    return FILE_BYTES / best_s


def _read_piece(fd: int, view: Any, offset: int) -> None:
    if os.preadv(fd, [view], offset) != PIECE_BYTES:
        raise OSError("a direct read came back short")


def _measure_host(path: str) -> dict[str, Any]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    areas = [mmap.mmap(-1, PIECE_BYTES) for _ in range(THREADS)]
    try:
        return {"host": _rate(lambda worker, offset: _read_piece(fd, areas[worker], offset))}
    finally:
        os.close(fd)


def _measure_device(path: str) -> dict[str, Any]:
    """Both ways into device memory, and whether the bytes are the same."""
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise RuntimeError("no cuda: torch finds no device")
    kvikio: Any = importlib.import_module("kvikio")
    bounced = torch.empty(FILE_BYTES, dtype=torch.uint8, device="cuda")
    direct = torch.zeros(FILE_BYTES, dtype=torch.uint8, device="cuda")
    pinned = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(THREADS)]
    torch.cuda.synchronize()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    file = kvikio.CuFile(path, "r")

    def bounce(worker: int, offset: int) -> None:
        _read_piece(fd, memoryview(pinned[worker].numpy()), offset)
        bounced[offset : offset + PIECE_BYTES].copy_(pinned[worker])

    def read(worker: int, offset: int) -> None:
        target = DeviceBytes(direct.data_ptr() + offset, PIECE_BYTES)
        if file.raw_read(target, PIECE_BYTES, offset) != PIECE_BYTES:
            raise OSError("a read by cuFile came back short")

    try:
        found = {"direct": _rate(read), "bounce": _rate(bounce, torch.cuda.synchronize)}
    finally:
        file.close()
        os.close(fd)
    if not torch.equal(direct, bounced):
        raise RuntimeError("what cuFile read into device memory are not the bytes of the file")
    return found


if __name__ == "__main__":
    _main(Mode(sys.argv[1]), sys.argv[2])
