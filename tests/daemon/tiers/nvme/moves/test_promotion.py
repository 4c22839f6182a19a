"""NVMe to DRAM: long runs, in slices of the loop."""

from __future__ import annotations

from pathlib import Path

from chains import chain_of
from played import play
from tier_rig import TierRig

from tiercache.daemon.tiers import promotion
from tiercache.daemon.tiers.nvme.disk.queue import QUEUE_LIMITS, DiskPriority

SMALL_BYTES = 4096


def test_a_run_longer_than_the_disks_queue_comes_up_whole(tmp_path: Path) -> None:
    """With and without a client that waits for it, and never many blocks in one turn of the event loop."""

    async def scenario() -> None:
        blocks = QUEUE_LIMITS[DiskPriority.PREFETCH] + 1000
        rig = await TierRig(tmp_path).open()
        space, chain = rig.namespace(SMALL_BYTES), chain_of("a", blocks)
        for first in range(0, blocks, 512):
            rig.store(space, chain[: 16 * (first + 512)], first)
        await rig.settled()
        queue = rig.shelves[0].queue
        for holds in (True, False):
            rig.forget_dram()
            if holds:
                assert rig.match([space], chain) is not None
            else:
                rig.cache.prefetch(rig.owner, [space], chain)
            assert 0 < queue.in_flight <= promotion.BATCHES_AT_ONCE * promotion.BATCH
            await rig.until(lambda: not rig.cache.reads.growing.leases)
            assert rig.cache.match(rig.owner, [space], chain, 0.0).dram == blocks
            for lease in list(rig.cache.reads.leases.values()):
                assert rig.read(lease, space) == blocks
            rig.check()
        assert queue.refused == 0
        await rig.close()

    play(scenario)
