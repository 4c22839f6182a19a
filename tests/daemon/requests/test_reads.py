"""Requests that wait for blocks on their way up: answered once, whatever becomes of their lease meanwhile."""

from __future__ import annotations

from typing import Any

import msgspec
from chains import chain_of
from context_rig import context_of
from tenant_cache import make_cache, open_for, store

from tiercache.daemon.requests.reads import ReadRequests
from tiercache.daemon.requests.router import Answer
from tiercache.daemon.requests.slow import SlowRequests
from tiercache.daemon.requests.store_waits import StoreWaits
from tiercache.daemon.tiers.dram.leases import ReadLease
from tiercache.protocol.messages import KEY_BYTES, Resolve


class Waiting:
    """A chain of two blocks, and leases that wait for a third one."""

    def __init__(self) -> None:
        self.cache = make_cache(4)
        self.namespace, self.keys = open_for(self.cache, ""), chain_of("a", 2)
        assert store(self.cache, self.namespace, self.keys) == 2
        context, self.session = context_of("")
        context.cache, self.answers = self.cache, list[Answer]()
        context.send = lambda identity, answer: self.answers.append(answer)
        self.requests = ReadRequests(context, SlowRequests(0.0, self.cache.counters), StoreWaits(context))

    def lease(self) -> ReadLease:
        lease = self.cache.match(self.session.owner, [self.namespace], self.keys, 60.0).lease
        assert lease is not None
        lease.target, self.cache.reads.growing.leases[lease.lease_id] = 3, lease
        return lease

    def park(self, lease: ReadLease, count: int, until_us: int = 0) -> None:
        for _ in range(count):
            asked = Resolve(1, bytes(16), 1, until_us, lease.lease_id, self.namespace.number, 2, 1)
            assert self.requests._resolve(self.session, asked) is None

    def lose_a_block(self) -> None:
        self.cache.space.index.drop(self.namespace.table.get(self.keys[:KEY_BYTES]))

    @property
    def left(self) -> tuple[int, dict[Any, Any], dict[Any, Any]]:
        return self.requests.parked, self.requests._parked, self.requests._due


def test_a_lease_that_is_found_to_have_lost_a_block_only_when_asked_again_is_answered() -> None:
    w = Waiting()
    lease = w.lease()
    w.park(lease, 2)  # their time is up already
    w.lose_a_block()
    while w.requests.answer_parked():
        pass
    assert [msgspec.msgpack.decode(answer.header)[0] for answer in w.answers] == ["frames"] * 2
    assert (w.requests.parked, w.session.owner.reads) == (0, {})
