"""Calls of a store that hang in its helper process: each ends at its deadline, and others are served."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest
from helper_rig import LATE_S, Make, hang, late, patiently, pid
from store_calls import content, put, read, room, soon
from waiting import state_of, wait_until

from tiercache.daemon.tiers.shared.stores.helper import supervisor
from tiercache.daemon.tiers.shared.stores.store import Fate, StoreError, StoreProblem

pytestmark = pytest.mark.stress


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
