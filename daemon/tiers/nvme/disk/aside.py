"""Damaged or foreign files of a directory, set aside for people: `damaged-<time>/`.

There is at most one, and only until its room is needed.
"""

from __future__ import annotations

import logging
import re
import stat
import time
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger("tiercache.daemon")

_NAME = re.compile(r"damaged-[0-9TZ]+")


def is_aside(name: str) -> bool:
    """True if a name in the directory is one that `put_aside` makes."""
    return _NAME.fullmatch(name) is not None


def put_aside(folder: Path, paths: Sequence[Path]) -> str:
    """Move these out of the way, whatever they are; returns the name of their new folder. Blocks; OSError."""
    remove_aside(folder)
    aside = folder / time.strftime("damaged-%Y%m%dT%H%M%SZ", time.gmtime())
    aside.mkdir(mode=0o700)
    for path in paths:
        path.rename(aside / path.name)
    return aside.name


def remove_aside(folder: Path) -> bool:
    """Delete what was put aside; True when there was something. Blocks; OSError."""
    found = [path for path in folder.iterdir() if is_aside(path.name)]
    for path in found:
        log.warning("nvme directory %s: removing %s", folder.resolve(), path.name)
        remove(path)
    return bool(found)


def remove(path: Path) -> None:
    """Delete a file, or a folder with all that is in it; a link, not what it points to. Blocks; OSError."""
    if stat.S_ISDIR(path.lstat().st_mode):
        import shutil  # seldom needed, and slow to import

        shutil.rmtree(path)
    else:
        path.unlink()


def aside_bytes(folder: Path) -> int:
    """Size of what was put aside. Blocks; OSError."""
    asides = [path for path in folder.iterdir() if is_aside(path.name)]
    return sum(path.lstat().st_blocks * 512 for aside in asides for path in (aside, *aside.rglob("*")))
