"""A prompt of which a tier on this host has the beginning, and the store the rest: both are fetched side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chains import chain_of
from host_rig import BLOCK_BYTES, HostRig, content, host
from memory_store import MemoryStore
from played import played

from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.index.index import Index
from tiercache.daemon.tiers.dram.below import TierBelow
from tiercache.daemon.tiers.dram.promotion import Promotion
from tiercache.daemon.tiers.dram.source import Fetch, FetchOutcome, FetchTally, SourcePart, TierParts
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.lower_tiers import LowerTiers
from tiercache.daemon.tiers.shared.memory import frame_view

NEAR, ALL = 6, 12
CHAIN = chain_of("x", ALL)


class NearTier(TierBelow):
    """Stands for NVMe: it has the first blocks, and delivers them when the test says so."""

    offline = retired = False
    trusted = True

    def __init__(self) -> None:
        self.tally = FetchTally()
        self.fetches: list[Fetch] = []

    def length(self, namespace: Namespace, keys: bytes, limit: int) -> int:
        return min(NEAR, limit)

    def parts(self, namespace: Namespace, keys: bytes, wanted: Sequence[int]) -> Steps[TierParts]:
        yield from ()
        its = [number for number in wanted if number < NEAR]
        return TierParts([SourcePart(self, its)], [number for number in wanted if number >= NEAR])

    def most_together(self, namespace: Namespace) -> int:
        return 4

    def hold(self, namespace: Namespace, keys: bytes, numbers: Sequence[int]) -> Sequence[int]:
        return numbers

    def fetch(self, fetches: Sequence[Fetch]) -> bool:
        self.fetches += fetches
        return True

    def let_go(self, fetches: Sequence[Fetch]) -> None:
        for fetch in fetches:
            self.fetches.remove(fetch)

    def failed(self, fetch: Fetch, place: int) -> bool:
        raise AssertionError("it delivers all of them")

    def cancel(self) -> None:
        raise AssertionError("it never hangs")

    def kept_word(self, kept: bool) -> None:
        assert kept

    def deliver(self) -> None:
        """All that it was asked for."""
        for fetch in list(self.fetches):
            for address, key in zip(fetch.addresses, fetch.keys, strict=True):
                frame_view(address, BLOCK_BYTES)[:] = content(fetch.namespace, key)
            fetch.end([FetchOutcome.OK] * len(fetch.keys), [BLOCK_BYTES] * len(fetch.keys))


def above_the_store(one: HostRig) -> NearTier:
    """Gives a host such a tier."""
    near, below = NearTier(), one.below
    below._local = near
    parts = one.cache.reads.growing, one.cache.writes
    below.promotion = Promotion(*parts, None, one.regions, [near, one.shared], lambda: None)
    return near


@played
async def test_the_store_does_not_wait_for_the_disk_and_blocks_appear_in_order(tmp_path: Path) -> None:
    store = MemoryStore()
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    near, space = above_the_store(b), b.namespace()
    a.store(a.namespace(), CHAIN)
    await a.sent()
    assert await b.look_up([space], CHAIN) == ALL
    lease = b.cache.match(b.owner, [space], CHAIN, 60.0, promote=True).lease
    assert lease is not None
    await b.until(lambda: b.shared.source.tally.blocks == ALL - NEAR)
    assert sum(len(fetch.keys) for fetch in near.fetches) == NEAR, "the disk has not delivered yet"
    assert space.table.blocks == 0, "nothing is visible before the blocks in front of it"
    near.deliver()
    await b.until(lambda: lease.lease_id not in b.cache.reads.growing.leases)
    assert b.read(lease, [space]) == ALL
    assert (near.tally.blocks, near.fetches) == (NEAR, [])
    for one in (a, b):
        one.check()
        await one.close()


@played
async def test_a_flushed_block_that_waits_to_be_unlinked_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    a = host(store, tmp_path, "a")
    space = a.namespace()
    a.store(space, CHAIN)
    with monkeypatch.context() as patch:
        patch.setattr(Index, "unlink_slice", lambda index, most: False)  # others have their turn first
        a.cache.space.index.drop(space.table.get(CHAIN[:16]))
        await a.sent()
        assert store.values == {}
    a.check()
    await a.close()


def test_a_flush_whose_end_fails_is_over_and_not_answered_besides() -> None:
    """Whoever asked has the exception; a flush that is never over would count against its client for good."""
    ended, store_answers, answers = list[bool](), list[Callable[[bool], None]](), list[bool]()

    class Ended(TierBelow):
        tiers = ("nvme",)

        def begin_flush(self, *asked: Any, **how: Any) -> Any:
            return SimpleNamespace(end=lambda: ended.append(True), settled=True)

    def begin_flush(namespaces: Any, key: bytes, done: Callable[[bool], None], named: bool) -> Callable[[], object]:
        store_answers.append(done)
        return lambda: 1 // 0

    shared: Any = SimpleNamespace(name="shared", begin_flush=begin_flush)
    near: Any = Ended()
    flush = LowerTiers(near, shared, {}).begin_flush([], b"", lambda _, durable: answers.append(durable))
    with pytest.raises(ZeroDivisionError):
        flush.end()
    for done in store_answers:
        done(True)
    assert (ended, flush.settled, answers) == ([True], True, [])
