"""Has one host at a time clean up a shared folder.

The lease is a file whose text names its holder and whose modification time is the holder's last sign of life. Hosts'
clocks may be wrong, so all times are those that the file system gives to files, and are compared with each other only.

A lease counts from the second look on: where two hosts have taken over an old one at once, the look before has shown
the last of them to both. Two janitors for a moment would remove more than needed, but never a wrong thing.

A full file system is what a janitor is needed for, so an old lease can be taken over without new room: all leases have
one length, and the new text then goes over the old one, in the same file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import stat
import time

from .tree import CREATE_FILE, NO_LINKS, READ_FILE, Tree

NAME = "janitor"
RENEW_S = 20.0
OLD_S = 120.0
"""Time without a sign of life after which another host takes over."""
_TEXT_BYTES = 256
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class JanitorLease:
    """One host's claim. Methods raise OSError and block as long as the file system does."""

    def __init__(self) -> None:
        self._id = secrets.token_hex(8)
        text = f"{self._id} pid {os.getpid()} {socket.gethostname()}".encode(errors="replace")
        self._text = text[: _TEXT_BYTES - 1].ljust(_TEXT_BYTES - 1) + b"\n"
        self._renewed_s = 0.0

    def hold(self, tree: Tree) -> bool:
        """True if the lease is ours; takes it if it is free or old, and renews it."""
        text, age_s = self._read(tree)
        if text == self._text:
            if time.monotonic() - self._renewed_s > RENEW_S:
                os.utime(NAME, dir_fd=tree.base, follow_symlinks=False)  # without times: the file system's own
                self._renewed_s = time.monotonic()
            return True
        if text is None or abs(age_s) > OLD_S:
            self._take(tree, there=text is not None)
        return False

    def _read(self, tree: Tree) -> tuple[bytes | None, float]:
        """The lease's text, None if there is none; and its age."""
        try:
            found = os.stat(NAME, dir_fd=tree.base, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                return b"", OLD_S + 1  # none of ours
            fd = os.open(NAME, READ_FILE, dir_fd=tree.base)
        except FileNotFoundError:
            return None, 0.0
        try:
            text = os.pread(fd, _TEXT_BYTES + 1, 0)
        finally:
            os.close(fd)
        if text == self._text:
            return text, 0.0
        return text, (file_system_time_ns(tree, self._id) - found.st_mtime_ns) / 1e9

    def _take(self, tree: Tree, there: bool) -> None:
        try:
            self._replace(tree, there)
        except OSError as error:
            if not there or error.errno not in _NO_ROOM:
                raise
            self._overwrite(tree, error)

    def _replace(self, tree: Tree, there: bool) -> None:
        draft = f"lease-{self._id}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=tree.tmp)
        # A rename replaces an old lease, and a link only makes a new one: both in one step.
        try:
            self._write(draft, tree.tmp, tree.file_mode)
            if there:
                os.rename(draft, NAME, src_dir_fd=tree.tmp, dst_dir_fd=tree.base)
                return
            with contextlib.suppress(FileExistsError):
                self._link(tree, draft)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft, dir_fd=tree.tmp)

    def _overwrite(self, tree: Tree, no_room: OSError) -> None:
        """Take an old lease where there is no room for another file. Raises `no_room` if it is none to write to."""
        try:
            fd = os.open(NAME, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=tree.base)
        except OSError:
            raise no_room from None
        try:
            found = os.fstat(fd)
            # With a second name it may be a file elsewhere, that somebody has linked here.
            if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_size != _TEXT_BYTES:
                raise no_room
            os.pwrite(fd, self._text, 0)
        finally:
            os.close(fd)

    def _link(self, tree: Tree, draft: str) -> None:
        try:
            os.link(draft, NAME, src_dir_fd=tree.tmp, dst_dir_fd=tree.base, follow_symlinks=False)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            # Without hard links: others may see it empty for a moment, which is not a lease of theirs and not old.
            self._write(NAME, tree.base, tree.file_mode)

    def _write(self, name: str, folder: int, mode: int) -> None:
        """Make a lease; nothing is left where that fails."""
        fd = os.open(name, CREATE_FILE, mode, dir_fd=folder)
        try:
            try:
                os.write(fd, self._text)
            finally:
                os.close(fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
            raise


def time_of_holder_ns(tree: Tree) -> int:
    """What time the file system has, for who has the lease. Needs no room: it cleans up a full file system, too."""
    os.utime(NAME, dir_fd=tree.base, follow_symlinks=False)
    return os.stat(NAME, dir_fd=tree.base, follow_symlinks=False).st_mtime_ns


def file_system_time_ns(tree: Tree, draft: str) -> int:
    """What time the file system has: that of a file made just now; without room for one, of a folder touched just now.

    Some file systems give no times to folders.
    """
    name = f"clock-{draft}"
    with contextlib.suppress(FileNotFoundError):  # left by a process that was killed
        os.unlink(name, dir_fd=tree.tmp)
    try:
        fd = os.open(name, CREATE_FILE, tree.file_mode, dir_fd=tree.tmp)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        os.utime("tmp", dir_fd=tree.base, follow_symlinks=False)
        return os.stat("tmp", dir_fd=tree.base, follow_symlinks=False).st_mtime_ns
    try:
        with contextlib.suppress(OSError):  # a full file system: the time of an empty file is as good
            os.write(fd, b"?")
        return os.fstat(fd).st_mtime_ns
    finally:
        os.close(fd)
        os.unlink(name, dir_fd=tree.tmp)
