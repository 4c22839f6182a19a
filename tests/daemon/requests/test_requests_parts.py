"""Requests one by one, in this process: what is limited, refused, put off, and answered."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import msgpack
import msgspec
import pytest
from cache_at_once import CacheAtOnce
from chains import chain_of
from tenant_cache import make_cache, open_for, store

from tiercache.daemon.ground.clock import LeaseClock
from tiercache.daemon.ground.counters import Counters
from tiercache.daemon.ground.slices import Steps, finish
from tiercache.daemon.requests import service
from tiercache.daemon.requests.admin import AdminRequests
from tiercache.daemon.requests.context import MAX_LEASED_KEYS_BYTES, RequestContext
from tiercache.daemon.requests.reads import ReadRequests
from tiercache.daemon.requests.router import Answer
from tiercache.daemon.requests.service import MAX_SLICED, Service
from tiercache.daemon.requests.sessions import Session
from tiercache.daemon.requests.slow import SlowRequests
from tiercache.daemon.requests.store_waits import StoreWaits
from tiercache.daemon.requests.unsent import ALL_BYTES, PARTY_BYTES, SESSION_BYTES, Unsent
from tiercache.daemon.tiers.dram.below import TierBelow
from tiercache.daemon.tiers.dram.leases import ReadLease, StoreLease
from tiercache.errors import RequestRefused
from tiercache.protocol import messages as m
from tiercache.protocol.messages import KEY_BYTES, Hello, Read, Resolve
from tiercache.protocol.namespaces import NamespaceSpec

MIB = 1 << 20


def context_of(tenant: str, max_leases: int = 1000) -> tuple[RequestContext, Session]:
    session = Session(Hello(1, 1, bytes(16), "s", 0, False), "p", tenant=tenant)
    context = RequestContext(CacheAtOnce(lambda: 0.0), 1, {session.token: session}, {}, 60.0, max_leases, MIB)
    context.tenant = tenant
    return context, session


# --- what a session may ask for beyond what its requests say -----------------------------------------


def lease_keys(session: Session, count: int) -> None:
    """Leases with a mebibyte of keys each."""
    for number in range(count):
        session.owner.reads[number] = ReadLease(number, [], bytes(MIB), MIB // 16, [], 0.0, 60.0)


def test_what_leases_of_a_tenant_make_the_daemon_keep_is_limited() -> None:
    context, session = context_of("a")
    lease_keys(session, MAX_LEASED_KEYS_BYTES // MIB - 1)
    assert context.lease_ttl_s(session, 1000) == 1.0
    lease_keys(session, MAX_LEASED_KEYS_BYTES // MIB)
    with pytest.raises(RequestRefused, match="hold too many blocks: release some"):
        context.lease_ttl_s(session, 1000)
    del session.owner.reads[0]
    assert context.lease_ttl_s(session, 1000) == 1.0


def test_a_session_has_so_many_leases_of_all_kinds() -> None:
    context, session = context_of("", max_leases=3)
    lease_keys(session, 1)
    session.owner.writes |= {number: cast(StoreLease, None) for number in (7, 8)}
    with pytest.raises(RequestRefused, match="3 leases are open in this session"):
        context.lease_ttl_s(session, 1000)
    session.owner.writes.clear()
    assert context.lease_ttl_s(session, 1 << 40) == 60.0


def test_a_tenant_names_its_own_namespaces_only() -> None:
    context, _ = context_of("a")
    spec = NamespaceSpec(engine="e", layout="x", dtype="uint8", block_size=1, block_bytes=4096)
    own, other = (context.cache.space.open_namespace(spec.of_tenant(name)) for name in ("a", "b"))
    assert context.namespaces([own.number]) == [own]
    for numbers in ([other.number], [own.number, other.number], [99]):
        with pytest.raises(RequestRefused, match="is not registered: register its spec"):
            context.namespaces(numbers)


def test_a_tenant_is_told_of_its_own_models_only() -> None:
    context, mine = context_of("a")
    sessions = [mine, *(Session(Hello(1, 1, bytes(16), "s", 0, False), "p", tenant=tenant) for tenant in ("b", ""))]
    context.sessions |= {session.token: session for session in sessions}
    for session in sessions:
        card = m.ModelCard([f"of {session.tenant}"], bytes(16), [], 4)
        session.models = {msgspec.msgpack.encode(card): card}
    models: Any = AdminRequests(context, StoreWaits(context)).methods()[m.Models]
    told = [finish(models(session, m.Models(1, session.token, 1, 0))).models for session in sessions]
    assert [[card.names[0] for card in cards] for cards in told] == [["of a"], ["of b"], ["of a", "of b", "of "]]


@pytest.mark.parametrize(
    ("said", "pid", "name"),
    [("engine\n", 7, "engine?"), ("", 7, "pid 7"), (" ", 7, "pid 7"), ("", 0, "unnamed"), ("x" * 65, 7, "x" * 64)],
)
def test_a_client_is_called_something_short_and_printable_in_the_log(said: str, pid: int, name: str) -> None:
    assert Session(Hello(1, 1, bytes(16), said, 0, False), "p", pid=pid).name == name


# --- requests that wait for blocks on their way up ---------------------------------------------------


def test_a_lease_that_is_found_to_have_lost_a_block_only_when_asked_again_is_answered() -> None:
    cache, keys = make_cache(4), chain_of("a", 2)
    namespace = open_for(cache, "")
    assert store(cache, namespace, keys) == 2
    context, session = context_of("")
    context.cache, answers = cache, list[Answer]()
    context.send = lambda identity, answer: answers.append(answer)
    requests = ReadRequests(context, SlowRequests(0.0, cache.counters), StoreWaits(context))
    lease = cache.match(session.owner, [namespace], keys, 60.0).lease
    assert lease is not None
    lease.target, cache.reads.growing.leases[lease.lease_id] = 3, lease  # it waits for a third block
    for _ in range(2):  # their time is up already
        asked = Resolve(1, bytes(16), 1, 0, lease.lease_id, namespace.number, 2, 1)
        assert requests._resolve(session, asked) is None
    cache.space.index.drop(namespace.table.get(keys[:KEY_BYTES]))
    while requests.answer_parked():
        pass
    assert [msgspec.msgpack.decode(answer.header)[0] for answer in answers] == ["frames"] * 2
    assert (requests.parked, session.owner.reads) == (0, {})


# --- requests in slices, and what is refused before it takes time ------------------------------------


def test_a_flush_that_is_refused_has_flushed_nothing() -> None:
    """A session with too many long requests is refused before the first slice."""
    service, session = Service.__new__(Service), Session(Hello(1, 1, bytes(16), "s", 0, False), "p")
    service._sliced = Counter({session: MAX_SLICED})
    begun: list[str] = []

    def steps(what: str) -> Steps[m.Reply | None]:
        begun.append(what)
        yield
        return None

    for request in (m.Flush(1, b"", 1, 0, "all", [], b""), m.Ping(1, b"", 1, 0)):
        with pytest.raises(RequestRefused, match="long requests of this session"):
            service._begin(session, request, steps(type(request).__name__))
    assert begun == ["Ping"], "other requests are found to be long only once they have begun"
    assert service._sliced == {session: MAX_SLICED}


@pytest.mark.parametrize("start", [b"\x96", b"\xdc\0\x06", b"\xdd\0\0\0\x06"], ids=["fix", "16", "32"])
def test_a_spec_of_megabytes_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    """Building its names would hold the loop for a tenth of a second."""
    monkeypatch.setattr(service, "_decode", lambda header: pytest.fail("it was built"))
    header = start + msgpack.packb("register_namespace") + bytes(service.MAX_REGISTER_BYTES)
    with pytest.raises(RequestRefused, match="the spec is longer than 8192 bytes"):
        service.Service._decode(cast(service.Service, None), header)


def test_all_requests_that_wait_for_the_shared_store_count_as_parked() -> None:
    """A match and a prefetch: one limit for a session, and one figure."""
    waiting = list[Callable[[], None]]()

    class Slow(TierBelow):
        may_extend = True

        def wait(self, *asked: Any, patience_s: float = math.inf) -> bool:
            assert patience_s <= (1 << 62) / 2e6, "half of the time that the client gives it"
            waiting.append(asked[-1])
            return True

    context, session = context_of("")
    context.cache = CacheAtOnce(lambda: 0.0, below=Slow())
    nothing: Any = None
    served = Service(context, LeaseClock(), nothing, nothing, SlowRequests(0.0, Counters()))
    number = open_for(context.cache, "").number
    for kind in (m.Match, m.Prefetch):
        request = kind(1, session.token, 1, 1 << 62, [number], bytes(16))
        assert served.handle(b"", msgspec.msgpack.encode(request), []) is None
    assert (len(waiting), served.reads.parked) == (2, 2)
    for go in waiting:
        go()
    assert served.reads.parked == 0


# --- what peers that do not read can make the daemon keep --------------------------------------------


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
