"""Chains of keys that a client makes up: no write waits for ever, and none is lost that could be kept."""

from __future__ import annotations

import asyncio
from pathlib import Path

from chains import chain_of, key_of
from played import played
from tier_rig import TierRig

from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.tiers.forms.codecs import RAW
from tiercache.daemon.tiers.nvme.shelf import StoredBlock
from tiercache.protocol.checksums import CHECKSUM_LANES


@played
async def test_two_blocks_that_are_each_the_parent_of_the_other_both_end(tmp_path: Path) -> None:
    rig = await TierRig(tmp_path).open()
    [shelf], space, chain = rig.shelves, rig.namespace(), chain_of("a", 2)
    a, b = key_of(chain, 0), key_of(chain, 1)
    rig.store(space, a)
    await rig.settled()
    writes, gate = rig.tier._writes, rig.disks[rig.dirs[0]].gate
    gate.clear()
    rig.store(space, chain)  # b below a: its write is slow
    await rig.until(lambda: (space.number, b) in writes._flying)
    assert await rig.flush(a)  # away everywhere
    rig.store(space, b + a)  # now the other way round
    await rig.until(lambda: not writes.waiting)  # a has begun, or was passed over
    gate.set()
    await rig.until(lambda: shelf.queue.in_flight == 0)
    await rig.until(lambda: writes.idle, deadline_s=5.0)
    rig.check()
    await rig.close()


@played
async def test_what_hangs_below_a_run_that_is_cut_becomes_visible(tmp_path: Path) -> None:
    """One of its blocks is here already when it is to become visible: a client has stored it below another one."""
    rig = await TierRig(tmp_path).open()
    [shelf], space, chain = rig.shelves, rig.namespace(), chain_of("a", 8)
    rig.store(space, chain_of("makes the segment", 1))
    await rig.settled()
    gate, writes = rig.disks[rig.dirs[0]].gate, rig.tier._writes
    gate.clear()
    siblings = [chain_of(name, 1, after=chain) for name in ("e", "f")]
    rig.store(space, chain)
    for one in siblings:
        rig.store(space, one)
    await rig.until(lambda: len(writes._flying) == 10)
    gate.set()
    while shelf.queue.in_flight:
        await asyncio.sleep(0.001)
    # A client has written the second block itself meanwhile, below another one (`Grants._publish`).
    slot = shelf.take_slot(space, b"")
    written = StoredBlock(NO_ENTRY, slot, space.spec.block_bytes, RAW, 0, CHECKSUM_LANES)
    shelf.add(space, key_of(chain, 1), b"", slot, written, None, stored=True)
    await rig.settled()
    rig.check()
    here = [shelf.has(space, one[-16:]) for one in siblings]
    assert shelf.has(space, key_of(chain, 7))
    assert here == [True, True], here
    await rig.close()
