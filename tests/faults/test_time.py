"""Faults 20, 21, 45: leases and pins end when their time is up, and not because the daemon stood still."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from chains import chain_of
from fault_blocks import spec_of
from fault_peer import Peer
from fault_processes import Daemon
from waiting import wait_until

from tiercache.protocol import messages as m

pytestmark = pytest.mark.stress

SPEC = spec_of(64 << 10)


def test_45_renewals_in_the_queue_are_read_before_leases_are_judged(
    daemon: Daemon, connect: Callable[..., Peer]
) -> None:
    peer, keys = connect(daemon), chain_of("queue", 4)
    peer.store_chain(SPEC, keys)
    leases = [peer.match_chain(SPEC, keys, ttl_ms=1500).lease for _ in range(20)]
    daemon.stop()
    renewals = [peer.post(m.Renew, leases=[lease], ttl_ms=30_000, deadline_s=60) for lease in leases]
    end_s = time.monotonic() + 2
    wait_until(lambda: time.monotonic() > end_s, "more than the lease")
    daemon.go_on()
    assert all(list(peer.answer_to(request_id).alive) == [1] for request_id in renewals)
    assert all(peer.tell(m.Release, lease=lease).good for lease in leases)


def test_45_requests_whose_callers_have_gone_are_not_worked_through(
    daemon: Daemon, connect: Callable[..., Peer]
) -> None:
    peer, keys = connect(daemon), chain_of("gone", 4)
    peer.store_chain(SPEC, keys)
    number = peer.register(SPEC)
    daemon.stop()
    gone = [peer.post(m.Match, namespaces=[number], keys=keys, ttl_ms=30_000, deadline_s=0.05) for _ in range(50)]
    gone.append(peer.post(m.Flush, tier="all", namespaces=[], key=b"", deadline_s=0.05))
    live = peer.post(m.Match, namespaces=[number], keys=keys, deadline_s=60)
    end_s = time.monotonic() + 0.3
    wait_until(lambda: time.monotonic() > end_s, "their deadlines have passed")
    daemon.go_on()
    for request_id in gone:
        reply = peer.answer_to(request_id)
        assert isinstance(reply, m.Error)
        assert reply.code == m.ErrorCode.EXPIRED.value
    assert peer.answer_to(live).dram_blocks == 4, "the flush whose client has stopped waiting was not done"
    stats = peer.stats()
    assert stats["leases"]["read"] == 0
    assert stats["counters"]["requests_expired"] == 51
