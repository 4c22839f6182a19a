"""The guards of the engine's server, one by one: keys, bodies, idle connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import h11
import pytest
from starlette.requests import Request
from starlette.types import Message
from uvicorn.protocols.http.h11_impl import H11Protocol

from tiercache.engine.async_engine import EngineDied, QueueFull, Stalled, Stopping, StreamUnread
from tiercache.errors import ConfigError
from tiercache.http.hosts import allowed_hosts
from tiercache.serve import app
from tiercache.serve.app import Bodies, ModelService, build_app
from tiercache.serve.failures import ApiError, api_error
from tiercache.serve.server import Sweeper, cut_unsent

DEADLINE_S = 60.0
JSON = "application/json"


def service(**changed: Any) -> ModelService:
    """One without an engine behind it."""
    parts = {
        "engine": SimpleNamespace(max_model_len=100, death=None, stall=None),
        "prompts": SimpleNamespace(tokenizer=SimpleNamespace(get_vocab=lambda: {"a": 0})),
        "model": "m",
        "metrics": SimpleNamespace(text=lambda: b""),
        "defaults": {},
    }
    return ModelService(**{**parts, **changed})


def ask(asked: ModelService, method: str, path: str, **headers: str) -> tuple[int, bytes]:
    """Status and body of one request with the body `{}`; underscores stand for hyphens in headers."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
    }
    asyncio.run(cast("Any", build_app(asked))(scope, receive, send))
    return sent[0]["status"], sent[1]["body"]


@pytest.mark.parametrize("given", ["", "Bearer ", "Bearer guessed", "Bearer secre", "Bearer secret ", "Basic secret"])
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/models"), ("GET", "/v1/models/m"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions")],
)
def test_nothing_is_served_without_the_key(given: str, method: str, path: str) -> None:
    keyed = service(api_key="secret")
    status, body = ask(keyed, method, path, host="localhost", content_type=JSON, authorization=given)
    assert status == 401
    assert b"invalid_api_key" in body


def test_with_the_key_and_for_probes_all_is_served() -> None:
    keyed = service(api_key="secret")
    for path in ("/v1/models", "/v1/models/m"):
        assert ask(keyed, "GET", path, host="localhost", authorization="Bearer secret")[0] == 200
    for path in ("/health", "/metrics"):
        assert ask(keyed, "GET", path, host="localhost")[0] == 200


def test_pages_of_others_reach_no_route() -> None:
    """`http/hosts.py` decides. The stand-in for an engine has no `submit`: a request that reaches it gets a 500."""
    for path in ("/v1/models", "/metrics", "/health", "/v1/completions", "/nothing"):
        status, body = ask(service(), "GET", path, host="evil.example")
        assert (status, b"--allowed-hosts" in body) == (421, True)
    post = "POST", "/v1/completions"
    assert ask(service(), *post, host="localhost", origin="https://evil.example", content_type=JSON)[0] == 403
    assert ask(service(), *post, host="localhost", content_type="text/plain")[0] == 415
    assert ask(service(), *post, host="localhost", content_type=JSON)[0] == 400
    everywhere = service(hosts=allowed_hosts("0.0.0.0", ""))
    assert ask(everywhere, "GET", "/v1/models", host="node7")[0] == 200


@pytest.mark.parametrize("trouble", ["death", "stall"])
def test_health_says_what_is_wrong_with_the_engine(trouble: str) -> None:
    states = {"death": None, "stall": None, trouble: (EngineDied if trouble == "death" else Stalled)("it is over")}
    engine = SimpleNamespace(max_model_len=100, **states)
    status, body = ask(service(engine=engine), "GET", "/health", host="localhost")
    assert (status, b"it is over" in body) == (503, True)


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (QueueFull("x"), 429, "queue_full", "1"),
        (StreamUnread("x"), 408, "nobody_reads", None),
        (EngineDied("x"), 503, "engine_died", "10"),
        (Stalled("x"), 503, "engine_stalled", "10"),
        (Stopping("x"), 503, "stopping", "10"),
        (ConfigError("n is 0: at least 1"), 400, None, None),
    ],
)
def test_each_failure_says_whether_to_come_again(error: Exception, status: int, code: str, retry: str) -> None:
    made = api_error(error, ("n",))
    assert (made.status, made.code, made.response().headers.get("retry-after")) == (status, code, retry)
    assert made.param == ("n" if isinstance(error, ConfigError) else None)


# --- bodies --------------------------------------------------------------------------------------


def request(*parts: bytes, hangs: bool = False) -> Request:
    async def stream() -> AsyncIterator[bytes]:
        for part in parts:
            yield part
        if hangs:
            await asyncio.Event().wait()

    return cast("Request", SimpleNamespace(stream=stream))


def refused(held: Bodies, its: Request) -> int:
    async def read() -> None:
        async with held.read(its):
            raise AssertionError("it was read")

    with pytest.raises(ApiError) as caught:
        asyncio.run(asyncio.wait_for(read(), DEADLINE_S))
    return caught.value.status


def test_bodies_are_bounded_each_and_all_that_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_HELD_BYTES", 250)
    held = Bodies(100)
    held._max_bytes = 200
    assert refused(held, request(b"x" * 150, b"x" * 51)) == 413

    async def two_at_once() -> None:
        async with held.read(request(b"x" * 100, b"x" * 100)) as first:
            assert len(first) == 200
            with pytest.raises(ApiError, match="requests of 250 bytes are being read") as caught:
                async with held.read(request(b"x" * 51)):
                    raise AssertionError("it was read")
            assert caught.value.status == 503
            async with held.read(request(b"x" * 50)) as second:
                assert len(second) == 50
        async with held.read(request(b"x" * 200)):
            pass

    asyncio.run(two_at_once())
    assert held._held_bytes == 0


def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_TIMEOUT_S", 0.01)
    held = Bodies(100)
    assert refused(held, request(b"half", hangs=True)) == 408
    assert held._held_bytes == 0


# --- connections ---------------------------------------------------------------------------------


class Cycle:
    """One request; each is itself alone."""

    def __init__(self, response_complete: bool) -> None:
        self.response_complete = response_complete


class Connection(H11Protocol):
    """One of uvicorn's, as far as it is looked at."""

    def __init__(self, cycle: Any = None, paused: bool = False, state: Any = h11.IDLE) -> None:
        self.cycle = cycle
        self.flow = cast("Any", SimpleNamespace(write_paused=paused))
        self.conn = cast("Any", SimpleNamespace(their_state=state))
        self.waiting = 0
        self.aborted = False
        self.transport = cast("Any", SimpleNamespace(abort=self._abort, get_write_buffer_size=lambda: self.waiting))

    def _abort(self) -> None:
        self.aborted = True


def test_what_stands_still_from_one_sweep_to_the_next_is_closed() -> None:
    done, computing = Cycle(True), Cycle(False)
    silent, idle, unread = Connection(), Connection(done), Connection(computing, paused=True)
    waits, reads, asks = Connection(computing), Connection(computing, paused=True), Connection(done)
    everyone: list[Any] = [silent, idle, unread, waits, reads, asks, object()]
    sweeper = Sweeper()
    sweeper.sweep(everyone)
    assert not any(one.aborted for one in everyone[:-1])
    reads.waiting = 5
    asks.cycle = cast("Any", Cycle(True))
    late = Connection()
    sweeper.sweep([*everyone, late])
    assert [one.aborted for one in everyone[:-1]] == [True, True, True, False, False, False]
    assert not late.aborted


def test_at_the_end_only_those_are_cut_whose_request_has_not_come() -> None:
    half, whole = Connection(state=h11.SEND_BODY), Connection(state=h11.DONE)
    cut_unsent([half, whole, object()])
    assert (half.aborted, whole.aborted) == (True, False)
