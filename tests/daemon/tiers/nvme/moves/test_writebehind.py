"""Writes begin by the run: a chain's blocks together, as far as neither budget, room nor worth decide otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chains import chain_of, key_of
from memory_disks import MemoryDisk
from played import Clock, on_clock, played
from tier_rig import BLOCK_BYTES, TierRig

from tiercache.daemon.index.policy import coldest_of
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.nvme.disk.block_io import WriteOp
from tiercache.daemon.tiers.nvme.moves import flights, writebehind
from tiercache.daemon.tiers.nvme.moves.budget import WriteBudget
from tiercache.daemon.tiers.nvme.moves.offers import CHAINS_AT_ONCE, MAX_BYTES
from tiercache.daemon.tiers.nvme.shelf import shelf as shelf_module
from tiercache.daemon.tiers.nvme.shelf import slots
from tiercache.daemon.tiers.nvme.shelf.shelf import Shelf

SEGMENT_BYTES = 16 << 20


async def filled(root: Path, free: int, **settings: Any) -> tuple[TierRig, Namespace, int]:
    """A tier with one segment, of whose slots so many are free; and how many of them are kept free for other blocks."""
    rig = await TierRig(
        root, arena_regions=24, nvme_bytes=SEGMENT_BYTES, segment_bytes=SEGMENT_BYTES, **settings
    ).open()
    space = rig.namespace()
    rig.store(space, chain_of("first", 1))
    await rig.settled()
    size_class = rig.shelves[0].allocator.size_class(rig.shelves[0].slot_bytes(space))
    rig.store(space, chain_of("a", size_class.free - free))
    await rig.settled()
    assert size_class.free == free
    return rig, space, size_class.frames // 8


@played
async def test_a_chain_begins_together_in_neighbouring_slots(tmp_path: Path) -> None:
    rig = await TierRig(tmp_path).open()
    [shelf], space, chain = rig.shelves, rig.namespace(), chain_of("a", 30)
    rig.store(space, chain_of("makes the segment", 1))
    await rig.settled()
    sizes, submit = list[int](), shelf.queue.submit_many

    def noted(ops: Any, priority: Any) -> int:
        sizes.extend(filter(None, [sum(op.count for op in ops if isinstance(op, WriteOp))]))
        return submit(ops, priority)

    shelf.queue.submit_many = noted  # type: ignore[method-assign]
    rig.store(space, chain)
    await rig.settled()
    assert sizes == [30]
    slots = shelf.find_many(space, [key_of(chain, number) for number in range(30)]).slots
    assert slots == [slots[0] + number * BLOCK_BYTES for number in range(30)]
    rig.forget_dram()
    assert await rig.load(space, chain) == 30
    rig.check()
    await rig.close()


@pytest.mark.parametrize("key", [b"", chain_of("a", 1)], ids=["everything", "a prefix"])
@on_clock
async def test_what_is_stored_again_right_after_its_flush_is_written(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, key: bytes
) -> None:
    """The flushed blocks are still to be unlinked: that they are there does not mean that these are."""
    monkeypatch.setattr(shelf_module, "EVICT_AT_ONCE", 4)
    rig = await TierRig(Path("/nowhere"), disks=[MemoryDisk(0, clock, segment_bytes=1 << 20)]).open()
    [shelf], space, chain = rig.shelves, rig.namespace(4096), chain_of("a", 60)
    rig.store(space, chain)
    await rig.settled()
    rig.forget_dram()
    rig.tier.flush([space], key, lambda blocks, durable: None)
    assert shelf.table(space).unlinking
    rig.store(space, chain)
    await rig.settled()
    assert rig.tier.length(space, chain, 60) == 60
    rig.forget_dram()
    assert await rig.load(space, chain) == 60
    rig.check()
    await rig.close()


@on_clock
async def test_a_slice_that_fails_is_gone_on_with(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writes that it had taken are handed over by the next one."""
    rig = await TierRig(Path("/nowhere"), disks=[MemoryDisk(0, clock, segment_bytes=1 << 20)]).open()
    writes, space = rig.tier._writes, rig.namespace(4096)
    rig.store(space, chain_of("makes the segment", 1))
    await rig.settled()
    begin, calls = writes._begin, list[int]()

    def fails_once(*asked: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError
        return begin(*asked)

    with monkeypatch.context() as patch:
        patch.setattr(writes, "_begin", fails_once)
        for name in ("a", "b"):
            rig.store(space, chain_of(name, 1))
        with pytest.raises(ZeroDivisionError):
            writes.pump()
    await rig.settled()
    assert rig.shelves[0].has(space, chain_of("a", 1))
    rig.check()
    await rig.close()


@played
async def test_what_does_not_fit_into_the_queue_stays_in_dram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writebehind, "MAX_QUEUED", 3)
    rig = await TierRig(tmp_path).open()
    space, chain = rig.namespace(), chain_of("a", 4)
    rig.store(space, chain[:32])
    rig.tier._writes.add_many(space, [key_of(chain, 0)], asked_again=True)  # it waits already
    rig.store(space, chain)
    stats = rig.tier.stats()
    assert (stats["write_queue_blocks"], stats["skipped_queue_full"]) == (3, 1)
    await rig.settled()
    assert rig.shelves[0].table(space).blocks == 3
    assert await rig.load(space, chain) == 4
    await rig.close()


@pytest.mark.parametrize("few", [False, True])
@played
async def test_a_run_ends_where_a_block_would_take_the_place_of_a_better_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: bool
) -> None:
    """An eighth of the slots is kept free: from there on each write costs another block its place."""
    rig, space, ahead = await filled(tmp_path, 50, nvme_write_budget_bytes=1 << 50)
    [shelf] = rig.shelves
    taken = shelf.take_slots(space, b"", 50 - ahead + 5) if few else []
    policy, before = shelf.slots.policy(shelf.slot_bytes(space)), shelf.table(space).blocks
    monkeypatch.setattr(shelf.slots, "_make_room", lambda size_class, ahead=False: None)
    monkeypatch.setattr(space.table.policy, "worth", lambda entry: 1.0)
    monkeypatch.setattr(policy, "worth", lambda entry: 2.0)
    rig.store(space, chain_of("b", 30))
    await rig.settled()
    assert shelf.table(space).blocks - before == (0 if few else 50 - ahead + 1)
    assert rig.tier.stats()["skipped_by_worth"] == 1
    for slot in taken:
        shelf.allocator.give_back(slot)
    rig.check()
    await rig.close()


@played
async def test_what_a_block_must_be_worth_is_looked_up_once_for_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next victims of all accounts are compared for that."""
    rig, space, ahead = await filled(tmp_path, 50, nvme_write_budget_bytes=1 << 50)
    [shelf] = rig.shelves
    taken, before = shelf.take_slots(space, b"", 50 - ahead + 1), shelf.table(space).blocks
    monkeypatch.setattr(shelf.slots, "_make_room", lambda size_class, ahead=False: None)
    looks = 0

    def look(policies: Any) -> Any:
        nonlocal looks
        looks += 1
        return coldest_of(policies)

    monkeypatch.setattr(slots, "coldest_of", look)
    rig.store(space, chain_of("b", ahead - 1))
    await rig.settled()
    assert (shelf.table(space).blocks - before, looks) == (ahead - 1, 2), "for the first block, and for all others"
    for slot in taken:
        shelf.allocator.give_back(slot)
    rig.check()
    await rig.close()


@played
async def test_room_is_made_ahead_and_not_while_slots_are_taken(tmp_path: Path) -> None:
    rig, space, ahead = await filled(tmp_path, 50)
    [shelf] = rig.shelves
    slots, size_class = shelf.slots, shelf.allocator.size_class(shelf.slot_bytes(space))
    taken = shelf.take_slots(space, b"", 45)
    assert (len(taken), slots.evicted_blocks) == (45, 0)
    slots.work()
    assert slots.evicted_blocks == ahead - 5
    await rig.until(lambda: size_class.free == ahead)
    taken += shelf.take_slots(space, b"", ahead + 5)
    assert len(taken) == 45 + ahead, "as many as there are"
    assert shelf.take_slots(space, b"", 5) == []
    for slot in taken:
        shelf.allocator.give_back(slot)
    await rig.settled()
    rig.check()
    await rig.close()


@played
async def test_what_the_budget_skips_orphans_nothing(tmp_path: Path) -> None:
    rig = await TierRig(tmp_path, nvme_write_budget_bytes=100 << 30).open()
    space, chain = rig.namespace(), chain_of("a", 20)
    budget = rig.tier._budget  # rule: a part of the tier
    rig.store(space, chain[: 16 * 8])
    await rig.settled()
    budget._level = budget._rate = 0.0
    rig.store(space, chain[: 16 * 12], first=8)
    await rig.settled()
    budget._level = budget._depth
    rig.store(space, chain, first=12)
    await rig.settled()
    stats = rig.tier.stats()
    assert stats["blocks"] == 8
    assert stats["skipped_by_budget"] >= 1
    assert stats["skipped_without_parent"] >= 8
    assert await rig.load(space, chain) == 20  # asked for again: now all of it is written
    await rig.settled()
    assert rig.tier.stats()["blocks"] == 20
    rig.check()
    await rig.crash()
    again = await TierRig(tmp_path).open()
    assert again.shelves[0].stats()["orphan_rows"] == 0
    assert await again.load(again.namespace(), chain) == 20
    await again.close()


def test_the_budget_is_a_bucket_of_two_hours() -> None:
    now = [0.0]
    budget = WriteBudget(12 * 1000, lambda: now[0])  # a bucket of 1000 bytes
    assert budget.admits(400, asked_again=False)
    budget.charge(400)
    assert budget.admits(500, asked_again=False), "more than half is left"
    budget.charge(200)
    assert not budget.admits(100, asked_again=False)
    assert budget.admits(400, asked_again=True)
    assert not budget.admits(401, asked_again=True)
    budget.charge(400)
    assert budget.fullness == 0
    now[0] = 3600.0
    assert budget.fullness == 0.5
    now[0] = 10**9
    assert budget.fullness == 1
    assert budget.admits(5000, asked_again=True), "a block larger than the bucket goes when that is full"
    budget.charge(5000)
    assert not budget.admits(1, asked_again=True)
    assert WriteBudget(0).admits(1 << 50, asked_again=False)


@played
async def test_no_more_keys_wait_to_be_looked_for_than_there_is_room_for(tmp_path: Path) -> None:
    """A match of very many chains offers them all to the disks."""
    rig = await TierRig(tmp_path).open()
    spaces = [rig.namespace(4096 * size, rank=rank) for size in range(1, 6) for rank in range(8)]
    spaces = spaces[: 2 * CHAINS_AT_ONCE + 8]
    for space in spaces:
        rig.store(space, chain_of("a", 3))
    await rig.settled()
    keys = chain_of("a", 3) + chain_of("b", 60_000)
    for _ in range(3 * MAX_BYTES // len(keys)):
        rig.cache.match(rig.owner, spaces, keys, 0)
    assert 0 < rig.tier._offers._bytes <= MAX_BYTES  # rule: a part of the tier
    await rig.until(lambda: rig.tier._offers.idle)  # rule: a part of the tier
    assert rig.tier._offers._bytes == 0  # rule: a part of the tier
    await rig.close()


# --- branches to another directory -------------------------------------------------------------------


async def two_directories(clock: Clock) -> tuple[TierRig, Namespace, list[MemoryDisk]]:
    """Two, of which neither copies too much for the test."""
    disks = [MemoryDisk(number, clock, segments=200, segment_bytes=1 << 20) for number in range(2)]
    rig = await TierRig(Path("/nowhere"), disks=disks).open()
    rig.tier._placement.copies.written_bytes = 1 << 30  # rule: of a daemon that has written for long
    return rig, rig.namespace(4096), disks


def name_for(rig: TierRig, space: Namespace, name: str, home: Shelf, blocks: int = 1, after: bytes = b"") -> bytes:
    """A chain or branch that goes to this directory."""
    chains = (chain_of(f"{name} {number}", blocks, after=after) for number in range(99))
    place = rig.tier._placement.home
    return next(chain for chain in chains if place(space, key_of(chain, len(after) // 16)) is home)


@pytest.mark.parametrize("between", [0, 1], ids=["at once", "with a block in between"])
@on_clock
async def test_a_head_is_not_copied_below_a_write_that_waits_for_what_follows_it(clock: Clock, between: int) -> None:
    """Keys that a client makes up: each of four blocks would wait for the next one, for ever."""
    rig, space, disks = await two_directories(clock)
    a, b = rig.shelves
    top, slow = name_for(rig, space, "top", a), name_for(rig, space, "slow", b)
    head, other = name_for(rig, space, "head", b), chain_of("other", 1)
    more = name_for(rig, space, "between", a) if between else b""
    rig.store(space, top)
    await rig.settled()
    rig.store(space, top + slow)
    await rig.work(5)  # below the first one, on a disk that is slow
    rig.cache.flush_dram([space.number], top)
    rig.tier.flush([space], top, lambda blocks, durable: None)
    await rig.work(3)
    grants = rig.tier.grants
    assert grants is not None
    while (got := grants.reserve(rig.owner, space, b"", slow + head + other, 10)).soon:
        await rig.work(2)
        disks[1].step()
    assert len(grants.commit(rig.owner, got.lease_id, [0] * len(got.extents))) == 3
    rig.store(space, slow + head + more + top)
    rig.store(space, slow + head + more + top + chain_of("more", 1))
    await rig.work(5)
    await rig.settled()
    rig.check()
    await rig.close()


@on_clock
async def test_a_block_that_turns_out_to_go_elsewhere_keeps_nothing_waiting(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, space, disks = await two_directories(clock)
    a, b = rig.shelves
    copies = rig.tier._placement.copies  # rule: what may be copied, from one moment to the next
    copies.written_bytes, head = 0, name_for(rig, space, "head", b, blocks=70)
    for chain in (head, *(chain_of(f"branch {number}", 1, after=head) for number in range(40))):
        rig.store(space, chain)
        await rig.settled()
    assert b.branches(space, head[-16:]) == 40
    copies.written_bytes = 1 << 30
    rig.store(space, name_for(rig, space, "late", a, after=head))
    rig.tier._writes.pump()  # its head is longer than what is begun at once: it waits for the other directory
    copies.written_bytes = 0  # other heads take the allowance
    b.catalog.error = "the disk is full"
    monkeypatch.setattr(flights, "MAX_IN_FLIGHT", 1)
    those_behind = [name_for(rig, space, f"behind {number}", a) for number in range(3)]
    for chain in those_behind:
        rig.store(space, chain)
    for _ in range(30):
        await rig.work()
        disks[0].step()
    assert all(a.has(space, chain) for chain in those_behind)
    rig.check()
    await rig.close()
