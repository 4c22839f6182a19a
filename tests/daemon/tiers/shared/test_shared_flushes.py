"""Flushes of a tier that hosts share: what was flushed on one host is found on none."""

from __future__ import annotations

from pathlib import Path

import pytest
from chains import chain_of, key_of
from host_rig import host
from memory_store import MemoryStore
from played import played

from tiercache.daemon.tiers.shared.stores.store import StoreProblem

pytestmark = pytest.mark.usefixtures("nothing_is_missing_for_long")


@played
async def test_a_flush_on_one_host_is_one_on_all(tmp_path: Path) -> None:
    store = MemoryStore()
    a, b, c = (host(store, tmp_path, name) for name in "abc")
    chain = chain_of("x", 10)
    a.store(a.namespace(), chain)
    await a.sent()
    assert await b.load([b.namespace()], chain) == 10
    assert await c.look_up([c.namespace()], chain) == 10, "claimed, not fetched"
    assert await a.flush()
    b.forget_dram()
    assert await b.load([b.namespace()], chain) == 0
    assert await c.load([c.namespace()], chain) == 0, "its claim was from before"
    b.store(b.namespace(), chain)
    await b.sent()
    assert await c.load([c.namespace()], chain) == 10, "what was stored since is found"
    for one in (a, b, c):
        one.check()
        await one.close()


@played
async def test_a_flush_of_one_chain(tmp_path: Path) -> None:
    """It reaches the blocks of that chain, from any of its blocks; chains of other buckets stay."""
    store = MemoryStore()
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    bucket = a.shared.epochs.naming.bucket
    chain = chain_of("x", 10)
    other = next(one for one in (chain_of(n, 5) for n in range(99)) if bucket(one[:16]) != bucket(chain[:16]))
    for one in (chain, other):
        a.store(a.namespace(), one)
    await a.sent()
    assert await a.flush(key_of(chain, 7))
    assert await b.load([b.namespace()], chain) == 0
    assert await b.load([b.namespace()], other) == 5
    assert await b.flush(key_of(chain_of("unknown", 3), 2)), "then all of the namespace"
    a.forget_dram()
    assert await a.load([a.namespace()], other) == 0
    await a.close()
    await b.close()


@played
async def test_a_flush_while_the_store_is_away_is_kept_across_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiercache.daemon.tiers.shared import flushes

    monkeypatch.setattr(flushes, "TOLD_S", 0.05)
    store = MemoryStore()
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    chain = chain_of("x", 10)
    a.store(a.namespace(), chain)
    await a.sent()
    store.fail(StoreProblem.UNREACHABLE)
    assert not await a.flush(), "not durable yet"
    a.forget_dram()
    assert await a.load([a.namespace()], chain) == 0
    await a.close()
    assert (tmp_path / "a").exists()
    again = host(store, tmp_path, "a")
    assert again.shared.flushes.waiting
    assert again.shared.reasons()
    assert await again.load([again.namespace()], chain) == 0
    monkeypatch.setattr(flushes, "TOLD_S", 5.0)
    store.work()
    await again.until(lambda: not again.shared.flushes.waiting)
    await again.until(lambda: not (tmp_path / "a").exists())
    assert await b.load([b.namespace()], chain) == 0
    await again.close()
    await b.close()


@played
async def test_a_flush_that_waits_concerns_its_namespace_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiercache.daemon.tiers.shared import flushes

    monkeypatch.setattr(flushes, "TOLD_S", 0.05)
    monkeypatch.setattr(flushes, "FIRST_PAUSE_S", 60.0)
    store = MemoryStore()
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    chain, answers = chain_of("x", 10), list[bool]()
    mine, other = a.namespace(), a.namespace(tp_rank=1)
    for space in (mine, other):
        a.store(space, chain)
    await a.sent()
    store.fail(StoreProblem.READ_ONLY, "set_note")
    a.shared.begin_flush([mine], b"", answers.append, named=True)
    await a.until(lambda: answers == [False])
    a.forget_dram()
    assert await a.load([mine], chain) == 0
    assert await a.load([other], chain) == 10
    store.work()
    a.shared.flushes._tell()
    await a.until(lambda: not a.shared.flushes.waiting)
    assert await a.load([mine], chain) == 0
    assert await b.load([b.namespace()], chain) == 0
    for one in (a, b):
        await one.close()


@played
async def test_notes_that_the_store_has_lost_bring_nothing_back(tmp_path: Path) -> None:
    store = MemoryStore()
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    chain = chain_of("x", 10)
    a.store(a.namespace(), chain)
    await a.sent()
    assert await a.flush(tier="shared")
    store.notes.clear()
    assert await b.load([b.namespace()], chain) == 0
    b.store(b.namespace(), chain)
    await b.sent()
    a.forget_dram()
    assert await a.load([a.namespace()], chain) == 10
    store.values.clear()
    store.notes.clear()  # FLUSHALL by others
    a.forget_dram()
    assert await a.load([a.namespace()], chain) == 0
    for one in (a, b):
        one.check()
        await one.close()


@played
async def test_an_empty_note_is_made_anew(tmp_path: Path) -> None:
    """As a host leaves it that ends while it makes one, in a folder without hard links."""
    store = MemoryStore()
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    chain = chain_of("x", 10)
    a.store(a.namespace(), chain)
    await a.sent()
    store.notes.update(dict.fromkeys(store.notes, b""))
    assert await b.load([b.namespace()], chain) == 0
    b.store(b.namespace(), chain)
    await b.sent()
    assert all(store.notes.values())
    a.forget_dram()
    assert await a.load([a.namespace()], chain) == 10
    for one in (a, b):
        await one.close()
