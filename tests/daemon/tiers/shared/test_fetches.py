"""Blocks from the store, and how far it is believed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from chains import chain_of
from host_rig import HostRig, host
from memory_store import MemoryConnection, MemoryStore
from played import played

from tiercache.daemon.tiers.promotion import BATCH
from tiercache.daemon.tiers.shared.breaker import FAILURES, BreakerState
from tiercache.daemon.tiers.shared.stores.store import Connection, Exists
from tiercache.daemon.tiers.source import Fetch

FRAMES = 512
"""Of a host with one region."""


class BoastingStore(MemoryStore):
    """It says that it has every block."""

    def connect(self) -> Connection:
        return _Boasting(self)


class _Boasting(MemoryConnection):
    def exists(self, names: Sequence[bytes], notes: Sequence[bytes], deadline_s: float) -> Exists:
        found = super().exists(names, notes, deadline_s)
        return found._replace(there=[True] * len(names))


def evicted(one: HostRig) -> int:
    return one.cache.space.counters.evicted_blocks


@played
async def test_a_store_that_claims_what_it_has_not_costs_little_room_and_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = host(BoastingStore(), tmp_path, "a", regions=1, write="reused")
    space, local = one.namespace(), [chain_of(f"local {number}", 64) for number in range(FRAMES // 64)]
    for chain in local:
        one.store(space, chain)
    before = evicted(one)
    for number in range(2 * FAILURES):
        assert await one.load([space], chain_of(f"cold {number}", 400)) == 0
    assert evicted(one) - before <= FAILURES * BATCH
    assert one.shared.breaker.state is BreakerState.OPEN
    assert "says that it has blocks" in one.shared.reasons()[0]
    assert caplog.text.count("is away: ") == 1, "it is told once"
    await one.close(0)


@played
async def test_a_store_that_delivers_is_asked_for_many_batches_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, chain = MemoryStore(), chain_of("a", 4 * BATCH)
    one, other = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    one.store(one.namespace(), chain)
    await one.sent()
    source, counts = other.shared.source, [0]
    fetch, let_go = source.fetch, source.let_go

    def begun(fetches: Sequence[Fetch]) -> bool:
        counts.append(counts[-1] + len(fetches))
        return fetch(fetches)

    def ended(fetches: Sequence[Fetch]) -> None:
        counts.append(counts[-1] - len(fetches))
        let_go(fetches)

    monkeypatch.setattr(source, "fetch", begun)
    monkeypatch.setattr(source, "let_go", ended)
    assert await other.load([other.namespace()], chain) == 4 * BATCH
    assert source.trusted
    assert counts[1] == BATCH
    assert counts[2] < BATCH < max(counts), "the first one comes alone"
    store.values.clear()
    other.forget_dram()
    assert await other.load([other.namespace()], chain) == 0
    assert not source.trusted
    assert other.shared.breaker.closed, "what a store has evicted is no lie yet"
    await one.close(0)
    await other.close(0)
