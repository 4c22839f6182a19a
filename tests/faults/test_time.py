"""Faults 20, 21, 45: leases and pins end when their time is up, and not because the daemon stood still."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from chains import chain_of
from fault_blocks import spec_of
from fault_peer import Peer
from fault_processes import Daemon
from waiting import state_of, wait_until

from tiercache.protocol import messages as m

pytestmark = pytest.mark.stress

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
