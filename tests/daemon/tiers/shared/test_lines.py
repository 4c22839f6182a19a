"""The threads that talk to the store: a job always ends, and what it tells is taken in by slices."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chains import chain_of
from host_rig import host
from memory_store import MemoryStore
from played import played

from tiercache.daemon.tiers.shared import breaker, lines
from tiercache.daemon.tiers.shared.stores.store import Connection

pytestmark = pytest.mark.usefixtures("nothing_is_missing_for_long")


@played
async def test_a_line_outlives_whatever_a_store_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native libraries raise what is no Exception; and each job ends, or leases and frames would wait for ever."""
    monkeypatch.setattr(breaker, "FAILURES", 1000)

    class PanicError(BaseException):
        pass

    store = MemoryStore()
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    chain, panics = chain_of("x", 8), list[str]()
    a.store(a.namespace(), chain)
    await a.sent()

    def before(call: str) -> None:
        if call == "get":
            panics.append(call)
            raise PanicError

    store.before = before
    for _ in range(2 * store.connections):
        assert await b.load([b.namespace()], chain) == 0
        b.shared.access.presence._unfetchable.clear()
        b.shared.access.presence.drop_claims()
    assert len(panics) >= 2 * store.connections
    store.work()
    assert await b.load([b.namespace()], chain) == 8
    for one in (a, b):
        one.check()
        await one.close()


def test_what_threads_post_is_taken_in_by_slices_and_none_of_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: deque[Callable[[], None]] = deque()
    store: Any = MemoryStore()
    line = lines.Lines(store, [], rounds.append)
    monkeypatch.setattr(lines, "DELIVER_S", 0.0)
    done: list[int] = []

    def fails() -> None:
        done.append(-1)
        raise ValueError("a bug")

    for number in range(10):
        line._post(fails if number == 3 else lambda number=number: done.append(number))  # type: ignore[misc]
    assert len(rounds) == 1
    rounds.popleft()()
    assert done == [0]
    assert len(rounds) == 1
    while rounds:
        rounds.popleft()()
    assert done == [0, 1, 2, -1, 4, 5, 6, 7, 8, 9]
    line._post(lambda: done.append(10))
    assert len(rounds) == 1


def test_the_end_cuts_off_calls_under_way() -> None:
    """A store that does not answer keeps no daemon from ending."""
    begun, closed = threading.Event(), threading.Event()

    class Hangs(lines.SharedJob):
        def run(self, connection: Connection) -> None:
            begun.set()
            assert closed.wait(60)

    owner: Any = None  # nobody is told
    store: Any = SimpleNamespace(connect=lambda: SimpleNamespace(close=closed.set))
    line = lines.Lines(store, [(lines.LineUse.FETCH,)], lambda call: None)
    line.submit(Hangs(owner), lines.LineUse.FETCH)
    assert begun.wait(60)
    until_s = time.monotonic() + 30
    assert line.stop(until_s)
