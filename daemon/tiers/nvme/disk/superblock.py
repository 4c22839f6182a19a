"""The superblock, first file of a cache directory: its creator's format version, and its geometry.

    offset  size
         0     8  magic
         8     4  format version (u32le, as all numbers here)
        12     4  alignment of slots, bytes
        16    16  directory id, random
        32     8  bytes of a segment
        40     8  when it was made, seconds since 1970
        48  4040  zeros
      4088     8  xxh3_64 of the 4088 bytes before

Magic, version and checksum keep their places in every later version, so that a newer directory is told from a damaged
one.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from tiercache.config.setting_kinds import MAX_SEGMENT_BYTES
from tiercache.ground.file_systems import sync_directory

NAME = "superblock"
SIZE_BYTES = 4096
FORMAT_VERSION = 1
ALIGNMENT_BYTES = 4096
_MAGIC = b"tc.nvme\n"
_FIELDS = struct.Struct("<8sII16sQQ")
_CHECKSUM = struct.Struct("<Q")
_BODY_BYTES = SIZE_BYTES - _CHECKSUM.size


class DamagedSuperblock(Exception):
    """The superblock exists, but is not what was written."""


class NewerSuperblock(Exception):
    """A later version of this program has written it."""


@dataclass(frozen=True, slots=True)
class Superblock:
    """Identity and geometry of a directory."""

    directory_id: bytes
    segment_bytes: int
    created_s: int

    @classmethod
    def new(cls, segment_bytes: int) -> Superblock:
        """A superblock for a new directory."""
        assert 0 < segment_bytes <= MAX_SEGMENT_BYTES
        assert segment_bytes % ALIGNMENT_BYTES == 0
        return cls(os.urandom(16), segment_bytes, int(time.time()))

    def encode(self) -> bytes:
        """Its 4096 bytes."""
        fields = _FIELDS.pack(
            _MAGIC, FORMAT_VERSION, ALIGNMENT_BYTES, self.directory_id, self.segment_bytes, self.created_s
        )
        body = fields.ljust(_BODY_BYTES, b"\0")
        return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def decode(cls, data: bytes) -> Superblock:
        """The superblock in 4096 bytes. Raises DamagedSuperblock or NewerSuperblock."""
        if len(data) != SIZE_BYTES:
            raise DamagedSuperblock(f"it has {len(data)} bytes, not {SIZE_BYTES}")
        body = data[:_BODY_BYTES]
        if _CHECKSUM.unpack(data[_BODY_BYTES:])[0] != xxhash.xxh3_64_intdigest(body):
            raise DamagedSuperblock("its checksum is wrong")
        magic, version, alignment, directory_id, segment_bytes, created_s = _FIELDS.unpack_from(body)
        if magic != _MAGIC:
            raise DamagedSuperblock("it is not one")
        if version > FORMAT_VERSION:
            raise NewerSuperblock(f"format {version}")
        whole = 0 < segment_bytes <= MAX_SEGMENT_BYTES and segment_bytes % ALIGNMENT_BYTES == 0
        if version < 1 or alignment != ALIGNMENT_BYTES or not whole:
            raise DamagedSuperblock("its geometry makes no sense")
        return cls(directory_id, segment_bytes, created_s)


def read_superblock(folder: Path) -> Superblock | None:
    """The superblock of a folder, None when there is none. Raises as `decode`, or OSError. Blocks."""
    path = folder / NAME
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise DamagedSuperblock("it is not a plain file")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        return Superblock.decode(os.pread(fd, SIZE_BYTES + 1, 0))
    finally:
        os.close(fd)


def write_superblock(folder: Path, superblock: Superblock) -> None:
    """Write the folder's superblock durably: all of it or nothing is there after a crash. Blocks; OSError."""
    draft = folder / f"{NAME}.new"
    with suppress(FileNotFoundError):  # left by a creator that was killed
        draft.unlink()
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.write(fd, superblock.encode()) != SIZE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(draft, folder / NAME)
    except OSError:
        with suppress(OSError):  # what it left would be put aside as lost data, at each try
            draft.unlink()
        raise
    sync_directory(folder)
