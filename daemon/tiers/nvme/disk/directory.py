"""One cache directory on a local disk: its lock, its contents, its segment files.

    lock                    held as long as a daemon uses the directory
    superblock              format and geometry (superblock.py)
    segments/00000001.seg   blocks in fixed slots, all files of one size, allocated in full
    index.db*               the catalog: which block is in which slot (catalog.py)
    spare                   a little room for index.db on a full disk
    damaged-<time>/         files found without a superblock that could be trusted; at most one,
                            and only until its room is needed

Other files in there are not touched.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from pathlib import Path
from typing import NamedTuple

from tiercache.daemon.ground.mounts import check_mounted, device_below, mount_point_of
from tiercache.daemon.tiers.forms.cipher import Cipher
from tiercache.errors import ConfigError, DirectoryUnavailable
from tiercache.ground.file_systems import IN_THE_WAY, what_stands_at
from tiercache.ground.units import format_bytes

from . import superblock as superblocks
from .aio_probe import refusal_of_aio
from .aside import aside_bytes, is_aside, put_aside, remove_aside
from .disk import PAGE_BYTES, DiskIO, refusal_of_direct_io
from .lock import LOCK_NAME, LockedBy, take_lock
from .segment_files import MAX_SEGMENT_ID, SegmentLook, segment_id, segment_name
from .superblock import DamagedSuperblock, NewerSuperblock, Superblock
from .troubles import unavailable

log = logging.getLogger("tiercache.daemon")

DATABASE_NAME = "index.db"
SPARE_BYTES = 128 << 10
"""Room that is freed when the database cannot be opened: it needs some for its log, on a full disk too."""
_MAX_NAMED = 10


def segments_within(cap_bytes: int, segment_bytes: int, db_reserve_bytes: int) -> int:
    """How many segments a byte cap allows beside the database and its log."""
    return min(MAX_SEGMENT_ID, max(0, cap_bytes - db_reserve_bytes) // segment_bytes)


def holds_data(path: Path) -> bool:
    """True if a folder contains any data of this tier. Raises OSError."""
    return any(_is_data(name) for name in os.listdir(path))


class Home(NamedTuple):
    """Where a directory was when it was open: what to expect when it is opened again in the same life."""

    directory_id: bytes
    device_below: int | None
    """The device that its path is on when its file system is not mounted."""
    former: frozenset[bytes] = frozenset()
    """Ids of other directories that were open at this path before: one may reappear when what hid it is unmounted."""


class Directory:
    """A directory used exclusively by this daemon, from `open` to `close`.

    Everything here may block: only `fd`, `segments` and the plain attributes are for the event loop.
    `create_segment` and `remove_segment` are for one thread at a time (a `TaskOp`).

    Args:
        path: created (0700) if missing.
        cap_bytes: limit for segments, database and files set aside together.
        segment_bytes: for a new directory; an existing one keeps its own.
        db_reserve_bytes: part of the cap that is reserved for the database.
        disk: the system calls.
        require_mount: refuse the file system of /.
        before: where it was earlier in this life, if it was open then.
        daemon_pid: of the daemon, if this is a process of its own for the directory.
    """

    def __init__(
        self,
        path: Path,
        cap_bytes: int,
        segment_bytes: int,
        db_reserve_bytes: int = 0,
        disk: DiskIO | None = None,
        require_mount: bool = False,
        before: Home | None = None,
        daemon_pid: int = 0,
    ) -> None:
        if segment_bytes <= 0 or segment_bytes % PAGE_BYTES:
            raise ConfigError(f"a segment of {segment_bytes} bytes: must be a multiple of {PAGE_BYTES}, e.g. 1GiB")
        self.path = path
        self.cap_bytes = cap_bytes
        self.segment_bytes = segment_bytes
        self.db_reserve_bytes = db_reserve_bytes
        self.disk = disk or DiskIO()
        self.home = before
        self.cipher: Cipher | None = None
        """Encrypts new blocks and decrypts those that are read."""
        self.direct = False
        """True if I/O bypasses the page cache."""
        self.direct_reason = "not open"
        """Why it does not; empty when it does."""
        self.aio_reason = "not open"
        """Why blocks cannot move by Linux AIO; empty when they can."""
        self.is_new = False
        """True if `open` found no blocks to keep: rows of an earlier life cannot be valid."""
        self.superblock = Superblock(b"", segment_bytes, 0)
        self.kept_bytes = 0
        """Bytes of segments beyond the cap, kept because their blocks would be lost."""
        self.trouble = ""
        """What is wrong with the process that uses it, for people: never anything here."""
        self.worker_pid = self.worker_starts = 0
        """That process, if it has one of its own, and how many there were."""
        self._require_mount = require_mount
        self._daemon_pid = daemon_pid
        self._fds: dict[int, int] = {}
        self._lock_fd = self._folder_fd = -1
        self._database: tuple[int, int] | None = None
        self._segment_look = SegmentLook(self._fds)

    @property
    def max_segments(self) -> int:
        """How many segments the cap allows."""
        return segments_within(self.cap_bytes, self.segment_bytes, self.db_reserve_bytes)

    @property
    def database_path(self) -> Path:
        """Path of the catalog."""
        return self.path / DATABASE_NAME

    @property
    def segments(self) -> list[int]:
        """Ids of the open segments, ascending. O(segments), of which a large disk has thousands."""
        return sorted(self._fds)

    @property
    def segment_count(self) -> int:
        """Number of open segments."""
        return len(self._fds)

    def fd(self, segment_id: int) -> int:
        """The descriptor of an open segment. Raises OSError when there is none of that id."""
        try:
            return self._fds[segment_id]
        except KeyError:
            raise OSError(errno.ENOENT, f"segment {segment_id} is not there") from None

    def free_bytes(self) -> int:
        """Free space of the file system for this user. Blocks as the disk does; OSError."""
        found = os.fstatvfs(self._folder_fd)
        return found.f_bavail * found.f_frsize

    @property
    def _here(self) -> Path:
        """The folder that was opened, wherever its path leads by now."""
        return Path(f"/proc/self/fd/{self._folder_fd}")

    # --- opening ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Take the lock, check the contents, open the segments.

        Raises ConfigError, in one line, for what waiting cannot solve: it is not a directory, it is shared by all users
        (such as /tmp), another daemon has it, a newer version has made it. Raises DirectoryUnavailable for what may
        pass.
        """
        try:
            self._open_folder()
            self._lock()
            self._read_superblock()
            self._make_segments_folder()
            self._name_foreign_files()
            self._probe()
            self._open_segments()
            self._make_spare()
            before = frozenset() if self.home is None else self.home.former | {self.home.directory_id}
            here = self.superblock.directory_id
            self.home = Home(here, device_below(self.path), before - {here})
        except OSError as error:
            self.close()
            raise unavailable(self.path, error) from error
        except BaseException:  # a lock that outlived this would look like another path of the directory
            self.close()
            raise

    def _open_folder(self) -> None:
        """Find the folder, or create it, and check that other users are kept out."""
        check_mounted(self.path, self._require_mount)
        try:
            if self.home is None:  # one that was here and is gone is not created again: its disk is
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in IN_THE_WAY:
                raise
            text = f"{what_stands_at(self.path)}: name another one, or move that away"
            raise ConfigError(f"nvme directory {self.path} cannot be used: {text}") from None
        not_mounted = self.home is not None and os.fstat(self._folder_fd).st_dev == self.home.device_below
        if not_mounted and not self._was_open_before():
            raise DirectoryUnavailable(
                f"nvme directory {self.path} cannot be used: its file system is not mounted any more: mount it"
            )
        # A user who can write to the folder could redirect our files elsewhere.
        mode = os.fstat(self._folder_fd).st_mode
        if mode & 0o1002 == 0o1002:
            text = "is a folder for all users' files: name one in it"
            raise ConfigError(f"nvme directory {self.path} {text}")
        if mode & 0o002:  # a volume in a pod is like that, without other users
            log.warning("nvme directory %s can be written by all users: chmod 0700 it, or name one in it", self.path)

    def _was_open_before(self) -> bool:
        """True if the folder was open at this path before the last one, which was mounted over it."""
        try:
            found = superblocks.read_superblock(self._here)
        except (DamagedSuperblock, NewerSuperblock):
            return False
        return found is not None and self.home is not None and found.directory_id in self.home.former

    def close(self) -> None:
        """Close all files and release the lock. No I/O may be in flight. Idempotent."""
        while self._fds:
            _close(self._fds.popitem()[1])
        for fd in (self._lock_fd, self._folder_fd):
            if fd >= 0:
                _close(fd)
        self._lock_fd = self._folder_fd = -1

    def note_database(self) -> None:
        """From now on `look` also checks that the database stays in place. Blocks; OSError."""
        self._database = _identity(os.stat(self.database_path))

    def look(self) -> str:
        """Why the path is not this directory any more; empty when it is. Blocks for some microseconds; OSError.

        Open descriptors outlive their path: blocks would keep going to a disk that can no longer be reached.
        """
        mine = {LOCK_NAME: _identity(os.fstat(self._lock_fd))}
        if self._database is not None:
            mine[DATABASE_NAME] = self._database
        for name, identity in mine.items():
            try:
                found = _identity(os.stat(self.path / name, follow_symlinks=False))
            except (FileNotFoundError, NotADirectoryError):
                return f"{name} is gone: the directory was removed or unmounted"
            if found != identity:
                return f"{name} is another file: the directory was replaced, or something was mounted over it"
        return self._segment_look.problem(self.segment_bytes)

    def _lock(self) -> None:
        try:
            self._lock_fd = take_lock(self._here, self._daemon_pid)
        except LockedBy as holder:
            if holder.ourselves:
                raise ConfigError(
                    f"nvme directory {self.path} is another path of one that is named already: name each once"
                ) from None
            raise ConfigError(
                f"another daemon (pid {holder}) uses nvme directory {self.path}: stop it, or give each daemon its own"
            ) from None

    def _read_superblock(self) -> None:
        why = "there is none"
        found = None
        try:
            found = superblocks.read_superblock(self._here)
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
            superblocks.write_superblock(self._here, found)
            self.is_new = True
            self._tell_new()
        self.superblock = found
        if found.segment_bytes != self.segment_bytes:
            log.warning(
                "nvme directory %s has segments of %s and keeps them; the setting says %s (empty it to change that)",
                self.path,
                format_bytes(found.segment_bytes),
                format_bytes(self.segment_bytes),
            )
            self.segment_bytes = found.segment_bytes

    def _tell_new(self) -> None:
        """Log a new directory, so that a disk that is not mounted is noticed before the one below is full."""
        place = mount_point_of(self._here)
        log.info("nvme directory %s is new, on the file system mounted at %s", self.path, place)

    def _put_aside(self, why: str) -> None:
        """Move files that look like ours out of the way, whatever they contain."""
        ours = [path for path in self._here.iterdir() if _is_data(path.name)]
        if ours:
            log.error(
                "nvme directory %s: superblock not usable (%s); its content is now in %s until the room is needed, "
                "and the directory starts empty",
                self.path,
                why,
                put_aside(self._here, ours),
            )

    def _make_segments_folder(self) -> None:
        path = self._here / "segments"
        if _mode_of(path) and not stat.S_ISDIR(_mode_of(path)):
            aside = put_aside(self._here, [path])
            log.error(
                "nvme directory %s: segments is not a folder; it is now in %s, and its blocks are lost",
                self.path,
                aside,
            )
        path.mkdir(mode=0o700, exist_ok=True)

    def _name_foreign_files(self) -> None:
        known = {"lock", "probe", "spare", "lost+found"}
        foreign = sorted(
            path.name
            for path in self._here.iterdir()
            if path.name not in known and not _is_data(path.name) and not is_aside(path.name)
        )
        if foreign:
            more = f" and {len(foreign) - _MAX_NAMED} more" if len(foreign) > _MAX_NAMED else ""
            names = ", ".join(foreign[:_MAX_NAMED])
            log.warning("nvme directory %s holds files that are not ours, left alone: %s%s", self.path, names, more)

    def _probe(self) -> None:
        refusal = refusal_of_direct_io(self.disk, self._here / "probe")
        self.direct = not refusal
        self.direct_reason = f"this file system refuses O_DIRECT ({refusal})" if refusal else ""
        if refusal:
            log.warning("nvme directory %s: %s; I/O goes through the page cache", self.path, self.direct_reason)
            self.aio_reason = f"buffered I/O: {self.direct_reason}"
        else:
            self.aio_reason = refusal_of_aio(self.disk, self._here / "probe")

    def _open_segments(self) -> None:
        for path in sorted((self._here / "segments").iterdir()):
            number = segment_id(path.name)
            if number is None:
                log.warning("nvme directory %s: %s is not a segment of ours, left alone", self.path, path.name)
                continue
            if not stat.S_ISREG(_mode_of(path)):
                log.error(
                    "nvme directory %s: segments/%s is not a plain file: left alone, its blocks are lost; remove it",
                    self.path,
                    path.name,
                )
                continue
            size_bytes = path.lstat().st_size
            if size_bytes != self.segment_bytes:
                log.error(
                    "nvme directory %s: segment %s has %d bytes, not %d: dropped",
                    self.path,
                    path.name,
                    size_bytes,
                    self.segment_bytes,
                )
                self._drop(path)
                continue
            self._fds[number] = self.disk.open(path, self._flags())

    def _drop(self, path: Path) -> None:
        try:
            self.disk.unlink(path)
        except OSError as error:  # immutable, perhaps: it takes room and does no harm
            log.error("%s", unavailable(self.path, error))

    def _make_spare(self) -> None:
        with contextlib.suppress(OSError):  # a full disk has none to spare
            fd = self.disk.open(self._here / "spare", os.O_RDWR | os.O_CREAT)
            try:
                self.disk.fallocate(fd, SPARE_BYTES)
            finally:
                os.close(fd)

    def give_up_spare(self) -> bool:
        """Free the spare room, until the next `open`; False when there was none. Blocks; OSError."""
        try:
            self.disk.unlink(self._here / "spare")
        except FileNotFoundError:
            return False
        return True

    def _flags(self) -> int:
        return os.O_RDWR | (os.O_DIRECT if self.direct else 0)

    # --- segments --------------------------------------------------------------------------------

    def _segment_file(self, segment_id: int) -> Path:
        return self._here / "segments" / segment_name(segment_id)

    def create_segment(self, segment_id: int) -> None:
        """Create and open a segment with all its room. Blocks: 0.3 to some 100 ms.

        Raises OSError: ENOSPC when the disk has no room or the cap is reached, EEXIST when the segment exists. Nothing
        is left behind then. Files set aside are removed first to make room.
        """
        if not 1 <= segment_id <= MAX_SEGMENT_ID:
            raise OSError(errno.EINVAL, f"segment ids are 1 to {MAX_SEGMENT_ID}, not {segment_id}")
        if len(self._fds) >= self.max_segments:
            raise OSError(errno.ENOSPC, f"the cap of {format_bytes(self.cap_bytes)} is reached")
        if aside_bytes(self._here) + (len(self._fds) + 1) * self.segment_bytes + self.db_reserve_bytes > self.cap_bytes:
            remove_aside(self._here)
        try:
            self._create(segment_id)
        except OSError as error:
            if error.errno != errno.ENOSPC or not remove_aside(self._here):
                raise
            self._create(segment_id)

    def _create(self, segment_id: int) -> None:
        path = self._segment_file(segment_id)
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
        self.disk.unlink(self._segment_file(segment_id))


def _close(fd: int) -> None:
    """Close a file. A failing disk may report that here again: the others, and the lock, are closed too."""
    with contextlib.suppress(OSError):
        os.close(fd)


def _mode_of(path: Path) -> int:
    """The mode of the path itself, not of a link's target; 0 when there is nothing."""
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return 0


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _is_data(name: str) -> bool:
    """True if a name in the directory is one that this tier gives to its data."""
    return name in (superblocks.NAME, f"{superblocks.NAME}.new", "segments") or name.startswith(DATABASE_NAME)
