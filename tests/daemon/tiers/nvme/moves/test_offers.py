"""Offers to NVMe that a match of very many chains leaves behind: looked at in slices, and all in the end."""

from __future__ import annotations

from pathlib import Path

from chains import chain_of
from played import play
from tier_rig import TierRig

from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.nvme.moves.offers import CHAINS_AT_ONCE, MAX_BYTES

MANY = 2 * CHAINS_AT_ONCE + 8


async def _stored(root: Path) -> tuple[TierRig, list[Namespace]]:
    rig = await TierRig(root).open()
    spaces = [rig.namespace(4096 * size, rank=rank) for size in range(1, 6) for rank in range(8)][:MANY]
    for space in spaces:
        rig.store(space, chain_of("a", 3))
    await rig.settled()
    return rig, spaces


def test_no_more_keys_wait_to_be_looked_for_than_there_is_room_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig, spaces = await _stored(tmp_path)
        keys = chain_of("a", 3) + chain_of("b", 60_000)
        for _ in range(3 * MAX_BYTES // len(keys)):
            rig.cache.match(rig.owner, spaces, keys, 0)
        assert 0 < rig.tier._offers._bytes <= MAX_BYTES  # rule: a part of the tier
        await rig.until(lambda: rig.tier._offers.idle)  # rule: a part of the tier
        assert rig.tier._offers._bytes == 0  # rule: a part of the tier
        await rig.close()

    play(scenario)
