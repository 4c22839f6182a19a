"""The helper process of a store: what hangs, dies or is late in it costs the daemon a call, and never more."""

from __future__ import annotations

import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from store_calls import content, put, read, room, soon
from waiting import state_of, wait_until

from tiercache.daemon.tiers.shared.stores.folder.store import shared_folder
from tiercache.daemon.tiers.shared.stores.helper import lines, messages, supervisor
from tiercache.daemon.tiers.shared.stores.helper.connection import HelperConnection
from tiercache.daemon.tiers.shared.stores.helper.store import HelperStore
from tiercache.daemon.tiers.shared.stores.store import Connection, Fate, Put, StoreError, StoreProblem

LATE_S = 0.2


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., HelperStore]]:
    """Makes stores whose processes end with the test. Those of this file's own kind may be told to hang or die."""
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_S", 0.1)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*sys.path, str(Path(__file__).parent)]))
    made: list[HelperStore] = []
    connected: list[HelperConnection] = []
    real = HelperStore.connect

    def connect(store: HelperStore) -> HelperConnection:
        connected.append(real(store))
        return connected[-1]

    monkeypatch.setattr(HelperStore, "connect", connect)

    def make(url: str = f"obedient://{tmp_path}") -> HelperStore:
        if url.startswith("file:"):
            made.append(shared_folder(url))
        else:
            made.append(HelperStore("obedient_store:ObedientStore", url, url, 2))
        return made[-1]

    yield make
    (tmp_path / "gate").touch()
    for line in connected:
        line.close()
    for one in made:
        one.close()


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


# --- calls ---------------------------------------------------------------------------------------


def test_a_folder_is_used_through_its_helper(make: Callable[..., HelperStore], tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o2777)
    store, other = make(f"file://{tmp_path}/kv"), make(f"file://{tmp_path}/kv")
    here, there = store.connect(), other.connect()
    values = {b"tc1:%d" % number: content(number, length) for number, length in enumerate((0, 9, 4096, 70_000, 9, 9))}
    values |= {b"many:%d" % number: content(number, 5000 + number) for number in range(40)}
    assert set(put(here, values, head_bytes=0)) == {Fate.DONE}
    assert read(there, list(values), 0) == list(values.values())
    assert read(there, [b"tc1:3"], 7, 20, offset=4096) == [values[b"tc1:3"][4096 : 4096 + 27]]
    assert read(there, [b"tc1:0", b"never", b"tc1:3"], 5, 100) == [Fate.MISFIT, Fate.MISSING, Fate.MISFIT]
    assert there.exists([*values, b"never"], [], soon()).there == [True] * len(values) + [False]
    assert here.set_note(b"epoch", b"7", soon(), only_if_missing=True) == b"7"
    notes = [b"epoch", *(b"%d" % number for number in range(40))]
    wanted = [b"7", *[None] * 40]
    assert (
        there.exists([], notes, soon()).notes == there.get([], notes, soon()) == there.put([], notes, soon()) == wanted
    )
    assert there.get([room(b"tc1:1", 1, 9)], notes, soon()) == wanted
    files = [path for path in (tmp_path / "kv" / "tiercache-1" / "values").rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666}, "as the folder allows, without a mask"
    told: list[object] = []
    gets = [room(b"tc1:1", 1, 9) for _ in range(20)]
    assert there.get(gets, [b"epoch"], soon(), lambda _: told.append(b"value"), told.extend) == [b"7"]
    assert told == [b"7"] + [b"value"] * 20
    for few in (notes, []):
        told.clear()
        there.get(gets, few, soon(), lambda _: told.append(b"value"), told.append)  # type: ignore[arg-type]
        assert told == [wanted if few else []] + [b"value"] * 20
        told.clear()
        there.get([], few, soon(), None, told.append)  # type: ignore[arg-type]
        assert told == [wanted if few else []]
    there.delete(list(values), soon())
    assert not any(here.exists(list(values), [], soon()).there)


def test_more_names_than_one_message_holds_keep_their_order(make: Callable[..., HelperStore]) -> None:
    line = make().connect()
    names = [b"%06d" % number + b"x" * 200 for number in range(1000)]
    assert sum(map(len, names)) > messages.MAX_MESSAGE_BYTES
    put(line, dict.fromkeys(names[::7], b"value!"))
    there = line.exists(names, [b"note"], soon())
    assert there == ([number % 7 == 0 for number in range(1000)], [None])
    line.delete(names[::7], soon())
    assert not any(line.exists(names, [], soon()).there)


def test_the_staging_buffer_grows_and_stays_bounded(make: Callable[..., HelperStore]) -> None:
    line = make().connect()
    sizes = [10, 100_000, 3 << 20, 20 << 20]
    for number, size in enumerate(sizes):
        put(line, {b"%d" % number: content(number, size)})
        its = line._line
        assert its is not None
        assert its.slot_bytes >= size
        assert its.slots * its.slot_bytes <= max(lines.STAGING_BYTES, lines.MIN_SLOTS * (size + (64 << 10)))
    got = read(line, [b"%d" % number for number in range(4)], 5, 20 << 20)
    assert got == [content(number, size) for number, size in enumerate(sizes)]


def test_a_value_of_more_parts_than_a_system_call_takes(make: Callable[..., HelperStore]) -> None:
    line = make().connect()
    one = Put(b"parts", [bytes([number % 256]) * 3 for number in range(3000)])
    line.put([one], [], soon())
    assert read(line, [b"parts"]) == [b"".join(one.parts)]


def test_an_error_of_the_store_comes_back_and_the_line_is_used_again(make: Callable[..., HelperStore]) -> None:
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


def test_a_defect_of_the_store_is_an_error_of_the_call(
    make: Callable[..., HelperStore], caplog: pytest.LogCaptureFixture
) -> None:
    line = make().connect()
    with caplog.at_level(logging.INFO, "tiercache.daemon"), pytest.raises(StoreError, match="ValueError: a defect"):
        read(line, [b"a", b"defect", b"b"])
    wait_until(lambda: "a call of the store failed" in caplog.text, "the log of the helper process")
    assert line.exists([b"a"], [], soon()).there == [False]


def test_an_error_in_arrived_costs_the_line_and_no_more(make: Callable[..., HelperStore]) -> None:
    line = make().connect()
    put(line, {b"%d" % number: b"value!" for number in range(20)})
    with pytest.raises(ZeroDivisionError):
        line.get([room(b"%d" % number, 1, 9) for number in range(20)], [], soon(), lambda _: 1 / 0)  # type: ignore[arg-type,return-value]
    assert read(line, [b"3"]) == [b"value!"]


# --- late calls ----------------------------------------------------------------------------------


def test_a_late_call_ends_at_its_deadline_and_its_answer_reaches_nothing(
    make: Callable[..., HelperStore], tmp_path: Path
) -> None:
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


def test_where_some_calls_hang_the_others_are_served(make: Callable[..., HelperStore]) -> None:
    store = make()
    line, other = store.connect(), store.connect()
    pid(store)
    hang(line)
    put(other, {b"a": b"value!"})
    assert read(line, [b"a"]) == [b"value!"]


def test_only_so_many_calls_may_hang_at_once(make: Callable[..., HelperStore], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MAX_LATE_LINES", 2)
    store = make()
    line, other = store.connect(), store.connect()
    other.exists([b"a"], [], soon())
    for _ in range(2):
        hang(line)
    with pytest.raises(StoreError, match="2 calls were not answered yet") as caught:
        line.exists([b"a"], [], soon())
    assert caught.value.problem is StoreProblem.TIMEOUT
    assert other.exists([b"a"], [], soon()).there == [False]


@pytest.mark.parametrize("how", ["in the store", "stopped"])
def test_a_process_that_answers_nothing_is_replaced(
    make: Callable[..., HelperStore], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
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


def test_processes_that_do_not_die_are_not_waited_for_and_are_few(
    make: Callable[..., HelperStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the kernel's state D: here a process whose SIGKILL does not come."""
    monkeypatch.setattr(supervisor, "MAX_UNDEAD", 2)
    monkeypatch.setattr(supervisor, "HUNG_S", 0.0)
    monkeypatch.setattr(supervisor, "_REAP_S", 0.01)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: os.kill(process.pid, signal.SIGSTOP))
    store = make()
    line = store.connect()
    pids = set()
    try:
        for _ in range(2):
            pids.add(pid(store))
            hang(line)
            wait_until(lambda: store.stats()["undead"] == len(pids), "the process to be given up")
        wait_until(lambda: "hangs in the kernel" in str(store.stats()["problem"]), "no third process")
        error = wait_until(lambda: problem_of(lambda: line.exists([b"a"], [], late())), "the text")
        assert error.problem in (StoreProblem.UNREACHABLE, StoreProblem.BUSY)
        assert store.stats()["starts"] == 2
    finally:
        for number in pids:
            os.kill(number, signal.SIGKILL)
    patiently(lambda: line.exists([b"a"], [], soon()))
    monkeypatch.undo()


# --- the process's end ---------------------------------------------------------------------------


def test_a_crash_ends_the_calls_under_way_and_the_next_one_finds_another_process(
    make: Callable[..., HelperStore],
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


def test_kill_9_amid_a_put_leaves_nothing_that_readers_see(make: Callable[..., HelperStore], tmp_path: Path) -> None:
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
    make: Callable[..., HelperStore], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = make(f"obedient://{tmp_path}?broken")
    line = store.connect()
    error = wait_until(lambda: problem_of(lambda: line.exists([b"a"], [], soon())), "the text")
    assert error.problem is StoreProblem.UNREACHABLE
    assert "its helper process ended with status 1, and the log says why" in error.text
    wait_until(lambda: int(str(store.stats()["starts"])) > 2, "further attempts")
    assert "this store cannot be made" in caplog.text


def test_a_process_that_is_still_starting_is_no_failure(
    make: Callable[..., HelperStore], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_closing_ends_the_process_and_calls_and_waits_for_neither(make: Callable[..., HelperStore]) -> None:
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


def test_a_connection_is_closed_by_another_thread(make: Callable[..., HelperStore]) -> None:
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
    make: Callable[..., HelperStore],
) -> None:
    line = make().connect()
    waiter = threading.Thread(target=lambda: problem_of(lambda: line.exists([b"a"], [], soon())))
    waiter.start()
    line.close()
    waiter.join()
    assert line._line is None


def test_lines_and_buffers_are_not_leaked(make: Callable[..., HelperStore]) -> None:
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


def test_the_process_is_light(make: Callable[..., HelperStore], tmp_path: Path) -> None:
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


@pytest.mark.parametrize("length", [3, 16, 1 << 40])
def test_an_answer_that_cannot_be_true_is_a_misfit(
    make: Callable[..., HelperStore], monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
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
