"""Scans of blocks on disks in memory: how many, how fast, and what becomes of bad ones."""

from __future__ import annotations

from pathlib import Path

from chains import chain_of, key_of
from memory_disks import MemoryDisk
from played import Clock, on_clock
from tier_rig import TierRig

PAGE = 4096
CHAIN = chain_of("a", 12)


async def lived_in(clock: Clock) -> tuple[TierRig, MemoryDisk]:
    disk = MemoryDisk(0, clock, segment_bytes=1 << 20)
    rig = await TierRig(Path("/nowhere"), disks=[disk]).open()
    await rig.store_below([rig.namespace(PAGE)], CHAIN)
    return rig, disk


@on_clock
async def test_a_scan_reads_no_faster_than_it_may(clock: Clock) -> None:
    rig, disk = await lived_in(clock)
    ended, seconds = list[tuple[list[str], int]](), 0
    assert rig.tier.scan(-1, 4 * PAGE, lambda: True, lambda *found: ended.append(found))
    assert not rig.tier.scan(-1, 0, lambda: True, lambda *found: None), "one at a time"
    while not ended:
        await rig.work()
        disk.step()
        await rig.work()
        clock.now_s += 1
        seconds += 1
    assert seconds >= 3, "twelve pages at four a second"
    assert ended == [([], 12)]
    assert rig.tier.scan(5, 0, lambda: True, lambda *found: ended.append(found))
    await rig.until(lambda: len(ended) == 2)
    assert ended[1] == ([], 5)
    rig.check()
    await rig.close()


@on_clock
async def test_a_scan_that_nobody_waits_for_ends(clock: Clock) -> None:
    rig, _ = await lived_in(clock)
    ended = list[int]()
    assert rig.tier.scan(-1, 1, lambda: False, lambda findings, blocks: ended.append(blocks))
    await rig.until(lambda: bool(ended))
    assert ended == [0]
    rig.check()
    await rig.close()


@on_clock
async def test_a_bad_block_is_named_and_dropped_with_what_follows_it(clock: Clock) -> None:
    rig, disk = await lived_in(clock)
    space, ended = rig.namespace(PAGE), list[tuple[list[str], int]]()
    assert disk.damage(7)
    assert rig.tier.scan(-1, 0, lambda: True, lambda *found: ended.append(found))
    await rig.until(lambda: bool(ended))
    [(findings, _)] = ended
    assert findings == [
        f"nvme directory {rig.dirs[0]}: block {key_of(CHAIN, 7).hex()} fails its checksum and is dropped"
    ]
    assert await rig.load(space, CHAIN) == 7
    rig.check()
    await rig.close()
