"""Requests that wait for blocks on their way up: answered once, whatever becomes of their lease meanwhile."""

from __future__ import annotations

import msgspec
from test_desk import desk_of
from test_quotas import chain, make_cache, open_for, store

from tiercache.daemon.read_requests import ReadRequests
from tiercache.daemon.router import Answer
from tiercache.daemon.slow import SlowRequests
from tiercache.messages import KEY_BYTES, Resolve


def test_a_lease_that_is_found_to_have_lost_a_block_only_when_asked_again_is_answered() -> None:
    cache = make_cache(4)
    namespace, keys = open_for(cache, ""), chain("a", 2)
    assert store(cache, namespace, keys) == 2
    desk, session = desk_of("")
    desk.cache, answers = cache, list[Answer]()
    desk.send = lambda identity, answer: answers.append(answer)
    requests = ReadRequests(desk, SlowRequests(0.0, cache.counters))
    lease = cache.match(session.owner, [namespace], keys, 60.0).lease
    assert lease is not None
    lease.target, cache.reads.growing[lease.lease_id] = 3, lease
    for _ in range(2):  # whose time is up already
        assert requests._resolve(session, Resolve(1, bytes(16), 1, 0, lease.lease_id, namespace.number, 2, 1)) is None
    cache.space.index.drop(namespace.table.get(keys[:KEY_BYTES]))
    while requests.answer_parked():
        pass
    assert [msgspec.msgpack.decode(answer.header)[0] for answer in answers] == ["frames"] * 2
    assert (requests.parked, session.owner.reads) == (0, {})
