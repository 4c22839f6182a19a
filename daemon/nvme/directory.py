"""One cache directory on a local disk: who may use it, what is in it, its segment files.

    lock                    held as long as a daemon uses the directory
    superblock              format and geometry (superblock.py)
    segments/00000001.seg   blocks in fixed slots, all files of one size, allocated in full
    index.db*               which block is in which slot (catalog.py)
    spare                   a little room for index.db on a full disk
    damaged-<time>/         what was found without a superblock that could be trusted; at most one,
                            and only until its room is needed

Nothing else in there is touched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from tiercache.daemon.nvme import superblock as superblocks
from tiercache.daemon.nvme.cipher import Cipher
from tiercache.daemon.nvme.superblock import ALIGNMENT_BYTES, DamagedSuperblock, NewerSuperblock, Superblock
from tiercache.errors import ConfigError
from tiercache.units import format_bytes

log = logging.getLogger("tiercache.daemon")

PAGE_BYTES = ALIGNMENT_BYTES
MAX_SEGMENT_ID = 32767
"""Slots are `segment_id << 48 | offset` and must fit a signed 64-bit integer."""
DATABASE_NAME = "index.db"
SPARE_BYTES = 128 << 10
"""Room that is given up when the database cannot be opened: it needs some for its log, on a full disk too."""
_SEGMENT_NAME = re.compile(r"([0-9]{8})\.seg")
_ASIDE_NAME = re.compile(r"damaged-[0-9TZ]+")
_MAX_NAMED = 10
_NO_DIRECT_IO = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS)


class DiskIO:
    """The system calls of this tier in one place, so that a test can make any of them fail.

    All raise OSError and may block for as long as the disk does.
    """

    def open(self, path: Path, flags: int) -> int:
        """A descriptor of a file, made 0600 where `flags` say so."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def fallocate(self, fd: int, size_bytes: int) -> None:
        """Give the file all its room: nothing written later runs out of it."""
        os.posix_fallocate(fd, 0, size_bytes)

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Fill the views; returns how many bytes, fewer than asked perhaps."""
        return os.preadv(fd, views, offset)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Write the views; returns how many bytes, fewer than given perhaps."""
        return os.pwritev(fd, views, offset)

    def unlink(self, path: Path) -> None:
        """Remove a file and its room: 250 ms per GiB on some file systems."""
        os.unlink(path)


def segments_within(cap_bytes: int, segment_bytes: int, db_reserve_bytes: int) -> int:
    """How many segments a byte cap allows beside the database and its log."""
    return min(MAX_SEGMENT_ID, max(0, cap_bytes - db_reserve_bytes) // segment_bytes)


class LockedBy(Exception):
    """The directory is in use; the text is the pid of who uses it."""


def take_lock(path: Path) -> int:
    """Be the only one who uses a directory until the descriptor is closed. Raises LockedBy and OSError."""
    # An flock on an open file ends with the process, however it ends.
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise LockedBy(pid) from None
    except OSError:
        os.close(fd)
        raise
    with contextlib.suppress(OSError):  # the pid is for the other one's message; a full disk may lack it
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def segment_id(name: str) -> int | None:
    """The id in the name of a segment's file; None for a name that is not one's."""
    match = _SEGMENT_NAME.fullmatch(name)
    return int(match[1]) if match is not None and 1 <= int(match[1]) <= MAX_SEGMENT_ID else None


def holds_data(path: Path) -> bool:
    """Whether a folder has anything in it that this tier keeps. Raises OSError."""
    return any(_is_data(name) for name in os.listdir(path))


class Directory:
    """A directory that this daemon alone uses, from `open` to `close`.

    Everything here may block: only `fd`, `segments` and the plain attributes are for the event loop.
    `create_segment` and `remove_segment` are for one thread at a time (a `TaskOp`).

    Args:
        path: made (0700) when it is not there.
        cap_bytes: what segments, database and anything put aside may take together.
        segment_bytes: for a new directory; one that exists keeps its own.
        db_reserve_bytes: part of the cap that is left to the database.
        disk: the system calls.
    """

    def __init__(
        self, path: Path, cap_bytes: int, segment_bytes: int, db_reserve_bytes: int = 0, disk: DiskIO | None = None
    ) -> None:
        if segment_bytes <= 0 or segment_bytes % PAGE_BYTES:
            raise ConfigError(f"a segment of {segment_bytes} bytes: must be a multiple of {PAGE_BYTES}, e.g. 1GiB")
        self.path = path
        self.cap_bytes = cap_bytes
        self.segment_bytes = segment_bytes
        self.db_reserve_bytes = db_reserve_bytes
        self.disk = disk or DiskIO()
        self.cipher: Cipher | None = None
        """What new blocks are encrypted with, and those that are read."""
        self.direct = False
        """Whether I/O goes past the page cache."""
        self.direct_reason = "not open"
        """Why it does not; empty when it does."""
        self.is_new = False
        """Whether `open` found no blocks to keep: rows of an older life cannot be true."""
        self.superblock = Superblock(b"", segment_bytes, 0)
        self._fds: dict[int, int] = {}
        self._lock_fd = -1

    @property
    def max_segments(self) -> int:
        """How many segments the cap allows."""
        return segments_within(self.cap_bytes, self.segment_bytes, self.db_reserve_bytes)

    @property
    def database_path(self) -> Path:
        """Where the catalog belongs."""
        return self.path / DATABASE_NAME

    @property
    def segments(self) -> list[int]:
        """Ids of the segments that are open, ascending."""
        return sorted(self._fds)

    def fd(self, segment_id: int) -> int:
        """The descriptor of an open segment. Raises OSError when there is none of that id."""
        try:
            return self._fds[segment_id]
        except KeyError:
            raise OSError(errno.ENOENT, f"segment {segment_id} is not there") from None

    def free_bytes(self) -> int:
        """Room that the file system has left for this user. Blocks as the disk does; OSError."""
        stat = os.statvfs(self.path)
        return stat.f_bavail * stat.f_frsize

    # --- opening ---------------------------------------------------------------------------------

    def _keep_others_out(self) -> None:
        """Who can write to the folder could have our files lie elsewhere. Raises ConfigError."""
        mode = self.path.stat().st_mode
        if mode & 0o1002 == 0o1002:
            text = "is a folder for everybody's files: name one in it"
            raise ConfigError(f"nvme directory {self.path} {text}")
        if mode & 0o002:  # a volume in a pod is like that, where nobody else is
            log.warning("nvme directory %s can be written by everybody: chmod 0700 it, or name one in it", self.path)

    def open(self) -> None:
        """Take the lock, judge what is there, open the segments.

        Raises ConfigError, in one line, when another daemon has it, a newer version has made it, or
        the file system does not let us.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._keep_others_out()
            self._lock()
            self._read_superblock()
            (self.path / "segments").mkdir(mode=0o700, exist_ok=True)
            self._name_foreign_files()
            self._probe_direct()
            self._open_segments()
            self._make_spare()
        except OSError as error:
            self.close()
            raise ConfigError(
                f"nvme directory {self.path} cannot be used ({error.strerror}): make it writable, or choose another one"
            ) from error
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Close all files and let go of the lock. No I/O may be in flight. Idempotent."""
        while self._fds:
            os.close(self._fds.popitem()[1])
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _lock(self) -> None:
        try:
            self._lock_fd = take_lock(self.path)
        except LockedBy as holder:
            raise ConfigError(
                f"another daemon (pid {holder}) uses nvme directory {self.path}: stop it, or give each daemon its own"
            ) from None

    def _read_superblock(self) -> None:
        why = "there is none"
        found = None
        try:
            found = superblocks.read_superblock(self.path)
        except DamagedSuperblock as error:
            why = str(error)
        except NewerSuperblock as error:
            raise ConfigError(
                f"nvme directory {self.path} was made by a newer tiercache ({error}): "
                "run that one, or choose another directory; nothing was changed"
            ) from None
        if found is None:
            self._put_aside(why)
            found = Superblock.new(self.segment_bytes)
            superblocks.write_superblock(self.path, found)
            self.is_new = True
        self.superblock = found
        if found.segment_bytes != self.segment_bytes:
            log.warning(
                "nvme directory %s has segments of %s and keeps them; the setting says %s (empty it to change that)",
                self.path, format_bytes(found.segment_bytes), format_bytes(self.segment_bytes),
            )  # fmt: skip
            self.segment_bytes = found.segment_bytes

    def _put_aside(self, why: str) -> None:
        """Move what looks like ours out of the way, whatever is in it."""
        ours = [path for path in self.path.iterdir() if _is_data(path.name)]
        if not ours:
            return
        self._remove_aside()
        aside = self.path / time.strftime("damaged-%Y%m%dT%H%M%SZ", time.gmtime())
        aside.mkdir(mode=0o700)
        for path in ours:
            path.rename(aside / path.name)
        log.error(
            "nvme directory %s: superblock not usable (%s); its content is now in %s until the room is needed, "
            "and the directory starts empty", self.path, why, aside.name,
        )  # fmt: skip

    def _remove_aside(self) -> bool:
        """Delete what was put aside; True when there was something."""
        found = [path for path in self.path.iterdir() if _ASIDE_NAME.fullmatch(path.name)]
        for path in found:
            log.warning("nvme directory %s: removing %s", self.path, path.name)
            shutil.rmtree(path)
        return bool(found)

    def _name_foreign_files(self) -> None:
        known = {"lock", "probe", "spare", "lost+found"}
        foreign = sorted(
            path.name for path in self.path.iterdir()
            if path.name not in known and not _is_data(path.name) and not _ASIDE_NAME.fullmatch(path.name)
        )  # fmt: skip
        if foreign:
            more = f" and {len(foreign) - _MAX_NAMED} more" if len(foreign) > _MAX_NAMED else ""
            names = ", ".join(foreign[:_MAX_NAMED])
            log.warning("nvme directory %s holds files that are not ours, left alone: %s%s", self.path, names, more)

    def _probe_direct(self) -> None:
        """Try direct I/O on this very file system; some refuse it only when it comes to reading."""
        path = self.path / "probe"
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        self.direct, self.direct_reason = True, ""
        try:
            fd = self.disk.open(path, flags | os.O_DIRECT)
            try:
                area = memoryview(mmap.mmap(-1, 2 * PAGE_BYTES))
                area[:PAGE_BYTES] = os.urandom(PAGE_BYTES)
                self.disk.pwritev(fd, [area[:PAGE_BYTES]], 0)
                self.disk.preadv(fd, [area[PAGE_BYTES:]], 0)
                if area[:PAGE_BYTES] != area[PAGE_BYTES:]:
                    raise OSError(errno.EIO, "a page written was not read back")
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                return  # a full disk still has blocks to read
            if error.errno not in _NO_DIRECT_IO:
                raise
            self.direct, self.direct_reason = False, f"this file system refuses O_DIRECT ({error.strerror})"
            log.warning("nvme directory %s: %s; I/O goes through the page cache", self.path, self.direct_reason)
        finally:
            with contextlib.suppress(FileNotFoundError):
                self.disk.unlink(path)

    def _open_segments(self) -> None:
        for path in sorted((self.path / "segments").iterdir()):
            number = segment_id(path.name)
            if number is None:
                log.warning("nvme directory %s: %s is no segment of ours, left alone", self.path, path.name)
                continue
            size_bytes = path.lstat().st_size
            if size_bytes != self.segment_bytes:
                log.error(
                    "nvme directory %s: segment %s has %d bytes, not %d: dropped",
                    self.path, path.name, size_bytes, self.segment_bytes,
                )  # fmt: skip
                self.disk.unlink(path)
                continue
            self._fds[number] = self.disk.open(path, self._flags())

    def _make_spare(self) -> None:
        with contextlib.suppress(OSError):  # a full disk has none to spare
            fd = self.disk.open(self.path / "spare", os.O_RDWR | os.O_CREAT)
            try:
                self.disk.fallocate(fd, SPARE_BYTES)
            finally:
                os.close(fd)

    def give_up_spare(self) -> bool:
        """Give back a little room, until the next `open`; False when there was none. Blocks; OSError."""
        try:
            self.disk.unlink(self.path / "spare")
        except FileNotFoundError:
            return False
        return True

    def _flags(self) -> int:
        return os.O_RDWR | (os.O_DIRECT if self.direct else 0)

    # --- segments --------------------------------------------------------------------------------

    def segment_path(self, segment_id: int) -> Path:
        """Where a segment's file is."""
        return self.path / "segments" / f"{segment_id:08d}.seg"

    def create_segment(self, segment_id: int) -> None:
        """Make and open a segment with all its room. Blocks: 0.3 to some 100 ms.

        Raises OSError: ENOSPC when the disk has no room or the cap is reached, EEXIST when there is
        one. Nothing is left behind then. What was put aside makes room first.
        """
        if not 1 <= segment_id <= MAX_SEGMENT_ID:
            raise OSError(errno.EINVAL, f"segment ids are 1 to {MAX_SEGMENT_ID}, not {segment_id}")
        if len(self._fds) >= self.max_segments:
            raise OSError(errno.ENOSPC, f"the cap of {format_bytes(self.cap_bytes)} is reached")
        if self._aside_bytes() + (len(self._fds) + 1) * self.segment_bytes + self.db_reserve_bytes > self.cap_bytes:
            self._remove_aside()
        try:
            self._create(segment_id)
        except OSError as error:
            if error.errno != errno.ENOSPC or not self._remove_aside():
                raise
            self._create(segment_id)

    def _create(self, segment_id: int) -> None:
        path = self.segment_path(segment_id)
        fd = self.disk.open(path, self._flags() | os.O_CREAT | os.O_EXCL)
        try:
            self.disk.fallocate(fd, self.segment_bytes)
        except OSError:
            os.close(fd)
            self.disk.unlink(path)
            raise
        self._fds[segment_id] = fd

    def remove_segment(self, segment_id: int) -> None:
        """Close and delete a segment: 250 ms per GiB. No I/O may be in flight on it. Raises OSError."""
        fd = self.fd(segment_id)
        del self._fds[segment_id]
        os.close(fd)
        self.disk.unlink(self.segment_path(segment_id))

    def _aside_bytes(self) -> int:
        total = 0
        for aside in self.path.iterdir():
            if _ASIDE_NAME.fullmatch(aside.name):
                total += sum(path.lstat().st_blocks * 512 for path in aside.rglob("*"))
        return total


def _is_data(name: str) -> bool:
    """Whether a name in the directory is one that this tier gives to what it keeps."""
    return name in (superblocks.NAME, f"{superblocks.NAME}.new", "segments") or name.startswith(DATABASE_NAME)
