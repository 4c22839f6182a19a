"""NVMe to DRAM: shared reads, long runs in slices of the loop, and blocks that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from cache_rig import in_slices
from chains import chain_of, key_of
from memory_disks import MemoryDisk
from played import Clock, on_clock
from tier_rig import TierRig

from tiercache.daemon.tiers.dram import promotion, reads
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.nvme.disk.queue import QUEUE_LIMITS, DiskPriority
from tiercache.daemon.tiers.nvme.moves import shelf_source

PAGE = 4096


async def below(clock: Clock, *chains: bytes) -> tuple[TierRig, MemoryDisk, Namespace]:
    """Chains that are on the disk, and not in DRAM."""
    disk = MemoryDisk(0, clock, segments=400)
    rig = await TierRig(Path("/nowhere"), disks=[disk]).open()
    space = rig.namespace(PAGE)
    for chain in chains:
        for first in range(0, len(chain) // 16, 512):
            rig.store(space, chain[: 16 * (first + 512)], first)
        await rig.settled()
    rig.forget_dram()
    disk.read.clear()
    return rig, disk, space


@on_clock
async def test_leases_of_one_prefix_share_its_reads_and_go_on_without_the_first(clock: Clock) -> None:
    chain = chain_of("a", 40)
    rig, disk, space = await below(clock, chain)
    leases = [rig.match([space], chain[: 16 * blocks]) for blocks in (40, 25, 40)]
    assert leases[0] is not None
    rig.cache.reads.release(rig.owner, leases[0].lease_id)
    await rig.until(lambda: not rig.cache.reads.growing.leases)
    assert [rig.read(lease, space) for lease in leases[1:] if lease] == [25, 40]
    assert len(disk.read) == len(set(disk.read)) == rig.tier.stats()["promoted_blocks"] == 40
    rig.check()
    await rig.close()


@on_clock
async def test_a_run_longer_than_the_disks_queue_comes_up_whole(clock: Clock) -> None:
    """With and without a client that waits for it, and never many blocks in one turn of the event loop."""
    blocks = QUEUE_LIMITS[DiskPriority.PREFETCH] + 1000
    chain = chain_of("a", blocks)
    rig, disk, space = await below(clock, chain)
    for holds in (True, False):
        rig.forget_dram()
        if holds:
            assert rig.match([space], chain) is not None
        else:
            rig.cache.prefetch(rig.owner, [space], chain)
        assert disk.queue is not None
        assert 0 < disk.queue.in_flight <= promotion.BATCHES_AT_ONCE * promotion.BATCH
        await rig.until(lambda: not rig.cache.reads.growing.leases)
        assert rig.cache.match(rig.owner, [space], chain, 0.0).dram == blocks
        for lease in list(rig.cache.reads.leases.values()):
            assert rig.read(lease, space) == blocks
    rig.check()
    await rig.close()


@on_clock
async def test_a_chain_is_looked_up_in_a_slice_of_its_own_while_that_may_take_a_walk(clock: Clock) -> None:
    """Up to its root, in each directory; and a lease may have a chain in each of 256 namespaces."""
    chain, flushed = chain_of("a", 3), chain_of("b", 3)
    rig, _, space = await below(clock, chain, flushed)
    [shelf] = rig.shelves
    shelf.drop(space, key_of(flushed, 0))
    for slices in (2, 1):
        found, took = in_slices(rig.tier.sources.parts(space, chain, range(3)), lambda: None)
        assert (found.parts[0].numbers, took) == (range(3), slices)
        await rig.until(lambda: not rig.tier.unlinking)
    await rig.close()


@on_clock
async def test_so_many_prefetches_are_under_way_at_a_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease beyond the limit gets the blocks that are in DRAM, and promotes nothing."""
    monkeypatch.setattr(reads, "MAX_PREFETCHES", 2)
    chains = [chain_of(name, 4) for name in "abc"]
    rig, _, space = await below(clock, *chains)
    found = [rig.cache.prefetch(rig.owner, [space], chain).below for chain in chains]
    assert found == [4, 4, 4]
    assert [lease.keys for lease in rig.cache.reads.growing.leases.values()] == chains[:2]
    await rig.until(lambda: not rig.cache.reads.growing.leases)
    assert [rig.cache.match(rig.owner, [space], chain, 0).dram for chain in chains] == [4, 4, 0]
    rig.cache.prefetch(rig.owner, [space], chains[2])
    await rig.until(lambda: not rig.cache.reads.growing.leases)
    assert rig.cache.match(rig.owner, [space], chains[2], 0).dram == 4
    rig.check()
    await rig.close()


@on_clock
async def test_jobs_of_a_disk_that_goes_are_ended_in_slices(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a last search for what its lease wanted, and there may be thousands."""
    chains = [chain_of(name, 4) for name in "abcdef"]
    rig, disk, space = await below(clock, *chains)
    leases = [rig.match([space], chain) for chain in chains]
    growing = rig.cache.reads.growing.leases
    monkeypatch.setattr(promotion, "GROW_NS", 0)
    disk.hung = True
    rig.tier.promotion.give_up(rig.tier.sources.of(rig.shelves[0]))
    left = [len(growing)]
    while growing:
        await rig.work()
        left.append(len(growing))
    assert left == [6, 5, 4, 3, 2, 1, 0]
    assert [rig.read(lease, space) for lease in leases if lease] == [0] * 6
    disk.hung = False
    assert await rig.load_all([space], chains[0]) == 4
    rig.check()
    await rig.close()


@on_clock
async def test_an_unreadable_block_has_one_more_chance_and_so_many_are_remembered(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf_source, "MAX_UNREADABLE", 2)
    chains = [chain_of(name, 1) for name in "abc"]
    rig, disk, space = await below(clock, *chains)
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
