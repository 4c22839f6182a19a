"""The storer by itself: how it turns places into writes, and what it reports of them."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import wait_until

from tiercache.connector.blocks import Blocks
from tiercache.connector.direct.backend import DirectFailed, Fault, HostBackend, KvikioBackend
from tiercache.connector.direct.gds import DirectStorer
from tiercache.copies.pool import Limit, Pool
from tiercache.protocol.checksums import CHECKSUM_LANES, block_checksum
from tiercache.protocol.messages import Extent

FAKES = Path(__file__).parent / "fakes"
BLOCK = 8192
BLOCKS = 32


class Disk:
    """A segment full of sevens, and a pool of noise to store there, at an address that is (not) `aligned`."""

    def __init__(self, root: Path, aligned: bool = True, fault: Any = lambda number: None) -> None:
        self.root = root
        (root / "segments").mkdir()
        self.path = root / "segments" / "00000001.seg"
        self.path.write_bytes(b"\7" * BLOCKS * BLOCK)
        self.area = mmap.mmap(-1, BLOCKS * BLOCK + 4096)
        self.pool = np.frombuffer(self.area, np.uint8)[0 if aligned else 512 :][: BLOCKS * BLOCK].reshape(BLOCKS, BLOCK)
        self.pool[:] = np.random.default_rng(3).integers(0, 256, (BLOCKS, BLOCK), np.uint8)
        self.backend = HostBackend(write_fault=fault)
        self.calls: list[tuple[int, int]] = []  # offset and length of each write
        write = self.backend.write

        def note(file: Any, offset: int, address: int, length: int) -> int:
            self.calls.append((offset, length))
            return write(file, offset, address, length)

        self.backend.write = note  # type: ignore[method-assign]
        self.storer = DirectStorer(Pool.from_blocks(self.pool), self.backend, give_up_s=30.0)

    def store(self, places: list[Extent], ids: list[int], limit: Limit | None = None) -> list[int]:
        """Each block's seed is its number in the pool."""
        return self.storer.store(1, str(self.root), places, ids, Blocks(np.array(ids, np.int64), 0, limit or Limit()))

    def sum(self, number: int) -> int:
        return block_checksum(self.pool[number].data, number, CHECKSUM_LANES)

    def on_disk(self) -> Any:
        """What each place holds."""
        data = np.frombuffer(self.path.read_bytes(), np.uint8)
        assert len(data) == BLOCKS * BLOCK, "the file is as long as it was"
        return data.reshape(BLOCKS, BLOCK)

    def untouched(self, but: list[int]) -> bool:
        others = np.delete(self.on_disk(), but, axis=0)
        return bool((others == 7).all())


def test_kvikio_writes_into_a_file_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend for GPUs, with a stand-in for kvikio over host memory."""
    settings = tmp_path / "cufile.json"
    settings.write_text('{"properties": {"allow_compat_mode": false}}')
    for name, value in {
        "CUFILE_ENV_PATH_JSON": str(settings),
        "FAKE_KVIKIO": "gds=ok",
        "KVIKIO_COMPAT_MODE": "OFF",
    }.items():
        monkeypatch.setenv(name, value)
    backend = KvikioBackend.__new__(KvikioBackend)
    spec = spec_from_file_location("kvikio_stand_in", FAKES / "kvikio.py")
    assert spec is not None
    assert spec.loader is not None
    backend._kvikio = module_from_spec(spec)
    spec.loader.exec_module(backend._kvikio)
    path = tmp_path / "segment"
    path.write_bytes(b"\7" * 3 * BLOCK)
    data = np.random.default_rng(3).integers(0, 256, BLOCK, np.uint8)
    file = backend.open(str(path), True)
    assert backend.write(file, BLOCK, data.ctypes.data, BLOCK) == BLOCK
    backend.close(file)
    assert path.read_bytes() == b"\7" * BLOCK + data.tobytes() + b"\7" * BLOCK
    reader = backend.open(str(path), False)
    with pytest.raises(DirectFailed, match=f"{BLOCK} bytes at 0: "):
        backend.write(reader, 0, data.ctypes.data, BLOCK)
    backend.close(reader)
    with pytest.raises(DirectFailed, match="cannot be opened"):
        backend.open(str(tmp_path / "none"), True)


def place(number: int, **changes: Any) -> Extent:
    return Extent(1, 0, CHECKSUM_LANES, 0, number * BLOCK, BLOCK, BLOCK, 0)._replace(**changes)


@pytest.fixture(params=[True, False], ids=["aligned", "unaligned"])
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Disk]:
    made = Disk(tmp_path, request.param)
    yield made
    made.backend.resume()
    made.storer.close()


def test_neighbours_on_disk_and_in_the_pool_are_one_write(disk: Disk) -> None:
    numbers, ids = [0, 1, 2, 5, 6, 4, 9], [10, 11, 12, 13, 14, 15, 3]
    assert disk.store([place(number) for number in numbers], ids) == [disk.sum(number) for number in ids]
    assert sorted(disk.calls) == [(0, 3 * BLOCK), (4 * BLOCK, BLOCK), (5 * BLOCK, 2 * BLOCK), (9 * BLOCK, BLOCK)]
    assert np.array_equal(disk.on_disk()[numbers], disk.pool[ids])
    assert disk.untouched(numbers)
    assert disk.storer.counters == {
        "direct_stored_blocks": 7,
        "direct_stored_bytes": 7 * BLOCK,
        "direct_store_failures": 0,
    }


@pytest.mark.parametrize("changes", [{"length": BLOCK - 4096}, {"offset": 2 * BLOCK + 512}, {"directory": 1}])
def test_a_place_that_is_not_as_promised_is_not_written_to(disk: Disk, changes: dict[str, int]) -> None:
    assert disk.store([place(0), place(2, **changes)], [0, 1]) == []
    assert disk.calls == []
    assert disk.untouched([])


def test_a_file_that_is_gone_is_not_made(disk: Disk) -> None:
    assert disk.store([place(0, segment=7)], [0]) == []
    assert disk.storer.failures == 1
    assert [path.name for path in (disk.root / "segments").iterdir()] == ["00000001.seg"]


def test_nothing_is_begun_after_the_limit(disk: Disk) -> None:
    stopped = Limit()
    stopped.stopped = True
    assert disk.store([place(0)], [0], stopped) == []
    assert disk.store([place(0)], [0], Limit(-math.inf)) == []
    assert disk.calls == []


def test_a_stop_waits_for_the_writes_under_way(tmp_path: Path) -> None:
    disk = Disk(tmp_path, fault=lambda number: Fault.HANG)
    limit, results = Limit(), []
    places = [place(number) for number in range(0, BLOCKS, 2)]  # 16 writes, of which 8 at a time
    ids = list(range(len(places)))
    thread = threading.Thread(target=lambda: results.append(disk.store(places, ids, limit)))
    thread.start()
    wait_until(lambda: disk.backend.hanging == 8, "all threads write")
    limit.stopped = True
    thread.join(0.3)
    assert thread.is_alive()
    disk.backend.resume()
    thread.join(40)
    assert results == [[disk.sum(number) for number in range(8)]]
    assert disk.backend.writes == 8
    disk.storer.close()


def test_the_engines_work_on_the_blocks_comes_first(disk: Disk) -> None:
    """What is stored, and what is summed, is what the blocks hold after it."""
    asked: list[Any] = []

    def is_ready(after: Any) -> bool:
        asked.append(after)
        assert disk.calls == []
        disk.pool[0] = len(asked)
        return len(asked) > 3

    disk.backend.is_ready = is_ready  # type: ignore[method-assign]
    ids = np.array([0], np.int64)
    assert disk.storer.store(1, str(disk.root), [place(5)], [0], Blocks(ids, 0, Limit(), "event")) == [disk.sum(0)]
    assert asked == ["event"] * 4
    assert (disk.on_disk()[5] == 4).all()
