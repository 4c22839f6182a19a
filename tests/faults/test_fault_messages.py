"""Faults 22, 23, 32: requests that no client should send. Each is answered, and no other client notices."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq
from chains import chain_of
from fault_blocks import spec_of
from fault_engine import Engine
from fault_messages import bad_headers, random_headers
from fault_peer import NoAnswer, Peer
from fault_processes import Daemon

from tiercache.protocol import messages as m

BAD_HEADERS = sorted(bad_headers(b"s" * 16, 1, Path("/nowhere")))


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_22_23_a_malformed_request_is_answered(
    hardened: Daemon, bystander: Peer, connect: Callable[..., Peer], tmp_path: Path, case: str
) -> None:
    peer = connect(hardened)
    before = bystander.stats()["counters"]
    bomb = tmp_path / "unpickled"
    header = bad_headers(peer.welcome.session, peer.welcome.generation, bomb)[case]
    peer.dealer.send_multipart([header])
    reply, _ = peer.receive()
    assert isinstance(reply, m.Error)
    assert reply.code == m.ErrorCode.MALFORMED.value, reply.text
    assert reply.generation == peer.welcome.generation
    assert len(reply.text) < 1000, "an error does not echo what it got"
    assert isinstance(peer.ask(m.Ping), m.Done), "the sender's session goes on"
    after = bystander.stats()["counters"]
    assert after["requests_malformed"] == before["requests_malformed"] + 1
    assert not bomb.exists(), "32: something was unpickled"


@pytest.mark.parametrize("parts", [0, 1, 2, 7, 20_000])
def test_22_parts_that_do_not_belong(
    hardened: Daemon, bystander: Peer, connect: Callable[..., Peer], parts: int
) -> None:
    """A request with further parts, and a write without its one payload."""
    peer = connect(hardened)
    start = (peer.welcome.session, peer.welcome.generation, 1 << 62)
    request: m.Request = m.Write(9, *start, 1, 0, 0) if parts == 0 else m.Ping(9, *start)
    peer.dealer.send_multipart([msgspec.msgpack.encode(request), *[b"x"] * parts])
    reply, _ = peer.receive()
    assert isinstance(reply, m.Error)
    assert (reply.request_id, reply.code) == (9, m.ErrorCode.MALFORMED.value)


def test_22_noise(hardened: Daemon, bystander: Peer, connect: Callable[..., Peer]) -> None:
    """Two thousand messages, random or nearly right: as many answers as messages."""
    peer = connect(hardened)
    dice = random.Random(22)
    start = (3, peer.welcome.session, peer.welcome.generation, 1 << 62)
    key = b"k" * 16
    like = [
        msgspec.msgpack.encode(request)
        for request in (
            m.Ping(*start),
            m.Match(*start, [1], key, 100, 1),
            m.Resolve(*start, 5, 1, 0, 1),
            m.Release(*start, 7),
            m.Renew(*start, [1, 2], 100),
            m.Reserve(*start, 1, b"", key, 50),
            m.Commit(*start, 3, b"\0" * 8),
            m.Abort(*start, 3, True),
            m.Read(*start, 3, 1, 0, 0, 9),
            m.Pin(*start, [1], key, 50),
            m.Hold(*start, 9),
            m.Report(*start, "none", {"a": 1}),
            m.RegisterNamespace(*start, spec_of()),
            m.Flush(*start, "x", [1], key),
        )
    ]
    for header in random_headers(dice, 2000, like):
        peer.dealer.send(header)
        reply, _ = peer.receive()
        assert isinstance(reply, m.Reply)
    assert isinstance(peer.ask(m.Ping), m.Done)


VALUES: list[tuple[type[m.Request], dict[str, object]]] = [
    (m.Match, {"namespaces": [], "keys": b"k" * 16}),
    (m.Match, {"namespaces": [1, 1], "keys": b"k" * 16}),
    (m.Match, {"namespaces": [999_999], "keys": b"k" * 16}),
    (m.Match, {"namespaces": [-1], "keys": b"k" * 16}),
    (m.Match, {"namespaces": [0], "keys": b"k" * 16}),
    (m.Match, {"namespaces": list(range(1, 400)), "keys": b"k" * 16}),
    (m.Match, {"namespaces": [1], "keys": b""}),
    (m.Match, {"namespaces": [1], "keys": b"k" * 17}),
    (m.Match, {"namespaces": [1], "keys": bytes(16 * (m.MAX_KEYS + 1))}),
    (m.Match, {"namespaces": [1], "keys": b"k" * 16, "ttl_ms": -5}),
    (m.Resolve, {"lease": 1, "namespace": 1, "first": 0, "count": 1}),
    (m.Resolve, {"lease": 1, "namespace": 1, "first": -1, "count": 1}),
    (m.Resolve, {"lease": 1, "namespace": 1, "first": 0, "count": 1 << 40}),
    (m.Hold, {"lease": 12345}),
    (m.Renew, {"leases": [1], "ttl_ms": 0}),
    (m.Renew, {"leases": [1], "ttl_ms": -(1 << 60)}),
    (m.Reserve, {"namespace": 1, "parent": b"", "keys": b"k" * 16, "ttl_ms": 0}),
    (m.Reserve, {"namespace": 1, "parent": b"short", "keys": b"k" * 16, "ttl_ms": 100}),
    (m.Reserve, {"namespace": 1, "parent": b"", "keys": bytes(16 * (m.MAX_RESERVE + 1)), "ttl_ms": 100}),
    (m.Reserve, {"namespace": 77, "parent": b"", "keys": b"k" * 16, "ttl_ms": 100}),
    (m.Commit, {"lease": 1, "blocks": b"123"}),
    (m.Commit, {"lease": 1, "blocks": bytes(4 * (m.MAX_RESERVE + 1))}),
    (m.Read, {"lease": 1, "namespace": 1, "index": 0, "offset": 0, "length": 1}),
    (m.Pin, {"namespaces": [1], "keys": b"k" * 16, "ttl_ms": 0}),
    (m.Flush, {"tier": "tape", "namespaces": [], "key": b""}),
    (m.Flush, {"tier": "t" * (1 << 20), "namespaces": [], "key": b""}),
    (m.Flush, {"tier": "all", "namespaces": [404], "key": b""}),
    (m.Flush, {"tier": "all", "namespaces": [], "key": b"short"}),
    (m.Report, {"registration": "magic", "counters": {}}),
    (m.Report, {"registration": "none", "counters": {str(n): n for n in range(1000)}}),
]


@pytest.mark.parametrize(("kind", "fields"), VALUES, ids=lambda value: getattr(value, "__name__", ""))
def test_22_values_out_of_range_are_refused(
    hardened: Daemon, bystander: Peer, connect: Callable[..., Peer], kind: type[m.Request], fields: dict[str, object]
) -> None:
    peer = connect(hardened)
    assert peer.register(spec_of()) >= 1
    reply = peer.ask(kind, **fields)
    assert isinstance(reply, m.Error)
    assert reply.code in {code.value for code in m.ErrorCode} - {m.ErrorCode.INTERNAL.value}
    assert len(reply.text) < 1000, "an error does not echo what it got"
    assert isinstance(peer.ask(m.Ping), m.Done)


def test_22_specs_that_cannot_be(hardened: Daemon, bystander: Peer, connect: Callable[..., Peer]) -> None:
    peer = connect(hardened)
    bad = [
        {"block_bytes": 0},
        {"block_bytes": -4096},
        {"block_bytes": 1 << 40},
        {"block_bytes": 8 << 20},
        {"block_size": 0},
        {"tp_rank": 3, "tp_size": 2},
        {"tp_rank": -1},
        {"window_blocks": -1},
        {"engine": "e" * 100_000},
        {"extra": {str(n): "x" for n in range(5000)}},
    ]
    for change in bad:
        spec = msgspec.structs.replace(spec_of(), **change)
        reply = peer.ask(m.RegisterNamespace, spec=spec)
        assert isinstance(reply, m.Error), change
        assert reply.code == m.ErrorCode.BAD_VALUE.value


def test_22_nothing_outside_a_block_is_read_or_written(
    hardened: Daemon, bystander: Peer, connect: Callable[..., Peer]
) -> None:
    peer, spec = connect(hardened, map_arena=False), spec_of(5000)
    keys = chain_of("edges", 2)
    reserved = peer.reserve(spec, keys)
    for index, offset, length in [
        (0, 8190, 10),
        (0, -1, 10),
        (0, 0, 0),
        (0, 1 << 50, 10),
        (2, 0, 10),
        (-1, 0, 10),
        (1 << 40, 0, 1),
        (0, 0, 8193),
    ]:
        reply, _ = peer.answer_to(
            peer.post(m.Write, payload=bytes(length), lease=reserved.lease, index=index, offset=offset)
        )
        assert isinstance(reply, m.Error), (index, offset, length)
    for index in range(2):
        request_id = peer.post(m.Write, payload=b"w" * 5000, lease=reserved.lease, index=index, offset=0)
        assert isinstance(peer.answer_to(request_id)[0], m.Done)
    assert peer.commit(reserved.lease, [0, 1, 1, 7, 1 << 31]) == [0, 0, 0, 2, 2]
    lease, number = peer.match(spec, keys, ttl_ms=9000).lease, peer.register(spec)
    for index, offset, length in [
        (0, 4999, 2),
        (0, -1, 2),
        (0, 0, 0),
        (0, 0, -1),
        (2, 0, 1),
        (-1, 0, 1),
        (1 << 50, 0, 1),
        (0, 1 << 50, 1),
        (0, 0, 1 << 30),
    ]:
        reply = peer.ask(m.Read, lease=lease, namespace=number, index=index, offset=offset, length=length)
        assert isinstance(reply, m.Error), (index, offset, length)
    reply, parts = peer.answer_to(peer.post(m.Read, lease=lease, namespace=number, index=1, offset=4990, length=10))
    assert parts == [b"w" * 10]


def test_22_a_session_cannot_be_guessed_or_borrowed(
    hardened: Daemon, bystander: Peer, connect: Callable[..., Peer]
) -> None:
    peer, spec, keys = connect(hardened), spec_of(), chain_of("private", 3)
    peer.store(spec, keys)
    for session in (b"", b"x" * 16, bytes(16), peer.welcome.session[:-1]):
        reply = peer.ask(m.Flush, session=session or b"\0", tier="all", namespaces=[], key=b"")
        assert isinstance(reply, m.Error)
        assert reply.code == m.ErrorCode.UNKNOWN_SESSION.value
    peer.ask(m.Bye)
    assert peer.is_over()
    with connect(hardened) as other:
        reply = other.ask(m.Flush, session=peer.welcome.session, tier="all", namespaces=[], key=b"")
        assert reply.code == m.ErrorCode.UNKNOWN_SESSION.value
        assert other.load(spec, keys) == 3


def test_22_statistics_stay_readable_whatever_a_client_reports(
    start_daemon: Callable[..., Daemon], connect: Callable[..., Peer], engine_of: Callable[..., Engine]
) -> None:
    """Reports and specs as long as they are allowed to be: a client that asks for stats still gets them."""
    daemon = start_daemon()
    engine, sinner = engine_of(daemon, spec_of()), connect(daemon)
    for number in range(300):
        spec = msgspec.structs.replace(spec_of(), engine=f"{number} " + "e" * 3900, layout="l" * 3900)
        sinner.ask(m.RegisterNamespace, spec=spec)
    for length in (30_000, 2000, 64, 32):
        sinner.ask(m.Report, registration="none", counters={f"{n:02}" + "c" * length: n for n in range(64)})
        sinner.stats()
    assert engine.connector.stats()["daemon"]["daemon"]["pid"] == daemon.pid
    assert engine.connector.available, "asking for statistics brought the client down"


def test_23_a_request_is_answered_even_when_its_session_ends_with_it(
    hardened: Daemon, bystander: Peer, connect: Callable[..., Peer]
) -> None:
    peer = connect(hardened)
    assert isinstance(peer.ask(m.Bye), m.Done)
    assert peer.is_over()
    reply = peer.ask(m.Ping)
    assert isinstance(reply, m.Error)
    assert reply.code == m.ErrorCode.UNKNOWN_SESSION.value


def test_22_a_peer_without_a_session_gets_an_answer(hardened: Daemon, bystander: Peer) -> None:
    """A peer that reaches the control socket without a hello is told to say hello, and gets nothing else."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.set(zmq.LINGER, 0)
    dealer.connect(bystander.welcome.control)
    request = m.Flush(5, b"no session", bystander.welcome.generation, 1 << 62, "all", [], b"")
    dealer.send(msgspec.msgpack.encode(request))
    if not dealer.poll(5000):
        raise NoAnswer("a peer without a session is not answered")
    reply = msgspec.msgpack.decode(dealer.recv(), type=m.AnyReply)
    assert isinstance(reply, m.Error)
    assert reply.code == m.ErrorCode.UNKNOWN_SESSION.value
    dealer.close(0)
    context.term()
