"""The lock of a directory: an flock on a file in it, which ends with the process, however it ends.

A directory may be locked by a worker process of a daemon: the file names the daemon. Such a process ends a little after
its daemon, or after it was killed itself: the lock is waited for meanwhile.

The file has a pid and when that process began, in ticks of the kernel: every container has a process 1.
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
    """The directory is in use; the text is the pid of its user, perhaps in another container.

    ourselves: this daemon. ending: the lock may be released, or have another name, at any moment.
    """

    def __init__(self, pid: str, *, ourselves: bool, ending: bool) -> None:
        super().__init__(pid)
        self.ourselves = ourselves
        self.ending = ending


PATIENCE_S = 5.0
"""How long the lock of a daemon that is gone is waited for."""
OWN_PATIENCE_S = 0.5
"""How long that of a worker of ours is: it has been seen to its end, or has the directory by another path, which is to
be told while the daemon still starts."""
_POLL_S = 0.02


def take_lock(path: Path, daemon_pid: int = 0) -> int:
    """Lock a directory until the descriptor is closed; `daemon_pid`: if this is a worker process, its daemon's.

    Blocks for `PATIENCE_S` at most, if the lock is about to be released. Raises LockedBy and OSError.
    """
    began_s = time.monotonic()
    while True:
        try:
            return _take_now(path, daemon_pid)
        except LockedBy as holder:
            patience_s = OWN_PATIENCE_S if holder.ourselves else PATIENCE_S
            if not holder.ending or time.monotonic() - began_s >= patience_s:
                raise
        time.sleep(_POLL_S)


def _name_of(pid: int) -> str:
    """What the file says of a process: only its pid if nothing else can be seen from here."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return str(pid)
    return f"{pid} {after_name.split()[19]}"  # field 22: when it began


def _runs(name: str) -> bool:
    """True if there is the process that the file names, as far as can be seen from here."""
    pid, _, began = name.partition(" ")
    if not pid.isdigit():
        return True
    return _name_of(int(pid)) == name if began else os.path.exists(f"/proc/{pid}")


def _take_now(path: Path, daemon_pid: int) -> int:
    fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EEXIST, "is not a plain file", str(path / LOCK_NAME))
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        name = os.pread(fd, 64, 0).decode(errors="replace").strip()
        our_worker = daemon_pid > 0 and name == _name_of(daemon_pid)
        ourselves = _is_open_twice(fd) or our_worker
        os.close(fd)
        if not name:  # it has just been locked, and its name is being written; or the disk had no room for it
            raise LockedBy("unknown", ourselves=ourselves, ending=not ourselves) from None
        raise LockedBy(name.split()[0], ourselves=ourselves, ending=our_worker or not _runs(name)) from None
    except OSError as error:
        os.close(fd)
        if error.filename is None:  # of flock: not the file is at fault
            raise OSError(errno.ENOLCK, f"flock is refused ({error.strerror})") from None
        raise
    with contextlib.suppress(OSError):  # the pid is for the other one's message; a full disk may lack it
        _write_name(fd, _name_of(daemon_pid or os.getpid()))
    return fd


def _write_name(fd: int, name: str) -> None:
    """Others see the former name, which belongs to no process now, until they see this one."""
    written = 0
    try:
        written = os.pwrite(fd, f"{name}\n".encode(), 0)
    finally:
        os.ftruncate(fd, written)


def _is_open_twice(fd: int) -> bool:
    """True if this process has the file open by another descriptor too."""
    mine = os.fstat(fd)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if int(name) != fd and os.path.samestat(os.fstat(int(name)), mine):
                return True
    return False
