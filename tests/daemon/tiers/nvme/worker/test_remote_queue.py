"""What the worker machine does not play: large blocks, how old the queue is, and its end at a deadline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from stepped_worker import SteppedWorker

from tiercache.daemon.tiers.forms.codecs import RAW
from tiercache.daemon.tiers.nvme.disk.block_io import NOWHERE, AnyOp, DiskOutcome, ReadOp
from tiercache.daemon.tiers.nvme.disk.disk import PAGE_BYTES
from tiercache.daemon.tiers.nvme.disk.queue import DiskPriority
from tiercache.daemon.tiers.nvme.worker import remote_queue
from tiercache.protocol.checksums import CHECKSUM_XXH3

LOAD, PREFETCH = DiskPriority.LOAD, DiskPriority.PREFETCH


class Blocks:
    """Reads of blocks that are not there, which are as good as any for the queue."""

    def __init__(self, world: SteppedWorker) -> None:
        self.world, self.queue = world, world.queue
        self.ended: list[AnyOp] = []

    def read(self, pages: int = 1, priority: DiskPriority = LOAD, address: int = NOWHERE) -> ReadOp:
        length = pages * PAGE_BYTES
        op = ReadOp(
            done=self.ended.append,
            slots=[1 << 48],
            addresses=[address],
            length=length,
            keys=[bytes(16)],
            fingerprint="name",
            codecs=[RAW],
            kinds=[CHECKSUM_XXH3],
            stored_lengths=[length],
            checksums=[1],
        )
        assert self.queue.submit(op, priority)
        return op

    def turn(self, count: int = 1) -> None:
        """The process ends so many blocks, and the loop takes that."""
        child = self.world.child
        assert child is not None
        for _ in range(10):
            child.serve_blocks()
        for _ in range(count):
            child.carrier.take()
            child.carrier.move()
            child.carrier.finish()
        child.serve_blocks()
        self.world.loop.turn()
        assert self.queue.check_integrity() == []


@pytest.fixture
def blocks(tmp_path: Path) -> Iterator[Blocks]:
    world = SteppedWorker(tmp_path, 4)
    yield Blocks(world)
    world.stop()
    world.close()
    world.end()


def test_small_blocks_do_not_keep_a_large_load_waiting(blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that came back would make room for another small one, and never for the large one."""
    monkeypatch.setattr(remote_queue, "MAX_SENT_BYTES", 4 * PAGE_BYTES)
    small = [blocks.read(priority=PREFETCH) for _ in range(4)]
    large = blocks.read(3)
    later = [blocks.read(priority=PREFETCH) for _ in range(4)]
    blocks.turn(2)
    assert (blocks.queue.queued(LOAD), blocks.queue.queued(PREFETCH)) == (1, 4)
    blocks.turn()
    assert (blocks.queue.queued(LOAD), blocks.queue.queued(PREFETCH)) == (0, 4)
    for _ in range(6):
        blocks.turn(2)
    assert set(blocks.ended) == {large, *small, *later}


def test_blocks_go_to_a_region_that_is_younger_than_the_process(blocks: Blocks) -> None:
    op = blocks.read(address=blocks.world.add_region(1).address)
    blocks.turn()
    assert blocks.ended == [op], "it finds the frame, and no block"


def test_a_backlog_in_the_process_is_no_fault_of_the_disk(blocks: Blocks) -> None:
    blocks.read()
    blocks.world.clock.now_s += 1000
    assert blocks.queue.oldest_age_s() == 1000, "as far as is known"
    blocks.queue.ping()
    child = blocks.world.child
    assert child is not None
    for _ in range(4):
        child.serve_blocks()
    blocks.world.loop.turn()
    assert blocks.queue.oldest_age_s() == 0.0
    blocks.turn()
    assert len(blocks.ended) == 1


def test_without_a_process_the_queue_is_as_old_as_that(blocks: Blocks) -> None:
    assert blocks.queue.oldest_age_s() == 0.0
    blocks.world.end_child(-9)
    blocks.world.loop.turn()
    blocks.world.clock.now_s += 100
    assert blocks.queue.oldest_age_s() == 100


@pytest.mark.parametrize("left_s", [60, 0, -1])
def test_stopping_takes_what_has_ended_by_then(blocks: Blocks, left_s: int) -> None:
    """No time is left where a directory whose disk hangs was stopped before."""
    op = blocks.read()
    child = blocks.world.child
    assert child is not None
    for _ in range(4):  # as many packets
        child.work()
    assert blocks.queue.stop(blocks.world.clock.now_s + left_s)
    assert blocks.ended == [op]
    assert op.outcomes == [DiskOutcome.IO_ERROR]
    assert not blocks.queue.submit(op, LOAD)


@pytest.mark.parametrize("ends", [False, True])
def test_what_does_not_end_in_time_is_abandoned(blocks: Blocks, ends: bool) -> None:
    """Nor is the end of the process the end of what it has begun on its disk."""
    op = blocks.read()
    if ends:
        blocks.world.end_child(-9)
    assert not blocks.queue.stop(blocks.world.clock.now_s)
    assert blocks.ended == [op]
    assert op.outcomes == [DiskOutcome.ABANDONED]
