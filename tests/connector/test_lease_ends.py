"""Whatever ends a store or a load, its lease ends too, and the daemon learns when its frames are free."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from chains import chain_of
from connector_helpers import spec
from waiting import wait_until

import tiercache
from tiercache.client import keeper
from tiercache.copies.pool import CpuCopier
from tiercache.protocol.messages import Release

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


# --- exceptions -----------------------------------------------------------------------------------
