"""What peers that do not read can make the daemon keep: each limit holds, however the answers are cut and asked for."""

from __future__ import annotations

import pytest
from chains import chain_of
from context_rig import context_of
from tenant_cache import make_cache, open_for, store

from tiercache.daemon.requests.reads import ReadRequests
from tiercache.daemon.requests.sessions import Session
from tiercache.daemon.requests.slow import SlowRequests
from tiercache.daemon.requests.store_waits import StoreWaits
from tiercache.daemon.requests.unsent import (
    ALL_BYTES,
    PARTY_BYTES,
    SESSION_BYTES,
    Unsent,
)
from tiercache.errors import RequestRefused
from tiercache.protocol.messages import Hello, Read

MIB = 1 << 20


def session_of(party: str) -> Session:
    return Session(Hello(1, 1, bytes(16), "s", 0, False), party)


def fill(unsent: Unsent, session: Session, length: int = 2 * MIB) -> int:
    """Let the peer ask until it is refused; returns the bytes that wait for it."""
    while unsent.problem(session, length) is None:
        unsent.add(session, length)
    return session.unsent_bytes


def test_a_session_has_a_limit() -> None:
    unsent, session = Unsent(), session_of("a")
    assert fill(unsent, session) == SESSION_BYTES
    assert unsent.problem(session, 1) == "128 MiB of answers to this session wait to be read: read them first"
    unsent.sent(session, 2 * MIB)
    assert unsent.problem(session, 2 * MIB) is None


def test_sessions_of_one_party_share_a_limit_that_outlives_them() -> None:
    unsent, parties = Unsent(), PARTY_BYTES // SESSION_BYTES
    gone = [session_of("a") for _ in range(parties)]
    assert [fill(unsent, one) for one in gone] == [SESSION_BYTES] * parties
    for one in gone:
        one.open = False
    assert unsent.problem(session_of("a"), 1) == "256 MiB of answers to a wait to be read: read them first"
    assert unsent.problem(session_of("b"), 2 * MIB) is None


def test_all_parties_share_a_limit_and_a_peer_that_reads_always_gets_one_answer() -> None:
    unsent, new, parties = Unsent(), session_of("new"), ALL_BYTES // SESSION_BYTES
    for number in range(parties):
        assert fill(unsent, session_of(str(number))) == SESSION_BYTES
    assert unsent.problem(new, 2 * MIB) is None
    unsent.add(new, 2 * MIB)
    assert unsent.problem(new, 1) == "512 MiB of answers to all clients wait to be read: read them first"
    assert unsent.problem(session_of("new"), 1) is not None


def test_no_block_is_read_for_a_peer_with_too_much_unread() -> None:
    cache = make_cache(4)
    namespace, keys = open_for(cache, ""), chain_of("a", 1)
    assert store(cache, namespace, keys) == 1
    context, session = context_of("")
    context.cache = cache
    lease = cache.match(session.owner, [namespace], keys, 60.0).lease
    assert lease is not None
    requests = ReadRequests(context, SlowRequests(0.0, cache.counters), StoreWaits(context))
    fill(context.unsent, session)
    with pytest.raises(RequestRefused, match="answers to this session wait to be read"):
        requests.read(session, Read(1, bytes(16), 1, 0, lease.lease_id, namespace.number, 0, 0, 1))
    assert cache.counters.payload_bytes_read == 0
