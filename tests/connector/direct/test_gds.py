"""The loader and the storer: how they turn extents into reads and writes, and which blocks they accept."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_backend import Fault, HostBackend
from waiting import wait_until

from tiercache.connector.blocks import Blocks
from tiercache.connector.direct.gds import DirectLoader, DirectResult, DirectStorer
from tiercache.connector.direct.transfers import direct_problem
from tiercache.copies.pool import Limit, Pool
from tiercache.protocol.checksums import CHECKSUM_LANES, CHECKSUM_XXH3, block_checksum
from tiercache.protocol.messages import Extent

BLOCK = 8192
BLOCKS = 32


class Disk:
    """A segment of blocks and a pool of others, at an address that is (not) `aligned`.

    The seed of a block's checksum is its number: on the disk where it is read, in the pool where it is written.
    """

    def __init__(self, root: Path, aligned: bool = True, fault: Any = lambda number: None) -> None:
        self.root, self.others = root, {*threading.enumerate()}
        noise = np.random.default_rng(3).integers(0, 256, (2, BLOCKS, BLOCK), np.uint8)
        self.data = noise[0]
        (root / "segments").mkdir()
        self.path = root / "segments" / "00000001.seg"
        self.path.write_bytes(self.data.tobytes())
        self.area = mmap.mmap(-1, BLOCKS * BLOCK + 4096)
        flat = np.frombuffer(self.area, np.uint8)[0 if aligned else 512 :][: BLOCKS * BLOCK]
        self.pool = flat.reshape(BLOCKS, BLOCK)
        self.pool[:] = noise[1]
        self.backend = HostBackend(fault, fault)
        self.calls: list[tuple[int, int]] = []  # offset and length of each read and write
        self.files: list[Any] = []
        """Open ones."""
        opens, closes = self.backend.open, self.backend.close
        self.backend.open = lambda *asked: (self.files.append(opens(*asked)), self.files[-1])[1]  # type: ignore[method-assign]
        self.backend.close = lambda file: (self.files.remove(file), closes(file))[1]  # type: ignore[method-assign]
        self.backend.read = self.noted(self.backend.read)  # type: ignore[method-assign]
        self.backend.write = self.noted(self.backend.write)  # type: ignore[method-assign]
        pool = Pool.from_blocks(self.pool)
        self.loader = DirectLoader(pool, self.backend, give_up_s=60.0)
        self.storer = DirectStorer(pool, self.backend, give_up_s=60.0)

    def noted(self, call: Callable[..., int]) -> Callable[..., int]:
        def note(file: Any, offset: int, address: int, length: int) -> int:
            self.calls.append((offset, length))
            return call(file, offset, address, length)

        return note

    def extent(self, number: int, **changes: Any) -> Extent:
        checksum = block_checksum(self.data[number].data, number, CHECKSUM_LANES)
        good = Extent(1, 0, CHECKSUM_LANES, 0, number * BLOCK, BLOCK, BLOCK, checksum)
        return good._replace(**changes)  # rule: a NamedTuple's own

    def load(self, extents: list[Extent], ids: list[int], limit: Limit | None = None, life: int = 1) -> DirectResult:
        seeds = [extent.offset // BLOCK for extent in extents]
        return self.loader.load(life, [str(self.root)], extents, seeds, self.blocks(ids, limit))

    def store(self, places: list[Extent], ids: list[int], limit: Limit | None = None) -> list[int]:
        return self.storer.store(1, str(self.root), places, ids, self.blocks(ids, limit))

    def blocks(self, ids: list[int], limit: Limit | None) -> Blocks:
        return Blocks(np.array(ids, np.int64), 0, limit or Limit(), "event")

    def sums(self, ids: list[int]) -> list[int]:
        return [block_checksum(self.pool[number].data, number, CHECKSUM_LANES) for number in ids]

    def on_disk(self) -> Any:
        data = np.frombuffer(self.path.read_bytes(), np.uint8)
        assert len(data) == BLOCKS * BLOCK, "the file is as long as it was"
        return data.reshape(BLOCKS, BLOCK)

    def close(self) -> None:
        self.backend.resume()
        self.loader.close()
        self.storer.close()
        wait_until(lambda: not any("direct" in one.name for one in {*threading.enumerate()} - self.others))


@pytest.fixture(params=[True, False], ids=["aligned", "unaligned"])
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Disk]:
    made = Disk(tmp_path, request.param)
    yield made
    made.close()
    assert not made.files


NUMBERS, IDS = [0, 1, 2, 5, 6, 4, 9], [10, 11, 12, 13, 14, 15, 3]
TOGETHER = [(0, 3 * BLOCK), (4 * BLOCK, BLOCK), (5 * BLOCK, 2 * BLOCK), (9 * BLOCK, BLOCK)]
"""Neighbours on the disk and in the pool are one call."""


def test_neighbours_are_read_together(disk: Disk) -> None:
    assert disk.load([disk.extent(number) for number in NUMBERS], IDS) == DirectResult(7)
    assert sorted(disk.calls) == TOGETHER
    assert np.array_equal(disk.pool[IDS], disk.data[NUMBERS])
    assert disk.loader.counters["direct_bytes"] == 7 * BLOCK


def test_neighbours_are_written_together_and_nothing_else_is_touched(disk: Disk) -> None:
    assert disk.store([disk.extent(number) for number in NUMBERS], IDS) == disk.sums(IDS)
    assert sorted(disk.calls) == TOGETHER
    expected = disk.data.copy()
    expected[NUMBERS] = disk.pool[IDS]
    assert np.array_equal(disk.on_disk(), expected)
    assert disk.storer.counters["direct_stored_bytes"] == 7 * BLOCK


WRONG = [{"length": BLOCK - 4096}, {"offset": 2 * BLOCK + 512}, {"directory": 1}]
WRONG_TO_READ = [{"kind": CHECKSUM_XXH3}, {"codec": 1}, {"stored_length": BLOCK + 4096}]


@pytest.mark.parametrize("changes", WRONG + WRONG_TO_READ)
def test_an_extent_that_is_not_as_promised_ends_the_run(disk: Disk, changes: dict[str, int]) -> None:
    extents = [disk.extent(0), disk.extent(1), disk.extent(2, **changes), disk.extent(3)]
    disk.pool[:] = 0
    assert disk.load(extents, [0, 1, 2, 3]) == DirectResult(2)
    assert not disk.pool[2:].any(), "nothing was read for it"


@pytest.mark.parametrize("changes", WRONG)
def test_a_place_that_is_not_as_promised_is_not_written_to(disk: Disk, changes: dict[str, int]) -> None:
    assert disk.store([disk.extent(0), disk.extent(2, **changes)], [0, 1]) == []
    assert disk.calls == []


def test_a_file_that_is_gone_or_short_is_a_failure_and_is_not_made(disk: Disk) -> None:
    assert disk.load([disk.extent(0, segment=7)], [0]) == DirectResult(0)
    assert disk.load([disk.extent(0, offset=BLOCKS * BLOCK)], [0]) == DirectResult(0)
    assert disk.loader.counters["direct_failures"] == 2
    assert disk.load([disk.extent(0)], [0]) == DirectResult(1)
    assert disk.load([disk.extent(0, segment=7)], [0]) == DirectResult(0)
    assert disk.loader.off == "", "only failures in a row end it"
    for _ in range(2):
        assert disk.load([disk.extent(0, segment=7)], [0]) == DirectResult(0)
    assert "3 direct reads in a row failed" in disk.loader.off
    assert disk.store([disk.extent(0, segment=7)], [0]) == []
    assert disk.storer.failures == 1
    assert [path.name for path in (disk.root / "segments").iterdir()] == ["00000001.seg"]


def test_files_of_another_life_of_the_daemon_are_opened_again(disk: Disk) -> None:
    assert disk.load([disk.extent(0)], [0]).good == 1
    disk.path.unlink()
    disk.data = disk.data[::-1].copy()
    disk.path.write_bytes(disk.data.tobytes())
    assert disk.load([disk.extent(0)], [0], life=2).good == 1
    assert np.array_equal(disk.pool[0], disk.data[0])


def test_nothing_is_begun_after_the_limit(disk: Disk) -> None:
    stopped = Limit()
    stopped.stopped = True
    for limit in (stopped, Limit(-math.inf)):
        assert disk.load([disk.extent(0)], [0], limit) == DirectResult(0)
        assert disk.store([disk.extent(0)], [0], limit) == []
    assert disk.calls == []


def test_a_stop_waits_for_what_is_under_way(tmp_path: Path) -> None:
    for name in ("load", "store"):
        (tmp_path / name).mkdir()
        disk = Disk(tmp_path / name, fault=lambda number: Fault.HANG)
        limit, results = Limit(), list[Any]()
        extents = [disk.extent(number) for number in range(0, BLOCKS, 2)]  # 16 calls, of which 8 at a time
        ids = list(range(len(extents)))
        call = disk.load if name == "load" else disk.store
        thread = threading.Thread(target=lambda: results.append(call(extents, ids, limit)))  # noqa: B023
        thread.start()
        wait_until(lambda: disk.backend.hanging == 8, "all threads are busy")  # noqa: B023
        limit.stopped = True
        assert not results
        disk.backend.resume()
        thread.join(60)
        assert results == [DirectResult(8) if name == "load" else disk.sums(ids[:8])], "what had begun has ended"
        assert len(disk.calls) == 8, "nothing else has begun"
        disk.close()


def test_the_engines_work_on_the_blocks_comes_first(disk: Disk) -> None:
    """What is stored, and what is summed, is what the blocks hold after it."""
    asked: list[Any] = []

    def is_ready(after: Any) -> bool:
        asked.append(after)
        assert disk.calls == []
        disk.pool[0] = len(asked)
        return len(asked) > 3

    disk.backend.is_ready = is_ready  # type: ignore[method-assign]
    assert disk.store([disk.extent(5)], [0]) == disk.sums([0])
    assert asked == ["event"] * 4
    assert (disk.on_disk()[5] == 4).all()


def test_pools_that_cannot_be_read_into_say_why() -> None:
    assert direct_problem(Pool.from_blocks(np.zeros((4, 8192), np.uint8))) == ""
    layers = [np.zeros((4, 4096), np.uint8) for _ in range(2)]
    assert "is 2 pieces" in direct_problem(Pool.from_layers(layers))
    assert "multiple of 4096" in direct_problem(Pool.from_blocks(np.zeros((4, 5000), np.uint8)))
    fixed = np.zeros((4, 8192), np.uint8)
    fixed.flags.writeable = False
    assert "read-only" in direct_problem(Pool.from_blocks(fixed))
