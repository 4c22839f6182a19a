"""Rows and slots of a shelf whose catalog could not write for a while."""

from __future__ import annotations

from pathlib import Path

import pytest
from chains import chain_of, key_of
from memory_disks import MemoryDisk
from played import Clock, on_clock
from tier_rig import TierRig

from tiercache.daemon.tiers.nvme.shelf import shelf as shelf_module


@on_clock
async def test_a_row_that_was_refused_does_not_replace_that_of_the_next_block_in_its_slot(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = MemoryDisk(0, clock)
    rig = await TierRig(Path("/nowhere"), disks=[disk]).open()
    [shelf], space, block = rig.shelves, rig.namespace(4096), chain_of("b", 1)
    await rig.store_below([rig.namespace(4096, rank=1)], block)
    disk.failing = {"commit"}
    rig.store(space, block)
    await rig.until(lambda: shelf.has(space, block))
    before = shelf.find_many(space, [block]).slots[0]
    await rig.until(lambda: bool(shelf.catalog.error))
    monkeypatch.setattr(shelf_module, "ROWS_AT_ONCE", 0)  # as if many others were to be inserted first
    rig.tier.flush([space], b"", lambda blocks, durable: None)
    rig.forget_dram()
    disk.failing = set()
    clock.now_s += 60
    await rig.until(lambda: not shelf.slots.left and not shelf.catalog.pending)
    await rig.store_below([space], block)
    assert shelf.find_many(space, [block]).slots[0] == before
    monkeypatch.undo()
    await rig.work(5)
    await rig.committed()
    number, epoch = shelf.registry.number(space), shelf.registry.epochs[space.number]
    assert [row[3] for row in disk.database.rows.values() if row[2] == number] == [epoch]
    await rig.close()


@on_clock
async def test_what_hangs_below_a_block_that_was_dropped_is_not_found(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its entries are there until they are unlinked, in slices."""
    monkeypatch.setattr(shelf_module, "EVICT_AT_ONCE", 2)
    rig = await TierRig(Path("/nowhere"), disks=[MemoryDisk(0, clock)]).open()
    [shelf], space, chain = rig.shelves, rig.namespace(4096), chain_of("a", 20)
    await rig.store_below([space], chain)
    keys = [key_of(chain, number) for number in range(20)]
    assert len(shelf.find_many(space, keys)) == 20
    shelf.drop(space, keys[1])
    assert shelf.table(space).get(keys[2]) >= 0
    assert [len(shelf.find_many(space, keys[first:])) for first in (0, 1, 2)] == [1, 0, 0]
    assert shelf.find(space, keys[2]) is None
    await rig.until(lambda: not shelf.table(space).unlinking)
    rig.check()
    await rig.close()


@on_clock
async def test_rows_that_a_disk_refused_for_a_while_are_written_after_it(clock: Clock) -> None:
    """The blocks are served meanwhile; once there is room, they survive a kill as all others do."""
    disk = MemoryDisk(0, clock)
    rig = await TierRig(Path("/nowhere"), disks=[disk]).open()
    space, chain = rig.namespace(4096), chain_of("a", 4)
    rig.store(rig.namespace(4096, rank=1), chain)
    await rig.settled()
    disk.failing = {"commit"}
    rig.store(space, chain)
    [shelf] = rig.shelves
    await rig.until(lambda: shelf.has(space, key_of(chain, 3)) and bool(shelf.catalog.error))
    disk.failing = set()
    clock.now_s += 60
    await rig.until(lambda: not shelf.catalog.error and not shelf._unrecorded and not shelf.catalog.pending)
    rig.check()
    await rig.crash()
    rig = await TierRig(Path("/nowhere"), disks=[disk]).open()
    assert await rig.load(rig.namespace(4096), chain) == 4
    await rig.close()
