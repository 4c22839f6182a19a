"""Which blocks are sent to the store, and when."""

from __future__ import annotations

from pathlib import Path

import pytest
from chains import chain_of
from host_rig import host, names_of
from memory_store import MemoryStore
from played import play, played

from tiercache.config.daemon_config import DaemonConfig
from tiercache.config.setting_kinds import StoreUrl
from tiercache.daemon.tiers.shared import settings
from tiercache.errors import ConfigError

pytestmark = pytest.mark.usefixtures("nothing_is_missing_for_long")


@played
async def test_a_full_queue_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiercache.daemon.tiers.shared import writes

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


@pytest.mark.parametrize("when", ["reused", "evicted"])
def test_when_blocks_are_sent(tmp_path: Path, when: str) -> None:
    async def scenario() -> None:
        store = MemoryStore()
        a, b = host(store, tmp_path, "a", write=when, regions=1), host(store, tmp_path, "b")
        space, chain = a.namespace(), chain_of("x", 40)
        a.store(space, chain)
        await a.sent()
        assert store.values == {}
        if when == "reused":
            a.cache.match(a.owner, [space], chain, 0.0)
        else:
            for number in range(20):
                a.store(space, chain_of(f"y{number}", 40))
                await a.sent()
        await a.sent()
        assert await b.load([b.namespace()], chain) == 40
        for one in (a, b):
            one.check()
            await one.close()

    play(scenario)


@pytest.mark.parametrize(("when", "pack", "works"), [("evicted", 16, False), ("evicted", 1, True), ("all", 16, True)])
def test_single_evicted_blocks_make_no_packs(
    monkeypatch: pytest.MonkeyPatch, when: str, pack: int, works: bool
) -> None:
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
async def test_what_waits_is_sent_before_the_end(tmp_path: Path) -> None:
    store = MemoryStore()
    a = host(store, tmp_path, "a", write_budget_bytes_per_s=1)
    a.store(a.namespace(), chain_of("x", 40))
    a.cache.work()
    assert await a.close() == 0
    assert len(store.values) == 40


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
