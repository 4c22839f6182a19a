"""Requests that wait for blocks on their way up: answered once, whatever becomes of their lease meanwhile."""

from __future__ import annotations

import msgspec
import pytest
from test_desk import desk_of
from test_quotas import chain, make_cache, open_for, store

from tiercache.daemon import read_requests
from tiercache.daemon.read_requests import ReadRequests
from tiercache.daemon.router import Answer
from tiercache.daemon.slices import finish
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


def test_more_requests_that_come_before_the_others_are_answered_are_answered_too() -> None:
    """The lease is found to have ended while those that were due already are answered."""
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

    def park(count: int) -> None:
        for _ in range(count):
            asked = Resolve(1, bytes(16), 1, 2**62, lease.lease_id, namespace.number, 2, 1)
            assert requests._resolve(session, asked) is None

    park(3)
    requests._progressed(lease.lease_id)
    park(2)
    cache.space.index.drop(namespace.table.get(keys[:KEY_BYTES]))
    while requests.answer_parked():
        pass
    assert (len(answers), requests.parked, requests._parked, requests._due) == (5, 0, {}, {})


def test_answers_that_take_long_are_given_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lease may have a very wide window, all of which is looked at."""
    monkeypatch.setattr(read_requests, "ANSWER_NS", 0)
    cache = make_cache(4)
    namespace, keys = open_for(cache, ""), chain("a", 2)
    assert store(cache, namespace, keys) == 2
    desk, session = desk_of("")
    desk.cache, answers = cache, list[Answer]()
    desk.send = lambda identity, answer: answers.append(answer)
    requests = ReadRequests(desk, SlowRequests(0.0, cache.counters))
    for number in range(3):
        lease = cache.match(session.owner, [namespace], keys, 60.0).lease
        assert lease is not None
        lease.target, cache.reads.growing[lease.lease_id] = 3, lease
        for _ in range(1 + number):
            asked = Resolve(1, bytes(16), 1, 0, lease.lease_id, namespace.number, 2, 1)
            assert requests._resolve(session, asked) is None
    given = []
    while requests.answer_parked():
        given.append(len(answers))
    assert given == [1, 2, 3, 4, 5]
    assert (len(answers), requests.parked, requests._parked, requests._due) == (6, 0, {}, {})


@pytest.mark.parametrize("then", ["stop_growing", "grow"])
def test_a_lease_that_has_lost_blocks_takes_no_others_in_their_place(then: str) -> None:
    """A flush leaves it for a later slice; meanwhile the same blocks are stored again, in other frames."""
    cache = make_cache(32)
    namespace, keys = open_for(cache, ""), chain("a", 4)
    other, other_keys = open_for(cache, "t"), chain("b", 1)
    session = desk_of("")[1]
    owner, reads = session.owner, cache.reads
    lease = reads._grant([namespace], keys, 0, [], 60.0)
    lease.keys = keys
    lease.holders.add(owner)
    owner.reads[lease.lease_id] = lease
    finish(reads._rise(lease, 4))
    assert store(cache, namespace, keys[: 2 * KEY_BYTES]) == 2
    reads.grow(lease)
    assert store(cache, other, other_keys) == 1
    for _ in range(300):  # newer leases are looked at first
        assert cache.match(owner, [other], other_keys, 60.0).lease is not None
    cache.flush([namespace.number], b"")
    assert not lease.over
    assert store(cache, namespace, keys[: 3 * KEY_BYTES]) == 3
    getattr(reads, then)(lease)
    assert lease.over
    assert not reads.release(owner, lease.lease_id)
