"""How a helper process ends: crashed, killed, replaced or closed; what it leaves behind, and what it costs."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from helper_rig import Make, patiently, pid, problem_of
from store_calls import content, put, read, soon
from waiting import state_of, wait_until

from tiercache.daemon.tiers.shared.stores.store import Fate, StoreError, StoreProblem


def test_a_crash_ends_the_calls_under_way_and_the_next_one_finds_another_process(
    make: Make,
) -> None:
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
