"""The NVMe tier in this process: blocks go down and come up, within bounds."""

from __future__ import annotations

import asyncio
from pathlib import Path

from chains import chain_of, key_of
from played import play
from tier_rig import TierRig

from tiercache.daemon.tiers import promotion
from tiercache.daemon.tiers.nvme.disk.health import WriteHealth
from tiercache.daemon.tiers.nvme.moves import offers
from tiercache.daemon.tiers.nvme.moves.budget import WriteBudget

# --- there and back -------------------------------------------------------------------------------


def test_blocks_go_down_and_come_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, disks=2).open()
        space = rig.namespace()
        chains: list[bytes] = []
        while len(chains) < 8 or any(space.number not in one.index.tables for one in rig.shelves):
            assert len(chains) < 40, "both disks have their share"
            chains.append(chain_of(str(len(chains)), 10))
            rig.store(space, chains[-1])
            await rig.settled()
        rig.check()
        rig.forget_dram()
        assert [await rig.load(space, chain) for chain in chains] == [10] * len(chains)
        rig.check()
        await rig.close()

    play(scenario)


def test_two_leases_of_one_prefix_share_its_reads(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        space, chain = rig.namespace(), chain_of("a", 40)
        rig.store(space, chain)
        await rig.settled()
        rig.forget_dram()
        leases = [rig.match([space], chain[: 16 * blocks]) for blocks in (40, 25, 40)]
        await rig.until(lambda: not rig.cache.reads.growing.leases)
        assert [rig.read(lease, space) for lease in leases if lease] == [40, 25, 40]
        assert rig.tier.stats()["promoted_blocks"] == 40
        rig.check()
        await rig.close()

    play(scenario)


def test_a_lease_goes_on_when_the_one_that_began_is_released(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        space, chain = rig.namespace(), chain_of("a", 100)
        rig.store(space, chain)
        await rig.settled()
        rig.forget_dram()
        disk = rig.disks[rig.dirs[0]]
        disk.gate.clear()
        first, second = rig.match([space], chain), rig.match([space], chain)
        assert first is not None
        assert second is not None
        rig.cache.reads.release(rig.owner, first.lease_id)
        disk.gate.set()
        await rig.until(lambda: not rig.cache.reads.growing.leases)
        assert rig.read(second, space) == 100
        rig.check()
        await rig.close()

    play(scenario)


def test_an_arena_smaller_than_a_window_gives_short_loads(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        rig.store(rig.namespace(), chain_of("a", 60))
        await rig.settled()
        await rig.close()
        rig = await TierRig(tmp_path, arena_regions=1).open()  # 32 frames
        space, chain = rig.namespace(), chain_of("a", 60)
        for _ in range(3):
            assert 0 < await rig.load(space, chain) <= 32
            rig.check()
        leases = [rig.match([space], chain_of("a", 60)) for _ in range(4)]
        await rig.until(lambda: not rig.cache.reads.growing.leases)
        assert all(0 < rig.read(lease, space) <= 32 for lease in leases if lease)
        rig.check()
        await rig.close()

    play(scenario)


def test_promotion_amid_stores_evictions_and_drops_of_the_same_chain(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, arena_regions=2).open()  # 64 frames
        space, chain = rig.namespace(), chain_of("a", 40)
        rig.store(space, chain)
        await rig.settled()
        for round_ in range(12):
            rig.forget_dram()
            lease = rig.match([space], chain)
            assert lease is not None
            if round_ % 4 == 0:
                rig.store(space, chain)  # all of them are pending
            elif round_ % 4 == 1:
                rig.store(space, chain_of(f"other {round_}", 50))
            elif round_ % 4 == 2:
                shelf_ = rig.shelves[0]
                assert shelf_.has(space, key_of(chain, 20))
                shelf_.drop(space, key_of(chain, 20))
            else:
                rig.forget_dram()
            await rig.until(lambda: not rig.cache.reads.growing.leases)
            rig.read(lease, space)
            rig.check()
            await rig.settled()
            got = await rig.load(space, chain)
            assert got in (20, 40)
            if got < 40:
                rig.store(space, chain, first=got)
                await rig.settled()
            rig.check()
        await rig.close()

    play(scenario)


# --- other directories than before ----------------------------------------------------------------


def test_chains_are_found_whatever_the_order_of_the_directories(tmp_path: Path) -> None:
    async def scenario() -> None:
        dirs = [tmp_path / name for name in ("one", "two", "three")]
        rig = await TierRig(tmp_path, dirs=dirs).open()
        space, chains = rig.namespace(), [chain_of(str(number), 5) for number in range(24)]
        for chain in chains:
            rig.store(space, chain)
        await rig.settled()
        homes = [next(one.directory.path for one in rig.shelves if one.has(space, chain[:16])) for chain in chains]
        assert set(homes) == set(dirs)
        await rig.close()
        for order in ([2, 0, 1], [1, 0], [0, 1, 2, 3]):
            listed = [(*dirs, tmp_path / "four")[number] for number in order]
            again = await TierRig(tmp_path, dirs=listed).open()
            space = again.namespace()
            found = [await again.load(space, chain) for chain in chains]
            assert found == [5 if home in listed else 0 for home in homes]
            again.check()
            await again.close()

    play(scenario)


# --- bounds ---------------------------------------------------------------------------------------


def test_a_match_of_many_blocks_offers_some_at_a_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, arena_regions=16, nvme_write_budget_bytes=1 << 40).open()
        space, chain = rig.namespace(4096), chain_of("a", 3000)
        rig.tier._budget._level = 0
        for first in range(0, 3000, 500):
            rig.store(space, chain[: 16 * (first + 500)], first=first)
        await rig.settled()
        rig.tier._budget._level = 1 << 30
        rounds = 0
        while rig.tier.stats()["blocks"] < 3000:
            assert await rig.load(space, chain) == 3000
            assert rig.tier.stats()["write_queue_blocks"] <= offers.MATCHED_AT_ONCE
            await rig.settled()
            rounds += 1
            assert rounds < 20
        rig.check()
        await rig.close()

    play(scenario)


def test_what_the_budget_skips_orphans_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, nvme_write_budget_bytes=100 << 30).open()
        space, chain = rig.namespace(), chain_of("a", 20)
        budget = rig.tier._budget
        rig.store(space, chain[: 16 * 8])
        await rig.settled()
        budget._level = 0.0
        budget._rate = 0.0
        rig.store(space, chain[: 16 * 12], first=8)
        await rig.settled()
        budget._level = budget._depth
        rig.store(space, chain, first=12)
        await rig.settled()
        stats = rig.tier.stats()
        assert stats["blocks"] == 8
        assert stats["skipped_by_budget"] >= 1
        assert stats["skipped_without_parent"] >= 8
        assert await rig.load(space, chain) == 20  # asked for again: now all of it is written
        await rig.settled()
        assert rig.tier.stats()["blocks"] == 20
        rig.check()
        await rig.crash()
        again = await TierRig(tmp_path).open()
        assert again.shelves[0].stats()["orphan_rows"] == 0
        assert await again.load(again.namespace(), chain) == 20
        await again.close()

    play(scenario)


def test_the_budget_is_a_bucket_of_two_hours() -> None:
    now = [0.0]
    budget = WriteBudget(12 * 1000, lambda: now[0])  # a bucket of 1000 bytes
    assert budget.admits(400, asked_again=False)
    budget.charge(400)
    assert budget.admits(500, asked_again=False), "more than half is left"
    budget.charge(200)
    assert not budget.admits(100, asked_again=False)
    assert budget.admits(400, asked_again=True)
    assert not budget.admits(401, asked_again=True)
    budget.charge(400)
    assert budget.fullness == 0
    now[0] = 3600.0
    assert budget.fullness == 0.5
    now[0] = 10**9
    assert budget.fullness == 1
    assert budget.admits(5000, asked_again=True), "a block larger than the bucket goes when that is full"
    budget.charge(5000)
    assert not budget.admits(1, asked_again=True)
    assert WriteBudget(0).admits(1 << 50, asked_again=False)


def test_writing_pauses_longer_after_each_failure() -> None:
    now = [0.0]
    health = WriteHealth("a disk", lambda: now[0])
    for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
        assert health.may_write
        health.failed("EIO")
        health.failed("EIO")  # was already under way: it counts, and changes nothing
        health.worked()
        assert not health.may_write
        now[0] += pause_s - 0.5
        assert not health.may_write
        now[0] += 0.5
    assert health.failures == 16
    health.worked()
    assert health.reason == ""
    health.failed("EIO")
    now[0] += 1
    assert health.may_write


def test_jobs_that_wait_end_when_what_they_wait_for_does(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        space, chain = rig.namespace(), chain_of("a", 10)
        rig.store(space, chain)
        await rig.settled()
        rig.forget_dram()
        writer = rig.cache.reserve(rig.owner, space, b"", chain[: 16 * 4], 3600)  # a client that then stops
        lease = rig.match([space], chain)
        assert lease is not None
        for _ in range(20):
            rig.cache.work()
            await asyncio.sleep(0.001)
        assert lease.lease_id in rig.cache.reads.growing.leases
        rig.cache.writes.abort(rig.owner, writer.lease_id, finished=True)
        await rig.until(lambda: lease.lease_id not in rig.cache.reads.growing.leases, 10 * promotion.LOOK_AGAIN_S)
        assert rig.read(lease, space) == 0
        assert await rig.load(space, chain) == 10
        rig.check()
        await rig.close()

    play(scenario)
