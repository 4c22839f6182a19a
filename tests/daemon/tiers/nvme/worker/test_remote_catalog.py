"""Changes of a catalog that belongs to a process: what is sent, kept and sent again. The process is the test itself."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from waiting import wait_until

from tiercache.daemon.tiers.nvme.catalog.catalog import CALLBACKS_AT_ONCE
from tiercache.daemon.tiers.nvme.catalog.rows import Row
from tiercache.daemon.tiers.nvme.worker import messages
from tiercache.daemon.tiers.nvme.worker.packets import Joiner, parts_of
from tiercache.daemon.tiers.nvme.worker.remote_catalog import RemoteCatalog

ROW = Row(
    key=b"k" * 16,
    parent=b"p" * 16,
    namespace=1,
    epoch=0,
    length=4096,
    stored_length=4096,
    codec=0,
    kind=1,
    checksum=7,
    sequence=1,
)


class Process:
    """One life of the process: reads what it is told, and says what the test wants."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.ours, self.its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.joiner = Joiner()
        rig.sockets += [self.ours, self.its]
        rig.catalog.connect(self.ours)

    def told(self) -> list[messages.RowOrder]:
        """What it was told since the last look."""
        found = []
        while True:
            self.rig.turn()
            try:
                packet = self.its.recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if self.rig.room is None:
                    return found
                continue  # the daemon has more to send
            if (message := self.joiner.add(packet)) is not None:
                found.append(messages.decode_row_order(message))

    def changes(self) -> list[tuple[int, str]]:
        """Numbers and methods of the changes that came since the last look."""
        found = []
        for order in self.told():
            assert isinstance(order, messages.RowChanges)
            found += [(number, method) for number, (method, _) in enumerate(order.changes, order.first)]
        return found

    def say(self, report: messages.RowReport) -> None:
        for part in parts_of(messages.encode(report)):
            self.its.send(part)
            assert self.rig.catalog.readable(self.ours)
        self.rig.turn()

    def answer(self, *numbers: int, ok: bool = True) -> None:
        self.say(messages.Answers([(number, 1, ok) for number in numbers]))

    def end(self) -> None:
        """It ends: the daemon leaves its line."""
        self.its.close()
        assert not self.rig.catalog.readable(self.ours)
        self.rig.room = None
        self.ours.close()
        self.rig.catalog.lost()


class Rig:
    """A catalog, and an event loop of sorts."""

    def __init__(self) -> None:
        self.soon: deque[Callable[[], None]] = deque()
        self.room: Callable[[], None] | None = None
        self.answers: list[tuple[str, bool]] = []
        self.sockets: list[socket.socket] = []
        self.catalog = RemoteCatalog(self.soon.append, self.soon.append, self._wait_for_room)

    def _wait_for_room(self, line: socket.socket, callback: Callable[[], None] | None) -> None:
        self.room = callback

    def step(self) -> None:
        """One turn of the loop: what is called during it waits for the next one."""
        for _ in range(len(self.soon)):
            self.soon.popleft()()

    def turn(self) -> None:
        while self.soon:
            self.soon.popleft()()
        if self.room is not None:
            self.room()

    def done(self, name: str) -> Callable[[bool], None]:
        return partial(self._answered, name)

    def _answered(self, name: str, ok: bool) -> None:
        self.answers.append((name, ok))


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    for one in rig.sockets:
        one.close()


def test_changes_of_a_turn_go_together_and_are_answered_once(rig: Rig) -> None:
    process = Process(rig)
    rig.catalog.insert(1, ROW, rig.done("insert"))
    rig.catalog.delete(2, rig.done("delete"))
    rig.catalog.delete_many([3, 4, 5], rig.done("many"))
    (order,) = process.told()
    assert isinstance(order, messages.RowChanges)
    assert [method for method, _ in order.changes] == ["insert", "delete", "delete_many"]
    assert rig.catalog.pending == 5
    assert rig.catalog.age_s() > 0
    process.say(messages.Answers([(0, 3, True)]))
    assert rig.answers == [("insert", True), ("delete", True), ("many", True)]
    assert (rig.catalog.pending, rig.catalog.age_s()) == (0, 0.0)


def test_what_is_not_answered_goes_to_the_next_process_in_order(rig: Rig) -> None:
    process = Process(rig)
    for place in range(3):
        rig.catalog.delete(place, rig.done(str(place)))
    assert len(process.changes()) == 3
    process.answer(0)
    process.end()
    rig.catalog.delete(3, rig.done("3"))
    again = Process(rig)
    assert again.changes() == [(1, "delete"), (2, "delete"), (3, "delete")]
    again.answer(1, 2, 3)
    assert rig.answers == [("0", True), ("1", True), ("2", True), ("3", True)]
    assert again.changes() == []


def test_changes_that_are_posted_as_a_process_ends_are_sent_once(rig: Rig) -> None:
    process = Process(rig)
    rig.catalog.delete(1, rig.done("1"))  # its packet is to be made in the next turn
    process.end()
    rig.catalog.delete(2, rig.done("2"))
    rig.turn()
    again = Process(rig)
    assert again.changes() == [(0, "delete"), (1, "delete")]
    again.answer(0, 1)
    assert rig.answers == [("1", True), ("2", True)]
    rig.catalog.delete(3)
    assert again.changes() == [(2, "delete")]


def test_a_refused_row_is_not_kept_and_later_burials_are_refused_for_good(rig: Rig) -> None:
    process = Process(rig)
    rig.catalog.delete(1, rig.done("row"))
    rig.catalog.remove_tombstone(1, b"k", rig.done("under way"))
    assert len(process.changes()) == 2
    process.answer(0, ok=False)
    rig.catalog.remove_tombstone(1, b"k", rig.done("later"))
    rig.turn()
    assert rig.answers == [("row", False), ("later", False)]
    process.end()
    again = Process(rig)
    rig.catalog.forget_namespaces([1], rig.done("next life"))
    rig.catalog.delete(1, rig.done("row"))
    assert again.changes() == [(2, "delete")]
    assert rig.answers[2:] == [("under way", False), ("next life", False)]
    assert rig.catalog.pending == 1


def test_what_a_failing_disk_keeps_is_sent_to_the_next_process_before_all_else(rig: Rig) -> None:
    process = Process(rig)
    rig.catalog.raise_epoch(1, 5, rig.done("flush"))
    rig.catalog.delete(1, rig.done("row"))
    process.changes()
    process.answer(0, 1, ok=False)
    process.say(messages.Status("disk full", 1, 0))
    assert rig.answers == [("flush", False), ("row", False)]
    assert (rig.catalog.pending, rig.catalog.error, rig.catalog.age_s()) == (1, "disk full", 0.0)
    process.end()
    rig.catalog.insert(2, ROW)
    again = Process(rig)
    assert again.changes() == [(0, "raise_epoch"), (2, "insert")]
    again.answer(0, 2)
    assert rig.answers == [("flush", False), ("row", False)], "answered once"
    assert rig.catalog.pending == 0


def test_what_was_kept_is_forgotten_once_the_catalog_works(rig: Rig) -> None:
    process = Process(rig)
    rig.catalog.set_segment(1, 4096)
    process.changes()
    process.answer(0, ok=False)
    process.say(messages.Status("disk full", 1, 0))
    process.say(messages.Status("", 1, 0))
    assert rig.catalog.pending == 0
    process.end()
    assert Process(rig).changes() == []


def test_what_was_kept_does_not_undo_a_later_change_that_is_written(rig: Rig) -> None:
    """A tombstone of an older epoch would bring back blocks that a later flush has dropped."""
    process = Process(rig)
    rig.catalog.add_tombstone(1, b"k" * 16, 3)
    process.changes()
    process.answer(0, ok=False)
    process.say(messages.Status("disk full", 1, 0))
    rig.catalog.add_tombstone(1, b"k" * 16, 4, rig.done("later"))
    process.changes()
    process.answer(1)
    process.end()  # before it has said that its catalog works again
    assert rig.answers == [("later", True)]
    assert Process(rig).changes() == []


def test_large_changes_pass_in_parts_and_wait_for_room(rig: Rig) -> None:
    process = Process(rig)
    specs = [bytes([number]) * (300 << 10) for number in range(4)]
    for number, spec in enumerate(specs, 1):
        rig.catalog.add_namespace(number, f"{number}", spec)
    rig.turn()
    assert rig.room is not None, "a line does not take a megabyte"
    rig.catalog.delete(1)
    changes = [change for order in process.told() for change in order.changes]  # type: ignore[union-attr]
    assert [(method, arguments[2]) for method, arguments in changes[:-1]] == [("add_namespace", spec) for spec in specs]
    assert changes[-1] == ("delete", [1])
    process.say(messages.Answers([(0, 5, True)]))
    assert rig.catalog.pending == 0


def test_a_process_that_ends_amid_a_large_change_gets_nothing_and_the_next_one_all(rig: Rig) -> None:
    process = Process(rig)
    rig.catalog.add_namespace(1, "1", bytes(1 << 20))
    rig.turn()
    assert rig.room is not None
    process.end()
    assert Process(rig).changes() == [(0, "add_namespace")]


def test_an_owner_that_fails_to_take_an_answer_does_not_keep_others_from_theirs(rig: Rig) -> None:
    process = Process(rig)
    rig.catalog.delete(1, lambda ok: 1 // 0)
    rig.catalog.delete(2, rig.done("2"))
    process.changes()
    process.answer(0, 1)
    assert rig.answers == [("2", True)]
    assert rig.catalog.pending == 0


def test_rows_are_taken_as_far_as_there_is_room(rig: Rig) -> None:
    process = Process(rig)
    ready: list[bool] = []
    loading = rig.catalog.load(lambda: ready.append(True), 10)
    assert process.told() == [messages.LoadRows(10)]
    assert loading.next_batch() is None
    process.say(messages.RowsEnd(2, "a fault"))
    assert ready == [True]
    assert (loading.finished, loading.damaged, loading.error) == (True, 2, "a fault")
    loading.cancel()
    assert process.told() == [messages.StopRows()]


# --- many answers ---------------------------------------------------------------------------------------


def say_many(rig: Rig, process: Process, count: int, rows: int = 1) -> None:
    """Changes of so many rows each are posted, and all answered in one message."""
    for number in range(count):
        if rows == 1:
            rig.catalog.delete(number, rig.done(str(number)))
        else:
            rig.catalog.delete_many([*range(number * rows, (number + 1) * rows)], rig.done(str(number)))
    assert len(process.changes()) == count
    process.its.send(b"\0" + messages.encode(messages.Answers([(0, 2, True), (2, 1, False), (3, count - 3, True)])))
    assert rig.catalog.readable(process.ours)


@pytest.mark.parametrize("rows", [1, 100])
def test_so_many_rows_are_answered_in_one_turn_in_order_and_before_all_else(rig: Rig, rows: int) -> None:
    process, count = Process(rig), 4 * CALLBACKS_AT_ONCE // rows
    say_many(rig, process, count, rows)
    process.its.send(b"\0" + messages.encode(messages.Status("", 5, 0)))
    turns = [len(rig.answers)]
    while len(rig.answers) < count:
        assert rig.catalog.readable(process.ours), "the line is readable all the time"
        assert rig.catalog.bytes_on_disk() == 0, "what follows the answers comes after them"
        rig.step()
        turns.append(len(rig.answers) - sum(turns))
    assert max(turns) * rows < CALLBACKS_AT_ONCE + rows
    assert rig.answers == [(str(number), number != 2) for number in range(count)]
    assert rig.catalog.readable(process.ours)
    assert rig.catalog.bytes_on_disk() == 5
    assert (rig.catalog.pending, rig.catalog.answered) == (0, count)


@pytest.mark.parametrize("next_one", ["at once", "later"])
def test_answers_of_a_process_that_has_ended_are_passed_on(rig: Rig, next_one: str) -> None:
    process, count = Process(rig), 3 * CALLBACKS_AT_ONCE
    say_many(rig, process, count)
    rig.catalog.delete(7, rig.done("last"))
    process.its.close()
    process.ours.close()
    rig.catalog.lost()
    assert len(rig.answers) < count
    if next_one == "later":
        rig.turn()
    again = Process(rig)
    assert again.changes() == [(count, "delete")], "what was answered is not sent again"
    again.answer(count)
    assert rig.answers == [*((str(number), number != 2) for number in range(count)), ("last", True)]


def test_closing_waits_for_answers_of_a_process_that_has_ended(rig: Rig) -> None:
    process, count = Process(rig), 3 * CALLBACKS_AT_ONCE
    say_many(rig, process, count)
    process.ours.close()
    rig.catalog.lost()
    assert rig.catalog.pending > 0
    rig.catalog._begin_to_close(time.monotonic() + 50)
    assert not rig.catalog._closed.is_set()
    rig.turn()
    assert rig.catalog._closed.is_set(), "nothing is left to write"
    assert len(rig.answers) == count


# --- closing ------------------------------------------------------------------------------------------


class Closing:
    """`close` in a thread, as it blocks."""

    def __init__(self, rig: Rig, timeout_s: float = 50.0) -> None:
        self.written: list[bool] = []
        self.rig = rig
        self.thread = threading.Thread(target=lambda: self.written.append(rig.catalog.close(timeout_s)))
        self.thread.start()
        wait_until(lambda: rig.soon or not self.thread.is_alive(), "the call")
        rig.turn()

    def result(self) -> bool:
        self.thread.join(50)
        return self.written[0]


def test_closing_waits_for_the_process(rig: Rig) -> None:
    process = Process(rig)
    rig.catalog.delete(1)
    closing = Closing(rig)
    changes, close = process.told()
    assert isinstance(changes, messages.RowChanges)
    assert isinstance(close, messages.CloseCatalog)
    assert not closing.written
    process.answer(0)
    process.say(messages.CatalogClosed(written=True))
    assert closing.result()


def test_closing_waits_for_a_process_that_is_not_the_first_one(rig: Rig) -> None:
    Process(rig).end()
    process = Process(rig)
    rig.catalog.delete(1)
    closing = Closing(rig)
    assert len(process.told()) == 2
    assert closing.thread.is_alive()
    process.say(messages.CatalogClosed(written=True))
    assert closing.result()


def test_closing_waits_for_the_next_process_if_there_is_something_to_write(rig: Rig) -> None:
    process = Process(rig)
    rig.catalog.raise_epoch(1, 1, rig.done("flush"))
    closing = Closing(rig)
    process.told()
    process.end()
    assert closing.thread.is_alive()
    again = Process(rig)
    changes, close = again.told()
    assert isinstance(changes, messages.RowChanges)
    assert isinstance(close, messages.CloseCatalog)
    assert 0 < close.timeout_s <= 50
    again.answer(0)
    again.say(messages.CatalogClosed(written=True))
    assert closing.result()
    assert rig.answers == [("flush", True)]


def test_closing_waits_for_nothing_where_no_process_follows(rig: Rig) -> None:
    process = Process(rig)
    rig.catalog.delete(1)
    process.end()
    closing = Closing(rig)
    assert closing.thread.is_alive()
    rig.catalog.give_up()
    assert not closing.result()


def test_closing_waits_no_longer_than_it_may(rig: Rig) -> None:
    Process(rig)
    began_s = time.monotonic()
    assert not Closing(rig, 0.05).result()
    assert time.monotonic() - began_s < 20
