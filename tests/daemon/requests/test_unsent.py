"""What peers that do not read can make the daemon keep: each limit holds, however the answers are cut and asked for."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import zmq
from chains import chain_of
from context_rig import context_of
from tenant_cache import make_cache, open_for, store

from tiercache.daemon.requests import unsent as limits
from tiercache.daemon.requests.reads import ReadRequests
from tiercache.daemon.requests.router import Answer, Router
from tiercache.daemon.requests.sessions import Session
from tiercache.daemon.requests.slow import SlowRequests
from tiercache.daemon.requests.unsent import (
    ALL_BYTES,
    FAIR_BYTES,
    LEAST_BYTES,
    PARTY_BYTES,
    SESSION_BYTES,
    SPARE_BYTES,
    SmallAnswers,
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


def test_what_was_sent_since_the_last_tick_is_taken_off_before_anything_is_refused() -> None:
    """A fast client reads more between two ticks than may wait."""
    unsent, session = Unsent(), session_of("a")
    fill(unsent, session)
    unsent.collectors.append(lambda: unsent.sent(session, 2 * MIB))
    assert unsent.problem(session, 2 * MIB) is None
    assert unsent.problem(session, 4 * MIB) is None, "and again in the next round"
    unsent.collectors.clear()
    unsent.add(session, 4 * MIB)
    assert unsent.problem(session, 1) is not None


def test_small_answers_count_for_their_work() -> None:
    unsent, session = Unsent(), session_of("a")
    assert fill(unsent, session, 1) == SESSION_BYTES
    for _ in range(SESSION_BYTES // LEAST_BYTES):
        unsent.sent(session, 1)
    assert session.unsent_bytes == unsent.bytes == 0


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


def test_reads_alone_never_make_an_answer_too_much() -> None:
    unsent, session = Unsent(), session_of("a")
    fill(unsent, session)
    for _ in range(SPARE_BYTES // LEAST_BYTES):
        assert not unsent.is_too_much(session, 1)
        unsent.add(session, 1)
    assert unsent.is_too_much(session, 1)


def test_unread_answers_end_only_sessions_of_clients_that_leave_many() -> None:
    unsent, session = Unsent(), session_of("a")
    for number in range(2 * ALL_BYTES // SESSION_BYTES):
        unsent.add(session_of(str(number)), SESSION_BYTES)
    for _ in range(FAIR_BYTES // LEAST_BYTES + 1):
        assert not unsent.is_too_much(session, 1)
        unsent.add(session, 1)
    assert unsent.is_too_much(session, 1)


def test_small_answers_are_counted_with_the_first_and_then_every_so_many_bytes() -> None:
    answers = SmallAnswers(2)
    assert answers.add(b"a", 1000) > 0
    counted = [answers.add(b"a", 1000) for _ in range(60)]
    assert sum(map(bool, counted)) == 4
    assert sum(counted) > 50 * 1000
    answers.add(b"b", 1), answers.add(b"c", 1)
    assert answers.add(b"a", 1) > 0, "a forgotten peer starts from zero"


def test_small_answers_on_many_connections_are_limited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A connection may leave a thousand answers unread, and a process may have thousands of connections."""
    monkeypatch.setattr(limits, "SESSION_BYTES", MIB)
    monkeypatch.setattr(limits, "SPARE_BYTES", 0)
    cut, unsent, session = list[str](), Unsent(), session_of("a")
    served: list[Session | None] = []
    readers = {b"stranger": None, b"session": session}

    def handle(identity: bytes, header: bytes, parts: list[zmq.Frame]) -> Answer:
        served.append(readers[header])
        return Answer(bytes(4000), served[-1])

    async def flood() -> list[int]:
        endpoint, sockets, most = f"ipc://{tmp_path}/control", zmq.Context(), list[int]()
        router = Router(endpoint, handle, lambda session, why: cut.append(why), unsent, 100)
        peers = []
        for header in readers:
            for _ in range(10):
                peers.append(sockets.socket(zmq.DEALER))
                peers[-1].setsockopt(zmq.RCVHWM, 1)
                peers[-1].connect(endpoint)
                for _ in range(400):
                    peers[-1].send(header)
            before, asked, until_s = unsent.bytes, 4000, time.monotonic() + 30
            # The system's buffers take some of it whenever ZeroMQ's thread runs; what they do not take stays counted.
            while served.count(readers[header]) < asked or unsent.bytes - before <= MIB // 2:
                assert time.monotonic() < until_s
                if served.count(readers[header]) == asked:
                    asked += 400
                    for peer in peers[-10:]:
                        for _ in range(40):
                            peer.send(header)
                await asyncio.sleep(0.01)
                assert unsent.bytes - before <= MIB
            most.append(unsent.bytes)
        router.close()
        sockets.destroy(linger=0)
        return most

    strangers, of_session = asyncio.run(flood())
    assert MIB // 2 < strangers <= MIB
    assert MIB // 2 < of_session - strangers <= MIB
    assert cut[0] == "it does not read its replies"
    assert unsent.bytes == 0


def test_no_block_is_read_for_a_peer_with_too_much_unread() -> None:
    cache = make_cache(4)
    namespace, keys = open_for(cache, ""), chain_of("a", 1)
    assert store(cache, namespace, keys) == 1
    context, session = context_of("")
    context.cache = cache
    lease = cache.match(session.owner, [namespace], keys, 60.0).lease
    assert lease is not None
    requests = ReadRequests(context, SlowRequests(0.0, cache.counters))
    fill(context.unsent, session)
    with pytest.raises(RequestRefused, match="answers to this session wait to be read"):
        requests.read(session, Read(1, bytes(16), 1, 0, lease.lease_id, namespace.number, 0, 0, 1))
    assert cache.counters.payload_bytes_read == 0
