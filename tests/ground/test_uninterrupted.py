"""Work that signals do not cut: a handler raises when it is done, and never in between."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
from tiercache.ground import uninterrupted as module
from tiercache.ground.uninterrupted import interrupted, uninterrupted


class Terminated(Exception):
    """What the test's handler of SIGTERM raises."""


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


@pytest.fixture
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


def steps_of(call: Callable[[], object], files: tuple[str, ...], what: str) -> int:
    with injected({}, files, what) as seen:
        call()
    return seen[0]


def heal() -> None:
    """A handler of ours that was left installed passes the next signal on and removes itself."""
    for number, kind in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)):
        with pytest.raises(kind):
            signal.raise_signal(number)


WAIT_S = 60
OWN = ("tiercache/ground/uninterrupted.py",)
pytestmark = pytest.mark.usefixtures("handlers")


def logged(log: list[str]) -> Callable[[], str]:
    """Work that says when it begins and ends, and takes note of signals in between."""

    def work() -> str:
        log.append("begun")
        interrupted()
        log.append("ended")
        return "result"

    return work


def test_a_signal_at_any_step_of_it_raises_once_and_cuts_no_work() -> None:
    log: list[str] = []
    count = steps_of(lambda: uninterrupted(logged(log)), OWN, "opcode")
    assert count > 100
    for number, kind in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)):
        for step in range(1, count):
            log.clear()
            with pytest.raises(kind), injected({step: number}, OWN):
                uninterrupted(logged(log))
            assert log in ([], ["begun", "ended"])
            assert module._current is None
            heal()


def test_a_handler_that_raises_nothing_has_its_turn_and_the_call_goes_on(handlers: dict[int, Any]) -> None:
    calls: list[tuple[int, bool]] = []

    def work() -> str:
        signal.raise_signal(signal.SIGUSR1)
        assert calls == []
        assert not interrupted()
        assert calls == [(signal.SIGUSR1, True)]
        signal.raise_signal(signal.SIGUSR1)
        return "result"

    earlier = signal.signal(signal.SIGUSR1, lambda number, frame: calls.append((number, frame is not None)))
    try:
        assert uninterrupted(work) == "result"
    finally:
        signal.signal(signal.SIGUSR1, earlier)
    assert len(calls) == 2


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


ROOT = Path(__file__).resolve().parents[2]
Open = Callable[..., tiercache.Connector]


NONE = {"write": 0, "quarantined": 0, "read": 0}


def leases(watcher: tiercache.Connector) -> dict[str, int]:
    found = watcher.client.stats()["leases"]
    return {name: found[name] for name in NONE}


@pytest.mark.stress
@pytest.mark.parametrize("part", range(3))
def test_a_signal_at_any_line_of_a_match_load_or_store_leaves_nothing_behind(open_connector: Open, part: int) -> None:
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
    steps, uninterrupted = range(1, count, max(1, count // 80)), 0
    for step in steps:
        # A call that waits for the daemon a little less than the one that was counted is over before the last steps.
        with suppress(KeyboardInterrupt), injected({step: signal.SIGINT}, files, "line"):
            call()
            uninterrupted += 1
        heal()
        assert connector.client.leases.wait_idle(0)
    assert uninterrupted < 0.1 * len(steps)
    wait_until(lambda: leases(watcher) == NONE)
    assert connector.available
    last = new()
    assert connector.store(last, range(8)).stored == 8
    assert connector.load(connector.match(last), range(10, 18)) == 8
    assert bytes_of(connector, list(range(10, 18))) == bytes_of(connector, list(range(8)))


def test_ctrl_c_waits_for_the_copies_and_begins_no_other(open_connector: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher, connector = open_connector(name="watcher", pool=None), open_connector()
    chain = chain_of("interrupted in a copy", 8)
    assert connector.store(chain, range(8)).stored == 8
    match = connector.match(chain)
    ended: list[bool] = []
    copy = CpuCopier._copy  # rule: the copy itself is interrupted

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
