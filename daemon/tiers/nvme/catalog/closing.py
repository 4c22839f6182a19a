"""Closes a database whose path may lead to another one by now: the other's files are left alone.

The last connection to a database removes its log, by name. SQLite checks first whether the database has moved, but
compares only the inode number, and two file systems made alike number their files alike: a new disk in the place of the
old one would lose its log, and its latest rows with it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# SQLite's lock bytes for readers (pager.h, "file format"): a closing connection removes the log only if it gets them
# all.
_READERS_FIRST = (1 << 30) + 2
_READERS_BYTES = 510


@contextmanager
def closing_own(db: sqlite3.Connection, path: Path) -> Iterator[None]:
    """Close `db` at the end; `path` is where its file was when this began. Blocks as the disk does."""
    own = -1
    with suppress(OSError):  # moved already, and nothing is in its place
        own = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        if own < 0 or _leads_to(path, own) or _held_against_ourselves(own):
            db.close()
        else:  # its descriptors stay open until the daemon ends
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(db))
        if own >= 0:
            os.close(own)  # after `db`: closing any descriptor of a file ends this process's locks on it


def _leads_to(path: Path, fd: int) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.stat(path), os.fstat(fd))
    return False


def _held_against_ourselves(fd: int) -> bool:
    """Hold a read lock that SQLite takes for another process's (an open file description lock; see fcntl(2))."""
    lock = struct.pack("hhqqi", fcntl.F_RDLCK, os.SEEK_SET, _READERS_FIRST, _READERS_BYTES, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
    except OSError:  # a database that is opened "alone" is locked already
        return False
    return True
