"""A prompt that one host answers from its DRAM all the time does not stay away from the store once it expired there."""

from __future__ import annotations

from pathlib import Path

import pytest
from chains import chain_of
from host_rig import host
from memory_store import MemoryStore
from played import played

from tiercache.daemon.tiers.shared import presence

pytestmark = pytest.mark.usefixtures("nothing_is_missing_for_long")


@played
async def test_what_expired_in_the_store_is_sent_again_from_dram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, chain = MemoryStore(), chain_of("popular", 10)
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    monkeypatch.setattr(presence, "KNOWN_S", 0.0)  # so long after the last look
    a.store(a.namespace(), chain)
    await a.sent()
    for gone in (range(10), range(6, 10), range(9, 10)):
        names = sorted(store.values, key=lambda name: -store.ttls[name])  # deeper blocks live shorter
        for number in gone:
            del store.values[names[number]]
        assert await a.load([a.namespace()], chain) == 10
        await a.until(lambda: len(store.values) == 10)
        await a.sent()
    assert a.shared.source.tally.blocks == 0, "all from its DRAM"
    assert await b.load([b.namespace()], chain) == 10
    for one in (a, b):
        one.check()
        await one.close()


@played
async def test_what_was_seen_in_the_store_a_short_time_ago_is_not_asked_for(tmp_path: Path) -> None:
    """A popular prompt costs the store nothing between two looks."""
    store, chain = MemoryStore(), chain_of("popular", 10)
    a = host(store, tmp_path, "a")
    a.store(a.namespace(), chain)
    await a.sent()
    asked = len(store.calls)
    for _ in range(20):
        assert await a.load([a.namespace()], chain) == 10
    await a.sent()
    assert len(store.calls) == asked
    a.check()
    await a.close()
