"""Checks directories for the NVMe tier: whether they are usable and take direct I/O, and how fast they are."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tiercache.cli.doctor.findings import Finding, Needs, failure, ok, skipped, warning
from tiercache.cli.unnamed_file import open_unnamed
from tiercache.ground.units import format_bytes

TOPIC = "disks"
STEP_BYTES = 1 << 20
MEASURED_BYTES = 64 << 20
PART_S = 3.0
"""Longest measurement of writing, and of reading."""
ANSWER_S = 15.0
"""A disk that has not answered after this time counts as hung."""
SLOW_BYTES_PER_S = 200 << 20


class Speed(NamedTuple):
    """Bytes per second, one request of 1 MiB at a time, and whether past the page cache."""

    write: float
    read: float
    direct: bool


def examine(needs: Needs, directories: tuple[Path, ...], measure: bool) -> list[Finding]:
    """Findings for all directories in turn, at most `ANSWER_S` for each."""
    if not directories:
        return [skipped(TOPIC, "nvme", "no directory is configured: --nvme")]
    share = needs.nvme_bytes // len(directories)
    found: list[Finding] = []
    for path in directories:
        answer = within(ANSWER_S, partial(_look_at, path, share, measure))
        if answer is None:
            remedy = "look at dmesg and the disk's health; take it out of --nvme"
            answer = [failure(TOPIC, str(path), f"does not answer within {ANSWER_S:.0f} s", remedy)]
        found += answer
    return found


def _look_at(path: Path, share_bytes: int, measure: bool) -> list[Finding]:
    try:
        return list(_directory(path, share_bytes, measure))
    except OSError as error:
        remedy = "check that the daemon's user may enter it, and look at dmesg"
        return [failure(TOPIC, str(path), f"cannot be used: {error.strerror}", remedy)]


def within(seconds: float, work: Callable[[], list[Finding]]) -> list[Finding] | None:
    """The result of some work, or None when it takes too long; the work is then abandoned."""
    found: list[list[Finding]] = []
    thread = threading.Thread(target=lambda: found.append(work()), name="disk", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _directory(path: Path, share_bytes: int, measure: bool) -> Iterator[Finding]:
    name = str(path)
    place = next((folder for folder in (path, *path.parents) if folder.is_dir()), None)
    if place is None or not os.access(place, os.W_OK | os.X_OK):
        owner = "" if place is None else f" by user {os.geteuid()}"
        remedy = f"mkdir -p {path}, and chown it to the daemon's user"
        yield failure(TOPIC, name, f"cannot be written to{owner}", remedy)
        return
    if place == path and path.stat().st_mode & 0o077:
        mode = path.stat().st_mode
        for_all = mode & 0o022 and mode & stat.S_ISVTX  # such as /tmp
        remedy = f"name a folder in it, as {path}/tiercache" if for_all else f"chmod 0700 {path}"
        yield warning(TOPIC, f"{name} mode", f"mode {mode & 0o777:04o}", f"{remedy}: its files are the KV of prompts")
    yield _room(place, name, share_bytes)
    if not measure:
        yield skipped(TOPIC, f"{name} speed", "not measured: --quick")
        return
    try:
        speed = measure_speed(place)
    except OSError as error:
        yield failure(TOPIC, f"{name} speed", f"cannot be measured: {error.strerror}", "see whether the disk is full")
        return
    figure = f"{format_bytes(speed.write)}/s written, {format_bytes(speed.read)}/s read, one request at a time"
    if not speed.direct:
        remedy = "choose a file system with O_DIRECT (ext4, xfs): tmpfs and overlays lack it"
        yield warning(TOPIC, f"{name} O_DIRECT", "refused: I/O goes through the page cache", remedy)
    else:
        yield ok(TOPIC, f"{name} O_DIRECT", "works")
    if min(speed.read, speed.write) < SLOW_BYTES_PER_S:
        remedy = "use a local NVMe disk, several times as fast: engines compute what would take longer to read"
        yield warning(TOPIC, f"{name} speed", figure, remedy)
    else:
        yield ok(TOPIC, f"{name} speed", figure)


def _room(place: Path, name: str, share_bytes: int) -> Finding:
    stat = os.statvfs(place)
    free = stat.f_bavail * stat.f_frsize
    held = sum(path.stat().st_size for path in (place / "segments").glob("*.seg"))
    figure = f"{format_bytes(free)} free, {format_bytes(held)} used, up to {format_bytes(share_bytes)} for blocks"
    if free + held < share_bytes:
        remedy = "lower --nvme-size: without room, old blocks are replaced sooner"
        return warning(TOPIC, f"{name} room", figure, remedy)
    return ok(TOPIC, f"{name} room", figure)


def measure_speed(folder: Path) -> Speed:
    """Write an unnamed file, read it and release it. Blocks up to 2 x PART_S. Raises OSError."""
    fd, direct = open_unnamed(folder)
    try:
        area = memoryview(mmap.mmap(-1, STEP_BYTES))
        area[:] = os.urandom(1 << 16) * (STEP_BYTES >> 16)
        written, write_s = _move(lambda offset: os.pwritev(fd, [area], offset), MEASURED_BYTES)
        os.fdatasync(fd)
        if not direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        read, read_s = _move(lambda offset: os.preadv(fd, [area], offset), written)
    finally:
        os.close(fd)
    return Speed(written / write_s, read / read_s, direct)


def _move(step: Callable[[int], int], limit_bytes: int) -> tuple[int, float]:
    """Move bytes in steps until the limit or the time is reached; returns the bytes and the seconds."""
    moved, started_s = 0, time.perf_counter()
    while moved < limit_bytes and time.perf_counter() - started_s < PART_S:
        step_bytes = step(moved)
        if step_bytes <= 0:
            raise OSError(errno.EIO, "the disk took or gave no bytes")
        moved += step_bytes
    return moved, max(1e-9, time.perf_counter() - started_s)
