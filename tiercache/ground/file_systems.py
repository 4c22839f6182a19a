"""What stands in the way of a directory, what a file system lacks where an error does not say, and names that last."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_FEW = 16
"""What the call that failed has given back counts by now."""


def lacks_inodes(path: str | os.PathLike[str]) -> bool:
    """True if a file system has room, but none for another file. May block as the file system does."""
    try:
        found = os.statvfs(path)
    except OSError:
        return False
    return found.f_files > 0 and found.f_favail < _FEW and found.f_bavail > 0


IN_THE_WAY = (errno.EEXIST, errno.ENOTDIR, errno.ELOOP)
"""A directory can be neither made nor opened, since something else stands at its path or above it."""
NOT_OFFERED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""A file system does not sync directories."""


def sync_directory(directory: Path | int) -> None:
    """Have the names in a directory survive a power cut; `directory` may be a descriptor of any kind (O_PATH).

    Blocks as the disk does. Raises OSError, but not where a file system offers nothing of the kind.
    """
    if isinstance(directory, int):
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    else:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise
    finally:
        os.close(fd)


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory and those above it, where they are missing. Raises OSError: it says what is in the way."""
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in IN_THE_WAY:
            raise OSError(error.errno, what_stands_at(path)) from None
        raise


def what_stands_at(path: Path) -> str:
    """What stands at the path of a directory, or above it, in words. Call it for an error `IN_THE_WAY`."""
    for place in (path, *path.parents):
        if not place.is_symlink():
            if place.exists():
                return f"{place} is not a directory"
            continue
        target = os.readlink(place)
        try:
            os.stat(place)
        except OSError as error:
            how = "in a circle" if error.errno == errno.ELOOP else "to nothing"
            return f"{place} is a symbolic link that leads {how} ({target})"
        if not place.is_dir():
            return f"{place} is a symbolic link to a file ({target})"
    return f"{path} is not a directory"
