"""Parts of the shared tier, one by one: ancestry, presence, look-ups, lines, the breaker."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chains import chain_of, key_of
from host_rig import host
from memory_store import MemoryStore
from played import Clock, played

from tiercache.daemon import cache
from tiercache.daemon.tiers.dram.below import Claim
from tiercache.daemon.tiers.shared import ancestry, lines, lookups, presence
from tiercache.daemon.tiers.shared import breaker as breakers
from tiercache.daemon.tiers.shared.breaker import FAILURES, FIRST_PAUSE_S, LAST_PAUSE_S, RAMP_S, Breaker, BreakerState
from tiercache.daemon.tiers.shared.lookups import (
    LATE_IN_A_ROW,
    MAX_BEGUN,
    MAX_LOOKED_FOR,
    MAX_LOOKUPS,
    LocalWindows,
    SharedLookups,
    split,
)
from tiercache.daemon.tiers.shared.naming import Naming
from tiercache.daemon.tiers.shared.settings import SharedSettings
from tiercache.daemon.tiers.shared.stores.store import Connection, StoreError, StoreProblem
from tiercache.daemon.tiers.shared.tier import SharedTier
from tiercache.daemon.tiers.shared.value import ValueForm

# --- where a block stands in its chain ---------------------------------------------------------------


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
async def test_a_flush_of_a_prefix_does_not_believe_what_a_client_said_of_a_window(tmp_path: Path) -> None:
    """A client may name any block as the one before a window's. The bucket of a flush is that of the chain."""
    store, chain, root = MemoryStore(), chain_of("x", 4), chain_of("another", 1)
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    a.store(a.namespace(window_blocks=1), root + key_of(chain, 0))
    await a.sent()
    b.store(b.namespace(), chain)
    await b.sent()
    assert await a.load([a.namespace()], chain) == 4
    assert await a.flush(key_of(chain, 0))
    b.forget_dram()
    assert [await one.load([one.namespace()], chain) for one in (a, b)] == [0, 0]
    for one in (a, b):
        one.check()
        await one.close()


@played
async def test_a_flush_of_a_prefix_reaches_it_while_its_beginning_is_being_unlinked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that was dropped hangs below nothing, and its key is not that of the chain's bucket."""
    store, chain = MemoryStore(), chain_of("x", 9)
    a = host(store, tmp_path, "a")
    space = a.namespace()
    a.store(space, chain)
    await a.sent()
    monkeypatch.setattr(cache, "_FLUSH_AT_ONCE", 1)
    a.cache.flush_dram([space.number], key_of(chain, 1))
    assert space.table.unlinking
    assert await a.flush(key_of(chain, 6))
    assert await a.load([space], chain) <= 6
    a.check()
    await a.close()


@played
async def test_a_root_is_sought_for_a_limited_time(tmp_path: Path) -> None:
    a = host(MemoryStore(), tmp_path, "a")
    spaces, chain = [a.namespace(), a.namespace(tp_rank=1)], chain_of("x", 31)
    for space in spaces:
        a.store(space, chain)
    root_of = partial(a.shared._ancestry.root_of, most=30)
    assert root_of(spaces, key_of(chain, 14)) == root_of(spaces[:1], key_of(chain, 29)) == key_of(chain, 0)
    assert root_of(spaces, key_of(chain, 15)) is None
    assert root_of(spaces, key_of(chain, 30)) is None
    assert root_of([a.namespace(window_blocks=1)], key_of(chain, 0)) is None
    other = a.namespace(tp_rank=2)
    a.store(other, chain_of("another", 1) + key_of(chain, 0))
    assert root_of([*spaces, other], key_of(chain, 0)) is None, "somebody has made up a chain"
    await a.close()


# --- what this host believes to be in the store, for a short time ------------------------------------


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

    def end(*bad: Any) -> int:
        known.claimed(spaces, keys, found, *bad)
        claim = known.claim(spaces, keys)
        return claim.end if claim else 0

    assert end() == 400
    assert Keys.slices < 10
    bad = known.unfetchable(spaces)
    known.could_not_fetch(spaces[8], key_of(keys, 450), 0)
    assert end(bad) == 450, "what could not be fetched before, the look-up has left out"
    now[0] += presence.UNFETCHABLE_S
    assert end() == 500
    assert not known._unfetchable


def test_a_block_that_could_not_be_fetched_leaves_what_is_claimed_for_others() -> None:
    known = presence.Presence(lambda: 0.0)
    mine, others = SimpleNamespace(number=1), SimpleNamespace(number=2)
    prompts: list[tuple[list[Any], bytes]] = [([mine], chain_of("a", 9)), ([others], chain_of("b", 9))]
    for spaces, keys in prompts:
        known.claimed(spaces, keys, Claim(9, {0: 3}, {}))
    known.could_not_fetch(prompts[0][0][0], key_of(prompts[0][1], 5), 0)
    assert [known.claim(*prompt) is None for prompt in prompts] == [True, False]


def test_what_is_not_believed_any_more_takes_no_memory() -> None:
    clock, space = Clock(), SimpleNamespace(number=1)
    known = presence.Presence(clock)
    for number in range(100):
        known.note(space, b"%d" % number, 0)
    clock.now_s += presence.KNOWN_S
    for number in range(60):
        known.note(space, b"new %d" % number, 0)
    assert (len(known._blocks), known.has(space, b"new 0"), known.has(space, b"99")) == (60, True, False)


@played
async def test_what_expired_in_the_store_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


# --- one tenant's look-ups do not keep those of others from being made, nor from being waited for ----


class Played:
    """Look-ups whose ends and timers the test decides."""

    def __init__(self) -> None:
        self.timers: list[Callable[[], None]] = []
        self.timeouts_s: list[float] = []
        self.begun: list[tuple[str, str]] = []
        self.now_s = 0.0
        self.looked = SharedLookups(0.02, self._later, lambda: self.now_s)

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        self.timers.append(call)
        self.timeouts_s.append(seconds)

    def ask(self, tenant: str, prompt: str, patience_s: float = math.inf, blocks: int = 2) -> bool:
        names = self._names(tenant), chain_of(prompt, blocks)
        return self.looked.wait(*names, lambda: None, lambda: self.begun.append((tenant, prompt)), patience_s)

    def end(self, tenant: str, prompt: str, blocks: int = 2) -> None:
        self.looked.ended(self._names(tenant), chain_of(prompt, blocks))

    def time_is_up(self) -> None:
        self.now_s += 1.0
        timers, self.timers = self.timers, []
        for call in timers:
            call()

    def _names(self, tenant: str) -> Any:
        number = sum(tenant.encode())
        return [SimpleNamespace(number=number, spec=SimpleNamespace(tenant=tenant))]


def test_a_flood_leaves_room_and_turns_for_others() -> None:
    play = Played()
    flood = [play.ask("a", f"{number}") for number in range(2 * MAX_LOOKUPS)]
    assert 0 < sum(flood) < MAX_LOOKUPS
    assert len(play.begun) == MAX_BEGUN
    assert [play.ask(tenant, "x") for tenant in "bcd"] == [True, True, True]
    assert (play.looked.asked, play.looked.shared, play.looked.late) == (len(play.looked), 0, 0)
    ended = play.begun[:3]
    for one in ended:
        play.end(*one)
    assert play.begun[MAX_BEGUN:] == [("a", f"{MAX_BEGUN}"), ("b", "x"), ("c", "x")], "tenants take turns"
    while len(play.looked):
        ended.append(next(one for one in play.begun if one not in ended))
        play.end(*ended[-1])
    assert not play.looked._queues
    assert not play.looked._of_tenant
    assert play.looked._begun == 0


def test_look_ups_of_long_prompts_keep_no_more_keys_than_those_of_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon's memory is small, and a slow store has it keep them for long."""
    monkeypatch.setattr(lookups, "KEYS_EACH", 4)
    play = Played()
    for number in range(30):
        for tenant in "abcdefghi":
            play.ask(tenant, f"{number}", blocks=37)
    assert 200 < 10 * len(play.looked) <= MAX_LOOKUPS
    assert play.looked.check_integrity() == []
    while play.begun:
        play.end(*play.begun.pop(0), blocks=37)
    assert not play.looked._of_tenant


def test_the_late_look_ups_of_one_tenant_are_its_own() -> None:
    play = Played()
    for number in range(LATE_IN_A_ROW):
        assert play.ask("a", f"{number}")
    play.time_is_up()
    assert not play.ask("a", "more"), "it does not wait in vain"
    assert play.ask("b", "x"), "others do, as long as theirs come in time"
    for number in range(LATE_IN_A_ROW):
        play.end("a", f"{number}")
    play.end("a", "more")  # it came in time
    assert play.ask("a", "again")


def test_no_request_waits_longer_than_its_client() -> None:
    """Else the client would miss what this host has."""
    play = Played()
    assert [play.ask("a", f"{number}", patience) for number, patience in enumerate((1.0, 0.01, 0.0))] == [1, 1, 0]
    assert play.timeouts_s == [0.02, 0.01]


def test_blocks_in_any_tier_of_this_host_are_here() -> None:
    keys = split(chain_of("x", 4))
    in_dram, on_disk = {keys[0], keys[2]}, {keys[1], keys[2]}
    index: Any = SimpleNamespace(lookup=lambda table: in_dram.__contains__ if in_dram else None)
    windows = LocalWindows(index, lambda namespace: on_disk.__contains__ if on_disk else None)
    namespace: Any = SimpleNamespace(table=SimpleNamespace(windowed=True))
    assert windows.here(namespace, keys) == bytes([1, 1, 1, 0])
    assert windows.are_short_work([namespace], MAX_LOOKED_FOR // 2)
    assert not windows.are_short_work([namespace], MAX_LOOKED_FOR // 2 + 1), "two tiers have to be asked"
    in_dram.clear()
    assert windows.here(namespace, keys) == bytes([0, 1, 1, 0])
    on_disk.clear()
    assert windows.here(namespace, keys) == bytes(4)
    assert windows.are_short_work([namespace] * 64, MAX_LOOKED_FOR)


@played
async def test_a_look_up_that_has_become_long_work_while_it_waited_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A namespace without blocks costs nothing, and may have some by the time that a look-up begins."""
    monkeypatch.setattr(lookups, "MAX_LOOKED_FOR", 5)
    one, looked_for = host(MemoryStore(), tmp_path, "a"), list[int]()
    windowed, went = one.namespace(window_blocks=4), list[int]()
    real = lookups.LocalWindows.here

    def here(self: LocalWindows, namespace: Any, keys: list[bytes]) -> bytes:
        looked_for.append(len(keys))
        return real(self, namespace, keys)

    monkeypatch.setattr(lookups.LocalWindows, "here", here)
    for number in range(MAX_BEGUN + 2):
        chain, go = chain_of(f"{number}", 6), lambda number=number: went.append(number)
        assert one.below.wait([windowed], chain, [0], go)  # type: ignore[arg-type]
    assert looked_for == [6] * MAX_BEGUN
    one.store(windowed, chain_of("other", 1))
    await one.until(lambda: len(went) == MAX_BEGUN + 2)
    assert looked_for == [6] * MAX_BEGUN
    one.check()
    await one.close()


# --- the threads that talk to the store --------------------------------------------------------------


@played
async def test_a_line_outlives_whatever_a_store_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native libraries raise what is no Exception; and each job ends, or leases and frames would wait for ever."""
    monkeypatch.setattr(breakers, "FAILURES", 1000)

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
        b.shared.access.presence._unfetchable.clear()
        b.shared.access.presence.drop_claims()
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


def test_the_end_cuts_off_calls_under_way() -> None:
    """A store that does not answer keeps no daemon from ending."""
    begun, closed = threading.Event(), threading.Event()

    class Hangs(lines.SharedJob):
        def run(self, connection: Connection) -> None:
            begun.set()
            assert closed.wait(60)

    owner: Any = None  # nobody is told
    store: Any = SimpleNamespace(connect=lambda: SimpleNamespace(close=closed.set))
    line = lines.Lines(store, [(lines.LineUse.FETCH,)], lambda call: None)
    line.submit(Hangs(owner), lines.LineUse.FETCH)
    assert begun.wait(60)
    until_s = time.monotonic() + 30
    assert line.stop(until_s)


# --- the breaker: when it opens, when it asks again, how it comes back -------------------------------


AWAY = StoreError(StoreProblem.UNREACHABLE, "refused")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock, lambda low, high: (low + high) / 2)


def opened(breaker: Breaker) -> None:
    for _ in range(FAILURES):
        breaker.failed(AWAY)


def test_it_opens_after_failures_in_a_row(breaker: Breaker) -> None:
    for _ in range(5):
        assert not breaker.failed(AWAY)
        assert not breaker.failed(AWAY)
        breaker.worked()
    assert breaker.closed
    assert [breaker.failed(AWAY) for _ in range(FAILURES + 1)] == [False, False, True, False]
    assert not breaker.closed
    assert breaker.problem == "refused"


def test_kinds_of_jobs_are_counted_apart(breaker: Breaker) -> None:
    """Look-ups that work do not hide that no fetch does."""
    for _ in range(FAILURES - 1):
        breaker.failed(AWAY, "fetch")
        breaker.worked("look-up")
        assert breaker.problem == "refused"
    assert breaker.failed(AWAY, "fetch")


def test_one_probe_after_each_pause_and_longer_ones(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    pause_s, pauses = FIRST_PAUSE_S, list[float]()
    for _ in range(8):
        assert not breaker.wants_probe()
        clock.now_s += pause_s - 0.01
        assert not breaker.wants_probe()
        clock.now_s += 0.01
        assert breaker.wants_probe()
        assert not breaker.wants_probe(), "one at a time"
        breaker.failed(AWAY)
        pauses.append(pause_s)
        pause_s = min(LAST_PAUSE_S, 2 * pause_s)
    assert pauses[-1] == LAST_PAUSE_S
    assert breaker.opened == 1


def test_it_comes_back_by_and_by(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now_s += FIRST_PAUSE_S
    assert breaker.wants_probe()
    breaker.worked()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.share == 0.1
    assert not breaker.admits(), "with the middle of the random numbers"
    clock.now_s += RAMP_S * 0.6
    assert breaker.admits()
    clock.now_s += RAMP_S
    assert breaker.share == 1.0


@pytest.mark.parametrize("problem", [StoreProblem.FULL, StoreProblem.READ_ONLY])
def test_a_store_that_stays_full_is_tried_less_and_less(breaker: Breaker, clock: Clock, problem: StoreProblem) -> None:
    assert breaker.may_write
    full, waited = StoreError(problem, "no room"), list[float]()
    for _ in range(7):
        for _ in range(FAILURES + 1):  # several were under way
            assert not breaker.failed(full, "write")
        assert (breaker.closed, breaker.problem, breaker.refusal) == (True, "no room", "no room")
        began_s = clock.now_s
        while not breaker.may_write:
            clock.now_s += 0.25
        waited.append(clock.now_s - began_s)
        breaker.worked("fetch")
        assert (breaker.problem, breaker.refusal) == ("no room", "no room"), "it has taken none since"
    assert waited == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    breaker.worked("write")
    assert (breaker.problem, breaker.refusal) == ("", "")
    breaker.failed(full, "write")
    clock.now_s += breakers.FIRST_WRITE_PAUSE_S
    assert breaker.may_write, "it has taken writes since"


def test_why_a_store_takes_no_writes_is_not_mixed_with_what_else_fails(breaker: Breaker) -> None:
    breaker.failed(StoreError(StoreProblem.FULL, "no room"), "write")
    breaker.failed(AWAY, "fetch")
    assert (breaker.problem, breaker.refusal) == ("refused", "no room")
    breaker.worked("fetch")
    assert (breaker.problem, breaker.refusal) == ("no room", "no room")


def test_health_has_the_store_s_own_trouble_while_its_calls_work(tmp_path: Path) -> None:
    store = MemoryStore()
    tier = SharedTier(SharedSettings(store, Naming("default", b""), ValueForm(None), tmp_path), {}, lambda: None)
    assert tier.reasons() == []
    store.trouble = "files cannot be removed"
    assert tier.reasons() == ["the shared store memory://test: files cannot be removed"]
    tier.access.breaker.failed(StoreError(StoreProblem.DENIED, "it rejects us"))
    assert tier.reasons() == ["the shared store memory://test is away: it rejects us"]


@played
async def test_look_ups_that_fail_as_they_begin_leave_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, chain = MemoryStore(), chain_of("x", 4)
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    a.store(a.namespace(), chain)
    await a.sent()
    with monkeypatch.context() as patch:
        patch.setattr(b.shared.access.presence, "unfetchable", lambda namespaces: 1 // 0)
        for number in range(MAX_BEGUN):
            with pytest.raises(ZeroDivisionError):
                b.below.wait([b.namespace()], chain_of(number, 2), [0], lambda: None)
    assert await b.look_up([b.namespace()], chain) == 4
    for one in (a, b):
        await one.close()


@played
async def test_a_look_up_that_cannot_be_taken_in_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, chain = MemoryStore(), chain_of("x", 4)
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    a.store(a.namespace(), chain)
    await a.sent()
    with monkeypatch.context() as patch:
        patch.setattr(b.shared.access.presence, "claimed", lambda *found: 1 // 0)
        assert await b.look_up([b.namespace()], chain) == 0
    assert await b.look_up([b.namespace()], chain) == 4
    for one in (a, b):
        await one.close()
