"""The folders of the store, opened for one call without following symbolic links; and errors on them in words.

Who can write to the shared folder may put anything there. A link in the place of a folder of ours would have us write,
or have the janitor delete, elsewhere: so each folder below the configured one is opened by itself and never through a
link, and files are reached by its descriptor. Each call opens them again, since they may have been removed, or another
file system mounted, meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from tiercache.daemon.ground.mounts import unmounted_on_the_way
from tiercache.daemon.tiers.shared.stores.names import fan_out, file_name
from tiercache.daemon.tiers.shared.stores.store import StoreError, StoreProblem
from tiercache.ground.file_systems import lacks_inodes

log = logging.getLogger("tiercache.daemon")

OURS = "tiercache-1"
"""Our folder in the configured one, with the version of its layout: whatever else is there stays untouched."""
ASIDE = "aside"
"""What stood in the place of a value and was no file."""
READ_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Opening a FIFO, which a stranger may have put there, must not wait for its writer."""
CREATE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Of a file system without hard links."""
_NO_FOLDER = (errno.ENOTDIR, errno.ELOOP)
_FOLDERS = (OURS, "values", "notes", "tmp", ASIDE, "janitor")
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_NO_LINK = _FOLDER | os.O_NOFOLLOW
_STRANGE = "something else stands where a folder or file of tiercache should be: move it away"
_TROUBLES = {
    errno.ENOSPC: (StoreProblem.FULL, "make room on its file system, or set a size in the URL (?size=10TiB)"),
    errno.EDQUOT: (StoreProblem.FULL, "raise the quota of user {uid}, or set a size in the URL (?size=10TiB)"),
    errno.EROFS: (StoreProblem.READ_ONLY, "its file system is mounted read-only: mount it for writing"),
    errno.EACCES: (StoreProblem.DENIED, "let user {uid} read and write there (chown, chmod, the export's options)"),
    errno.EPERM: (StoreProblem.DENIED, "let user {uid} read and write there (chown, chmod, lsattr)"),
    errno.ENOSYS: (StoreProblem.DENIED, "its file system or a seccomp profile refuses a call (strace names it)"),
    errno.ESTALE: (StoreProblem.UNREACHABLE, "mount its file system again"),
    errno.ENOTCONN: (StoreProblem.UNREACHABLE, "mount its file system again"),
    errno.ENOENT: (StoreProblem.UNREACHABLE, "mount its file system, or make the folder"),
    errno.ENOTDIR: (StoreProblem.PROTOCOL, _STRANGE),
    errno.ELOOP: (StoreProblem.PROTOCOL, _STRANGE),
    errno.EISDIR: (StoreProblem.PROTOCOL, _STRANGE),
    errno.EEXIST: (StoreProblem.PROTOCOL, _STRANGE),
    errno.EXDEV: (StoreProblem.PROTOCOL, "it must lie on one file system, in one project of quotas"),
    errno.EMFILE: (StoreProblem.BUSY, "raise the limit of open files (LimitNOFILE)"),
    errno.ENFILE: (StoreProblem.BUSY, "raise the limit of open files (fs.file-max)"),
    errno.ENOMEM: (StoreProblem.BUSY, "give the daemon more memory"),
}


def as_store_error(path: str, error: OSError) -> StoreError:
    """A failed call as one line: which file, why, and what to do."""
    number = error.errno or 0
    problem, remedy = _TROUBLES.get(number, (StoreProblem.UNREACHABLE, "see dmesg and the state of its file system"))
    if number == errno.ENOSPC and lacks_inodes(path):
        remedy = "there is room, but its file system has no inodes left (df -i): remove files there"
    part = os.fsdecode(error.filename) if error.filename else ""
    if part and part not in _FOLDERS and not part.startswith("/"):
        part = "a file"  # each has another name, and the trouble is the same
    where = part if part.startswith("/") else f"{path}/{OURS}: {part}" if part else path
    return StoreError(problem, f"{where}: {error.strerror or error}: {remedy.format(uid=os.geteuid())}")


class Tree:
    """Descriptors of the folders (O_PATH), for one call.

    Attributes:
        values, notes, tmp: of the three folders; `values` has the fan-out folders.
        file_mode: for new files: who may use the configured folder may use its files.
        device: of the configured folder.
    """

    def __init__(self, path: str, device: int | None = None) -> None:
        """`device`: of an earlier tree at this path, if there was one."""
        self._path = path
        self._device_before = device
        self.device = 0
        self.base = self.values = self.notes = self.tmp = -1
        self.file_mode = self._folder_mode = 0

    def __enter__(self) -> Tree:
        try:
            self._open()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _open(self) -> None:
        root = os.open(self._path, _FOLDER)
        try:
            found = os.fstat(root)
            mode, self.device = stat.S_IMODE(found.st_mode), found.st_dev
            self._folder_mode, self.file_mode = (mode & 0o2777) | 0o700, (mode & 0o666) | 0o600
            try:
                self.base = os.open(OURS, _NO_LINK, dir_fd=root)
            except FileNotFoundError:
                self._check_mounted()
                self.base = self._folder(OURS, root)
        finally:
            os.close(root)
        self.values, self.notes, self.tmp = (self._folder(name, self.base) for name in ("values", "notes", "tmp"))

    def _check_mounted(self) -> None:
        """Ours is missing: is this the shared folder, or the empty place that it is mounted on?"""
        text = ""
        if missing := unmounted_on_the_way(self._path):
            text = f"nothing is mounted at {missing}, as /etc/fstab says: mount it"
        elif self._device_before not in (None, self.device):
            text = "its file system is not mounted any more: mount it"
        if text:
            raise StoreError(StoreProblem.UNREACHABLE, f"{self._path}: {text}")

    def _folder(self, name: str, above: int) -> int:
        """Open a folder, and make it if it is missing."""
        try:
            return os.open(name, _NO_LINK, dir_fd=above)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):  # by another host, meanwhile
                os.mkdir(name, self._folder_mode, dir_fd=above)
            return os.open(name, _NO_LINK, dir_fd=above)

    @contextmanager
    def home_of(self, name: bytes, make: bool = False) -> Iterator[int]:
        """The fan-out folder of a value. Raises FileNotFoundError unless it is there or `make` is set."""
        fan = fan_out(name)
        fd = self._folder(fan, self.values) if make else os.open(fan, _NO_LINK, dir_fd=self.values)
        try:
            yield fd
        finally:
            os.close(fd)

    def put_aside(self, name: bytes) -> None:
        """Move what stands in the place of a value, and is not a file, out of the way. Raises OSError."""
        aside = self._folder(ASIDE, self.base)
        fan, token = fan_out(name), secrets.token_hex(4)
        try:
            moved = f"values/{fan}"
            try:
                home = os.open(fan, _NO_LINK, dir_fd=self.values)
            except FileNotFoundError:
                return
            except OSError as error:
                if error.errno not in _NO_FOLDER:  # it may well be ours, with a part of all values
                    raise
                os.rename(fan, f"{fan}-{token}", src_dir_fd=self.values, dst_dir_fd=aside)
            else:
                moved = f"{moved}/{file_name(name)}"
                try:
                    os.rename(file_name(name), f"{file_name(name)}-{token}", src_dir_fd=home, dst_dir_fd=aside)
                except FileNotFoundError:  # another host has done it
                    return
                finally:
                    os.close(home)
        finally:
            os.close(aside)
        log.warning("%s/%s: %s is not a value of ours: it is now in %s", self._path, OURS, moved, ASIDE)

    def _close(self) -> None:
        for fd in (self.base, self.values, self.notes, self.tmp):
            if fd >= 0:
                os.close(fd)
        self.base = self.values = self.notes = self.tmp = -1
