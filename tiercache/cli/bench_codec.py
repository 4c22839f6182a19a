"""`tiercache bench codec`: what codecs save on given blocks, what they cost, and on which disks they pay.

A codec pays when a block takes less time with it than without:

    length / disk  >  length / codec + (length / ratio) / disk
    disk  <  codec * (1 - 1 / ratio)            with one core; n cores are good for n times that
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from tiercache.cli.exits import EXIT_OK
from tiercache.cli.report import Section, print_json, print_sections
from tiercache.errors import ConfigError
from tiercache.ground.units import format_bytes, parse_bytes, round_up
from tiercache.protocol.namespaces import MAX_BLOCK_BYTES

MAX_SAMPLE_BYTES = 64 << 20
"""Sample size; blocks are taken evenly from all files."""
SYNTHETIC_BYTES = 16 << 20
MEASURE_S = 0.5
"""Least time of measurement for each direction of a codec."""
DISK_BYTES = 256 << 20
DISK_CALL_BYTES = 2 << 20
DISK_THREADS = 8
"""Threads for the disk, as many as the daemon has for a directory."""
_PAGE_BYTES = 4096
_HEAD_CHANNELS = 128


class CodecFigures(NamedTuple):
    """Result of one codec on the blocks; speeds in bytes of plain blocks per second of one core."""

    codec: str
    ratio: float
    encoded_share: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float

    @property
    def write_pays_below(self) -> float:
        """Bandwidth of a disk, bytes/s, below which one core makes writing faster with this codec."""
        return self.encode_bytes_per_s * (1 - 1 / self.ratio)

    @property
    def read_pays_below(self) -> float:
        """The same for reading."""
        return self.decode_bytes_per_s * (1 - 1 / self.ratio)


class DiskFigures(NamedTuple):
    """Speed of a directory's disk, in bytes per second."""

    directory: str
    direct: bool
    bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float


def run(*, files: list[Path], block_bytes: str, dtype: str, directory: Path | None, as_json: bool) -> int:
    """Measure and print. Takes some seconds of one core, and of the disk if a `directory` is given.

    Raises ConfigError for files, sizes or directories that cannot be used.
    """
    from tiercache.daemon.tiers.nvme.disk import codecs

    try:
        size = parse_bytes(block_bytes)
    except ValueError as error:
        raise ConfigError(f"--block-bytes = {block_bytes}: {error}") from None
    if not 1 <= size <= MAX_BLOCK_BYTES:
        raise ConfigError(f"--block-bytes = {block_bytes}: must be 1 to {MAX_BLOCK_BYTES}")
    element = codecs.element_bytes(dtype)
    if files:
        blocks, source = _blocks_of(files, size), ", ".join(map(str, files))
    else:
        if dtype != "bfloat16":
            raise ConfigError(f"--dtype = {dtype}: blocks are only made up in bfloat16: give --file, or leave it out")
        blocks, source = _made_up(size), "made up: normal values, a scale for each channel, as bfloat16"
    figures, missing = [], {}
    for name in codecs.NAMES[1:]:
        try:
            figures.append(_measure(name, element, blocks))
        except ConfigError as error:
            missing[name] = str(error)
    disk = measure_disk(directory) if directory is not None else None
    if as_json:
        print_json(_tree(blocks, source, dtype, figures, missing, disk))
    else:
        print_sections(_sections(blocks, source, dtype, figures, missing, disk))
    return EXIT_OK


# --- blocks ------------------------------------------------------------------------------------------


def _blocks_of(files: list[Path], size: int) -> list[bytes]:
    """Blocks of some files, evenly spread; the rest at a file's end is left out."""
    room = max(1, MAX_SAMPLE_BYTES // size // len(files))
    blocks = []
    for path in files:
        try:
            with path.open("rb") as file:
                count = os.fstat(file.fileno()).st_size // size
                for number in range(min(room, count)):
                    file.seek(number * count // min(room, count) * size)
                    blocks.append(file.read(size))
        except OSError as error:
            raise ConfigError(f"--file = {path}: {error.strerror}: name a file that can be read") from None
        if count == 0:
            raise ConfigError(f"--file = {path}: is shorter than a block of {size} bytes: see --block-bytes")
    return blocks


def _made_up(size: int) -> list[bytes]:
    """Made-up blocks that a codec cannot tell from KV: the top bits of a bfloat16 are its value's magnitude."""
    import numpy as np

    rng = np.random.default_rng(1)
    rows = -(-size // (2 * _HEAD_CHANNELS))
    scales = np.exp(rng.normal(0, 0.7, _HEAD_CHANNELS)).astype(np.float32)
    blocks = []
    for _ in range(max(1, SYNTHETIC_BYTES // size)):
        values = rng.standard_normal((rows, _HEAD_CHANNELS), np.float32) * scales
        bits = values.view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # to nearest, ties to even
        blocks.append(rounded.astype("<u2").tobytes()[:size])
    return blocks


# --- codecs ------------------------------------------------------------------------------------------


def _measure(name: str, element: int, blocks: list[bytes]) -> CodecFigures:
    """Encode and decode all blocks repeatedly, and compare the results. Raises ConfigError."""
    from tiercache.daemon.tiers.nvme.disk import codecs

    codec = codecs.codec_number(name, element)
    views = [memoryview(block) for block in blocks]
    stored = [codecs.encode(codec, view) for view in views]
    plain = sum(map(len, blocks))
    moved = sum(_on_disk(block if packed is None else packed) for block, packed in zip(blocks, stored, strict=True))
    whole = sum(map(_on_disk, blocks))
    encoded = [(memoryview(packed), len(block)) for packed, block in zip(stored, blocks, strict=True) if packed]
    out = memoryview(bytearray(max(map(len, blocks))))
    for (packed, length), block in zip(encoded, [b for b, p in zip(blocks, stored, strict=True) if p], strict=True):
        codecs.decode(codec, packed, out[:length])
        if out[:length] != block:
            raise ConfigError(f"codec {name} gave back other bytes than it was given: do not use it")

    def encode_all() -> None:
        for view in views:
            codecs.encode(codec, view)

    def decode_all() -> None:
        for packed, length in encoded:
            codecs.decode(codec, packed, out[:length])

    encode_s = _seconds(encode_all)
    decode_s = _seconds(decode_all) if encoded else 0.0
    decoded_bytes = sum(length for _, length in encoded)
    return CodecFigures(
        codec=name,
        ratio=whole / moved,
        encoded_share=len(encoded) / len(blocks),
        encode_bytes_per_s=plain / encode_s,
        decode_bytes_per_s=decoded_bytes / decode_s if decode_s else 0.0,
    )


def _on_disk(stored: bytes) -> int:
    return round_up(len(stored), _PAGE_BYTES)


def _seconds(call: Callable[[], None]) -> float:
    """CPU time of this thread for one call: the median of as many calls as fit into MEASURE_S, at least 3."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < MEASURE_S:
        start_s = time.thread_time()
        call()
        times.append(time.thread_time() - start_s)
    return max(sorted(times)[len(times) // 2], 1e-9)


# --- the disk ----------------------------------------------------------------------------------------


def measure_disk(directory: Path) -> DiskFigures:
    """Write and read DISK_BYTES in an unnamed file, past the page cache if possible.

    Blocks for as long as the disk takes. Raises ConfigError.
    """
    try:
        free_bytes = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
        if free_bytes < 2 * DISK_BYTES:
            raise ConfigError(
                f"--dir = {directory}: only {format_bytes(free_bytes)} are free, and measuring takes "
                f"{format_bytes(DISK_BYTES)}: name a directory with more room"
            )
        with ExitStack() as stack:
            path = Path(tempfile.mkdtemp(prefix="tiercache-bench-", dir=directory)) / "blocks"
            fd, direct = _open_unnamed(path)
            stack.callback(os.close, fd)
            os.posix_fallocate(fd, 0, DISK_BYTES)
            write_s = _move_all(fd, os.pwritev)
            if not direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            read_s = _move_all(fd, os.preadv)
    except OSError as error:
        raise ConfigError(f"--dir = {directory}: {error.strerror}: name a directory that can be written") from None
    return DiskFigures(str(directory), direct, DISK_BYTES, DISK_BYTES / write_s, DISK_BYTES / read_s)


def _open_unnamed(path: Path) -> tuple[int, bool]:
    """A new file, removed together with its folder before anything is written to it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    direct = True
    try:
        try:
            fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            path.unlink(missing_ok=True)
            fd, direct = os.open(path, flags, 0o600), False
    finally:
        path.unlink(missing_ok=True)
        path.parent.rmdir()
    return fd, direct


def _move_all(fd: int, call: Callable[[int, list[memoryview], int], int]) -> float:
    """Seconds to move the whole file, at least to the disk's own cache, with as many threads as a directory has."""
    areas = threading.local()

    def move(offset: int) -> None:
        if not hasattr(areas, "view"):
            area = mmap.mmap(-1, DISK_CALL_BYTES)
            area.write(os.urandom(DISK_CALL_BYTES))
            areas.view = memoryview(area)
        done = 0
        while done < DISK_CALL_BYTES:
            count = call(fd, [areas.view[done:]], offset + done)
            if count <= 0:
                raise OSError(5, "the transfer stands still")
            done += count

    with ThreadPoolExecutor(DISK_THREADS) as threads:
        list(threads.map(move, [0] * DISK_THREADS))  # the areas are filled before the clock starts
        start_s = time.perf_counter()
        list(threads.map(move, range(0, DISK_BYTES, DISK_CALL_BYTES)))
        os.fdatasync(fd)
        return time.perf_counter() - start_s


# --- output ------------------------------------------------------------------------------------------


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def _cores(disk_bytes_per_s: float, pays_below: float) -> str:
    """Cores that a codec needs to be faster than this disk without it."""
    return f"{disk_bytes_per_s / pays_below:.1f}" if pays_below > 0 else "never"


def _sections(
    blocks: list[bytes],
    source: str,
    dtype: str,
    figures: list[CodecFigures],
    missing: dict[str, str],
    disk: DiskFigures | None,
) -> list[Section]:
    rows: list[tuple[str, ...]] = [
        ("blocks", f"{len(blocks)} of {format_bytes(len(blocks[0]))}, {dtype}"),
        ("from", source),
    ]
    if disk is not None:
        how = "direct I/O" if disk.direct else "through the page cache: this file system refuses direct I/O"
        text = f"{disk.directory}: write {_gb(disk.write_bytes_per_s)}, read {_gb(disk.read_bytes_per_s)}"
        rows.append(("disk", f"{text} ({format_bytes(disk.bytes)}, {DISK_THREADS} threads, {how})"))
    rows += list(missing.items())
    columns = ["codec", "ratio", "blocks encoded", "encode/core", "decode/core", "write pays below", "read pays below"]
    if disk is not None:
        columns += ["cores to write here", "cores to read here"]
    table = []
    for one in figures:
        cells = [
            one.codec,
            f"{one.ratio:.3f}",
            f"{one.encoded_share:.0%}",
            _gb(one.encode_bytes_per_s),
            _gb(one.decode_bytes_per_s),
            _gb(one.write_pays_below),
            _gb(one.read_pays_below),
        ]
        if disk is not None:
            cells.append(_cores(disk.write_bytes_per_s, one.write_pays_below))
            cells.append(_cores(disk.read_bytes_per_s, one.read_pays_below))
        table.append(tuple(cells))
    notes: list[tuple[str, ...]] = [
        ("ratio", "bytes moved without a codec over those with it, in pages of 4096; slots stay as large as blocks"),
        ("pays below", "bandwidth of a disk below which a block takes less time with the codec, one core at work"),
    ]
    if disk is not None:
        notes.append(("cores", "how many have to encode or decode at once for the codec to be faster on this disk"))
    found = [Section("blocks", ("", ""), rows)]
    if table:
        found.append(Section("codecs", tuple(columns), table))
    return [*found, Section("how to read it", ("", ""), notes)]


def _tree(
    blocks: list[bytes],
    source: str,
    dtype: str,
    figures: list[CodecFigures],
    missing: dict[str, str],
    disk: DiskFigures | None,
) -> dict[str, Any]:
    return {
        "command": " ".join(["tiercache", *sys.argv[1:]]),
        "cpu": _cpu(),
        "source": source,
        "blocks": len(blocks),
        "block_bytes": len(blocks[0]),
        "dtype": dtype,
        "codecs": [
            {
                **one._asdict(),
                "write_pays_below_bytes_per_s": one.write_pays_below,
                "read_pays_below_bytes_per_s": one.read_pays_below,
            }
            for one in figures
        ],
        "missing": missing,
        "disk": None if disk is None else disk._asdict(),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"
