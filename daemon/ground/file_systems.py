"""What a file system lacks, where the error of a call does not say."""

from __future__ import annotations

import os

_FEW = 16
"""What the call that failed has given back counts by now."""


def lacks_inodes(path: str | os.PathLike[str]) -> bool:
    """True if a file system has room, but none for another file. May block as the file system does."""
    try:
        found = os.statvfs(path)
    except OSError:
        return False
    return found.f_files > 0 and found.f_favail < _FEW and found.f_bavail > 0
