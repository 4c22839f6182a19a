"""Faults 8, 15, 23, 30, 33, 46: daemons that die, hang, are late, come back. Misses, then hits again."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from chains import chain_of
from fault_blocks import spec_of
from fault_engine import Engine
from fault_processes import Child, Daemon
from fault_relay import HELD, Relay, at_once
from waiting import wait_until

from tiercache.errors import DaemonUnavailable, DeadlineExceeded, TierCacheError
from tiercache.protocol import messages as m

SPEC = spec_of(64 << 10)
ANSWER_S = 5.0
GIVEN_BACK_S = 5.0
"""Well below the 10 s after which the client's leases expire by themselves."""


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch, daemon: Daemon, closing: ExitStack) -> Relay:
    """A relay before the daemon. Clients do not wait at their end for what it keeps from them."""
    monkeypatch.setattr("tiercache.client.keeper.CLOSE_S", 0.1)
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
    engine, keys = engine_of(daemon, SPEC), chain_of("before", 20)
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
    engine, keys = engine_of(daemon, SPEC), chain_of("before", 20)
    engine.store(keys)
    daemon.stop()
    with engine.hurried():
        misses(engine, keys)
    misses(engine, keys)
    daemon.go_on()
    wait_until(lambda: engine.connector.available, "the client has found the daemon again")
    assert engine.load(keys) == 20, "it was only asleep"


def test_15_a_daemon_that_hangs_and_then_dies(daemon: Daemon, engine_of: Callable[..., Engine]) -> None:
    engine, keys = engine_of(daemon, SPEC), chain_of("before", 20)
    engine.store(keys)
    daemon.stop()
    with engine.hurried():
        misses(engine, keys)
    daemon.restart()
    comes_back(engine, keys)


def test_15_the_daemon_dies_between_match_and_load(daemon: Daemon, engine_of: Callable[..., Engine]) -> None:
    engine, keys = engine_of(daemon, SPEC), chain_of("before", 20)
    engine.store(keys)
    match = engine.connector.match(keys)
    assert match.blocks == 20
    daemon.restart()
    assert engine.load_match(match, keys) == 0, "no daemon could confirm these blocks"
    comes_back(engine, keys)


def test_15_the_daemon_hangs_between_match_and_load(daemon: Daemon, engine_of: Callable[..., Engine]) -> None:
    """The bytes can be copied, but the daemon does not confirm that they are good."""
    engine, keys = engine_of(daemon, SPEC), chain_of("before", 20)
    engine.store(keys)
    match = engine.connector.match(keys)
    daemon.stop()
    with engine.hurried():
        assert engine.load_match(match, keys) == 0
    daemon.go_on()
    wait_until(lambda: engine.connector.available, "the client has found the daemon again")
    wait_until(lambda: daemon.stats()["leases"]["read"] == 0, "the lease was given back late", GIVEN_BACK_S)
    assert engine.load(keys) == 20


def test_15_an_engine_starts_without_its_cache(engine_of: Callable[..., Engine], closing: ExitStack) -> None:
    daemon = Daemon("--arena", "16MiB", "--region", "4MiB")
    closing.callback(daemon.close)
    keys = chain_of("early", 8)
    engine = engine_of(daemon.run_dir, SPEC, required=False)
    misses(engine, keys)
    daemon.start()
    comes_back(engine, keys)


def test_30_an_idle_client_is_not_forgotten(daemon: Daemon, engine_of: Callable[..., Engine]) -> None:
    """Restarted twice without one call of the engine in between."""
    engine, keys = engine_of(daemon, SPEC), chain_of("idle", 8)
    for _ in range(2):
        downs = engine.connector.counters["times_down"]
        daemon.kill()
        wait_until(lambda d=downs: engine.connector.counters["times_down"] > d, "it notices without a call")
        daemon.start()
        wait_until(lambda: engine.connector.available, "it comes back without a call")
    comes_back(engine, keys)


def test_30_a_client_outlives_a_daemon_of_another_shape(daemon: Daemon, engine_of: Callable[..., Engine]) -> None:
    """Other regions, another arena: nothing of the old life is taken for the new one."""
    engine, other, keys = engine_of(daemon, SPEC), engine_of(daemon, spec_of(8192, rank=1)), chain_of("shape", 20)
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


def test_46_a_daemon_that_is_always_a_little_late_does_not_flap(relay: Relay, engine_of: Callable[..., Engine]) -> None:
    """Every answer takes one and a half deadlines: the engine pays for one, and then the cache stays away."""
    engine, keys = engine_of(relay.run_dir, SPEC), chain_of("late", 4)
    assert engine.store(keys).stored == 4
    before = engine.connector.counters
    relay.delays = lambda request: [0.3]
    paid = calls = 0
    with engine.hurried(0.2):
        end_s = time.monotonic() + 2
        while calls <= 100 or time.monotonic() < end_s:
            paid += engine.connector.available
            calls += 1
            assert engine.load(keys) == 0
    after = engine.connector.counters
    assert after["times_up"] == before["times_up"], "three good pings in a row bring it up, and there are none"
    assert after["times_down"] == before["times_down"] + 1
    assert paid == 1, "the other calls were misses at once"
    relay.delays = at_once
    wait_until(lambda: engine.connector.available, "a daemon that is in time again is used again")
    wait_until(lambda: engine.load(keys) == 4, "there are hits again")


def test_46_a_daemon_that_runs_a_moment_now_and_then_does_not_flap(
    daemon: Daemon, engine_of: Callable[..., Engine]
) -> None:
    """Pings succeed, but requests time out: after each such failure the client waits longer before the next try."""
    engine, keys = engine_of(daemon, SPEC), chain_of("now and then", 4)
    assert engine.store(keys).stored == 4
    ups = engine.connector.counters["times_up"]
    with engine.hurried(0.1):
        end_s = time.monotonic() + 2.5
        while time.monotonic() < end_s:
            daemon.stop()
            moment_s = time.monotonic() + 0.11
            while time.monotonic() < moment_s:
                engine.load(keys)
            daemon.go_on()
            moment_s = time.monotonic() + 0.08
            while time.monotonic() < moment_s:
                engine.load(keys)
    # 0.05 s, doubling: the first six pauses are 2.4 s at least.
    assert engine.connector.counters["times_up"] - ups <= 6
    wait_until(lambda: engine.load(keys) == 4, "there are hits again")


def test_8_a_late_answer_is_not_the_next_ones(relay: Relay, engine_of: Callable[..., Engine]) -> None:
    """Calls that time out, and whose answers come while others are asked."""
    engine = engine_of(relay.run_dir, SPEC)
    chains = [chain_of(f"late {number}", number + 1) for number in range(4)]
    for keys in chains:
        assert engine.store(keys).dropped == 0
    for number, keys in enumerate(chains):
        relay.delays = lambda request: [HELD] if isinstance(request, m.Match) else [0.0]
        with engine.hurried(0.15):
            assert engine.load(keys) == 0
        relay.delays = at_once
        relay.let_go()
        wait_until(lambda: engine.connector.available, "the client has found the daemon again")
        after = (number + 1) % len(chains)
        expected = len(chains[after]) // 16
        assert engine.load(chains[after]) == expected, "the answer to another request was used"


def test_8_a_call_after_a_timeout_gets_its_own_answer(
    relay: Relay, engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the connector: the same session goes on asking, and answers come in the wrong order, or twice."""
    engine = engine_of(relay.run_dir, SPEC)
    session = engine.connector.client.session()
    keys = [chain_of(f"k{number}", number + 1) for number in range(10)]
    for chained in keys:
        engine.store(chained)
    number = session.namespace_id(SPEC)
    # What a client would do about a missed deadline is not the point.
    monkeypatch.setattr(engine.connector.client._keeper, "session_failed", lambda *_: None)
    for turn in range(20):
        slow, fast = keys[turn % 10], keys[(turn + 3) % 10]
        relay.delays = lambda request, slow=slow: (
            [HELD, HELD] if isinstance(request, m.Match) and request.keys == slow else [0.0, 0.03]
        )
        with pytest.raises(DeadlineExceeded):
            session.call(m.Match, m.Matched, 0.05, namespaces=[number], keys=slow)
        relay.let_go()
        for _ in range(3):
            got = session.call(m.Match, m.Matched, 5.0, namespaces=[number], keys=fast)
            assert got.dram_blocks == len(fast) // 16


def test_8_a_grant_that_comes_too_late_is_given_back(
    relay: Relay, daemon: Daemon, engine_of: Callable[..., Engine]
) -> None:
    engine, keys = engine_of(relay.run_dir, SPEC), chain_of("granted", 4)
    engine.store(keys)
    relay.delays = lambda request: [HELD] if isinstance(request, m.Match | m.Reserve) else [0.0]
    with engine.hurried(0.15):
        assert engine.load(keys) == 0
    relay.let_go()
    wait_until(lambda: daemon.stats()["leases"]["read"] == 0, "the lease of the late match is given back", GIVEN_BACK_S)
    wait_until(lambda: engine.connector.available, "the client has found the daemon again")
    with engine.hurried(0.15):
        assert engine.store(chain_of("other", 4)).stored == 0
    relay.let_go()
    wait_until(lambda: daemon.stats()["leases"]["write"] == 0, "the late reservation is given back", GIVEN_BACK_S)
    wait_until(lambda: daemon.stats()["leases"]["quarantined"] == 0, "and its frames with it", GIVEN_BACK_S)
    assert daemon.stats()["arena"]["used_bytes"] == 4 * SPEC.block_bytes


LOST = [m.Match, m.Resolve, m.Release, m.Commit, m.Abort, m.Renew, pytest.param(m.Reserve, marks=pytest.mark.stress)]
"""A reservation whose answer was lost blocks its keys until it expires, which takes 10 s."""


@pytest.mark.parametrize("lost", LOST)
def test_23_a_reply_that_never_comes_is_a_miss(
    relay: Relay, daemon: Daemon, engine_of: Callable[..., Engine], lost: type[m.Request]
) -> None:
    """Nothing wrong, nothing stuck, and the chain can be stored and found in the end."""
    engine = engine_of(relay.run_dir, SPEC, blocks=128)
    keys = chain_of("lost", 100)
    engine.store(keys[: 90 * 16])
    relay.delays = lambda request: [] if isinstance(request, lost) else [0.0]
    lost_to_loads = lost in (m.Match, m.Resolve, m.Release)
    with ExitStack() as hurry:
        if lost_to_loads:
            hurry.enter_context(engine.hurried(0.15))
        assert engine.load(keys) == (0 if lost_to_loads else 90)
        if not lost_to_loads:
            hurry.enter_context(engine.hurried(0.15))
        engine.store(keys)
        relay.delays = at_once
    wait_until(lambda: engine.connector.available, "the client has found the daemon again")
    wait_until(lambda: engine.store(keys) and engine.load(keys) == 100, "the chain is there in the end", 60)
    assert daemon.stats()["health"]["state"] == "ok"


def test_33_an_engine_gives_up_on_a_slow_load(relay: Relay, engine_of: Callable[..., Engine]) -> None:
    """A load has its own deadline: past it no copy begins, and the rest is a miss."""
    engine = engine_of(relay.run_dir, SPEC, blocks=256)
    keys = chain_of("slow", 200)
    engine.store(keys)
    match = engine.connector.match(keys)
    relay.delays = lambda request: [0.3] if isinstance(request, m.Resolve) else [0.0]
    good = engine.load_match(match, keys, timeout_s=0.2)
    assert good <= 64, "blocks that were in DRAM at the match may be good"
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
