"""Namespaces over the lives of a directory: what is remembered, and that there is always room for new ones."""

from __future__ import annotations

import asyncio
import sqlite3
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest
from chains import chain_of, key_of
from memory_disks import MemoryCatalog, MemoryDisk
from played import Clock, on_clock, play
from tier_rig import TierRig

from tiercache.daemon.cache import Cache
from tiercache.daemon.ground.slices import finish
from tiercache.daemon.tiers.dram import space as space_module
from tiercache.daemon.tiers.dram.space import NoRoom, Space
from tiercache.daemon.tiers.nvme.catalog import rows
from tiercache.daemon.tiers.nvme.catalog.catalog import CatalogState, SavedNamespace
from tiercache.daemon.tiers.nvme.catalog.catalog_check import read_state
from tiercache.daemon.tiers.nvme.shelf import registry as registry_module
from tiercache.daemon.tiers.nvme.shelf.parts import CatalogRows, SavedNames
from tiercache.daemon.tiers.nvme.shelf.registry import Registry
from tiercache.protocol.namespaces import NamespaceSpec

RANKS = 4
PAGE = 4096
NOWHERE = Path("/nowhere")
CHAIN = chain_of("a", 5)


@pytest.mark.parametrize(
    "saved",
    [
        b"",
        b"\xc1",
        b"\x93\x01\x02\x03",
        msgspec.msgpack.encode({"engine": 1}),
        bytes([0x81]) * 2000,
        b"\x81\xa1e\x00\x00",
    ],
    ids=["nothing", "no msgpack", "no map", "no spec", "nested", "more behind it"],
)
def test_a_saved_spec_that_cannot_be_read_is_no_namespace(saved: bytes) -> None:
    state = CatalogState(False, [SavedNamespace(1, "f", saved, 3)], {}, [], 1)
    assert SavedNames.read(state).specs == [(state.namespaces[0], None)]


def _registry(catalog: CatalogRows, names: SavedNames, space: Space) -> Registry:
    registry = Registry("d", catalog, space)
    finish(registry.adopt(names))
    return registry


async def life(disk: MemoryDisk) -> TierRig:
    return await TierRig(NOWHERE, disks=[disk]).open()


async def lived_in(disk: MemoryDisk, ranks: int = RANKS) -> MemoryDisk:
    """A disk with one chain in so many namespaces."""
    rig = await life(disk)
    await rig.store_below([rig.namespace(PAGE, rank) for rank in range(ranks)], CHAIN)
    await rig.crash()
    return disk


@on_clock
async def test_namespaces_without_blocks_are_forgotten(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space_module, "MAX_NAMESPACES", RANKS)
    disk = await lived_in(MemoryDisk(0, clock))
    rig = await life(disk)
    namespaces = rig.cache.space.all_namespaces()
    rig.tier.flush(namespaces[1:], b"", lambda blocks, durable: None)
    await rig.committed()
    await rig.close()
    rig = await life(disk)
    with pytest.raises(NoRoom, match="restart the daemon to forget the empty ones"):
        rig.namespace(PAGE, rank=RANKS)
    rig.store(rig.namespace(PAGE, rank=1), chain_of("b", 3))  # one that was forgotten just now is made anew
    await rig.settled()
    await rig.crash()
    rig = await life(disk)
    rig.store(rig.namespace(PAGE, rank=RANKS), chain_of("a", 2))
    await rig.settled()
    await rig.close()
    assert (len(disk.database.namespaces), disk.database.tombstones) == (3, {})
    rig = await life(disk)
    for rank, name, blocks in ((0, "a", 5), (1, "a", 0), (1, "b", 3), (RANKS, "a", 2)):
        assert await rig.load(rig.namespace(PAGE, rank=rank), chain_of(name, 5)) == blocks
    rig.check()
    await rig.close()


@on_clock
async def test_namespaces_beyond_the_limit_are_dropped_with_their_blocks(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = await lived_in(MemoryDisk(0, clock))
    with monkeypatch.context() as patch:
        patch.setattr(space_module, "MAX_NAMESPACES", 1)
        rig = await life(disk)
        await rig.committed()
        assert rig.tier.stats()["blocks"] == 5
        await rig.close()
    assert len(disk.database.namespaces) == 1
    rig = await life(disk)
    found = [await rig.load(rig.namespace(PAGE, rank), CHAIN) for rank in range(RANKS)]
    assert sorted(found) == [0, 0, 0, 5]
    rig.check()
    await rig.close()


def test_numbers_of_dropped_namespaces_are_not_given_again_while_their_rows_may_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that a life could not read may be of them: under another namespace's number they would come back."""

    def unreadable(db: sqlite3.Connection, after: int, limit: int) -> list[tuple[int, bytes]]:
        raise sqlite3.OperationalError("disk I/O error")

    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        await rig.store_below([rig.namespace(rank=rank) for rank in range(RANKS)], CHAIN)
        await rig.close()
        monkeypatch.setattr(space_module, "MAX_NAMESPACES", 1)
        monkeypatch.setattr(rows, "read_page", unreadable)
        rig = await TierRig(tmp_path).open()
        rig.shelves[0].registry._dropped(lambda ok: None, True)  # later than all rows that could be read
        await rig.committed()
        await rig.close()
        assert len(read_state(rig.dirs[0]).namespaces) == RANKS

    play(scenario)


@on_clock
async def test_namespaces_are_taken_in_in_slices_before_their_directory_is_used(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be thousands that this life does not know yet."""
    monkeypatch.setattr(registry_module, "ADOPTED_AT_ONCE", 1)
    disk, answers = await lived_in(MemoryDisk(0, clock)), list[bool]()
    rig = TierRig(NOWHERE, disks=[disk])
    opening, known = asyncio.ensure_future(rig.tier.open()), [0]
    while not rig.shelves:
        known.append(len(rig.cache.space.namespaces))
        if known[-2:] == [1, 2]:
            named = rig.cache.space.all_namespaces()
            rig.tier.begin_flush(named, b"", lambda _, durable: answers.append(durable), named=True).end()
        await asyncio.sleep(0)
    assert all(after - before <= 1 for before, after in pairwise(known))
    assert known[-1] == RANKS - 1, "the last slice is the rest"
    assert answers == [], "it waits for the directory"
    await opening
    await rig.loaded()
    await rig.committed()
    assert answers == [True]
    assert [await rig.load(rig.namespace(PAGE, rank), CHAIN) for rank in range(RANKS)] == [0, 0, 5, 5]
    rig.check()
    await rig.close()


def test_a_namespace_that_cannot_be_served_is_known_until_it_is_dropped() -> None:
    """The disk was full when its directory was opened; a flush of everything comes after that."""
    disk = MemoryDisk(0, lambda: 0.0)
    disk.database.namespaces[1] = SavedNamespace(1, "f", b"nothing that can be read", 3)
    catalog = MemoryCatalog(disk)
    refused: list[Any] = []
    raise_epoch = catalog.raise_epoch
    catalog.raise_epoch = lambda *change: refused.append(change[-1])  # type: ignore[method-assign]
    registry = _registry(catalog, SavedNames.read(catalog.state()), Cache(lambda: 0.0).space)
    refused.pop()(False)
    catalog.raise_epoch = raise_epoch  # type: ignore[method-assign]
    registry.loaded(complete=True)
    registry.forget(keep=(), with_rows=())
    answers: list[bool] = []
    registry.drop_unserved(answers.append)
    catalog.commit()
    assert answers == [True]
    assert disk.database.namespaces[1].epoch == 4


@on_clock
async def test_very_many_flushes_by_key_that_cannot_be_forgotten_become_one_of_their_namespace(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "MAX_TOMBSTONES", 6)
    monkeypatch.setattr(registry_module, "MANY_TOMBSTONES", 3)
    disk = MemoryDisk(0, clock)
    rig = await life(disk)
    many, few, chain = rig.namespace(PAGE), rig.namespace(PAGE, rank=1), chain_of("a", 20)
    await rig.store_below([many, few], chain)
    disk.hung = True
    for namespace, blocks in ((many, (19, 18, 17, 16)), (few, (19, 18, 17))):
        for block in blocks:
            rig.tier.flush([namespace], key_of(chain, block), lambda blocks, durable: None)
    tables = rig.shelves[0].index.tables
    assert [tables[one.number].blocks for one in (many, few)] == [16, 17], "few of its own, of many in all"
    rig.tier.flush([few], key_of(chain, 16), lambda blocks, durable: None)
    rig.tier.flush([many], key_of(chain, 15), lambda blocks, durable: None)
    assert [tables[one.number].blocks for one in (many, few)] == [15, 0]
    disk.hung = False
    await rig.committed()
    await rig.crash()
    rig = await life(disk)
    await rig.committed()
    assert [await rig.load(rig.namespace(PAGE, rank), chain) for rank in (0, 1)] == [15, 0]
    assert all(key == b"" for _, key in disk.database.tombstones)
    rig.check()
    await rig.close()


@on_clock
async def test_a_namespace_of_which_a_flush_is_all_that_is_left_is_forgotten(clock: Clock) -> None:
    """Its rows were deleted before the daemon was killed, its tombstone not yet."""
    disk = await lived_in(MemoryDisk(0, clock), 1)
    disk.database.rows.clear()
    [number] = disk.database.namespaces
    disk.database.tombstones[number, key_of(CHAIN, 0)] = 1
    rig = await life(disk)
    await rig.committed()
    assert (disk.database.namespaces, disk.database.tombstones) == ({}, {})
    assert rig.shelves[0].registry.tombstone_count == 0
    rig.check()
    await rig.close()


@pytest.mark.parametrize("named", [False, True])
@on_clock
async def test_a_flush_of_everything_is_about_namespaces_for_which_there_is_no_room(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """They are dropped row by row while the rows are loading, and the next life may have room for them."""
    disk = await lived_in(MemoryDisk(0, clock), 2)
    with monkeypatch.context() as patch:
        patch.setattr(space_module, "MAX_NAMESPACES", 1)
        rig = TierRig(NOWHERE, disks=[disk])
        rig.namespace(PAGE, rank=2)
        await rig.tier.open()
        assert rig.shelves[0].loading
        answers, every = list[bool](), rig.cache.space.all_namespaces()
        flush = rig.tier.begin_flush(every, b"", lambda blocks, durable: answers.append(durable), named)
        flush.forget(every)
        flush.end()
        assert answers == ([True] if named else []), "a flush of what is named is not about the others"
        assert disk.catalog is not None
        disk.catalog.commit()
        assert answers == [True]
        await rig.crash()
    rig = await life(disk)
    assert [await rig.load(rig.namespace(PAGE, rank), CHAIN) for rank in (0, 1)] == [0, 0]
    rig.check()
    await rig.close()


@on_clock
async def test_a_flush_of_everything_waits_for_what_a_failing_disk_could_not_drop(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = await lived_in(MemoryDisk(0, clock), 1)
    monkeypatch.setattr(space_module, "MAX_NAMESPACES", 0)
    disk.failing = {"commit"}
    rig = TierRig(NOWHERE, disks=[disk])
    await rig.tier.open()
    answers = list[bool]()

    def flush() -> None:
        rig.tier.begin_flush([], b"", lambda blocks, durable: answers.append(durable)).end()

    flush()
    disk.step()
    assert answers == [False]
    disk.failing = set()
    clock.now_s += 60.0
    disk.step()
    flush()
    assert answers == [False], "it is posted again, and not confirmed yet"
    disk.step()
    assert answers == [False, True]
    await rig.close()


def test_a_tombstone_that_could_not_be_removed_is_counted_once() -> None:
    """The disk has refused a row: all tombstones stay for the next life, however often their blocks are flushed."""
    space = Cache(lambda: 0.0).space
    removed, catalog = list[Any](), cast(Any, Mock())
    catalog.remove_tombstone = lambda number, key, done: removed.append(done)
    registry = _registry(catalog, SavedNames.read(CatalogState(True, [], {}, [], 1)), space)
    registry.loaded(complete=True)
    namespace = space.open_namespace(NamespaceSpec(engine="t", layout="l", dtype="u8", block_size=1, block_bytes=PAGE))
    registry.add(namespace)
    for _ in range(3):
        registry.flush_key(namespace, key_of(CHAIN, 0), lambda ok: None)
        registry.bury()
        removed.pop()(False)
        assert registry.tombstone_count == 1
    registry.flush_key(namespace, key_of(CHAIN, 0), lambda ok: None)
    registry.bury()
    removed.pop()(True)
    assert registry.tombstone_count == 0
