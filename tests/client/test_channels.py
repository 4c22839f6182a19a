"""Requests that wait for their replies, against a ROUTER that answers when the test says so, or never."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from waiting import wait_until

from tiercache.client import channel as channel_module
from tiercache.client import channels as channels_module
from tiercache.client.channels import Channels
from tiercache.errors import DaemonUnavailable, DeadlineExceeded, ProtocolError, RequestRefused, TierCacheError
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
