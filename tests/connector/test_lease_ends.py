"""Whatever ends a store or a load, its lease ends too, and the daemon learns when its frames are free."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chains import chain_of
from connector_helpers import bytes_of, spec
from waiting import wait_until

import tiercache
from tiercache.client import channel, keeper
from tiercache.client.session import Session
from tiercache.connector import stores as storing
from tiercache.connector.loads import Match, adopt_match
from tiercache.copies.pool import CpuCopier
from tiercache.errors import CallInterrupted, DaemonUnavailable
from tiercache.protocol.messages import Commit, Release, Reserve

WAIT_S = 60
NONE = {"write": 0, "quarantined": 0}
Open = Callable[..., tiercache.Connector]


def leases(watcher: tiercache.Connector) -> dict[str, int]:
    found = watcher.client.stats()["leases"]
    return {name: found[name] for name in NONE}


@contextmanager
def held_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Holds copies that have begun until the test lets them go on."""
    begun, gate = threading.Event(), threading.Event()
    copy = CpuCopier._copy

    def held(self: CpuCopier, *arguments: Any, **options: Any) -> int:
        begun.set()
        assert gate.wait(WAIT_S)
        return copy(self, *arguments, **options)

    monkeypatch.setattr(CpuCopier, "_copy", held)
    try:
        yield begun, gate
    finally:
        gate.set()


def run(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Do `work` in a thread; returns the thread, and a list for what the work returned or raised."""
    results: list[Any] = []

    def perform() -> None:
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results.append(error)

    thread = threading.Thread(target=perform)
    thread.start()
    return thread, results


def store_all(connector: tiercache.Connector, chain: bytes) -> None:
    """Store a chain, and try again while its blocks are pending, until an abandoned grant has come back."""

    def is_there() -> bool:
        connector.store(chain, range(8))
        match = connector.match(chain)
        connector.release(match)
        return match.blocks == 8

    wait_until(is_there)


@pytest.fixture
def watcher(open_connector: Open) -> tiercache.Connector:
    return open_connector(name="watcher", pool=None)


# --- close ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_background", [False, True])
def test_close_stops_a_store_and_leaves_nothing_in_quarantine(
    open_connector: Open, watcher: tiercache.Connector, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    connector = open_connector()
    chain = chain_of(f"closed while it stores {in_background}", 8)
    with held_copies(monkeypatch) as (begun, gate):
        if in_background:
            transfer = connector.store_async(chain, range(8))
            thread, results = run(lambda: transfer.result(WAIT_S))
        else:
            thread, results = run(lambda: connector.store(chain, range(8)))
        assert begun.wait(WAIT_S)
        closing, _ = run(connector.close)
        if in_background:  # what a queue has begun may end
            wait_until(lambda: connector._stores._closed)
        else:
            wait_until(lambda: not connector.available)
            assert connector.store(chain, range(8)) == (0, 0, 8, False), "a closed connector begins nothing"
        gate.set()
        keeping = connector.client._keeper._thread  # `close` waits for it for a while only
        assert keeping is not None
        for one in (closing, thread, keeping):
            one.join(WAIT_S)
    assert leases(watcher) == NONE
    assert sum(results[0][:3]) == 8
    assert watcher.match(chain).blocks == results[0].stored


def test_a_copy_that_outlasts_close_keeps_its_session_until_the_daemon_was_told(
    open_connector: Open, watcher: tiercache.Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "CLOSE_S", 0.05)
    connector = open_connector(name="lingers")
    session = connector.client.session()

    def sessions() -> int:
        return sum(one["name"] == "lingers" for one in watcher.client.stats()["sessions"])

    with held_copies(monkeypatch) as (begun, gate):
        thread, results = run(lambda: connector.store(chain_of("outlasts", 8), range(8)))
        assert begun.wait(WAIT_S)
        connector.close()
        assert not connector.available
        assert leases(watcher) == {"write": 1, "quarantined": 0}
        assert sessions() == 1
        gate.set()
        thread.join(WAIT_S)
    wait_until(lambda: sessions() == 0)
    assert leases(watcher) == NONE
    assert session.arena is not None
    assert session.arena.wait_unmapped(WAIT_S)
    assert len(results) == 1


def test_closing_without_a_daemon_is_quick_and_twice_is_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(keeper, "LINGER_S", 10**6)
    pool = tiercache.Pool.from_blocks(np.zeros((8, 4096), np.uint8))
    with tiercache.launch("4MiB", region="2MiB") as daemon:
        connector = tiercache.connect(daemon.address, namespace=spec(4096), pool=pool, required=True)
        os.kill(daemon.pid, signal.SIGKILL)
        wait_until(lambda: not connector.available)
        connector.client._keeper.errands.append((1, bytes(16), Release, {"lease": 1}))  # of a daemon that has ended
        for _ in range(2):
            connector.close()
        thread = connector.client._keeper._thread
        assert thread is not None
        thread.join(WAIT_S)
        assert not thread.is_alive()


# --- a session that is lost -----------------------------------------------------------------------


def test_a_store_whose_session_is_lost_tells_the_daemon_in_the_next_one(
    open_connector: Open, watcher: tiercache.Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = open_connector()
    with held_copies(monkeypatch) as (begun, gate):
        thread, results = run(lambda: connector.store(chain_of("lost session", 8), range(8)))
        assert begun.wait(WAIT_S)
        lost = connector.client.session()
        connector.client._keeper.session_failed(lost, "the test says so", True)
        wait_until(lambda: leases(watcher) == {"write": 0, "quarantined": 1})
        wait_until(lambda: connector.available)  # the next session has begun before the copies end
        assert connector.client.session() is not lost
        gate.set()
        thread.join(WAIT_S)
    assert results[0].stored == 0
    wait_until(lambda: leases(watcher) == NONE)


def test_a_connector_that_is_closed_without_its_session_tells_the_daemon_in_one_more(
    open_connector: Open, watcher: tiercache.Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper.SessionKeeper, "_next_back_off_s", lambda self: 0.01)
    connector = open_connector()
    with held_copies(monkeypatch) as (begun, gate):
        thread, _ = run(lambda: connector.store(chain_of("closed without", 8), range(8)))
        assert begun.wait(WAIT_S)
        lost = connector.client.session()
        connector.client._keeper._closed = True  # so that the background does not connect again
        connector.client._keeper.session_failed(lost, "the test says so", True)
        connector.client._keeper._closed = False
        wait_until(lambda: leases(watcher) == {"write": 0, "quarantined": 1})
        closing, _ = run(connector.close)
        gate.set()
        for one in (closing, thread):
            one.join(WAIT_S)
    wait_until(lambda: leases(watcher) == NONE)


# --- exceptions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [CallInterrupted("a signal"), DaemonUnavailable("no answer in time")])
def test_a_hold_whose_answer_was_not_waited_for_is_given_back(error: Exception) -> None:
    """The daemon may have granted the lease."""
    given_back: list[tuple[Any, dict[str, Any]]] = []

    def call(*_: Any, **__: Any) -> Any:
        raise error

    session: Any = SimpleNamespace(generation=1, call=call)
    session.give_back = lambda kind, **fields: given_back.append((kind, fields))
    other: Any = SimpleNamespace(session=lambda: session)
    with pytest.raises(type(error)):
        adopt_match(other, Match(session, 7, 4).ticket())
    assert given_back == [(Release, {"lease": 7})]


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("at_reply", [4, 5, 6, 7])
def test_ctrl_c_at_any_reply_of_a_store_leaves_no_lease(
    open_connector: Open, watcher: tiercache.Connector, monkeypatch: pytest.MonkeyPatch, at_reply: int
) -> None:
    """Windows of two blocks: four reserves and four commits, and a signal while one of them is waited for."""
    monkeypatch.setattr(storing, "EDGE_BYTES", 2 * 5000)
    monkeypatch.setattr(storing, "WINDOW_BYTES", 2 * 5000)
    connector = open_connector()
    receive, seen = channel.Channel.receive, [0]

    def interrupted(self: channel.Channel, deadline_ns: int) -> Any:
        seen[0] += 1
        if seen[0] == at_reply - 3:
            os.kill(os.getpid(), signal.SIGINT)
        return receive(self, deadline_ns)

    monkeypatch.setattr(channel.Channel, "receive", interrupted)
    chain = chain_of(f"interrupted at {at_reply}", 8)
    with pytest.raises(KeyboardInterrupt):
        connector.store(chain, range(8))
    monkeypatch.setattr(channel.Channel, "receive", receive)
    store_all(connector, chain)
    wait_until(lambda: leases(watcher) == NONE)
    assert connector.load(connector.match(chain), range(10, 18)) == 8
    assert bytes_of(connector, list(range(10, 18))) == bytes_of(connector, list(range(8)))


@pytest.mark.parametrize("error", [MemoryError, SystemExit, ValueError])
@pytest.mark.parametrize("in_main_thread", [True, False])
def test_an_exception_in_a_copy_ends_the_lease_and_is_raised(
    open_connector: Open,
    watcher: tiercache.Connector,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    in_main_thread: bool,
) -> None:
    connector = open_connector()
    chain = chain_of(f"raises {error.__name__} {in_main_thread}", 8)

    def broken(self: CpuCopier, *arguments: Any, **options: Any) -> int:
        raise error("as the test wants it")

    raised: list[BaseException] = []

    def store() -> None:
        try:
            connector.store(chain, range(8))
        except BaseException as caught:  # noqa: BLE001 - the test looks at it
            raised.append(caught)

    with monkeypatch.context() as patch:
        patch.setattr(CpuCopier, "_copy", broken)
        if in_main_thread:
            store()
        else:
            run(store)[0].join(WAIT_S)
    assert [type(one) for one in raised] == [error]
    assert leases(watcher) == NONE
    assert connector.store(chain, range(8)).stored == 8


@pytest.mark.parametrize("request_type", [Reserve, Commit])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_request_that_cannot_be_sent_leaves_no_lease(
    open_connector: Open, watcher: tiercache.Connector, monkeypatch: pytest.MonkeyPatch, request_type: type, number: int
) -> None:
    """For every reserve and commit of a store in windows."""
    monkeypatch.setattr(storing, "EDGE_BYTES", 2 * 5000)
    monkeypatch.setattr(storing, "WINDOW_BYTES", 2 * 5000)
    connector = open_connector()
    post, seen = Session.post, [0]

    def broken(self: Session, kind: type, *arguments: Any, **fields: Any) -> Any:
        if kind is request_type:
            seen[0] += 1
            if seen[0] == number + 1:
                raise DaemonUnavailable("as the test wants it")
        return post(self, kind, *arguments, **fields)

    monkeypatch.setattr(Session, "post", broken)
    chain = chain_of(f"not sent {request_type.__name__} {number}", 8)
    assert connector.store(chain, range(8)).stored == 0
    monkeypatch.setattr(Session, "post", post)
    store_all(connector, chain)
    wait_until(lambda: leases(watcher) == NONE)
