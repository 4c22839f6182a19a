"""Worker processes that end at any packet: blocks are good or missing, and what was promised stays.

The daemon, the process and what lies between take their steps in any order (`stepped_worker`). The oracle:
- each operation and each change of rows has one outcome, and nothing is held at the end;
- a frame or slot that was given back is its new owner's: no process that may still be running touches it;
- blocks that were written come back as they were, rows that were confirmed are in the database;
- a process is only used if it has the whole index and all segments, and the directory is only given up for a reason.
"""

from __future__ import annotations

import os
import sys
import tempfile
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from machines import in_first_ring, in_stress
from memory_disks import RETRY_S, Database
from stepped_worker import SEGMENT_BYTES, SteppedWorker

from tiercache.daemon.tiers.forms.codecs import RAW
from tiercache.daemon.tiers.nvme.catalog.rows import Row
from tiercache.daemon.tiers.nvme.disk.block_io import NOWHERE, AnyOp, DiskOutcome, ReadOp, TaskOp, WriteOp
from tiercache.daemon.tiers.nvme.disk.disk import PAGE_BYTES
from tiercache.daemon.tiers.nvme.disk.queue import DiskPriority
from tiercache.protocol.checksums import CHECKSUM_XXH3

FRAMES = 12
MOST_SEGMENTS = 3
PLACES = 4
ROWS = ("insert", "delete")
BURIALS = ("remove_tombstone", "forget_namespaces")
OK, CANCELLED, ABANDONED = DiskOutcome.OK, DiskOutcome.CANCELLED, DiskOutcome.ABANDONED

STEPS = (
    *("p.serve_blocks", "p.serve_rows", "p.tell_status"),  # of the process
    *("c.take", "c.move", "c.finish"),  # of what carries its blocks
    *("r.commit", "r.answer", "r.fail"),  # of its catalog
)

numbers = st.integers(0, 1000)
"""Chooses one of what there is."""


class Flight(NamedTuple):
    """An operation under way: its frames (-1: none), and the bytes that belong to its blocks."""

    frames: list[int]
    data: list[bytes]


class Block(NamedTuple):
    """A block on the disk, as its row would have it."""

    slot: int
    key: bytes
    fingerprint: str
    stored_length: int
    codec: int
    checksum: int
    kind: int


class Change:
    """A change of the catalog, and its answer."""

    def __init__(self, method: str, arguments: list[Any]) -> None:
        self.method, self.arguments = method, arguments
        self.answers: list[bool] = []

    @property
    def drops_tombstones(self) -> bool:
        """True if it makes all tombstones so far needless: those here are of namespace 1."""
        return self.method == "raise_epoch" and self.arguments[0] == 1

    def results(self) -> dict[Any, Any]:
        """What it makes of the database; see `contents`."""
        match self.method, self.arguments:
            case ("insert", (places, rows)):
                return dict(zip(places, rows, strict=True))
            case ("delete", (places,)):
                return dict.fromkeys(places)
            case ("raise_epoch", (number, epoch)):
                return {f"epoch {number}": epoch}
            case ("set_segment", (segment, slot_bytes)):
                return {f"segment {segment}": slot_bytes}
            case ("set_key", key):
                return {"key": tuple(key)}
            case ("add_namespace", (number, _, _, epoch)):
                return {f"epoch {number}": epoch}
            case ("forget_namespaces", _):
                return {}
            case (_, (_, key, *epoch)):
                return {key: epoch[0] if epoch else None}
        raise AssertionError(f"no catalog has {self.method}")


def contents(database: Database) -> dict[Any, Any]:
    """Rows by place, epochs of namespaces, sizes of slots, the key of the cipher, tombstones by key."""
    epochs = {f"epoch {number}": its.epoch for number, its in database.namespaces.items()}
    rows = {place: tuple(row) for place, row in database.rows.items()}
    sizes = {f"segment {number}": size for number, size in database.segments.items()}
    return {
        **rows,
        **epochs,
        **sizes,
        "key": database.key,
        **{key: epoch for (_, key), epoch in database.tombstones.items()},
    }


class WorkerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = tempfile.TemporaryDirectory(dir=next(filter(os.path.isdir, ("/dev/shm", "/tmp"))))
        self.count = 0
        self.world = SteppedWorker(Path(self.root.name), FRAMES)
        self.frames = {frame: self.fill(frame) for frame in range(FRAMES)}  # free ones, and what their owner put there
        self.slots: list[int] = []  # free ones
        self.segment = 0  # the last one that was asked for
        self.blocks: list[Block] = []  # on the disk
        self.data: dict[int, bytes] = {}  # of blocks, by slot
        self.flying: dict[AnyOp, Flight] = {}
        self.ended: list[AnyOp] = []
        self.task: TaskOp | None = None
        self.disk_was_full = False
        """So the task was answered."""
        self.start_over()
        self.add_segment()
        self.settle()
        for _ in range(4):
            self.write()
        self.settle()

    def start_over(self) -> None:
        """A catalog has been opened: its rows are there to be loaded."""
        self.changes: list[Change] = []
        self.before = self.world.disk.database.copy()
        self.loaded: dict[int, tuple[Any, ...]] = {}
        self.loading = self.world.catalog.load(lambda: None, 2)
        self.own_ends = 0
        self.may_give_up = False

    # --- the owner of blocks -------------------------------------------------------------------------

    def fill(self, frame: int) -> bytes:
        """New bytes of the owner of a frame."""
        self.count += 1
        data = self.count.to_bytes(4, "little") * (PAGE_BYTES // 4)
        self.world.region.view(frame * PAGE_BYTES, PAGE_BYTES)[:] = data
        return data

    def submit(self, op: AnyOp, priority: DiskPriority, flight: Flight) -> None:
        self.flying[op] = flight
        assert self.world.queue.submit(op, priority)

    def address(self, frame: int) -> int:
        return self.world.region.address + frame * PAGE_BYTES

    def take_frame(self, number: int) -> int:
        """A free frame; there is one."""
        frame = sorted(self.frames)[number % len(self.frames)]
        del self.frames[frame]
        return frame

    @rule(number=numbers, count=st.integers(1, 3), together=st.booleans())
    def write(self, number: int = 0, count: int = 1, together: bool = True) -> None:
        """So many blocks, as one operation or as many."""
        frames = [self.take_frame(number) for _ in range(min(count, len(self.slots), len(self.frames)))]
        for run in [frames] if together and frames else [[frame] for frame in frames]:
            data = [self.fill(frame) for frame in run]
            op = WriteOp(
                done=self.ended.append,
                slots=[self.slots.pop(number % len(self.slots)) for _ in run],
                addresses=[self.address(frame) for frame in run],
                length=PAGE_BYTES,
                keys=[its[:16] for its in data],
                fingerprint=f"space {number % 3}",
                codecs=[RAW] * len(run),
                kinds=[CHECKSUM_XXH3] * len(run),
            )
            self.submit(op, DiskPriority.WRITE, Flight(run, data))

    @rule(number=numbers, count=st.integers(1, 3), priority=st.sampled_from([DiskPriority.LOAD, DiskPriority.PREFETCH]))
    def read(self, number: int, count: int = 1, priority: DiskPriority = DiskPriority.LOAD) -> None:
        """So many blocks, those of one namespace as one operation."""
        chosen = dict.fromkeys(
            self.blocks[at % len(self.blocks)] for at in range(number, number + count) if self.blocks
        )
        for name in sorted({block.fingerprint for block in chosen}):
            blocks = [block for block in chosen if block.fingerprint == name][: len(self.frames)]
            if blocks:
                self.read_blocks(blocks, [self.take_frame(number) for _ in blocks], priority)

    @rule(number=numbers)
    def verify(self, number: int) -> None:
        if self.blocks:
            self.read_blocks([self.blocks[number % len(self.blocks)]], [-1], DiskPriority.PREFETCH)

    def read_blocks(self, blocks: list[Block], frames: list[int], priority: DiskPriority) -> None:
        op = ReadOp(
            done=self.ended.append,
            slots=[block.slot for block in blocks],
            addresses=[NOWHERE if frame < 0 else self.address(frame) for frame in frames],
            length=PAGE_BYTES,
            keys=[block.key for block in blocks],
            fingerprint=blocks[0].fingerprint,
            stored_lengths=[block.stored_length for block in blocks],
            checksums=[block.checksum for block in blocks],
            codecs=[block.codec for block in blocks],
            kinds=[block.kind for block in blocks],
        )
        self.submit(op, priority, Flight(frames, [self.data[block.slot] for block in blocks]))

    @rule(number=numbers)
    def forget(self, number: int) -> None:
        """A block that nobody reads gives its slot back."""
        read = {slot for op in self.flying if isinstance(op, ReadOp) for slot in op.slots}
        unread = [block for block in self.blocks if block.slot not in read]
        if unread:
            block = unread[number % len(unread)]
            self.blocks.remove(block)
            self.slots.append(block.slot)

    @rule(priority=st.sampled_from([None, *DiskPriority]))
    def cancel(self, priority: DiskPriority | None) -> None:
        self.world.queue.cancel_queued(priority)

    @rule()
    def add_segment(self) -> None:
        if self.task is None and self.segment < MOST_SEGMENTS:
            self.segment += 1
            segment, self.disk_was_full = self.segment, False
            self.task = TaskOp(done=self.ended.append, call=lambda: self.world.directory.create_segment(segment))
            self.submit(self.task, DiskPriority.WRITE, Flight([], []))

    # --- the owner of rows ---------------------------------------------------------------------------

    def post(self, method: str, *arguments: Any) -> None:
        change = Change(method, list(arguments))
        self.changes.append(change)
        getattr(self.world.catalog, method)(*arguments, done=change.answers.append)

    def row(self) -> Row:
        self.count += 1
        return Row(self.count.to_bytes(16, "little"), bytes(16), 1, 1, 4096, 4096, 0, 1, 7, self.count)

    @rule(place=st.integers(0, PLACES - 1), many=st.booleans(), there=st.booleans())
    def change_rows(self, place: int, many: bool, there: bool) -> None:
        places = [place, (place + 1) % PLACES] if many else [place]
        if there:
            self.post("insert", places, [self.row() for _ in places])
        else:
            self.post("delete", places)

    @rule(how=st.sampled_from(["raise_epoch", "add_tombstone", "remove_tombstone"]), number=st.integers(1, 2))
    def flush(self, how: str, number: int) -> None:
        self.count += 1
        key = bytes([number]) * 16
        if how == "raise_epoch":
            self.post(how, number, self.count)
        else:
            self.post(how, 1, key, *([self.count] if how == "add_tombstone" else []))

    @rule(how=st.sampled_from(["set_segment", "set_key", "add_namespace", "forget_namespaces"]))
    def set(self, how: str) -> None:
        """Something that is kept where it cannot be written now; and one that changes nothing here."""
        self.count += 1
        settings: dict[str, list[Any]] = {
            "set_segment": [1, PAGE_BYTES * self.count],
            "set_key": [bytes([self.count % 256]), self.count],
            "add_namespace": [3, "3", b"spec", self.count],
            "forget_namespaces": [[1, 2, 3]],
        }
        self.post(how, *settings[how])

    @rule()
    def load_rows(self) -> None:
        while batch := self.loading.next_batch():
            self.loaded |= {place: tuple(row) for place, row in batch}

    # --- the loop, and time --------------------------------------------------------------------------

    @rule(times=st.integers(1, 3))
    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.world.loop.turn()
            self.note()

    @rule(seconds=st.sampled_from([0.003, 0.003, 0.6, 1.0, 5.5]))
    def time_passes(self, seconds: float) -> None:
        self.world.clock.now_s += seconds

    # --- the process ---------------------------------------------------------------------------------

    @rule(what=st.sampled_from(STEPS), times=st.integers(1, 3))
    def step(self, what: str, times: int) -> None:
        child = self.world.child
        for _ in range(times):
            if child is not None and child.alive and child.is_open:
                part = {"c": child.carrier, "r": child.catalog}.get(what[0], child)
                getattr(part, what[2:])()

    @rule()
    def begin(self) -> None:
        """All that was submitted is with the disk, and not moved yet."""
        self.turn(2)
        for what in ("p.serve_blocks", "c.take"):
            self.step(what, 3)

    @rule()
    def work(self) -> None:
        if self.world.serving is not None:
            self.world.serving.work()
            self.turn()

    @rule()
    def refuse_changes(self) -> None:
        """The process cannot write what has been posted: its disk is full for a second."""
        self.time_passes(0.01)
        self.turn(2)
        child = self.world.serving
        if child is not None:
            for _ in range(4):
                child.serve_rows()
            child.catalog.fail()
            child.catalog.answer()
            child.tell_status()
            self.turn(3)
            self.time_passes(0.01)
            self.turn(3)

    @rule(times=st.integers(1, 2))
    def run_task(self, times: int = 1) -> None:
        """The thread of tasks goes on to its next wait."""
        for _ in range(times):
            self.world.tasks.run()

    @rule(says=st.sampled_from(["done", "full", "ends"]))
    def answer_task(self, says: str = "done") -> None:
        if self.world.serving is not None and self.world.answer_task(says):
            self.disk_was_full = says == "full"

    @rule(how=st.sampled_from(["is killed", "is killed", "exits", "closes 1", "closes 2"]))
    def end_process(self, how: str) -> None:
        """It ends, or closes a line and takes no more steps; its I/O goes on until it is gone."""
        child = self.world.child
        if child is None or not child.alive:
            return
        if how.startswith("closes") and self.world.serving is not None:
            child.close_line(int(how[-1]))
        elif not how.startswith("closes"):
            self.world.end_child(-9 if how == "is killed" else 1)
        self.may_give_up |= not self.loading.finished

    @rule()
    def see_end(self) -> None:
        if self.world.child is not None and not self.world.child.alive:
            self.world.tell_end()

    @rule()
    def go(self) -> None:
        child = self.world.child
        if child is not None and not child.alive:
            if child.process.returncode is None:  # it has closed a line before
                self.world.end_child(1)
            self.own_ends = 0 if child.process.returncode == -9 else self.own_ends + 1
            self.may_give_up |= not self.loading.finished or self.own_ends >= 3
            self.world.child_goes()

    @rule(lines=st.sampled_from([3, 3, 3, 2, 0]))
    def start_next(self, lines: int = 3) -> None:
        if self.world.child is None:
            self.world.start_child(lines)

    @rule(how=st.sampled_from(["well"] * 8 + ["ends", "refused", "other", "fresh", "lost", "gone", "both gone"]))
    def open_next(self, how: str = "well") -> None:
        child = self.world.child
        if child is not None and child.alive and not child.is_open:
            self.may_give_up |= how not in ("well", "ends", "gone", "both gone")
            self.world.open_child(how)

    @rule(
        how=st.sampled_from(["well"] * 4 + ["ends", "lost", "fresh", "other", "gone", "both gone"]),
        turns=st.integers(0, 3),
    )
    def replace(self, how: str, turns: int) -> None:
        """All of that at once: the process is killed, and the next one is used."""
        self.end_process("is killed")
        for _ in range(turns):
            self.turn()
            self.nobody_else_writes_to_frames()
        self.go()
        self.nobody_else_writes_to_frames()
        self.start_next()
        self.open_next(how)
        self.turn(2)

    @rule(loads=st.booleans())
    def open_anew(self, loads: bool) -> None:
        """The keeper of a directory that was given up opens it as after any other fault."""
        if self.world.given_up:
            self.close()
            self.world.open()
            self.start_over()
            if loads:
                self.settle()

    # --- the oracle ----------------------------------------------------------------------------------

    def note(self, stopped: bool = False) -> None:
        """Take back what has ended, and look at it."""
        while self.ended:
            op = self.ended.pop(0)
            assert op in self.flying, "an operation ended twice"
            frames, data = self.flying.pop(op)
            outcomes = {OK, CANCELLED, *([ABANDONED] if stopped else [])}
            if isinstance(op, TaskOp):
                self.task = None
                if self.disk_was_full:
                    outcomes = {DiskOutcome.IO_ERROR, *([ABANDONED] if stopped else [])}
                assert op.outcome in outcomes or self.world.given_up
                if op.outcome is OK:
                    self.slots += [self.segment << 48 | at for at in range(0, SEGMENT_BYTES, PAGE_BYTES)]
                else:
                    self.segment -= 1
                continue
            assert outcomes.issuperset(op.outcomes), "the disk is in order"
            forms = op.slots, op.keys, repeat(op.fingerprint), op.stored_lengths, op.codecs, op.checksums, op.kinds
            for outcome, frame, its, form in zip(op.outcomes, frames, data, zip(*forms, strict=False), strict=True):
                if isinstance(op, WriteOp):
                    if outcome is OK:
                        self.blocks.append(Block(*form))
                        self.data[form[0]] = its
                    else:
                        self.slots.append(form[0])
                elif outcome is OK and frame >= 0:
                    assert self.bytes_of(frame) == its, "wrong bytes"
                if frame >= 0:
                    self.frames[frame] = self.fill(frame)

    def bytes_of(self, frame: int) -> bytes:
        return bytes(self.world.region.view(frame * PAGE_BYTES, PAGE_BYTES))

    @invariant()
    def nobody_else_writes_to_frames(self) -> None:
        self.note()
        writes = [zip(its.frames, its.data, strict=True) for op, its in self.flying.items() if isinstance(op, WriteOp)]
        for frame, data in [*self.frames.items(), *chain.from_iterable(writes)]:
            assert self.bytes_of(frame) == data, "a process has written to the frame of another owner"

    @invariant()
    def books_are_right(self) -> None:
        world = self.world
        assert world.queue.check_integrity() == world.catalog.check_integrity() == []
        assert world.queue.in_flight == sum(op.count for op in self.flying)
        assert world.queue.in_flight_bytes == PAGE_BYTES * sum(len(its.data) for its in self.flying.values())
        refused = False
        for change in self.changes:
            assert len(change.answers) <= 1, "a change is answered once"
            assert not (refused and change.method in BURIALS and change.answers == [True]), "rows may be left"
            refused |= change.method in ROWS and change.answers == [False]

    @invariant()
    def only_a_good_process_is_used(self) -> None:
        child = self.world.serving
        if child is not None:
            assert child.is_good
            assert set(self.world.directory.segments) <= set(child.directory.segments)
        if self.world.given_up:
            assert self.may_give_up, "there is no reason to give the directory up"
            assert not self.world.directory.worker_pid, "a directory that was given up is not used again"

    def check_durable(self, settled: bool) -> None:
        """The database holds what was confirmed, and nothing that was not asked for.

        `settled`: also what a process could not write at first, but for rows and what hangs on them.
        """
        allowed = {name: [value] for name, value in contents(self.before).items()}
        for change in self.changes:
            gone = [name for name in allowed if isinstance(name, bytes)] if change.drops_tombstones else []
            for name, value in [*change.results().items(), *((name, None) for name in gone)]:
                is_kept = settled and change.method not in (*ROWS, *BURIALS)
                others = [] if is_kept or change.answers == [True] else allowed.get(name, [None])
                allowed[name] = [*others, value]
        found = contents(self.world.disk.database)
        assert found.keys() <= allowed.keys()
        for name, values in allowed.items():
            assert found.get(name) in values, f"{name}: {found.get(name)}, not one of {values}"

    # --- the end -------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        answered = all(change.answers for change in self.changes) and not self.world.catalog.pending
        return not self.flying and answered and self.loading.finished and self.world.loop.is_idle

    def settle(self) -> None:
        """Good processes follow each other until nothing is under way, unless the directory is given up."""
        for _ in range(500):
            if self.is_settled or self.world.given_up:
                return
            child = self.world.child
            if child is None:
                self.start_next()
            elif not child.alive:
                self.go()
            elif not child.is_open:
                self.open_next()
            elif self.world.serving is None:
                self.world.clock.now_s += 0.6
            else:
                self.work()
                self.run_task()
                self.answer_task()
            self.run_task()
            self.load_rows()
            self.world.clock.now_s += 0.01
            self.turn()
            self.nobody_else_writes_to_frames()
            self.only_a_good_process_is_used()
        raise AssertionError(f"it never ends: {self.world.queue.stats()}, {len(self.flying)} under way")

    def close(self, settled: bool = False) -> None:
        self.world.stop()
        self.note(stopped=True)
        self.nobody_else_writes_to_frames()
        assert not self.flying
        self.world.close()
        self.nobody_else_writes_to_frames()
        self.check_durable(settled)

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is not None:  # it has failed already
                return
            self.settle()
            if not self.world.given_up:
                self.check_all_blocks()
                assert self.world.catalog.pending == 0
                self.world.clock.now_s += RETRY_S  # a catalog that could not write tries again
                if self.world.serving is not None:
                    self.work()
                self.change_rows(0, many=False, there=True)
                self.settle()
                assert self.changes[-1].answers == [True] or self.world.given_up
            self.close(settled=not self.world.given_up)
        finally:
            self.world.end()
            self.root.cleanup()

    def check_all_blocks(self) -> None:
        """Every block that was written is read and compared."""
        blocks, self.blocks = self.blocks, []
        for block in blocks:
            self.read_blocks([block], [self.take_frame(0)], DiskPriority.LOAD)
            (op,) = self.flying
            self.settle()
            assert not isinstance(op, TaskOp)
            assert op.outcomes == [OK]
        self.blocks = blocks


TestWorkers = in_first_ring(WorkerMachine, examples=60, steps=40)
TestWorkersForLong = in_stress(WorkerMachine, examples=200, steps=100)


@pytest.mark.parametrize("how", ["well", "ends", "refused", "other", "fresh", "lost", "gone", "both gone"])
def test_a_process_is_killed_amid_its_work_and_the_next_one_opens_the_directory(how: str) -> None:
    machine = WorkerMachine()
    machine.read(0, count=2)
    machine.write(1, count=2)
    machine.begin()
    machine.change_rows(0, many=True, there=True)
    machine.replace(how, turns=3)
    machine.only_a_good_process_is_used()
    machine.teardown()


@pytest.mark.parametrize("next_one", [False, True], ids=["this process", "the next one"])
def test_what_a_full_disk_has_refused_is_written_later_but_for_rows_and_what_hangs_on_them(next_one: bool) -> None:
    """The row of a flushed block may be the one that could not be deleted: the note of the flush stays."""
    machine = WorkerMachine()
    machine.flush("add_tombstone", 1)
    machine.change_rows(0, many=False, there=False)
    machine.refuse_changes()
    assert [change.answers for change in machine.changes[-2:]] == [[False]] * 2
    if next_one:
        machine.replace("well", turns=0)
    machine.settle()
    machine.flush("remove_tombstone", 1)
    machine.teardown()
    machine.books_are_right()


def test_a_directory_whose_processes_end_at_once_in_a_row_is_given_up() -> None:
    machine = WorkerMachine()
    machine.change_rows(0, many=False, there=True)
    for _ in range(3):
        assert not machine.world.given_up
        machine.turn()
        machine.end_process("exits")
        machine.turn()
        machine.go()
        machine.start_next()
        machine.open_next()
        machine.turn(2)
    assert "worker processes in a row have ended at once" in machine.world.given_up
    machine.teardown()


@pytest.mark.parametrize("how", ["answers", "is silent", "closes 1", "closes 2"])
def test_a_process_that_is_silent_or_has_closed_a_line_is_killed(how: str) -> None:
    machine = WorkerMachine()
    child = machine.world.child
    assert child is not None
    if how.startswith("closes"):
        machine.end_process(how)
    for _ in range(8):
        machine.turn()
        machine.time_passes(1.0)
        if how == "answers":
            machine.work()
    machine.turn()
    assert child.process.returncode == (None if how == "answers" else -9)
    machine.teardown()


def test_a_segment_for_which_the_disk_has_no_room_is_not_made() -> None:
    machine = WorkerMachine()
    machine.add_segment()
    machine.run_task(times=2)  # it takes the task, and asks
    machine.answer_task("full")
    machine.run_task()
    machine.turn()
    assert (machine.task, machine.world.directory.segments) == (None, [1])
    machine.teardown()
