"""Requests that wait for their replies, and a client that goes DOWN and comes UP with its daemon."""

from __future__ import annotations

import errno
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from fake_daemon import FakeDaemon
from waiting import hurried, wait_until

import tiercache
from tiercache.client import channel as channel_module
from tiercache.client import channels as channels_module
from tiercache.client.channels import Channels
from tiercache.connector.write_lease import abort_lease
from tiercache.errors import DaemonUnavailable, DeadlineExceeded, ProtocolError, RequestRefused, TierCacheError
from tiercache.protocol import messages as m
from tiercache.protocol.messages import MAX_MESSAGE_BYTES, TOKEN_BYTES, Done, Ping, Reply, Stats

PATIENT_S = 600.0
NONE_COMES_S = 0.05
"""Deadline of requests that are not answered before it."""


class Rig:
    """Channels, and the other end of their sockets."""

    def __init__(self, router: zmq.Socket[bytes], endpoint: str, most: int) -> None:
        self.router = router
        self.late: list[Reply] = []
        self.channels = Channels(endpoint, bytes(TOKEN_BYTES), 1, self.late.append, most=most)
        self.asked: list[tuple[bytes, list[Any]]] = []

    def call(self, timeout_s: float = PATIENT_S, kind: Any = Ping) -> Any:
        return self.channels.wait(self.channels.post(kind, timeout_s))

    def pipeline(self, count: int, timeout_s: float) -> None:
        self.channels.pipeline([(Ping, {}, None)] * count, lambda *_: None, timeout_s)

    def take(self, count: int) -> None:
        """Receive so many requests."""
        for _ in range(count):
            assert self.router.poll(60_000), "the request has come"
            identity, header = self.router.recv_multipart()[:2]
            self.asked.append((identity, msgspec.msgpack.decode(header)))

    def answer(self, *, generation: int = 1, data: bytes = b"", keep: bool = False) -> None:
        """Answer the requests that were taken."""
        for identity, request in self.asked:
            self.router.send_multipart([identity, data or msgspec.msgpack.encode(Done(request[1], generation))])
        if not keep:
            self.asked.clear()

    def in_thread(self, work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
        """Do `work` in a thread; the list gets what it returned or raised."""
        results: list[Any] = []

        def perform() -> None:
            try:
                results.append(work())
            except TierCacheError as error:
                results.append(error)

        thread = threading.Thread(target=perform, daemon=True)
        thread.start()
        return thread, results


@pytest.fixture
def open_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.set(zmq.LINGER, 0)
        router.bind(f"ipc://{tmp_path}/control")
        rigs: list[Rig] = []

        def open_one(most: int = 16) -> Rig:
            rigs.append(Rig(router, f"ipc://{tmp_path}/control", most))
            return rigs[-1]

        yield open_one
        for rig in rigs:
            rig.channels.close()


@pytest.fixture
def rig(open_rig: Callable[..., Rig]) -> Rig:
    return open_rig()


@pytest.mark.parametrize("ask", [Rig.call, lambda rig: rig.pipeline(3, PATIENT_S)], ids=["call", "pipeline"])
def test_the_end_of_a_session_wakes_waiting_threads(rig: Rig, ask: Callable[[Rig], object]) -> None:
    thread, results = rig.in_thread(lambda: ask(rig))
    rig.take(1)
    rig.channels.close()
    thread.join(60)
    assert [type(one) for one in results] == [DaemonUnavailable]


@pytest.mark.parametrize("count", [1, 3])
def test_what_comes_late_is_found_without_another_call(rig: Rig, count: int) -> None:
    with pytest.raises(DeadlineExceeded):
        rig.call(NONE_COMES_S) if count == 1 else rig.pipeline(count, NONE_COMES_S)
    rig.take(count)
    assert rig.channels.collect_late(), "the request still waits for its reply"
    rig.answer(generation=2, keep=True)  # of another life of the daemon: nothing
    rig.answer()
    wait_until(lambda: rig.channels.collect_late() or len(rig.late) == count)
    wait_until(lambda: not rig.channels.collect_late())
    assert [reply.generation for reply in rig.late] == [1] * count
    assert (len(rig.channels._idle), len(rig.channels._late)) == (1, 0), "the channel serves other requests again"


def test_a_late_channel_serves_others_and_its_reply_is_still_taken(rig: Rig) -> None:
    with pytest.raises(DeadlineExceeded):
        rig.call(NONE_COMES_S)
    rig.take(1)
    thread, results = rig.in_thread(rig.call)
    rig.take(1)
    assert len({identity for identity, _ in rig.asked}) == 1, "over the same connection"
    rig.answer()
    thread.join(60)
    assert [type(one) for one in results] == [Done]
    assert results[0].request_id != rig.late[0].request_id


@pytest.mark.parametrize("what", ["garbage", "nothing"])
def test_a_late_channel_of_garbage_or_nothing_is_closed(rig: Rig, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    if what == "nothing":
        monkeypatch.setattr(channels_module, "LATE_CHANNEL_S", 0.0)
    with pytest.raises(DeadlineExceeded):
        rig.call(NONE_COMES_S)
    rig.take(1)
    socket: Any = rig.channels._late[0]._socket
    assert socket.get(zmq.MAXMSGSIZE) == MAX_MESSAGE_BYTES
    if what == "garbage":
        rig.answer(data=b"garbage")
    wait_until(lambda: not rig.channels.collect_late())
    assert socket.closed
    assert rig.late == []


def test_a_late_channel_that_is_read_as_the_session_ends_is_closed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeadlineExceeded):
        rig.call(NONE_COMES_S)
    socket: Any = rig.channels._late[0]._socket
    monkeypatch.setattr(Channels, "_read_late", lambda channels, channel: channels.close() or True)
    assert not rig.channels.collect_late()
    assert socket.closed


def test_a_reply_of_another_type_breaks_the_channel(rig: Rig) -> None:
    thread, results = rig.in_thread(lambda: rig.call(kind=Stats))
    rig.take(1)
    rig.answer()
    thread.join(60)
    assert [type(one) for one in results] == [ProtocolError]
    assert (len(rig.channels._idle), len(rig.channels._late)) == (0, 0)


def test_no_more_are_kept_than_the_daemon_allows(open_rig: Callable[..., Rig]) -> None:
    rig = open_rig(2)
    posted = [rig.channels.post(Ping, PATIENT_S) for _ in range(5)]
    rig.take(5)
    rig.answer()
    for pending in posted:
        rig.channels.wait(pending)
    assert len(rig.channels._idle) == 2
    for pending in [rig.channels.post(Ping, PATIENT_S) for _ in range(5)]:
        rig.channels.abandon(pending)
    assert (len(rig.channels._idle), len(rig.channels._late)) == (0, 2)


def test_half_as_many_threads_wait_and_a_thread_that_holds_one_gets_another(open_rig: Callable[..., Rig]) -> None:
    """A store holds one request while it makes another: with too few connections all threads would wait for ever."""
    rig = open_rig(4)
    posted, go_on = threading.Barrier(3, timeout=60), threading.Event()

    def nested() -> None:
        pending = rig.channels.post(Ping, PATIENT_S)
        posted.wait()
        assert go_on.wait(60)
        rig.channels.wait(rig.channels.post(Ping, PATIENT_S))
        rig.channels.wait(pending)

    holders = [rig.in_thread(nested) for _ in range(2)]
    posted.wait()
    with pytest.raises(RequestRefused, match="2 threads of this client are under way: ask less at once"):
        rig.call(NONE_COMES_S)
    rig.channels.attendant = threading.get_ident()
    rig.channels.abandon(rig.channels.post(Ping, PATIENT_S))  # the keeper of the session waits for no thread
    go_on.set()
    rig.take(5)
    rig.answer()
    for thread, results in holders:
        thread.join(60)
        assert results == [None]
    assert rig.channels._holders == {}


@pytest.mark.parametrize(
    ("method", "text"), [("__init__", "no connection"), ("send", "connection to the daemon failed")]
)
def test_a_broken_connection_frees_its_place(
    open_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, method: str, text: str
) -> None:
    rig = open_rig(2)

    def broken(self: channel_module.Channel, *arguments: Any) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    with monkeypatch.context() as patch:
        patch.setattr(channel_module.Channel, method, broken)
        for _ in range(3):
            with pytest.raises(DaemonUnavailable, match=text):
                rig.call()
    assert rig.channels._holders == {}


# --- a client is DOWN when the daemon answers late, wrongly or not at all ----------------------------


BLOCK = 4096
SPEC = tiercache.NamespaceSpec(engine="t/1", layout="x", dtype="uint8", block_size=4, block_bytes=BLOCK)
KEYS = tiercache.KeyChain(tiercache.root_key("t"), 4, range(12)).packed()


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A run directory whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="tc-") as directory:
        yield Path(directory)


@pytest.fixture
def daemon(run_dir: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(run_dir) as daemon:
        yield daemon


@pytest.fixture
def brief_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients whose daemon withholds an answer do not wait for it when they close."""
    monkeypatch.setattr(tiercache.client.keeper, "CLOSE_S", 0.1)


@pytest.fixture
def client(brief_end: None, daemon: FakeDaemon) -> Iterator[tiercache.Client]:
    with tiercache.Client.connect(daemon.address, name="t") as client:
        yield client


@pytest.fixture
def connector(brief_end: None, daemon: FakeDaemon) -> Iterator[tiercache.Connector]:
    pool = tiercache.Pool.from_blocks(np.zeros((8, BLOCK), np.uint8))
    with tiercache.connect(daemon.address, namespace=SPEC, pool=pool, required=True) as connector:
        yield connector


def mapped_regions() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:fake")


def test_a_refusal_at_hello_is_told_at_once(daemon: FakeDaemon) -> None:
    daemon.refusal = m.Refused("version", "speak another")
    with pytest.raises(RequestRefused, match="version: speak another"):
        tiercache.Client.connect(daemon.address)


def test_a_missed_deadline_is_down_and_good_pings_are_up(daemon: FakeDaemon, client: tiercache.Client) -> None:
    daemon.rules[m.Ping] = lambda request, reply: []
    daemon.rules[m.Stats] = lambda request, reply: []
    session = client.session()
    with hurried(client, 0.2):
        with pytest.raises(DeadlineExceeded):
            client.stats()
        assert not client.alive
        with pytest.raises(DaemonUnavailable, match="unavailable: no answer"):
            client.stats()
        with pytest.raises(DaemonUnavailable, match="is being probed"):  # a match that is held costs no deadline
            session.call(m.Stats)
        wait_until(lambda: daemon.seen(m.Stats))
        assert len(daemon.seen(m.Stats)) == 1  # the second call did not even ask
        pings = len(daemon.seen(m.Ping))
        wait_until(lambda: len(daemon.seen(m.Ping)) > pings)
        assert not client.alive
        daemon.rules.clear()
        wait_until(lambda: client.alive)
    assert client.stats() == {"fake": 1}
    assert len(daemon.hellos) == 1  # a daemon that was only slow keeps its session


def test_a_late_grant_of_a_read_lease_is_given_back(daemon: FakeDaemon, connector: tiercache.Connector) -> None:
    assert connector.store(KEYS, [0, 1, 2]).stored == 3
    daemon.hold_back(m.Match)
    with hurried(connector.client, 0.2):
        assert connector.match(KEYS).blocks == 0
    assert connector.counters["times_down"] == 1
    ((_, held),) = wait_until(lambda: daemon.held)
    lease = msgspec.msgpack.decode(held)[5]
    daemon.let_go()
    wait_until(lambda: any(r.lease == lease for r in daemon.seen(m.Release)))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("request_id", "generation"), [(0, 1), (10_000, 0)], ids=["life", "request"])
def test_replies_of_another_life_or_to_another_request_are_dropped(
    daemon: FakeDaemon, client: tiercache.Client, request_id: int, generation: int
) -> None:
    def stranger_first(request: m.AnyRequest, reply: m.Reply) -> None:
        daemon.send(m.StatsReply(request.request_id + request_id, daemon.generation + generation, {"other": 1}))

    daemon.rules[m.Stats] = stranger_first
    assert client.stats() == {"fake": 1}


@pytest.mark.parametrize("garbage", [b"", b"\xc1", msgspec.msgpack.encode(["no such", 1])])
def test_garbage_ends_the_session_and_another_begins(
    daemon: FakeDaemon, client: tiercache.Client, garbage: bytes
) -> None:
    daemon.rules[m.Stats] = lambda request, reply: [garbage] if garbage else [b"", b""]
    with pytest.raises(ProtocolError):
        client.stats()
    daemon.rules.clear()
    wait_until(lambda: client.times_up == 2)
    assert len(daemon.hellos) == 2


def test_a_region_that_comes_late_is_waited_for(run_dir: Path) -> None:
    with FakeDaemon(run_dir) as daemon:
        daemon.announce_regions = False
        pool = tiercache.Pool.from_blocks(np.ones((8, BLOCK), np.uint8))
        with tiercache.connect(run_dir, namespace=SPEC, pool=pool, required=True) as connector:
            transfer = connector.store_async(KEYS, [0, 1, 2])
            wait_until(lambda: daemon.seen(m.Reserve))
            daemon.send_regions()
            assert transfer.result(40).stored == 3


def test_a_closed_session_is_down_at_once_and_comes_back_with_a_new_mapping(
    daemon: FakeDaemon, connector: tiercache.Connector
) -> None:
    assert connector.store(KEYS, [0, 1, 2]).stored == 3
    before = mapped_regions()
    daemon.drop_sessions()
    wait_until(lambda: connector.counters["times_up"] == 2)
    wait_until(lambda: mapped_regions() == before, "the former mapping is gone")
    assert len(daemon.hellos) == 2
    assert connector.load(connector.match(KEYS), [3, 4, 5]) == 3


@pytest.mark.parametrize("code", [m.ErrorCode.EXPIRED, m.ErrorCode.LIMIT])
def test_a_lease_whose_end_was_lost_is_ended_later(
    daemon: FakeDaemon, client: tiercache.Client, code: m.ErrorCode
) -> None:
    """Else the daemon would keep these frames for us, though we no longer write to them, until this process ends."""

    def unheard(request: m.AnyRequest, reply: m.Reply) -> list[bytes] | None:
        unheard_now = len(daemon.seen(m.Abort)) <= 2
        refusal = m.Error(request.request_id, daemon.generation, code.value, "not now")
        return [msgspec.msgpack.encode(refusal)] if unheard_now else None

    daemon.rules[m.Abort] = unheard
    abort_lease(client.session(), 7, finished=True)
    wait_until(lambda: len(daemon.seen(m.Abort)) > 2)
    wait_until(lambda: not client._keeper.errands)
    assert {request.finished for request in daemon.seen(m.Abort) if isinstance(request, m.Abort)} == {True}
    assert client.alive
