"""Requests that wait for their reply, against a ROUTER that gives none, or gives it late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tiercache.client import channels
from tiercache.client.channel import Channel
from tiercache.client.channels import Channels
from tiercache.errors import DaemonUnavailable, DeadlineExceeded, ProtocolError, TierCacheError
from tiercache.protocol.messages import MAX_MESSAGE_BYTES, TOKEN_BYTES, AnyReply, Done, Ping, Stats

DEADLINE_S = 600.0
"""No test waits this long: its own limit would fail it first."""


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[tuple[zmq.Socket[bytes], Channels]]:
    endpoint = f"ipc://{tmp_path}/control"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(endpoint)
        channels = Channels(endpoint, bytes(TOKEN_BYTES), 1, DEADLINE_S, on_late=lambda reply: None)
        yield router, channels
        channels.close()


@pytest.mark.parametrize(
    "ask",
    [
        lambda channels: channels.call(Ping, Done),
        lambda channels: channels.pipeline([(Ping, {}, None)] * 3, Done, lambda place, reply, payload: None),
    ],
    ids=["call", "pipeline"],
)
def test_the_end_of_a_session_wakes_waiting_threads(
    silent: tuple[zmq.Socket[bytes], Channels], ask: Callable[[Channels], object]
) -> None:
    router, channels = silent
    raised: list[TierCacheError] = []

    def wait() -> None:
        try:
            ask(channels)
        except TierCacheError as error:
            raised.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert router.poll(10_000), "the request has come"
    channels.close()
    thread.join(30)
    assert not thread.is_alive()
    assert [type(error) for error in raised] == [DaemonUnavailable]


class Late:
    """Channels whose replies the test sends, when it says so."""

    def __init__(self, router: zmq.Socket[bytes], endpoint: str) -> None:
        self.router = router
        self.replies: list[AnyReply] = []
        self.channels = Channels(endpoint, bytes(TOKEN_BYTES), 1, DEADLINE_S, self.replies.append)
        self.asked: list[tuple[bytes, int]] = []
        self.deadlines_us: list[int] = []

    def take_requests(self, count: int) -> None:
        for _ in range(count):
            assert self.router.poll(10_000), "the request has come"
            identity, header = self.router.recv_multipart()[:2]
            request = msgspec.msgpack.decode(header)
            self.asked.append((identity, request[1]))
            self.deadlines_us.append(request[4])

    def answer(self, *, generation: int = 1, garbage: bool = False) -> None:
        for identity, request_id in self.asked:
            reply = b"garbage" if garbage else msgspec.msgpack.encode(Done(request_id, generation))
            self.router.send_multipart([identity, reply])
        self.asked.clear()

    def collect(self, until: Callable[[], bool]) -> None:
        end_s = time.monotonic() + 30
        while not until():
            assert time.monotonic() < end_s, self.replies
            self.channels.collect_late()

    def time_out(self, ask: Callable[[], object]) -> None:
        with pytest.raises(DeadlineExceeded):
            ask()


@pytest.fixture
def late(tmp_path: Path) -> Iterator[Late]:
    endpoint = f"ipc://{tmp_path}/control"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(endpoint)
        late = Late(router, endpoint)
        yield late
        late.channels.close()


def pings(late: Late, count: int) -> object:
    return late.channels.pipeline([(Ping, {}, None)] * count, Done, lambda *_: None, 0.05)


@pytest.mark.parametrize("count", [1, 3])
def test_what_comes_late_is_found_without_another_call(late: Late, count: int) -> None:
    late.time_out(lambda: late.channels.call(Ping, Done, 0.05) if count == 1 else pings(late, count))
    late.take_requests(count)
    assert late.channels.collect_late(), "the request still waits for its reply"
    late.answer()
    late.collect(lambda: len(late.replies) == count)
    assert not late.channels.collect_late()
    assert (len(late.channels._idle), len(late.channels._late)) == (1, 0), "the channel serves other requests again"


def test_what_comes_late_from_an_earlier_life_of_the_daemon_is_nothing(late: Late) -> None:
    late.time_out(lambda: late.channels.call(Ping, Done, 0.05))
    late.take_requests(1)
    asked = list(late.asked)
    late.answer(generation=2)
    late.asked = asked
    late.answer()
    late.collect(lambda: bool(late.replies))
    assert [reply.generation for reply in late.replies] == [1]


def test_a_late_channel_that_brings_nonsense_is_closed(late: Late) -> None:
    late.time_out(lambda: late.channels.call(Ping, Done, 0.05))
    late.take_requests(1)
    its = late.channels._late[0]
    late.answer(garbage=True)
    late.collect(lambda: its._socket.closed)
    assert not late.channels.collect_late()
    assert late.replies == []


def test_a_reply_that_never_comes_is_given_up_with_its_channel(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "LATE_CHANNEL_S", 0.2)
    late.time_out(lambda: late.channels.call(Ping, Done, 0.05))
    its = late.channels._late[0]
    assert late.channels.collect_late()
    late.collect(lambda: its._socket.closed)
    assert not late.channels.collect_late()


def test_each_request_of_a_pipeline_has_its_own_deadline(late: Late) -> None:
    begun_us = time.monotonic_ns() // 1000
    late.time_out(lambda: pings(late, 2))
    late.take_requests(2)
    first, second = late.deadlines_us
    assert begun_us + 50_000 <= first <= second < begun_us + 4_000_000, "50 ms after it was sent"


def test_a_reply_of_another_type_breaks_the_channel(late: Late) -> None:
    def wait() -> None:
        late.take_requests(1)
        late.answer()

    thread = threading.Thread(target=wait)
    thread.start()
    with pytest.raises(ProtocolError, match="answered with Done"):
        late.channels.call(Stats, Stats, 10.0)  # type: ignore[type-var]
    thread.join(30)
    assert (len(late.channels._idle), len(late.channels._late)) == (0, 0)


def test_what_a_channel_takes_is_bounded(late: Late) -> None:
    late.time_out(lambda: late.channels.call(Ping, Done, 0.05))
    socket: Any = late.channels._late[0]._socket
    assert socket.get(zmq.MAXMSGSIZE) == MAX_MESSAGE_BYTES


def test_a_late_channel_is_closed_with_the_others_while_it_is_looked_at(
    late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    late.time_out(lambda: late.channels.call(Ping, Done, 0.05))
    its = late.channels._late[0]
    read = late.channels._read_late

    def closing(looked_at: Channel) -> bool:
        late.channels.close()
        return read(looked_at)

    monkeypatch.setattr(late.channels, "_read_late", closing)
    assert not late.channels.collect_late()
    assert its._socket.closed
