"""Reads of promoted blocks are counted as reads."""

from __future__ import annotations

from pathlib import Path

from chains import chain_of
from played import played
from tier_rig import TierRig


@played
async def test_promoted_blocks_count_as_reads(tmp_path: Path) -> None:
    rig = await TierRig(tmp_path).open()
    space, chain = rig.namespace(), chain_of("a", 30)
    rig.store(space, chain)
    await rig.settled()
    [shelf] = rig.shelves
    written = shelf.queue.stats()["writes"], shelf.queue.stats()["written_bytes"]
    rig.forget_dram()
    assert await rig.load(space, chain) == 30
    stats = shelf.queue.stats()
    assert (stats["writes"], stats["written_bytes"]) == written
    assert stats["reads"] == 30
    await rig.close()
