"""The speed of a directory's disk, for `tiercache bench codec`: all of a daemon's threads for it at work."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from tiercache.cli.unnamed_file import open_unnamed
from tiercache.errors import ConfigError
from tiercache.ground.units import format_bytes

DISK_BYTES = 256 << 20
DISK_CALL_BYTES = 2 << 20
DISK_THREADS = 8
"""Threads for the disk, as many as the daemon has for a directory."""


class DiskFigures(NamedTuple):
    """Speed of a directory's disk, in bytes per second."""

    directory: str
    direct: bool
    bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float

    @property
    def threads(self) -> int:
        """Threads that moved the bytes."""
        return DISK_THREADS


def measure_disk(directory: Path) -> DiskFigures:
    """Write and read DISK_BYTES in an unnamed file, past the page cache if possible.

    Blocks for as long as the disk takes. Raises ConfigError.
    """
    try:
        free_bytes = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
        if free_bytes < 2 * DISK_BYTES:
            raise ConfigError(
                f"--dir = {directory}: only {format_bytes(free_bytes)} are free, and measuring takes "
                f"{format_bytes(DISK_BYTES)}: name a directory with more room"
            )
        with ExitStack() as stack:
            fd, direct = open_unnamed(directory)
            stack.callback(os.close, fd)
            os.posix_fallocate(fd, 0, DISK_BYTES)
            write_s = _move_all(fd, os.pwritev)
            if not direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            read_s = _move_all(fd, os.preadv)
    except OSError as error:
        raise ConfigError(f"--dir = {directory}: {error.strerror}: name a directory that can be written") from None
    return DiskFigures(str(directory), direct, DISK_BYTES, DISK_BYTES / write_s, DISK_BYTES / read_s)


def _move_all(fd: int, call: Callable[[int, list[memoryview], int], int]) -> float:
    """Seconds to move the whole file, at least to the disk's own cache, with as many threads as a directory has."""
    areas = threading.local()

    def move(offset: int) -> None:
        if not hasattr(areas, "view"):
            area = mmap.mmap(-1, DISK_CALL_BYTES)
            area.write(os.urandom(DISK_CALL_BYTES))
            areas.view = memoryview(area)
        done = 0
        while done < DISK_CALL_BYTES:
            count = call(fd, [areas.view[done:]], offset + done)
            if count <= 0:
                raise OSError(5, "the transfer stands still")
            done += count

    with ThreadPoolExecutor(DISK_THREADS) as threads:
        list(threads.map(move, [0] * DISK_THREADS))  # the areas are filled before the clock starts
        start_s = time.perf_counter()
        list(threads.map(move, range(0, DISK_BYTES, DISK_CALL_BYTES)))
        os.fdatasync(fd)
        return time.perf_counter() - start_s
