"""Slots of a directory that is full: what makes room for what, and what does not."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from cache_rig import counted
from chains import chain_of, key_of
from memory_disks import MemoryDisk
from played import Clock, on_clock
from tier_rig import TierRig

from tiercache.daemon.cache import CacheLimits
from tiercache.daemon.policies.fresh_stores import FreshStores
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.nvme.shelf import shelf as shelf_module
from tiercache.daemon.tiers.nvme.shelf import slots as slots_module
from tiercache.protocol.messages import REGION_SHIFT

PAGE = 4096
SLOTS = 32
"""In all segments of a directory: 4 of 8."""
AHEAD = SLOTS // 8
NOWHERE = Path("/nowhere")


async def rig_on(clock: Clock, segments: int = 4, **settings: Any) -> TierRig:
    return await TierRig(NOWHERE, disks=[MemoryDisk(0, clock, segments)], **settings).open()


async def full(clock: Clock, **settings: Any) -> tuple[TierRig, Namespace]:
    """All slots are taken, or kept free for what comes next."""
    rig = await rig_on(clock, **settings)
    space = rig.namespace(PAGE)
    for number in range(10):
        rig.store(space, chain_of(number, 5))
        await rig.settled()
    return rig, space


class CountedSlot(int):
    """A slot that counts how often any of them is looked at, to be found among others."""

    looks = 0

    def __eq__(self, other: object) -> bool:
        CountedSlot.looks += 1
        return int(self) == other

    def __hash__(self) -> int:
        CountedSlot.looks += 1
        return int.__hash__(self)


def blocks(rig: TierRig) -> int:
    found = rig.tier.stats()["blocks"]
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("trouble", ["hangs", "fails"])
@on_clock
async def test_nothing_is_evicted_for_a_database_that_does_not_write(clock: Clock, trouble: str) -> None:
    """Each slot would be free only once its row is deleted."""
    rig, space = await full(clock)
    before, [disk], [shelf] = blocks(rig), rig.memory, rig.shelves
    if trouble == "fails":
        disk.failing.add("commit")
    for number in range(8):
        rig.store(space, chain_of(f"more {number}", 5))
        for _ in range(20):
            disk.step(commits=trouble == "fails")
            await rig.work()
    assert blocks(rig) >= before - 2 * AHEAD - 5
    if trouble == "fails":
        assert any("Input/output error" in reason for reason in rig.tier.reasons())
        assert shelf.slots.left.lost > 0, "slots whose old row is still there are not used"
    disk.failing.clear()
    await rig.until(lambda: not shelf.catalog.error and not shelf.slots.left)
    await rig.settled()
    rig.check()
    await rig.close()


@on_clock
async def test_how_many_slots_come_free_is_known_without_a_look_at_each(clock: Clock) -> None:
    """A database that does not write, and a flush meanwhile, may leave a million rows to delete."""
    rig = await rig_on(clock)
    [disk], [shelf] = rig.memory, rig.shelves
    left = shelf.slots.left
    disk.failing.add("commit")
    for number in range(100):
        left.leave(CountedSlot(number * PAGE))
    assert left.being_freed == 100
    await rig.until(lambda: left.lost == 100)
    CountedSlot.looks = 0
    assert (left.being_freed, CountedSlot.looks) == (0, 0)


@on_clock
async def test_without_room_for_a_segment_blocks_are_replaced_until_there_is(clock: Clock) -> None:
    rig = await rig_on(clock)
    [disk], [shelf], space = rig.memory, rig.shelves, rig.namespace(PAGE)
    disk.failing.add("segment")
    rig.store(space, chain_of("a", 5))
    await rig.until(lambda: bool(shelf.health.reason))
    disk.failing.clear()
    await rig.settled()
    assert blocks(rig) == 5, "waiting blocks are written when there is room"
    disk.failing.add("segment")
    for number in range(4):
        rig.store(space, chain_of(number, 5))
        await rig.settled()
    assert 0 < blocks(rig) <= 8, "one segment's worth"
    assert any("no further segment" in reason for reason in rig.tier.reasons())
    assert shelf.health.reason == "", "and the daemon still writes"
    disk.failing.clear()
    clock.now_s += 60
    for number in range(4):
        rig.store(space, chain_of(f"later {number}", 5))
        await rig.settled()
    assert blocks(rig) > 8
    assert rig.tier.reasons() == []
    rig.check()
    await rig.close()


@on_clock
async def test_another_size_gets_one_segment_of_a_full_disk(clock: Clock) -> None:
    rig, small = await full(clock)
    large = rig.namespace(4 * PAGE, rank=1)
    rig.store(large, chain_of("large", 2))
    await rig.settled()
    [shelf] = rig.shelves
    assert shelf.table(large).blocks == 2
    assert shelf.table(small).blocks >= 8, "one segment was emptied, not all"
    rig.check()
    await rig.crash()
    again = await TierRig(NOWHERE, disks=rig.memory).open()
    assert await again.load(again.namespace(4 * PAGE, rank=1), chain_of("large", 2)) == 2
    again.check()
    await again.close()


@on_clock
async def test_a_slot_that_could_not_be_written_to_is_used_again_but_not_soon(clock: Clock) -> None:
    rig = await rig_on(clock, segments=1)
    [disk], [shelf], space = rig.memory, rig.shelves, rig.namespace(PAGE)
    rig.store(space, chain_of("a", 1))
    await rig.settled()
    disk.failing.add("write")
    rig.store(space, chain_of("b", 1))
    await rig.settled()
    disk.failing.clear()
    assert shelf.stats()["writing"] == f"blocks cannot be written: {os.strerror(errno.EIO)}"
    size_class = shelf.allocator.size_class(PAGE)
    assert (size_class.free, rig.tier.stats()["write_failed_blocks"]) == (6, 1)
    clock.now_s += slots_module.ASIDE_S - 1
    await rig.work()
    assert size_class.free == 6
    clock.now_s += 2
    await rig.work()
    assert size_class.free == 7
    assert await rig.load(space, chain_of("b", 1)) == 1, "and it is offered again"
    await rig.settled()
    assert (shelf.stats()["writing"], blocks(rig)) == ("on", 2)
    rig.check()
    await rig.close()


@on_clock
async def test_a_check_looks_at_each_slot_that_could_not_be_written_to_alone(clock: Clock) -> None:
    """A disk that refuses writes for long leaves many thousands of them."""
    [shelf] = (await rig_on(clock)).shelves
    slots = [CountedSlot(number * PAGE) for number in range(100)]
    for slot in slots:
        shelf.slots.put_aside(slot)
    CountedSlot.looks = 0
    assert all(slot in shelf.slots for slot in slots)
    assert PAGE * 100 not in shelf.slots
    assert CountedSlot.looks <= 4 * len(slots)


@on_clock
async def test_a_chain_as_long_as_the_directory_does_not_wait_for_ever(clock: Clock) -> None:
    """Room for a child is not made by evicting its ancestors, unless there is nothing else: then the last one goes."""
    rig = await rig_on(clock)
    space, chain = rig.namespace(PAGE), chain_of("long", 3 * SLOTS)
    rig.store(space, chain)
    await rig.settled()
    assert SLOTS - AHEAD <= blocks(rig) <= SLOTS
    rig.forget_dram()
    assert await rig.load(space, chain) == blocks(rig)
    rig.check()
    await rig.close()


@on_clock
async def test_nothing_more_is_unlinked_while_the_index_is_behind(clock: Clock) -> None:
    """Each evicted block is a row to delete. These wait where they cost nothing, not in an unbounded queue."""
    rig = await rig_on(clock)
    [disk], [shelf], space = rig.memory, rig.shelves, rig.namespace(PAGE)
    rig.store(space, chain_of("a", 20))
    await rig.settled()
    disk.most_pending = 0
    shelf.drop(space, key_of(chain_of("a", 20), 0))
    for _ in range(3):
        assert not shelf.work()
    assert (len(shelf.slots.left), shelf.catalog.pending) == (0, 0)
    disk.most_pending = 100
    shelf.work()
    assert len(shelf.slots.left) == 20
    await rig.committed()
    assert shelf.allocator.used_bytes == 0
    rig.check()
    await rig.close()


@on_clock
async def test_a_segment_is_emptied_from_the_ends_of_chains(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill in the middle must not leave rows without those of the blocks before them."""
    monkeypatch.setattr(shelf_module, "EVICT_AT_ONCE", 2)
    monkeypatch.setattr(slots_module, "EVICT_AT_ONCE", 2)
    rig = await rig_on(clock)
    small, large = rig.namespace(PAGE), rig.namespace(4 * PAGE, rank=1)
    rig.store(small, chain_of("first", 1))
    await rig.settled()
    rig.store(small, chain_of("parent", 1))
    await rig.settled()
    assert await rig.flush(chain_of("first", 1))  # whose place in the index comes before
    await rig.settled()
    chain = chain_of("parent", 1) + chain_of("children", 20)
    rig.store(small, chain, first=1)
    await rig.settled()
    [shelf] = rig.shelves
    table = shelf.table(small)
    assert table.get(key_of(chain, 1)) < table.get(key_of(chain, 0))
    shelf.allocator.empty_region(shelf.index.frame[table.get(key_of(chain, 1))] >> REGION_SHIFT)
    shelf.slots._emptying = shelf.index.frame[table.get(key_of(chain, 1))] >> REGION_SHIFT, 0
    while table.get(key_of(chain, 0)) >= 0:
        await rig.work()
    assert not table.unlinking
    rig.store(large, chain_of("large", 1))
    await rig.settled()
    rig.check()
    await rig.close()


@on_clock
async def test_the_coldest_blocks_of_all_accounts_make_room(clock: Clock) -> None:
    limits = CacheLimits(quarantine_bytes=1 << 30, quota_below={"t": 1 << 30})
    rig = await rig_on(clock, limits=limits)
    theirs, ours = rig.namespace(PAGE, tenant="t"), rig.namespace(PAGE, rank=1)
    for space, chain in ((theirs, chain_of("first", 1)), (ours, chain_of("cold", 4)), (theirs, chain_of("warm", 4))):
        rig.store(space, chain)
        await rig.settled()
        clock.now_s += 10
    for number in range(8):
        rig.store(theirs, chain_of(number, 4))
        await rig.settled()
        rig.cache.match(rig.owner, [theirs], chain_of("warm", 4), 0)
        clock.now_s += 10
    [shelf] = rig.shelves
    assert not shelf.has(ours, key_of(chain_of("cold", 4), 3)), "colder than all but one of the other account"
    assert shelf.has(theirs, key_of(chain_of("warm", 4), 3))
    rig.check()
    await rig.close()


@on_clock
async def test_of_many_accounts_only_the_one_that_lost_a_block_is_asked_again(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a quota for each tenant there may be thousands of accounts."""
    asked = counted(monkeypatch, FreshStores, "coldest_stamp")
    rig = await rig_on(clock, limits=CacheLimits(quarantine_bytes=1 << 30, quota_below={"*": 1 << 30}))
    [shelf], tenants = rig.shelves, 20
    for number in range(tenants):
        rig.store(rig.namespace(PAGE, tenant=f"t{number}"), chain_of(number, 1))
    await rig.settled()
    asked()
    shelf.slots._evict(shelf.slots._of_size(PAGE), 10, keep_ends=False)
    assert (shelf.slots.evicted_blocks, blocks(rig)) == (10, 10)
    assert 0 < asked() <= tenants + 10
    await rig.close()
