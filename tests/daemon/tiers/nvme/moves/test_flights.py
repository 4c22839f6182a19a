"""Writes in progress: what they hold, when they are over, and in which form blocks are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from chains import chain_of, key_of
from memory_disks import MemoryDisk
from played import Clock, on_clock
from tier_rig import TierRig

from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.nvme.moves.flights import Flight

PAGE = 4096
NOWHERE = Path("/nowhere")


async def rig_on(clock: Clock, **settings: object) -> tuple[TierRig, MemoryDisk, Namespace]:
    """A tier on one disk that has a segment already."""
    disk = MemoryDisk(0, clock, segment_bytes=1 << 20)
    rig = await TierRig(NOWHERE, disks=[disk], **settings).open()  # type: ignore[arg-type]
    space = rig.namespace(PAGE)
    rig.store(space, chain_of("makes the segment", 1))
    await rig.settled()
    return rig, disk, space


@on_clock
async def test_what_a_codec_saves_is_given_back_to_the_budget(clock: Clock) -> None:
    rig, _, _ = await rig_on(clock, nvme_codec="lz4", nvme_write_budget_bytes=100 << 30)
    budget, saved = rig.tier._budget, rig.tier._writes.saved_bytes  # rule: a part of the tier
    budget._level, budget._rate = budget._depth, 0.0
    rig.store(rig.namespace(4 * PAGE, rank=1), chain_of("a", 3))
    await rig.settled()
    assert rig.tier._writes.saved_bytes - saved == 3 * 3 * PAGE
    assert round(budget._depth - budget._level) == 3 * PAGE
    await rig.close()


# --- parents ----------------------------------------------------------------------------------------


def hold_back(rig: TierRig, which: Callable[[Flight], bool]) -> tuple[dict[bytes, Flight], Callable[..., None]]:
    """Writes that the disk has done and the tier is not told of, by their keys; and what tells it."""
    writes, late = rig.tier._writes, dict[bytes, Flight]()
    done = writes._on_done

    def some(ops: Sequence[Flight]) -> None:
        late.update((op.key, op) for op in ops if which(op))
        if others := [op for op in ops if not which(op)]:
            done(others)

    writes._on_done = some
    return late, done


@pytest.mark.parametrize("parent_first", [True, False], ids=["written", "under way"])
@on_clock
async def test_a_write_keeps_what_it_hangs_below(clock: Clock, parent_first: bool) -> None:
    """Else the parent is the coldest leaf, and the child is dropped when it arrives."""
    rig, _disk, space = await rig_on(clock)
    [shelf], chain = rig.shelves, chain_of("a", 2)
    late, done = hold_back(rig, lambda op: op.key == key_of(chain, 1))
    rig.store(space, chain[:16])
    if parent_first:
        await rig.settled()
    else:
        await rig.work(2)  # each is a run of its own
        assert (space.number, key_of(chain, 0)) in rig.tier._writes._flying
    rig.store(space, chain)
    await rig.until(lambda: bool(late) and shelf.has(space, key_of(chain, 0)))
    assert shelf.slots.evict_of(space.account_below, 1 << 30) == PAGE, "only the block that makes the segment"
    done(list(late.values()))
    await rig.settled()
    rig.forget_dram()
    assert await rig.load(space, chain) == 2
    rig.check()
    await rig.close()


@on_clock
async def test_two_blocks_that_are_each_the_parent_of_the_other_both_end(clock: Clock) -> None:
    rig, _disk, space = await rig_on(clock)
    chain = chain_of("a", 2)
    a, b = key_of(chain, 0), key_of(chain, 1)
    rig.store(space, a)
    await rig.settled()
    rig.store(space, chain)  # b below a: its write is slow
    await rig.work(2)
    assert (space.number, b) in rig.tier._writes._flying
    rig.cache.flush_dram([space.number], a)
    rig.tier.flush([space], a, lambda blocks, durable: None)
    rig.store(space, b + a)  # now the other way round
    await rig.work(5)
    await rig.settled()
    rig.check()
    await rig.close()


@pytest.mark.parametrize("child_first", [False, True])
@on_clock
async def test_two_blocks_that_each_hang_below_the_other_and_end_together_both_end(
    clock: Clock, child_first: bool
) -> None:
    """Without a flush between them they are of one epoch. None may become part of what waits for it."""
    rig, _disk, space = await rig_on(clock)
    [shelf], chain = rig.shelves, chain_of("a", 2)
    a, b = key_of(chain, 0), key_of(chain, 1)
    rig.store(space, a)
    await rig.settled()
    late, done = hold_back(rig, lambda op: op.key in (a, b))
    rig.store(space, chain)  # b below a: its write is slow
    await rig.until(lambda: b in late)
    shelf.drop(space, a)  # a read of it has failed its checksum
    rig.cache.flush_dram([space.number], a)
    rig.store(space, b + a)  # now the other way round
    for _ in range(5):
        await rig.work(5)
        rig.step_disks()
    done([late[key] for key in ((b, a) if child_first else (a, b)) if key in late])
    await rig.settled()
    assert not rig.tier._writes._parked
    rig.check()
    await rig.close()


@on_clock
async def test_a_flushed_block_that_arrives_late_does_not_come_back_below_its_parents_successor(clock: Clock) -> None:
    rig, disk, space = await rig_on(clock)
    [shelf], chain = rig.shelves, chain_of("a", 2)
    parent, child = key_of(chain, 0), key_of(chain, 1)
    late, done = hold_back(rig, lambda op: not late_ones)
    late_ones: list[Flight] = []
    rig.store(space, chain)
    await rig.until(lambda: len(late) == 2)
    late_ones += late.values()
    assert await rig.flush(parent)
    done([late[parent]])
    await rig.until(lambda: rig.tier._writes.settle() is False)
    rig.store(space, parent)
    while rig.tier._writes.queued:
        await rig.work()
    done([late[child]])  # it waits for the block that is being written now
    disk.step(commits=False)
    await rig.settled()
    assert shelf.has(space, parent)
    assert not shelf.has(space, child), "it was flushed"
    rig.check()
    await rig.close()
