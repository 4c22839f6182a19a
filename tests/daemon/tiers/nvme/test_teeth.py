"""What keeps a block right while it is under way: each of these fails when its protection is taken away."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from catalog_bench import Bench
from chains import chain_of, key_of
from disk_troubles import fail
from played import play
from tier_rig import TierRig

from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.tiers.dram import reads
from tiercache.daemon.tiers.nvme.catalog import catalog
from tiercache.daemon.tiers.nvme.catalog.database import rename_aside
from tiercache.daemon.tiers.nvme.disk.block_io import DiskOutcome, ReadOp, WriteOp
from tiercache.daemon.tiers.nvme.moves import shelf_source
from tiercache.daemon.tiers.nvme.moves.flights import Flight
from tiercache.daemon.tiers.nvme.shelf import Shelf, StoredBlock

pytestmark = pytest.mark.usefixtures("carrier")


def watch_slots(shelf: Shelf) -> list[str]:
    """From now on: every operation that begins on a slot while another one still uses it."""
    busy: dict[int, int] = {}
    clashes: list[str] = []
    submit_many = shelf.queue.submit_many

    def submit(ops: Any, priority: Any) -> int:
        moving = [op for op in ops if isinstance(op, (ReadOp, WriteOp))]
        for op in moving:
            if busy.get(op.slot) and isinstance(op, WriteOp):
                clashes.append(f"slot {op.slot:x} is written while it is in use")
            busy[op.slot] = busy.get(op.slot, 0) + 1
            done, slot = op.done, op.slot

            def ended(ended_op: Any, done: Any = done, slot: int = slot) -> None:
                busy[slot] -= 1
                done(ended_op)

            op.done = ended
        return submit_many(ops, priority)

    shelf.queue.submit_many = submit  # type: ignore[method-assign]
    return clashes


def test_a_promotion_holds_its_slots_until_the_kernel_is_done(tmp_path: Path) -> None:
    """Flushed while they are read, the slots have no new owner before the reads have ended."""

    async def scenario() -> None:
        rig = await TierRig(tmp_path, nvme_bytes=16 << 20, arena_regions=16).open()
        [shelf], space, chain = rig.shelves, rig.namespace(), chain_of("a", 12)
        rig.store(space, chain)
        await rig.settled()
        rig.forget_dram()
        clashes = watch_slots(shelf)
        gate = rig.disks[rig.dirs[0]].gate
        gate.clear()
        lease = rig.match([space], chain)
        assert lease is not None
        await rig.until(lambda: shelf.queue.in_flight == 12)
        read = [stored.slot for number in range(12) if (stored := shelf.find(space, key_of(chain, number)))]
        assert set(read) <= shelf.allocator._holders.keys(), "each slot is held, even if its entry is gone"
        assert await rig.flush()
        await rig.committed()
        others = [chain_of(f"other {number}", 24) for number in range(10)]
        for other in others:  # more than there are slots: every free one is taken
            rig.store(space, other)
        for _ in range(50):
            rig.cache.work()
            await asyncio.sleep(0)
        gate.set()
        await rig.settled()
        assert clashes == []
        rig.cache.reads.release(rig.owner, lease.lease_id)
        rig.check()
        await rig.close()

    play(scenario)


@pytest.mark.parametrize("parent_first", [True, False], ids=["written", "under way"])
def test_a_write_keeps_what_it_hangs_below(tmp_path: Path, parent_first: bool) -> None:
    """Else the parent is the coldest leaf, and the child is dropped when it arrives."""

    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        [shelf], space, chain = rig.shelves, rig.namespace(), chain_of("a", 2)
        gate, writes = rig.disks[rig.dirs[0]].gate, rig.tier._writes
        done, late = writes._on_done, list[Flight]()

        def child_is_late(ops: Sequence[Flight]) -> None:
            late.extend(op for op in ops if op.key == key_of(chain, 1))
            if others := [op for op in ops if op not in late]:
                done(others)

        writes._on_done = child_is_late
        if not parent_first:
            gate.clear()
        rig.store(space, chain[:16])
        if parent_first:
            await rig.settled()
        rig.store(space, chain)
        await rig.until(lambda: parent_first or shelf.queue.in_flight == 2)
        gate.set()
        await rig.until(lambda: bool(late) and shelf.has(space, key_of(chain, 0)))
        evicted = shelf.slots.evict_of(space.account_below, 1 << 30)
        assert evicted == 0, "no block may be evicted"
        done(late)
        await rig.settled()
        rig.forget_dram()
        assert await rig.load(space, chain) == 2
        rig.check()
        await rig.close()

    play(scenario)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_write_that_comes_again_keeps_what_it_hangs_below_now_once(tmp_path: Path, elsewhere: bool) -> None:
    """All while the parent of its first try is under way. Pinned twice and let go once, that would stay for ever.

    Elsewhere: a client that makes up keys stores it below another block.
    """

    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        [shelf], space, chain, other = rig.shelves, rig.namespace(), chain_of("a", 2), chain_of("b", 1)
        writes = rig.tier._writes
        done, late = writes._on_done, dict[bytes, Flight]()
        writes._on_done = lambda ops: late.update((op.key, op) for op in ops)
        parent, child = key_of(chain, 0), key_of(chain, 1)
        rig.store(space, chain)
        await rig.until(lambda: len(late) == 2)
        op = late.pop(child)
        op.outcome, op.errno = DiskOutcome.CANCELLED, 0
        done([op])
        if elsewhere:
            rig.forget_blocks(space, child)
            rig.store(space, other)
            await rig.until(lambda: other in late)
            done([late[other]])
            rig.store(space, other + child)
        else:
            writes.add(space, child, asked_again=True)
        await rig.until(lambda: child in late)
        done([late[parent]])
        done([late[child]])
        await rig.settled()
        assert {shelf.index.pins[stored.entry] for key in (parent, other) if (stored := shelf.find(space, key))} == {0}
        rig.check()
        await rig.close()

    play(scenario)


def test_frames_that_a_hung_disk_may_still_write_to_are_not_given_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        [shelf], space, chain = rig.shelves, rig.namespace(), chain_of("a", 4)
        rig.store(space, chain)
        await rig.settled()
        rig.forget_dram()
        gate, allocator = rig.disks[rig.dirs[0]].gate, rig.cache.space.allocator
        gate.clear()
        lease = rig.match([space], chain)
        assert lease is not None
        await rig.until(lambda: shelf.queue.in_flight == 4)
        under_way = allocator.used_bytes
        rig.tier.promotion.give_up(rig.tier.sources.of(shelf))
        running = shelf.queue.in_flight
        assert running > 0
        assert under_way - allocator.used_bytes == (4 - running) * space.size_class.frame_bytes
        gate.set()
        await rig.until(lambda: shelf.queue.in_flight == 0 and allocator.used_bytes == 0)
        rig.cache.reads.release(rig.owner, lease.lease_id)
        rig.check()
        await rig.close()

    play(scenario)


def test_a_block_that_has_come_another_way_meanwhile_is_there_once(tmp_path: Path) -> None:
    """A client may write it past DRAM while the daemon does so too."""

    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        [shelf], space, chain = rig.shelves, rig.namespace(), chain_of("a", 1)
        writes, late = rig.tier._writes, list[Flight]()
        done = writes._on_done
        writes._on_done = late.extend
        rig.store(space, chain)
        await rig.until(lambda: bool(late))
        slot, length = shelf.take_slot(space, b""), space.spec.block_bytes
        shelf.add(space, chain, b"", slot, StoredBlock(NO_ENTRY, slot, length, 0, 1))
        done(late)
        await rig.settled()
        stored = shelf.find(space, chain)
        assert stored is not None
        assert stored.slot == slot
        assert shelf.allocator.used_bytes == shelf.slot_bytes(space), "the other slot is free again"
        rig.check()
        await rig.close()

    play(scenario)


def test_a_block_with_other_bytes_than_were_written_is_forgotten(tmp_path: Path) -> None:
    """Else the block would be found, read and missed for ever, and nothing stored in its place."""

    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        [shelf], space, chain = rig.shelves, rig.namespace(), chain_of("a", 4)
        rig.store(space, chain)
        await rig.settled()
        stored = shelf.find(space, key_of(chain, 2))
        assert stored is not None
        shelf._checksum[stored.entry] ^= 1
        rig.forget_dram()
        assert await rig.load(space, chain) == 2
        assert not shelf.has(space, key_of(chain, 2))
        assert rig.tier.stats()["bad_blocks"] == 1
        rig.store(space, chain)
        await rig.settled()
        rig.forget_dram()
        assert await rig.load(space, chain) == 4
        rig.check()
        await rig.close()

    play(scenario)


def test_a_row_that_was_refused_is_asked_for_again(tmp_path: Path) -> None:
    """The block is found at once; without its row the next life would not know of it."""

    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        space, chain = rig.namespace(), chain_of("a", 20)
        rig.store(space, chain_of("first", 1))
        await rig.settled()
        writer = rig.shelves[0].catalog._writer
        commit, full = writer._commit, threading.Event()
        full.set()
        writer._commit = lambda db, batch: "full" if full.is_set() else commit(db, batch)  # type: ignore[method-assign]
        rig.store(space, chain)
        await rig.until(lambda: rig.tier.stats()["blocks"] == 21 and len(rig.shelves[0]._unrecorded) > 0)
        full.clear()
        await rig.until(lambda: not rig.shelves[0]._unrecorded and not writer.error)
        await rig.settled()
        await rig.crash()
        again = await TierRig(tmp_path).open()
        assert await again.load(again.namespace(), chain) == 20
        again.check()
        await again.close()

    play(scenario)


def test_the_log_goes_aside_before_its_database(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that a crash leaves without its database is not replayed; deleted in the other order it might be."""
    path = bench.path
    for end in ("", "-wal", "-shm"):
        Path(f"{path}{end}").write_bytes(b"x")
    moved: list[str] = []
    rename = os.rename

    def noted(source: Any, target: Any) -> None:
        assert path.with_name("index.db.suspect").exists(), "the marker stands meanwhile"
        moved.append(Path(source).name)
        rename(source, target)

    monkeypatch.setattr(os, "rename", noted)
    rename_aside(path)
    assert moved[-1] == "index.db"
    assert sorted(moved) == ["index.db", "index.db-shm", "index.db-wal"]
    assert not path.with_name("index.db.suspect").exists()


def test_nothing_more_is_unlinked_while_the_index_is_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each evicted block is a row to delete. These wait where they cost nothing, not in an unbounded queue."""

    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        [shelf], space = rig.shelves, rig.namespace()
        rig.store(space, chain_of("a", 20))
        await rig.settled()
        monkeypatch.setattr(catalog, "MAX_PENDING", 0)
        shelf.drop(space, key_of(chain_of("a", 20), 0))
        for _ in range(3):
            assert not shelf.work()
        assert (len(shelf.slots.left), shelf.catalog.pending) == (0, 0)
        monkeypatch.undo()
        shelf.work()
        assert len(shelf.slots.left) == 20
        await rig.committed()
        assert shelf.allocator.used_bytes == 0
        rig.check()
        await rig.close()

    play(scenario)


def test_so_many_unreadable_blocks_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest failures are remembered; a forgotten block has one more chance, and one that is read has it again."""
    monkeypatch.setattr(shelf_source, "MAX_UNREADABLE", 2)

    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        disk, space, chains = rig.disks[rig.dirs[0]], rig.namespace(), [chain_of(name, 1) for name in "abc"]
        for chain in chains:
            rig.store(space, chain)
        await rig.settled()
        rig.forget_dram()
        for chain in chains:
            disk.hook = fail("preadv", 0)
            assert await rig.load(space, chain) == 0
        assert [key for _, key in rig.tier.sources.unreadable.blocks] == chains[1:]
        assert await rig.load(space, chains[2]) == 1
        assert [key for _, key in rig.tier.sources.unreadable.blocks] == chains[1:2]
        disk.hook = fail("preadv", 0)
        assert await rig.load(space, chains[1]) == 0
        assert not rig.shelves[0].has(space, chains[1]), "twice is enough"
        assert not rig.tier.sources.unreadable.blocks
        rig.check()
        await rig.close()

    play(scenario)


def test_so_many_prefetches_are_under_way_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease beyond the limit gets the blocks that are in DRAM, and promotes nothing."""
    monkeypatch.setattr(reads, "MAX_PREFETCHES", 2)

    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        space, chains = rig.namespace(), [chain_of(name, 4) for name in "abc"]
        for chain in chains:
            rig.store(space, chain)
        await rig.settled()
        rig.forget_dram()
        gate = rig.disks[rig.dirs[0]].gate
        gate.clear()
        found = [rig.cache.prefetch(rig.owner, [space], chain).below for chain in chains]
        assert found == [4, 4, 4]
        assert [lease.keys for lease in rig.cache.reads.growing.leases.values()] == chains[:2]
        gate.set()
        await rig.until(lambda: not rig.cache.reads.growing.leases)
        assert [rig.cache.match(rig.owner, [space], chain, 0).dram for chain in chains] == [4, 4, 0]
        rig.cache.prefetch(rig.owner, [space], chains[2])
        await rig.until(lambda: not rig.cache.reads.growing.leases)
        assert rig.cache.match(rig.owner, [space], chains[2], 0).dram == 4
        rig.check()
        await rig.close()

    play(scenario)
