"""Which blocks are sent to the store, and when."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from chains import chain_of
from host_rig import BLOCK_BYTES, PATIENCE_S, REGION_BYTES, host, names_of
from memory_store import MemoryStore
from played import played

from tiercache.config.daemon_config import DaemonConfig
from tiercache.config.setting_kinds import StoreUrl
from tiercache.daemon.tiers.dram.space import ROOM_STEPS
from tiercache.daemon.tiers.shared import settings, writes
from tiercache.daemon.tiers.shared.byte_rate import ByteRate
from tiercache.daemon.tiers.shared.stores.store import StoreError, StoreProblem
from tiercache.errors import ConfigError
from tiercache.protocol.messages import MAX_RESERVE, BlockState

pytestmark = pytest.mark.usefixtures("nothing_is_missing_for_long")


@played
async def test_a_full_queue_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "MAX_QUEUED", 16)
    store = MemoryStore()
    a = host(store, tmp_path, "a")
    a.store(a.namespace(), chain_of("x", 40))
    assert a.shared._writes.queued == 16
    assert a.shared.stats()["skipped_queue_full"] == 24
    await a.sent()
    assert await a.look_up([a.namespace()], chain_of("x", 40)) == 40
    a.cache.match(a.owner, [a.namespace()], chain_of("x", 40), 0.0)  # asked for again: the rest is offered again
    await a.until(lambda: len(store.values) >= 32)
    a.check()
    await a.close()


@played
async def test_a_tenant_that_fills_the_queue_leaves_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writes, "MAX_QUEUED", 16)
    store = MemoryStore()
    a = host(store, tmp_path, "a")
    spaces = [a.namespace(extra={"tenant": tenant} if tenant else {}) for tenant in ("a", "b", "")]
    for space, blocks in zip(spaces, (40, 4, 4), strict=True):
        a.store(space, chain_of("x", blocks))
    a.check()
    await a.sent()
    sent = [sum(space.fingerprint.encode() in name for name in store.values) for space in spaces]
    assert sent == [8, 4, 4]
    a.check_end()
    await a.close()


@pytest.mark.parametrize("when", ["reused", "evicted"])
@played
async def test_when_blocks_are_sent(tmp_path: Path, when: str) -> None:
    store = MemoryStore()
    a, b = host(store, tmp_path, "a", write=when, regions=1), host(store, tmp_path, "b")
    space, chain = a.namespace(), chain_of("x", 40)
    a.store(space, chain)
    await a.sent()
    assert store.values == {}
    a.cache.match(a.owner, [space], chain, 0.0)
    if when == "evicted":
        await a.sent()
        assert store.values == {}, "it is still in DRAM"
        for number in range(20):
            a.store(space, chain_of(f"y{number}", 40))
            await a.sent()
    await a.sent()
    assert await b.load([b.namespace()], chain) == 40
    for one in (a, b):
        one.check()
        await one.close()


@played
async def test_a_prompt_that_all_ask_for_leaves_room_for_others(tmp_path: Path) -> None:
    store = MemoryStore()
    a = host(store, tmp_path, "a", write="reused")
    space, hot, other = a.namespace(), chain_of("hot", 8), chain_of("other", 8)
    for chain in (hot, other):
        a.store(space, chain)
    for _ in range(writes.CONSIDERED_AT_ONCE):
        a.cache.match(a.owner, [space], hot, 0.0)
    a.cache.match(a.owner, [space], other, 0.0)
    await a.sent()
    assert len(store.values) == 16
    a.check()
    await a.close()


@pytest.mark.parametrize(("when", "pack", "works"), [("evicted", 16, False), ("evicted", 1, True), ("all", 16, True)])
def test_evicted_blocks_make_no_packs(monkeypatch: pytest.MonkeyPatch, when: str, pack: int, works: bool) -> None:
    """The daemon would send nothing: it says so before it serves."""
    monkeypatch.setattr(settings, "open_store", lambda url: MemoryStore(pack_blocks=pack))
    config = DaemonConfig(shared=StoreUrl("s3://bucket"), shared_plain=True, shared_write=when)
    if works:
        assert settings.shared_settings(config).write == when
        return
    with pytest.raises(ConfigError, match=r"^shared_write = evicted: .* packs of 16: .*\?pack=1") as caught:
        settings.shared_settings(config)
    assert "\n" not in str(caught.value)


@played
async def test_no_more_bytes_are_sent_in_a_second_than_the_budget_says(tmp_path: Path) -> None:
    """Local stores do not wait for it, and what waits is sent later."""
    store, now_s = MemoryStore(), [100.0]
    a = host(store, tmp_path, "a")
    a.shared._writes._budget = ByteRate(10 * BLOCK_BYTES, lambda: now_s[0])
    a.store(a.namespace(), chain_of("x", 40))
    for seconds, sent in ((0.0, 10), (0.5, 15), (10.0, 25), (0.5, 30), (1.0, 40)):
        now_s[0] += seconds
        a.cache.work()
        await a.until(lambda: not a.shared._writes._in_flight)
        assert len(store.values) == sent
        assert a.shared._writes.queued == 40 - sent
    assert await a.load([a.namespace()], chain_of("x", 40)) == 40
    a.check()
    await a.close()


def test_a_value_larger_than_the_budget_is_sent_and_paid_off() -> None:
    now_s = [0.0]
    rate = ByteRate(10, lambda: now_s[0])
    rate.charge(35)
    for second, has_room in ((1.0, False), (2.0, False), (2.5, False), (2.6, True), (100.0, True)):
        now_s[0] = second
        assert rate.has_room() is has_room
    rate.charge(10)
    assert not rate.has_room(), "what was not used long ago is not saved up"
    assert ByteRate(0).has_room()


@played
async def test_deeper_blocks_live_shorter(tmp_path: Path) -> None:
    store = MemoryStore()
    a = host(store, tmp_path, "a", ttl_s=1000.0)
    chain = chain_of("x", 30)
    a.store(a.namespace(), chain)
    await a.sent()
    ttls = [store.ttls[name] for name in names_of(a, chain)]
    assert ttls[0] == 1000.0
    assert ttls == sorted(ttls, reverse=True)
    assert len(set(ttls)) == 30
    store.ttls.clear()
    a.forget_dram()
    assert await a.load([a.namespace()], chain) == 30
    assert [store.ttls[name] for name in names_of(a, chain)] == ttls, "a fetch renews them as they were"
    await a.close()


@played
async def test_a_slow_store_does_not_keep_a_small_arena_from_making_room(tmp_path: Path) -> None:
    """Evicted blocks keep their frames until they are sent: only a few of them, or the whole cache goes for nothing."""
    store, gate = MemoryStore(), threading.Event()
    a = host(store, tmp_path, "a", write="evicted", regions=1)
    space, frames = a.namespace(), REGION_BYTES // BLOCK_BYTES

    def before(call: str) -> None:
        assert gate.wait(PATIENCE_S)

    store.before = before
    a.store(space, chain_of("x", frames))
    for number in range(10):
        assert BlockState.NONE not in a.store(space, chain_of(f"y{number}", 4)), "there was no room"
        a.cache.work()
    assert space.table.blocks >= frames * 3 // 4
    gate.set()
    await a.sent()
    a.check()
    await a.close()


@played
async def test_a_slow_store_does_not_keep_a_tenant_at_its_quota_from_making_room(tmp_path: Path) -> None:
    """Its evicted blocks count for it until they are sent."""
    store, gate = MemoryStore(), threading.Event()
    a = host(store, tmp_path, "a", write="evicted", regions=1)
    a.cache.space.quotas.change({"t": 64 * BLOCK_BYTES})
    space = a.namespace(extra={"tenant": "t"})

    def before(call: str) -> None:
        assert gate.wait(PATIENCE_S)

    store.before = before
    a.store(space, chain_of("x", 64))
    for number in range(40):
        assert a.store(space, chain_of(f"y{number}", 1)) == [BlockState.FRAME], "there was no room"
        a.cache.work()
        a.check()
    assert space.table.blocks == 64 - 8
    gate.set()
    await a.sent()
    assert (space.table.blocks, len(store.values)) == (64 - 8, 8)
    a.check_end()
    await a.close()


@played
async def test_a_store_gets_room_also_where_very_many_small_blocks_may_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It evicts some thousands of blocks at most, so fewer than that may keep their frames."""
    monkeypatch.setattr(writes, "HELD_SHARE", 1.0)
    blocks = 2 * ROOM_STEPS
    a = host(MemoryStore(), tmp_path, "a", write="evicted", regions=1, region_bytes=blocks * BLOCK_BYTES)
    for number in range(0, blocks, MAX_RESERVE):
        a.store(a.namespace(), chain_of(f"x{number}", MAX_RESERVE))
    assert BlockState.NONE not in a.store(a.namespace(), chain_of("y", MAX_RESERVE))
    assert a.shared._writes.queued == writes.MAX_EVICTED
    await a.sent()
    a.check_end()
    await a.close()


@played
async def test_a_full_store_keeps_no_frames(tmp_path: Path) -> None:
    a = host(MemoryStore(), tmp_path, "a", write="evicted", regions=1)
    for number in range(10):  # more than DRAM holds
        a.store(a.namespace(), chain_of(number, 64))
    waited = a.shared._writes.queued
    a.shared._writes.flushed(frozenset())  # of other chains
    assert a.shared._writes.queued == waited
    a.shared.access.breaker.failed(StoreError(StoreProblem.FULL, "no room"), "write")
    assert a.shared.reasons() == ["the shared store memory://test takes no writes: no room"]
    a.cache.work()
    assert (a.shared._writes.queued, a.shared.stats()["skipped_evicted"]) == (0, waited)
    assert waited > 0
    a.check_end()
    await a.close()


@played
async def test_the_end_of_the_daemon_does_not_wait_for_a_store_that_is_away(tmp_path: Path) -> None:
    a = host(MemoryStore(), tmp_path, "a")
    a.store(a.namespace(), chain_of("x", 40))
    while a.shared.access.breaker.closed:
        a.shared.access.breaker.failed(StoreError(StoreProblem.UNREACHABLE, "no route"))
    assert await a.close(1e9) == 40


@played
async def test_what_turns_out_to_be_bad_while_it_counts_as_there_is_replaced(tmp_path: Path) -> None:
    store, chain = MemoryStore(), chain_of("x", 1)
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    a.store(a.namespace(), chain)
    await a.sent()
    [name] = store.values
    good, store.values[name] = store.values[name], b"bad"

    def fetched(call: str) -> None:
        if call == "exists":
            b.shared.access.presence.could_not_fetch(space, chain, b.shared.access.presence.generation(space), bad=True)

    space, store.after = b.namespace(), fetched
    b.store(space, chain)
    await b.sent()
    assert len(store.values[name]) == len(good)
    assert b.shared.stats()["written_blocks"] == 1
    b.check_end()
    for one in (a, b):
        await one.close()


@played
async def test_a_slice_of_the_queue_ends_with_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To find the place of one block may take milliseconds."""
    monkeypatch.setattr(writes, "PUMP_NS", 0)
    a = host(MemoryStore(), tmp_path, "a")
    a.store(a.namespace(), chain_of("x", 10))
    left = [a.shared._writes.queued]
    while a.shared._writes.pump():
        left.append(a.shared._writes.queued)
    assert left == list(range(10, -1, -1))
    await a.sent()
    await a.close()
