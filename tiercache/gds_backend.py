"""Reading files straight into the memory where a pool's blocks are: what does it, behind one interface.

    KvikioBackend   device memory, by GPUDirect Storage (kvikio); only after a probe has passed
    HostBackend     host memory, by O_DIRECT reads; fails on request. For pools on a CPU, and for tests

kvikio is imported by the first of them when it is made, never before: opened where GPUDirect does not
work it can spin for ever, which is why `tiercache.gds_probe` tries it in another process first.
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

from tiercache.checksum import lane_sum
from tiercache.copy_plan import Addresses
from tiercache.cuda_driver import beside_captures
from tiercache.errors import ConfigError, TierCacheError
from tiercache.gds_probe import DeviceBytes, GdsProbe, Mode, kvikio_environment

PAGE_BYTES = 4096
RAW = 0
"""The codec of blocks that are stored as they are."""
HANG_S = 60.0
"""Even a read that a test lets hang ends at some time."""


class ReadFailed(TierCacheError):
    """Blocks could not be read or verified this way. What they were read into holds anything."""


class Backend(Protocol):
    """What reads. All methods may be called from several threads; all that block say so.

    `name` is for people. Files are whatever `open` returns. Raise ReadFailed and nothing else.
    """

    name: str

    def open(self, path: str) -> Any:
        """Open a segment file for reading. Blocks."""

    def close(self, file: Any) -> None:
        """Close it; no read of it is under way."""

    def read(self, file: Any, offset: int, address: int, length: int) -> int:
        """Bytes `offset ..< offset + length` to `address`; returns how many came.

        Offset and length are multiples of 4096. Blocks until nothing of this read is under way any
        more, also when it fails.
        """

    def is_ready(self, after: Any) -> bool:
        """Whether the work that `Copier.mark` has marked is over, so that blocks may be overwritten."""

    def lane_sums(self, addresses: Addresses, length: int) -> list[int]:
        """`tiercache.checksum.lane_sum` of the block at each address. Blocks."""


class KvikioBackend:
    """GPUDirect Storage by way of kvikio, into memory of one CUDA device.

    Args:
        probe: what was found in another process; one that did not pass raises ConfigError.
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
                # Compiled now: at the first load it would keep a request waiting.
                trial = self._torch.zeros(PAGE_BYTES, dtype=self._torch.uint8, device=device)
                self._torch.cuda.synchronize(device)
            self.lane_sums(np.array([trial.data_ptr()], np.int64), PAGE_BYTES)
        except (ImportError, OSError, RuntimeError, ValueError, ReadFailed) as error:
            raise ConfigError(f"GPUDirect cannot be used in this process: {error}") from error

    def open(self, path: str) -> Any:
        """See `Backend`."""
        try:
            return self._kvikio.CuFile(path, "r")
        except (OSError, RuntimeError) as error:
            raise ReadFailed(f"{path} cannot be opened: {error}") from error

    def close(self, file: Any) -> None:
        """See `Backend`."""
        file.close()

    def read(self, file: Any, offset: int, address: int, length: int) -> int:
        """See `Backend`. One cuFileRead; the interpreter's lock is released meanwhile."""
        try:
            return int(file.raw_read(DeviceBytes(address, length), length, offset))
        except (OSError, RuntimeError, ValueError) as error:  # kvikio's errors are texts without a number
            raise ReadFailed(f"{length} bytes at {offset}: {error}") from error

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
            raise ReadFailed(f"blocks could not be verified on {self._device}: {error}") from error
        return [int(value) for value in sums.numpy().view(np.uint64)]


class Fault(Enum):
    """What a `HostBackend` does instead of a right read."""

    ERROR = "error"
    SHORT = "short"
    """The last page does not come."""
    WRONG = "wrong"
    """One bit of the last byte is another."""
    HANG = "hang"
    """It waits until `resume`, and then reads after all."""


class HostBackend:
    """Reads into host memory with O_DIRECT: the same interface without a GPU.

    Args:
        fault: called with the number of each read, from 0 on; what it returns goes wrong.

    `reads` counts those that have begun, `hanging` those that hang now.
    """

    name = "host"

    def __init__(self, fault: Callable[[int], Fault | None] = lambda number: None) -> None:
        self.reads = 0
        self.hanging = 0
        self._fault = fault
        self._lock = threading.Lock()
        self._resume = threading.Event()

    def open(self, path: str) -> int:
        """See `Backend`."""
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            raise ReadFailed(f"{path} cannot be opened: {error.strerror}") from error

    def close(self, file: int) -> None:
        """See `Backend`."""
        os.close(file)

    def read(self, file: int, offset: int, address: int, length: int) -> int:
        """See `Backend`. An address that is no multiple of 4096 costs a copy."""
        with self._lock:
            number, self.reads = self.reads, self.reads + 1
        fault = self._fault(number)
        if fault is Fault.ERROR:
            raise ReadFailed(f"{length} bytes at {offset}: as was asked for")
        if fault is Fault.HANG:
            self._hang()
        wanted = length - PAGE_BYTES if fault is Fault.SHORT else length
        count = _read_direct(file, offset, address, wanted) if wanted else 0
        if fault is Fault.WRONG:
            _bytes_at(address, length)[-1] ^= 1
        return count

    def _hang(self) -> None:
        with self._lock:
            self.hanging += 1
        self._resume.wait(HANG_S)
        with self._lock:
            self.hanging -= 1

    def resume(self) -> None:
        """Let reads that hang, and later ones that would, go on."""
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
        return _read_into(file, offset, target)
    with mmap.mmap(-1, length) as area, memoryview(area) as view:
        count = _read_into(file, offset, view)
        target[:count] = view[:count]
    return count


def _read_into(file: int, offset: int, view: memoryview) -> int:
    done = 0
    while done < len(view):
        try:
            count = os.preadv(file, [view[done:]], offset + done)
        except OSError as error:
            raise ReadFailed(f"{len(view)} bytes at {offset}: {error.strerror}") from error
        if count == 0:
            break
        done += count
    return done
