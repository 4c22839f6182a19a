"""A signal in a call of the main thread: its handler raises when the call's work is done, and never in between."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chains import chain_of
from connector_helpers import bytes_of
from waiting import wait_until

import tiercache
from tiercache.client.channel import Channel
from tiercache.copies.pool import CpuCopier, Limit
from tiercache.errors import CallInterrupted
from tiercache.ground import forks
from tiercache.ground import uninterrupted as module
from tiercache.ground.uninterrupted import interrupted, uninterrupted

WAIT_S = 60
ROOT = Path(__file__).resolve().parents[2]
Open = Callable[..., tiercache.Connector]


class Terminated(Exception):
    """What the test's handler of SIGTERM raises."""


@pytest.fixture(autouse=True)
def handlers(ctrl_c: None) -> Iterator[dict[int, Any]]:
    """Handlers of SIGINT and SIGTERM that raise. They must still be installed when a test ends."""

    def terminate(number: int, frame: Any) -> None:
        raise Terminated

    earlier = signal.signal(signal.SIGTERM, terminate)
    mine: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: terminate}
    yield mine
    found = {number: signal.getsignal(number) for number in mine}
    signal.signal(signal.SIGTERM, earlier)
    assert found == mine


@contextmanager
def injected(events: dict[int, int], files: tuple[str, ...], what: str = "opcode") -> Iterator[list[int]]:
    """Raise signals in this thread: `events` gives the signal for each step (an opcode, or a line) of `files`."""
    seen = [0]

    def trace(frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(files):
            return None
        frame.f_trace_opcodes = what == "opcode"
        if event == what:
            seen[0] += 1
            number = events.get(seen[0])
            if number is not None:
                signal.raise_signal(number)
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(earlier)


OWN = ("tiercache/ground/uninterrupted.py",)


def steps_of(call: Callable[[], object], files: tuple[str, ...], what: str) -> int:
    with injected({}, files, what) as seen:
        call()
    return seen[0]


# --- the mechanism --------------------------------------------------------------------------------


def test_a_signal_at_any_step_of_it_raises_once_and_cuts_no_work() -> None:
    log: list[str] = []

    def work() -> str:
        log.append("begun")
        interrupted()
        log.append("ended")
        return "result"

    count = steps_of(lambda: uninterrupted(work), OWN, "opcode")
    assert count > 100
    for number, kind in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)):
        for step in range(1, count):
            log.clear()
            with pytest.raises(kind), injected({step: number}, OWN):
                uninterrupted(work)
            assert log in ([], ["begun", "ended"])
            assert module._current is None
            heal()


def test_two_signals_at_any_steps_cut_no_work() -> None:
    log: list[str] = []

    def work() -> str:
        log.append("begun")
        interrupted()
        log.append("ended")
        return "result"

    count = steps_of(lambda: uninterrupted(work), OWN, "opcode")
    for first in range(1, count, 7):
        for apart in (1, 2, 5, 23, 61):
            log.clear()
            with (
                pytest.raises((KeyboardInterrupt, Terminated)),
                injected({first: signal.SIGINT, first + apart: signal.SIGTERM}, OWN),
            ):
                uninterrupted(work)
            assert log in ([], ["begun", "ended"])
            heal()


def heal() -> None:
    """A handler of ours that was left installed passes the next signal on and removes itself."""
    for number, kind in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)):
        with pytest.raises(kind):
            signal.raise_signal(number)


def test_a_handler_that_was_left_behind_is_known_as_such(handlers: dict[int, Any]) -> None:
    left = 0
    count = steps_of(lambda: uninterrupted(lambda: None), OWN, "opcode")
    for step in range(1, count):
        with pytest.raises(KeyboardInterrupt), injected({step: signal.SIGINT}, OWN):
            uninterrupted(lambda: None)
        left += signal.getsignal(signal.SIGTERM) is not handlers[signal.SIGTERM]
        uninterrupted(lambda: None)
        assert signal.getsignal(signal.SIGTERM) is handlers[signal.SIGTERM]
    assert left > 0


def test_a_handler_that_raises_nothing_has_its_turn_and_the_call_goes_on(handlers: dict[int, Any]) -> None:
    calls: list[tuple[int, bool]] = []
    earlier = signal.signal(signal.SIGUSR1, lambda number, frame: calls.append((number, frame is not None)))
    try:

        def work() -> str:
            signal.raise_signal(signal.SIGUSR1)
            assert calls == []
            assert not interrupted()
            assert calls == [(signal.SIGUSR1, True)]
            signal.raise_signal(signal.SIGUSR1)
            return "result"

        assert uninterrupted(work) == "result"
        assert len(calls) == 2
    finally:
        signal.signal(signal.SIGUSR1, earlier)


def test_what_the_call_was_given_goes_with_the_error() -> None:
    """And not only with the next garbage collection: a match that is not loaded ends with its last reference."""

    class Given:
        pass

    def call(given: object) -> None:
        uninterrupted(lambda: (given, signal.raise_signal(signal.SIGINT), interrupted()))

    given = Given()
    alive = weakref.ref(given)
    gc.disable()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            call(given)
        del given
        assert alive() is None
    finally:
        gc.enable()


def test_a_handler_may_call_and_be_interrupted_itself() -> None:
    def nested(number: int, frame: Any) -> None:
        uninterrupted(lambda: signal.raise_signal(signal.SIGINT))
        pytest.fail("the inner call's signal is raised when that is over")

    earlier = signal.signal(signal.SIGUSR1, nested)
    ended: list[bool] = []
    try:

        def work() -> None:
            signal.raise_signal(signal.SIGUSR1)
            ended.append(interrupted())

        with pytest.raises(KeyboardInterrupt):
            uninterrupted(work)
        assert ended == [True]
    finally:
        signal.signal(signal.SIGUSR1, earlier)


def test_a_handler_that_is_set_meanwhile_stays_and_the_works_own_error_is_raised(handlers: dict[int, Any]) -> None:
    def other(number: int, frame: Any) -> None:
        raise AssertionError

    def work() -> None:
        signal.signal(signal.SIGTERM, other)
        raise MemoryError

    with pytest.raises(MemoryError):
        uninterrupted(work)
    assert signal.signal(signal.SIGTERM, handlers[signal.SIGTERM]) is other


def test_only_the_calls_own_thread_handles_signals() -> None:
    def work() -> list[bool]:
        signal.raise_signal(signal.SIGINT)
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(interrupted()))
        thread.start()
        thread.join()
        return [*seen, interrupted()]

    seen: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(lambda: seen.extend(work()))
    assert seen == [False, True]
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(uninterrupted(lambda: 1)))
    thread.start()
    thread.join()
    assert results == [1]
    assert not interrupted()


def test_restarting_system_calls_stays_as_it_was_set() -> None:
    """`signal.siginterrupt(number, False)`, which asyncio sets, stays in force though `signal.signal` would undo it."""

    def flags() -> bytes:
        import ctypes

        kept = ctypes.create_string_buffer(module._SIGACTION_BYTES)
        assert module._sigaction(signal.SIGUSR1, None, kept) == 0
        return kept.raw

    earlier = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        interrupting = flags()
        signal.siginterrupt(signal.SIGUSR1, False)
        restarting = flags()
        assert restarting != interrupting
        assert uninterrupted(flags) == restarting
        assert flags() == restarting
    finally:
        signal.signal(signal.SIGUSR1, earlier)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("from_main", [True, False])
def test_a_child_forked_meanwhile_has_the_handlers(from_main: bool) -> None:
    def fork() -> int:
        pid = os.fork()
        if pid == 0:
            usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            os._exit(0 if usual and not interrupted() else 1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def work() -> int:
        signal.raise_signal(signal.SIGUSR1)
        if from_main:
            return fork()
        statuses: list[int] = []
        thread = threading.Thread(target=lambda: statuses.append(fork()))
        thread.start()
        thread.join()
        return statuses[0]

    calls: list[int] = []
    earlier = signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
    try:
        assert uninterrupted(work) == 0
        assert calls == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, earlier)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_after_a_handler_has_raised_forgets_all() -> None:
    """The error belongs to the parent. Raised in the child it would stop the child from dropping the rest."""

    class Owner:
        forgotten = False

        def forget_in_child(self) -> None:
            self.forgotten = True

    owner = Owner()
    forks.watch(owner)
    statuses: list[int] = []

    def work() -> None:
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        pid = os.fork()
        if pid == 0:
            os._exit(0 if owner.forgotten and not interrupted() else 1)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    with pytest.raises(KeyboardInterrupt):
        uninterrupted(work)
    assert statuses == [0]


def test_a_handler_that_is_copied_to_another_signal_meanwhile_is_that_signals(handlers: dict[int, Any]) -> None:
    def copy(number: int, frame: Any) -> None:
        signal.signal(signal.SIGUSR2, signal.getsignal(signal.SIGTERM))

    before = signal.signal(signal.SIGUSR1, copy), signal.getsignal(signal.SIGUSR2)
    log: list[str] = []

    def work(*numbers: int) -> None:
        signal.raise_signal(signal.SIGUSR1)
        assert not interrupted()
        for number in numbers:
            signal.raise_signal(number)
        log.append("ended")

    try:
        with pytest.raises(Terminated):
            uninterrupted(lambda: work(signal.SIGUSR2))
        assert signal.getsignal(signal.SIGUSR2) is handlers[signal.SIGTERM]
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        uninterrupted(work)
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGUSR2)
        assert signal.getsignal(signal.SIGUSR2) is handlers[signal.SIGTERM]
        assert log == ["ended", "ended"]
    finally:
        for number, handler in zip((signal.SIGUSR1, signal.SIGUSR2), before, strict=True):
            signal.signal(number, handler)


def test_at_the_very_end_and_where_handlers_cannot_be_set_it_is_only_done(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
from tiercache.ground.uninterrupted import uninterrupted
assert uninterrupted(lambda: 1) == 1
class Last:
    def __del__(self):
        print(uninterrupted(lambda: "done"), flush=True)
last = Last()
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=WAIT_S, check=True)
    assert done.stdout == "done\n"
    # The interpreter's own main thread is another than `threading` believes where a program embeds Python.
    monkeypatch.setattr(module, "_is_main", lambda: True)
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(uninterrupted(lambda: 1)))
    thread.start()
    thread.join()
    assert results == [1]


# --- stores and loads ------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_a_handler_may_use_the_connector_at_any_step_of_calls_that_signals_may_cut(open_connector: Open) -> None:
    """A handler waits for no lock that its own thread holds."""
    connector = open_connector()
    used: list[int] = []

    def use(number: int, frame: Any) -> None:
        connector.announce([])
        used.append(connector.counters["stores"])

    def call() -> None:
        connector.announce([])
        assert connector.counters["stores"] == 0

    earlier = signal.signal(signal.SIGUSR1, use)
    client = ("client", "keeper", "wakeup")
    side = ("connector", "scheduler_side", "outcomes")
    files = (*(f"tiercache/client/{name}.py" for name in client), *(f"tiercache/connector/{name}.py" for name in side))
    try:
        count = steps_of(call, files, "opcode")
        assert count > 40
        for step in range(1, count):
            with injected({step: signal.SIGUSR1}, files):
                call()
        assert used == [0] * (count - 1)
    finally:
        signal.signal(signal.SIGUSR1, earlier)


NONE = {"write": 0, "quarantined": 0, "read": 0}


def leases(watcher: tiercache.Connector) -> dict[str, int]:
    found = watcher.client.stats()["leases"]
    return {name: found[name] for name in NONE}


@pytest.mark.parametrize("part", range(3))
def test_a_signal_at_any_line_of_a_match_a_load_and_a_store_leaves_nothing_behind(
    open_connector: Open, part: int
) -> None:
    """Interrupt at a hundred of all lines; the rest are alike."""
    watcher, connector = open_connector(name="watcher", pool=None), open_connector()
    chain = chain_of(f"interrupted at a line of part {part}", 8)
    assert connector.store(chain, range(8)).stored == 8
    calls = 0

    def new() -> bytes:
        nonlocal calls
        calls += 1
        return chain_of(f"interrupted at a line {part} {calls}", 8)

    def match() -> None:
        connector.release(connector.match(chain))

    def load() -> None:
        connector.load(connector.match(chain), range(10, 18))

    def store() -> None:
        connector.store(new(), range(8))

    call = (match, load, store)[part]
    folders = ("client", "connector", "copies", "ground", "protocol")
    paths = [path for folder in folders for path in (ROOT / "tiercache" / folder).rglob("*.py")]
    files = tuple(str(path.relative_to(ROOT)) for path in paths)
    count = steps_of(call, files, "line")
    assert count > 80
    for step in range(1, count, max(1, count // 80)):
        with pytest.raises(KeyboardInterrupt), injected({step: signal.SIGINT}, files, "line"):
            call()
        heal()
        assert threading.get_ident() not in connector.client.session()._channels._holders
        assert connector.client.leases._operations == []
    wait_until(lambda: leases(watcher) == NONE)
    assert connector.available
    last = new()
    assert connector.store(last, range(8)).stored == 8
    assert connector.load(connector.match(last), range(10, 18)) == 8
    assert bytes_of(connector, list(range(10, 18))) == bytes_of(connector, list(range(8)))


def test_ctrl_c_waits_for_the_copies_and_begins_no_further_one(
    open_connector: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher, connector = open_connector(name="watcher", pool=None), open_connector()
    chain = chain_of("interrupted in a copy", 8)
    assert connector.store(chain, range(8)).stored == 8
    match = connector.match(chain)
    ended: list[bool] = []
    copy = CpuCopier._copy

    def interrupt(self: CpuCopier, block_ids: Any, addresses: Any, limit: Limit, **options: Any) -> int:
        for _ in range(2):  # the user presses Ctrl-C twice
            os.kill(os.getpid(), signal.SIGINT)
        copied = copy(self, block_ids[:4], addresses[:4], limit, **options)
        assert copied == 0, "no copy has begun"
        ended.append(limit.stopped)
        return copied

    monkeypatch.setattr(CpuCopier, "_copy", interrupt)
    with pytest.raises(KeyboardInterrupt):
        connector.load(match, range(10, 18))
    assert ended == [True], "the blocks are free when the call is over"
    with pytest.raises(KeyboardInterrupt):
        connector.store(chain_of("interrupted in another copy", 8), range(8))
    assert ended == [True, True]
    assert leases(watcher) == NONE


def test_ctrl_c_ends_the_wait_for_an_answer_that_is_long_in_coming(
    open_connector: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the lease is granted all the same it is given back, and the daemon does not count as gone."""
    watcher, connector = open_connector(name="watcher", pool=None), open_connector(request_timeout_s=10**6)
    receive, waits = Channel.receive, [0]

    def none_yet(self: Channel, deadline_ns: int) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return receive(self, deadline_ns)
        waits[0] += 1
        if waits[0] == 3:
            os.kill(os.getpid(), signal.SIGINT)
        assert waits[0] < 1000
        return None

    monkeypatch.setattr(Channel, "receive", none_yet)
    with pytest.raises(KeyboardInterrupt) as caught:
        connector.store(chain_of("long in coming", 8), range(8))
    assert not isinstance(caught.value.__context__, CallInterrupted)
    assert connector.available
    waits[0] = 0
    with pytest.raises(KeyboardInterrupt):
        connector.match(chain_of("long in coming", 8))
    monkeypatch.setattr(Channel, "receive", receive)
    wait_until(lambda: leases(watcher) == NONE)
    assert connector.store(chain_of("later", 8), range(8)).stored == 8
    assert caplog.messages == []


STORM = """
import os, random, signal, sys, threading, time
import numpy as np, tiercache
address = sys.argv[1]
spec = tiercache.NamespaceSpec(engine="storm", layout="x", dtype="uint8", block_size=4, block_bytes=65536)
pool = np.random.default_rng(1).integers(0, 256, (32, 65536), np.uint8)
pool_here = tiercache.Pool.from_blocks(pool)
connector = tiercache.connect(address, namespace=spec, pool=pool_here, required=True, request_timeout_s=10)
chance, over = random.Random(1), threading.Event()
raised = good = 0
inside = False
def interrupt(number, frame):
    global inside, raised
    if inside:
        inside, raised = False, raised + 1
        raise KeyboardInterrupt
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, interrupt)
signal.signal(signal.SIGUSR1, lambda number, frame: None)
def storm():
    while not over.is_set():
        os.kill(os.getpid(), chance.choice((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)))
        time.sleep(chance.random() * 0.002)
thread = threading.Thread(target=storm)
thread.start()
for turn in range(150):
    keys = tiercache.KeyChain(tiercache.root_key(f"storm {turn}"), 4, range(64)).packed()
    try:
        inside = True
        connector.store(keys, range(16))
        good += connector.load(connector.match(keys), range(16, 32)) == 16
    except KeyboardInterrupt:
        pass
    finally:
        inside = False
over.set()
thread.join()
connector.match(keys)  # what was left behind in the storm is put right by the next call
assert signal.getsignal(signal.SIGINT) is interrupt
assert signal.getsignal(signal.SIGTERM) is interrupt
signal.signal(signal.SIGINT, signal.SIG_IGN)
keys = tiercache.KeyChain(tiercache.root_key(f"after the storm {os.getpid()}"), 4, range(64)).packed()
assert connector.store(keys, range(16)).stored == 16
assert connector.load(connector.match(keys), range(16, 32)) == 16
assert (pool[16:] == pool[:16]).all()
print(raised, good, flush=True)
sys.stdin.read()
"""


def test_a_storm_of_signals_in_a_process_that_lives_on(open_connector: Open, daemon: tiercache.LaunchedDaemon) -> None:
    watcher = open_connector(name="watcher", pool=None)
    command = [sys.executable, "-c", STORM, str(daemon.address)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            raised, _ = map(int, process.stdout.readline().split())
            assert raised > 0
            wait_until(lambda: leases(watcher) == NONE)
        finally:
            process.kill()
