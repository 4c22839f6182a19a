"""The daemon's run dir: mode 0700 (0750 if shared with a group), one daemon at a time, no stale sockets."""

from __future__ import annotations

import fcntl
import grp
import os
from pathlib import Path

from tiercache.config.daemon_config import control_endpoint, session_socket_path
from tiercache.errors import ConfigError
from tiercache.ground.file_systems import make_directory


def find_group(name: str) -> int | None:
    """The gid of a group by its name or number, None for "". Raises ConfigError if we may not use it."""
    if not name:
        return None
    try:
        group = int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"group = {name!r}: there is no such group: make it with groupadd, or name another") from None
    if os.geteuid() != 0 and group not in {os.getegid(), *os.getgroups()}:
        raise ConfigError(f"group = {name!r}: the daemon's user is not in it: add it with usermod -aG {name} USER")
    return group


def guard(path: Path, group: int | None) -> None:
    """Let the owner and the members of `group` open a socket in a run dir of ours. Raises ConfigError."""
    call = "chmod"
    try:
        if group is None:
            path.chmod(0o600)
        else:
            call = "chown"
            os.chown(path, -1, group)
            call = "chmod"
            path.chmod(0o660)
    except OSError as error:
        text = f"run_dir {path.parent} does not let its users be chosen ({call} of {path.name}: {error.strerror})"
        raise ConfigError(
            f"{text}: choose one on a local file system, or allow {call} in the seccomp profile"
        ) from None


class RunDir:
    """Holds the lock of a run dir as long as it is open.

    Members of `group` may connect. Raises ConfigError when another daemon has it, or when it is not a folder of ours.
    """

    def __init__(self, path: Path, group: int | None = None) -> None:
        self.path = path
        try:
            make_directory(path, 0o700)
            if path.is_symlink() and path.lstat().st_uid not in (0, os.geteuid()):
                # Its creator can redirect it once clients look for us here.
                raise ConfigError(f"run_dir {path} is another user's symbolic link: choose one with --run-dir")
            stat = path.stat()
            if stat.st_uid != os.geteuid():
                text = f"--run-dir, for example {path}/daemon where we may make that (in a volume of a pod)"
                raise ConfigError(f"run_dir {path} belongs to another user: choose one with {text}")
            writable = stat.st_mode & 0o022
            if writable and stat.st_mode & 0o1000:  # such as /tmp
                raise ConfigError(
                    f"run_dir {path} is a folder for all users' files: name one in it, as {path}/tiercache"
                )
            if writable:
                raise ConfigError(f"run_dir {path} can be written by others: chmod 0700 it, or choose another one")
            self._fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            text = f"run_dir {path} cannot be used ({error.strerror}): choose one with --run-dir"
            raise ConfigError(text) from error
        self._lock()
        self.remove_sockets()
        if group is not None:  # after the lock: a second daemon must not change what the first one serves
            os.chown(path, -1, group)
            path.chmod(0o750)

    def _lock(self) -> None:
        # An flock on an open file ends with the process, however it ends.
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            text = f"another daemon (pid {pid}) serves {self.path}: stop it, or choose another --run-dir"
            raise ConfigError(text) from None
        except OSError as error:
            os.close(self._fd)
            text = f"run_dir {self.path} cannot be locked (flock: {error.strerror}): choose one on a local file system"
            raise ConfigError(f"{text}, or allow flock in the seccomp profile of the container") from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def remove_sockets(self) -> None:
        """Remove sockets that a killed daemon left; only the holder of the lock may."""
        control = Path(control_endpoint(self.path).removeprefix("ipc://"))
        for path in (session_socket_path(self.path), control):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the sockets and release the lock."""
        self.remove_sockets()
        os.close(self._fd)
