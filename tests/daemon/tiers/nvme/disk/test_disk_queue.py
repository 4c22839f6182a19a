"""Blocks come back from the disk as they were written, or are recognised as wrong."""

from __future__ import annotations

import errno
import math
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_rig import DEADLINE_S, SEGMENT_BYTES, ObedientDisk, Rig, content, key, segment_path
from waiting import wait_until

from tiercache.daemon.tiers.forms import codecs
from tiercache.daemon.tiers.nvme.disk import backlog, queue
from tiercache.daemon.tiers.nvme.disk.block_io import BlockForms
from tiercache.daemon.tiers.nvme.disk.disk import PAGE_BYTES
from tiercache.daemon.tiers.nvme.disk.queue import DiskOutcome, DiskPriority, WriteOp

pytestmark = pytest.mark.usefixtures("carrier")

OK, CORRUPT, IO_ERROR = DiskOutcome.OK, DiskOutcome.CORRUPT, DiskOutcome.IO_ERROR


@pytest.fixture
def rig(tmp_path: Path, carrier: str) -> Iterator[Rig]:
    made = Rig(tmp_path / "nvme")
    assert made.queue.io == carrier
    yield made
    made.close()


@pytest.fixture
def one_worker(tmp_path: Path, carrier: str) -> Iterator[Rig]:
    made = Rig(tmp_path / "nvme", threads=1)
    yield made
    made.close()


def on_disk(rig: Rig, offset: int, length: int) -> bytes:
    return segment_path(rig.directory, 1).read_bytes()[offset : offset + length]


# --- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("length", [1, 255, 4095, 4096, 4097, 8192])
def test_what_is_written_is_read(tmp_path: Path, length: int, direct: bool) -> None:
    rig = Rig(tmp_path / "nvme", ObedientDisk(direct))
    assert (rig.directory.direct, rig.directory.direct_reason == "") == (direct, direct)
    (written,) = rig.store([3], length)
    assert (written.stored_lengths, written.codecs) == ([length], [codecs.RAW])
    assert rig.run([rig.read_op(written, 9)]) == [OK]
    assert rig.frame(9, length) == content(3, length)
    padded = -(-length // PAGE_BYTES) * PAGE_BYTES
    stored = on_disk(rig, 3 * rig.frame_bytes, padded)
    assert stored == content(3, length) + bytes(padded - length)
    rig.close()


def test_every_claim_of_a_row_is_proved(rig: Rig) -> None:
    (written,) = rig.store([0], 5000)
    wrong: list[dict[str, object]] = [
        {"keys": key(1)},
        {"fingerprint": "cd" * 16},
        {"length": 4999, "stored_lengths": 4999},
        {"checksums": written.checksums[0] ^ 1},
        {"slots": rig.slot(1)},
        {"kinds": 2},
    ]
    for changes in wrong:
        assert rig.run([rig.read_op(written, 5, **changes)]) == [CORRUPT], changes
    assert rig.queue.checksum_failures == len(wrong)
    assert rig.run([rig.read_op(written, 5)]) == [OK]


@pytest.mark.parametrize(
    "changes",
    [
        {"stored_lengths": 8192},
        {"stored_lengths": 0},
        {"codecs": 0x21, "stored_lengths": 40 << 10},
        {"codecs": 0x21, "stored_lengths": 0},
        {"codecs": 9, "stored_lengths": 100},
        {"codecs": 0x21, "stored_lengths": 1 << 40},
        {"codecs": -1},
    ],
)
def test_a_row_that_cannot_be_true_writes_nowhere(rig: Rig, changes: dict[str, object]) -> None:
    (written,) = rig.store([0], 4096)
    rig.memory[:] = b"\x55" * len(rig.memory)
    assert rig.run([rig.read_op(written, rig.frames - 1, **changes)]) == [CORRUPT]
    assert rig.memory[:] == b"\x55" * len(rig.memory)


def test_a_place_outside_of_the_segment_is_an_error(rig: Rig) -> None:
    (written,) = rig.store([0], 8192)
    for slot in (1 << 48 | SEGMENT_BYTES - PAGE_BYTES, 1 << 48 | SEGMENT_BYTES, 2 << 48, -PAGE_BYTES):
        op = rig.write_op(0, content(0, 8192))
        op.slots = [slot]
        assert rig.run([op, rig.read_op(written, 4, slots=slot)]) == [IO_ERROR, IO_ERROR]
    assert rig.queue.errors == {errno.EINVAL: 6, errno.ENOENT: 2}
    assert segment_path(rig.directory, 1).stat().st_size == SEGMENT_BYTES
    assert rig.run([rig.read_op(written, 4)]) == [OK]


# --- a disk that fails ---------------------------------------------------------------------------


def broken_round(path: Path, fail_at: int, codec: int) -> tuple[int, Rig]:
    """Write and read eight blocks with the `fail_at`-th transfer failing; returns how many there were."""
    disk = ObedientDisk()
    rig = Rig(path, disk, threads=2)
    calls = 0

    def hook(name: str, size: int) -> None:
        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk.hook = hook
    writes = [rig.write_op(place, content(place, 6000), codec) for place in range(8)]
    written = rig.run(writes, DiskPriority.WRITE)
    reads = [rig.read_op(op, 20 + place) for place, op in enumerate(writes)]
    outcomes = rig.run([op for op, was in zip(reads, written, strict=True) if was is OK])
    assert set(written + outcomes) <= {OK, IO_ERROR}
    for place, op in enumerate(reads):
        if op.outcomes == [OK]:
            assert rig.frame(20 + place, 6000) == content(place, 6000)
    failed = [op for op in [*writes, *reads] if op.outcomes == [IO_ERROR]]
    assert all(op.errnos == {0: errno.EIO} for op in failed)
    assert rig.queue.errors == ({errno.EIO: len(failed)} if failed else {})
    rig.stop()
    return calls, rig


@pytest.mark.parametrize("codec", [codecs.RAW, 0x21])
def test_the_nth_transfer_fails(tmp_path: Path, codec: int) -> None:
    calls, rig = broken_round(tmp_path / "0", 0, codec)
    assert rig.queue.errors == {}
    rig.close()
    for fail_at in range(1, calls + 1):
        _, rig = broken_round(tmp_path / str(fail_at), fail_at, codec)
        rig.close()


@pytest.mark.parametrize("most", [PAGE_BYTES, PAGE_BYTES + 1000, 3 * PAGE_BYTES - 1])
def test_short_and_interrupted_transfers_go_on(one_worker: Rig, most: int) -> None:
    rig, calls = one_worker, 0

    def hook(name: str, size: int) -> int:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise InterruptedError(errno.EINTR, "interrupted")
        return most

    rig.disk.hook = hook
    written = rig.store(range(8), 8192)
    rig.fill(18, b"\x55" * 8192)
    assert rig.run([rig.read_op(op, 10 + place) for place, op in enumerate(written)]) == [OK] * 8
    assert rig.frame(18, 8192) == b"\x55" * 8192, "nothing is moved beyond the last one"
    for place in range(8):
        assert rig.frame(10 + place, 8192) == content(place, 8192)
    assert calls > 16


def test_a_bad_place_and_a_lost_end_cost_only_their_own_blocks(one_worker: Rig) -> None:
    """Reads that share a call; behind the end of its segment a read is an error, and no hang."""
    rig, bad = one_worker, one_worker.frame_bytes * 4
    written = rig.write_run(range(10), [content(number, 8192) for number in range(10)])
    assert rig.run([written], DiskPriority.WRITE) == [OK] * 10

    def hook(name: str, size: int) -> None:
        _, _, offset = rig.disk.calls[-1]
        if offset <= bad < offset + size:
            raise OSError(errno.EIO, "bad place")

    rig.disk.hook = hook
    os.truncate(segment_path(rig.directory, 1), 9 * rig.frame_bytes + PAGE_BYTES)
    read = rig.read_run(written, range(20, 30))
    assert rig.run([read]) == [OK] * 4 + [IO_ERROR] + [OK] * 4 + [IO_ERROR]
    assert rig.queue.errors == {errno.EIO: 2}
    assert read.errnos == {4: errno.EIO, 9: errno.EIO}
    assert (rig.queue.reads, rig.queue.in_flight) == (10, 0)
    for place in (0, 1, 2, 3, 5, 6, 7, 8):
        assert rig.frame(20 + place, 8192) == content(place, 8192)


@pytest.mark.parametrize("when", ["begin", "end"])
def test_a_carrier_survives_an_unexpected_exception(
    one_worker: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    rig = one_worker

    def broken(*args: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(BlockForms, when, broken)
        assert rig.run([rig.write_op(0, content(0, 100))]) == [IO_ERROR]
    assert "unforeseen" in caplog.text
    assert rig.run([rig.write_op(0, content(0, 100))]) == [OK]


# --- queues --------------------------------------------------------------------------------------


def hold(rig: Rig) -> WriteOp:
    """Keep the only worker busy until the gate opens."""
    rig.disk.gate.clear()
    op = rig.write_op(rig.frames - 1, b"x")
    assert rig.queue.submit(op, DiskPriority.LOAD)
    rig.until(lambda: rig.disk.running == 1)
    rig.disk.calls.clear()
    return op


@pytest.mark.parametrize("most", [16, 12])
def test_adjoining_slots_share_a_call(one_worker: Rig, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """So many of them, and no more bytes than a call may move."""
    monkeypatch.setattr(backlog, "MAX_PART_BYTES", most * 8192)
    rig = one_worker
    held = hold(rig)
    # Up to `most` fill one call, the rest to 19 adjoin but would be too many, 22 has a gap before it, 21 is behind it.
    numbers = [*range(20), 22, 21]
    write = rig.write_run(numbers, [content(number, 8192) for number in numbers])
    assert rig.queue.submit(write, DiskPriority.WRITE)
    assert rig.queue.queued(DiskPriority.WRITE) == 22
    rig.disk.gate.set()
    rig.until(lambda: len(rig.finished) == 2)
    assert (held.outcomes, write.outcomes) == ([OK], [OK] * 22)
    assert [(views, offset // rig.frame_bytes) for _, views, offset in rig.disk.calls] == [
        (most, 0),
        (20 - most, most),
        (1, 22),
        (1, 21),
    ]
    assert (rig.queue.writes, rig.queue.write_calls) == (23, 5)
    assert rig.queue.call_bytes["write_call"].sum == rig.queue.written_bytes == PAGE_BYTES + 22 * 8192
    held = hold(rig)
    read = rig.read_run(write, range(30, 52))
    assert rig.queue.submit(read, DiskPriority.PREFETCH)
    rig.disk.gate.set()
    rig.until(lambda: rig.queue.in_flight == 0)
    assert [views for _, views, _ in rig.disk.calls] == [most, 20 - most, 1, 1]
    assert read.outcomes == [OK] * 22
    assert all(rig.frame(30 + place, 8192) == content(number, 8192) for place, number in enumerate(numbers))


def test_loads_before_prefetches_before_writes(one_worker: Rig) -> None:
    rig = one_worker
    hold(rig)
    for number, priority in enumerate(
        [DiskPriority.WRITE, DiskPriority.PREFETCH, DiskPriority.LOAD, DiskPriority.WRITE]
    ):
        assert rig.queue.submit(rig.write_op(2 * number, content(number, 100)), priority)
    assert [rig.queue.queued(priority) for priority in DiskPriority] == [1, 1, 2]
    rig.disk.gate.set()
    rig.until(lambda: len(rig.finished) == 5)
    assert [offset // rig.frame_bytes for _, _, offset in rig.disk.calls] == [4, 2, 0, 6]


def test_the_loop_is_told_of_writes_together_while_others_wait(
    one_worker: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "TELL_WITHIN_NS", math.inf)
    rig, told = one_worker, list[int]()
    rig.disk.gate.clear()
    writes = [rig.write_op(2 * number, content(number, 100)) for number in range(9)]
    assert rig.queue.submit_many(writes, DiskPriority.WRITE) == 9
    rig.until(lambda: rig.disk.running == 1)

    def note(name: str, size: int) -> None:
        told.append(rig.announcements)

    rig.disk.hook = note
    rig.disk.gate.set()
    wait_until(lambda: len(told) == 9, "all are written")
    assert told == [0, 0, 0, 0, 0, 1, 1, 1, 1], "five are done, and four wait"
    rig.until(lambda: len(rig.finished) == 9)


def test_the_loop_is_told_of_a_slow_write(one_worker: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "TELL_WITHIN_NS", 0)
    rig, steps = one_worker, threading.Semaphore(0)
    rig.disk.hook = lambda name, size: None if steps.acquire(timeout=DEADLINE_S) else 0
    writes = [rig.write_op(2 * number, content(number, 100)) for number in range(9)]
    assert rig.queue.submit_many(writes, DiskPriority.WRITE) == 9
    for done in range(1, 4):
        steps.release()
        rig.until(lambda: len(rig.finished) == done)  # noqa: B023 (called at once)
    assert rig.queue.queued(DiskPriority.WRITE) == 5
    steps.release(6)
    rig.until(lambda: rig.queue.in_flight == 0)


def test_a_load_begins_while_enough_is_under_way_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "BEHIND_BYTES", 3 * PAGE_BYTES)
    rig = Rig(tmp_path / "nvme", threads=8)
    rig.disk.gate.clear()
    ops = [rig.write_op(2 * number, content(number, 100)) for number in range(7)]
    assert rig.queue.submit_many(ops[:5], DiskPriority.WRITE) == 5
    rig.until(lambda: rig.disk.running >= 3)
    assert rig.queue.submit_many(ops[5:], DiskPriority.LOAD) == 2
    rig.until(lambda: rig.disk.running >= 5)
    assert [rig.queue.queued(priority) for priority in DiskPriority] == [0, 0, 2]
    rig.disk.gate.set()
    rig.until(lambda: rig.queue.in_flight == 0)
    rig.close()


def test_the_parts_of_one_operation_are_carried_side_by_side(tmp_path: Path) -> None:
    """Each encoded block is a part by itself: threads encode them on several cores."""
    rig = Rig(tmp_path / "nvme", threads=4)
    written = rig.write_run(range(4), [content(number, 8192) for number in range(4)], codec=0x21)
    assert rig.run([written], DiskPriority.WRITE) == [OK] * 4
    rig.disk.gate.clear()
    assert rig.queue.submit(rig.read_run(written, range(10, 14)), DiskPriority.LOAD)
    rig.until(lambda: rig.disk.running == 4)
    rig.close()


def test_a_full_queue_says_so(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "nvme", threads=1, limits={DiskPriority.WRITE: 3})
    hold(rig)
    ops = [rig.write_op(2 * number, content(number, 5000)) for number in range(5)]
    assert rig.queue.submit_many(ops, DiskPriority.WRITE) == 3
    assert not rig.queue.submit(ops[3], DiskPriority.WRITE)
    assert rig.queue.submit(ops[4], DiskPriority.PREFETCH)
    assert (rig.queue.in_flight, rig.queue.in_flight_bytes) == (5, PAGE_BYTES + 4 * 8192)
    assert rig.queue.refused == 3
    rig.disk.gate.set()
    rig.until(lambda: rig.queue.in_flight == 0)
    assert rig.queue.submit(ops[3], DiskPriority.WRITE)
    rig.until(lambda: rig.queue.in_flight == 0)
    rig.close()


def test_a_hung_disk_shows_its_age_and_is_left_behind(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "nvme", threads=2)
    rig.disk.gate.clear()
    assert rig.queue.oldest_age_s() == 0
    ops = [rig.write_op(2 * number, content(number, 100)) for number in range(4)]
    assert rig.queue.submit_many(ops, DiskPriority.LOAD) == 4
    rig.until(lambda: rig.disk.running == 2)
    rig.until(lambda: rig.queue.oldest_age_s() > 0.02)
    assert not rig.queue.stop(0.0)
    assert [op.outcomes for op in ops].count([DiskOutcome.ABANDONED]) == 2
    assert [op.outcomes for op in ops].count([DiskOutcome.CANCELLED]) == 2
    assert sorted(map(id, rig.finished)) == sorted(map(id, ops))
    assert not rig.queue.submit(rig.write_op(9, b"late"), DiskPriority.LOAD)
    rig.disk.gate.set()
    assert rig.stop()
    rig.close()
    assert len(rig.finished) == 4


# --- codecs --------------------------------------------------------------------------------------


def test_encoded_blocks_save_pages_and_come_back(rig: Rig) -> None:
    lz4 = codecs.codec_number("lz4", 2)
    small = rig.write_op(0, b"\x00\x3f" * 4000, lz4)
    noise = rig.write_op(1, random.Random(1).randbytes(8000), lz4)
    assert rig.run([small, noise], DiskPriority.WRITE) == [OK, OK]
    assert (small.codecs, small.moved_bytes) == ([lz4], PAGE_BYTES)
    assert (noise.codecs, noise.stored_lengths) == ([codecs.RAW], [8000])
    assert rig.queue.written_bytes == PAGE_BYTES + 8192
    assert rig.run([rig.read_op(small, 4), rig.read_op(noise, 5)]) == [OK, OK]
    assert rig.frame(4, 8000) == b"\x00\x3f" * 4000
    assert rig.frame(5, 8000) == random.Random(1).randbytes(8000)
    assert rig.run([rig.read_op(small, 4, codecs=0x11), rig.read_op(small, 4, length=8001)]) == [CORRUPT, CORRUPT]


def test_what_never_ran_is_counted_apart(one_worker: Rig) -> None:
    held = hold(one_worker)
    waiting = [one_worker.write_op(number, content(number, 4096)) for number in range(2, 5)]
    assert one_worker.queue.submit_many(waiting, DiskPriority.WRITE) == 3
    one_worker.queue.cancel_queued(DiskPriority.WRITE)
    one_worker.disk.gate.set()
    one_worker.until(lambda: one_worker.queue.in_flight == 0)
    assert held.outcomes == [DiskOutcome.OK]
    assert [op.outcomes for op in waiting] == [[DiskOutcome.CANCELLED]] * 3
    stats = one_worker.queue.stats()
    assert (stats["cancelled"], stats["abandoned"], stats["checksum_failures"]) == (3, 0, 0)


# --- a run of which some has begun ----------------------------------------------------------------


def begun(rig: Rig) -> WriteOp:
    """A write of four blocks apart from each other, of which the first is under way."""
    rig.disk.gate.clear()
    write = rig.write_run([0, 2, 4, 6], [content(number, 4096) for number in (0, 2, 4, 6)])
    assert rig.queue.submit(write, DiskPriority.WRITE)
    rig.until(lambda: rig.disk.running == 1)
    return write


def test_what_has_not_begun_of_a_run_is_cancelled_and_the_run_ends_once(one_worker: Rig) -> None:
    write = begun(one_worker)
    assert (one_worker.queue.queued(), one_worker.queue.cancel_queued()) == (3, 3)
    one_worker.until(lambda: one_worker.announced.empty())
    assert one_worker.finished == [], "the disk still has a part of it"
    one_worker.disk.gate.set()
    one_worker.until(lambda: one_worker.finished == [write])
    assert write.outcomes == [OK] + [DiskOutcome.CANCELLED] * 3
    assert (one_worker.queue.writes, one_worker.queue.cancelled, one_worker.queue.queued()) == (1, 3, 0)


def test_of_a_run_that_hangs_only_what_has_begun_is_left_to_the_kernel(one_worker: Rig) -> None:
    write = begun(one_worker)
    assert not one_worker.queue.stop(0.0)
    assert one_worker.finished == [write]
    assert write.outcomes == [DiskOutcome.ABANDONED] + [DiskOutcome.CANCELLED] * 3


def test_a_load_is_shared_out_among_the_free_places(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "nvme", threads=4)
    write = rig.write_run(range(8), [content(number, 8192) for number in range(8)])
    assert rig.run([write], DiskPriority.WRITE) == [OK] * 8
    rig.disk.gate.clear()
    assert rig.queue.submit(rig.read_run(write, range(20, 28)), DiskPriority.LOAD)
    rig.until(lambda: rig.disk.running == 4)
    rig.disk.gate.set()
    rig.until(lambda: rig.queue.in_flight == 0)
    assert all(rig.frame(20 + number, 8192) == content(number, 8192) for number in range(8))
    rig.close()
