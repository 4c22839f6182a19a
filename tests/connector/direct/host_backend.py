"""Direct reads and writes of host memory, in the place of a GPU: by direct I/O, with the faults that a test wants."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any

from tiercache.connector.direct.backend import PAGE_BYTES, Addresses, DirectFailed
from tiercache.protocol.checksums import lane_sum

HANG_S = 60.0
"""Time after which a hang ends that nobody resumes."""


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
        """See `Backend`."""
        with self._lock:
            index, self.reads = self.reads, self.reads + 1
        fault = self._fault(index)
        moved = self._suffer(fault, offset, length)
        with mmap.mmap(-1, length) as area, memoryview(area) as view:
            count = _move_all(os.preadv, file, offset, view[:moved])
            view[-1] ^= fault is Fault.WRONG
            _bytes_at(address, length)[:count] = view[:count]
        return count

    def write(self, file: int, offset: int, address: int, length: int) -> int:
        """See `Backend`."""
        with self._lock:
            index, self.writes = self.writes, self.writes + 1
        fault = self._write_fault(index)
        moved = self._suffer(fault, offset, length)
        with mmap.mmap(-1, length) as area, memoryview(area) as view:
            view[:] = _bytes_at(address, length)
            view[-1] ^= fault is Fault.WRONG
            return _move_all(os.pwritev, file, offset, view[:moved])

    def _suffer(self, fault: Fault | None, offset: int, length: int) -> int:
        """Inject the fault; returns how many bytes to move, maybe after a while."""
        if fault is Fault.ERROR:
            raise DirectFailed(f"{length} bytes at {offset}: as was asked for")
        if fault is Fault.HANG:
            with self._lock:
                self.hanging += 1
            self._resume.wait(HANG_S)
            with self._lock:
                self.hanging -= 1
        return length - PAGE_BYTES if fault is Fault.SHORT else length

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
