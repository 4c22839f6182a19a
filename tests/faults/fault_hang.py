"""A disk that hangs: system calls on one directory of a real daemon do not return until the test says so.

`install` runs in the daemon's process, before the daemon. From then on every call that goes to that
directory first asks for a lock of the kernel's that the test can hold: a thread that waits for it is in the
kernel without the interpreter's lock, as it would be for a disk, and sees neither signals nor deadlines.
SQLite's own calls are held up where Python enters it, and transfers by AIO in io_submit, as by a frozen file system.
Worker processes that the daemon starts get the same code, and so their disk hangs instead of the daemon's.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_BY_PATH = ("open", "unlink", "mkdir", "rename", "statvfs", "listdir", "scandir")
_BY_FD = ("preadv", "pwritev", "posix_fallocate", "fsync", "fdatasync", "ftruncate", "pwrite", "pread")


class Gate:
    """The test's side: whether the directory hangs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def hang(self) -> None:
        """From now on no call there begins."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def go_on(self) -> None:
        """Those that hang go on, and none hangs any more."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """The same, for good."""
        os.close(self._fd)


def patch(directory: Path, gate: Gate, **constants: float) -> str:
    """Code for `Daemon(patch=...)`. `constants` are of the modules below daemon.nvme: `shelf__OFFLINE_AGE_S=1.0`.

    What has a deadline for the opening of a catalog has a short one.
    """
    lines = [f"import sys; sys.path.insert(0, {str(_HERE)!r})", "import fault_hang, importlib"]
    lines.append(f"fault_hang.install({str(directory)!r}, {str(gate.path)!r})")
    for name, value in constants.items():
        module, _, constant = name.partition("__")
        lines.append(f"importlib.import_module('tiercache.daemon.tiers.nvme.{module}').{constant} = {value!r}")
    lines.append("from tiercache.daemon.tiers.nvme.catalog.catalog import Catalog; Catalog.open.__defaults__ = (0.05,)")
    code = "\n".join(lines)
    return f"{code}\nfault_hang.install_in_helpers({code!r})"


def install_in_helpers(code: str) -> None:
    """Have helper processes that this process starts run `code` first."""
    from tiercache.daemon.helper_processes import process

    process.quick_command = lambda child: [sys.executable, "-c", f"{code}\nimport {child} as it\nit.main()"]  # type: ignore[assignment]


def _followed(path: str) -> str:
    """A path by way of an open folder, by its name."""
    parts = path.split("/", 5)
    return "/".join([os.readlink("/".join(parts[:5])), *parts[5:]]) if path.startswith("/proc/self/fd/") else path


def install(directory: str, gate: str) -> None:
    """Hold up what goes to `directory` while the file `gate` is locked."""
    real_open, real_close = os.open, os.close

    def wait_for(path: object) -> None:
        if isinstance(path, (str, os.PathLike)) and _followed(os.fspath(path)).startswith(directory):
            fd = real_open(gate, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH)
            finally:
                real_close(fd)

    def by_path(call: Callable[..., Any]) -> Callable[..., Any]:
        def held_up(path: Any = ".", *args: Any, **options: Any) -> Any:
            wait_for(path)
            return call(path, *args, **options)

        return held_up

    def by_fd(call: Callable[..., Any]) -> Callable[..., Any]:
        def held_up(fd: int, *args: Any) -> Any:
            wait_for(os.readlink(f"/proc/self/fd/{fd}"))
            return call(fd, *args)

        return held_up

    class Connection(sqlite3.Connection):
        def __init__(self, database: Any, *args: Any, **options: Any) -> None:
            self._place = str(database).removeprefix("file://")
            wait_for(self._place)
            super().__init__(database, *args, **options)

        def execute(self, *args: Any) -> sqlite3.Cursor:
            wait_for(self._place)
            return super().execute(*args)

    connect = sqlite3.connect
    sqlite3.connect = lambda *args, **options: connect(*args, factory=Connection, **options)  # type: ignore[assignment]
    for name in _BY_PATH:
        setattr(os, name, by_path(getattr(os, name)))
    for name in _BY_FD:
        setattr(os, name, by_fd(getattr(os, name)))
    _hold_up_aio(wait_for)


def _hold_up_aio(wait_for: Callable[[object], None]) -> None:
    from tiercache.daemon.tiers.nvme.disk.kernel_aio import AioContext

    ready, submit = AioContext.ready, AioContext.submit

    def held_ready(context: Any, place: int, writes: bool, fd: int, *where: Any) -> None:
        context.__dict__.setdefault("fds", {})[place] = fd
        ready(context, place, writes, fd, *where)

    def held_submit(context: Any, places: Any) -> int:
        for fd in {context.fds[place] for place in places}:
            wait_for(os.readlink(f"/proc/self/fd/{fd}"))
        return submit(context, places)

    AioContext.ready, AioContext.submit = held_ready, held_submit  # type: ignore[method-assign,assignment]
