"""The ROUTER's own duties between two requests: who connects, what was sent, and who is cut."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from tiercache.daemon.ground.connections import Connections
from tiercache.daemon.requests import router
from tiercache.daemon.requests.router import MAX_OUTSTANDING, Answer, Router, _Sending
from tiercache.daemon.requests.sessions import Session
from tiercache.daemon.requests.unsent import Unsent
from tiercache.errors import ConfigError
from tiercache.protocol.messages import MAX_MESSAGE_BYTES, Hello

DEADLINE_S = 30.0


def play(path: Path, scenario: Callable[[Router, list[Session]], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        cut: list[Session] = []

        def answered(identity: bytes, header: bytes, parts: object) -> Answer:
            return Answer(b"answer", None)

        ours = Router(f"ipc://{path}/control", answered, lambda session, why: cut.append(session), Unsent(), 10)
        try:
            await scenario(ours, cut)
        finally:
            ours.close()

    asyncio.run(run())


def session() -> Session:
    return Session(Hello(1, 1, bytes(16), "s", 0, False), "p")


def test_its_socket_is_for_its_owner_alone(tmp_path: Path) -> None:
    async def scenario(ours: Router, cut: list[Session]) -> None:
        assert stat.S_IMODE((tmp_path / "control").stat().st_mode) == 0o600

    play(tmp_path, scenario)


def test_each_tick_looks_at_some_connection_events_until_all_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(ours: Router, cut: list[Session]) -> None:
        left = [False, True, True]
        monkeypatch.setattr(ours.connections, "look", lambda: left.pop())
        ours.tick()
        assert len(left) == 2, "a part at a time"
        for _ in range(10):
            await asyncio.sleep(0)
        assert not left

    play(tmp_path, scenario)


def test_each_tick_lets_go_of_what_was_sent(tmp_path: Path) -> None:
    async def scenario(ours: Router, cut: list[Session]) -> None:
        done: list[int] = []
        for number, sent in enumerate((True, False)):
            reader = session()
            ours._unsent.add(reader, 100)
            tracker: Any = SimpleNamespace(done=sent)
            ours._sending[bytes([number])] = deque([_Sending(tracker, reader, 100, partial(done.append, number))])
            ours._turn.append(bytes([number]))
        ours.tick()
        assert (done, list(ours._sending)) == ([0], [b"\1"])

    play(tmp_path, scenario)


def test_a_peer_that_does_not_read_is_cut_after_its_request_and_not_within(tmp_path: Path) -> None:
    async def scenario(ours: Router, cut: list[Session]) -> None:
        one = session()
        ours._cut_later(one)
        assert not cut
        await asyncio.sleep(0)
        assert cut == [one]

    play(tmp_path, scenario)


def test_a_peer_that_was_heard_has_completed_its_handshake(tmp_path: Path) -> None:
    async def scenario(ours: Router, cut: list[Session]) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.setsockopt(zmq.LINGER, 0)
            peer.connect(f"ipc://{tmp_path}/control")
            peer.send(b"hello")

            async def answered() -> None:
                while not peer.poll(0):
                    await asyncio.sleep(0.001)

            await asyncio.wait_for(answered(), DEADLINE_S)
            assert ours.connections._heard
            ours.tick()
            assert (ours.connections.count, ours.connections._greeting) == (1, {})

    play(tmp_path, scenario)


def test_an_endpoint_that_is_taken_is_one_line_and_closes_its_count_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Connections] = []

    class Noted(Connections):
        def close(self) -> None:
            closed.append(self)
            super().close()

    monkeypatch.setattr(router, "Connections", Noted)

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(ConfigError, match=f"nothing can be served at {endpoint}: Address already in use"):
                Router(endpoint, lambda *_: None, lambda *_: None, Unsent(), 10)
        assert len(closed) == 1
        closed[0]._socket.context.term()

    asyncio.run(run())


def test_an_answer_that_cannot_be_sent_releases_its_block(tmp_path: Path) -> None:
    async def scenario(ours: Router, cut: list[Session]) -> None:
        done: list[str] = []
        ours.reply(b"unknown", Answer(b"header", session(), b"p" * 5000, lambda: done.append("done")))
        await asyncio.sleep(0)
        assert (done, cut, ours._sending) == (["done"], [], {}), "its session socket reports that it has gone"

    play(tmp_path, scenario)


def test_messages_and_queues_are_bounded(tmp_path: Path) -> None:
    async def scenario(ours: Router, cut: list[Session]) -> None:
        limits = [ours._socket.getsockopt(option) for option in (zmq.MAXMSGSIZE, zmq.SNDHWM, zmq.RCVHWM)]
        assert limits == [MAX_MESSAGE_BYTES, MAX_OUTSTANDING, MAX_OUTSTANDING]

    play(tmp_path, scenario)
