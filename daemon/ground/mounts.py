"""Checks that the file system a directory belongs on is mounted.

Without it the same path is a folder of the file system below, most often that of /: blocks would fill that up, and
would be hidden once the disk is mounted.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tiercache.errors import DirectoryUnavailable

FSTAB = Path("/etc/fstab")
_ESCAPED = re.compile(r"\\([0-7]{3})")


def mount_point_of(path: Path) -> Path:
    """The mount point of an existing path's file system. Blocks; OSError."""
    path = path.resolve()
    device = os.stat(path).st_dev
    while path.parent != path and os.stat(path.parent).st_dev == device:
        path = path.parent
    return path


def device_below(path: Path) -> int | None:
    """The device that a path would be on if its file system were not mounted; None on that of /. Blocks; OSError."""
    place = mount_point_of(path)
    return None if place.parent == place else os.stat(place.parent).st_dev


def check_mounted(path: Path, needed: bool) -> None:
    """Raises DirectoryUnavailable when a mount point in /etc/fstab on the way to `path` is not mounted.

    `needed`: also when it is on the file system of /. Blocks; OSError.
    """
    missing = unmounted_on_the_way(path)
    if missing is not None:
        text = f"nothing is mounted at {missing}, as /etc/fstab says: mount it"
        raise DirectoryUnavailable(f"nvme directory {path} cannot be used: {text}")
    if needed:
        nearest = next(folder for folder in (path, *path.parents) if folder.exists())
        if mount_point_of(nearest) == Path("/"):
            text = "it is on the file system of /, and nvme_require_mount is set: mount its disk"
            raise DirectoryUnavailable(f"nvme directory {path} cannot be used: {text}")


def unmounted_on_the_way(path: Path | str) -> Path | None:
    """The first mount point of /etc/fstab at or above `path` that is not mounted; None if all are. Blocks."""
    path = Path(path)
    return next((place for place in _mount_points() if place in (path, *path.parents) and not _mounted(place)), None)


def _mount_points() -> list[Path]:
    """The mount points of /etc/fstab, besides /; none where it cannot be read."""
    try:
        lines = FSTAB.read_text(errors="replace").splitlines()
    except OSError:
        return []
    fields = [line.split() for line in lines if not line.lstrip().startswith("#")]
    named = [_ESCAPED.sub(lambda match: chr(int(match[1], 8)), one[1]) for one in fields if len(one) >= 2]
    return [Path(name) for name in named if name.startswith("/") and name != "/"]


def _mounted(place: Path) -> bool:
    return os.path.ismount(place)
