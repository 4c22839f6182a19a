"""Windows that clients read on the disks themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from chains import chain_of, key_of
from memory_disks import MemoryDisk
from played import Clock, on_clock, played
from tier_rig import TierRig

from tiercache.daemon.ground.slices import finish
from tiercache.daemon.tiers.dram.leases import ReadLease
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.nvme.direct import extents
from tiercache.protocol.messages import Extent

Named = Callable[[Namespace, int], list[Extent]]


def spaces_of(rig: TierRig) -> list[Namespace]:
    """A model with both: a chain and a window."""
    return [rig.namespace(), rig.namespace(window_blocks=3)]


def _extents(rig: TierRig, spaces: list[Namespace], chain: bytes) -> tuple[ReadLease, Named]:
    """A lease on blocks below DRAM, and the extents that it names in a namespace, from a block on."""
    lease = rig.cache.match(rig.owner, spaces, chain, 60.0, promote=True, extents=True).lease
    assert lease is not None
    held = lease.held
    assert held is not None
    return lease, lambda space, first: held.extents(space, first, 99)[1]


@played
async def test_a_window_can_be_held_where_it_is(tmp_path: Path) -> None:
    rig = await TierRig(tmp_path, disks=2).open()
    spaces, chain = spaces_of(rig), chain_of("a", 12)
    for space in spaces:
        space.direct = True
    await rig.store_below(spaces, chain)
    lease, named = _extents(rig, spaces, chain)
    assert [len(named(spaces[0], first)) for first in (0, 5)] == [12, 7]
    assert [len(named(spaces[1], first)) for first in (0, 8, 9, 11, 12)] == [0, 0, 3, 1, 0]
    one = next(one for one in rig.shelves if one.has(spaces[1], key_of(chain, 9)))
    held = one.find(spaces[1], key_of(chain, 9))
    assert held is not None
    assert one.index.pins[held.entry] == 1
    assert rig.cache.reads.release(rig.owner, lease.lease_id)
    rig.check()
    # A flush of one block of the window is known at the release, one of a block before it is not asked for.
    for number, good in ((8, True), (10, False)):
        lease, named = _extents(rig, spaces, chain)
        assert len(named(spaces[1], 9)) == 3
        rig.shelves[0].flush(spaces[1], key_of(chain, number), lambda ok: None)
        rig.shelves[1].flush(spaces[1], key_of(chain, number), lambda ok: None)
        assert rig.cache.reads.release(rig.owner, lease.lease_id) is good
        await rig.settled()
        rig.check()
    await rig.close()


@played
async def test_what_is_held_comes_up_when_a_client_asks_for_frames(tmp_path: Path) -> None:
    rig = await TierRig(tmp_path).open()
    spaces, chain = spaces_of(rig), chain_of("a", 12)
    await rig.store_below(spaces, chain)
    rig.store(spaces[0], chain[: 16 * 4])
    lease = rig.cache.match(rig.owner, spaces, chain, 60.0, promote=True, extents=True).lease
    assert lease is not None
    assert (lease.held is None, lease.blocks, lease.target) == (False, 0, 0)
    finish(rig.cache.reads.growing.bring_up(lease, 12))
    await rig.until(lambda: not rig.cache.reads.growing.leases)
    assert rig.read(lease, *spaces) == 12
    rig.check()
    await rig.close()


@on_clock
async def test_a_block_that_a_client_finds_bad_is_read_here_before_it_goes(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its word alone is not enough, nor does it cost more reads than one of each block, and a few at a time."""
    monkeypatch.setattr(extents, "MAX_DOUBTS", 3)
    disk = MemoryDisk(0, clock, segment_bytes=1 << 20)
    rig = await TierRig(Path("/nowhere"), disks=[disk]).open()
    space, chain = rig.namespace(4096), chain_of("a", 12)
    space.direct = True
    await rig.store_below([space], chain)
    [shelf] = rig.shelves
    lease, named = _extents(rig, [space], chain)
    assert (len(named(space, 0)), lease.held is not None) == (12, True)
    assert disk.damage(7)
    for number in (7, 3, 3, 3, 9, 11, 10):  # the last two are beyond what is read at a time
        lease.held.doubt(space, number)  # type: ignore[union-attr]
    assert shelf.has(space, key_of(chain, 7)), "nothing has been read yet"
    assert shelf.queue.in_flight == 3
    await rig.until(lambda: not shelf.queue.in_flight and not rig.tier._extents._doubts)  # rule: a part of the tier
    assert [shelf.has(space, key_of(chain, number)) for number in (3, 6, 7)] == [True, True, False]
    assert caplog.text.count("a client finds a block bad that is good here") == 2
    stats = rig.tier.stats()
    assert (stats["direct_reported_blocks"], stats["bad_blocks"]) == (7, 1)
    rig.cache.reads.release(rig.owner, lease.lease_id)
    rig.check()
    await rig.close()
