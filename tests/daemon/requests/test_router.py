"""The ROUTER's own duties between two requests: who connects, what was sent, and who is cut."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from played import played

from tiercache.daemon.requests import router
from tiercache.daemon.requests.router import Answer, Router
from tiercache.daemon.requests.sessions import Session
from tiercache.daemon.requests.unsent import Unsent
from tiercache.protocol.messages import Hello

DEADLINE_S = 30.0


def router_at(path: Path, cut: list[Session]) -> Router:
    """It gives each request the same answer, and notes the sessions that it cuts."""
    endpoint, answer = f"ipc://{path}/control", Answer(b"answer", None)
    return Router(endpoint, lambda *request: answer, lambda session, why: cut.append(session), Unsent(), 10)


def session() -> Session:
    return Session(Hello(1, 1, bytes(16), "s", 0, False), "p")


@played
async def test_a_peer_that_was_heard_has_completed_its_handshake(tmp_path: Path) -> None:
    with closing(router_at(tmp_path, [])) as ours, zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(f"ipc://{tmp_path}/control")
        peer.send(b"hello")

        async def answered() -> None:
            while not peer.poll(0):
                await asyncio.sleep(0.001)

        await asyncio.wait_for(answered(), DEADLINE_S)
        ours.tick()
        assert (ours.connections.count, ours.connections._greeting) == (1, {})


@played
async def test_an_answer_that_cannot_be_sent_releases_its_block(tmp_path: Path) -> None:
    cut = list[Session]()
    with closing(router_at(tmp_path, cut)) as ours:
        done: list[str] = []
        ours.reply(b"unknown", Answer(b"header", session(), b"p" * 5000, lambda: done.append("done")))
        await asyncio.sleep(0)
        assert (done, cut, ours._sending) == (["done"], [], {}), "its session socket reports that it has gone"


@played
async def test_many_requests_at_once_are_served_a_few_milliseconds_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon still handles a session's last requests when the session ends, up to a batch."""
    now_ns, served = 0, 0
    monkeypatch.setattr(router, "time", SimpleNamespace(perf_counter_ns=lambda: now_ns))

    def handle(identity: bytes, header: bytes, parts: object) -> None:
        nonlocal now_ns, served
        now_ns, served = now_ns + router.BATCH_NS // 4, served + 1

    endpoint = f"ipc://{tmp_path}/control"
    ours = Router(endpoint, handle, lambda session, why: None, Unsent(), 10)
    sender = zmq.Context.instance().socket(zmq.DEALER)
    sender.setsockopt(zmq.SNDHWM, 0)  # this thread receives too, so it must never wait until it can send
    sender.connect(endpoint)
    while served < 1:  # the handshake is complete
        sender.send(b"hello")
        await asyncio.sleep(0.001)
        ours.drain(1)
    while not ours.drain(router.DRAIN_REQUESTS):
        pass
    counts = []
    for limit in (router.BATCH, 3):
        empty = True
        while empty:  # the requests arrived more slowly than they were served
            for _ in range(100):
                sender.send(b"again")
            served = 0
            empty = ours.drain(limit)
        counts.append(served)
    ours.close()
    sender.close(0)
    assert counts == [4, 3]
