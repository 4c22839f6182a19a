"""Quotas: a tenant at its limit makes room among its own blocks, and only there."""

from __future__ import annotations

from pathlib import Path

from chains import chain_of
from memory_disks import MemoryDisk
from played import Clock, on_clock
from tier_rig import TierRig

from tiercache.daemon.cache import CacheLimits
from tiercache.daemon.tiers.dram.space import Namespace

PAGE = 4096
NOWHERE = Path("/nowhere")


async def rig_with(disks: list[MemoryDisk], quota: dict[str, int]) -> TierRig:
    """Quotas in blocks, by name."""
    limits = CacheLimits(quota_below={name: blocks * PAGE for name, blocks in quota.items()})
    return await TierRig(NOWHERE, disks=disks, limits=limits).open()


async def store(rig: TierRig, space: Namespace, chain: bytes) -> None:
    rig.store(space, chain)
    await rig.settled()
    rig.check()


def below(rig: TierRig, *spaces: Namespace) -> int:
    return sum(rig.tier.blocks_of(space.number) for space in spaces)


@on_clock
async def test_what_does_not_fit_is_not_written_and_counted(clock: Clock) -> None:
    rig = await rig_with([MemoryDisk(0, clock)], {"a": 10})
    a, chain = rig.namespace(PAGE, tenant="a"), chain_of("long", 30)
    await store(rig, a, chain[: 16 * 10])
    await store(rig, a, chain)  # room for its blocks is not made of those before them
    assert below(rig, a) == 10
    refused = rig.cache.space.quotas_below.refused[a.account_below]
    assert refused == rig.tier.stats()["skipped_by_quota"] > 0
    assert await rig.load(a, chain) == 30, "DRAM has all of it"
    rig.forget_dram()
    assert await rig.load(a, chain) == 10
    await rig.close()


@on_clock
async def test_a_full_disk_does_not_make_others_pay(clock: Clock) -> None:
    """The tenant goes on storing at its limit while no slot is free: it replaces its own blocks."""
    rig = await rig_with([MemoryDisk(0, clock, segments=8)], {"a": 8})
    a, b = rig.namespace(PAGE, tenant="a"), rig.namespace(PAGE, tenant="b")
    for number in range(8):
        await store(rig, b, chain_of(f"b{number}", 10))
    settled = below(rig, b)
    for number in range(12):
        await store(rig, a, chain_of(f"a{number}", 5))
    assert below(rig, a) <= 8
    # It lost what the tenant was entitled to, and loses no more, however much the tenant stores.
    lost = settled - below(rig, b)
    for number in range(12, 24):
        await store(rig, a, chain_of(f"a{number}", 5))
    assert below(rig, a) <= 8
    assert settled - below(rig, b) == lost
    await rig.close()


@on_clock
async def test_a_quota_that_was_made_smaller_holds_after_the_next_store(clock: Clock) -> None:
    disks = [MemoryDisk(0, clock)]
    rig = await rig_with(disks, {"a": 128})
    await store(rig, rig.namespace(PAGE, tenant="a"), chain_of("first", 100))
    await rig.close()
    rig = await rig_with(disks, {"a": 8})
    a = rig.namespace(PAGE, tenant="a")
    assert below(rig, a) == 100
    await store(rig, a, chain_of("second", 4))
    assert below(rig, a) <= 8
    rig.forget_dram()
    assert await rig.load(a, chain_of("second", 4)) == 4
    await rig.close()
