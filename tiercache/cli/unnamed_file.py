"""A file without a name, to measure a directory's disk with: it vanishes with its descriptor."""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path

_NO_DIRECT_IO = (errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS)


def open_unnamed(folder: Path) -> tuple[int, bool]:
    """Its descriptor, and whether it takes direct I/O. Raises OSError."""
    last: OSError | None = None
    for direct in (True, False):
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        try:
            fd = os.open(folder, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            last = error
            path = folder / f"tiercache-measure-{os.getpid()}"
            try:
                fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            except OSError as again:
                last = again
                continue
            finally:
                with suppress(OSError):
                    path.unlink()
        try:
            os.pwritev(fd, [memoryview(mmap.mmap(-1, 4096))], 0)
        except OSError as error:
            os.close(fd)
            last = error
            if error.errno not in _NO_DIRECT_IO:
                raise
            continue
        return fd, direct
    raise last or OSError(errno.EIO, "no file could be made")
