"""The NVMe tier in this process: disks without room, segments and caps."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest
from chains import chain_of
from disk_troubles import hang
from played import play
from tier_rig import BLOCK_BYTES, TierRig

from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.tiers.nvme import new_segments, slots
from tiercache.daemon.tiers.nvme.disk.segment_files import segment_name


def test_no_room_for_a_segment_and_then_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(new_segments, "GROW_AGAIN_S", 0.05)
        rig = await TierRig(tmp_path).open()
        disk, space = rig.disks[rig.dirs[0]], rig.namespace()

        def no_room(name: str, size: int) -> int | None:
            if name == "fallocate":
                raise OSError(errno.ENOSPC, "full")
            return None

        disk.hook = no_room
        rig.store(space, chain_of("a", 5))
        await rig.until(lambda: bool(rig.tier.reasons()))
        disk.hook = lambda name, size: None
        rig.shelves[0].health.off_until_s = 0.0
        await rig.settled()
        assert rig.tier.stats()["blocks"] == 5, "waiting blocks are written when there is room"
        disk.hook = no_room
        for number in range(6):
            rig.store(space, chain_of(str(number), 20))
            await rig.settled()
        assert 24 <= rig.tier.stats()["blocks"] <= 32, "one segment's worth, the youngest"
        assert any("no further segment" in reason for reason in rig.tier.reasons())
        assert rig.shelves[0].health.reason == "", "and the daemon still writes"
        rig.check()
        disk.hook = lambda name, size: None
        for number in range(6):
            rig.store(space, chain_of(f"later {number}", 20))
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
            rig.store(space, chain_of(str(number), 20))
            await rig.settled()
        slots = 7 * 32
        assert rig.tier.stats()["blocks"] >= slots - 64 - 20
        rig.check()
        # A catalog that does not answer must not cost the whole directory.
        one = rig.shelves[0]
        before, gate = rig.tier.stats()["blocks"], hang(one.catalog)
        rig.store(space, chain_of("more", 60))
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
            rig.store(space, chain_of(str(number), 20))
            await rig.settled()
        one = rig.shelves[0]
        before = rig.tier.stats()["blocks"]
        commit = one.catalog._writer._commit
        one.catalog._writer._commit = lambda db, batch: "database or disk is full"  # type: ignore[method-assign]
        rig.store(space, chain_of("more", 40))
        await rig.until(lambda: bool(one.catalog.error))
        for _ in range(300):
            rig.cache.work()
            await asyncio.sleep(0.001)
        assert rig.tier.stats()["blocks"] >= before - 64 - 40
        assert any("full" in reason for reason in rig.tier.reasons())
        assert one.slots.left.lost > 0, "slots whose old row is still there are not used"
        one.catalog._writer._commit = commit  # type: ignore[method-assign]
        await rig.until(lambda: not one.catalog.error and one.slots.left.lost == 0)
        await rig.settled()
        rig.check()
        await rig.close()

    play(scenario)


def test_another_size_gets_a_segment_of_a_full_disk(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, arena_regions=16, nvme_bytes=16 << 20).open()
        small, large = rig.namespace(), rig.namespace(4 * BLOCK_BYTES, rank=1)
        for number in range(15):
            rig.store(small, chain_of(str(number), 20))
            await rig.settled()
        rig.store(large, chain_of("large", 6))
        await rig.settled()
        assert rig.shelves[0].index.tables[large.number].blocks == 6
        rig.check()
        rig.forget_dram()
        assert await rig.load(large, chain_of("large", 6)) == 6
        assert rig.shelves[0].index.tables[small.number].blocks > 20, "one segment was emptied, not all"
        rig.check()
        await rig.close()
        again = await TierRig(tmp_path, arena_regions=16, nvme_bytes=16 << 20).open()
        assert await again.load(again.namespace(4 * BLOCK_BYTES, rank=1), chain_of("large", 6)) == 6
        again.check()
        await again.close()

    play(scenario)


def test_a_block_too_large_for_any_segment_does_not_stop_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, segment_bytes=2 << 20, arena_regions=8).open()
        one = rig.shelves[0]
        one.directory.segment_bytes = 1 << 20  # as a directory from a life with another setting has it
        large, small = rig.namespace(2 << 20, rank=1), rig.namespace()
        rig.store(large, chain_of("large", 2))
        rig.store(small, chain_of("small", 5))
        await rig.settled()
        assert rig.tier.stats()["blocks"] == 5
        assert rig.tier.stats()["skipped_too_large"] >= 1
        await rig.close()

    play(scenario)


@pytest.mark.parametrize("nvme_bytes", [16 << 20, (16 << 20) + 12345, (64 << 20) + 1])
def test_a_cap_below_one_segment_gets_smaller_segments(tmp_path: Path, nvme_bytes: int) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, nvme_bytes=nvme_bytes, segment_bytes=1 << 30).open()
        space, chain = rig.namespace(), chain_of("a", 10)
        rig.store(space, chain)
        await rig.settled()
        rig.forget_dram()
        assert await rig.load(space, chain) == 10
        used = sum(path.stat().st_blocks * 512 for path in rig.dirs[0].rglob("*") if path.is_file())
        assert used <= nvme_bytes
        await rig.close()

    play(scenario)


@pytest.mark.parametrize("may_shrink", [True, False])
def test_a_smaller_cap_takes_segments_away_when_that_is_allowed(
    tmp_path: Path, may_shrink: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, nvme_bytes=64 << 20).open()
        space = rig.namespace()
        chains = [chain_of(str(number), 20) for number in range(20)]
        for chain in chains:
            rig.store(space, chain)
            await rig.settled()
        await rig.close()
        again = await TierRig(tmp_path, nvme_bytes=16 << 20, nvme_shrink=may_shrink).open()
        used = sum(path.stat().st_blocks * 512 for path in again.dirs[0].rglob("*") if path.is_file())
        assert (used <= 16 << 20) is may_shrink
        space = again.namespace()
        found = sum([await again.load(space, chain) for chain in chains])
        assert 0 < found < 400 if may_shrink else found == 400
        [directory] = again.tier.stats()["directories"]
        assert (directory["kept_bytes"] == 0) is may_shrink
        told = "with 176 blocks: they are kept. To delete them: --nvme-shrink yes" in caplog.text
        assert told is not may_shrink
        again.store(space, chain_of("more", 20))
        await again.settled()
        assert await again.load(space, chain_of("more", 20)) == 20, "in the segments that there are"
        await again.settled()
        again.check()
        await again.close()

    play(scenario)


def test_the_file_of_another_at_the_name_of_the_next_segment_stops_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        [shelf], space = rig.shelves, rig.namespace()
        strange = rig.dirs[0] / "segments" / segment_name(1)
        strange.write_bytes(b"of another program")
        rig.store(space, chain_of("a", 5))
        await rig.until(lambda: bool(shelf.health.reason))
        shelf.health.off_until_s = 0.0
        await rig.settled()
        assert rig.tier.stats()["blocks"] == 5
        assert strange.read_bytes() == b"of another program"
        rig.check()
        await rig.close()

    play(scenario)


@pytest.mark.parametrize(("aside_s", "comes_back"), [(0.0, True), (3600.0, False)])
def test_a_slot_that_could_not_be_written_to_is_used_again_but_not_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aside_s: float, comes_back: bool
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(slots, "ASIDE_S", aside_s)
        rig = await TierRig(tmp_path).open()
        [shelf], space = rig.shelves, rig.namespace()
        rig.store(space, chain_of("a", 1))
        await rig.settled()
        used_bytes = shelf.allocator.used_bytes
        slot = shelf.slots.take(shelf.slot_bytes(space), NO_ENTRY)
        shelf.slots.put_aside(slot)
        shelf.slots.work()
        assert (shelf.allocator.used_bytes == used_bytes) is comes_back
        rig.check()
        await rig.close()

    play(scenario)
