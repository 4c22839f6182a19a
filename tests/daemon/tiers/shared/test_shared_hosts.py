"""Hosts that share a store: what one stores the others find, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chains import chain_of, key_of
from host_rig import HostRig, host, names_of
from memory_store import MemoryStore
from played import played
from valkey_rig import ValkeyServer

from tiercache.daemon.tiers.shared.stores import open_store
from tiercache.daemon.tiers.shared.stores.store import SharedStore

pytestmark = pytest.mark.usefixtures("nothing_is_missing_for_long")


@pytest.fixture
def valkey(one_valkey: ValkeyServer) -> Callable[[], SharedStore]:
    """Opens a real store, which is empty."""
    assert one_valkey.ask("FLUSHALL") == b"+OK"
    return lambda: open_store(one_valkey.url)


@played
async def test_what_one_stores_the_other_finds(tmp_path: Path) -> None:
    store = MemoryStore()
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    chain = chain_of("x", 40)
    a.store(a.namespace(), chain)
    await a.sent()
    assert len(store.values) == 40
    space = b.namespace()
    assert await b.load([space], chain_of("x", 40) + chain_of("other", 3)) == 40
    assert b.shared.source.tally.blocks == 40
    assert await b.load([space], chain) == 40
    assert b.shared.source.tally.blocks == 40, "from DRAM, the second time"
    assert store.calls.count("put") == 40, "what came from the store is not sent back"
    for one in (a, b):
        one.check()
        await one.close()


@played
async def test_what_a_host_may_not_read_it_cannot_name(valkey: Callable[[], SharedStore], tmp_path: Path) -> None:
    a, b = host(valkey(), tmp_path, "a"), host(valkey(), tmp_path, "b")
    other_key = host(valkey(), tmp_path, "c", secret=bytes(32))
    other_deployment = host(valkey(), tmp_path, "d", deployment="staging")
    plain = host(valkey(), tmp_path, "e", secret=None)
    chain = chain_of("x", 8)
    a.store(a.namespace(), chain)
    await a.sent()
    for changed in (
        {"tp_rank": 1},
        {"dtype": "bfloat16"},
        {"layout": "m"},
        {"extra": {"tenant": "other"}},
        {"quantization": "fp8"},
    ):
        assert await b.load([b.namespace(**changed)], chain) == 0, changed
    for stranger in (other_key, other_deployment, plain):
        assert await stranger.load([stranger.namespace()], chain) == 0
    assert b.shared.source.tally.bad_blocks == 0, "they were not even read"
    assert await b.load([b.namespace()], chain) == 8
    for one in (a, b, other_key, other_deployment, plain):
        await one.close()


@played
async def test_a_store_without_the_root_serves_what_follows_a_local_prefix(tmp_path: Path) -> None:
    store = MemoryStore()
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b", write="evicted")
    chain = chain_of("x", 20)
    a.store(a.namespace(), chain)
    await a.sent()
    for name in names_of(a, chain)[:6]:
        del store.values[name]
    space = b.namespace()
    assert await b.load([space], chain) == 0
    b.store(space, chain[: 6 * 16])
    assert await b.load([space], chain) == 20
    assert b.shared.source.tally.blocks == 14
    await a.close()
    await b.close()


@played
async def test_windows_and_ranks_are_found_together(tmp_path: Path) -> None:
    store = MemoryStore()
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    chain = chain_of("x", 30)

    def spaces(one: HostRig) -> list[Any]:
        return [one.namespace(), one.namespace(tp_rank=1), one.namespace(window_blocks=4)]

    for space in spaces(a):
        a.store(space, chain)
    await a.sent()
    assert await b.load(spaces(b), chain) == 30
    assert b.shared.source.tally.blocks == 64, "of the window only what is needed"
    c = host(store, tmp_path, "c")
    rank_1 = a.namespace(tp_rank=1)
    scope = a.shared.scope_of(rank_1, chain[:16])
    epoch = a.shared.epochs.of(scope)
    assert epoch is not None
    del store.values[a.shared.epochs.naming.block(scope, epoch, key_of(chain, 20))]
    assert await c.load(spaces(c), chain) == 20, "what all have"
    for one in (a, b, c):
        one.check()
        await one.close()


@played
async def test_packs(tmp_path: Path) -> None:
    store = MemoryStore(pack_blocks=4)
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    chain = chain_of("x", 18)
    a.store(a.namespace(), chain[: 10 * 16])
    await a.sent()
    assert len(store.values) == 2, "whole packs"
    a.store(a.namespace(), chain, first=10)
    await a.sent()
    assert len(store.values) == 4
    assert await b.load([b.namespace()], chain) == 16
    b.forget_dram(key_of(chain, 6))
    assert await b.load([b.namespace()], chain) == 16, "the rest of a pack"
    for one in (a, b):
        one.check()
        await one.close()


@played
async def test_a_client_that_said_when_it_returns_finds_its_prompt_in_dram(tmp_path: Path) -> None:
    from tiercache.daemon.hints.hints import hint_given_at

    store = MemoryStore()
    a = host(store, tmp_path, "a")
    space, chain = a.namespace(), chain_of("x", 20)
    for one in (chain, chain_of("other", 200)):
        a.store(space, one)
    await a.sent()
    said = hint_given_at(a.cache.clock_s(), False, 0.5, 0.0, None)
    assert a.cache.hint_now([space], chain, 0, said) == 20
    a.forget_dram(key_of(chain, 0))
    await a.until(lambda: a.cache.peek([space], chain) == (20, 0))
    assert a.shared.source.tally.blocks == 20
    await a.close()


@played
async def test_a_prompt_larger_than_dram(valkey: Callable[[], SharedStore], tmp_path: Path) -> None:
    """What has room arrives; the rest is a miss, and nothing hangs."""
    a, b = host(valkey(), tmp_path, "a"), host(valkey(), tmp_path, "b", regions=1)
    chain = chain_of("x", 700)
    a.store(a.namespace(), chain)
    await a.sent()
    space = b.namespace()
    assert 0 < await b.load([space], chain) <= 512
    # All of DRAM is being read by another client: there is no room at all.
    held = b.cache.match(b.owner, [space], chain[: 512 * 16], 60.0, promote=True).lease
    assert held is not None
    other = chain_of("y", 20)
    a.store(a.namespace(), other)
    await a.sent()
    assert await b.load([space], other) <= 512 - held.blocks
    b.cache.reads.release(b.owner, held.lease_id)
    await b.until(lambda: b.below.settled)
    for one in (a, b):
        one.check()
        await one.close()
