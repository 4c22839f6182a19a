"""The system calls of this tier, in one place, and the test for direct I/O."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from .kernel_aio import AioContext
from .superblock import ALIGNMENT_BYTES

PAGE_BYTES = ALIGNMENT_BYTES
_NO_DIRECT_IO = (errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS)


class DiskIO:
    """The system calls of this tier in one place, so that a test can make any of them fail.

    All raise OSError and may block for as long as the disk does.
    """

    def open(self, path: Path, flags: int) -> int:
        """A descriptor of a file, created with mode 0600 where `flags` say so."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def fallocate(self, fd: int, size_bytes: int) -> None:
        """Allocate the whole file: later writes cannot run out of room."""
        os.posix_fallocate(fd, 0, size_bytes)

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Fill the views; returns how many bytes, perhaps fewer than asked."""
        return os.preadv(fd, views, offset)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Write the views; returns how many bytes, perhaps fewer than given."""
        return os.pwritev(fd, views, offset)

    def aio(self, depth: int, eventfd: int, most_pieces: int) -> AioContext:
        """A context of Linux AIO (see there), by which blocks move without `preadv` and `pwritev`.

        EOPNOTSUPP, with the reason as its text: these calls have no such way.
        """
        return AioContext(depth, eventfd, most_pieces)

    def unlink(self, path: Path) -> None:
        """Remove a file and its room: 250 ms per GiB on some file systems."""
        os.unlink(path)


def refusal_of_direct_io(disk: DiskIO, path: Path) -> str:
    """Why a file there cannot bypass the page cache; empty when it can. Blocks; raises OSError.

    It is tried: some file systems refuse only at the first read.
    """
    try:
        with contextlib.suppress(FileNotFoundError):  # left by a daemon that was killed
            disk.unlink(path)
        fd = disk.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        try:
            area = memoryview(mmap.mmap(-1, 2 * PAGE_BYTES))
            area[:PAGE_BYTES] = os.urandom(PAGE_BYTES)
            disk.pwritev(fd, [area[:PAGE_BYTES]], 0)
            disk.preadv(fd, [area[PAGE_BYTES:]], 0)
            if area[:PAGE_BYTES] != area[PAGE_BYTES:]:
                raise OSError(errno.EIO, "a page written was not read back")
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return ""  # a full disk still has blocks to read
        if error.errno not in _NO_DIRECT_IO:
            raise
        return error.strerror or "invalid"
    finally:
        with contextlib.suppress(OSError):  # the failure is known by now
            disk.unlink(path)
    return ""
