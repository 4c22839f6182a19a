"""Has one host at a time clean up a shared folder.

The lease is a file whose text names its holder and whose modification time is the holder's last sign of life. Hosts'
clocks may be wrong, so all times are those that the file system gives to files, and are compared with each other only.

A lease counts from the second look on: where two hosts have taken over an old one at once, the look before has shown
the last of them to both. Two janitors for a moment would remove more than needed, but never a wrong thing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import time

from .tree import CREATE_FILE, NO_LINKS, READ_FILE, Tree

NAME = "janitor"
RENEW_S = 20.0
OLD_S = 120.0
"""After so long without a sign of life another host takes over."""
_MAX_TEXT_BYTES = 512


class JanitorLease:
    """One host's claim. Methods raise OSError and block as long as the file system does."""

    def __init__(self) -> None:
        self._id = secrets.token_hex(8)
        self._text = f"{socket.gethostname()[:200]} pid {os.getpid()} {self._id}\n".encode()
        self._renewed_s = 0.0

    def hold(self, tree: Tree) -> bool:
        """Whether the lease is ours; takes it if it is free or old, and renews it."""
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
            text = os.pread(fd, _MAX_TEXT_BYTES, 0)
        finally:
            os.close(fd)
        if text == self._text:
            return text, 0.0
        return text, (file_system_time_ns(tree, self._id) - found.st_mtime_ns) / 1e9

    def _take(self, tree: Tree, there: bool) -> None:
        draft = f"lease-{self._id}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=tree.tmp)
        fd = os.open(draft, CREATE_FILE, tree.file_mode, dir_fd=tree.tmp)
        try:
            os.write(fd, self._text)
        finally:
            os.close(fd)
        # A rename replaces an old lease, and a link only makes a new one: both in one step.
        try:
            if there:
                os.rename(draft, NAME, src_dir_fd=tree.tmp, dst_dir_fd=tree.base)
                return
            with contextlib.suppress(FileExistsError):
                self._link(tree, draft)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft, dir_fd=tree.tmp)

    def _link(self, tree: Tree, draft: str) -> None:
        try:
            os.link(draft, NAME, src_dir_fd=tree.tmp, dst_dir_fd=tree.base, follow_symlinks=False)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            # Without hard links: others may see it empty for a moment, which is no lease of theirs and not old.
            fd = os.open(NAME, CREATE_FILE, tree.file_mode, dir_fd=tree.base)
            try:
                os.write(fd, self._text)
            finally:
                os.close(fd)


def time_of_holder_ns(tree: Tree) -> int:
    """What time the file system has, for who has the lease. Needs no room: it cleans up a full file system, too."""
    os.utime(NAME, dir_fd=tree.base, follow_symlinks=False)
    return os.stat(NAME, dir_fd=tree.base, follow_symlinks=False).st_mtime_ns


def file_system_time_ns(tree: Tree, draft: str) -> int:
    """What time the file system has: that of a file made just now."""
    name = f"clock-{draft}"
    with contextlib.suppress(FileNotFoundError):  # left by a process that was killed
        os.unlink(name, dir_fd=tree.tmp)
    fd = os.open(name, CREATE_FILE, tree.file_mode, dir_fd=tree.tmp)
    try:
        with contextlib.suppress(OSError):  # a full file system: the time of an empty file is as good
            os.write(fd, b"?")
        return os.fstat(fd).st_mtime_ns
    finally:
        os.close(fd)
        os.unlink(name, dir_fd=tree.tmp)
