"""How soon a daemon that is started again has its blocks on NVMe back, and what they cost it.

    python bench/bench_restart.py [--dir DIR] [--rows N]

The directory is made by the tier's own classes: segments allocated in full, a catalog of 500,000 rows
for blocks of 4096 bytes. Chains are laid out as write-behind leaves them, windows of several chains in
turn; a tenth of them lies scattered, children before their parents too, as in a directory that has been
full for long. Nothing is in the page cache when the daemon starts. From then on it is pinged every
20 ms, and asked for its state.

Files lie in a directory of their own below --dir, $TMPDIR, or the checkout's parent, about 2.3 GiB, and are
removed at the end. Prints a table and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from common import ROOT, SEED, Daemon, PingWatch, Report, rss_besides_arena_bytes

from tiercache.daemon.tiers.nvme.catalog.catalog import Catalog
from tiercache.daemon.tiers.nvme.catalog.rows import ROOT_KEY, Row, place_of
from tiercache.daemon.tiers.nvme.disk.directory import Directory
from tiercache.protocol.namespaces import NamespaceSpec

BLOCK_BYTES = 4096
ROWS = 500_000
CHAIN_BLOCKS = 1000
SCATTERED = 10
"""One chain in so many is scattered."""
WINDOW = 64
"""Adjacent blocks of a chain."""
SEGMENT_BYTES = 512 << 20
ROUNDS = 3
DEADLINE_S = 60.0
POLL_S = 0.025

_random = random.Random(SEED)


def spec() -> NamespaceSpec:
    """The smallest blocks there are, so that many fit on the disk."""
    return NamespaceSpec(engine="bench", layout="bytes", dtype="uint8", block_size=16, block_bytes=BLOCK_BYTES)


def cap_bytes(rows: int) -> int:
    """Room for so many blocks and their catalog."""
    segments = -(-rows * BLOCK_BYTES // SEGMENT_BYTES)
    return (segments * SEGMENT_BYTES + (256 << 20)) * 64 // 63


def slots_in_order(chains: int, blocks: int) -> list[int]:
    """The slot of each block, chain after chain."""
    slots = [0] * (chains * blocks)
    order = []
    for first in range(0, blocks, WINDOW):
        for chain in range(chains):
            order += range(chain * blocks + first, chain * blocks + min(first + WINDOW, blocks))
    for slot, block in enumerate(order):
        slots[block] = slot
    scattered = [chain * blocks + block for chain in range(0, chains, SCATTERED) for block in range(blocks)]
    theirs = [slots[block] for block in scattered]
    _random.shuffle(theirs)
    for block, slot in zip(scattered, theirs, strict=True):
        slots[block] = slot
    return slots


def rows_of(chains: int, blocks: int) -> Iterator[tuple[int, Row]]:
    """Place and row of every block."""
    per_segment = SEGMENT_BYTES // BLOCK_BYTES
    slots = slots_in_order(chains, blocks)
    key = ROOT_KEY
    for number, slot in enumerate(slots):
        parent = ROOT_KEY if number % blocks == 0 else key
        key = _random.randbytes(16)
        segment, slot_in_segment = divmod(slot, per_segment)
        yield (
            place_of(segment + 1, slot_in_segment),
            Row(key, parent, 1, 0, BLOCK_BYTES, BLOCK_BYTES, 0, 1, _random.getrandbits(64), number + 1),
        )


def make_directory(path: Path, rows: int) -> None:
    """A directory that holds `rows` blocks, as a daemon would have left it."""
    directory = Directory(path, cap_bytes(rows), SEGMENT_BYTES)
    directory.open()
    catalog = Catalog(path, directory.superblock.directory_id, lambda call, *args: call(*args))
    catalog.open()
    catalog.add_namespace(1, spec().fingerprint(), msgspec.msgpack.encode(spec()))
    for segment in range(1, -(-rows * BLOCK_BYTES // SEGMENT_BYTES) + 1):
        directory.create_segment(segment)
        catalog.set_segment(segment, BLOCK_BYTES)
    for place, row in rows_of(rows // CHAIN_BLOCKS, CHAIN_BLOCKS):
        catalog.insert([place], [row])
        while catalog.full:
            time.sleep(0.001)
    if not catalog.close(DEADLINE_S):
        raise RuntimeError("the catalog was not written in time")
    directory.close()


def forget_pages(path: Path) -> None:
    """Write the catalog out and drop it from the page cache, as after a boot."""
    for file in path.glob("index.db*"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


class Start(NamedTuple):
    """The times of one start."""

    first_answer_s: float
    full_index_s: float
    worst_ping_ms: float
    pings: int
    resident_bytes: int


def start_daemon(path: Path, rows: int) -> Start:
    """Start a daemon and watch it until its index is complete."""
    forget_pages(path)
    size, segment = f"{cap_bytes(rows) >> 20}MiB", f"{SEGMENT_BYTES >> 20}MiB"
    settings = {"nvme": str(path), "nvme_size": size, "nvme_segment": segment}
    with Daemon("64MiB", **settings) as daemon, daemon.connect() as client:
        first_s = time.perf_counter() - daemon.started_s
        with PingWatch(daemon.directory) as pings:
            while (found := client.stats()["tiers"]["nvme"]["directories"])[0]["state"] != "ok":
                if time.perf_counter() - daemon.started_s > DEADLINE_S:
                    raise RuntimeError(f"the index is not complete in time: {found}")
                time.sleep(POLL_S)
            full_s = time.perf_counter() - daemon.started_s
        if found[0]["blocks"] != rows or found[0]["orphan_rows"]:
            raise RuntimeError(f"{rows} blocks should be back: {found[0]}")
        return Start(first_s, full_s, pings.worst_ms, pings.count, rss_besides_arena_bytes(daemon.pid))


def main() -> None:
    """Make the directory, start a daemon on it some times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, help="a directory on the disk to use")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"blocks in the directory, a multiple of {CHAIN_BLOCKS}")
    options = parser.parse_args()
    rows = options.rows // CHAIN_BLOCKS * CHAIN_BLOCKS
    report = Report("bench_restart")
    base = options.dir or Path(os.environ.get("TMPDIR", ROOT.parent))
    where = Path(tempfile.mkdtemp(prefix="tiercache-bench-restart-", dir=base))
    try:
        make_directory(where / "empty", 0)
        empty = start_daemon(where / "empty", 0)
        start_s = time.perf_counter()
        make_directory(where / "full", rows)
        report.note(f"{rows} rows were made in {time.perf_counter() - start_s:.1f} s")
        starts = [start_daemon(where / "full", rows) for _ in range(ROUNDS)]
    finally:
        shutil.rmtree(where, ignore_errors=True)
    firsts, fulls = [one.first_answer_s for one in starts], [one.full_index_s for one in starts]
    report.add("first_answer_s", "exec to first answer", statistics.median(firsts), "s", at_most=0.5, samples=firsts)
    report.add("full_index_s", f"exec to all {rows} blocks", statistics.median(fulls), "s", at_most=2.0, samples=fulls)
    worst = max(one.worst_ping_ms for one in starts)
    pings = sum(one.pings for one in starts)
    report.add("worst_ping_ms", f"worst of {pings} pings meanwhile", worst, "ms", at_most=100)
    each = [(one.resident_bytes - empty.resident_bytes) / max(1, rows) for one in starts]
    median = statistics.median(each)
    report.add("bytes_per_block", "resident bytes for each block", median, "B", at_most=250, samples=each)
    report.finish()


if __name__ == "__main__":
    sys.exit(main())
