"""Shared memory of the arena: regions, made by the daemon and mapped by its clients.

A region is a memfd: allocated in full before others see it (so that a lack of memory is an error here, not a SIGBUS in
an engine), sealed against shrinking and growing, never punched, truncated or unlinked. Everything here works on plain
addresses through ctypes, because Python's own `mmap.madvise` and `mmap.write` hold the interpreter's lock, and
populating a gigabyte would stop every thread for as long.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tiercache.errors import ArenaError
from tiercache.ground.units import HUGE_PAGE_BYTES, format_bytes

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
for _name in ("munmap", "mlock", "munlock"):
    getattr(_libc, _name).argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_MADV_POPULATE_WRITE = 23
_MADV_DONTFORK = 10
_MADV_DONTDUMP = 16
_MAP_FAILED = ctypes.c_void_p(-1).value
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SEAL") else 0x7
_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
# One step blocks other threads' mmap calls: 2 ms at 2 GB/s.
_POPULATE_STEP_BYTES = 4 << 20
# Reserved for the rest of the machine: of its total memory, and of what is free when a region is made.
_LEAST_RESERVE_BYTES = 128 << 20
_MOST_RESERVE_BYTES = 8 << 30
_RESERVE_SHARE = 16
_WORKER_BYTES = 32 << 20
_PAGE_TABLE_SHARE = 512
_LEAST_HEADROOM_BYTES = 128 << 20
_HEADROOM_SHARE = 64
# The part of a cgroup's limit that stays free: the limit holds for the daemon alone, as a container has it.
_CGROUP_HEADROOM_BYTES = 16 << 20
DAEMON_BYTES = 64 << 20
"""What the daemon may need beside its arena, in a container of its own; it takes about half of that."""
HTTP_BYTES = 64 << 20
FOLDER_BYTES = 32 << 20
FOLDER_CONNECTION_BYTES = 16 << 20
"""A staging buffer; for blocks of more than 8 MiB, it is two blocks."""


def available_bytes() -> int:
    """Memory that can still be taken: MemAvailable, or what the cgroup leaves if that is less."""
    return min(memory.available_bytes for memory in _memory())


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Processes of a daemon whose memory counts beside the arena.

    Attributes:
        workers: that map the arena, one for each nvme directory.
        http: the HTTP process.
        folder_connections: of a shared folder, whose helper process has a buffer for each; 0: there is none.
    """

    workers: int = 0
    http: bool = False
    folder_connections: int = 0

    def parts(self, arena_bytes: int) -> dict[str, int]:
        """Bytes that each kind takes at most, the daemon's own included."""
        workers = self.workers * worker_bytes(arena_bytes)
        folder = FOLDER_BYTES + self.folder_connections * FOLDER_CONNECTION_BYTES if self.folder_connections else 0
        found = {
            "the daemon": DAEMON_BYTES,
            "http": HTTP_BYTES * self.http,
            "the helper of the shared folder": folder,
            f"{self.workers} worker processes": workers,
        }
        return {kind: size_bytes for kind, size_bytes in found.items() if size_bytes}

    def total_bytes(self, arena_bytes: int) -> int:
        return sum(self.parts(arena_bytes).values())


class Capacity(NamedTuple):
    """Memory that a daemon could ever have.

    Attributes:
        where: the host, or a cgroup, in words.
        limit_bytes: all of it. kept_bytes: what of it is for engines and the system.
    """

    where: str
    limit_bytes: int
    kept_bytes: int

    @property
    def is_host(self) -> bool:
        """True for the host's memory, False for the limit of a cgroup."""
        return self.kept_bytes > 0

    def largest_arena_bytes(self, beside: Beside) -> int:
        """The part of it that an arena may take; 0 if there is no room for one."""
        most = max(self.limit_bytes - self.kept_bytes - beside.total_bytes(0), 0)
        left = most * _PAGE_TABLE_SHARE // (_PAGE_TABLE_SHARE + beside.workers)
        return left // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES


def capacity() -> Capacity:
    """The host's memory, or the tightest limit of a cgroup if that leaves less."""
    host = _meminfo_bytes("MemTotal:")
    kept = min(max(host // _RESERVE_SHARE, _LEAST_RESERVE_BYTES), _MOST_RESERVE_BYTES)
    found = [Capacity("this host", host, kept)]
    found += [Capacity(f"the cgroup {folder}", limit, 0) for folder, limit, _ in _cgroup_limits()]
    return min(found, key=lambda one: one.limit_bytes - one.kept_bytes)


def worker_bytes(arena_bytes: int) -> int:
    """Memory of a worker process that maps the arena: its own, and page tables of 8 bytes for each page of 4 KiB."""
    return _WORKER_BYTES + arena_bytes // _PAGE_TABLE_SHARE


class _Memory(NamedTuple):
    """What is there now: bytes that can still be taken, how many of them stay free, and whose they are."""

    available_bytes: int
    headroom_bytes: int
    where: str


def _memory() -> Iterator[_Memory]:
    """Of the host and each cgroup."""
    headroom = max(_meminfo_bytes("MemTotal:") // _HEADROOM_SHARE, _LEAST_HEADROOM_BYTES)
    yield _Memory(_meminfo_bytes("MemAvailable:"), headroom, "on this host")
    for folder, limit, used in _cgroup_limits():
        left = limit - int((folder / used).read_text()) + _reclaimable_bytes(folder)
        yield _Memory(left, _CGROUP_HEADROOM_BYTES, f"in the cgroup {folder}")


def _meminfo_bytes(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 1 << 62


def _cgroup_limits() -> Iterator[tuple[Path, int, str]]:
    """Each cgroup above us that limits memory: its folder, the limit in bytes, the file that shows its use."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, used = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, used = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        while folder != base.parent:
            # Inside a container the path may not exist below its own mount; the limit is then at the top.
            if (folder / limit).exists():
                maximum = (folder / limit).read_text().strip()
                if maximum != "max":
                    yield folder, int(maximum), used
            folder = folder.parent


def _reclaimable_bytes(folder: Path) -> int:
    """Page cache that a cgroup counts as used and frees on demand."""
    for line in (folder / "memory.stat").read_text().splitlines():
        name, value = line.split()
        if name == "inactive_file":
            return int(value)
    return 0


def create_region(size_bytes: int, name: str = "tiercache") -> int:
    """A new sealed memfd of `size_bytes`, with all its memory allocated.

    Blocks for about 15 ms per 256 MiB. Raises ArenaError when the memory is not there.
    """
    memory = min(_memory(), key=lambda memory: memory.available_bytes - memory.headroom_bytes)
    if memory.available_bytes < size_bytes + memory.headroom_bytes:
        raise ArenaError(
            f"no memory for another region of {format_bytes(size_bytes)}: {format_bytes(memory.available_bytes)} "
            f"available {memory.where}, {format_bytes(memory.headroom_bytes)} of it kept free; make the arena smaller"
        )
    call, fd = "memfd_create", -1
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        call = "fallocate"
        os.posix_fallocate(fd, 0, size_bytes)
        call = "fcntl(F_ADD_SEALS)"
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        text = f"a region of {format_bytes(size_bytes)} could not be made: {call}: {error.strerror}"
        raise ArenaError(text) from error
    return fd


class Region:
    """One mapped region: addresses `address ..< address + size_bytes` of this process.

    The mapping is not inherited by forked children, and not part of core dumps: those would be as large as the arena,
    and contain what users have written. `unmap` must come after the last copy.
    """

    __slots__ = ("address", "locked", "region_id", "size_bytes")

    def __init__(self, region_id: int, fd: int, size_bytes: int) -> None:
        """Map `fd`, which stays the caller's. Raises ArenaError if it is not what it should be."""
        self.region_id = region_id
        self.size_bytes = size_bytes
        self.locked = False
        actual = os.fstat(fd).st_size
        try:
            seals = fcntl.fcntl(fd, _F_GET_SEALS)
        except OSError as error:
            raise ArenaError(f"region {region_id} is refused: it is not a memory file ({error.strerror})") from error
        if actual != size_bytes or seals & _SEALS != _SEALS:
            # An unsealed file could shrink under us, and the next copy would be a SIGBUS.
            raise ArenaError(
                f"region {region_id} is refused: {actual} bytes with seals {seals:#x}, not {size_bytes} and sealed"
            )
        address = _libc.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address is None or address == _MAP_FAILED:
            raise ArenaError(f"region {region_id} could not be mapped: {os.strerror(ctypes.get_errno())}")
        self.address: int = address
        _libc.madvise(address, size_bytes, _MADV_DONTFORK)
        _libc.madvise(address, size_bytes, _MADV_DONTDUMP)

    def populate(self, deadline_s: float | None = None) -> bool:
        """Fault in every page of this mapping, so that no copy pays for it. Blocks; the lock is free.

        Returns False where the kernel cannot (before 5.14) or at `deadline_s` (time.monotonic()).
        """
        for offset in range(0, self.size_bytes, _POPULATE_STEP_BYTES):
            if deadline_s is not None and time.monotonic() > deadline_s:
                return False
            step = min(_POPULATE_STEP_BYTES, self.size_bytes - offset)
            while _libc.madvise(self.address + offset, step, _MADV_POPULATE_WRITE) != 0:
                if ctypes.get_errno() != errno.EINTR:
                    return False
        return True

    def lock(self) -> bool:
        """Keep the pages from being swapped (mlock). False where RLIMIT_MEMLOCK forbids it."""
        self.locked = _libc.mlock(self.address, self.size_bytes) == 0
        return self.locked

    def view(self, offset: int, length: int) -> memoryview:
        """Writable bytes of this region; must not be used after `unmap`."""
        assert 0 <= offset <= self.size_bytes - length
        return memoryview((ctypes.c_char * length).from_address(self.address + offset)).cast("B")

    def unmap(self) -> None:
        """Unmap. Idempotent. No copy may be running and no view in use."""
        if self.address:
            _libc.munmap(self.address, self.size_bytes)
            self.address = 0
