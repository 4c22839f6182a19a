"""The NVMe tier in this process: the end, and flushes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from chains import chain_of, key_of
from disk_troubles import hang
from played import play
from tier_rig import BLOCK_BYTES, TierRig

from tiercache.daemon.tiers.nvme import flushes

# --- the end --------------------------------------------------------------------------------------


def test_grace_is_used_for_what_is_dirty(tmp_path: Path) -> None:
    """Blocks that were never queued, those in the queue and those under way: each is written once."""

    async def scenario() -> None:
        rig = await TierRig(tmp_path, nvme_write_budget_bytes=1 << 40).open()
        space, chains = rig.namespace(), [chain_of(str(number), 30) for number in range(5)]
        rig.tier._budget._level = 0  # nothing is admitted
        for chain in chains[:3]:
            rig.store(space, chain)
        await rig.settled()
        assert rig.tier.stats()["blocks"] == 0
        rig.tier._budget._level = rig.tier._budget._depth
        for chain in chains[3:]:
            rig.store(space, chain)
        gate = rig.disks[rig.dirs[0]].gate
        rig.store(space, chain_of("first", 1))
        await rig.settled()
        gate.clear()
        rig.store(space, chain_of("second", 3))
        rig.tier._writes.pump()
        assert rig.tier._writes.in_flight_bytes == 3 * BLOCK_BYTES
        asyncio.get_running_loop().call_later(0.1, gate.set)
        assert await rig.close(grace_s=30) == 0
        again = await TierRig(tmp_path).open()
        space = again.namespace()
        assert [await again.load(space, chain) for chain in chains] == [30] * 5
        again.check()
        await again.close()

    play(scenario)


def test_no_grace_loses_blocks_and_nothing_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        space, chain = rig.namespace(), chain_of("a", 200)
        rig.store(space, chain)
        await rig.close(grace_s=0)
        again = await TierRig(tmp_path).open()
        assert await again.load(again.namespace(), chain) <= 200
        again.check()
        await again.close()

    play(scenario)


# --- flushes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("moment", ["writing", "promoting", "loading"])
def test_nothing_flushed_comes_back(tmp_path: Path, moment: str, by_key: bool) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        space, chain = rig.namespace(), chain_of("a", 60)
        key = key_of(chain, 10) if by_key else b""
        most = 10 if by_key else 0
        disk = rig.disks[rig.dirs[0]]
        rig.store(space, chain_of("other", 3))
        await rig.settled()
        rig.store(space, chain)
        lease = None
        if moment == "writing":
            disk.gate.clear()
            rig.tier._writes.pump()
            assert rig.tier._writes.in_flight_bytes
        else:
            await rig.settled()
        if moment == "promoting":
            rig.forget_dram()
            disk.gate.clear()
            lease = rig.match([space], chain)
            assert lease is not None
        if moment == "loading":
            await rig.close()
            rig = TierRig(tmp_path)
            await rig.tier.open()
            assert rig.shelves[0].loading
            space = rig.namespace()
        flushed = asyncio.ensure_future(rig.flush(key))
        await asyncio.sleep(0)
        disk.gate.set()
        assert await flushed
        if lease is not None:
            await rig.until(lambda: not rig.cache.reads.growing.leases)
            assert rig.read(lease, space) <= most
        await rig.settled()
        await rig.loaded()
        assert await rig.load(space, chain) <= most
        rig.check()
        await rig.crash()
        again = await TierRig(tmp_path).open()
        assert await again.load(again.namespace(), chain) <= most
        again.check()
        await again.close()

    play(scenario)


def test_a_flush_before_the_directories_are_open_counts(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, disks=2).open()
        space, chains = rig.namespace(), [chain_of(str(number), 5) for number in range(8)]
        for chain in chains:
            rig.store(space, chain)
        await rig.settled()
        await rig.close()
        rig = TierRig(tmp_path, disks=2)
        flushed = asyncio.ensure_future(rig.flush())  # of all: its client may know no namespace yet
        await asyncio.sleep(0)
        await rig.tier.open()
        assert await flushed
        await rig.loaded()
        space = rig.namespace()
        assert [await rig.load(space, chain) for chain in chains] == [0] * 8
        rig.check()
        await rig.crash()
        again = await TierRig(tmp_path, disks=2).open()
        assert again.tier.stats()["blocks"] == 0
        await again.close()

    play(scenario)


def test_a_flush_that_a_disk_does_not_note_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(flushes, "FLUSH_S", 0.2)
        rig = await TierRig(tmp_path).open()
        rig.store(rig.namespace(), chain_of("a", 2))
        await rig.settled()
        gate = hang(rig.shelves[0].catalog)
        assert not await rig.flush()
        gate.set()
        await rig.committed()
        await rig.close()

    play(scenario)


def test_flushes_by_key_leave_nothing_behind(tmp_path: Path) -> None:
    """A tombstone is deleted once its row is gone, not only at the next start."""

    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        space = rig.namespace()
        for number in range(20):
            chain = chain_of(str(number % 3), 6)
            rig.store(space, chain)
            await rig.settled()
            assert await rig.flush(key_of(chain, number % 6))
        await rig.committed()
        await rig.until(lambda: not rig.shelves[0].registry.tombstones)
        rig.check()
        await rig.close()
        again = TierRig(tmp_path)
        await again.tier.open()
        assert again.shelves[0].registry.tombstones == {}
        await again.loaded()
        await again.close()

    play(scenario)
