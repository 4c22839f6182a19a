"""The NVMe tier in this process: what it decides, and what becomes of blocks when disks fail."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tier_rig import BLOCK_BYTES, TierRig, key_of, keys_of, play

from tiercache.daemon.nvme import promotion, recovery, shelf, slots, tier
from tiercache.daemon.nvme.budget import WriteBudget
from tiercache.daemon.nvme.catalog import Catalog
from tiercache.daemon.nvme.health import WriteHealth
from tiercache.daemon.nvme.rows import Batch
from tiercache.daemon.space import Namespace


def fail(name: str, number: int, code: int = errno.EIO) -> Callable[[str, int], int | None]:
    """A disk's hook: the n-th call of that name fails."""
    left = number

    def hook(called: str, size: int) -> int | None:
        nonlocal left
        if called == name:
            left -= 1
            if left == -1:
                raise OSError(code, os.strerror(code))
        return None

    return hook


def hang(catalog: Catalog) -> threading.Event:
    """The database's disk hangs until the event is set."""
    gate, commit = threading.Event(), catalog._commit

    def hanging(db: Any, batch: Any) -> str:
        assert gate.wait(30)
        return commit(db, batch)

    catalog._commit = hanging  # type: ignore[method-assign]
    return gate


# --- there and back ---------------------------------------------------------------------------------


def test_blocks_go_down_and_come_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, disks=2).open()
        space = rig.namespace()
        chains = [keys_of(str(number), 10) for number in range(8)]
        for chain in chains:
            rig.store(space, chain)
        await rig.settled()
        rig.check()
        rig.forget_dram()
        assert [await rig.load(space, chain) for chain in chains] == [10] * 8
        rig.check()
        assert all(one.index.tables[space.number].blocks for one in rig.shelves), "both disks have their share"
        await rig.close()

    play(scenario)


def test_two_leases_of_one_prefix_share_its_reads(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        space, chain = rig.namespace(), keys_of("a", 40)
        rig.store(space, chain)
        await rig.settled()
        rig.forget_dram()
        leases = [rig.match([space], chain[: 16 * blocks]) for blocks in (40, 25, 40)]
        await rig.until(lambda: not rig.cache.reads.growing)
        assert [rig.read(lease, space) for lease in leases if lease] == [40, 25, 40]
        assert rig.tier.stats()["promoted_blocks"] == 40
        rig.check()
        await rig.close()

    play(scenario)


def test_a_lease_goes_on_when_the_one_that_began_is_released(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        space, chain = rig.namespace(), keys_of("a", 100)
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
        await rig.until(lambda: not rig.cache.reads.growing)
        assert rig.read(second, space) == 100
        rig.check()
        await rig.close()

    play(scenario)


def test_an_arena_smaller_than_a_window_gives_short_loads(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        rig.store(rig.namespace(), keys_of("a", 60))
        await rig.settled()
        await rig.close()
        rig = await TierRig(tmp_path, arena_regions=1).open()  # 32 frames
        space, chain = rig.namespace(), keys_of("a", 60)
        for _ in range(3):
            assert 0 < await rig.load(space, chain) <= 32
            rig.check()
        leases = [rig.match([space], keys_of("a", 60)) for _ in range(4)]
        await rig.until(lambda: not rig.cache.reads.growing)
        assert all(0 < rig.read(lease, space) <= 32 for lease in leases if lease)
        rig.check()
        await rig.close()

    play(scenario)


def test_promotion_amid_stores_evictions_and_drops_of_the_same_chain(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, arena_regions=2).open()  # 64 frames
        space, chain = rig.namespace(), keys_of("a", 40)
        rig.store(space, chain)
        await rig.settled()
        for round_ in range(12):
            rig.forget_dram()
            lease = rig.match([space], chain)
            assert lease is not None
            if round_ % 4 == 0:
                rig.store(space, chain)  # all of them are pending
            elif round_ % 4 == 1:
                rig.store(space, keys_of(f"other {round_}", 50))
            elif round_ % 4 == 2:
                shelf_ = rig.shelves[0]
                assert shelf_.has(space, key_of(chain, 20))
                shelf_.drop(space, key_of(chain, 20))
            else:
                rig.forget_dram()
            await rig.until(lambda: not rig.cache.reads.growing)
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


# --- every error path -------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_the_nth_write_fails(tmp_path: Path, code: int) -> None:
    async def scenario() -> None:
        for number in range(12):
            root = tmp_path / str(number)
            rig = await TierRig(root).open()
            disk, space, chain = rig.disks[rig.dirs[0]], rig.namespace(), keys_of("a", 30)
            disk.hook = fail("pwritev", number, code)
            rig.store(space, chain)
            await rig.settled()
            rig.check()
            disk.hook = lambda name, size: None
            rig.forget_dram()
            assert await rig.load(space, chain) <= 30
            rig.check()
            await rig.close()

    play(scenario)


def test_the_nth_read_fails(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        disk, space, chain = rig.disks[rig.dirs[0]], rig.namespace(), keys_of("a", 30)
        rig.store(space, chain)
        await rig.settled()
        disk.calls.clear()
        rig.forget_dram()
        assert await rig.load(space, chain) == 30
        for number in range(sum(name == "preadv" for name, _, _ in disk.calls) + 1):
            rig.forget_dram()
            disk.hook = fail("preadv", number)
            assert await rig.load(space, chain) <= 30
            rig.check()
            disk.hook = lambda name, size: None
            assert await rig.load(space, chain) == 30, "what failed once may be good the next time"
            rig.check()
        await rig.close()

    play(scenario)


def test_short_reads_and_writes_are_completed(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        disk, space, chain = rig.disks[rig.dirs[0]], rig.namespace(), keys_of("a", 20)
        disk.hook = lambda name, size: max(4096, size // 3) if name != "fallocate" else None
        rig.store(space, chain)
        await rig.settled()
        rig.forget_dram()
        assert await rig.load(space, chain) == 20
        rig.check()
        await rig.close()

    play(scenario)


def test_a_block_that_cannot_be_read_twice_is_forgotten(tmp_path: Path) -> None:
    """Else it would be found, waited for and missed for ever, and never written again."""

    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        disk, space, chain = rig.disks[rig.dirs[0]], rig.namespace(), keys_of("a", 10)
        rig.store(space, chain)
        await rig.settled()
        stored = rig.shelves[0].find(space, key_of(chain, 5))
        assert stored is not None
        os.truncate(rig.shelves[0].directory.segment_path(1), stored.slot & (1 << 48) - 1)
        for _ in range(2):
            rig.forget_dram()
            assert await rig.load(space, chain) == 5
            rig.check()
        await rig.until(lambda: rig.tier.stats()["blocks"] == 5)
        disk.hook = fail("pwritev", 10**9)
        await rig.close()

    play(scenario)


def test_a_bad_place_on_the_disk_does_not_stop_writing(tmp_path: Path) -> None:
    """The free list hands out the last slot first: one that fails must not come back at once."""

    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        disk, space = rig.disks[rig.dirs[0]], rig.namespace()
        rig.store(space, keys_of("a", 1))
        await rig.settled()
        bad = {3 * BLOCK_BYTES}

        def hook(name: str, size: int) -> int | None:
            if name == "pwritev" and disk.calls[-1][2] in bad:
                raise OSError(errno.EIO, "bad sector")
            return None

        disk.hook = hook
        health = rig.shelves[0].health
        for round_ in range(8):
            rig.store(space, keys_of(str(round_), 1))
            await rig.settled()
            health.off_until_s = 0.0  # the pause is over
        assert rig.tier.stats()["write_failed_blocks"] == 1
        assert rig.tier.stats()["blocks"] == 8
        rig.check()
        await rig.close()

    play(scenario)


# --- room -------------------------------------------------------------------------------------------


def test_no_room_for_a_segment_and_then_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(slots, "GROW_AGAIN_S", 0.05)
        rig = await TierRig(tmp_path).open()
        disk, space = rig.disks[rig.dirs[0]], rig.namespace()

        def no_room(name: str, size: int) -> int | None:
            if name == "fallocate":
                raise OSError(errno.ENOSPC, "full")
            return None

        disk.hook = no_room
        rig.store(space, keys_of("a", 5))
        await rig.until(lambda: bool(rig.tier.reasons()))
        disk.hook = lambda name, size: None
        rig.shelves[0].health.off_until_s = 0.0
        await rig.settled()
        assert rig.tier.stats()["blocks"] == 5, "what waited is written when there is room"
        disk.hook = no_room
        for number in range(6):
            rig.store(space, keys_of(str(number), 20))
            await rig.settled()
        assert 24 <= rig.tier.stats()["blocks"] <= 32, "one segment's worth, the youngest"
        assert any("no further segment" in reason for reason in rig.tier.reasons())
        assert rig.shelves[0].health.reason == "", "that is no reason to write nothing"
        rig.check()
        disk.hook = lambda name, size: None
        for number in range(6):
            rig.store(space, keys_of(f"later {number}", 20))
            await rig.settled()
        assert rig.tier.stats()["blocks"] > 32
        assert rig.tier.reasons() == []
        rig.check()
        await rig.close()

    play(scenario)


def test_a_full_disk_gives_up_no_more_than_it_needs(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, arena_regions=16, nvme_bytes=16 << 20).open()  # 7 segments of 32 slots
        space = rig.namespace()
        for number in range(20):
            rig.store(space, keys_of(str(number), 20))
            await rig.settled()
        slots = 7 * 32
        assert rig.tier.stats()["blocks"] >= slots - 64 - 20
        rig.check()
        # A catalog that does not answer must not cost the whole directory.
        one = rig.shelves[0]
        before, gate = rig.tier.stats()["blocks"], hang(one.catalog)
        rig.store(space, keys_of("more", 60))
        for _ in range(500):
            rig.cache.work()
        assert rig.tier.stats()["blocks"] >= before - 128
        gate.set()
        await rig.settled()
        rig.check()
        await rig.close()

    play(scenario)


def test_nothing_is_evicted_for_a_catalog_that_cannot_write(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, arena_regions=16, nvme_bytes=16 << 20).open()
        space = rig.namespace()
        for number in range(15):
            rig.store(space, keys_of(str(number), 20))
            await rig.settled()
        one = rig.shelves[0]
        before = rig.tier.stats()["blocks"]
        commit = one.catalog._commit
        one.catalog._commit = lambda db, batch: "database or disk is full"  # type: ignore[method-assign]
        rig.store(space, keys_of("more", 40))
        await rig.until(lambda: bool(one.catalog.error))
        for _ in range(300):
            rig.cache.work()
            await asyncio.sleep(0.001)
        assert rig.tier.stats()["blocks"] >= before - 64 - 40
        assert any("full" in reason for reason in rig.tier.reasons())
        assert one.slots.lost > 0, "slots whose old row is still there are not used"
        one.catalog._commit = commit  # type: ignore[method-assign]
        await rig.until(lambda: not one.catalog.error and one.slots.lost == 0)
        await rig.settled()
        rig.check()
        await rig.close()

    play(scenario)


def test_another_size_gets_a_segment_of_a_full_disk(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, arena_regions=16, nvme_bytes=16 << 20).open()
        small, large = rig.namespace(), rig.namespace(4 * BLOCK_BYTES, rank=1)
        for number in range(15):
            rig.store(small, keys_of(str(number), 20))
            await rig.settled()
        rig.store(large, keys_of("large", 6))
        await rig.settled()
        assert rig.shelves[0].index.tables[large.number].blocks == 6
        rig.check()
        rig.forget_dram()
        assert await rig.load(large, keys_of("large", 6)) == 6
        assert rig.shelves[0].index.tables[small.number].blocks > 20, "one segment was emptied, not all"
        rig.check()
        await rig.close()
        again = await TierRig(tmp_path, arena_regions=16, nvme_bytes=16 << 20).open()
        assert await again.load(again.namespace(4 * BLOCK_BYTES, rank=1), keys_of("large", 6)) == 6
        again.check()
        await again.close()

    play(scenario)


def test_a_block_that_no_segment_holds_stops_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, segment_bytes=2 << 20, arena_regions=8).open()
        one = rig.shelves[0]
        one.directory.segment_bytes = 1 << 20  # as a directory from a life with another setting has it
        large, small = rig.namespace(2 << 20, rank=1), rig.namespace()
        rig.store(large, keys_of("large", 2))
        rig.store(small, keys_of("small", 5))
        await rig.settled()
        assert rig.tier.stats()["blocks"] == 5
        assert rig.tier.stats()["skipped_too_large"] >= 1
        await rig.close()

    play(scenario)


@pytest.mark.parametrize("nvme_bytes", [16 << 20, (16 << 20) + 12345, (64 << 20) + 1])
def test_a_cap_below_one_segment_gets_smaller_segments(tmp_path: Path, nvme_bytes: int) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, nvme_bytes=nvme_bytes, segment_bytes=1 << 30).open()
        space, chain = rig.namespace(), keys_of("a", 10)
        rig.store(space, chain)
        await rig.settled()
        rig.forget_dram()
        assert await rig.load(space, chain) == 10
        used = sum(path.stat().st_blocks * 512 for path in rig.dirs[0].rglob("*") if path.is_file())
        assert used <= nvme_bytes
        await rig.close()

    play(scenario)


def test_a_smaller_cap_takes_segments_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, nvme_bytes=64 << 20).open()
        space = rig.namespace()
        chains = [keys_of(str(number), 20) for number in range(20)]
        for chain in chains:
            rig.store(space, chain)
            await rig.settled()
        await rig.close()
        again = await TierRig(tmp_path, nvme_bytes=16 << 20).open()
        used = sum(path.stat().st_blocks * 512 for path in again.dirs[0].rglob("*") if path.is_file())
        assert used <= 16 << 20
        space = again.namespace()
        assert sum([await again.load(space, chain) for chain in chains]) > 0
        await again.settled()
        again.check()
        await again.close()

    play(scenario)


# --- one that cannot write stops no other -----------------------------------------------------------


def test_a_disk_that_cannot_write_stops_no_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, disks=2, arena_regions=16).open()
        space = rig.namespace()
        broken, well = rig.shelves
        broken.loading = True  # as good as any reason
        chains = [keys_of(str(number), 8) for number in range(16)]
        for chain in chains:
            rig.store(space, chain)
        on_broken = [chain for chain in chains if rig.tier._placement.home(key_of(chain, 0)) is broken]
        assert 0 < len(on_broken) < 16
        await rig.until(lambda: well.stats()["blocks"] == 8 * (16 - len(on_broken)))
        assert rig.tier.stats()["write_queue_blocks"] == 8 * len(on_broken)
        broken.loading = False
        await rig.settled()
        assert rig.tier.stats()["blocks"] == 128
        assert rig.tier.stats()["skipped_without_parent"] == 0
        rig.check()
        await rig.close()

    play(scenario)


def test_a_hung_disk_is_one_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(shelf, "OFFLINE_AGE_S", 0.3)
        rig = await TierRig(tmp_path, disks=2, arena_regions=16).open()
        space = rig.namespace()
        chains = [keys_of(str(number), 12) for number in range(12)]
        for chain in chains:
            rig.store(space, chain)
        await rig.settled()
        hung = rig.shelves[0]
        on_hung = [chain for chain in chains if hung.has(space, key_of(chain, 0))]
        rig.forget_dram()
        gate = rig.disks[hung.directory.path].gate
        gate.clear()
        lease = rig.match([space], on_hung[0])
        other = rig.match([space], on_hung[0])
        assert lease is not None
        assert other is not None
        # The other disk's blocks come up meanwhile, and its writes go on.
        for chain in chains:
            if chain not in on_hung:
                assert await rig.load(space, chain) == 12
        await rig.until(lambda: lease.lease_id not in rig.cache.reads.growing)
        await rig.until(lambda: other.lease_id not in rig.cache.reads.growing)
        assert rig.read(lease, space) == rig.read(other, space) == 0
        assert rig.match([space], on_hung[0]) is None, "offline: a miss at once"
        assert any("has been under way" in reason for reason in rig.tier.reasons())
        # What it was reading can be stored again, and is not written to where it hangs.
        rig.store(space, on_hung[0])
        assert await rig.load(space, on_hung[0]) == 12
        new = [keys_of(f"new {number}", 4) for number in range(6)]
        for chain in new:
            rig.store(space, chain)
        await rig.until(lambda: all(rig.shelves[1].has(space, key_of(chain, 3)) for chain in new))
        assert rig.cache.check_integrity() == []
        gate.set()
        await rig.until(lambda: not hung.offline and hung.queue.in_flight == 0)
        await rig.settled()
        rig.forget_dram()
        assert [await rig.load(space, chain) for chain in on_hung] == [12] * len(on_hung)
        rig.check()
        await rig.close()

    play(scenario)


def test_the_end_does_not_wait_for_a_hung_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(tier, "CLOSE_S", 0.2)
        rig = await TierRig(tmp_path, disks=2).open()
        space = rig.namespace()
        gate = rig.disks[rig.dirs[0]].gate
        gate.clear()
        for chain in (keys_of(str(number), 12) for number in range(6)):
            rig.store(space, chain)
        assert await rig.tier.close(0.3) > 0
        gate.set()

    play(scenario)


# --- the end ----------------------------------------------------------------------------------------


def test_grace_is_used_for_what_is_dirty(tmp_path: Path) -> None:
    """Blocks that were never queued, those in the queue and those under way: each is written once."""

    async def scenario() -> None:
        rig = await TierRig(tmp_path, nvme_write_budget_bytes=1 << 40).open()
        space, chains = rig.namespace(), [keys_of(str(number), 30) for number in range(5)]
        rig.tier._budget._level = 0  # nothing is admitted
        for chain in chains[:3]:
            rig.store(space, chain)
        await rig.settled()
        assert rig.tier.stats()["blocks"] == 0
        rig.tier._budget._level = rig.tier._budget._depth
        for chain in chains[3:]:
            rig.store(space, chain)
        gate = rig.disks[rig.dirs[0]].gate
        rig.store(space, keys_of("first", 1))
        await rig.settled()
        gate.clear()
        rig.store(space, keys_of("second", 3))
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
        space, chain = rig.namespace(), keys_of("a", 200)
        rig.store(space, chain)
        await rig.close(grace_s=0)
        again = await TierRig(tmp_path).open()
        assert await again.load(again.namespace(), chain) <= 200
        again.check()
        await again.close()

    play(scenario)


# --- flushes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("moment", ["writing", "promoting", "loading"])
def test_nothing_flushed_comes_back(tmp_path: Path, moment: str, by_key: bool) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        space, chain = rig.namespace(), keys_of("a", 60)
        key = key_of(chain, 10) if by_key else b""
        most = 10 if by_key else 0
        disk = rig.disks[rig.dirs[0]]
        rig.store(space, keys_of("other", 3))
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
            await rig.until(lambda: not rig.cache.reads.growing)
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
        space, chains = rig.namespace(), [keys_of(str(number), 5) for number in range(8)]
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
        monkeypatch.setattr(tier, "FLUSH_S", 0.2)
        rig = await TierRig(tmp_path).open()
        rig.namespace()
        gate = hang(rig.shelves[0].catalog)
        assert not await rig.flush()
        gate.set()
        await rig.committed()
        await rig.close()

    play(scenario)


def test_flushes_by_key_leave_nothing_behind(tmp_path: Path) -> None:
    """A tombstone goes when the row that it is about is gone, not only at the next start."""

    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        space = rig.namespace()
        for number in range(20):
            chain = keys_of(str(number % 3), 6)
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


# --- other directories than before ------------------------------------------------------------------


def test_chains_are_found_whatever_the_order_of_the_directories(tmp_path: Path) -> None:
    async def scenario() -> None:
        dirs = [tmp_path / name for name in ("one", "two", "three")]
        rig = await TierRig(tmp_path, dirs=dirs).open()
        space, chains = rig.namespace(), [keys_of(str(number), 5) for number in range(24)]
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


# --- bounds -----------------------------------------------------------------------------------------


def test_a_match_of_many_blocks_offers_some_at_a_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, arena_regions=16, nvme_write_budget_bytes=1 << 40).open()
        space, chain = rig.namespace(4096), keys_of("a", 3000)
        rig.tier._budget._level = 0
        for first in range(0, 3000, 500):
            rig.store(space, chain[: 16 * (first + 500)], first=first)
        await rig.settled()
        rig.tier._budget._level = 1 << 30
        rounds = 0
        while rig.tier.stats()["blocks"] < 3000:
            assert await rig.load(space, chain) == 3000
            assert rig.tier.stats()["write_queue_blocks"] <= tier.MATCHED_AT_ONCE
            await rig.settled()
            rounds += 1
            assert rounds < 20
        rig.check()
        await rig.close()

    play(scenario)


def test_what_the_budget_skips_orphans_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, nvme_write_budget_bytes=100 << 30).open()
        space, chain = rig.namespace(), keys_of("a", 20)
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
        health.failed("EIO")  # under way meanwhile: counts, changes nothing
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
        space, chain = rig.namespace(), keys_of("a", 10)
        rig.store(space, chain)
        await rig.settled()
        rig.forget_dram()
        writer = rig.cache.reserve(rig.owner, space, b"", chain[: 16 * 4], 3600)  # a client that then stops
        lease = rig.match([space], chain)
        assert lease is not None
        for _ in range(20):
            rig.cache.work()
            await asyncio.sleep(0.001)
        assert lease.lease_id in rig.cache.reads.growing
        rig.cache.writes.abort(rig.owner, writer.lease_id, finished=True)
        await rig.until(lambda: lease.lease_id not in rig.cache.reads.growing, 10 * promotion.LOOK_AGAIN_S)
        assert rig.read(lease, space) == 0
        assert await rig.load(space, chain) == 10
        rig.check()
        await rig.close()

    play(scenario)


# --- lives ------------------------------------------------------------------------------------------


class Model:
    """What may be found: a block is there at most if it was stored after the last flush that was about it."""

    def __init__(self, chains: list[bytes]) -> None:
        self.chains = chains
        self.most = dict.fromkeys(chains, 0)

    def flushed(self, chain: bytes, number: int) -> None:
        self.most[chain] = min(self.most[chain], number)


async def _act(rig: TierRig, space: Namespace, model: Model, rng: random.Random) -> None:
    chain = rng.choice(model.chains)
    disk = rng.choice(list(rig.disks.values()))
    action = rng.random()
    if action < 0.4:
        length = rng.randrange(1, len(chain) // 16 + 1)
        rig.store(space, chain[: 16 * length])
        model.most[chain] = max(model.most[chain], length)
    elif action < 0.65:
        assert await rig.load(space, chain) <= model.most[chain], "it was flushed"
    elif action < 0.7:
        number = rng.randrange(len(chain) // 16)
        if await rig.flush(key_of(chain, number)):
            model.flushed(chain, number)
    elif action < 0.72:
        if await rig.flush():
            for other in model.chains:
                model.flushed(other, 0)
    elif action < 0.78:
        rig.forget_dram()
    elif action < 0.84:
        disk.hook = fail(rng.choice(("preadv", "pwritev", "fallocate")), rng.randrange(4))
    elif action < 0.88:
        lease = rig.match([space], chain)  # a load that is given up
        if lease is not None:
            rig.cache.reads.release(rig.owner, lease.lease_id)
    elif action < 0.92:
        for one in rig.shelves:
            one.health.off_until_s = 0.0
    else:
        for _ in range(rng.randrange(20)):
            rig.cache.work()
            await asyncio.sleep(0)
    for one in rig.shelves:
        one.health.off_until_s = min(one.health.off_until_s, time.monotonic() + 0.01)
    rig.check()


async def _lives(root: Path, seed: int, lives: int, steps: int) -> int:
    rng = random.Random(seed)
    model = Model([keys_of(str(number), rng.randrange(3, 40)) for number in range(10)])
    back = 0
    for life in range(lives):
        rig = TierRig(root, disks=2, arena_regions=2, nvme_bytes=32 << 20)
        await rig.tier.open()
        if rng.random() < 0.7:
            await rig.loaded()
        space = rig.namespace()
        for chain in rng.sample(model.chains, 5) if life else ():
            found = await rig.load(space, chain)
            assert found <= model.most[chain], "it was flushed"
            back += found
            rig.check()
        for _ in range(steps):
            await _act(rig, space, model, rng)
        if rng.random() < 0.7:
            await rig.crash()
        else:
            await rig.close(grace_s=rng.choice((0.0, 5.0)))
    return back


def test_lives_that_end_anyhow(tmp_path: Path) -> None:
    async def scenario() -> None:
        back = [await _lives(tmp_path / str(seed), seed, lives=5, steps=60) for seed in range(6)]
        assert sum(back) > 0, "nothing ever came back: this test would see nothing wrong"

    play(scenario)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(20))
def test_many_lives_that_end_anyhow(tmp_path: Path, seed: int) -> None:
    async def scenario() -> None:
        for number in range(10):
            await _lives(tmp_path / str(number), 1000 * seed + number, lives=8, steps=150)

    play(scenario)


def test_a_flush_while_rows_load_is_later_than_all_of_them(tmp_path: Path) -> None:
    """Also when what had raised the epoch before is forgotten already."""

    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        space, chain = rig.namespace(), keys_of("a", 12)
        for number in range(6):
            rig.store(space, keys_of("other", 6))
            await rig.settled()
            assert await rig.flush(key_of(keys_of("other", 6), number % 3))
        rig.store(space, chain)
        await rig.settled()
        await rig.until(lambda: not rig.shelves[0].registry.tombstones)
        await rig.close()
        for by_key in (True, False):
            rig = TierRig(tmp_path)
            await rig.tier.open()
            assert rig.shelves[0].loading
            assert await rig.flush(key_of(chain, 6) if by_key else b"")
            await rig.loaded()
            assert await rig.load(rig.namespace(), chain) == (6 if by_key else 0)
            rig.check()
            await rig.crash()
        rig = await TierRig(tmp_path).open()
        assert rig.tier.stats()["blocks"] == 0
        await rig.close()

    play(scenario)


def test_a_directory_that_turns_read_only_is_still_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        disk, space, chain = rig.disks[rig.dirs[0]], rig.namespace(), keys_of("a", 20)
        rig.store(space, chain)
        await rig.settled()
        one = rig.shelves[0]

        def read_only(name: str, size: int) -> int | None:
            if name != "preadv":
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return None

        commit = one.catalog._commit
        disk.hook = read_only
        one.catalog._commit = lambda db, batch: "attempt to write a readonly database"  # type: ignore[method-assign]
        for number in range(3):
            rig.store(space, keys_of(str(number), 10))
            for _ in range(50):
                rig.cache.work()
                await asyncio.sleep(0.001)
        rig.forget_dram()
        assert await rig.load(space, chain) == 20
        assert rig.tier.reasons()
        assert not await rig.flush(), "a flush that no disk has noted is no flush"
        assert await rig.load(space, chain) == 0, "here it is one all the same"
        disk.hook = lambda name, size: None
        one.catalog._commit = commit  # type: ignore[method-assign]
        one.health.off_until_s = 0.0
        await rig.until(lambda: not one.catalog.error)
        rig.store(space, chain)
        await rig.settled()
        assert rig.tier.reasons() == []
        rig.check()
        await rig.crash()
        rig = await TierRig(tmp_path).open()
        assert await rig.load(rig.namespace(), chain) == 20
        await rig.close()

    play(scenario)


@pytest.mark.parametrize("form", ["chain", "star"])
def test_rows_that_wait_for_one_parent_are_taken_in_by_slices(tmp_path: Path, form: str) -> None:
    """A root that comes last must not stop everything while all that hangs below it follows."""

    async def scenario() -> None:
        blocks = 4 * recovery.ROWS_AT_ONCE
        sizes: dict[str, int] = {"arena_regions": 8, "segment_bytes": 16 << 20}
        rig = await TierRig(tmp_path, **sizes).open()
        space, chain = rig.namespace(4096), keys_of("a", blocks)
        if form == "star":
            for number in range(1, blocks):
                rig.store(space, chain[:16] + key_of(chain, number))
        else:
            for first in range(0, blocks, 512):
                rig.store(space, chain[: 16 * (first + 512)], first=first)
        await rig.settled()
        await rig.close()
        rig = TierRig(tmp_path, **sizes)
        await rig.tier.open()
        one = rig.shelves[0]
        assert one.recovery is not None
        loading = one.recovery.rows
        rows: list[Any] = []
        while not loading.finished:
            rows += loading.next_batch() or ()
            await asyncio.sleep(0.001)

        def backwards() -> Batch | None:
            return Batch.of([rows.pop() for _ in range(min(len(rows), 512))]) if rows else None

        loading.next_batch = backwards  # type: ignore[method-assign]
        before = 0
        while one.loading:
            one.work()
            assert one.recovery.loaded_rows - before <= 2 * recovery.ROWS_AT_ONCE
            before = one.recovery.loaded_rows
        assert before == blocks
        rig.check()
        tail = chain if form == "chain" else chain[:16] + chain[-16:]
        assert await rig.load(rig.namespace(4096), tail) == len(tail) // 16
        await rig.close()

    play(scenario)


def test_a_chain_that_was_flushed_and_stored_again_keeps_no_old_tail(tmp_path: Path) -> None:
    """Rows of the old tail may outlive a kill, and their parent is there again: they stay away."""

    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        space, chain = rig.namespace(), keys_of("a", 300)
        rig.store(space, chain)
        await rig.settled()
        flushed = await rig.flush(key_of(chain, 5))
        assert flushed
        rig.store(space, chain[: 16 * 10])
        for _ in range(3):
            rig.cache.work()
            await asyncio.sleep(0.002)
        await rig.crash()
        rig = await TierRig(tmp_path).open()
        assert await rig.load(rig.namespace(), chain) <= 10
        rig.check()
        await rig.close()

    play(scenario)


def test_write_amplification_counts_blocks_and_database(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        rig.store(rig.namespace(), keys_of("a", 40))
        await rig.settled()
        stats = rig.tier.stats()
        [directory] = stats["directories"]
        assert directory["written_bytes"] >= stats["written_bytes"] > 0
        assert directory["database_written_bytes"] > 40 * 76, "every row has been written at least once"
        disk_bytes = directory["written_bytes"] + directory["database_written_bytes"]
        assert stats["write_amplification"] == pytest.approx(disk_bytes / stats["written_bytes"], abs=1e-4)
        await rig.close()

    play(scenario)
