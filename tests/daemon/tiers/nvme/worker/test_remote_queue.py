"""Blocks that a process moves: credit, priorities, and what becomes of them at its end. The test is the process."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import pytest
from waiting import wait_until

from tiercache.copies.arena import Region, create_region
from tiercache.daemon.tiers.nvme.disk.block_io import NOWHERE, AnyOp, DiskOutcome, ReadOp, TaskOp, WriteOp
from tiercache.daemon.tiers.nvme.disk.queue import DiskPriority
from tiercache.daemon.tiers.nvme.worker import records, remote_queue
from tiercache.daemon.tiers.nvme.worker.packets import receive_now
from tiercache.daemon.tiers.nvme.worker.records import BlockRecord, Tag
from tiercache.daemon.tiers.nvme.worker.regions import ArenaFiles
from tiercache.daemon.tiers.nvme.worker.remote_queue import RemoteQueue

REGION_BYTES = 1 << 20
PAGE = 4096


class Process:
    """One life of the process."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.ours, self.its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        rig.sockets += [self.ours, self.its]
        self.told: list[Tag] = []
        self.names: dict[int, str] = {}
        rig.queue.connect(self.ours)

    def blocks(self) -> list[BlockRecord]:
        """Blocks that came since the last look; `told` has the tags of all packets."""
        found: list[BlockRecord] = []
        while True:
            try:
                data, fds = receive_now(self.its, records.MAX_PACKET_BYTES)
            except BlockingIOError:
                if self.rig.room is None:
                    return found
                self.rig.room()
                continue
            tag = records.tag_of(data)
            self.told.append(tag)
            if tag is Tag.BLOCKS:
                found += records.block_records(data)
            elif tag is Tag.NAME:
                number, name = records.name_of(data)
                self.names[number] = name
            elif tag is Tag.REGION:
                os.close(fds[0])

    def say(self, packet: bytes) -> None:
        self.its.send(packet)
        assert self.rig.queue.readable(self.ours)
        self.rig.turn()

    def answer(self, blocks: Sequence[BlockRecord], outcome: DiskOutcome = DiskOutcome.OK) -> None:
        for block in blocks:
            end = block.number, records.NUMBER_OF[outcome], block.codec, 0, block.length, 9, 1, 1, block.length
            self.say(records.packet(Tag.ENDS, [records.END.pack(*end)]))

    def end(self) -> None:
        """It ends, but may still be in the kernel."""
        self.its.close()
        assert not self.rig.queue.readable(self.ours)
        self.rig.room = None
        self.ours.close()
        self.rig.queue.disconnect()


class Rig:
    """A queue over an arena of one region, and an event loop of sorts."""

    def __init__(self) -> None:
        self.soon: deque[Callable[[], None]] = deque()
        self.room: Callable[[], None] | None = None
        self.sockets: list[socket.socket] = []
        self.ended: list[AnyOp] = []
        self.arena = ArenaFiles()
        self.regions = [self._region(0)]
        self.queue = RemoteQueue(self.arena, self.soon.append, self._wait_for_room)

    def _region(self, number: int) -> Region:
        fd = create_region(REGION_BYTES, "test")
        region = Region(number, fd, REGION_BYTES)
        self.arena.add(region, fd)
        os.close(fd)
        return region

    def _wait_for_room(self, line: socket.socket, callback: Callable[[], None] | None) -> None:
        self.room = callback

    def step(self) -> None:
        """One turn of the loop: what is called during it waits for the next one."""
        for _ in range(len(self.soon)):
            self.soon.popleft()()

    def turn(self) -> None:
        while self.soon:
            self.soon.popleft()()

    def read(self, length: int = PAGE, at: int = 0, priority: DiskPriority = DiskPriority.LOAD) -> ReadOp:
        op = ReadOp(
            done=self.ended.append,
            slot=at * PAGE,
            address=self.regions[0].address + at * PAGE,
            length=length,
            key=at.to_bytes(16, "little"),
            fingerprint="name",
            stored_length=length,
            checksum=1,
        )
        assert self.queue.submit(op, priority)
        return op

    def write(self, length: int = PAGE, at: int = 0) -> WriteOp:
        op = WriteOp(
            done=self.ended.append,
            slot=at * PAGE,
            address=self.regions[0].address + at * PAGE,
            length=length,
            key=at.to_bytes(16, "little"),
            fingerprint="name",
        )
        assert self.queue.submit(op, DiskPriority.WRITE)
        return op

    def check_idle(self) -> None:
        """Everything has come back, and so has all credit."""
        its = self.queue
        assert (its.in_flight, its.in_flight_bytes, its.queued()) == (0, 0, 0)
        assert (its._sent_bytes, its._sent_writes, its._sent_write_bytes, len(its._sent)) == (0, 0, 0, 0)
        assert not its._packets


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    assert rig.queue.stop(time.monotonic() + 50)
    for one in rig.sockets:
        one.close()
    rig.arena.close()
    for region in rig.regions:
        region.unmap()


def test_blocks_go_with_what_they_need_and_come_back(rig: Rig) -> None:
    process = Process(rig)
    read, write = rig.read(at=3), rig.write(at=5)
    verify = rig.read(at=7)
    verify.address = NOWHERE
    blocks = process.blocks()
    assert process.told[:3] == [Tag.REGION, Tag.NAME, Tag.BLOCKS]
    assert [(block.write, block.frame, block.slot) for block in blocks[:2]] == [
        (0, 3 * PAGE, 3 * PAGE),
        (1, 5 * PAGE, 5 * PAGE),
    ]
    assert {process.names[block.name] for block in blocks} == {"name"}
    process.answer(blocks)
    assert rig.ended == [read, write, verify]
    assert (write.outcome, write.stored_length, write.checksum) == (DiskOutcome.OK, PAGE, 9)
    assert (rig.queue.reads, rig.queue.writes, rig.queue.read_calls) == (2, 1, 2)
    rig.check_idle()


def test_a_block_that_is_only_verified_has_no_frame(rig: Rig) -> None:
    op = rig.read()
    op.address = NOWHERE
    process = Process(rig)
    (block,) = process.blocks()
    assert block.frame == remote_queue.NO_FRAME
    process.answer([block], DiskOutcome.CORRUPT)
    assert op.outcome is DiskOutcome.CORRUPT
    assert rig.queue.checksum_failures == 1
    rig.check_idle()


def test_a_region_is_told_before_blocks_in_it(rig: Rig) -> None:
    process = Process(rig)
    process.blocks()
    rig.arena.tell(lambda region, fd: rig.queue.add_region(region.region_id, region.size_bytes, fd))
    rig.regions.append(rig._region(1))
    rig.regions.reverse()
    rig.read()
    (block,) = process.blocks()
    assert process.told == [Tag.REGION, Tag.REGION, Tag.NAME, Tag.BLOCKS]
    assert block.frame == 1 << 48
    process.end()
    rig.queue.lost()
    rig.turn()
    again = Process(rig)
    rig.read()
    again.answer(again.blocks())
    assert again.told == [Tag.REGION, Tag.REGION, Tag.NAME, Tag.BLOCKS]
    rig.check_idle()


@pytest.mark.parametrize("limit", ["MAX_SENT", "MAX_SENT_BYTES"])
def test_credit_limits_what_the_process_has(rig: Rig, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(remote_queue, limit, 3 if limit == "MAX_SENT" else 3 * PAGE)
    process = Process(rig)
    ops = [rig.read(at=number) for number in range(8)]
    assert rig.queue.queued(DiskPriority.LOAD) == 5
    seen = []
    while blocks := process.blocks():
        assert len(blocks) <= 3
        seen += [block.slot for block in blocks]
        process.answer(blocks)
    assert seen == [op.slot for op in ops]
    rig.check_idle()


def test_writes_leave_credit_for_loads(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_queue, "MAX_SENT_WRITES", 2)
    process = Process(rig)
    for number in range(5):
        rig.write(at=number)
    assert len(process.blocks()) == 2
    rig.read(at=9)
    (load,) = process.blocks()
    assert not load.write
    monkeypatch.undo()
    process.answer([load])
    assert len(process.blocks()) == 3
    process.end()
    rig.queue.lost()


def test_one_block_is_under_way_however_large(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_queue, "MAX_SENT_BYTES", PAGE)
    monkeypatch.setattr(remote_queue, "MAX_SENT_WRITE_BYTES", PAGE)
    process = Process(rig)
    for _ in range(2):
        rig.write(4 * PAGE)
        rig.read(8 * PAGE)
    seen = []
    while blocks := process.blocks():
        assert len(blocks) == 1
        seen.append(blocks[0].write)
        process.answer(blocks)
    assert seen == [1, 0, 0, 1], "loads first, once there is a choice"
    rig.check_idle()


def test_small_blocks_do_not_keep_a_large_load_waiting(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that came back would make room for another small one, and never for the large one."""
    monkeypatch.setattr(remote_queue, "MAX_SENT_BYTES", 4 * PAGE)
    process = Process(rig)
    for number in range(4):
        rig.read(at=number, priority=DiskPriority.PREFETCH)
    small = process.blocks()
    assert len(small) == 4
    rig.read(3 * PAGE, at=8)
    for number in range(4, 8):
        rig.read(at=number, priority=DiskPriority.PREFETCH)
    process.answer(small[:2])
    assert process.blocks() == []
    process.answer(small[2:3])
    large, *others = process.blocks()
    assert (large.length, others) == (3 * PAGE, [])
    process.answer([large, *small[3:]])
    process.answer(process.blocks())
    rig.check_idle()


def test_a_line_without_room_keeps_all_packets_in_order(rig: Rig) -> None:
    process = Process(rig)
    count = 0
    while rig.room is None:
        rig.queue.ping()
        count += 1
        assert count < 100_000
    rig.queue.ping()
    op = rig.read()
    rig.turn()
    assert not rig.soon, "nothing is tried again before there is room"
    blocks = process.blocks()
    assert rig.room is None, "the loop is not woken any more"
    assert process.told == [Tag.REGION, *[Tag.PING] * (count + 1), Tag.NAME, Tag.BLOCKS]
    process.answer(blocks)
    assert rig.ended == [op]


def test_cancelling_ends_what_waits_and_asks_the_process_for_the_rest(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_queue, "MAX_SENT", 1)
    process = Process(rig)
    first, second, write = rig.read(), rig.read(at=1), rig.write(at=2)
    assert rig.queue.cancel_queued(DiskPriority.LOAD) == 1
    assert rig.ended == [], "not in the call"
    rig.turn()
    assert rig.ended == [second]
    blocks = process.blocks()
    assert process.told[-1] is Tag.CANCEL
    process.answer(blocks, DiskOutcome.CANCELLED)
    assert rig.ended == [second, first]
    assert first.outcome is second.outcome is DiskOutcome.CANCELLED
    process.answer(process.blocks())
    assert write.outcome is DiskOutcome.OK
    assert rig.queue.cancelled == 2
    rig.check_idle()


def test_what_is_not_wanted_any_more_is_not_sent(rig: Rig) -> None:
    read, write = rig.read(), rig.write(at=1)
    read.unwanted = True
    process = Process(rig)
    (block,) = process.blocks()
    rig.turn()
    assert read.outcome is DiskOutcome.CANCELLED
    write.unwanted = True  # too late
    process.answer([block])
    assert write.outcome is DiskOutcome.OK
    rig.check_idle()


def test_frames_are_kept_until_the_process_is_gone_and_writes_are_made_again(rig: Rig) -> None:
    process = Process(rig)
    read, write, gone_off = rig.read(), rig.write(at=1), rig.write(at=2)
    sent = process.blocks()
    later = rig.write(at=3)
    gone_off.unwanted = True
    process.end()
    rig.turn()
    assert rig.ended == [], "it may still be in the kernel"
    assert rig.queue.in_flight == 4
    rig.queue.lost()
    rig.turn()
    assert rig.ended == [read, gone_off]
    assert {op.outcome for op in rig.ended} == {DiskOutcome.CANCELLED}
    again = Process(rig)
    blocks = again.blocks()
    assert [block.slot for block in blocks] == [write.slot, later.slot]
    assert not {block.number for block in blocks} & {block.number for block in sent}, "no answer is taken for another"
    again.answer(blocks)
    rig.check_idle()


def test_a_write_that_ends_every_process_is_given_up(rig: Rig) -> None:
    op = rig.write()
    for number in range(remote_queue.MAX_TRIES):
        assert rig.ended == []
        process = Process(rig)
        assert len(process.blocks()) == 1, number
        process.end()
        rig.queue.lost()
        rig.turn()
    assert rig.ended == [op]
    assert op.outcome is DiskOutcome.CANCELLED
    process = Process(rig)
    assert process.blocks() == []
    rig.check_idle()


def test_a_process_that_has_ended_takes_nothing_more(rig: Rig) -> None:
    process = Process(rig)
    process.its.close()
    op = rig.write()
    assert not rig.queue.readable(process.ours)
    rig.queue.disconnect()
    rig.queue.lost()
    again = Process(rig)
    again.answer(again.blocks())
    assert op.outcome is DiskOutcome.OK
    rig.check_idle()


@pytest.mark.parametrize("why", ["its process is gone", "cancelled", "the daemon ends"])
def test_so_many_blocks_are_cancelled_in_one_turn(rig: Rig, why: str) -> None:
    count = 3 * remote_queue.CANCELLED_AT_ONCE
    process = Process(rig) if why == "its process is gone" else None
    ops = [rig.read(at=number % 256) for number in range(count)]
    if process is not None:
        assert len(process.blocks()) == count
        process.end()
        rig.queue.lost()
    else:
        rig.queue.cancel_queued()
    assert rig.ended == [], "not in the call"
    for turn in range(1, 3):
        rig.step()
        assert len(rig.ended) == turn * remote_queue.CANCELLED_AT_ONCE
    if why == "the daemon ends":
        assert rig.queue.stop(time.monotonic())
    else:
        rig.step()
    assert rig.ended == ops
    assert {op.outcome for op in ops} == {DiskOutcome.CANCELLED}
    rig.turn()
    rig.check_idle()


# --- how old --------------------------------------------------------------------------------------------


def test_a_backlog_in_the_process_is_no_fault_of_the_disk(rig: Rig) -> None:
    process = Process(rig)
    rig.read()
    blocks = process.blocks()
    rig.queue._sent_at[0] = (0, time.monotonic() - 1000)
    rig.queue._disk_since_s = 0.0
    assert rig.queue.oldest_age_s() > 900, "as far as is known"
    process.say(records.pong_packet(0.5))
    assert 0.5 <= rig.queue.oldest_age_s() < 100
    process.say(records.pong_packet(700.0))
    assert 700 <= rig.queue.oldest_age_s() < 800
    process.answer(blocks)
    assert rig.queue.oldest_age_s() == 0.0


def test_without_a_process_the_queue_is_as_old_as_that(rig: Rig) -> None:
    process = Process(rig)
    assert rig.queue.oldest_age_s() == 0.0
    process.end()
    rig.queue._down_s -= 100
    assert rig.queue.oldest_age_s() >= 100


# --- tasks and the end ----------------------------------------------------------------------------------


def task(rig: Rig, call: Callable[[], object]) -> TaskOp:
    op = TaskOp(done=rig.ended.append, call=call)
    assert rig.queue.submit(op, DiskPriority.WRITE)
    return op


def test_tasks_run_one_after_another_and_an_error_is_theirs(rig: Rig) -> None:
    def fails() -> None:
        raise OSError(28, "full")

    first, second = task(rig, fails), task(rig, list)
    wait_until(lambda: rig.turn() or len(rig.ended) == 2)
    assert (first.outcome, first.errno, second.outcome) == (DiskOutcome.IO_ERROR, 28, DiskOutcome.OK)
    rig.check_idle()


def test_stopping_waits_for_what_is_under_way(rig: Rig) -> None:
    process = Process(rig)
    read, begun, go_on = rig.read(), threading.Event(), threading.Event()
    running = task(rig, lambda: (begun.set(), go_on.wait(50)))
    waits = task(rig, list)
    (block,) = process.blocks()
    assert begun.wait(50)
    end = block.number, records.NUMBER_OF[DiskOutcome.OK], 0, 0, PAGE, 9, 1, 1, PAGE
    timer = threading.Timer(0.05, lambda: (process.its.send(records.packet(Tag.ENDS, [records.END.pack(*end)])),))
    timer.start()
    threading.Timer(0.1, go_on.set).start()
    assert rig.queue.stop(time.monotonic() + 50)
    assert (read.outcome, running.outcome, waits.outcome) == (DiskOutcome.OK, DiskOutcome.OK, DiskOutcome.CANCELLED)
    rig.turn()
    assert len(rig.ended) == 3, "each once"
    rig.check_idle()
    assert not rig.queue.submit(read, DiskPriority.LOAD)


def test_what_does_not_end_in_time_is_abandoned(rig: Rig) -> None:
    process = Process(rig)
    read = rig.read()
    blocks = process.blocks()
    assert not rig.queue.stop(time.monotonic() + 0.02)
    assert read.outcome is DiskOutcome.ABANDONED
    process.answer(blocks)  # too late: no caller waits for it
    assert rig.ended == [read]


def test_stopping_does_not_take_the_end_of_a_process_for_the_end_of_its_work(rig: Rig) -> None:
    process = Process(rig)
    op = rig.write()
    process.blocks()
    process.its.close()
    assert not rig.queue.stop(time.monotonic() + 50)
    assert op.outcome is DiskOutcome.ABANDONED
    rig.queue.disconnect()
    assert rig.queue.stop(time.monotonic())
