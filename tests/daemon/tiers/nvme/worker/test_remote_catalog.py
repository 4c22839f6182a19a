"""What the worker machine does not play: how a catalog is closed, and owners that fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from memory_disks import MemoryCatalog, MemoryDisk
from stepped_worker import SteppedWorker
from waiting import wait_until

from tiercache.daemon.tiers.nvme.catalog.rows import Row
from tiercache.daemon.tiers.nvme.worker import messages


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SteppedWorker]:
    made = SteppedWorker(tmp_path, 1)
    loading = made.catalog.load(lambda: None)
    while not loading.finished:
        turn(made)
        loading.next_batch()
    yield made
    made.stop()
    made.close()
    made.end()


def turn(world: SteppedWorker, works: bool = True) -> None:
    """`works`: the process too."""
    world.loop.turn()
    world.clock.now_s += 0.01
    if works and world.serving is not None:
        world.serving.work()


class Closing:
    """`close` in a thread, as it blocks."""

    def __init__(self, world: SteppedWorker) -> None:
        self.written: list[bool] = []
        self.world = world
        self._thread = threading.Thread(target=lambda: self.written.append(world.catalog.close(60.0)))
        self._thread.start()
        wait_until(lambda: world.loop.soon, "the call")
        world.loop.turn()

    def result(self) -> bool:
        wait_until(lambda: (turn(self.world), self.written)[1], "the catalog is closed")
        return self.written[0]


def row(number: int) -> Row:
    return Row(number.to_bytes(16, "little"), bytes(16), 1, 1, 4096, 4096, 0, 1, 7, number)


CHANGES: list[tuple[str, list[Any]]] = [
    ("insert", [[1], [list(row(1))]]),
    ("insert", [[2, 3, 4, 5], [list(row(number)) for number in range(2, 6)]]),
    ("delete", [[2]]),
    ("delete", [[3, 4]]),
    ("add_namespace", [3, "3", b"spec", 1]),
    ("raise_epoch", [1, 5]),
    ("set_segment", [1, 8192]),
    ("set_key", [b"key", 7]),
    ("add_tombstone", [1, b"a" * 16, 4]),
    ("add_tombstone", [1, b"b" * 16, 4]),
    ("remove_tombstone", [1, b"a" * 16]),
    ("forget_namespaces", [[1, 3]]),
]


def test_all_changes_are_made_as_by_a_catalog_in_this_process(world: SteppedWorker) -> None:
    near, answers = MemoryDisk(1, lambda: 0.0), list[bool]()
    near.database = world.disk.database.copy()
    catalog = MemoryCatalog(near)
    for name, arguments in CHANGES:
        getattr(catalog, name)(*arguments)
        getattr(world.catalog, name)(*arguments, answers.append)
    assert catalog.commit()
    wait_until(lambda: (turn(world), len(answers) == len(CHANGES))[1])
    assert answers == [True] * len(CHANGES)
    assert vars(world.disk.database) == vars(near.database)


def refuse(world: SteppedWorker) -> None:
    """The process cannot write what has been posted: its disk is full for a second."""
    child = world.serving
    assert child is not None
    wait_until(lambda: (turn(world, False), child.serve_rows(), child.catalog.pending)[2], "the process has it")
    child.catalog.fail()
    child.catalog.answer()
    child.tell_status()
    wait_until(lambda: (turn(world, False), world.catalog.error)[1], "the daemon is told")


def test_after_a_refused_row_rows_are_written_and_notes_of_flushes_stay(world: SteppedWorker) -> None:
    """The row of a flushed block may be the one that could not be deleted."""
    first, later, burial = list[bool](), list[bool](), list[bool]()
    world.catalog.delete([1], first.append)
    refuse(world)
    wait_until(lambda: (turn(world), not world.catalog.error)[1], "it writes again", 5.0)
    world.catalog.insert([2], [row(2)], later.append)
    world.catalog.remove_tombstone(1, b"k" * 16, burial.append)
    wait_until(lambda: (turn(world), later and burial)[1], "the answers", 5.0)
    assert (first, later, burial) == ([False], [True], [False])


@pytest.mark.parametrize("ends", [False, True], ids=["this process", "the next one"])
def test_what_was_refused_for_now_is_written_later(world: SteppedWorker, ends: bool) -> None:
    answers = list[bool]()
    world.catalog.add_tombstone(1, b"k" * 16, 5, answers.append)
    refuse(world)
    assert (answers, world.catalog.pending) == ([False], 1)
    if ends:
        world.end_child(-9)
        world.loop.turn()
        world.child_goes()
        world.start_child()
        world.open_child("well")
    wait_until(lambda: (turn(world), not world.catalog.pending and not world.catalog.error)[1], "it is written", 5.0)
    assert world.disk.database.tombstones == {(1, b"k" * 16): 5}


def test_an_owner_that_fails_to_take_an_answer_does_not_keep_others_from_theirs(world: SteppedWorker) -> None:
    answers: list[bool] = []
    world.catalog.delete([1], lambda ok: 1 // 0)
    world.catalog.delete([2], answers.append)
    wait_until(lambda: (turn(world), answers)[1])
    assert answers == [True]
    assert (world.catalog.pending, world.catalog.age_s()) == (0, 0.0)


@pytest.mark.parametrize("ends", [False, True], ids=["this process", "the next one"])
def test_closing_waits_until_a_process_has_written_all(world: SteppedWorker, ends: bool) -> None:
    world.catalog.raise_epoch(1, 5)
    closing = Closing(world)
    if ends:
        world.end_child(-9)
        world.loop.turn()
        assert not closing.written
        world.child_goes()
        world.start_child()
        world.open_child("well")
    assert closing.result()
    assert world.disk.database.namespaces[1].epoch == 5


def test_closing_says_what_was_not_written_where_no_process_follows(world: SteppedWorker) -> None:
    world.catalog.delete([1])
    world.end_child(-9)
    world.loop.turn()
    closing = Closing(world)
    assert not closing.written
    world.worker._give_up("the test wants it")
    assert not closing.result()


def test_a_key_is_in_no_text_of_a_message() -> None:
    key = bytes(range(32))
    asked = messages.Open("/nvme", 1, 1, key, False, False, None, 1, "")
    assert repr(key) not in repr(asked)
