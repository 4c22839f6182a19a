"""What operators and tests see of writes: none is over before its block is visible."""

from __future__ import annotations

import threading
from pathlib import Path

from chains import chain_of
from played import played
from tier_rig import BLOCK_BYTES, TierRig

from tiercache.daemon.tiers.nvme.moves.flights import SETTLED_AT_ONCE

BLOCKS = SETTLED_AT_ONCE + 20


@played
async def test_a_written_block_is_in_flight_until_it_is_visible(
    tmp_path: Path,
) -> None:
    """The parent is written last: then all that waited for it are made visible, a slice at a time."""
    rig = await TierRig(tmp_path).open()
    first_is_due, calls = threading.Event(), list[str]()

    def hook(name: str, size: int) -> None:
        if name == "pwritev":
            calls.append(name)
            assert len(calls) > 1 or first_is_due.wait(60)

    rig.disks[rig.dirs[0]].hook = hook
    space, writes = rig.namespace(), rig.tier._writes
    rig.store(space, chain_of("a", 1))
    await rig.until(lambda: bool(calls))
    rig.store(space, chain_of("a", BLOCKS))
    await rig.until(lambda: writes.in_flight_bytes == BLOCK_BYTES and rig.tier.stats()["write_queue_blocks"] == 0)
    assert rig.tier.stats()["write_in_flight_bytes"] == BLOCKS * BLOCK_BYTES
    first_is_due.set()
    await rig.until(lambda: writes.in_flight_bytes == 0)
    (shelf,) = rig.shelves
    writes.settle()
    visible = shelf.table(space).blocks
    assert 0 < visible < BLOCKS
    assert rig.tier.stats()["write_in_flight_bytes"] == (BLOCKS - visible) * BLOCK_BYTES
    await rig.until(lambda: rig.tier.stats()["write_in_flight_bytes"] == 0)
    assert shelf.table(space).blocks == BLOCKS
    rig.check()
    await rig.close()
