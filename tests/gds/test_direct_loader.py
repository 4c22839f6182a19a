"""The loader by itself: how it turns extents into reads, and which blocks it accepts."""

from __future__ import annotations

import math
import mmap
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import wait_until

from tiercache.connector.blocks import Blocks
from tiercache.connector.direct.backend import Fault, HostBackend
from tiercache.connector.direct.gds import DirectLoader, DirectResult
from tiercache.connector.direct.transfers import MAX_OPEN_FILES, MOVE_BYTES, Move, _Batch, direct_problem
from tiercache.copies.pool import Limit, Pool
from tiercache.ground.uninterrupted import uninterrupted
from tiercache.protocol.checksums import CHECKSUM_LANES, CHECKSUM_XXH3, block_checksum
from tiercache.protocol.messages import Extent

BLOCK = 8192
BLOCKS = 32


class Disk:
    """A segment of blocks, and a pool to load them into, at an address that is (not) `aligned`."""

    def __init__(self, root: Path, aligned: bool = True, fault: Any = lambda number: None) -> None:
        self.root = root
        self.data = np.random.default_rng(3).integers(0, 256, (BLOCKS, BLOCK), np.uint8)
        (root / "segments").mkdir()
        self.write(1)
        self.area = mmap.mmap(-1, BLOCKS * BLOCK + 4096)
        flat = np.frombuffer(self.area, np.uint8)[0 if aligned else 512 :][: BLOCKS * BLOCK]
        self.pool = flat.reshape(BLOCKS, BLOCK)
        self.backend = HostBackend(fault)
        self.calls: list[tuple[int, int]] = []  # offset and length of each read
        read = self.backend.read

        def note(file: Any, offset: int, address: int, length: int) -> int:
            self.calls.append((offset, length))
            return read(file, offset, address, length)

        self.backend.read = note  # type: ignore[method-assign]
        self.loader = DirectLoader(Pool.from_blocks(self.pool), self.backend, give_up_s=30.0)

    def write(self, segment: int) -> None:
        (self.root / "segments" / f"{segment:08d}.seg").write_bytes(self.data.tobytes())

    def extent(self, number: int, **changes: Any) -> Extent:
        checksum = block_checksum(self.data[number].data, number, CHECKSUM_LANES)
        return Extent(1, 0, CHECKSUM_LANES, 0, number * BLOCK, BLOCK, BLOCK, checksum)._replace(**changes)

    def load(self, extents: list[Extent], ids: list[int], limit: Limit | None = None, life: int = 1) -> DirectResult:
        """Each block's seed is its number on the disk."""
        seeds = [extent.offset // BLOCK for extent in extents]
        where = [str(self.root)]
        return self.loader.load(life, where, extents, seeds, Blocks(np.array(ids, np.int64), 0, limit or Limit()))


@pytest.fixture(params=[True, False], ids=["aligned", "unaligned"])
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Disk]:
    made = Disk(tmp_path, request.param)
    yield made
    made.backend.resume()
    made.loader.close()


def test_neighbours_on_disk_and_in_the_pool_are_one_read(disk: Disk) -> None:
    numbers, ids = [0, 1, 2, 5, 6, 4, 9], [10, 11, 12, 13, 14, 15, 3]
    assert disk.load([disk.extent(number) for number in numbers], ids) == DirectResult(7)
    assert sorted(disk.calls) == [(0, 3 * BLOCK), (4 * BLOCK, BLOCK), (5 * BLOCK, 2 * BLOCK), (9 * BLOCK, BLOCK)]
    assert np.array_equal(disk.pool[ids], disk.data[numbers])
    assert disk.loader.counters["direct_bytes"] == 7 * BLOCK


def test_what_adjoins_on_one_side_only_is_read_apart(disk: Disk) -> None:
    assert disk.load([disk.extent(0), disk.extent(1)], [3, 2]) == DirectResult(2)
    assert len(disk.calls) == 2


def test_a_read_has_a_largest_size(tmp_path: Path) -> None:
    assert MOVE_BYTES % BLOCK == 0
    disk = Disk(tmp_path)
    moves = disk.loader._moves(
        1,
        [str(tmp_path)],
        [disk.extent(0, offset=number * BLOCK) for number in range(2000)],
        np.arange(2000, dtype=np.int64) * BLOCK,
    )
    assert max(move.length for move in moves) == MOVE_BYTES
    assert sum(move.blocks for move in moves) == 2000
    disk.loader.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": CHECKSUM_XXH3},
        {"codec": 1},
        {"length": BLOCK - 4096},
        {"stored_length": BLOCK + 4096},
        {"offset": 2 * BLOCK + 512},
        {"directory": 1},
    ],
)
def test_an_extent_that_is_not_as_promised_ends_the_run(disk: Disk, changes: dict[str, int]) -> None:
    extents = [disk.extent(0), disk.extent(1), disk.extent(2, **changes), disk.extent(3)]
    disk.pool[:] = 0
    assert disk.load(extents, [0, 1, 2, 3]) == DirectResult(2)
    assert not disk.pool[2:].any(), "nothing was read for it"


def test_the_block_behind_the_good_ones_is_named_bad(disk: Disk) -> None:
    extents = [disk.extent(0), disk.extent(1), disk.extent(2, checksum=5), disk.extent(3)]
    assert disk.load(extents, [0, 1, 2, 3]) == DirectResult(2, True)
    assert disk.loader.counters["direct_bad_blocks"] == 1


def test_a_file_that_is_gone_or_short_is_a_failure(disk: Disk) -> None:
    assert disk.load([disk.extent(0, segment=7)], [0]) == DirectResult(0)
    assert disk.load([disk.extent(0, offset=BLOCKS * BLOCK)], [0]) == DirectResult(0)
    assert disk.loader.counters["direct_failures"] == 2
    assert disk.load([disk.extent(0)], [0]) == DirectResult(1)
    assert disk.load([disk.extent(0, segment=7)], [0]) == DirectResult(0)
    assert disk.loader.off == "", "only failures in a row end it"


def test_files_of_another_life_of_the_daemon_are_opened_anew(disk: Disk) -> None:
    assert disk.load([disk.extent(0)], [0]).good == 1
    path = disk.root / "segments" / "00000001.seg"
    path.unlink()
    disk.data = disk.data[::-1].copy()
    disk.write(1)
    assert disk.load([disk.extent(0)], [0], life=2).good == 1
    assert np.array_equal(disk.pool[0], disk.data[0])


def test_open_files_are_bounded(disk: Disk) -> None:
    def open_files() -> int:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.exists()]
        return sum(str(link.readlink()).startswith(str(disk.root)) for link in links)

    for segment in range(1, MAX_OPEN_FILES + 20):
        disk.write(segment)
        assert disk.load([disk.extent(3, segment=segment)], [0]).good == 1
    assert open_files() <= MAX_OPEN_FILES
    disk.loader.close()
    assert open_files() == 0


def test_nothing_is_begun_after_the_limit(disk: Disk) -> None:
    stopped = Limit()
    stopped.stopped = True
    assert disk.load([disk.extent(0)], [0], stopped) == DirectResult(0)
    assert disk.load([disk.extent(0)], [0], Limit(-math.inf)) == DirectResult(0)
    assert disk.calls == []


@pytest.fixture
def on_signal() -> Iterator[list[Callable[[], None]]]:
    """What the handler of SIGUSR1 does."""
    calls: list[Callable[[], None]] = []
    earlier = signal.signal(signal.SIGUSR1, lambda number, frame: [call() for call in calls] and None)
    yield calls
    signal.signal(signal.SIGUSR1, earlier)


def test_a_handler_of_a_signal_may_close_what_waits_for_the_engine(
    disk: Disk, on_signal: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []

    def close() -> None:
        free = not disk.loader._lock.locked()
        closed.append(free)
        if free:  # it would wait for itself for ever
            disk.loader.close()

    def is_ready(after: Any) -> bool:
        if not closed:
            signal.raise_signal(signal.SIGUSR1)
        return bool(closed)

    on_signal.append(close)
    monkeypatch.setattr(disk.backend, "is_ready", is_ready)
    assert uninterrupted(lambda: disk.load([disk.extent(0)], [0])) == DirectResult(0)
    assert closed == [True]
    assert disk.calls == []


def test_no_handler_of_a_signal_runs_while_reads_are_shared_out(on_signal: list[Callable[[], None]]) -> None:
    seen: list[int] = []
    on_signal.append(lambda: seen.append(1))
    batch = _Batch([Move(None, 0, 0, BLOCK, 1)], lambda *_: BLOCK, Limit(-math.inf))

    def work() -> list[int]:
        signal.raise_signal(signal.SIGUSR1)
        assert batch._take() is None
        assert batch.wait(30.0)
        return list(seen)

    assert uninterrupted(work) == []
    assert seen == [1]


@pytest.mark.parametrize("most", [0, 1])
def test_without_threads_it_fails_and_with_a_single_one_it_reads(
    disk: Disk, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = threading.Thread.start, []

    def start_some(thread: threading.Thread) -> None:
        if len(started) == most:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    for _ in range(2):
        assert disk.load([disk.extent(0), disk.extent(5)], [0, 1], limit=Limit()) == DirectResult(2 * most)
    assert disk.loader.failures == 2 * (not most)


def test_a_stop_waits_for_the_reads_under_way(tmp_path: Path) -> None:
    disk = Disk(tmp_path, fault=lambda number: Fault.HANG)
    limit, results = Limit(), []
    extents = [disk.extent(number) for number in range(0, BLOCKS, 2)]  # 16 reads, of which 8 at a time
    ids = list(range(len(extents)))
    thread = threading.Thread(target=lambda: results.append(disk.load(extents, ids, limit)))
    thread.start()
    wait_until(lambda: disk.backend.hanging == 8, "all threads read")
    limit.stopped = True
    thread.join(0.3)
    assert thread.is_alive()
    disk.backend.resume()
    thread.join(40)
    assert results == [DirectResult(8)], "reads that had begun ended; no other began"
    assert disk.backend.reads == 8
    disk.loader.close()


def test_the_engines_work_on_the_blocks_comes_first(disk: Disk) -> None:
    asked: list[Any] = []

    def is_ready(after: Any) -> bool:
        asked.append(after)
        return len(asked) > 3

    disk.backend.is_ready = is_ready  # type: ignore[method-assign]
    where = [str(disk.root)]
    ids = np.array([0], np.int64)
    assert disk.loader.load(1, where, [disk.extent(0)], [0], Blocks(ids, 0, Limit(), "event")).good == 1
    assert asked == ["event"] * 4


def test_pools_that_cannot_be_read_into_say_why() -> None:
    assert direct_problem(Pool.from_blocks(np.zeros((4, 8192), np.uint8))) == ""
    layers = [np.zeros((4, 4096), np.uint8) for _ in range(2)]
    assert "is 2 pieces" in direct_problem(Pool.from_layers(layers))
    assert "multiple of 4096" in direct_problem(Pool.from_blocks(np.zeros((4, 5000), np.uint8)))
    fixed = np.zeros((4, 8192), np.uint8)
    fixed.flags.writeable = False
    assert "read-only" in direct_problem(Pool.from_blocks(fixed))
