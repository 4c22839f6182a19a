"""A store that fails, hangs or is slow: a miss, and no request waits for it."""

from __future__ import annotations

import functools
import threading
from pathlib import Path

import pytest
from chains import chain_of
from host_rig import host
from memory_store import MemoryStore
from played import play, played

from tiercache.daemon.tiers.shared.breaker import FAILURES, BreakerState
from tiercache.daemon.tiers.shared.stores.store import StoreError, StoreProblem

pytestmark = pytest.mark.usefixtures("nothing_is_missing_for_long")


@pytest.mark.parametrize("problem", list(StoreProblem))
def test_whatever_a_store_says_it_is_a_miss(tmp_path: Path, problem: StoreProblem) -> None:
    async def scenario() -> None:
        store = MemoryStore()
        a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
        chain = chain_of("x", 10)
        a.store(a.namespace(), chain)
        await a.sent()
        for calls in (["get"], ["exists"], []):
            store.fail(problem, *calls)
            assert await b.load([b.namespace()], chain) == 0
            assert await b.load([b.namespace()], chain) == 0
        b.store(b.namespace(), chain)
        b.cache.work()
        for one in (a, b):
            await one.close(grace_s=0.0)

    play(scenario)


@played
async def test_nothing_waits_for_a_store_that_is_away(tmp_path: Path) -> None:
    """Neither matches, nor evictions, nor the end; and it is used again when it is back."""
    store = MemoryStore()
    a = host(store, tmp_path, "a", regions=1)
    space = a.namespace()
    await a.until(lambda: "exists" in store.calls)
    store.fail(StoreProblem.UNREACHABLE)
    for number in range(4):
        await a.look_up([space], chain_of(f"gone{number}", 4))
    assert not a.shared.breaker.closed
    assert a.shared.reasons()
    assert a.below.settled
    chains = [chain_of(f"c{number}", 64) for number in range(20)]
    for one in chains:  # 2.5 times what DRAM holds
        a.store(space, one)
        a.cache.work()
    assert a.cache.counters.evicted_blocks > 600
    assert not a.below.wait([space], chain_of("y", 4), [0], lambda: None), "answered at once"
    store.work()
    clock_s = a.shared.breaker._clock_s
    a.shared.breaker._clock_s = lambda: clock_s() + 100.0
    await a.until(lambda: a.shared.breaker.closed)
    assert not a.shared.reasons()
    await a.sent()
    assert 0 < len(store.values) <= 512, "what DRAM still had"
    a.check()
    await a.close()


@played
async def test_a_full_store_is_read_and_not_written(tmp_path: Path) -> None:
    store = MemoryStore()
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    chain = chain_of("x", 10)
    a.store(a.namespace(), chain)
    await a.sent()
    store.fail(StoreProblem.FULL, "put")
    b.store(b.namespace(), chain_of("y", 10))
    await b.until(lambda: not b.shared.breaker.may_write)
    assert b.shared.breaker.closed
    assert "takes no writes" in b.shared.reasons()[0]
    assert await b.load([b.namespace()], chain) == 10
    for one in (a, b):
        await one.close(grace_s=0.0)


@played
async def test_a_thousand_matches_of_one_prompt_are_one_look_up(tmp_path: Path) -> None:
    import threading

    store, gate = MemoryStore(), threading.Event()
    a = host(store, tmp_path, "a")
    space, chain, went = a.namespace(), chain_of("x", 10), list[int]()
    await a.until(lambda: "exists" in store.calls)
    store.before = lambda call: gate.wait(60) and None
    for number in range(1000):
        assert a.below.wait([space], chain, [0], functools.partial(went.append, number))
    assert went == []
    gate.set()
    await a.until(lambda: len(went) == 1000)
    assert went == list(range(1000))
    assert a.shared._lookups.asked == 1
    assert a.shared._lookups.shared == 999
    await a.close()


@played
async def test_requests_go_on_when_their_time_is_up(tmp_path: Path) -> None:
    """And after some look-ups that came too late in a row, they do not wait at all, until one comes in time."""
    import threading

    from tiercache.daemon.tiers.shared import lookups

    store, gate = MemoryStore(), threading.Event()
    a = host(store, tmp_path, "a", lookup_timeout_s=0.01)
    space = a.namespace()
    await a.until(lambda: "exists" in store.calls)
    store.before = lambda call: gate.wait(60) and None
    for number in range(lookups.LATE_IN_A_ROW):
        went: list[None] = []
        assert a.below.wait([space], chain_of(number, 2), [0], functools.partial(went.append, None))
        await a.until(lambda went=went: bool(went))
    assert not a.below.wait([space], chain_of("next", 2), [0], lambda: None)
    gate.set()
    await a.until(lambda: len(a.shared._lookups) == 0)
    assert a.shared.stats()["lookups_late"] == lookups.LATE_IN_A_ROW
    for number in range(lookups.LATE_IN_A_ROW):  # those that no request waits for tell it, too
        a.below.wait([space], chain_of(f"again{number}", 2), [0], lambda: None)
        await a.until(lambda: len(a.shared._lookups) == 0)
    assert a.below.wait([space], chain_of("last", 2), [0], lambda: None)
    await a.until(lambda: len(a.shared._lookups) == 0)
    await a.close()


@played
async def test_what_was_queued_when_a_store_went_away_does_not_wait_for_it(tmp_path: Path) -> None:
    """Each look-up and each fetch would wait until its own deadline, one after another."""
    store = MemoryStore()
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    chain = chain_of("x", 400)
    space, its = a.namespace(), b.namespace()
    a.store(space, chain)
    await a.sent()
    assert await b.look_up([its], chain) == 400
    asked, answers = list[str](), threading.Semaphore(0)

    def before(call: str) -> None:
        asked.append(call)
        answers.acquire(timeout=60)
        raise StoreError(StoreProblem.TIMEOUT, "no answer")

    store.before = before
    went: list[int] = []
    for number in range(60):
        assert b.below.wait([its], chain_of(f"y{number}", 2), [0], functools.partial(went.append, number))
    lease = b.cache.match(b.owner, [its], chain, 60.0, promote=True).lease
    assert lease is not None
    await b.until(lambda: {"get", "exists"} <= {*asked})
    while b.shared.breaker.closed:
        so_far = len(asked)
        answers.release()
        await b.until(lambda so_far=so_far: len(asked) > so_far or not b.shared.breaker.closed)  # type: ignore[misc]
    answers.release(100)
    await b.until(lambda: len(went) == 60 and lease.lease_id not in b.cache.reads.growing.leases)
    assert b.shared.breaker.state is not BreakerState.CLOSED
    assert asked.count("exists") < 10
    assert asked.count("get") < 10, "of 50 jobs"
    assert b.cache.reads.release(b.owner, lease.lease_id)
    store.work()
    await b.until(lambda: b.shared.breaker.closed)
    for one in (a, b):
        await one.until(lambda one=one: one.below.settled)  # type: ignore[misc]
        one.check()
        await one.close()


@played
async def test_jobs_that_ask_nothing_do_not_speak_for_the_store(tmp_path: Path) -> None:
    """While a flush waits, look-ups for what was flushed end at once: they do not keep the breaker closed."""
    store = MemoryStore()
    a = host(store, tmp_path, "a")
    flushed, other = a.namespace(), a.namespace(tp_rank=1)
    await a.look_up([flushed], chain_of("x", 2))
    problems = {"set_note": StoreProblem.READ_ONLY}

    def before(call: str) -> None:
        if call in problems:
            raise StoreError(problems[call], "no")

    store.before = before
    a.shared.begin_flush([flushed], b"", lambda durable: None, named=True)
    await a.until(lambda: a.shared.stats()["flush_tries"] > 1)
    problems["exists"] = StoreProblem.UNREACHABLE
    for number in range(FAILURES):
        assert a.shared.breaker.closed
        await a.look_up([flushed], chain_of(f"y{number}", 2))
        await a.look_up([other], chain_of(f"y{number}", 2))
    assert not a.shared.breaker.closed
    store.work()
    await a.until(lambda: not a.shared.flushes.waiting)
    await a.close()
