"""The NVMe tier in this process: what becomes of blocks when disks fail or hang."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from chains import chain_of, key_of
from disk_rig import segment_path
from disk_troubles import fail
from played import play
from tier_rig import BLOCK_BYTES, TierRig

from tiercache.daemon.tiers.nvme import keepers

# --- every error path -----------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_the_nth_write_fails(tmp_path: Path, code: int) -> None:
    async def scenario() -> None:
        for number in range(12):
            root = tmp_path / str(number)
            rig = await TierRig(root).open()
            disk, space, chain = rig.disks[rig.dirs[0]], rig.namespace(), chain_of("a", 30)
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
        disk, space, chain = rig.disks[rig.dirs[0]], rig.namespace(), chain_of("a", 30)
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
            assert await rig.load(space, chain) == 30, "a block that failed once may be good the next time"
            rig.check()
        await rig.close()

    play(scenario)


def test_short_reads_and_writes_are_completed(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        disk, space, chain = rig.disks[rig.dirs[0]], rig.namespace(), chain_of("a", 20)
        disk.hook = lambda name, size: max(4096, size // 3) if name != "fallocate" else None
        rig.store(space, chain)
        await rig.settled()
        rig.forget_dram()
        assert await rig.load(space, chain) == 20
        rig.check()
        await rig.close()

    play(scenario)


def test_a_block_that_cannot_be_read_twice_is_forgotten(tmp_path: Path) -> None:
    """Else the block would be found, waited for and missed for ever, and never written again."""

    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        disk, space, chain = rig.disks[rig.dirs[0]], rig.namespace(), chain_of("a", 10)
        rig.store(space, chain)
        await rig.settled()
        stored = rig.shelves[0].find(space, key_of(chain, 5))
        assert stored is not None
        os.truncate(segment_path(rig.shelves[0].directory, 1), stored.slot & (1 << 48) - 1)
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
        rig.store(space, chain_of("a", 1))
        await rig.settled()
        bad = {3 * BLOCK_BYTES}

        def hook(name: str, size: int) -> int | None:
            if name == "pwritev" and disk.calls[-1][2] in bad:
                raise OSError(errno.EIO, "bad sector")
            return None

        disk.hook = hook
        health = rig.shelves[0].health
        for round_ in range(8):
            rig.store(space, chain_of(str(round_), 1))
            await rig.settled()
            health.off_until_s = 0.0  # the pause is over
        assert rig.tier.stats()["write_failed_blocks"] == 1
        assert rig.tier.stats()["blocks"] == 8
        rig.check()
        await rig.close()

    play(scenario)


# --- one that cannot write stops no other ---------------------------------------------------------


def test_a_disk_that_cannot_write_stops_no_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, disks=2, arena_regions=16).open()
        space = rig.namespace()
        broken, well = rig.shelves
        broken.loading = True  # as good as any reason
        chains = [chain_of(str(number), 8) for number in range(16)]
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
        rig = await TierRig(tmp_path, disks=2, arena_regions=16).open()
        space = rig.namespace()
        chains = [chain_of(str(number), 12) for number in range(12)]
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
        monkeypatch.setattr(hung.queue, "oldest_age_s", lambda: 1000.0)
        await rig.until(lambda: lease.lease_id not in rig.cache.reads.growing.leases)
        await rig.until(lambda: other.lease_id not in rig.cache.reads.growing.leases)
        assert rig.read(lease, space) == rig.read(other, space) == 0
        assert rig.match([space], on_hung[0]) is None, "offline: a miss at once"
        assert any("has been under way" in reason for reason in rig.tier.reasons())
        # The blocks that it was reading can be stored again, and are not written to the disk that hangs.
        rig.store(space, on_hung[0])
        assert await rig.load(space, on_hung[0]) == 12
        new = [chain_of(f"new {number}", 4) for number in range(6)]
        for chain in new:
            rig.store(space, chain)
        await rig.until(lambda: all(rig.shelves[1].has(space, key_of(chain, 3)) for chain in new))
        assert rig.cache.check_integrity() == []
        monkeypatch.undo()
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
        monkeypatch.setattr(keepers, "CLOSE_S", 0.2)
        rig = await TierRig(tmp_path, disks=2).open()
        space = rig.namespace()
        gate = rig.disks[rig.dirs[0]].gate
        gate.clear()
        for chain in (chain_of(str(number), 12) for number in range(16)):  # the disk that hangs has some of them
            rig.store(space, chain)
        assert await rig.tier.close(0.3) > 0
        gate.set()

    play(scenario)
