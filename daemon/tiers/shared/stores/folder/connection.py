"""A store on a shared folder: its calls and its files. They block as long as the kernel does: see `helper`."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tiercache.daemon.tiers.shared.stores.helper.connection import HelperStore
from tiercache.daemon.tiers.shared.stores.names import file_name
from tiercache.daemon.tiers.shared.stores.store import (
    MAX_NOTE_BYTES,
    Arrived,
    Exists,
    Fate,
    Get,
    Noted,
    Put,
    StoreError,
    StoreProblem,
)
from tiercache.ground.file_systems import sync_directory

from .janitor import Janitor
from .settings import FolderSettings, parse_folder_url
from .tree import CREATE_FILE, NO_LINKS, READ_FILE, Tree, as_store_error

# --- files -------------------------------------------------------------------------------------------
#
# Direct I/O bypasses the page cache, where values would displace what other programs need. It asks for aligned memory:
# it is used where a value has one part that begins at a page, as in the staging buffer of the helper process.

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


SLOW_S = 0.001
"""Look-ups that take longer go on side by side: a file system across a network takes so long for one or two."""
LOOKERS = 8
_NO_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


class FolderConnection:
    """One thread's use of a folder: `Connection`, whose deadlines hold only between files."""

    def __init__(self, settings: FolderSettings) -> None:
        self._path = settings.path
        self._files = Files(settings.direct, settings.sync, settings.ttl_s)
        self._device: int | None = None
        host = re.sub(r"[^A-Za-z0-9-]", "_", socket.gethostname())[:64]
        self._draft = f"{host}-{os.getpid()}-{secrets.token_hex(6)}"
        self._drafts = 0

    def exists(self, names: Sequence[bytes], notes: Sequence[bytes], deadline_s: float) -> Exists:
        with self._tree(deadline_s) as tree:
            found = self._read_notes(tree, notes)
            return Exists(_Looking(tree, names, deadline_s).look(), found)

    def get(
        self,
        wanted: Sequence[Get],
        notes: Sequence[bytes],
        deadline_s: float,
        arrived: Arrived | None = None,
        noted: Noted | None = None,
    ) -> list[bytes | None]:
        with self._tree(deadline_s) as tree:
            found = self._read_notes(tree, notes)
            if noted is not None:
                noted(found)
            for get in wanted:
                _check_time(deadline_s)
                self._files.read(tree, get)
                if arrived is not None:
                    arrived(get)
            return found

    def put(self, values: Sequence[Put], notes: Sequence[bytes], deadline_s: float) -> list[bytes | None]:
        with self._tree(deadline_s) as tree:
            found = self._read_notes(tree, notes)
            for put in values:
                _check_time(deadline_s)
                self._files.write(tree, put, self._next_draft())
            return found

    def delete(self, names: Sequence[bytes], deadline_s: float) -> None:
        with self._tree(deadline_s) as tree:
            for name in names:
                _check_time(deadline_s)
                with contextlib.suppress(*_NO_FILE), tree.home_of(name) as home:
                    os.unlink(file_name(name), dir_fd=home)
                with contextlib.suppress(*_NO_FILE):
                    os.unlink(file_name(name), dir_fd=tree.notes)
            sync_directory(tree.notes)  # also where nothing was there: an earlier try may have failed at this

    def set_note(self, name: bytes, value: bytes, deadline_s: float, only_if_missing: bool = False) -> bytes:
        with self._tree(deadline_s) as tree:
            target, draft = file_name(name), self._next_draft()
            self._write_note(tree.tmp, draft, tree.file_mode, value)
            try:
                if only_if_missing:
                    there = value if self._link(tree, draft, target, value) else self._read_note(tree, name)
                    if there is not None:
                        sync_directory(tree.notes)
                        return there
                    # What is there is too long for a note, or it was removed just now.
                os.rename(draft, target, src_dir_fd=tree.tmp, dst_dir_fd=tree.notes)
                sync_directory(tree.notes)  # else a power cut would bring back what was flushed
                return value
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(draft, dir_fd=tree.tmp)

    def replicated_note(self, name: bytes, deadline_s: float) -> bytes | None:
        with self._tree(deadline_s) as tree:
            value = self._read_note(tree, name)
            if value is not None:
                sync_directory(tree.notes)  # whoever gave it that name may have been stopped before it was on disk
            return value

    def close(self) -> None:
        """Nothing is open between calls, and no thread can end a call under way."""

    # --- notes -----------------------------------------------------------------------------------

    def _read_notes(self, tree: Tree, names: Sequence[bytes]) -> list[bytes | None]:
        return [self._read_note(tree, name) for name in names]

    @staticmethod
    def _read_note(tree: Tree, name: bytes) -> bytes | None:
        try:
            fd = os.open(file_name(name), READ_FILE, dir_fd=tree.notes)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.ENODEV):
                return None
            raise
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            text = os.pread(fd, MAX_NOTE_BYTES + 1, 0)
            return text if len(text) <= MAX_NOTE_BYTES else None
        finally:
            os.close(fd)

    @staticmethod
    def _write_note(folder: int, name: str, mode: int, value: bytes) -> None:
        fd = os.open(name, CREATE_FILE, mode, dir_fd=folder)
        try:
            while value:
                value = value[os.write(fd, value) :]
            os.fdatasync(fd)  # it says what may be used: a crash must not leave it empty
        finally:
            os.close(fd)

    def _link(self, tree: Tree, draft: str, target: str, value: bytes) -> bool:
        """Give a draft the name of a note unless there is one; whether that was done. Works on NFS too."""
        try:
            os.link(draft, target, src_dir_fd=tree.tmp, dst_dir_fd=tree.notes, follow_symlinks=False)
            return True
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
        try:  # a file system without hard links: readers may see the note empty for a moment
            self._write_note(tree.notes, target, tree.file_mode, value)
        except FileExistsError:
            return False
        return True

    # --- the rest --------------------------------------------------------------------------------

    @contextmanager
    def _tree(self, deadline_s: float) -> Iterator[Tree]:
        _check_time(deadline_s)
        try:
            with Tree(self._path, self._device) as tree:
                self._device = tree.device
                yield tree
        except OSError as error:
            raise as_store_error(self._path, error) from error

    def _next_draft(self) -> str:
        self._drafts += 1
        return f"{self._draft}-{self._drafts}"


class _Looking:
    """One look-up of names: one after another, or by several threads where each takes long."""

    def __init__(self, tree: Tree, names: Sequence[bytes], deadline_s: float) -> None:
        self._tree = tree
        self._names = names
        self._deadline_s = deadline_s
        self._there = [False] * len(names)
        self._next = 0
        self._lock = threading.Lock()
        self._error: OSError | StoreError | None = None

    def look(self) -> list[bool]:
        self._look(time.monotonic() + SLOW_S)
        left = len(self._names) - self._next
        if left > 0:
            threads = [threading.Thread(target=self._look, daemon=True) for _ in range(min(LOOKERS, left) - 1)]
            started = []
            with contextlib.suppress(RuntimeError):  # no more threads: it goes on with fewer
                for thread in threads:
                    thread.start()
                    started.append(thread)
            self._look()
            for thread in started:
                thread.join()
        if self._error is not None:
            raise self._error
        return self._there

    def _look(self, until_s: float = float("inf")) -> None:
        try:
            while time.monotonic() < until_s and self._error is None:
                with self._lock:
                    number, self._next = self._next, self._next + 1
                if number >= len(self._names):
                    return
                _check_time(self._deadline_s)
                self._there[number] = _is_there(self._tree, self._names[number])
        except (OSError, StoreError) as error:
            self._error = error


def _is_there(tree: Tree, name: bytes) -> bool:
    try:
        with tree.home_of(name) as home:
            return stat.S_ISREG(os.stat(file_name(name), dir_fd=home, follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _check_time(deadline_s: float) -> None:
    if time.monotonic() >= deadline_s:
        raise StoreError(StoreProblem.TIMEOUT, "the time was over before its file's turn")


# --- the store ---------------------------------------------------------------------------------------


class FolderStore:
    """`SharedStore` on a folder. Its calls may hang with the file system: `shared_folder` runs it in a helper."""

    pack_blocks = 1
    trouble = ""

    def __init__(self, url: str) -> None:
        self.settings = parse_folder_url(url)
        self.address = f"file://{self.settings.path}"
        self.connections = self.settings.connections

    def connect(self) -> FolderConnection:
        return FolderConnection(self.settings)

    def close(self) -> None:
        """Its connections share nothing."""

    def run_beside(self, tell: Callable[[str], bool]) -> None:
        """The janitor; never returns. The helper runs it in a thread. `tell`: see `Janitor.run`."""
        Janitor(self.settings).run(tell)


def folder_in_helper(url: str) -> FolderStore:
    """The store, in a process of its own: the modes of files follow those of the folder, and no mask."""
    os.umask(0)
    return FolderStore(url)


def shared_folder(url: str) -> HelperStore:
    """The store, as the daemon has it. Raises ConfigError."""
    settings = parse_folder_url(url)
    return HelperStore(f"{__name__}:folder_in_helper", url, f"file://{settings.path}", settings.connections)
