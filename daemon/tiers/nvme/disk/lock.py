"""The lock of a directory: an flock on a file in it, which ends with the process, however it ends.

A directory may be locked by a worker process of a daemon: the pid in the file is the daemon's. Such a process ends a
little after its daemon, or after it was killed itself: the lock is waited for meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from pathlib import Path

LOCK_NAME = "lock"


class LockedBy(Exception):
    """The directory is in use; the text is the pid of its user, perhaps in another container."""

    def __init__(self, pid: str, *, ourselves: bool) -> None:
        super().__init__(pid)
        self.ourselves = ourselves


PATIENCE_S = 5.0
"""How long the lock of a daemon that is gone is waited for."""
_POLL_S = 0.02


def take_lock(path: Path, daemon_pid: int = 0) -> int:
    """Lock a directory until the descriptor is closed; `daemon_pid`: if this is a worker process, its daemon's.

    Blocks for `PATIENCE_S` at most, if the lock is about to be let go. Raises LockedBy and OSError.
    """
    end_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return _take_now(path, daemon_pid)
        except LockedBy as holder:
            is_ending = str(holder) == str(daemon_pid) or not _runs(str(holder))
            if not is_ending or time.monotonic() >= end_s:
                raise
        time.sleep(_POLL_S)


def _runs(pid: str) -> bool:
    """Whether there is such a process, as far as can be seen from here."""
    return not pid.isdigit() or os.path.exists(f"/proc/{pid}")


def _take_now(path: Path, daemon_pid: int) -> int:
    fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EEXIST, "is no plain file", str(path / LOCK_NAME))
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        ourselves = _is_open_twice(fd) or pid == str(daemon_pid)
        os.close(fd)
        raise LockedBy(pid, ourselves=ourselves) from None
    except OSError:
        os.close(fd)
        raise
    with contextlib.suppress(OSError):  # the pid is for the other one's message; a full disk may lack it
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{daemon_pid or os.getpid()}\n".encode(), 0)
    return fd


def _is_open_twice(fd: int) -> bool:
    """Whether this process has the file open by another descriptor too."""
    mine = os.fstat(fd)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if int(name) != fd and os.path.samestat(os.fstat(int(name)), mine):
                return True
    return False
