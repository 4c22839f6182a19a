"""Writes in progress: what they hold, when they are over, and in which form blocks are written."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import tier_rig
from chains import chain_of, key_of
from memory_disks import MemoryDisk
from played import Clock, on_clock
from tier_rig import TierRig

from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.forms import codecs
from tiercache.daemon.tiers.nvme.disk.block_io import DiskOutcome
from tiercache.daemon.tiers.nvme.moves.flights import SETTLED_AT_ONCE, Flight
from tiercache.daemon.tiers.nvme.shelf import StoredBlock
from tiercache.protocol.namespaces import NamespaceSpec

PAGE = 4096
NOWHERE = Path("/nowhere")
BLOCKS = 2 * SETTLED_AT_ONCE + 20


async def rig_on(clock: Clock, **settings: object) -> tuple[TierRig, MemoryDisk, Namespace]:
    """A tier on one disk that has a segment already."""
    disk = MemoryDisk(0, clock, segment_bytes=1 << 20)
    rig = await TierRig(NOWHERE, disks=[disk], **settings).open()  # type: ignore[arg-type]
    space = rig.namespace(PAGE)
    rig.store(space, chain_of("makes the segment", 1))
    await rig.settled()
    return rig, disk, space


async def first_is_late(rig: TierRig, disk: MemoryDisk, space: Namespace) -> bytes:
    """All of a chain is written but its first block."""
    chain = chain_of("late", BLOCKS)
    rig.store(space, chain)
    while rig.tier._writes.queued:
        await rig.work()
    disk.step(BLOCKS - 1, at=1, commits=False)
    return chain


@on_clock
async def test_what_waited_for_a_block_becomes_visible_in_slices_and_is_in_flight_until_then(clock: Clock) -> None:
    rig, disk, space = await rig_on(clock)
    table, before = rig.shelves[0].table(space), rig.shelves[0].table(space).blocks
    chain = await first_is_late(rig, disk, space)
    rig.tier._writes.settle()
    assert table.blocks == before
    assert rig.tier._writes.in_flight_bytes == PAGE
    disk.step(commits=False)
    assert rig.tier._writes.in_flight_bytes == 0
    visible = 0
    while visible < BLOCKS:
        assert rig.tier.stats()["write_in_flight_bytes"] == (BLOCKS - visible) * PAGE
        more = rig.tier._writes.settle()
        rig.check()
        assert 0 < table.blocks - before - visible <= SETTLED_AT_ONCE
        visible = table.blocks - before
        assert more is (visible < BLOCKS)
    assert rig.tier.stats()["write_in_flight_bytes"] == 0
    await rig.settled()
    rig.forget_dram()
    assert await rig.load(space, chain) == BLOCKS
    await rig.close()


@pytest.mark.parametrize("key", [b"", chain_of("late", 1)])
@on_clock
async def test_what_is_flushed_between_two_slices_stays_away(clock: Clock, key: bytes) -> None:
    rig, disk, space = await rig_on(clock)
    chain = await first_is_late(rig, disk, space)
    disk.step(commits=False)
    rig.tier._writes.settle()
    assert await rig.flush(key)
    await rig.settled()
    assert not rig.tier.length(space, chain, BLOCKS)
    rig.check()
    await rig.crash()
    rig = await TierRig(NOWHERE, disks=[disk]).open()
    assert await rig.load(rig.namespace(PAGE), chain) == 0
    await rig.close()


@pytest.mark.parametrize("by_key", [False, True])
@on_clock
async def test_what_is_flushed_while_it_is_written_stays_away(clock: Clock, by_key: bool) -> None:
    """Also where it hangs below the root, or below a block that is not flushed."""
    rig, disk, space = await rig_on(clock)
    chain = chain_of("a", 6)
    rig.store(space, chain[: 16 * 3])
    if by_key:
        await rig.settled()
        rig.store(space, chain)
    await rig.work(3)
    assert disk.queue is not None
    assert disk.queue.in_flight == 3
    rig.cache.flush_dram([space.number], key_of(chain, 3) if by_key else b"")
    rig.tier.flush([space], key_of(chain, 3) if by_key else b"", lambda blocks, durable: None)
    await rig.settled()
    assert await rig.load(space, chain) == (3 if by_key else 0)
    rig.check()
    await rig.close()


@on_clock
async def test_what_waited_for_a_block_that_failed_is_lost_in_slices(clock: Clock) -> None:
    rig, disk, space = await rig_on(clock)
    writes = rig.tier._writes
    await first_is_late(rig, disk, space)
    disk.failing.add("write")
    disk.step(commits=False)
    rounds = 0
    while not writes.idle:
        before, _ = len(writes._flying), writes.settle()
        assert before - len(writes._flying) <= SETTLED_AT_ONCE
        rounds += 1
        rig.check()
    assert rounds >= BLOCKS // SETTLED_AT_ONCE
    assert rig.tier.stats()["write_failed_blocks"] == 1
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


@pytest.mark.parametrize("elsewhere", [False, True])
@on_clock
async def test_a_write_that_comes_again_keeps_what_it_hangs_below_now_once(clock: Clock, elsewhere: bool) -> None:
    """All while the parent of its first try is under way. Pinned twice and let go once, that would stay for ever.

    Elsewhere: a client that makes up keys stores it below another block.
    """
    rig, _disk, space = await rig_on(clock)
    [shelf], chain, other = rig.shelves, chain_of("a", 2), chain_of("b", 1)
    late, done = hold_back(rig, lambda op: True)
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
        rig.tier._writes.add(space, child, asked_again=True)
    await rig.until(lambda: child in late)
    done([late[parent]])
    done([late[child]])
    await rig.settled()
    assert {shelf.index.pins[stored.entry] for key in (parent, other) if (stored := shelf.find(space, key))} == {0}
    rig.check()
    await rig.close()


@pytest.mark.parametrize("why", ["is flushed", "is written elsewhere"])
@on_clock
async def test_a_late_block_does_not_join_its_parent_that_is_written_again(clock: Clock, why: str) -> None:
    """What was flushed would be there again, or on a disk that does not have it."""
    disks = [MemoryDisk(number, clock, segment_bytes=1 << 20) for number in range(2)]
    rig = await TierRig(NOWHERE, disks=disks).open()
    space, chain = rig.namespace(PAGE), chain_of("a", 2)
    parent, child = key_of(chain, 0), key_of(chain, 1)
    late, done = hold_back(rig, lambda op: True)
    rig.store(space, chain)
    await rig.until(lambda: len(late) == 2)
    first, its_child = late.pop(parent), late.pop(child)
    if why == "is flushed":
        rig.cache.flush_dram([space.number], b"")
        rig.tier.flush([space], b"", lambda blocks, durable: None)
    else:
        rig.at[first.shelf.directory.path].away = "the test took it"
        await rig.until(lambda: len(rig.shelves) == 1)
    done([first])
    await rig.until(lambda: not rig.tier._writes.settle())
    assert rig.tier._writes.written_blocks == 0
    rig.store(space, parent)
    rig.tier._writes.add(space, parent, asked_again=True)
    await rig.until(lambda: parent in late)
    done([its_child])
    done([late[parent]])
    await rig.settled()
    assert not any(shelf.has(space, child) for shelf in rig.shelves)
    rig.forget_dram()
    assert await rig.load(space, chain) == 1
    rig.check()
    await rig.crash()


@on_clock
async def test_all_that_wait_for_one_block_become_visible_with_it_and_are_written_once(clock: Clock) -> None:
    rig, disk, space = await rig_on(clock)
    chains = [chain_of("a", 1) + chain_of(name, 2) for name in "bcd"]
    late, done = hold_back(rig, lambda op: True)
    for chain in chains:
        rig.store(space, chain)
    await rig.until(lambda: len(late) == 7)
    for op in reversed(list(late.values())):
        done([op])
    await rig.settled()
    rig.forget_dram()
    assert [await rig.load(space, chain) for chain in chains] == [3, 3, 3]
    rig.tier._writes.add_many(space, [key_of(chains[0], number) for number in range(3)], asked_again=True)
    await rig.settled()
    assert len(disk.written) == 8
    rig.check()
    await rig.close()


def written_by_a_client(rig: TierRig, space: Namespace, key: bytes) -> int:
    """A client has written a block past DRAM, below the root; returns its slot."""
    [shelf] = rig.shelves
    slot = shelf.take_slot(space, b"")
    shelf.add(space, key, b"", slot, StoredBlock(NO_ENTRY, slot, space.spec.block_bytes, 0, 1), stored=True)
    return slot


@on_clock
async def test_a_block_that_has_come_another_way_meanwhile_is_there_once(clock: Clock) -> None:
    rig, _disk, space = await rig_on(clock)
    [shelf], chain = rig.shelves, chain_of("a", 1)
    late, done = hold_back(rig, lambda op: True)
    rig.store(space, chain)
    await rig.until(lambda: bool(late))
    slot = written_by_a_client(rig, space, chain)
    done(list(late.values()))
    await rig.settled()
    stored = shelf.find(space, chain)
    assert stored is not None
    assert stored.slot == slot
    assert shelf.allocator.used_bytes == 2 * PAGE, "the other slot is free again"
    await rig.crash()


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


@on_clock
async def test_what_hangs_below_a_run_that_is_cut_becomes_visible(clock: Clock) -> None:
    """One of its blocks is here already when it is to become visible: a client has stored it below another one."""
    rig, disk, space = await rig_on(clock)
    [shelf], chain = rig.shelves, chain_of("a", 8)
    siblings = [chain_of(name, 1, after=chain) for name in ("e", "f")]
    for one in (chain, *siblings):
        rig.store(space, one)
    await rig.work(2)
    assert len(rig.tier._writes._flying) == 10
    disk.step()
    written_by_a_client(rig, space, key_of(chain, 1))
    await rig.settled()
    rig.check()
    assert shelf.has(space, key_of(chain, 7))
    assert [shelf.has(space, one[-16:]) for one in siblings] == [True, True]
    await rig.crash()


# --- forms of blocks --------------------------------------------------------------------------------

NAMES = ["lz4", *(["zstd"] if importlib.util.find_spec("zstandard") else [])]


def kv_content(key: bytes, length: int) -> bytes:
    """Values as a bfloat16 KV cache has them: exponents that repeat, mantissas that do not."""
    values = np.random.default_rng(int.from_bytes(key[:8], "little")).standard_normal(length // 2, np.float32)
    return np.ascontiguousarray(values.view(np.uint16)[1::2]).tobytes()


def noise(key: bytes, length: int) -> bytes:
    return np.random.default_rng(int.from_bytes(key[:8], "little")).bytes(length)


def space_of(rig: TierRig, dtype: str) -> Namespace:
    spec = NamespaceSpec(engine="t", layout="l", dtype=dtype, block_size=1, block_bytes=32 << 10)
    return rig.cache.space.open_namespace(spec)


@on_clock
async def test_blocks_come_back_byte_for_byte_whatever_the_codec_is_now(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_rig, "content", kv_content)
    disk = MemoryDisk(0, clock, segment_bytes=256 << 10)
    written = list[bytes]()
    for number, name in enumerate(["raw", *NAMES, "raw"]):
        rig = await TierRig(NOWHERE, disks=[disk], nvme_codec=name).open()
        space = space_of(rig, "bfloat16")
        assert [await rig.load(space, chain) for chain in written] == [4] * number
        written.append(chain_of(number, 4))
        rig.store(space, written[-1])
        await rig.settled()
        stats = rig.tier.stats()
        assert stats["codec"] == name
        assert (stats["saved_by_codec_bytes"] > 0) is (name != "raw")
        assert stats["bytes"] == 4 * len(written) * (32 << 10), "a codec saves no room"
        rig.check()
        await rig.close()
    found = sorted(row[6] for row in disk.database.rows.values())
    assert found == sorted(codecs.codec_number(name, 2) for name in ["raw", *NAMES, "raw"] for _ in range(4))


@pytest.mark.parametrize(
    ("dtype", "content", "codec"),
    [("bfloat16", noise, codecs.RAW), ("float32", tier_rig.content, codecs.codec_number("lz4", 4))],
    ids=["does not get smaller", "elements of 4 bytes"],
)
@on_clock
async def test_the_form_suits_the_block(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, dtype: str, content: Callable[[bytes, int], bytes], codec: int
) -> None:
    monkeypatch.setattr(tier_rig, "content", content)
    disk = MemoryDisk(0, clock, segment_bytes=256 << 10)
    rig = await TierRig(NOWHERE, disks=[disk], nvme_codec="lz4").open()
    space, chain = space_of(rig, dtype), chain_of("a", 4)
    await rig.store_below([space], chain)
    assert await rig.load(space, chain) == 4
    assert {row[6] for row in disk.database.rows.values()} == {codec}
    await rig.close()
