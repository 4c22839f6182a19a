"""The calls of a store on a shared folder. They block as long as the kernel does: see `helper`."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tiercache.daemon.tiers.shared.stores.names import file_name
from tiercache.daemon.tiers.shared.stores.store import (
    MAX_NOTE_BYTES,
    Arrived,
    Exists,
    Get,
    Noted,
    Put,
    StoreError,
    StoreProblem,
)
from tiercache.ground.file_systems import sync_directory

from .files import Files
from .settings import FolderSettings
from .tree import CREATE_FILE, NO_LINKS, READ_FILE, Tree, as_store_error

SLOW_S = 0.001
"""Look-ups that take longer go on side by side: a file system across a network takes so long for one or two."""
LOOKERS = 8
_NO_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


class FolderConnection:
    """One thread's use of a folder: `store.Connection`, whose deadlines hold only between files."""

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
                    sync_directory(tree.notes)

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
        return self.exists((), (name,), deadline_s).notes[0]

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
