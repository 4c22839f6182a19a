"""How the store is told of a flush that it did not take: later and later, not while it is away, and without room."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from chains import chain_of
from host_rig import host
from memory_store import MemoryStore
from played import played
from valkey_rig import ValkeyServer, connect, soon

from tiercache.cli.doctor.hits import _shared as shared_findings
from tiercache.daemon.tiers.shared import flushes
from tiercache.daemon.tiers.shared.breaker import BreakerState
from tiercache.daemon.tiers.shared.epochs import Epochs
from tiercache.daemon.tiers.shared.flushes import FlushJob, SharedFlushes
from tiercache.daemon.tiers.shared.naming import Naming
from tiercache.daemon.tiers.shared.stores.store import StoreError, StoreProblem

pytestmark = pytest.mark.usefixtures("nothing_is_missing_for_long")


@played
async def test_a_full_store_is_told_of_a_flush(tmp_path: Path) -> None:
    """Making the new note needs room; deleting the old one does not."""
    store = MemoryStore()
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    chain = chain_of("x", 10)
    a.store(a.namespace(), chain)
    await a.sent()
    assert await b.load([b.namespace()], chain) == 10
    b.forget_dram()
    store.fail(StoreProblem.FULL, "put", "set_note")
    assert await a.flush(), "it is durable"
    assert not a.shared.flushes.waiting
    for one in (a, b):
        one.forget_dram()
        assert await one.load([one.namespace()], chain) == 0
    store.work()
    await b.until(lambda: b.shared.breaker.may_write)
    b.store(b.namespace(), chain)
    await b.sent()
    await a.until(lambda: a.shared.breaker.may_write)
    assert await a.load([a.namespace()], chain) == 10, "what was stored since is found"
    for one in (a, b):
        one.check()
        await one.close()


@played
async def test_a_store_that_is_away_is_not_told_before_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flushes, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(flushes, "LAST_PAUSE_S", 0.001)
    monkeypatch.setattr(flushes, "TOLD_S", 0.05)
    store = MemoryStore()
    a = host(store, tmp_path, "a")
    space = a.namespace()
    store.fail(StoreProblem.UNREACHABLE)
    assert not await a.flush()
    await a.until(lambda: a.shared.away and a.shared.flushes._job is None)
    tries = a.shared.stats()["flush_tries"]
    answers: list[bool] = []
    a.shared.begin_flush([space], b"", answers.append)
    await a.until(lambda: answers == [False])
    assert a.shared.stats()["flush_tries"] == tries, "none while it is away"
    assert a.shared.stats()["flushes_waiting"] > 0
    assert any("flush" in reason for reason in a.shared.reasons())
    store.work()
    await a.until(lambda: not a.shared.flushes.waiting)
    a.check()
    await a.close()


@played
async def test_a_store_that_comes_back_full_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer to a write that began long ago closes the breaker before the probe's does."""
    monkeypatch.setattr(flushes, "TOLD_S", 0.05)
    store = MemoryStore()
    a = host(store, tmp_path, "a")
    await a.look_up([a.namespace()], chain_of("x", 1))
    reached, full, answers = "", threading.Event(), threading.Event()

    def before(call: str) -> None:
        nonlocal reached
        if call == "put":
            reached = call
            full.wait(60)
            raise StoreError(StoreProblem.FULL, "full")
        if full.is_set() or reached == "back":
            answers.wait(60)
        elif reached:
            raise StoreError(StoreProblem.UNREACHABLE, "away")

    store.before = before
    a.store(a.namespace(), chain_of("x", 1))
    await a.until(lambda: reached == "put")
    while a.shared.breaker.closed:
        await a.look_up([a.namespace()], chain_of(f"y{len(store.calls)}{a.shared._lookups.asked}", 2))
    assert not await a.flush()
    reached = "back"
    await a.until(lambda: a.shared.breaker.state is BreakerState.HALF_OPEN)
    full.set()
    await a.until(lambda: a.shared.breaker.closed)
    answers.set()
    await a.until(lambda: not a.shared.flushes.waiting)
    a.check()
    await a.close()


@played
async def test_a_store_that_refuses_is_told_later_and_later(tmp_path: Path) -> None:
    jobs, pauses = list[FlushJob](), list[tuple[float, float]]()

    def uniform(low: float, high: float) -> float:
        pauses.append((low, high))
        return 0.0  # at once

    epochs = Epochs(Naming("d", b""))
    its = SharedFlushes(epochs, tmp_path / "state", jobs.append, lambda job: None, lambda: False, uniform)
    its.begin([b"note"], lambda durable: None)
    seen = []
    for number in range(1, 10):
        seen.append(its._pause_s)
        jobs[-1].problem = StoreError(StoreProblem.READ_ONLY, "no")
        jobs[-1].ended()
        while len(jobs) == number:
            await asyncio.sleep(0)
    assert seen == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert pauses == [(0.5, 1.5)] * 9, "hosts do not try at the same time"
    jobs[-1].learned = {b"note": b"new"}
    jobs[-1].problem = None
    jobs[-1].ended()
    assert (its.waiting, its._pause_s) == (False, 0.5)
    while its._saving is not None:
        await asyncio.sleep(0.001)


@played
async def test_a_late_write_of_the_file_does_not_undo_the_one_at_the_end(tmp_path: Path) -> None:
    loop, threads, busy = asyncio.get_running_loop(), ThreadPoolExecutor(1), threading.Event()
    loop.set_default_executor(threads)
    state = tmp_path / "state"
    its = SharedFlushes(Epochs(Naming("d", b"")), state, lambda job: None, lambda job: None, lambda: True)
    blocked = loop.run_in_executor(None, busy.wait, 60)
    its._save()  # all was told, so the file goes
    its.begin([b"note"], lambda durable: None)
    its.close()
    assert state.read_text() == b"note".hex()
    busy.set()
    await blocked
    assert its._saving is not None
    await its._saving
    assert state.read_text() == b"note".hex()


def test_the_doctor_says_that_a_flush_was_not_told() -> None:
    shared = {"lookups": 0, "lookups_late": 0, "bad_blocks": 0, "flushes_waiting": 2, "flush_tries": 5}
    (finding,) = shared_findings({"tiers": {"shared": shared}})
    assert "flush not told yet: 2 notes wait after 5 tries" in str(finding)
    assert not list(shared_findings({"tiers": {"shared": {**shared, "flushes_waiting": 0}}}))


def test_a_valkey_without_room_is_told_of_a_flush() -> None:
    with ValkeyServer("--maxmemory-policy", "noeviction") as server:
        line = connect(server.url)
        line.set_note(b"note", b"before a flush", soon())
        assert server.ask("CONFIG", "SET", "maxmemory", "1") == b"+OK"
        job = FlushJob([b"note"], lambda job: None)
        job.run(line)
        assert (job.learned, job.deleted) == ({}, [b"note"])
        assert line.exists([], [b"note"], soon()).notes == [None], "each host that needs it makes a new one"
        line.close()
