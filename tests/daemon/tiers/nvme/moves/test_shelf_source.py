"""Directories as sources of promotions: blocks that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from chains import chain_of
from memory_disks import MemoryDisk
from played import Clock, on_clock
from tier_rig import TierRig

from tiercache.daemon.tiers.nvme.moves import shelf_source

PAGE = 4096


@on_clock
async def test_an_unreadable_block_has_one_more_chance_and_so_many_are_remembered(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf_source, "MAX_UNREADABLE", 2)
    disk = MemoryDisk(0, clock)
    rig = await TierRig(Path("/nowhere"), disks=[disk]).open()
    space, chains = rig.namespace(PAGE), [chain_of(name, 1) for name in "abc"]
    for chain in chains:
        await rig.store_below([space], chain)
    disk.failing.add("read")
    assert [await rig.load(space, chain) for chain in chains] == [0, 0, 0]
    assert [key for _, key in rig.tier.sources.unreadable.blocks] == chains[1:]
    disk.failing.clear()
    assert await rig.load(space, chains[2]) == 1, "it is good after all"
    assert [key for _, key in rig.tier.sources.unreadable.blocks] == chains[1:2]
    disk.failing.add("read")
    assert await rig.load(space, chains[1]) == 0
    assert not rig.shelves[0].has(space, chains[1]), "twice is enough: else it would be found and missed for ever"
    assert not rig.tier.sources.unreadable.blocks
    assert rig.tier.stats()["failed_reads"] == 4
    rig.check()
    await rig.close()
