"""Writes in progress: what they hold, when they are over, and in which form blocks are written."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chains import chain_of, key_of
from memory_disks import MemoryDisk
from played import Clock, on_clock, played
from tier_rig import BLOCK_BYTES, TierRig

from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.nvme.disk.block_io import DiskTransfer
from tiercache.daemon.tiers.nvme.moves import flights
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


@on_clock
async def test_each_block_of_a_run_that_cannot_be_written_counts(clock: Clock) -> None:
    rig, disk, space = await rig_on(clock)
    disk.failing = {"write"}
    rig.store(space, chain_of("a", 3))
    await rig.settled()
    assert rig.shelves[0].stats()["write_failures"] == rig.tier._writes.failed_blocks == 3
    rig.check()
    await rig.close()


# --- single blocks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 4])
@played
async def test_blocks_that_are_runs_by_themselves_share_a_call_and_fail_alone(tmp_path: Path, window: int) -> None:
    rig = await TierRig(tmp_path).open()
    [shelf], [disk], space = rig.shelves, rig.disks.values(), rig.namespace(window_blocks=window)
    rig.store(space, chain_of("makes the segment", 1))
    await rig.settled()
    disk.calls.clear()

    def hook(name: str, size: int) -> None:
        bad = disk.calls[0][2] + 2 * BLOCK_BYTES
        if disk.call.offset <= bad < disk.call.offset + size:
            raise OSError(errno.EIO, "bad place")

    disk.hook = hook
    keys = [chain_of(name, 1) for name in "abcd"]
    for key in keys:
        rig.store(space, key)
    await rig.settled()
    assert [views for name, views, _ in disk.calls if name == "pwritev"] == [4, 1, 1, 1, 1]
    assert [shelf.has(space, key) for key in keys] == [True, True, False, True]
    rig.check()
    await rig.close()


# --- parents ----------------------------------------------------------------------------------------


def hold_back(rig: TierRig, which: Callable[[Flight], bool]) -> tuple[dict[bytes, Flight], Callable[..., None]]:
    """Writes that the disk has done and the tier is not told of, by their keys; and what tells it."""
    writes, late = rig.tier._writes, dict[bytes, Flight]()
    done = writes._done

    def some(flight: Flight) -> None:
        if which(flight):
            late.update((key, flight) for key in flight.keys)
        else:
            done(flight)

    writes._done = some  # type: ignore[method-assign]
    return late, done


@pytest.mark.parametrize("parent_first", [True, False], ids=["written", "under way"])
@on_clock
async def test_a_write_keeps_what_it_hangs_below(clock: Clock, parent_first: bool) -> None:
    """Else the parent is the coldest leaf, and the child is dropped when it arrives."""
    rig, _disk, space = await rig_on(clock)
    [shelf], chain = rig.shelves, chain_of("a", 2)
    late, done = hold_back(rig, lambda op: op.keys[0] == key_of(chain, 1))
    rig.store(space, chain[:16])
    if parent_first:
        await rig.settled()
    else:
        await rig.work(2)  # each is a run of its own
        assert (space.number, key_of(chain, 0)) in rig.tier._writes._flying
    rig.store(space, chain)
    await rig.until(lambda: bool(late) and shelf.has(space, key_of(chain, 0)))
    assert shelf.slots.evict_of(space.account_below, 1 << 30) == PAGE, "only the block that makes the segment"
    for flight in late.values():
        done(flight)
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
    late, done = hold_back(rig, lambda op: op.keys[0] in (a, b))
    rig.store(space, chain)  # b below a: its write is slow
    await rig.until(lambda: b in late)
    shelf.drop(space, a)  # a read of it has failed its checksum
    rig.cache.flush_dram([space.number], a)
    rig.store(space, b + a)  # now the other way round
    for _ in range(5):
        await rig.work(5)
        rig.step_disks()
    for key in (b, a) if child_first else (a, b):
        if key in late:
            done(late[key])
    await rig.settled()
    assert not rig.tier._writes._parked
    rig.check()
    await rig.close()


@on_clock
async def test_a_flushed_block_that_arrives_late_does_not_come_back_below_its_parents_successor(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flights, "most_together", lambda frame_bytes: 1)
    rig, disk, space = await rig_on(clock)
    [shelf], chain = rig.shelves, chain_of("a", 2)
    parent, child = key_of(chain, 0), key_of(chain, 1)
    late, done = hold_back(rig, lambda op: not late_ones)
    late_ones: list[Flight] = []
    rig.store(space, chain)
    await rig.until(lambda: len(late) == 2)
    late_ones += late.values()
    assert await rig.flush(parent)
    done(late[parent])
    await rig.until(lambda: rig.tier._writes.settle() is False)
    rig.store(space, parent)
    while rig.tier._writes.queued:
        await rig.work()
    done(late[child])  # it waits for the block that is being written now
    disk.step(commits=False)
    await rig.settled()
    assert shelf.has(space, parent)
    assert not shelf.has(space, child), "it was flushed"
    rig.check()
    await rig.close()


# --- runs of which some blocks fail -------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 2, 4])
@on_clock
async def test_a_block_that_cannot_be_written_costs_those_after_it(clock: Clock, bad: int) -> None:
    rig, disk, space = await rig_on(clock)
    [shelf], chain = rig.shelves, chain_of("a", 5)
    move, slots = disk.move, list[int]()

    def fails(transfer: DiskTransfer) -> None:
        if key_of(chain, bad) in transfer.op.keys[transfer.first : transfer.end]:
            slots.append(transfer.op.slots[transfer.first])
            raise OSError(errno.EIO, "bad place")
        move(transfer)

    disk.move = fails  # type: ignore[method-assign]
    rig.store(space, chain)
    await rig.settled()
    assert [shelf.has(space, key_of(chain, number)) for number in range(5)] == [number < bad for number in range(5)]
    assert (rig.tier._writes.failed_blocks, len(slots)) == (1, 1)
    rig.check()
    disk.move = move  # type: ignore[method-assign]
    clock.now_s += 1000.0  # the disk may be written to again
    assert await rig.load(space, chain) == 5, "all of it is in DRAM, and it was asked for"
    await rig.settled()
    assert shelf.length(space, chain, 5) == 5
    rig.forget_dram()
    assert await rig.load(space, chain) == 5
    rig.check()
    await rig.close()


@on_clock
async def test_chains_that_are_stored_by_turns_are_written_by_the_run(clock: Clock) -> None:
    rig, _disk, space = await rig_on(clock)
    [shelf], chains, runs = rig.shelves, [chain_of(name, 12) for name in ("a", "b")], list[int]()
    submit = shelf.queue.submit_many

    def noted(ops: Any, priority: Any) -> int:
        runs.extend(op.count for op in ops)
        return submit(ops, priority)

    shelf.queue.submit_many = noted  # type: ignore[method-assign]
    for blocks in range(1, 13):
        for chain in chains:
            rig.store(space, chain[: 16 * blocks], first=blocks - 1)
    await rig.settled()
    assert runs == [12, 12]
    rig.check()
    await rig.close()
