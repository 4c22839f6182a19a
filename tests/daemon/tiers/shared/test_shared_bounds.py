"""What the shared tier costs the daemon where much is asked of it: short work, few tries, little held back."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from chains import chain_of, key_of
from host_rig import BLOCK_BYTES, PATIENCE_S, REGION_BYTES, host
from memory_store import MemoryConnection, MemoryStore
from played import play, played

from tiercache.daemon.ground.slices import Slices
from tiercache.daemon.requests.service import Service
from tiercache.daemon.tiers.lower_tier import Claim
from tiercache.daemon.tiers.shared import ancestry, flushes, local_windows, presence
from tiercache.daemon.tiers.shared.stores.store import Get, StoreError, StoreProblem
from tiercache.protocol.messages import BlockState

pytestmark = pytest.mark.usefixtures("nothing_is_missing_for_long")


@played
async def test_the_place_of_a_block_far_below_the_root_is_not_sought_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Places(dict[Any, Any]):
        gets = 0

        def get(self, *args: Any) -> Any:
            self.gets += 1
            return super().get(*args)

    monkeypatch.setattr(ancestry, "MAX_WALK", 150)
    a = host(MemoryStore(), tmp_path, "a")
    space, chain = a.namespace(), chain_of("x", 400)
    a.store(space, chain)
    await a.sent()
    places = a.shared._ancestry._places = Places()
    for number in range(399, 199, -1):  # as they are evicted
        assert a.shared._ancestry.place(space, key_of(chain, number)) is None
    assert places.gets < 200 * (ancestry.NOTED_EVERY + 2)
    place = a.shared._ancestry.place(space, key_of(chain, 40))
    assert place is not None
    assert place.number == 40
    places.gets = 0
    for number in range(40, -1, -1):
        assert a.shared._ancestry.place(space, key_of(chain, number)) == (key_of(chain, 0), number)
    assert places.gets < 41 * (ancestry.NOTED_EVERY + 2)
    for number in range(41, 400):
        assert a.shared._ancestry.note(space, key_of(chain, number), key_of(chain, number - 1)) is not None
    a.check()
    await a.close()


@played
async def test_many_flushes_of_a_store_that_refuses_are_one_job_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One timer, whatever is asked meanwhile; and once the store was told, nothing is left to complain of."""
    monkeypatch.setattr(flushes, "LAST_PAUSE_S", 0.2)
    monkeypatch.setattr(flushes, "FIRST_PAUSE_S", 0.2)
    store = MemoryStore()
    a = host(store, tmp_path, "a")
    space, tries = a.namespace(), list[str]()

    def before(call: str) -> None:
        if call == "set_note":
            tries.append(call)
            raise StoreError(StoreProblem.BUSY, "not now")

    store.before = before
    answers: list[bool] = []
    for _ in range(20):
        seen = len(tries)
        a.shared.begin_flush([space], b"", answers.append)
        await a.until(lambda seen=seen: len(tries) > seen or a.shared.away)
        await a.until(lambda: a.shared.flushes._job is None)
    timers = [one for one in asyncio.get_running_loop()._scheduled if not one.cancelled() and "_tell" in repr(one)]
    assert len(timers) <= 1
    store.work()
    await a.until(lambda: not a.shared.flushes.waiting and not a.shared.away)
    assert answers == [True] * 20
    await a.until(lambda: not a.shared.reasons())
    a.check()
    await a.close()


@played
async def test_a_flush_that_failed_once_leaves_no_complaint(tmp_path: Path) -> None:
    store = MemoryStore()
    a = host(store, tmp_path, "a")
    failed: list[str] = []

    def before(call: str) -> None:
        if call == "set_note" and not failed:
            failed.append(call)
            raise StoreError(StoreProblem.BUSY, "not now")

    store.before = before
    assert await a.flush()
    assert failed
    assert a.shared.reasons() == []
    await a.close()


@played
async def test_a_flush_of_many_namespaces_is_short_work(tmp_path: Path) -> None:
    a = host(MemoryStore(), tmp_path, "a")
    epochs, calls = a.shared.epochs, list[int]()
    wait_for = epochs.await_replacement
    epochs.await_replacement = lambda names: (calls.append(1), wait_for(names))[1]  # type: ignore[method-assign]
    answers: list[bool] = []
    a.shared.flushes.begin([b"note-%d" % number for number in range(1000)], answers.append)
    await a.until(lambda: bool(answers))
    assert answers == [True]
    assert len(calls) < 10
    await a.close()


@played
async def test_windows_too_wide_for_a_look_up_wait_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they wait in vain, and count as look-ups that came too late: then no request waits any more."""
    monkeypatch.setattr(local_windows, "MAX_LOOKED_FOR", 10)
    a = host(MemoryStore(), tmp_path, "a", lookup_timeout_s=0.01)
    space = a.namespace(window_blocks=4)
    a.store(space, chain_of("other", 1))  # else there is nothing to look for
    for number in range(20):
        chain = chain_of(f"x{number}", 20)
        assert not a.below.wait([space], chain, [0], lambda: None)
    assert not len(a.shared._lookups)
    await a.close()


@played
async def test_a_long_prompt_with_windows_of_which_this_host_has_nothing_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a host that has just started: nothing has to be looked for there, however many ranks there are."""
    monkeypatch.setattr(local_windows, "MAX_LOOKED_FOR", 10)
    store, chain = MemoryStore(), chain_of("x", 30)
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    for rank in range(4):
        a.store(a.namespace(window_blocks=4, tp_rank=rank), chain)
    await a.sent()
    spaces = [b.namespace(window_blocks=4, tp_rank=rank) for rank in range(4)]
    assert await b.load(spaces, chain) == 30
    for one in (a, b):
        one.check()
        await one.close()


@played
async def test_a_claim_that_lost_its_beginning_here_is_looked_up_anew(tmp_path: Path) -> None:
    store = MemoryStore()
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b", write="evicted")
    chain, space = chain_of("x", 20), b.namespace()
    a.store(a.namespace(), chain)
    await a.sent()
    b.store(space, chain[:160])
    assert await b.look_up([space], chain) == 20
    b.forget_dram()
    assert await b.load([space], chain) == 20
    for one in (a, b):
        one.check()
        await one.close()


@played
async def test_a_flush_of_one_namespace_leaves_what_is_known_of_others(tmp_path: Path) -> None:
    a = host(MemoryStore(), tmp_path, "a")
    mine, other, chain = a.namespace(tp_rank=1), a.namespace(), chain_of("x", 4)
    a.store(other, chain)
    await a.sent()
    answers: list[bool] = []
    a.shared.begin_flush([mine], b"", answers.append, named=True)
    await a.until(lambda: bool(answers))
    assert a.shared.presence.has(other, key_of(chain, 3))
    a.shared.begin_flush([mine], b"", answers.append)
    assert not a.shared.presence.has(other, key_of(chain, 3)), "all, for every host"
    await a.until(lambda: len(answers) == 2)
    await a.close()


def test_blocks_that_cannot_be_fetched_cost_one_pass_over_a_long_prompt() -> None:
    class Keys(bytes):
        slices = 0

        def __getitem__(self, at: Any) -> Any:
            Keys.slices += 1
            return super().__getitem__(at)

    now = [0.0]
    known = presence.Presence(lambda: now[0])
    spaces: list[Any] = [SimpleNamespace(number=number) for number in range(32)]
    keys = Keys(chain_of("x", 500))
    known.could_not_fetch(spaces[7], key_of(keys, 400), 0)
    known.could_not_fetch(spaces[7], key_of(chain_of("y", 2), 1), 0)
    found = Claim(500, dict.fromkeys(range(32), 3), {})
    known.claimed(spaces, keys, found)
    claim = known.claim(spaces, keys)
    assert claim is not None
    assert claim.end == 400
    assert Keys.slices < 10
    bad = known.unfetchable(spaces)
    known.could_not_fetch(spaces[8], key_of(keys, 450), 0)
    known.claimed(spaces, keys, found, bad)
    claim = known.claim(spaces, keys)
    assert claim is not None
    assert claim.end == 450, "what could not be fetched before, the look-up has left out"
    now[0] += presence.UNFETCHABLE_S
    known.claimed(spaces, keys, found)
    claim = known.claim(spaces, keys)
    assert claim is not None
    assert claim.end == 500
    assert not known._unfetchable


def test_a_thousand_requests_that_waited_for_one_look_up_are_served_in_turn() -> None:
    served: list[int] = []

    def go_on(identity: bytes, session: Any, request: Any, steps: Any) -> Any:
        served.append(1)
        yield from ()

    service: Any = SimpleNamespace(_sliced=Counter[Any](), _slices=Slices(), _go_on=go_on, soon=lambda: None)
    for _ in range(1000):
        Service._resume(service, b"", cast(Any, None), cast(Any, None), cast(Any, None))
    assert not served
    while service._slices.work():
        assert len(served) <= 1000
    assert len(served) == 1000


@pytest.mark.parametrize("pack", [1, 4])
def test_a_block_that_is_read_lives_on_for_as_long_as_one_that_is_stored(tmp_path: Path, pack: int) -> None:
    """Else reading makes the ends of chains outlive their beginnings, without which they are no use."""

    async def scenario() -> None:
        store, renewed = MemoryStore(pack_blocks=pack), dict[bytes, float]()
        a, b = host(store, tmp_path, "a", ttl_s=1000.0), host(store, tmp_path, "b", ttl_s=1000.0)
        chain = chain_of("x", 20)
        a.store(a.namespace(), chain)
        await a.sent()
        fill = MemoryConnection._fill

        def noted(self: MemoryConnection, get: Get, value: bytes | None) -> None:
            renewed[get.name] = get.ttl_s
            fill(self, get, value)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MemoryConnection, "_fill", noted)
            assert await b.load([b.namespace()], chain) == 20
        assert renewed == store.ttls
        for one in (a, b):
            await one.close()

    play(scenario)


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
async def test_a_match_offers_nothing_that_is_there_or_may_not_be_sent(tmp_path: Path) -> None:
    """Else every match of a long prompt goes through all of its blocks again."""
    store = MemoryStore(pack_blocks=4)
    a = host(store, tmp_path, "a")
    for space in (a.namespace(), a.namespace(window_blocks=4), a.namespace(extra={"tiers": "dram"})):
        chain = chain_of("x", 10)
        a.store(space, chain)
        await a.sent()
        a.cache.match(a.owner, [space], chain, 0.0)
        assert not a.shared._writes._chains
    a.check()
    await a.close()
