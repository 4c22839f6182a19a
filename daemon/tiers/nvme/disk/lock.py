"""The lock of a directory: an flock on a file in it, which ends with the process, however it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

LOCK_NAME = "lock"


class LockedBy(Exception):
    """The directory is in use; the text is the pid of its user, perhaps in another container."""

    def __init__(self, pid: str, *, ourselves: bool) -> None:
        super().__init__(pid)
        self.ourselves = ourselves


def take_lock(path: Path) -> int:
    """Lock a directory until the descriptor is closed. Raises LockedBy and OSError."""
    fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EEXIST, "is no plain file", str(path / LOCK_NAME))
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        ourselves = _is_open_twice(fd)
        os.close(fd)
        raise LockedBy(pid, ourselves=ourselves) from None
    except OSError:
        os.close(fd)
        raise
    with contextlib.suppress(OSError):  # the pid is for the other one's message; a full disk may lack it
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _is_open_twice(fd: int) -> bool:
    """Whether this process has the file open by another descriptor too."""
    mine = os.fstat(fd)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if int(name) != fd and os.path.samestat(os.fstat(int(name)), mine):
                return True
    return False
