"""How a helper process ends: crashed, killed, replaced or closed; what it leaves behind, and what it costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from helper_rig import Make, patiently, pid, problem_of
from store_calls import content, put, read, soon
from waiting import state_of, wait_until

from tiercache.daemon.tiers.shared.stores.helper import supervisor
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


def test_a_store_that_cannot_be_made_is_told_and_tried_again(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = make(f"obedient://{tmp_path}?broken")
    line = store.connect()
    error = wait_until(lambda: problem_of(lambda: line.exists([b"a"], [], soon())), "the text")
    assert error.problem is StoreProblem.UNREACHABLE
    assert "its helper process ended with status 1, and the log says why" in error.text
    wait_until(lambda: int(str(store.stats()["starts"])) > 2, "further attempts")
    assert "this store cannot be made" in caplog.text


def test_a_process_that_is_still_starting_is_no_failure(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "CHILD", "tiercache.daemon.tiers.shared.stores.helper.lines")  # says nothing
    with pytest.raises(StoreError, match="is starting") as caught:
        make().connect().exists([b"a"], [], time.monotonic())
    assert caught.value.problem is StoreProblem.BUSY


@pytest.mark.parametrize("how", ["hang", "lock"])
def test_the_process_ends_with_a_killed_daemon_even_if_calls_hang(tmp_path: Path, how: str) -> None:
    code = f"""
import threading, time
from tiercache.daemon.tiers.shared.stores.helper.store import HelperStore
store = HelperStore("obedient_store:ObedientStore", "obedient://{tmp_path}", "", 2)
line = store.connect()
line.exists([b"a"], [], time.monotonic() + 30)
threading.Thread(target=line.exists, args=([b"{how}"], [], time.monotonic() + 300)).start()
time.sleep(0.05)
print(store.stats()["pid"], flush=True)
time.sleep(300)
"""
    path = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    daemon = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    try:
        assert daemon.stdout is not None
        child = int(daemon.stdout.readline())
        assert state_of(child)
    finally:
        daemon.kill()
        daemon.wait()
        assert daemon.stdout is not None
        daemon.stdout.close()
    wait_until(lambda: state_of(child) in ("", "Z"), "the helper process to end")


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


def test_a_connection_is_closed_by_another_thread(make: Make) -> None:
    line = make().connect()
    raised: list[StoreError | None] = []
    waiter = threading.Thread(target=lambda: raised.append(problem_of(lambda: line.exists([b"hang"], [], soon()))))
    waiter.start()
    wait_until(lambda: line._line is not None, "the call")
    line.close()
    waiter.join()
    assert [error and error.problem for error in raised] == [StoreProblem.UNREACHABLE]
    with pytest.raises(StoreError, match="closed"):
        line.exists([b"a"], [], soon())


def test_a_connection_that_is_closed_while_it_waits_for_the_process_keeps_nothing(
    make: Make,
) -> None:
    line = make().connect()
    waiter = threading.Thread(target=lambda: problem_of(lambda: line.exists([b"a"], [], soon())))
    waiter.start()
    line.close()
    waiter.join()
    assert line._line is None


def test_lines_and_buffers_are_not_leaked(make: Make) -> None:
    store = make()
    line = store.connect()
    put(line, {b"a": b"value!"})

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(30):
        with closing(store.connect()) as one:
            put(one, {b"a": b"value!"})
    assert descriptors() == before
    theirs = f"/proc/{pid(store)}/fd"
    wait_until(lambda: len(os.listdir(theirs)) < 20, "the helper to close its ends")


def test_the_process_is_light(make: Make, tmp_path: Path) -> None:
    """It inherits no descriptor besides its socket, and loads neither what computes nor what the daemon serves with."""
    inherited = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(inherited, True)
    try:
        (tmp_path / "kv").mkdir()
        store = make(f"file://{tmp_path}/kv")
        store.connect().exists([b"a"], [], soon())
        maps = Path(f"/proc/{pid(store)}/maps").read_text()
        links = [os.readlink(f"/proc/{pid(store)}/fd/{fd}") for fd in os.listdir(f"/proc/{pid(store)}/fd")]
    finally:
        os.close(inherited)
    assert [name for name in ("torch", "numpy", "zmq", "sqlite", "_ssl", "obstore") if name in maps] == []
    assert links.count("/dev/null") <= 2, "its stdin, and perhaps the stderr of the tests"
