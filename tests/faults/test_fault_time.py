"""Faults 20, 21, 45: leases and pins end when their time is up, and not because the daemon stood still."""

from __future__ import annotations

import time
from collections.abc import Callable

from chains import chain_of
from fault_blocks import spec_of
from fault_engine import Engine
from fault_peer import Peer
from fault_processes import Child, Daemon
from waiting import state_of, wait_until

from tiercache.protocol import messages as m

SPEC = spec_of(64 << 10)


def asleep(daemon: Daemon, seconds: float) -> None:
    """Stop the daemon for a time; the test is about that time."""
    daemon.stop()
    end_s = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > end_s, "the pause is over", seconds + 1)
    assert state_of(daemon.pid) == "T"
    daemon.go_on()


def test_45_leases_do_not_expire_while_the_daemon_stands_still(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    peer, other, keys = connect(daemon), connect(daemon), chain_of("still", 4)
    peer.store(SPEC, keys)
    read = peer.match(SPEC, keys, ttl_ms=2000).lease
    reserved = peer.reserve(SPEC, chain_of("being written", 3), ttl_ms=2000)
    indices = peer.fill(SPEC, chain_of("being written", 3), reserved)
    assert other.ask(m.Pin, namespaces=[other.register(SPEC)], keys=keys, ttl_ms=2000).blocks == 4
    asleep(daemon, 2.5)
    stats = other.stats()
    assert stats["counters"]["leases_expired"] == 0
    assert stats["pins"]["count"] == 1
    assert peer.ask(m.Release, lease=read).good
    assert peer.commit(reserved.lease, indices) == [m.CommitState.VISIBLE] * 3
    assert peer.load(SPEC, chain_of("being written", 3)) == 3


def test_45_renewals_in_the_queue_are_read_before_leases_are_judged(
    daemon: Daemon, connect: Callable[..., Peer]
) -> None:
    peer, keys = connect(daemon), chain_of("queue", 4)
    peer.store(SPEC, keys)
    leases = [peer.match(SPEC, keys, ttl_ms=1500).lease for _ in range(20)]
    daemon.stop()
    renewals = [peer.post(m.Renew, leases=[lease], ttl_ms=30_000, deadline_s=60) for lease in leases]
    end_s = time.monotonic() + 2
    wait_until(lambda: time.monotonic() > end_s, "more than the lease")
    daemon.go_on()
    assert all(list(peer.answer_to(request_id)[0].alive) == [1] for request_id in renewals)
    assert all(peer.ask(m.Release, lease=lease).good for lease in leases)


def test_45_requests_whose_callers_have_gone_are_not_worked_through(
    daemon: Daemon, connect: Callable[..., Peer]
) -> None:
    peer, keys = connect(daemon), chain_of("gone", 4)
    peer.store(SPEC, keys)
    number = peer.register(SPEC)
    daemon.stop()
    gone = [peer.post(m.Match, namespaces=[number], keys=keys, ttl_ms=30_000, deadline_s=0.05) for _ in range(50)]
    gone.append(peer.post(m.Flush, tier="all", namespaces=[], key=b"", deadline_s=0.05))
    live = peer.post(m.Match, namespaces=[number], keys=keys, deadline_s=60)
    end_s = time.monotonic() + 0.3
    wait_until(lambda: time.monotonic() > end_s, "their deadlines have passed")
    daemon.go_on()
    for request_id in gone:
        reply, _ = peer.answer_to(request_id)
        assert isinstance(reply, m.Error)
        assert reply.code == m.ErrorCode.EXPIRED.value
    assert peer.answer_to(live)[0].dram_blocks == 4, "the flush whose client has stopped waiting was not done"
    stats = peer.stats()
    assert stats["leases"]["read"] == 0
    assert stats["counters"]["requests_expired"] == 51


def test_45_an_engine_keeps_its_match_through_a_standstill(daemon: Daemon, engine_of: Callable[..., Engine]) -> None:
    """The client is down for a while and its renewals are lost; the lease is there when it is back."""
    engine, keys = engine_of(daemon, SPEC), chain_of("kept", 6)
    engine.store(keys)
    match = engine.connector.match(keys)
    daemon.stop()
    with engine.hurried():
        assert engine.connector.match(keys).blocks == 0
    wait_until(lambda: not engine.connector.available, "the client is down")
    daemon.go_on()
    wait_until(lambda: engine.connector.available, "the client has found the daemon again")
    assert engine.load_match(match, keys) == 6


def test_20_a_stopped_client_does_not_hold_its_leases_for_ever(
    daemon: Daemon, connect: Callable[..., Peer], start_child: Callable[..., Child]
) -> None:
    child, other, spec = start_child("peer", daemon, block_bytes=256 << 10), connect(daemon), spec_of(256 << 10)
    child.do("store", seed="held", blocks=60)
    held = child.do("hold", seed="held", blocks=60, ttl_ms=2000)
    assert held["blocks"] == 60
    child.stop()
    assert len(other.store(spec, chain_of("early", 64))) == 4, "held, while the lease lasts"
    wait_until(lambda: len(other.store(spec, chain_of(time.monotonic(), 64))) == 64, "all frames can be had")
    assert daemon.stats()["leases"]["read"] == 0
    child.go_on()
    assert not child.do("release"), "the copies made meanwhile do not count"


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
    wait_until(lambda: engine.store(chain_of(time.monotonic(), 64)).stored == 64, "all frames can be had")
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
    wait_until(lambda: len(other.store(spec, chain_of(time.monotonic(), 64))) == 64, "all frames can be had")


def test_20_a_lease_lives_as_long_as_it_is_renewed(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    peer, other, keys = connect(daemon), connect(daemon), chain_of("renewed", 4)
    peer.store(SPEC, keys)
    lease = peer.match(SPEC, keys, ttl_ms=2000).lease
    end_s = time.monotonic() + 2.5
    while time.monotonic() < end_s:
        assert list(peer.ask(m.Renew, leases=[lease], ttl_ms=2000).alive) == [1]
        other.store(SPEC, chain_of(time.monotonic(), 300))
    assert peer.ask(m.Release, lease=lease).good
    assert list(peer.ask(m.Renew, leases=[lease], ttl_ms=2000).alive) == [0]


def test_21_a_pin_holds_until_its_time_and_not_longer(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    peer, keys, spec = connect(daemon), chain_of("pinned", 8), spec_of(256 << 10)
    peer.store(spec, keys)
    number = peer.register(spec)
    assert peer.ask(m.Pin, namespaces=[number], keys=keys, ttl_ms=60_000).blocks == 8
    for _ in range(4):
        assert len(peer.store(spec, chain_of(time.monotonic(), 64))) == 56
    assert peer.load(spec, keys) == 8
    assert peer.ask(m.Pin, namespaces=[number], keys=keys, ttl_ms=200).blocks == 8, "from now on for less long"
    wait_until(lambda: peer.stats()["pins"]["count"] == 0, "the pin is over")
    assert peer.stats()["pins"]["bytes"] == 0
    for _ in range(2):
        assert len(peer.store(spec, chain_of(time.monotonic(), 64))) == 64
    for _ in range(3):
        assert peer.length(spec, keys) == 0, "what is gone stays gone"
    assert peer.ask(m.Unpin, namespaces=[number], keys=keys).blocks == 0


def test_21_an_expired_lease_is_a_miss_for_good(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    peer, keys = connect(daemon), chain_of("expired", 4)
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


def test_10_a_reader_whose_session_was_lost_is_never_told_good(
    daemon: Daemon, connect: Callable[..., Peer], start_child: Callable[..., Child]
) -> None:
    child, other = start_child("peer", daemon, block_bytes=SPEC.block_bytes), connect(daemon)
    child.do("store", seed="read", blocks=4)
    child.do("hold", seed="read", blocks=4, ttl_ms=60_000)
    child.do("reconnect")
    wait_until(lambda: daemon.stats()["leases"]["read"] == 0, "the lost session's lease is over")
    other.store(SPEC, chain_of("pressure", 256))
    assert not child.do("release")
