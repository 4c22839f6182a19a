"""Rows and slots of a shelf whose catalog could not write for a while."""

from __future__ import annotations

from pathlib import Path

import pytest
from chains import chain_of
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
    before = shelf.find_many(space, [block])[0].slot
    await rig.until(lambda: bool(shelf.catalog.error))
    monkeypatch.setattr(shelf_module, "ROWS_AT_ONCE", 0)  # as if many others were to be inserted first
    rig.tier.flush([space], b"", lambda blocks, durable: None)
    rig.forget_dram()
    disk.failing = set()
    clock.now_s += 60
    await rig.until(lambda: not shelf.slots.left and not shelf.catalog.pending)
    await rig.store_below([space], block)
    assert shelf.find_many(space, [block])[0].slot == before
    monkeypatch.undo()
    await rig.work(5)
    await rig.committed()
    number, epoch = shelf.registry.number(space), shelf.registry.epochs[space.number]
    assert [row[3] for row in disk.database.rows.values() if row[2] == number] == [epoch]
    await rig.close()
