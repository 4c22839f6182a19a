"""Backends for direct reads and writes between files and the memory of a pool's blocks, behind one interface.

    KvikioBackend   device memory, by GPUDirect Storage (kvikio); only after a probe has passed
    HostBackend     host memory, by direct I/O; fails on request. For pools on a CPU, and for tests

kvikio is imported when the first KvikioBackend is made, never before: opened where GPUDirect does not work it can spin
forever, which is why `tiercache.connector.direct.probe` tries it in another process first.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import tempfile
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

import numpy as np

from tiercache.connector.direct.probe import DeviceBytes, GdsProbe, Mode, kvikio_environment
from tiercache.copies.copy_plan import Addresses
from tiercache.copies.cuda_driver import beside_captures
from tiercache.errors import ConfigError, TierCacheError
from tiercache.protocol.checksums import lane_sum

PAGE_BYTES = 4096
RAW = 0
"""The codec of blocks that are stored raw."""
HANG_S = 60.0
"""Time after which a hang that a test injects ends."""


class DirectFailed(TierCacheError):
    """Blocks could not be read, written or verified directly. The target holds anything."""


class Backend(Protocol):
    """Reads and writes files. All methods may be called from several threads; the blocking ones say so.

    `name` is for people. Files are whatever `open` returns. Raise DirectFailed and nothing else.
    """

    name: str

    def open(self, path: str, writing: bool) -> Any:
        """Open a segment file for reading, or for writing in place. Blocks."""

    def close(self, file: Any) -> None:
        """Close it; no I/O on it is in progress."""

    def read(self, file: Any, offset: int, address: int, length: int) -> int:
        """Read bytes `offset ..< offset + length` to `address`; returns how many came.

        Offset and length are multiples of 4096. Blocks until nothing of this read is in progress any more, also when it
        fails.
        """

    def write(self, file: Any, offset: int, address: int, length: int) -> int:
        """As `read`, the other way; returns how many bytes went."""

    def is_ready(self, after: Any) -> bool:
        """True if the work marked by `Copier.mark` is over, so that blocks may be read and overwritten."""

    def lane_sums(self, addresses: Addresses, length: int) -> list[int]:
        """`tiercache.protocol.checksums.lane_sum` of the block at each address. Blocks."""


class KvikioBackend:
    """GPUDirect Storage through kvikio, into memory of one CUDA device.

    Args:
        probe: result of another process; one that did not pass raises ConfigError.
        device: as torch writes it, e.g. `cuda:0`.

    Raises ConfigError too when kvikio, torch or Triton cannot be used here.
    """

    def __init__(self, probe: GdsProbe, device: str) -> None:
        if probe.mode is Mode.POSIX:
            raise ConfigError(f"GPUDirect is not used on {probe.directory}: {probe.reason}")
        self.name = probe.mode.value
        self._device = device
        self._scratch = tempfile.TemporaryDirectory(prefix="tiercache-cufile-")  # for cuFile's log
        os.environ.update(kvikio_environment(probe.mode, self._scratch.name))
        try:
            self._kvikio: Any = importlib.import_module("kvikio")
            self._torch: Any = importlib.import_module("torch")
            self._sums: Any = importlib.import_module("tiercache.kernels.checksum").lane_sums
            with self._torch.cuda.device(device):
                self._stream = self._torch.cuda.Stream(device)
                # Compiled now: at the first load it would delay a request.
                trial = self._torch.zeros(PAGE_BYTES, dtype=self._torch.uint8, device=device)
                self._torch.cuda.synchronize(device)
            self.lane_sums(np.array([trial.data_ptr()], np.int64), PAGE_BYTES)
        except (ImportError, OSError, RuntimeError, ValueError, DirectFailed) as error:
            raise ConfigError(f"GPUDirect cannot be used in this process: {error}") from error

    def open(self, path: str, writing: bool) -> Any:
        """See `Backend`."""
        try:
            return self._kvikio.CuFile(path, "r+" if writing else "r")  # "w" would empty the file
        except (OSError, RuntimeError) as error:
            raise DirectFailed(f"{path} cannot be opened: {error}") from error

    def close(self, file: Any) -> None:
        """See `Backend`."""
        file.close()

    def read(self, file: Any, offset: int, address: int, length: int) -> int:
        """See `Backend`. One cuFileRead; the interpreter's lock is released meanwhile."""
        return self._move(file.raw_read, offset, address, length)

    def write(self, file: Any, offset: int, address: int, length: int) -> int:
        """See `Backend`. One cuFileWrite."""
        return self._move(file.raw_write, offset, address, length)

    @staticmethod
    def _move(call: Callable[[DeviceBytes, int, int], Any], offset: int, address: int, length: int) -> int:
        try:
            return int(call(DeviceBytes(address, length), length, offset))
        except (OSError, RuntimeError, ValueError) as error:  # kvikio's errors are texts without a number
            raise DirectFailed(f"{length} bytes at {offset}: {error}") from error

    def is_ready(self, after: Any) -> bool:
        """See `Backend`; `after` is an event, or None."""
        with beside_captures():
            return after is None or bool(after.query())

    def lane_sums(self, addresses: Addresses, length: int) -> list[int]:
        """See `Backend`: the kernel, on a stream of its own."""
        torch = self._torch
        try:
            with torch.cuda.device(self._device), beside_captures(), torch.cuda.stream(self._stream):
                table = torch.from_numpy(np.ascontiguousarray(addresses, np.int64)).to(self._device)
                sums = self._sums(table, length).cpu()
        except (RuntimeError, ValueError, OSError) as error:
            raise DirectFailed(f"blocks could not be verified on {self._device}: {error}") from error
        return [int(value) for value in sums.numpy().view(np.uint64)]


class Fault(Enum):
    """Faults that a `HostBackend` injects into a read or write."""

    ERROR = "error"
    SHORT = "short"
    """The last page is not moved."""
    WRONG = "wrong"
    """One bit of the last byte is flipped."""
    HANG = "hang"
    """It waits until `resume`, and then completes."""


class HostBackend:
    """Reads into host memory and writes from there with O_DIRECT: the same interface without a GPU.

    Args:
        fault, write_fault: called with the index of each read or write; return the fault to inject.

    `reads` and `writes` count those that have begun, `hanging` those that hang now.
    """

    name = "host"

    def __init__(
        self,
        fault: Callable[[int], Fault | None] = lambda index: None,
        write_fault: Callable[[int], Fault | None] = lambda index: None,
    ) -> None:
        self.reads = 0
        self.writes = 0
        self.hanging = 0
        self._fault = fault
        self._write_fault = write_fault
        self._lock = threading.Lock()
        self._resume = threading.Event()

    def open(self, path: str, writing: bool) -> int:
        """See `Backend`."""
        try:
            return os.open(path, (os.O_RDWR if writing else os.O_RDONLY) | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            raise DirectFailed(f"{path} cannot be opened: {error.strerror}") from error

    def close(self, file: int) -> None:
        """See `Backend`."""
        os.close(file)

    def read(self, file: int, offset: int, address: int, length: int) -> int:
        """See `Backend`. An unaligned address (4096) costs a copy."""
        with self._lock:
            index, self.reads = self.reads, self.reads + 1
        fault = self._fault(index)
        wanted = self._suffer(fault, offset, length)
        count = _read_direct(file, offset, address, wanted) if wanted else 0
        if fault is Fault.WRONG:
            _bytes_at(address, length)[-1] ^= 1
        return count

    def write(self, file: int, offset: int, address: int, length: int) -> int:
        """See `Backend`. An unaligned address (4096) costs a copy."""
        with self._lock:
            index, self.writes = self.writes, self.writes + 1
        fault = self._write_fault(index)
        wanted = self._suffer(fault, offset, length)
        return _write_direct(file, offset, address, wanted, fault is Fault.WRONG) if wanted else 0

    def _suffer(self, fault: Fault | None, offset: int, length: int) -> int:
        """Inject the fault; returns how many bytes to move, maybe after a while."""
        if fault is Fault.ERROR:
            raise DirectFailed(f"{length} bytes at {offset}: as was asked for")
        if fault is Fault.HANG:
            self._hang()
        return length - PAGE_BYTES if fault is Fault.SHORT else length

    def _hang(self) -> None:
        with self._lock:
            self.hanging += 1
        self._resume.wait(HANG_S)
        with self._lock:
            self.hanging -= 1

    def resume(self) -> None:
        """Let hanging operations, and later ones that would hang, continue."""
        self._resume.set()

    def is_ready(self, after: Any) -> bool:
        """See `Backend`; a CPU has no queue to wait for."""
        return True

    def lane_sums(self, addresses: Addresses, length: int) -> list[int]:
        """See `Backend`."""
        return [lane_sum(_bytes_at(address, length)) for address in addresses.tolist()]


def _bytes_at(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def _read_direct(file: int, offset: int, address: int, length: int) -> int:
    target = _bytes_at(address, length)
    if address % PAGE_BYTES == 0:
        return _move_all(os.preadv, file, offset, target)
    with mmap.mmap(-1, length) as area, memoryview(area) as view:
        count = _move_all(os.preadv, file, offset, view)
        target[:count] = view[:count]
    return count


def _write_direct(file: int, offset: int, address: int, length: int, spoiled: bool) -> int:
    source = _bytes_at(address, length)
    if address % PAGE_BYTES == 0 and not spoiled:
        return _move_all(os.pwritev, file, offset, source)
    with mmap.mmap(-1, length) as area, memoryview(area) as view:
        view[:] = source
        view[-1] ^= spoiled
        return _move_all(os.pwritev, file, offset, view)


def _move_all(call: Callable[[int, list[memoryview], int], int], file: int, offset: int, view: memoryview) -> int:
    done = 0
    while done < len(view):
        try:
            count = call(file, [view[done:]], offset + done)
        except OSError as error:
            raise DirectFailed(f"{len(view)} bytes at {offset}: {error.strerror}") from error
        if count == 0:
            break
        done += count
    return done
