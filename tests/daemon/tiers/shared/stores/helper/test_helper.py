"""A store in a helper process: what goes in comes out, calls that hang end at their deadline, so may the process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from store_calls import content, put, read, room, soon
from waiting import state_of, wait_until

from tiercache.daemon.tiers.shared.stores.helper import messages, supervisor
from tiercache.daemon.tiers.shared.stores.helper.connection import HelperStore
from tiercache.daemon.tiers.shared.stores.store import Connection, Fate, Put, StoreError, StoreProblem

LATE_S = 0.2

Make = Callable[..., HelperStore]
"""Makes a store whose process ends with the test: see the fixture `make`."""


def pid(store: HelperStore) -> int:
    """Of the store's process, once it serves."""
    store.supervisor.begin()
    wait_until(lambda: store.stats()["ready"], "the helper process")
    found = store.stats()["pid"]
    assert isinstance(found, int)
    return found


def late() -> float:
    return time.monotonic() + LATE_S


def hang(line: Connection, name: bytes = b"hang") -> None:
    """A call that does not come back, up to its deadline."""
    with pytest.raises(StoreError) as caught:
        line.exists([name], [], late())
    assert caught.value.problem is StoreProblem.TIMEOUT


def problem_of(call: Callable[[], object]) -> StoreError | None:
    """What the call raises, if it does."""
    try:
        call()
    except StoreError as error:
        return error
    return None


def patiently(call: Callable[[], object]) -> None:
    """Call until the store is there again."""

    def answered() -> bool:
        error = problem_of(call)
        assert error is None or error.problem in (StoreProblem.UNREACHABLE, StoreProblem.BUSY)
        return error is None

    wait_until(answered, "a call that succeeds")


def test_an_error_of_the_store_comes_back_and_the_line_is_used_again(make: Make) -> None:
    line = make().connect()
    values = [Put(b"%d" % number, [b"value!"]) for number in range(3)]
    values[2:2] = [Put(b"full", [b"value!"])]
    values += [Put(b"later%d" % number, [b"value!"]) for number in range(40)]
    with pytest.raises(StoreError, match="there is no room: make some") as caught:
        line.put(values, [], soon())
    assert caught.value.problem is StoreProblem.FULL
    assert [one.fate for one in values[:3]] == [Fate.DONE, Fate.DONE, Fate.UNKNOWN]
    assert values[-1].fate is Fate.UNKNOWN
    first = line._line
    assert read(line, [b"0"]) == [b"value!"]
    assert line._line is first


def test_a_note_that_was_set_before_is_asked_of_the_store_itself(make: Make) -> None:
    """A folder syncs it before it answers: a flush counts as durable then."""
    line = make().connect()
    with pytest.raises(StoreError, match="there is no room: make some"):
        line.replicated_note(b"full", soon())


@pytest.mark.parametrize("length", [3, 16, 1 << 40])
def test_an_answer_that_cannot_be_true_is_a_misfit(make: Make, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """A process that has gone mad may say that it has read more than there is room for, or less than the head."""
    line = make().connect()
    put(line, {b"a": b"0123456789"})
    real = messages.decode_answered

    def mad(packet: bytes) -> messages.Answered:
        answer: messages.Answered = real(packet)
        if isinstance(answer, messages.Settled):
            return messages.Settled(answer.slot, answer.fate, length)
        return answer

    monkeypatch.setattr(messages, "decode_answered", mad)
    assert read(line, [b"a"], 5, 10) == [Fate.MISFIT]


@pytest.mark.stress
def test_a_late_call_ends_at_its_deadline_and_its_answer_reaches_nothing(make: Make, tmp_path: Path) -> None:
    store = make()
    line = store.connect()
    put(line, {b"good": content(1, 9000)})
    (tmp_path / "gate").touch()
    put(line, {b"hang": content(2, 9000)})
    (tmp_path / "gate").unlink()
    abandoned = room(b"hang", 5, 9000)
    with pytest.raises(StoreError) as caught:
        line.get([abandoned], [], late())
    assert caught.value.problem is StoreProblem.TIMEOUT
    assert store.stats()["late_lines"] == 1
    (tmp_path / "gate").touch()
    for _ in range(20):
        assert read(line, [b"good"]) == [content(1, 9000)]
    assert abandoned.fate is Fate.UNKNOWN
    assert bytes(abandoned.body).strip(b"?") == b""

    def new_line() -> bool:
        with closing(store.connect()) as one:
            one.exists([], [], soon())
        return store.stats()["late_lines"] == 0

    wait_until(new_line, "the worker to come back and end")
    assert store.stats()["starts"] == 1


@pytest.mark.stress
@pytest.mark.parametrize("how", ["in the store", "stopped"])
def test_a_process_that_answers_nothing_is_replaced(make: Make, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(supervisor, "HUNG_S", LATE_S / 2)
    store = make()
    line = store.connect()
    first = pid(store)
    line.exists([b"a"], [], soon())
    if how == "stopped":
        os.kill(first, signal.SIGSTOP)
        wait_until(lambda: state_of(first) == "T", "the helper to stop")
    hang(line)
    patiently(lambda: put(line, {b"b": b"value!"}))
    assert pid(store) != first
    wait_until(lambda: state_of(first) == "", "the first process to be reaped")
    assert (store.stats()["given_up"], store.stats()["starts"]) == (1, 2)


def test_a_crash_ends_the_calls_under_way_and_the_next_one_finds_another_process(make: Make) -> None:
    store = make()
    line, other = store.connect(), store.connect()
    pid(store)
    raised: list[StoreError | None] = []
    waiter = threading.Thread(target=lambda: raised.append(problem_of(lambda: other.exists([b"hang"], [], soon()))))
    waiter.start()
    wait_until(lambda: other._line is not None, "the other call")
    raised.append(problem_of(lambda: line.exists([b"crash"], [], soon())))
    waiter.join()
    assert [error and error.problem for error in raised] == [StoreProblem.UNREACHABLE] * 2
    patiently(lambda: put(line, {b"b": b"value!"}))
    assert (store.stats()["ends"], store.stats()["starts"]) == (1, 2)


@pytest.mark.stress
def test_kill_9_amid_a_put_leaves_nothing_that_readers_see(make: Make, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    store, reader = make(f"file://{tmp_path}/kv?direct=no"), make(f"file://{tmp_path}/kv")
    line, eyes = store.connect(), reader.connect()
    earlier, new = content(1, 8 << 20), content(2, 8 << 20)
    put(line, {b"a": earlier})
    victim = pid(store)
    tmp = tmp_path / "kv" / "tiercache-1" / "tmp"
    seen: list[str] = []

    def kill() -> None:
        while not (files := [name for name in os.listdir(tmp) if "clock" not in name and "lease" not in name]):
            pass
        seen.extend(files)
        os.kill(victim, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    error = problem_of(lambda: [put(line, {b"a": new, b"b": new}) for _ in range(1000)])
    killer.join()
    assert error is not None
    assert error.problem is StoreProblem.UNREACHABLE
    assert seen
    found = read(eyes, [b"a", b"b"], 5, 8 << 20)
    assert found[0] in (earlier, new)
    assert found[1] in (new, Fate.MISSING)
    patiently(lambda: put(line, {b"a": new}))
    assert read(eyes, [b"a"], 5, 8 << 20) == [new]


def test_closing_ends_the_process_and_calls_and_waits_for_neither(make: Make) -> None:
    before = len(os.listdir("/proc/self/fd"))
    store = make()
    line = store.connect()
    child = pid(store)
    raised: list[StoreError | None] = []
    waiter = threading.Thread(target=lambda: raised.append(problem_of(lambda: line.exists([b"hang"], [], soon()))))
    waiter.start()
    wait_until(lambda: line._line is not None, "the call")
    store.close()
    waiter.join()
    assert [error and error.problem for error in raised] == [StoreProblem.UNREACHABLE]
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before
    wait_until(lambda: state_of(child) == "", "the helper process to end")
