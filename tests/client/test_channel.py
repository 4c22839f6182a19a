"""Requests that wait for their reply, against a ROUTER that never gives one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from tiercache.channel import Channels
from tiercache.errors import DaemonUnavailable, TierCacheError
from tiercache.messages import TOKEN_BYTES, Done, Ping

DEADLINE_S = 600.0
"""Nobody waits this long: a test that did would fail by its own limit."""


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
def test_the_end_of_a_session_wakes_those_who_wait(
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
