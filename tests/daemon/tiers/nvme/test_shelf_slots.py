"""A slot is free only when its row is deleted, also for rows that are dropped while others still load."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiercache.daemon.ground.counters import Counters
from tiercache.daemon.index.allocator import NO_FRAME
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.policies import Policies
from tiercache.daemon.tiers.dram.space import Namespace, Space
from tiercache.daemon.tiers.nvme import recovery
from tiercache.daemon.tiers.nvme.catalog.catalog import Catalog
from tiercache.daemon.tiers.nvme.catalog.catalog_check import check_rows
from tiercache.daemon.tiers.nvme.disk.directory import Directory
from tiercache.daemon.tiers.nvme.disk.queue import DiskQueue
from tiercache.daemon.tiers.nvme.shelf import Shelf, StoredBlock
from tiercache.daemon.tiers.nvme.slot_numbers import place_of_slot
from tiercache.protocol.checksums import CHECKSUM_XXH3
from tiercache.protocol.namespaces import NamespaceSpec

SEGMENT_BYTES = 1 << 20
SPEC = NamespaceSpec(engine="t/1", layout="bytes", dtype="uint8", block_size=1, block_bytes=4096)
DEADLINE_S = 60.0


class Bench:
    """A shelf whose loop is this test: callbacks from other threads wait until the test runs them."""

    def __init__(self, path: Path) -> None:
        self.posted: list[Callable[[], object]] = []
        self.space = Space(Policies("lru", time.monotonic), Counters())
        self.namespace: Namespace = self.space.open_namespace(SPEC)
        self.directory = Directory(path, 64 << 20, SEGMENT_BYTES)
        self.directory.open()
        post = lambda call, *args: self.posted.append(lambda: call(*args))  # noqa: E731
        self.catalog = Catalog(path, self.directory.superblock.directory_id, post)
        state = self.catalog.open()
        self.queue = DiskQueue(self.directory, post, threads=1)
        self.shelf = Shelf(self.directory, self.catalog, self.queue, state, self.space)
        self.shelf.start_loading()

    def close(self) -> None:
        self.queue.stop(time.monotonic() + DEADLINE_S)
        assert self.catalog.close(DEADLINE_S)
        self.directory.close()

    def deliver(self) -> None:
        while self.posted:
            self.posted.pop(0)()

    def until(self, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end_s
            self.deliver()
            time.sleep(0.001)

    def loaded(self) -> None:
        while self.shelf.loading:
            self.shelf.work()
            self.deliver()

    def slot_of(self, number: int) -> int:
        stored = self.shelf.find(self.namespace, number.to_bytes(16, "little"))
        assert stored is not None
        return stored.slot

    def add(self, number: int, parent: bytes) -> bytes:
        """A block as if it had been written; returns its key."""
        slots: list[int] = []

        def taken() -> bool:
            slots.append(self.shelf.take_slot(self.namespace, parent))
            return slots[-1] != NO_FRAME

        self.until(taken)
        key = number.to_bytes(16, "little")
        self.shelf.add(
            self.namespace, key, parent, slots[-1], StoredBlock(NO_ENTRY, slots[-1], 4096, 0, 7, CHECKSUM_XXH3)
        )
        return key


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Path]:
    """A directory with a chain of 40 blocks."""
    bench = Bench(tmp_path)
    bench.until(lambda: not bench.shelf.work() and not bench.shelf.loading)
    parent = b""
    for number in range(1, 41):
        parent = bench.add(number, parent)
    bench.close()
    return tmp_path


def test_a_flush_while_rows_load_frees_every_slot_once(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "ROWS_AT_ONCE", 10)
    bench = Bench(filled)
    shelf = bench.shelf
    while shelf.recovery.loaded_rows < 40:
        shelf.work()
    # All rows are in and loading has not been declared over: nothing is delivered meanwhile.
    shelf.flush(bench.namespace, (20).to_bytes(16, "little"), lambda ok: None)
    while shelf.loading:
        shelf.work()
    assert shelf.check_integrity([]) == []
    bench.until(lambda: shelf.allocator.used_bytes == 19 * 4096)
    assert shelf.check_integrity([]) == []
    taken = [shelf.take_slot(bench.namespace, b"") for _ in range(SEGMENT_BYTES // 4096 - 19)]
    assert NO_FRAME not in taken
    assert len(set(taken)) == len(taken)
    bench.close()


def test_slots_of_rows_that_are_refused_are_free_when_the_rows_are_gone(filled: Path) -> None:
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(filled / "index.db")) as db:
        place = sorted(place for (place,) in db.execute("SELECT place FROM blocks"))[5]
        db.execute("DELETE FROM blocks WHERE place = ?", (place,))
        db.commit()
    bench = Bench(filled)
    shelf = bench.shelf
    while shelf.loading:
        shelf.work()
    assert shelf.recovery.orphan_rows == 34
    assert shelf.allocator.used_bytes == 39 * 4096, "34 rows are not deleted yet"
    assert shelf.check_integrity([]) == []
    bench.until(lambda: shelf.allocator.used_bytes == 5 * 4096)
    assert shelf.check_integrity([]) == []
    bench.close()


def test_a_block_is_let_in_only_for_one_that_is_worth_no_more(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(filled)
    shelf = bench.shelf
    while shelf.loading:
        shelf.work()
        bench.deliver()
    policy = shelf.slots.policy(4096)
    monkeypatch.setattr(policy, "worth", lambda entry: 2.0)
    assert shelf.admits(bench.namespace, 0.0), "there is room"
    number = 100
    while bench.shelf.slots.evicted_blocks == 0:
        bench.add(number, b"")
        number += 1
    assert not shelf.admits(bench.namespace, 1.0)
    assert shelf.admits(bench.namespace, 2.0)
    bench.close()


def test_a_chain_as_long_as_the_directory_does_not_wait_for_ever(filled: Path) -> None:
    """Room for a child is not made by evicting its ancestors, unless there is nothing else: then the last one goes."""
    bench = Bench(filled)
    shelf = bench.shelf
    while shelf.loading:
        shelf.work()
        bench.deliver()
    parent, slots = (40).to_bytes(16, "little"), []
    for number in range(41, 1 << 20):
        slots.clear()
        bench.until(lambda: bool(_take(shelf, bench.namespace, parent, slots)))  # noqa: B023 (called at once)
        if slots[-1] == NO_FRAME:
            break
        key = number.to_bytes(16, "little")
        shelf.add(bench.namespace, key, parent, slots[-1], StoredBlock(NO_ENTRY, slots[-1], 4096, 0, 7, CHECKSUM_XXH3))
        parent = key
    assert slots[-1] == NO_FRAME
    assert not shelf.has(bench.namespace, parent), "the writer finds no parent, and goes on to other blocks"
    bench.close()


@pytest.mark.parametrize("lost", ["a row", "a row that is replaced"])
def test_rows_that_are_refused_go_from_the_ends_of_chains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Wherever their slots are: a kill in between leaves no row without the one before it."""
    bench = Bench(tmp_path)
    bench.loaded()
    bench.add(100, b"")  # makes the segment
    slots = [bench.shelf.take_slot(bench.namespace, b"") for _ in range(40)]
    random.Random(1).shuffle(slots)
    monkeypatch.setattr(bench.shelf, "take_slot", lambda namespace, parent: slots.pop())
    parent = b""
    for number in range(1, 41):
        if lost == "a row that is replaced":  # the rows behind it are older
            bench.shelf.registry.epochs[bench.namespace.number] = int(number == 5)
        parent = bench.add(number, parent)
    if lost == "a row":
        bench.catalog.delete(place_of_slot(bench.slot_of(5)))
    bench.close()
    monkeypatch.setattr(recovery, "ROWS_AT_ONCE", 3)
    bench = Bench(tmp_path)
    numbers = {place: int.from_bytes(row.key, "little") for place, row in check_rows(tmp_path) if row is not None}
    deleted, delete = list[int](), bench.catalog.delete

    def note(place: int, done: Callable[[bool], None] | None = None) -> None:
        deleted.append(numbers[place])
        delete(place, done)

    monkeypatch.setattr(bench.catalog, "delete", note)
    bench.loaded()
    assert deleted == list(range(40, 5, -1))
    bench.until(lambda: bench.shelf.allocator.used_bytes == (5 if lost == "a row" else 6) * 4096)
    assert bench.shelf.check_integrity([]) == []
    bench.close()


def _take(shelf: Shelf, namespace: Namespace, parent: bytes, slots: list[int]) -> bool:
    """Try once; True when there is a slot, or there never will be."""
    slots.append(shelf.take_slot(namespace, parent))
    return slots[-1] != NO_FRAME or not shelf.has(namespace, parent)
