"""Removes values that are old or too much, and files that were never finished. One host at a time does this.

A pass looks at every value once, in slices. It removes what is older than `ttl`, and counts the rest by age. If that is
more than `size`, the counts say how old a value must be to go, and the next pass removes those while it counts again.
So a pass needs no list of files, and the oldest go first, to within a minute. What cannot be removed stays and counts:
others go in its place, and `health` names it. A damaged file or folder does not end a pass.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tiercache.daemon.tiers.shared.stores.store import StoreError
from tiercache.ground.units import format_bytes

from .settings import FolderSettings
from .tree import CREATE_FILE, NO_LINKS, OURS, READ_FILE, Tree, as_store_error

# --- whose turn it is --------------------------------------------------------------------------------
#
# The lease is a file whose text names its holder and whose modification time is the holder's last sign of life. Hosts'
# clocks may be wrong, so all times are those that the file system gives to files, and are compared with each other
# only.
#
# A lease counts from the second look on: where two hosts have taken over an old one at once, the look before has shown
# the last of them to both. Two janitors for a moment would remove more than needed, but never a wrong thing.
#
# A full file system is what a janitor is needed for, so an old lease can be taken over without new room: all leases
# have one length, and the new text then goes over the old one, in the same file.

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


SLICE_FILES = 256
SLICE_PAUSE_S = 0.01
PASS_PAUSE_S = 60.0
TRY_S = 60.0
"""How often a host without the lease tries to get it, and the pause after a step that failed."""
DRAFT_S = 3600.0
"""A file in `tmp` that is older belongs to a process that is gone."""
STEP_S = 60
STEPS = 20_000
"""Bytes are counted by age, in steps of `STEP_S`. All that is older than these steps counts as one more."""
_OF_ALL_FILES = (errno.EROFS, errno.ENOTCONN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_OF_ONE_OR_ALL = (errno.EIO, errno.ESTALE)
MAX_BAD_IN_A_ROW = 16
"""Errors of `_OF_ONE_OR_ALL`, with no good file in between, after which the file system is taken to fail as a whole."""
KEEP_SHARE = 0.95
"""A full folder is brought down to this share of its size, so that not every pass removes."""
_FAN = re.compile(r"[0-9a-f]{3}")

log = logging.getLogger("tiercache.daemon")


@dataclass(slots=True)
class _Surplus:
    """What the counts of the last pass say to remove: all before one time, and part of what is before another."""

    all_before_ns: int = 0
    some_before_ns: int = 0
    some_bytes: int = 0


@dataclass(slots=True)
class _Pass:
    now_ns: int
    surplus: _Surplus
    kept: dict[int, int] = field(default_factory=dict)
    """Bytes by age."""
    removed: int = 0
    removed_bytes: int = 0
    stuck_bytes: int = 0
    """Of files that should go and cannot be removed."""
    stuck: tuple[str, OSError] | None = None
    """The first of these by its path, and why."""
    bad_in_a_row: int = 0

    def cannot_remove(self, path: str, error: OSError, size_bytes: int = 0) -> None:
        """Goes on without what concerns one file alone. Raises the error of a whole file system."""
        self.bad_in_a_row += error.errno in _OF_ONE_OR_ALL
        if error.errno in _OF_ALL_FILES or self.bad_in_a_row >= MAX_BAD_IN_A_ROW:
            raise error
        self.stuck_bytes += size_bytes
        if self.stuck is None or path < self.stuck[0]:
            self.stuck = path, error


class Janitor:
    """Cleans up one folder, in a thread of its own."""

    def __init__(self, settings: FolderSettings) -> None:
        self._settings = settings
        self._lease = JanitorLease()
        self._id = secrets.token_hex(8)
        self._walk: Iterator[None] | None = None
        self._surplus: _Surplus | None = None
        self._in_vain = False  # the last pass was to remove something, and has removed nothing
        self._stuck_value = ""
        self.stuck = ""
        """What the last pass could not remove, and why, in words; empty if nothing."""

    def run(self, tell: Callable[[str], bool]) -> None:
        """Never returns. `tell` gets what is not well, whenever that changes; empty: all is. False: say it again."""
        told = logged = ""
        while True:
            try:
                pause_s, text = self.step(), ""
            except (OSError, StoreError) as error:
                pause_s = TRY_S
                self._walk = None
                problem = error if isinstance(error, StoreError) else as_store_error(self._settings.path, error)
                text = f"the shared folder is not cleaned up at the moment: {problem.text}"
            text = text or self.stuck
            if text and text != logged:
                log.warning("%s", text)
            logged = text
            if text != told and tell(text):
                told = text
            time.sleep(pause_s)

    def step(self) -> float:
        """One slice; returns how many seconds to wait until the next one. Raises OSError and StoreError."""
        with Tree(self._settings.path) as tree:
            if not self._lease.hold(tree):
                self._walk, self.stuck = None, ""
                return TRY_S
        if self._walk is None:
            self._walk = self._pass()
        for _ in self._walk:
            return SLICE_PAUSE_S
        self._walk = None
        return PASS_PAUSE_S if self._surplus is None or self._in_vain else SLICE_PAUSE_S

    def _pass(self) -> Iterator[None]:
        with Tree(self._settings.path) as tree:
            now_ns = time_of_holder_ns(tree)
            fans = _fans(tree.base)
        this = _Pass(now_ns, self._surplus or _Surplus())
        yield from self._sweep("", this)
        removes, self._surplus = self._surplus is not None, None
        for fan in fans:
            yield from self._sweep(fan, this)
        self._surplus = self._count_up(this)
        self._in_vain = removes and not this.removed
        self._note_stuck(this)
        if this.removed:
            size = format_bytes(this.removed_bytes)
            log.info("removed %d old values from the shared folder %s: %s", this.removed, self._settings.path, size)

    def _sweep(self, fan: str, this: _Pass) -> Iterator[None]:
        """Look at all files of a fan-out folder; at all drafts if `fan` is empty."""
        above, look = (f"values/{fan}", self._look_at) if fan else ("tmp", self._look_at_draft)
        folder = -1
        with Tree(self._settings.path) as tree:
            try:
                folder = _open(tree.values, fan) if fan else _open(tree.base, "tmp")
            except OSError as error:
                this.cannot_remove(above, error)
        if folder < 0:
            yield
            return
        try:
            for names in _slices(folder):
                for name in names:
                    path = f"{above}/{name}"
                    try:
                        look(folder, name, path, this)
                    except FileNotFoundError:
                        continue
                    except OSError as error:
                        this.cannot_remove(path, error)
                yield
        except OSError as error:
            this.cannot_remove(above, error)
        finally:
            os.close(folder)

    def _look_at_draft(self, folder: int, name: str, path: str, this: _Pass) -> None:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISREG(found.st_mode) and this.now_ns - found.st_mtime_ns > DRAFT_S * 1e9:
            _remove(name, folder, path, this)

    def _look_at(self, folder: int, name: str, path: str, this: _Pass) -> None:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            return  # no value
        written_ns, surplus = found.st_mtime_ns, this.surplus
        old = this.now_ns - written_ns > self._settings.ttl_s * 1e9 or written_ns < surplus.all_before_ns
        if old or (surplus.some_bytes > 0 and written_ns < surplus.some_before_ns):
            if _remove(name, folder, path, this, found.st_size):
                surplus.some_bytes -= 0 if old else found.st_size
                this.removed += 1
                this.removed_bytes += found.st_size
        else:
            step = min(max(0, (this.now_ns - written_ns) // (STEP_S * 10**9)), STEPS)
            this.kept[step] = this.kept.get(step, 0) + found.st_size
            this.bad_in_a_row = 0

    def _note_stuck(self, this: _Pass) -> None:
        """Say what could not be removed, for as long as it is there: not each pass has to remove something."""
        base = f"{self._settings.path}/{OURS}"
        if this.stuck is not None:
            path, error = this.stuck
            self._stuck_value = f"{base}/{path}" if path.count("/") == 2 else ""
            why = as_store_error(self._settings.path, OSError(error.errno, error.strerror, f"{base}/{path}")).text
            self.stuck = f"files of the shared folder cannot be removed, such as {why}"
        elif not (self._stuck_value and os.path.lexists(self._stuck_value)):
            self.stuck = ""

    def _count_up(self, this: _Pass) -> _Surplus | None:
        """What is too much, by what a pass has counted; None if all has room."""
        total = sum(this.kept.values()) + this.stuck_bytes
        if not self._settings.size_bytes or total <= self._settings.size_bytes or not this.kept:
            return None
        too_much = total - int(self._settings.size_bytes * KEEP_SHARE)
        for step in sorted(this.kept, reverse=True):
            if this.kept[step] >= too_much:
                break
            too_much -= this.kept[step]
        older_ns = this.now_ns - (step + 1) * STEP_S * 10**9 if step < STEPS else 0
        return _Surplus(older_ns, this.now_ns - step * STEP_S * 10**9 + 1, too_much)


def _remove(name: str, folder: int, path: str, this: _Pass, size_bytes: int = 0) -> bool:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        raise
    except OSError as error:
        this.cannot_remove(path, error, size_bytes)
        return False
    this.bad_in_a_row = 0
    return True


def _open(above: int, name: str) -> int:
    """A folder to list; -1 if there is none."""
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    except (FileNotFoundError, NotADirectoryError):
        return -1


def _fans(base: int) -> list[str]:
    """The fan-out folders that there are."""
    folder = _open(base, "values")
    try:
        return sorted(name for names in _slices(folder) for name in names if _FAN.fullmatch(name))
    finally:
        os.close(folder)


def _slices(folder: int) -> Iterator[list[str]]:
    """The names in a folder, some at a time."""
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) == SLICE_FILES:
                yield names
                names = []
    yield names
