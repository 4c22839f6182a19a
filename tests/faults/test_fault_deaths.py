"""Faults 8, 15, 28, 30, 33, 45, 46: daemons that die, hang, are late, come back. Misses, then hits again."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from fault_blocks import chain, spec_of
from fault_engine import Engine
from fault_peer import NoAnswer, Peer
from fault_processes import Child, Daemon, state_of, wait_until
from fault_relay import Relay, at_once

from tiercache import messages as m
from tiercache.config import control_endpoint, session_socket_path
from tiercache.errors import DaemonUnavailable, DeadlineExceeded, TierCacheError

SPEC = spec_of(64 << 10)
ANSWER_S = 5.0
GIVEN_BACK_S = 5.0
"""Well below the 10 s after which the client's leases run out by themselves."""


@pytest.fixture
def relay(daemon: Daemon, closing: ExitStack) -> Relay:
    """A relay before the daemon."""
    return closing.enter_context(Relay(daemon.run_dir))


def misses(engine: Engine, keys: bytes) -> None:
    """Every call of an engine whose cache is away is a miss, and none raises or hangs."""
    started_s = time.monotonic()
    assert engine.load(keys) == 0
    result = engine.store(keys)
    count = len(keys) // 16
    assert result == (0, 0, count, False)
    assert engine.connector.prefetch(keys) == 0
    assert engine.connector.pin(keys, ttl_s=1) == 0
    assert engine.connector.unpin(keys) == 0
    assert engine.connector.store_async(keys, engine.write(keys)).result(ANSWER_S) == (0, 0, count, False)
    assert engine.connector.load_async(engine.connector.match(keys), []).result(ANSWER_S) == 0
    assert engine.connector.stats()["daemon"] == {}
    with pytest.raises(DaemonUnavailable):
        engine.connector.flush()
    assert time.monotonic() - started_s < ANSWER_S, "an engine waits for a cache that is away"


def comes_back(engine: Engine, keys: bytes) -> None:
    """Without a new connector there are hits again."""
    wait_until(lambda: engine.connector.available, "the client has found the daemon again")
    count = len(keys) // 16
    wait_until(lambda: engine.store(keys).dropped == 0, "stores are taken again")
    assert engine.load(keys) == count


def test_15_30_a_killed_daemon_is_a_miss_and_its_restart_a_hit(
    daemon: Daemon, engine_of: Callable[..., Engine]
) -> None:
    engine, keys = engine_of(daemon, SPEC), chain("before", 20)
    for _ in range(3):
        engine.store(keys)
        assert engine.load(keys) == 20
        daemon.kill()
        misses(engine, keys)
        wait_until(lambda: not engine.connector.available, "the client knows that it is down")
        misses(engine, keys)
        daemon.start()
        wait_until(lambda: engine.connector.available, "the client has found the daemon again")
        assert engine.load(keys) == 0, "the new daemon has nothing yet"
        comes_back(engine, keys)


def test_15_a_daemon_that_hangs_is_a_miss_and_wakes_with_its_blocks(
    daemon: Daemon, engine_of: Callable[..., Engine]
) -> None:
    engine, keys = engine_of(daemon, SPEC), chain("before", 20)
    engine.store(keys)
    daemon.stop()
    misses(engine, keys)
    misses(engine, keys)
    daemon.go_on()
    wait_until(lambda: engine.connector.available, "the client has found the daemon again")
    assert engine.load(keys) == 20, "it was only asleep"


def test_15_a_daemon_that_hangs_and_then_dies(daemon: Daemon, engine_of: Callable[..., Engine]) -> None:
    engine, keys = engine_of(daemon, SPEC), chain("before", 20)
    engine.store(keys)
    daemon.stop()
    misses(engine, keys)
    daemon.restart()
    comes_back(engine, keys)


def test_15_the_daemon_dies_between_match_and_load(daemon: Daemon, engine_of: Callable[..., Engine]) -> None:
    engine, keys = engine_of(daemon, SPEC), chain("before", 20)
    engine.store(keys)
    match = engine.connector.match(keys)
    assert match.blocks == 20
    daemon.restart()
    assert engine.load_match(match, keys) == 0, "nobody could say that these blocks were good"
    comes_back(engine, keys)


def test_15_the_daemon_hangs_between_match_and_load(daemon: Daemon, engine_of: Callable[..., Engine]) -> None:
    """The bytes can be copied, and still nobody says that they are good."""
    engine, keys = engine_of(daemon, SPEC), chain("before", 20)
    engine.store(keys)
    match = engine.connector.match(keys)
    daemon.stop()
    assert engine.load_match(match, keys) == 0
    daemon.go_on()
    wait_until(lambda: engine.connector.available, "the client has found the daemon again")
    wait_until(lambda: daemon.stats()["leases"]["read"] == 0, "the lease was given back late", GIVEN_BACK_S)
    assert engine.load(keys) == 20


def test_15_an_engine_starts_without_its_cache(tmp_path: Path, engine_of: Callable[..., Engine], closing: ExitStack) -> None:
    daemon = Daemon("--arena", "16MiB", "--region", "4MiB")
    closing.callback(daemon.close)
    keys = chain("early", 8)
    engine = engine_of(daemon.run_dir, SPEC, required=False)
    misses(engine, keys)
    daemon.start()
    comes_back(engine, keys)


def test_30_an_idle_client_is_not_forgotten(daemon: Daemon, engine_of: Callable[..., Engine]) -> None:
    """Restarted twice without one call of the engine in between."""
    engine, keys = engine_of(daemon, SPEC), chain("idle", 8)
    for _ in range(2):
        downs = engine.connector.counters["times_down"]
        daemon.kill()
        wait_until(lambda d=downs: engine.connector.counters["times_down"] > d, "it notices without a call")
        daemon.start()
        wait_until(lambda: engine.connector.available, "it comes back without a call")
    comes_back(engine, keys)


def test_30_a_client_outlives_a_daemon_of_another_shape(
    daemon: Daemon, engine_of: Callable[..., Engine]
) -> None:
    """Other regions, another arena: nothing of the old life is taken for the new one."""
    engine, other, keys = engine_of(daemon, SPEC), engine_of(daemon, spec_of(8192, rank=1)), chain("shape", 20)
    engine.store(keys)
    daemon.kill()
    daemon.flags = ("--arena", "6MiB", "--region", "2MiB")
    daemon.start()
    comes_back(other, keys)  # so that the namespaces have other numbers now
    comes_back(engine, keys)
    assert other.load(keys) == 20


def test_46_the_memory_of_a_killed_daemon_is_let_go(daemon: Daemon, start_child: Callable[..., Child]) -> None:
    child = start_child("engine", daemon, block_bytes=SPEC.block_bytes)
    child.do("store", seed="x", blocks=4)
    assert child.do("load", seed="x", blocks=4) == 4
    assert child.do("mapped_regions") == 4
    daemon.kill()
    wait_until(lambda: child.do("mapped_regions") == 0, "the dead daemon's regions are unmapped")
    daemon.start()
    wait_until(lambda: child.do("available"), "the client has found the daemon again")
    wait_until(lambda: child.do("mapped_regions") == 4, "the new ones are mapped")
    child.do("store", seed="x", blocks=4)
    assert child.do("load", seed="x", blocks=4) == 4


def test_46_the_memory_goes_though_a_match_is_held(daemon: Daemon, start_child: Callable[..., Child]) -> None:
    child = start_child("engine", daemon, block_bytes=SPEC.block_bytes)
    child.do("store", seed="x", blocks=4)
    assert child.do("hold", seed="x", blocks=4) == 4
    daemon.kill()
    wait_until(lambda: child.do("mapped_regions") == 0, "the dead daemon's regions are unmapped")
    assert child.do("load_held", seed="x") == 0


def test_46_a_daemon_that_is_always_a_little_late_does_not_flap(
    relay: Relay, engine_of: Callable[..., Engine]
) -> None:
    """Every answer takes 1.1 deadlines: one of them is paid, and then the cache is away, steadily."""
    engine = engine_of(relay.run_dir, SPEC, request_timeout_s=0.2)
    keys = chain("late", 4)
    engine.store(keys)
    before = engine.connector.counters
    relay.delays = lambda request: [0.22]
    end_s = time.monotonic() + 2
    paid = calls = 0
    while time.monotonic() < end_s:
        paid += engine.connector.available
        calls += 1
        assert engine.load(keys) == 0
    after = engine.connector.counters
    assert after["times_up"] == before["times_up"], "three good pings in a row bring it up, and there are none"
    assert after["times_down"] == before["times_down"] + 1
    assert paid == 1
    assert calls > 100, "the other calls were misses at once"
    relay.delays = at_once
    wait_until(lambda: engine.connector.available, "a daemon that is in time again is used again")
    wait_until(lambda: engine.load(keys) == 4, "there are hits again")


def test_46_a_daemon_that_runs_a_moment_now_and_then_does_not_flap(
    daemon: Daemon, engine_of: Callable[..., Engine]
) -> None:
    """Good pings get through while it runs; each time that they prove wrong the next try is later."""
    engine = engine_of(daemon, SPEC, request_timeout_s=0.1)
    keys = chain("now and then", 4)
    engine.store(keys)
    ups = engine.connector.counters["times_up"]
    good = 0
    end_s = time.monotonic() + 2.5
    while time.monotonic() < end_s:
        daemon.stop()
        moment_s = time.monotonic() + 0.11
        while time.monotonic() < moment_s:
            good += engine.load(keys)
        daemon.go_on()
        moment_s = time.monotonic() + 0.03
        while time.monotonic() < moment_s:
            good += engine.load(keys)
    # 0.05 s, doubling: the first six pauses are 2.4 s at least.
    assert engine.connector.counters["times_up"] - ups <= 6
    wait_until(lambda: engine.load(keys) == 4, "there are hits again")


def test_8_a_late_answer_is_not_the_next_ones(relay: Relay, engine_of: Callable[..., Engine]) -> None:
    """Calls that time out, and whose answers come while others are asked."""
    engine = engine_of(relay.run_dir, SPEC, request_timeout_s=0.15)
    chains = [chain(f"late {number}", number + 1) for number in range(5)]
    for keys in chains:
        assert engine.store(keys).dropped == 0
    for number, keys in enumerate(chains):
        relay.delays = lambda request: [0.2] if isinstance(request, m.Match) else [0.0]
        assert engine.load(keys) == 0
        relay.delays = at_once
        wait_until(lambda: engine.connector.available, "the client has found the daemon again")
        after = (number + 1) % len(chains)
        expected = len(chains[after]) // 16
        assert engine.load(chains[after]) == expected, "an answer to another question was taken"


def test_8_a_call_after_a_timeout_gets_its_own_answer(relay: Relay, engine_of: Callable[..., Engine]) -> None:
    """Below the connector: the same session asks on, and answers come in the wrong order, or twice."""
    engine = engine_of(relay.run_dir, SPEC)
    session = engine.connector.client.session()
    keys = [chain(f"k{number}", number + 1) for number in range(10)]
    for chained in keys:
        engine.store(chained)
    number = session.namespace_id(SPEC)
    session.on_trouble = lambda *_: None  # what a client would do about a missed deadline is not the point
    for turn in range(30):
        slow, fast = keys[turn % 10], keys[(turn + 3) % 10]
        relay.delays = lambda request, slow=slow: (
            [0.06, 0.0601] if isinstance(request, m.Match) and request.keys == slow else [0.0, 0.03]
        )
        with pytest.raises(DeadlineExceeded):
            session.call(m.Match, m.Matched, 0.05, namespaces=[number], keys=slow)
        for _ in range(3):
            got = session.call(m.Match, m.Matched, 5.0, namespaces=[number], keys=fast)
            assert got.dram_blocks == len(fast) // 16


def test_8_a_grant_that_comes_too_late_is_given_back(
    relay: Relay, daemon: Daemon, engine_of: Callable[..., Engine]
) -> None:
    engine, keys = engine_of(relay.run_dir, SPEC, request_timeout_s=0.15), chain("granted", 4)
    engine.store(keys)
    relay.delays = lambda request: [0.2] if isinstance(request, m.Match | m.Reserve) else [0.0]
    assert engine.load(keys) == 0
    wait_until(lambda: daemon.stats()["leases"]["read"] == 0, "the lease of the late match is given back", GIVEN_BACK_S)
    wait_until(lambda: engine.connector.available, "the client has found the daemon again")
    assert engine.store(chain("other", 4)).stored == 0
    wait_until(lambda: daemon.stats()["leases"]["write"] == 0, "the late reservation is given back", GIVEN_BACK_S)
    wait_until(lambda: daemon.stats()["leases"]["quarantined"] == 0, "and its frames with it", GIVEN_BACK_S)
    assert daemon.stats()["arena"]["used_bytes"] == 4 * SPEC.block_bytes


LOST = [m.Match, m.Resolve, m.Release, m.Commit, m.Abort, m.Renew, pytest.param(m.Reserve, marks=pytest.mark.slow)]
"""A reservation that nobody heard of is in the way until it expires, which takes 10 s."""


@pytest.mark.parametrize("lost", LOST)
def test_23_a_reply_that_never_comes_is_a_miss(
    relay: Relay, daemon: Daemon, engine_of: Callable[..., Engine], lost: type[m.Request]
) -> None:
    """Nothing wrong, nothing stuck, and the chain can be stored and found in the end."""
    engine = engine_of(relay.run_dir, SPEC, blocks=128, request_timeout_s=0.15)
    keys = chain("lost", 100)
    engine.store(keys[: 90 * 16])
    relay.delays = lambda request: [] if isinstance(request, lost) else [0.0]
    loaded = engine.load(keys)
    assert loaded == (0 if lost in (m.Match, m.Resolve, m.Release) else 90)
    engine.store(keys)
    relay.delays = at_once
    wait_until(lambda: engine.connector.available, "the client has found the daemon again")
    wait_until(lambda: engine.store(keys) and engine.load(keys) == 100, "the chain is there in the end", 20)
    assert daemon.stats()["health"]["state"] == "ok"


# --- 28: another life ------------------------------------------------------------------------------


def test_28_requests_of_a_former_life_are_refused(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    """A DEALER keeps what was sent to a dead daemon, and brings it to the next one."""
    old, keys = connect(daemon), chain("former", 3)
    old.store(SPEC, keys)
    daemon.kill()
    flush = old.post(m.Flush, tier="all", namespaces=[], key=b"", deadline_s=60)
    match = old.post(m.Match, namespaces=[1], keys=keys, ttl_ms=60_000, deadline_s=60)
    daemon.start()
    new = connect(daemon)
    new.store(SPEC, keys)
    for request_id in (flush, match):
        reply, _ = old.answer_to(request_id, 15)
        assert isinstance(reply, m.Error)
        assert reply.code == m.ErrorCode.STALE_GENERATION.value
        assert reply.generation == new.welcome.generation != old.welcome.generation
    assert new.load(SPEC, keys) == 3, "the old life's flush did nothing"
    assert daemon.stats()["leases"]["read"] == 0
    stale = new.ask(m.Flush, generation=old.welcome.generation, tier="all", namespaces=[], key=b"")
    assert stale.code == m.ErrorCode.STALE_GENERATION.value
    assert new.load(SPEC, keys) == 3


def test_28_a_session_of_a_former_life_is_unknown(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    old = connect(daemon)
    daemon.restart()
    new = connect(daemon)
    reply = new.ask(m.Ping, session=old.welcome.session)
    assert reply.code == m.ErrorCode.UNKNOWN_SESSION.value


def test_28_leases_of_a_former_life_are_nothing(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    old, keys = connect(daemon), chain("former", 3)
    old.store(SPEC, keys)
    read = old.match(SPEC, keys, ttl_ms=60_000).lease
    write = old.reserve(SPEC, chain("more", 2)).lease
    daemon.restart()
    new = connect(daemon, instance=old.instance)
    new.register(SPEC)
    assert not new.ask(m.Release, lease=read).good
    assert new.commit(write, [0, 1]) == [m.CommitState.DROPPED] * 2
    assert list(new.ask(m.Renew, leases=[read, write], ttl_ms=1000).alive) == [0, 0]
    assert new.length(SPEC, keys) == 0


# --- 45: a daemon that stands still ------------------------------------------------------------------


def asleep(daemon: Daemon, seconds: float) -> None:
    """Stop the daemon for a time that is itself the point."""
    daemon.stop()
    end_s = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > end_s, "the time has passed", seconds + 1)
    assert state_of(daemon.pid) == "T"
    daemon.go_on()


def test_45_leases_do_not_expire_while_the_daemon_stands_still(
    daemon: Daemon, connect: Callable[..., Peer]
) -> None:
    peer, other, keys = connect(daemon), connect(daemon), chain("still", 4)
    peer.store(SPEC, keys)
    read = peer.match(SPEC, keys, ttl_ms=500).lease
    reserved = peer.reserve(SPEC, chain("being written", 3), ttl_ms=500)
    indices = peer.fill(SPEC, chain("being written", 3), reserved)
    assert other.ask(m.Pin, namespaces=[other.register(SPEC)], keys=keys, ttl_ms=500).blocks == 4
    asleep(daemon, 1.2)
    stats = other.stats()
    assert stats["counters"]["leases_expired"] == 0
    assert stats["pins"]["count"] == 1
    assert peer.ask(m.Release, lease=read).good
    assert peer.commit(reserved.lease, indices) == [m.CommitState.VISIBLE] * 3
    assert peer.load(SPEC, chain("being written", 3)) == 3


def test_45_renewals_in_the_queue_are_read_before_leases_are_judged(
    daemon: Daemon, connect: Callable[..., Peer]
) -> None:
    peer, keys = connect(daemon), chain("queue", 4)
    peer.store(SPEC, keys)
    leases = [peer.match(SPEC, keys, ttl_ms=400).lease for _ in range(20)]
    daemon.stop()
    renewals = [peer.post(m.Renew, leases=[lease], ttl_ms=30_000, deadline_s=60) for lease in leases]
    end_s = time.monotonic() + 0.8
    wait_until(lambda: time.monotonic() > end_s, "twice the lease")
    daemon.go_on()
    assert all(list(peer.answer_to(request_id)[0].alive) == [1] for request_id in renewals)
    assert all(peer.ask(m.Release, lease=lease).good for lease in leases)


def test_45_requests_whose_callers_have_gone_are_not_worked_through(
    daemon: Daemon, connect: Callable[..., Peer]
) -> None:
    peer, keys = connect(daemon), chain("gone", 4)
    peer.store(SPEC, keys)
    number = peer.register(SPEC)
    daemon.stop()
    gone = [
        peer.post(m.Match, namespaces=[number], keys=keys, ttl_ms=30_000, deadline_s=0.05) for _ in range(50)
    ]
    gone.append(peer.post(m.Flush, tier="all", namespaces=[], key=b"", deadline_s=0.05))
    live = peer.post(m.Match, namespaces=[number], keys=keys, deadline_s=60)
    end_s = time.monotonic() + 0.3
    wait_until(lambda: time.monotonic() > end_s, "their deadlines have passed")
    daemon.go_on()
    for request_id in gone:
        reply, _ = peer.answer_to(request_id)
        assert isinstance(reply, m.Error)
        assert reply.code == m.ErrorCode.EXPIRED.value
    assert peer.answer_to(live)[0].dram_blocks == 4, "the flush that nobody waits for was not done"
    stats = peer.stats()
    assert stats["leases"]["read"] == 0
    assert stats["counters"]["requests_expired"] == 51


def test_45_an_engine_keeps_its_match_through_a_standstill(
    daemon: Daemon, engine_of: Callable[..., Engine]
) -> None:
    """The client is down for a while and its renewals are lost; the lease is there when it is back."""
    engine, keys = engine_of(daemon, SPEC), chain("kept", 6)
    engine.store(keys)
    match = engine.connector.match(keys)
    daemon.stop()
    assert engine.connector.match(keys).blocks == 0
    wait_until(lambda: not engine.connector.available, "the client is down")
    daemon.go_on()
    wait_until(lambda: engine.connector.available, "the client has found the daemon again")
    assert engine.load_match(match, keys) == 6


# --- 20, 21: leases and pins that end ------------------------------------------------------------------


def test_20_a_stopped_client_does_not_hold_its_leases_for_ever(
    daemon: Daemon, connect: Callable[..., Peer], start_child: Callable[..., Child]
) -> None:
    child, other, spec = start_child("peer", daemon, block_bytes=256 << 10), connect(daemon), spec_of(256 << 10)
    child.do("store", seed="held", blocks=60)
    held = child.do("hold", seed="held", blocks=60, ttl_ms=300)
    assert held["blocks"] == 60
    child.stop()
    assert len(other.store(spec, chain("early", 64))) == 4, "held, while the lease lasts"
    wait_until(lambda: len(other.store(spec, chain(time.monotonic(), 64))) == 64, "all frames can be had")
    assert daemon.stats()["leases"]["read"] == 0
    child.go_on()
    assert not child.do("release"), "what it copied meanwhile is worth nothing"


def test_20_a_stopped_engine_does_not_either(
    start_daemon: Callable[..., Daemon], engine_of: Callable[..., Engine], start_child: Callable[..., Child]
) -> None:
    """Its renewals stop with it. After SIGCONT its match is a miss, and all goes on."""
    daemon = start_daemon("--arena", "16MiB", "--region", "4MiB", "--lease-ttl-max", "500ms")
    child = start_child("engine", daemon, block_bytes=256 << 10)
    engine = engine_of(daemon, spec_of(256 << 10))
    child.do("store", seed="held", blocks=60)
    assert child.do("hold", seed="held", blocks=60) == 60
    child.stop()
    wait_until(lambda: engine.store(chain(time.monotonic(), 64)).stored == 64, "all frames can be had")
    child.go_on()
    assert child.do("load_held", seed="held") == 0
    child.do("store", seed="held", blocks=60)
    assert child.do("load", seed="held", blocks=60) == 60


def test_20_a_dead_client_holds_nothing(
    daemon: Daemon, connect: Callable[..., Peer], start_child: Callable[..., Child]
) -> None:
    child, other, spec = start_child("peer", daemon, block_bytes=256 << 10), connect(daemon), spec_of(256 << 10)
    child.do("store", seed="held", blocks=60)
    child.do("hold", seed="held", blocks=60, ttl_ms=60_000)
    child.kill()
    wait_until(lambda: len(other.store(spec, chain(time.monotonic(), 64))) == 64, "all frames can be had")


def test_20_a_lease_lives_as_long_as_it_is_renewed(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    peer, other, keys = connect(daemon), connect(daemon), chain("renewed", 4)
    peer.store(SPEC, keys)
    lease = peer.match(SPEC, keys, ttl_ms=300).lease
    end_s = time.monotonic() + 1
    while time.monotonic() < end_s:
        assert list(peer.ask(m.Renew, leases=[lease], ttl_ms=300).alive) == [1]
        other.store(SPEC, chain(time.monotonic(), 300))
    assert peer.ask(m.Release, lease=lease).good
    assert list(peer.ask(m.Renew, leases=[lease], ttl_ms=300).alive) == [0]


def test_21_a_pin_holds_until_its_time_and_not_longer(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    peer, keys, spec = connect(daemon), chain("pinned", 8), spec_of(256 << 10)
    peer.store(spec, keys)
    number = peer.register(spec)
    assert peer.ask(m.Pin, namespaces=[number], keys=keys, ttl_ms=700).blocks == 8
    for _ in range(4):
        assert len(peer.store(spec, chain(time.monotonic(), 64))) == 56
    assert peer.load(spec, keys) == 8
    wait_until(lambda: peer.stats()["pins"]["count"] == 0, "the pin is over")
    assert peer.stats()["pins"]["bytes"] == 0
    for _ in range(2):
        assert len(peer.store(spec, chain(time.monotonic(), 64))) == 64
    for _ in range(3):
        assert peer.length(spec, keys) == 0, "gone is gone"
    assert peer.ask(m.Unpin, namespaces=[number], keys=keys).blocks == 0


def test_21_an_expired_lease_is_a_miss_for_good(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    peer, keys = connect(daemon), chain("expired", 4)
    peer.store(SPEC, keys)
    number = peer.register(SPEC)
    lease = peer.match(SPEC, keys, ttl_ms=30).lease
    wait_until(lambda: peer.stats()["leases"]["read"] == 0, "the lease is over")
    for _ in range(2):
        reply = peer.ask(m.Resolve, lease=lease, namespace=number, first=0, count=4)
        assert isinstance(reply, m.Error)
        assert reply.code == m.ErrorCode.UNKNOWN_LEASE.value
        assert not peer.ask(m.Release, lease=lease).good
    assert peer.load(SPEC, keys) == 4, "the blocks themselves are still there"


# --- two lives at once ---------------------------------------------------------------------------------


def test_7_a_second_daemon_on_the_same_run_dir_is_refused(
    daemon: Daemon, connect: Callable[..., Peer], closing: ExitStack
) -> None:
    peer, keys = connect(daemon), chain("first", 4)
    peer.store(SPEC, keys)
    for _ in range(2):
        second = Daemon("--arena", "4MiB", run_dir=daemon.run_dir)
        closing.callback(second.close)
        assert second.launch().wait(20) == 2
        lines = second.log().splitlines()
        assert len(lines) == 1, second.log()
        assert f"pid {daemon.pid}" in lines[0]
        assert "--run-dir" in lines[0]
    assert peer.load(SPEC, keys) == 4
    assert connect(daemon).load(SPEC, keys) == 4, "the sockets are still the first one's"


def test_7_the_lock_of_a_stopped_daemon_is_a_lock(daemon: Daemon, closing: ExitStack) -> None:
    daemon.stop()
    second = Daemon("--arena", "4MiB", run_dir=daemon.run_dir)
    closing.callback(second.close)
    assert second.launch().wait(20) == 2
    daemon.go_on()
    assert daemon.stats()["daemon"]["pid"] == daemon.pid


def test_15_stale_sockets_are_replaced(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    paths = [session_socket_path(daemon.run_dir), Path(control_endpoint(Path(daemon.run_dir)).removeprefix("ipc://"))]
    daemon.kill()
    assert all(path.is_socket() for path in paths), "kill -9 leaves them"
    daemon.start()
    peer = connect(daemon)
    peer.store(SPEC, chain("again", 2))
    assert peer.load(SPEC, chain("again", 2)) == 2
    peer.close()
    assert daemon.terminate() == 0
    assert not any(path.exists() for path in paths), "SIGTERM takes them away"


def test_15_a_terminated_daemon_says_good_bye(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    peer = connect(daemon)
    peer.store(SPEC, chain("bye", 2))
    peer.reserve(SPEC, chain("open", 2))
    assert daemon.terminate() == 0
    assert peer.is_over()
    with pytest.raises(NoAnswer):
        peer.ask(m.Ping, timeout_s=0.1)


def test_10_a_reader_whose_session_was_lost_is_never_told_good(
    daemon: Daemon, connect: Callable[..., Peer], start_child: Callable[..., Child]
) -> None:
    child, other = start_child("peer", daemon, block_bytes=SPEC.block_bytes), connect(daemon)
    child.do("store", seed="read", blocks=4)
    child.do("hold", seed="read", blocks=4, ttl_ms=60_000)
    child.do("reconnect")
    wait_until(lambda: daemon.stats()["leases"]["read"] == 0, "the lost session's lease is over")
    other.store(SPEC, chain("pressure", 256))
    assert not child.do("release")


def test_33_an_engine_gives_up_on_a_slow_load(relay: Relay, engine_of: Callable[..., Engine]) -> None:
    """A load has its own deadline: past it no copy begins, and the rest is a miss."""
    engine = engine_of(relay.run_dir, SPEC, blocks=256, request_timeout_s=2.0, load_timeout_s=0.2)
    keys = chain("slow", 200)
    engine.store(keys)
    match = engine.connector.match(keys)
    relay.delays = lambda request: [0.3] if isinstance(request, m.Resolve) else [0.0]
    good = engine.load_match(match, keys)
    assert good in (0, 64), "what came with the match may be good"
    relay.delays = at_once
    assert engine.load(keys) == 200


def test_15_every_error_below_the_connector_is_one_of_ours(daemon: Daemon, engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(daemon, SPEC)
    client = engine.connector.client
    daemon.kill()
    with pytest.raises(TierCacheError):
        client.call(m.Ping)
    with pytest.raises(DaemonUnavailable):
        client.ping()
