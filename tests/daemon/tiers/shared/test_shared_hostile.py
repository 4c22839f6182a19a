"""What a hostile client, a hostile store or bad luck could do to the shared tier, and does not."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from chains import chain_of, key_of
from host_rig import PATIENCE_S, host
from memory_store import MemoryConnection, MemoryStore
from played import play, played

from tiercache.daemon.ground.slices import finish
from tiercache.daemon.tiers.forms import codecs
from tiercache.daemon.tiers.shared import breaker, lines
from tiercache.daemon.tiers.shared.lookups import SharedLookups
from tiercache.daemon.tiers.shared.stores.store import Get
from tiercache.daemon.tiers.shared.value import ValueForm
from tiercache.daemon.tiers.source import FetchTally, SourcePart, TierParts

pytestmark = pytest.mark.usefixtures("nothing_is_missing_for_long")


@pytest.mark.parametrize("whose", ["own", "other"])
def test_what_was_on_its_way_before_a_flush_is_not_sent_after_it(tmp_path: Path, whose: str) -> None:
    """The job waits for its line while a host flushes: its blocks are from before that."""

    async def scenario() -> None:
        store, gate, held = MemoryStore(), threading.Event(), threading.Event()
        a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
        space, chain = a.namespace(), chain_of("x", 8)
        a.store(space, chain_of("x", 2) + chain_of("y", 1))  # so the notes are known
        await a.sent()

        def before(call: str) -> None:
            if call == "exists" and threading.current_thread().name in writers:
                held.set()
                assert gate.wait(PATIENCE_S)

        writers = {thread.name for thread in a.shared._lines._threads[2:]}  # type: ignore[union-attr]
        store.before = before
        a.store(space, chain, first=2)
        await a.until(held.is_set)
        assert await (a if whose == "own" else b).flush()
        a.forget_dram()
        b.forget_dram()
        sent = set(store.values)
        gate.set()
        store.work()
        await a.sent()
        assert set(store.values) == sent, "what was flushed is in the store again"
        c = host(store, tmp_path, "c")
        assert await c.load([c.namespace()], chain) == 0
        for one in (a, b, c):
            one.check()
            await one.close()

    play(scenario)


@played
async def test_lists_that_end_alike_are_not_taken_for_one_another(tmp_path: Path) -> None:
    """Keys that are no chain: another list with the same last key says nothing about this one."""
    store = MemoryStore()
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    long = chain_of("x", 40)
    a.store(a.namespace(), long)
    await a.sent()
    space = b.namespace()
    assert await b.look_up([space], long) == 40
    for short in (long[:64] + long[-16:], long[-16:]):
        assert sum(finish(b.cache.reads.runs.peek([space], short))) <= len(short) // 16
        assert await b.look_up([space], short) <= len(short) // 16
    assert await b.load([space], long) == 40
    for one in (a, b):
        one.check()
        await one.close()


@played
async def test_a_tenant_does_not_say_where_the_blocks_of_another_stand(tmp_path: Path) -> None:
    store = MemoryStore()
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    chain = chain_of("x", 8)
    bogus = b"".join(key_of(chain_of("bogus", 12), n) for n in range(3))
    mallory = a.namespace(window_blocks=4, extra={"tenant": "mallory"})
    a.store(mallory, bogus + chain)
    await a.sent()
    space = a.namespace()
    a.store(space, chain)
    await a.sent()
    assert await b.load([b.namespace()], chain) == 8
    assert await a.flush(key_of(chain, 7))
    b.forget_dram()
    assert await b.load([b.namespace()], chain) == 0, "it was flushed"
    for one in (a, b):
        one.check()
        await one.close()


@played
async def test_packs_of_compressed_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_PAGE_BYTES", 64)  # these blocks are small
    store = MemoryStore(pack_blocks=4)
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    for one in (a, b):
        form = ValueForm(one.settings.form._cipher, codecs.codec_number("zstd"))
        object.__setattr__(one.settings, "form", form)
        one.shared._writes._form = form
    chain = chain_of("x", 12)
    a.store(a.namespace(), chain)
    await a.sent()
    assert await b.load([b.namespace()], chain) == 12
    assert b.shared.source.tally.bad_blocks == 0
    for one in (a, b):
        one.check()
        await one.close()


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
        b.shared.presence._unfetchable.clear()
        b.shared.presence.drop_claims()
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


@played
async def test_what_follows_a_source_that_went_offline_does_not_wait_for_it(tmp_path: Path) -> None:
    """A directory goes offline between the plan of its part of a chain and the first fetch."""
    store = MemoryStore()
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    chain, space = chain_of("x", 20), b.namespace()
    a.store(a.namespace(), chain)
    await a.sent()
    directory: Any = SimpleNamespace(offline=True, retired=False, tally=FetchTally())

    class Directory:
        def parts(self, namespace: Any, keys: bytes, wanted: Any) -> Any:
            yield
            return TierParts([SourcePart(directory, range(5))], range(5, 20))

    promotion = b.below._promotion
    assert promotion is not None
    promotion._tiers = [cast(Any, Directory()), b.shared]
    assert await b.load([space], chain) == 0
    assert promotion.idle
    assert not any(queue for queues in promotion._jobs.values() for queue in queues)
    for one in (a, b):
        one.check()
        await one.close()


@pytest.mark.parametrize("what", ["all", "chain", "other host"])
def test_what_arrives_after_a_flush_is_not_served(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notes were read before the flush, the values come after it."""

    async def scenario() -> None:
        store, gate, held = MemoryStore(), threading.Event(), threading.Event()
        a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
        chain, space = chain_of("x", 12), b.namespace()
        a.store(a.namespace(), chain)
        await a.sent()
        assert await b.look_up([space], chain) == 12
        fill = MemoryConnection._fill

        def slow(self: MemoryConnection, get: Get, value: bytes | None) -> None:
            held.set()
            assert gate.wait(PATIENCE_S)
            fill(self, get, value)

        monkeypatch.setattr(MemoryConnection, "_fill", slow)
        found = b.cache.match(b.owner, [space], chain, 60.0, promote=True)
        assert found.lease is not None
        await b.until(held.is_set)
        if what == "other host":
            assert await a.flush()
        else:
            assert await b.flush(b"" if what == "all" else key_of(chain, 0))
        gate.set()
        lease = found.lease
        await b.until(lambda: lease.over or lease.lease_id not in b.cache.reads.growing.leases)
        await b.until(lambda: b.below._promotion is None or b.below._promotion.idle)
        if what == "other host":
            assert b.read(lease, [space]) <= 12
            b.forget_dram()
        else:
            assert b.cache.reads.runs.lengths([space], chain) == [0]
        await b.sent()
        assert await b.load([space], chain) == 0
        c = host(store, tmp_path, "c")
        assert await c.load([c.namespace()], chain) == 0
        b.cache.reads.release(b.owner, lease.lease_id)
        for one in (a, b, c):
            one.check()
            await one.close()

    play(scenario)


def test_requests_do_not_wait_for_a_store_that_is_always_too_slow() -> None:
    """And wait again once it is quick."""
    now, timers = [0.0], list[Callable[[], None]]()
    looked = SharedLookups(0.02, lambda seconds, call: timers.append(call), lambda: now[0])
    spaces: list[Any] = [SimpleNamespace(number=1, spec=SimpleNamespace(tenant=""))]

    def look_up(number: int, seconds: float) -> bool:
        chain = chain_of(f"x{number}", 2)
        waits = looked.wait(spaces, chain, lambda: None, lambda: None)
        now[0] += seconds
        while timers and seconds >= 0.02:
            timers.pop()()
        timers.clear()
        looked.ended(spaces, chain)
        return waits

    waited = [look_up(number, 0.03) for number in range(40)]
    assert waited == [True] * 8 + [False] * 32
    assert not look_up(50, 0.001)
    assert look_up(51, 0.001)
