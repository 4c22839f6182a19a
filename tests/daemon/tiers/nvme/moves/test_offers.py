"""Offers to NVMe that a match of very many chains leaves behind: looked at in slices, and all in the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from chains import chain_of
from played import play
from tier_rig import TierRig

from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.nvme.moves.offers import CHAINS_AT_ONCE, MAX_BYTES
from tiercache.daemon.tiers.nvme.placement import ShelfPlacement

MANY = 2 * CHAINS_AT_ONCE + 8


class Looks:
    """How often a chain was looked for since the last time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, find = 0, ShelfPlacement.find

        def counted(placement: ShelfPlacement, *args: object) -> object:
            self.count += 1
            return find(placement, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(ShelfPlacement, "find", counted)

    def take(self) -> int:
        self.count, count = 0, self.count
        return count


async def _stored(root: Path) -> tuple[TierRig, list[Namespace]]:
    rig = await TierRig(root).open()
    spaces = [rig.namespace(4096 * size, rank=rank) for size in range(1, 6) for rank in range(8)][:MANY]
    for space in spaces:
        rig.store(space, chain_of("a", 3))
    await rig.settled()
    return rig, spaces


def test_chains_of_many_namespaces_are_looked_for_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig, spaces = await _stored(tmp_path)
        rig.tier.flush(spaces, b"", lambda blocks, durable: None)
        await rig.until(lambda: not rig.tier.unlinking)
        looks = Looks(monkeypatch)
        assert rig.cache.match(rig.owner, spaces, chain_of("a", 3), 0).dram == 3
        slices = [looks.take()]
        while not rig.tier._offers.idle:  # rule: a part of the tier
            rig.tier.work()
            slices.append(looks.take())
        assert slices == [CHAINS_AT_ONCE, CHAINS_AT_ONCE, 8]
        await rig.settled()
        assert rig.tier.stats()["written_blocks"] == 2 * 3 * MANY, "each chain was offered again"
        rig.check()
        await rig.close()

    play(scenario)


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
