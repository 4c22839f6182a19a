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
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_RUN_S = 30.0
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


class FrozenDisk:
    """An ext4 of its own that the kernel freezes: a thread that writes there waits in state D and cannot be killed.

    Raises OSError where one may not be made. A process of its own thaws it when it is told to, when this one
    has ended, or after a minute, whatever comes first.
    """

    def __init__(self, folder: Path, size_mib: int) -> None:
        self.path = folder / "disk"
        self.path.mkdir()
        self._freezer: subprocess.Popen[bytes] | None = None
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(size_mib << 20)
        _run("mkfs.ext4", "-q", str(image))
        _run("mount", "-o", "loop", str(image), str(self.path))

    def freeze(self) -> None:
        """No write begins from now on; those under way are awaited."""
        script = 'fsfreeze -f "$1" || exit 1; echo frozen; timeout 60 cat; fsfreeze -u "$1"'
        self._freezer = subprocess.Popen(
            ["sh", "-c", script, "sh", str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._freezer.stdout is not None
        assert self._freezer.stdout.readline() == b"frozen\n"

    def thaw(self) -> None:
        """Writes go on; nothing if it is not frozen."""
        if self._freezer is not None:
            assert self._freezer.communicate(timeout=_RUN_S) == (b"", None)
            assert self._freezer.returncode == 0
            self._freezer = None

    def close(self) -> None:
        """Thaw and unmount it."""
        self.thaw()
        _run("umount", "--lazy", str(self.path))


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_RUN_S)
    except subprocess.CalledProcessError as error:
        raise OSError(f"{command[0]}: {error.stderr.decode().strip()}") from None


def patch(directory: Path, gate: Gate, only_database: bool = False, **constants: float) -> str:
    """Code for `Daemon(patch=...)`. `constants` are of the modules below daemon.nvme: `shelf__OFFLINE_AGE_S=1.0`.

    What has a deadline for the opening of a catalog has a short one.
    """
    lines = [f"import sys; sys.path.insert(0, {str(_HERE)!r})", "import fault_hang, importlib"]
    lines.append(f"fault_hang.install({str(directory)!r}, {str(gate.path)!r}, {only_database})")
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


def install(directory: str, gate: str, only_database: bool) -> None:
    """Hold up what goes to `directory` while the file `gate` is locked; `only_database`: what SQLite does there."""
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
    if not only_database:
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
