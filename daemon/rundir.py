"""The daemon's run dir: 0700, one daemon at a time, no stale sockets."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from tiercache.config import control_endpoint, session_socket_path
from tiercache.errors import ConfigError


class RunDir:
    """Holds the lock of a run dir as long as it is open.

    Raises ConfigError when another daemon has it, or when it is not a folder of ours.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            stat = path.stat()
            if stat.st_uid != os.geteuid():
                raise ConfigError(f"run_dir {path} belongs to another user: choose one with --run-dir")
            if stat.st_mode & 0o022:
                raise ConfigError(f"run_dir {path} can be written by others: chmod 0700 it, or choose another one")
            self._fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            text = f"run_dir {path} cannot be used ({error.strerror}): choose one with --run-dir"
            raise ConfigError(text) from error
        self._lock()
        self.remove_sockets()

    def _lock(self) -> None:
        # An flock on an open file ends with the process, however it ends.
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            text = f"another daemon (pid {pid}) serves {self.path}: stop it, or choose another --run-dir"
            raise ConfigError(text) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def remove_sockets(self) -> None:
        """Take away sockets that a killed daemon left; only the holder of the lock may."""
        control = Path(control_endpoint(self.path).removeprefix("ipc://"))
        for path in (session_socket_path(self.path), control):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the sockets and let go of the lock."""
        self.remove_sockets()
        os.close(self._fd)
