"""The daemon's port without a daemon: its routes when the client behind them fails, waits or is overloaded."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple, cast

import msgspec
import pytest

from tiercache.client.client import Client
from tiercache.errors import DaemonUnavailable
from tiercache.http import app
from tiercache.http.history import History
from tiercache.http.probe import Probe

DEADLINE_S = 30.0


class NoDaemon:
    """A client whose daemon has gone, or fails unexpectedly."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        def fail(*arguments: Any, **named: Any) -> Any:
            raise self.error

        return fail


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        return str(msgspec.json.decode(self.body)["error"]["code"])


@pytest.fixture(autouse=True)
def no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(History, "start", lambda self: None)


def port(error: Exception | None = None) -> Any:
    client = NoDaemon(error or DaemonUnavailable("the daemon has gone"))
    return app.build_app(cast("Client", client), 30.0)


class Query:
    """One request; its body comes when `body` is set."""

    def __init__(self, port: Any, path: str, method: str = "GET") -> None:
        self._port = port
        path, _, query = path.partition("?")
        self._scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [],
            "scheme": "http",
            "http_version": "1.1",
        }
        self.body = asyncio.Event()
        self.asked = asyncio.Event()

    async def answer(self) -> Answer:
        sent: list[Any] = []

        async def receive() -> Any:
            self.asked.set()
            await self.body.wait()
            return {"type": "http.request", "body": b"[]", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        try:
            await asyncio.wait_for(self._port(self._scope, receive, send), DEADLINE_S)
        except RuntimeError:
            assert sent, "a defect is answered, and then told to the server"
        headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return Answer(sent[0]["status"], headers, sent[1]["body"])


def ask(path: str, method: str = "GET", error: Exception | None = None) -> Answer:
    async def run() -> Answer:
        query = Query(port(error), path, method)
        query.body.set()
        return await query.answer()

    return asyncio.run(run())


def test_without_a_daemon_the_probes_say_so_and_metrics_are_served() -> None:
    for path in ("/healthz", "/v1/stats"):
        answer = ask(path)
        assert (answer.status, answer.code) == (503, "daemon_unavailable")
        assert answer.headers["retry-after"] == "1"
    metrics = ask("/metrics")
    assert metrics.status == 200
    assert b"\ntiercache_up 0" in metrics.body


def test_a_daemon_that_is_not_ready_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probe, "ask", lambda self: ("it stores nothing", ""))
    answer = ask("/readyz")
    assert (answer.status, answer.code) == (503, "not_ready")
    monkeypatch.setattr(Probe, "ask", lambda self: ("", "the arena is full"))
    assert msgspec.json.decode(ask("/readyz").body) == {"status": "ready", "remark": "the arena is full"}


def test_a_defect_is_answered_without_its_words() -> None:
    answer = ask("/healthz", error=RuntimeError("/etc/secret"))
    assert (answer.status, answer.code) == (500, "failed")
    assert b"RuntimeError" in answer.body
    assert b"secret" not in answer.body


def test_a_wrong_method_is_told_which_one_is_right() -> None:
    answer = ask("/v1/affinity")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("after", ["-1", "x", "1" * 16, "%C2%B2"])
def test_what_is_no_number_of_a_sample_is_refused(after: str) -> None:
    assert ask(f"/v1/history?after={after}").code == "bad_query"


def test_so_many_queries_are_answered_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests whose bodies are still arriving count too, and each only as long as it takes."""
    monkeypatch.setattr(app, "MAX_QUERIES", 1)

    async def run() -> None:
        its = port()
        for _ in range(3):
            first, second = (Query(its, "/v1/affinity", "POST") for _ in range(2))
            task = asyncio.create_task(first.answer())
            await asyncio.wait_for(first.asked.wait(), DEADLINE_S)
            second.body.set()
            busy = await second.answer()
            assert (busy.status, busy.code, busy.headers["retry-after"]) == (503, "busy", "1")
            first.body.set()
            assert (await task).code == "bad_query"

    asyncio.run(run())
