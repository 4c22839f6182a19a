"""Faults 22, 23, 24, 32, 41, 42, 43: hostile messages, floods, silence. Each is answered or cut off; nobody else notices."""

from __future__ import annotations

import os
import random
import resource
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest
import zmq
from fault_blocks import chain, spec_of
from fault_engine import Engine
from fault_messages import END, RawZmtp, answer_on, bad_headers, greet, random_headers
from fault_peer import NoAnswer, Peer, hello, open_session_socket
from fault_processes import Child, Daemon, open_fds, rss_bytes, wait_until

from tiercache import messages as m
from tiercache.config import session_socket_path
from tiercache.errors import RequestRefused
from tiercache.wire import send_packet

MIB = 1 << 20


@pytest.fixture(scope="module")
def hardened() -> Iterator[Daemon]:
    """One daemon for all hostile messages: what one of them breaks, the next test sees."""
    daemon = Daemon("--arena", "16MiB", "--region", "4MiB").start()
    yield daemon
    assert daemon.running(), daemon.log()
    daemon.close()


@pytest.fixture
def bystander(hardened: Daemon) -> Iterator[Peer]:
    """Another client, with a block, that must not notice anything."""
    spec, keys = spec_of(rank=7), chain("bystander", 4)
    with Peer(hardened.run_dir, name="bystander") as peer:
        peer.store(spec, keys)
        refused = peer.stats()["counters"]["requests_failed"]
        yield peer
        assert peer.load(spec, keys) == 4
        stats = peer.stats()
        assert stats["health"]["state"] == "ok"
        assert stats["counters"]["requests_failed"] == refused, hardened.log()
        assert "Exception in callback" not in hardened.log(), hardened.log()


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
def test_22_parts_that_do_not_belong(hardened: Daemon, bystander: Peer, connect: Callable[..., Peer], parts: int) -> None:
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
            m.Ping(*start), m.Match(*start, [1], key, 100, 1), m.Resolve(*start, 5, 1, 0, 1), m.Release(*start, 7),
            m.Renew(*start, [1, 2], 100), m.Reserve(*start, 1, b"", key, 50), m.Commit(*start, 3, b"\0" * 8),
            m.Abort(*start, 3, True), m.Read(*start, 3, 1, 0, 0, 9), m.Pin(*start, [1], key, 50), m.Hold(*start, 9),
            m.Report(*start, "none", {"a": 1}), m.RegisterNamespace(*start, spec_of()), m.Flush(*start, "x", [1], key),
        )  # fmt: skip
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
    (m.Flush, {"tier": "t" * MIB, "namespaces": [], "key": b""}),
    (m.Flush, {"tier": "all", "namespaces": [404], "key": b""}),
    (m.Flush, {"tier": "all", "namespaces": [], "key": b"short"}),
    (m.Report, {"registration": "magic", "counters": {}}),
    (m.Report, {"registration": "none", "counters": {str(n): n for n in range(1000)}}),
    (m.RegisterNamespace, {"spec": spec_of(1)}),
]


@pytest.mark.parametrize(("kind", "fields"), VALUES[:-1], ids=lambda value: getattr(value, "__name__", ""))
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
        {"block_bytes": 0}, {"block_bytes": -4096}, {"block_bytes": 1 << 40}, {"block_bytes": 8 << 20},
        {"block_size": 0}, {"tp_rank": 3, "tp_size": 2}, {"tp_rank": -1}, {"window_blocks": -1},
        {"engine": "e" * 100_000}, {"extra": {str(n): "x" for n in range(5000)}},
    ]  # fmt: skip
    for change in bad:
        spec = msgspec.structs.replace(spec_of(), **change)
        reply = peer.ask(m.RegisterNamespace, spec=spec)
        assert isinstance(reply, m.Error), change
        assert reply.code == m.ErrorCode.BAD_VALUE.value


def test_22_nothing_outside_a_block_is_read_or_written(
    hardened: Daemon, bystander: Peer, connect: Callable[..., Peer]
) -> None:
    peer, spec = connect(hardened, map_arena=False), spec_of(5000)
    keys = chain("edges", 2)
    reserved = peer.reserve(spec, keys)
    for index, offset, length in [
        (0, 8190, 10), (0, -1, 10), (0, 0, 0), (0, 1 << 50, 10), (2, 0, 10), (-1, 0, 10), (1 << 40, 0, 1),
        (0, 0, 8193),
    ]:  # fmt: skip
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
        (0, 4999, 2), (0, -1, 2), (0, 0, 0), (0, 0, -1), (2, 0, 1), (-1, 0, 1), (1 << 50, 0, 1), (0, 1 << 50, 1),
        (0, 0, 1 << 30),
    ]:  # fmt: skip
        reply = peer.ask(m.Read, lease=lease, namespace=number, index=index, offset=offset, length=length)
        assert isinstance(reply, m.Error), (index, offset, length)
    reply, parts = peer.answer_to(
        peer.post(m.Read, lease=lease, namespace=number, index=1, offset=4990, length=10)
    )
    assert parts == [b"w" * 10]


def test_22_a_session_cannot_be_guessed_or_borrowed(
    hardened: Daemon, bystander: Peer, connect: Callable[..., Peer]
) -> None:
    peer, spec, keys = connect(hardened), spec_of(), chain("private", 3)
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


# --- the session socket ----------------------------------------------------------------------------

GREETINGS: dict[str, Callable[[], bytes]] = {
    "noise": lambda: random.Random(1).randbytes(300),
    "one byte": lambda: b"\xc1",
    "truncated": lambda: hello(b"i" * 16)[:-3],
    "a request": lambda: msgspec.msgpack.encode(m.Ping(1, b"", 1, 1)),
    "short instance": lambda: hello(b"i" * 15),
    "no instance": lambda: hello(b""),
    "future version": lambda: hello(b"i" * 16, protocol_min=99, protocol_max=100),
    "past version": lambda: hello(b"i" * 16, protocol_min=0, protocol_max=0),
    "a name that is no text": lambda: hello(b"i" * 16, name="NN").replace(b"NN", b"\xff\xfe"),
    "deeper than the stack": lambda: b"\x97" + hello(b"i" * 16)[1:] + b"\x91" * 1500 + b"\x90",
    "too long": lambda: hello(b"i" * 16, name="n" * 60_000),
}


@pytest.mark.parametrize("case", sorted(GREETINGS))
def test_22_a_malformed_hello_is_refused(hardened: Daemon, bystander: Peer, case: str) -> None:
    fds = open_fds(hardened.pid)
    answer = greet(hardened.run_dir, GREETINGS[case]())
    assert isinstance(answer, m.Refused)
    expected = m.ErrorCode.VERSION if "version" in case else m.ErrorCode.MALFORMED
    assert answer.code == expected.value
    wait_until(lambda: open_fds(hardened.pid) <= fds, "no descriptor is left behind")


@pytest.mark.parametrize("case", ["none", "two", "seventeen", "a pipe", "a file", "a dead process"])
def test_22_descriptors_that_are_no_pidfd_are_refused(
    hardened: Daemon, bystander: Peer, tmp_path: Path, closing: ExitStack, case: str
) -> None:
    before = open_fds(hardened.pid)
    own = os.pidfd_open(os.getpid())
    closing.callback(os.close, own)
    if case in ("none", "two"):
        fds = [own] * (2 if case == "two" else 0)
    elif case == "seventeen":
        fds = [own] * 17
    elif case == "a pipe":
        fds = list(os.pipe())
        closing.callback(os.close, fds[0])
        closing.callback(os.close, fds.pop())
    elif case == "a file":
        fds = [os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)]
        closing.callback(os.close, fds[0])
    else:
        pid = os.posix_spawn("/bin/true", ["true"], os.environ)
        fds = [os.pidfd_open(pid)]
        closing.callback(os.close, fds[0])
        os.waitpid(pid, 0)
    if len(fds) > m.MAX_FDS_PER_MESSAGE:
        with open_session_socket(hardened.run_dir) as sock:
            socket.send_fds(sock, [hello(b"i" * 16)], fds)
            answer = answer_on(sock)
    else:
        answer = greet(hardened.run_dir, fds=fds)
    assert isinstance(answer, m.Refused)
    assert answer.code == m.ErrorCode.MALFORMED.value
    wait_until(lambda: open_fds(hardened.pid) <= before, "no descriptor is left behind")


def test_22_empty_packets_leave_no_descriptors_behind(hardened: Daemon, bystander: Peer) -> None:
    before = open_fds(hardened.pid)
    own = os.pidfd_open(os.getpid())
    for _ in range(20):
        assert greet(hardened.run_dir, data=b"", fds=[own] * 16) is END
    os.close(own)
    wait_until(lambda: open_fds(hardened.pid) <= before, "no descriptor is left behind")


def test_22_a_packet_after_the_welcome_ends_that_session_only(
    hardened: Daemon, bystander: Peer, connect: Callable[..., Peer]
) -> None:
    peer = connect(hardened)
    before = open_fds(hardened.pid)
    own = os.pidfd_open(os.getpid())
    send_packet(peer.sock, b"?", [own] * 16)
    os.close(own)
    assert peer.is_over()
    wait_until(lambda: open_fds(hardened.pid) < before, "its descriptors are closed")


def test_22_a_name_cannot_write_the_log(hardened: Daemon, bystander: Peer, connect: Callable[..., Peer]) -> None:
    peer = connect(hardened, name="x\n2000-01-01 ERROR forged line\x1b[31m")
    peer.sock.send(b"?")
    assert peer.is_over()
    wait_until(lambda: "forged line" in hardened.log(), "the cut is logged")
    assert "\n2000-01-01 ERROR forged" not in hardened.log()
    assert "\x1b" not in hardened.log()


# --- too much --------------------------------------------------------------------------------------


def test_24_a_frame_of_a_gigabyte_and_a_half_is_not_awaited(
    hardened: Daemon, bystander: Peer, closing: ExitStack
) -> None:
    before = rss_bytes(hardened.pid)
    for _ in range(8):
        raw = closing.enter_context(RawZmtp(bystander.welcome.control))
        raw.shake_hands()
        raw.announce(3 << 29)
        assert raw.is_over(), "the daemon waits for 1.5 GiB"
    assert rss_bytes(hardened.pid) - before < 64 * MIB


def test_24_zmtp_noise_disturbs_nobody(hardened: Daemon, bystander: Peer) -> None:
    """Some noise is a greeting of ZMTP 1.0 and its peer stays connected; nobody notices."""
    before = open_fds(hardened.pid)
    dice = random.Random(24)
    with ExitStack() as raws:
        for _ in range(40):
            raw = raws.enter_context(RawZmtp(bystander.welcome.control))
            with suppress(ConnectionError):
                raw.sock.sendall(dice.randbytes(dice.randint(1, 5000)))
            assert isinstance(bystander.ask(m.Ping), m.Done)
    wait_until(lambda: open_fds(hardened.pid) <= before, "no descriptor is left behind")


def test_24_half_a_handshake_is_not_awaited(hardened: Daemon, bystander: Peer, closing: ExitStack) -> None:
    raws = [closing.enter_context(RawZmtp(bystander.welcome.control)) for _ in range(3)]
    raws[1].sock.sendall(b"\xff" + bytes(8) + b"\x7f\x03")
    raws[2].sock.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    assert all(raw.is_over(10) for raw in raws)


def test_43_an_unfinished_message_grows_and_goes(hardened: Daemon, bystander: Peer) -> None:
    """Who may open the socket may fill memory this way; it must not take the others' answers along."""
    parts = 90
    before = rss_bytes(hardened.pid)
    with RawZmtp(bystander.welcome.control) as raw:
        raw.shake_hands()
        for number in range(parts):
            raw.send_frame(bytes(MIB), more=True)
            if number % 30 == 0:
                assert isinstance(bystander.ask(m.Ping), m.Done)
        wait_until(lambda: rss_bytes(hardened.pid) - before > parts // 2 * MIB, "the parts are buffered")
        assert rss_bytes(hardened.pid) - before < (parts + 40) * MIB
        assert isinstance(bystander.ask(m.Ping), m.Done)
    wait_until(lambda: rss_bytes(hardened.pid) - before < 40 * MIB, "the memory is given back")


def test_24_idle_connections_on_the_session_socket(
    daemon: Daemon, connect: Callable[..., Peer], closing: ExitStack
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4000), hard), hard))
    closing.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    peer, spec, keys = connect(daemon), spec_of(), chain("idle", 4)
    peer.store(spec, keys)
    before = open_fds(daemon.pid)
    idle = []
    deadline_s = time.monotonic() + 20
    while len(idle) < 1500:
        sock = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        sock.setblocking(False)
        while True:  # a full backlog is a reason to come again
            assert time.monotonic() < deadline_s
            with suppress(BlockingIOError):
                sock.connect(str(session_socket_path(daemon.run_dir)))
                break
        idle.append(sock)
        if len(idle) % 100 == 0:
            assert peer.load(spec, keys) == 4
    assert open_fds(daemon.pid) - before <= 64, "few are let in without a word"
    wait_until(lambda: _greets(daemon), "somebody who says hello is let in")
    wait_until(lambda: open_fds(daemon.pid) <= before, "those who said nothing are let go")
    assert peer.load(spec, keys) == 4


def _greets(daemon: Daemon) -> bool:
    return isinstance(greet(daemon.run_dir), m.Welcome)


def test_24_idle_connections_on_the_control_socket(
    start_daemon: Callable[..., Daemon], connect: Callable[..., Peer], closing: ExitStack
) -> None:
    daemon = start_daemon("--arena", "16MiB", "--region", "4MiB", "--max-sessions", "32")
    peer, spec, keys = connect(daemon), spec_of(), chain("idle", 4)
    peer.store(spec, keys)
    before = open_fds(daemon.pid)
    endpoint = peer.welcome.control.removeprefix("ipc://")
    deadline_s = time.monotonic() + 20
    for number in range(1500):
        sock = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sock.setblocking(False)
        while True:
            assert time.monotonic() < deadline_s
            with suppress(BlockingIOError):
                sock.connect(endpoint)
                break
        if number % 100 == 0:
            assert peer.load(spec, keys) == 4
    wait_until(lambda: open_fds(daemon.pid) - before <= 140, "no more than 4 connections for each session")
    assert peer.stats()["counters"]["connections_refused"] > 0
    # Those that never shake hands are let go, so others get in again.
    wait_until(lambda: open_fds(daemon.pid) - before <= 8, "idle connections are let go")
    with connect(daemon) as late:
        assert late.load(spec, keys) == 4
    assert peer.load(spec, keys) == 4


def test_24_sessions_have_a_limit(
    start_daemon: Callable[..., Daemon], connect: Callable[..., Peer], engine_of: Callable[..., Engine]
) -> None:
    daemon = start_daemon("--arena", "4MiB", "--region", "2MiB", "--max-sessions", "3")
    peers = [connect(daemon) for _ in range(3)]
    answer = greet(daemon.run_dir)
    assert isinstance(answer, m.Refused)
    assert answer.code == m.ErrorCode.LIMIT.value
    with pytest.raises(RequestRefused, match="raise max_sessions"):
        engine_of(daemon, spec_of())
    assert all(isinstance(peer.ask(m.Ping), m.Done) for peer in peers)
    peers[0].hang_up()
    wait_until(lambda: _greets(daemon), "there is room again")


def test_24_leases_have_a_limit(start_daemon: Callable[..., Daemon], connect: Callable[..., Peer]) -> None:
    daemon = start_daemon("--arena", "4MiB", "--region", "2MiB", "--max-leases-per-session", "5")
    peer, other, spec, keys = connect(daemon), connect(daemon), spec_of(), chain("many", 2)
    peer.store(spec, keys)
    leases = [peer.match(spec, keys, ttl_ms=9000).lease for _ in range(5)]
    reply = peer.match(spec, keys, ttl_ms=9000)
    assert isinstance(reply, m.Error)
    assert reply.code == m.ErrorCode.LIMIT.value
    assert other.load(spec, keys) == 2
    assert peer.ask(m.Release, lease=leases[0]).good
    assert peer.load(spec, keys) == 2


def test_41_a_client_that_never_reads_its_replies_loses_its_session_only(
    hardened: Daemon, bystander: Peer, connect: Callable[..., Peer]
) -> None:
    deaf = connect(hardened, receive_hwm=1)
    others = [connect(hardened) for _ in range(3)]
    posted = 0
    deadline_s = time.monotonic() + 20
    while not deaf.is_over(0):
        assert time.monotonic() < deadline_s, f"{posted} replies were not read, and the session goes on"
        for _ in range(100):
            with suppress(zmq.Again):
                deaf.post(m.Stats)
                posted += 1
        assert all(isinstance(other.ask(m.Ping), m.Done) for other in others)
    assert posted > 1000, "a thousand outstanding replies are allowed"
    assert bystander.stats()["counters"]["sessions_cut"] > 0
    assert all(isinstance(other.ask(m.Ping), m.Done) for other in others)


def test_41_a_reader_that_is_only_late_gets_every_reply(hardened: Daemon, connect: Callable[..., Peer]) -> None:
    """Below the limit nothing is dropped: each of the requests is answered, in order."""
    peer = connect(hardened)
    posted = [peer.post(m.Ping, deadline_s=60) for _ in range(1000)]
    wait_until(
        lambda: hardened.stats()["latency"]["Ping"]["count"] >= 1000, "all of them have been worked through"
    )
    assert [peer.receive()[0].request_id for _ in posted] == posted


def test_42_every_request_of_many_clients_is_answered(
    hardened: Daemon, bystander: Peer, start_child: Callable[..., Child]
) -> None:
    """A send may swallow the news of a request: then that request waits until something else comes."""
    children = [start_child("peer", hardened) for _ in range(3)]
    for child in children:
        child.tell("ping_pong", seconds=1.5, peers=5)
    assert isinstance(bystander.ask(m.Ping), m.Done)
    assert all(child.hear(30) > 100 for child in children)


def test_42_the_last_request_before_silence_is_answered(hardened: Daemon, connect: Callable[..., Peer]) -> None:
    """Threads that all stop at once: nobody's further request pushes a forgotten one along."""
    peers = [connect(hardened, map_arena=False) for _ in range(8)]
    failures: list[str] = []

    def ask(peer: Peer, barrier: threading.Barrier) -> None:
        try:
            for _ in range(150):
                barrier.wait(20)
                assert isinstance(peer.ask(m.Ping), m.Done)
        except (AssertionError, threading.BrokenBarrierError) as error:
            failures.append(repr(error))
            barrier.abort()

    barrier = threading.Barrier(len(peers))
    threads = [threading.Thread(target=ask, args=(peer, barrier)) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert not failures


def test_23_a_request_is_answered_even_when_its_session_ends_with_it(
    hardened: Daemon, bystander: Peer, connect: Callable[..., Peer]
) -> None:
    peer = connect(hardened)
    assert isinstance(peer.ask(m.Bye), m.Done)
    assert peer.is_over()
    reply = peer.ask(m.Ping)
    assert isinstance(reply, m.Error)
    assert reply.code == m.ErrorCode.UNKNOWN_SESSION.value


def test_24_nobody_else_may_open_the_sockets(hardened: Daemon, bystander: Peer) -> None:
    control = Path(bystander.welcome.control.removeprefix("ipc://"))
    for path in (session_socket_path(hardened.run_dir), control):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(hardened.run_dir).stat().st_mode) == 0o700


def test_22_a_peer_without_a_session_gets_an_answer(hardened: Daemon, bystander: Peer) -> None:
    """Whoever reaches the control socket without a hello is told so, and asks for nothing else."""
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
