"""One file of a value: read it, or write it and rename it into place.

Direct I/O bypasses the page cache, where values would displace what other programs need. It asks for aligned memory: it
is used where a value has one part that begins at a page, as in the staging buffer of the helper process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import time
from collections.abc import Callable, Sequence

from tiercache.daemon.tiers.shared.stores.names import file_name
from tiercache.daemon.tiers.shared.stores.store import Fate, Get, Put

from .tree import CREATE_FILE, READ_FILE, Tree

PAGE_BYTES = max(4096, mmap.PAGESIZE)
_NO_DIRECT_IO = (errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_NO_TIMES = (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS)
_MISSING = (errno.ENOENT, errno.ENOTDIR)
_NONE_OF_OURS = (errno.ELOOP, errno.ENXIO, errno.ENODEV)
_IN_THE_WAY = (errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST, errno.ELOOP)
"""A folder stands where a value belongs, or something else where its folder does."""
_FIXED = (errno.EPERM, errno.EACCES, errno.EBUSY)
_REFUSED = (errno.EFBIG, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST)
_MAX_PARTS = 512
"""A system call takes 1,024 (IOV_MAX)."""


class Files:
    """Reads and writes files of values, for one thread. Methods raise OSError and block as long as the kernel does."""

    def __init__(self, direct: bool, sync: bool, ttl_s: float) -> None:
        self.direct = direct
        """Cleared for good where the file system refuses."""
        self._sync = sync
        self._ttl_s = ttl_s
        self._page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        """Stands in for the last part of a page of a value."""

    # --- reading ---------------------------------------------------------------------------------

    def read(self, tree: Tree, get: Get) -> None:
        """Settle `get`. What is not a plain file of a fitting size is MISFIT, never an error."""
        direct = self.direct and not len(get.head) and get.offset % PAGE_BYTES == 0 and _aligned(get.body)
        try:
            with tree.home_of(get.name) as home:
                fd = self._open(file_name(get.name), READ_FILE, home, direct)
        except OSError as error:
            if error.errno in _MISSING:
                get.fate = Fate.MISSING
            elif error.errno in _NONE_OF_OURS:
                get.fate = Fate.MISFIT
            else:
                raise
            return
        try:
            get.fate = self._fill(fd, get, direct)
        finally:
            os.close(fd)

    def _fill(self, fd: int, get: Get, direct: bool) -> Fate:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return Fate.MISFIT
        there, room = found.st_size - get.offset, len(get.head) + len(get.body)
        if there < len(get.head) or (there > room and not get.ranged):
            return Fate.MISFIT
        wanted = min(there, room)
        body = get.body[: wanted - len(get.head)]
        views = self._whole_pages(body) if direct and self.direct else [get.head, body]
        moved = self._move(os.preadv, fd, views, get.offset, wanted)
        if moved < wanted:  # it was cut off meanwhile
            return Fate.MISFIT
        if views[-1] is self._page and (rest := len(body) % PAGE_BYTES):
            body[len(body) - rest :] = self._page[:rest]
        get.body_bytes = len(body)
        self._renew(fd, found.st_mtime, get.ttl_s)
        return Fate.DONE

    def _whole_pages(self, view: memoryview) -> list[memoryview]:
        """The view, with a page of our own in the place of its last part of a page."""
        whole = len(view) - len(view) % PAGE_BYTES
        return [view[:whole], self._page] if whole else [self._page]

    # --- writing ---------------------------------------------------------------------------------

    def write(self, tree: Tree, put: Put, draft: str) -> None:
        """Settle `put`, by way of a file `draft` in `tmp`."""
        try:
            self._write(tree, put, draft)
            put.fate = self._place(tree, put, draft)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            put.fate = Fate.REFUSED
        finally:
            if put.fate is not Fate.DONE:
                with contextlib.suppress(OSError):  # gone, or the janitor removes it
                    os.unlink(draft, dir_fd=tree.tmp)

    def _place(self, tree: Tree, put: Put, draft: str) -> Fate:
        """Give the draft its place; REFUSED if what is there cannot be replaced, which concerns no other value."""

        def rename() -> None:
            with tree.home_of(put.name, make=True) as home:
                os.rename(draft, file_name(put.name), src_dir_fd=tree.tmp, dst_dir_fd=home)

        try:
            rename()
        except OSError as error:
            if error.errno in _FIXED and _is_placed(tree, put.name):
                return Fate.REFUSED
            if error.errno not in _IN_THE_WAY:
                raise
            try:
                tree.put_aside(put.name)
            except OSError:  # such as a folder of another user, or one that something is mounted on
                return Fate.REFUSED
            rename()
        return Fate.DONE

    def _write(self, tree: Tree, put: Put, draft: str) -> None:
        parts = [memoryview(part).cast("B") for part in put.parts if len(part)]
        total = sum(map(len, parts))
        direct = self.direct and len(parts) == 1 and _aligned(parts[0])
        fd = self._open(draft, CREATE_FILE, tree.tmp, direct, tree.file_mode)
        try:
            if direct and self.direct:
                rest = total % PAGE_BYTES
                if rest:
                    self._page[:rest] = parts[0][total - rest :]
                    parts = self._whole_pages(parts[0])
            self._move(os.pwritev, fd, parts, 0, total)
            if sum(map(len, parts)) != total:
                os.ftruncate(fd, total)
            if self._sync:
                os.fdatasync(fd)
            self._set_age(fd, put.ttl_s)
        finally:
            os.close(fd)  # NFS may say only here that there is no room

    def _set_age(self, fd: int, ttl_s: float) -> None:
        """Have a value with a shorter lifetime look older. By the file system's clock: hosts' clocks may be wrong."""
        older_s = self._ttl_s - ttl_s if ttl_s else 0.0
        if older_s > self._ttl_s / 100:
            found = os.fstat(fd)
            try:
                os.utime(fd, ns=(found.st_atime_ns, found.st_mtime_ns - int(older_s * 1e9)))
            except OSError as error:
                if error.errno not in _NO_TIMES:  # without it the value stays for the folder's own `ttl`
                    raise

    def _renew(self, fd: int, written_s: float, ttl_s: float) -> None:
        """Have a value that is used look new, once half of its lifetime is over: so this is rarely more to do.

        This host's clock is good enough to see when. The new time is the file system's.
        """
        ttl_s = min(ttl_s, self._ttl_s)
        if ttl_s and time.time() - written_s > self._ttl_s - ttl_s / 2:
            with contextlib.suppress(OSError):  # a read-only mount, a file of another user
                os.utime(fd)
                self._set_age(fd, ttl_s)

    # --- both ------------------------------------------------------------------------------------

    def _open(self, name: str, flags: int, folder: int, direct: bool, mode: int = 0) -> int:
        if direct:
            try:
                return os.open(name, flags | os.O_DIRECT, mode, dir_fd=folder)
            except OSError as error:
                if error.errno not in _NO_DIRECT_IO:
                    raise
                self.direct = False
                with contextlib.suppress(FileNotFoundError):  # some create it, and refuse then
                    if flags & os.O_CREAT:
                        os.unlink(name, dir_fd=folder)
        return os.open(name, flags, mode, dir_fd=folder)

    def _move(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        fd: int,
        views: Sequence[memoryview],
        offset: int,
        wanted: int,
    ) -> int:
        """Move `wanted` bytes or up to the end of the file; returns how many."""
        moved = 0
        while moved < wanted:
            try:
                count = call(fd, _rest(views, moved), offset + moved)
            except OSError as error:
                if error.errno not in _NO_DIRECT_IO or not self._end_direct(fd):
                    raise
                continue
            if count <= 0:
                break
            moved += count
            if moved < wanted and moved % PAGE_BYTES:  # direct I/O goes on at pages only
                self._end_direct(fd, for_all=False)
        return moved

    def _end_direct(self, fd: int, for_all: bool = True) -> bool:
        """Go on through the page cache; False if the file was read or written so before. Some refuse only here."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if not flags & os.O_DIRECT:
            return False
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = self.direct and not for_all
        return True


def _is_placed(tree: Tree, name: bytes) -> bool:
    """True if there is something in the place of a value."""
    try:
        with tree.home_of(name) as home:
            os.stat(file_name(name), dir_fd=home, follow_symlinks=False)
    except OSError:
        return False
    return True


def _aligned(view: memoryview) -> bool:
    """True if memory is worth direct I/O: writable, so that its address can be had, and at a page."""
    if view.readonly or len(view) < PAGE_BYTES:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE_BYTES == 0


def _rest(views: Sequence[memoryview], moved: int) -> list[memoryview]:
    """The views without their first `moved` bytes, as many as one call takes."""
    rest = []
    for view in views:
        if moved < len(view):
            rest.append(view[moved:] if moved else view)
        moved = max(0, moved - len(view))
        if len(rest) == _MAX_PARTS:
            break
    return rest
