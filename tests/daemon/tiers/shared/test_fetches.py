"""Blocks from the store, and how far it is believed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from chains import chain_of, key_of
from host_rig import HostRig, host
from memory_store import MemoryConnection, MemoryStore
from played import played

from tiercache.daemon.tiers.dram.promotion import BATCH
from tiercache.daemon.tiers.dram.source import Fetch
from tiercache.daemon.tiers.shared.breaker import FAILURES, BreakerState
from tiercache.daemon.tiers.shared.search import ChainAsk, Probe, longest_run
from tiercache.daemon.tiers.shared.stores.store import Connection, Exists, Get
from tiercache.protocol.messages import KEY_BYTES

FRAMES = 512
"""Of a host with one region."""


class BoastingStore(MemoryStore):
    """It says that it has every block while it `lies`, and then has this instead of those that it has not."""

    lies = True
    junk: bytes | None = None

    def connect(self) -> Connection:
        return _Boasting(self)


class _Boasting(MemoryConnection):
    _store: BoastingStore

    def exists(self, names: Sequence[bytes], notes: Sequence[bytes], deadline_s: float) -> Exists:
        found = super().exists(names, notes, deadline_s)
        return found._replace(there=[True] * len(names)) if self._store.lies else found

    def _fill(self, get: Get, value: bytes | None) -> None:
        super()._fill(get, self._store.junk if value is None else value)


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
    assert one.shared.access.breaker.state is BreakerState.OPEN
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
    assert other.shared.access.breaker.closed, "what a store has evicted is no lie yet"
    await one.close(0)
    await other.close(0)


@played
async def test_a_store_that_delivers_junk_is_trusted_no_longer(tmp_path: Path) -> None:
    store, chain = BoastingStore(), chain_of("good", 4)
    store.lies = False
    one, other = host(store, tmp_path, "a", regions=1, write="reused"), host(store, tmp_path, "b")
    other.store(other.namespace(), chain)
    await other.sent()
    space = one.namespace()
    assert await one.load([space], chain) == 4
    assert one.shared.source.trusted
    for number in range(FRAMES // 64):
        one.store(space, chain_of(f"local {number}", 63))
    store.lies, store.junk = True, b"junk"
    assert await one.load([space], chain_of("cold", 400)) == 0
    before = evicted(one)
    for number in range(3):
        assert not one.shared.source.trusted
        assert await one.load([space], chain_of(f"cold {number}", 400)) == 0
    assert evicted(one) - before <= 3 * BATCH
    assert one.shared.access.breaker.closed, "it answers, and what it has is replaced"
    for it in (one, other):
        await it.close(0)


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("shorter", [0, 1])
@played
async def test_a_prompt_that_the_store_evicts_while_many_wait_for_it_is_one_lie(
    tmp_path: Path, trusted: bool, shorter: int
) -> None:
    store, chain, other = MemoryStore(), chain_of("p", 40), chain_of("q", 4)
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    for keys in (chain, other):
        a.store(a.namespace(), keys)
    await a.sent()
    space = b.namespace()
    if trusted:
        assert await b.load([space], other) == 4
    prompts = [chain[: KEY_BYTES * (40 - shorter * number)] for number in range(2 * FAILURES)]
    for keys in prompts:
        await b.look_up([space], keys)
    store.values.clear()
    leases = [b.cache.match(b.owner, [space], keys, 60.0, promote=True).lease for keys in prompts]
    growing = b.cache.reads.growing.leases
    await b.until(lambda: all(lease is None or lease.over or lease.lease_id not in growing for lease in leases))
    assert b.shared.access.breaker.closed
    assert "says that it has blocks" in b.shared.access.breaker.problem
    for it in (a, b):
        await it.close(0)


@played
async def test_keys_that_a_client_makes_up_are_no_lies_of_the_store(tmp_path: Path) -> None:
    """Those that are probed are there, the others nowhere: no store has said anything of those."""
    store, real, length = MemoryStore(), chain_of("real", 80), 1700
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    a.store(a.namespace(), real)
    await a.sent()
    space = b.namespace()
    b.store(space, real[:KEY_BYTES])
    for number in range(2 * FAILURES):
        asked: list[Probe] = []
        rounds, keys = longest_run([ChainAsk(1)], length), chain_of(f"made up {number}", length)
        made_up = [key_of(keys, place) for place in range(length)]
        made_up[0] = key_of(real, 0)
        probes = next(rounds)
        while not asked or probes:
            asked += probes
            try:
                probes = rounds.send([True] * len(probes))
            except StopIteration:
                break
        for place, (_, probed) in enumerate(dict.fromkeys(asked), 4 + number):
            made_up[probed] = key_of(real, place)
        prompt = b"".join(made_up)
        assert await b.look_up([space], prompt) == length
        assert await b.load([space], prompt) < length
    assert (b.shared.access.breaker.opened, b.shared.access.breaker.problem) == (0, "")
    for it in (a, b):
        await it.close(0)
