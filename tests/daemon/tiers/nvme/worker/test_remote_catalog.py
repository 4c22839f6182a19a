"""What the worker machine does not play: how a catalog is closed, and owners that fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from stepped_worker import SteppedWorker
from waiting import wait_until

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


def turn(world: SteppedWorker) -> None:
    world.loop.turn()
    world.clock.now_s += 0.01
    if world.serving is not None:
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
