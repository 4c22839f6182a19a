"""The port without a daemon: its routes when the client behind them fails or is overloaded, and whom it serves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest

from tiercache.client.client import Client
from tiercache.errors import DaemonUnavailable
from tiercache.http import app
from tiercache.http.affinity import Affinity
from tiercache.http.app import HttpError, Trees
from tiercache.http.history import History
from tiercache.http.hosts import MAX_SHOWN_CHARS, HostCheck, allowed_hosts, refusal

DEADLINE_S = 60.0
SEARCH = json.dumps({"model": "m", "segments": [{"unordered": [[1], [2]]}], "salt": ""}).encode()


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
        return str(json.loads(self.body)["error"]["code"])


@pytest.fixture(autouse=True)
def no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(History, "start", lambda self: None)


def port(error: Exception | None = None) -> Any:
    client = NoDaemon(error or DaemonUnavailable("the daemon has gone"))
    return app.build_app(cast("Client", client), DEADLINE_S)


class Query:
    """One request; its body comes when `comes` is set."""

    def __init__(self, port: Any, path: str, method: str = "GET", body: bytes = b"[]") -> None:
        self._port, self._body = port, body
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
        self.comes = asyncio.Event()
        self.asked = asyncio.Event()

    async def answer(self) -> Answer:
        sent: list[Any] = []

        async def receive() -> Any:
            self.asked.set()
            await self.comes.wait()
            return {"type": "http.request", "body": self._body, "more_body": False}

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
        query.comes.set()
        return await query.answer()

    return asyncio.run(run())


def test_without_a_daemon_the_probes_say_so_and_metrics_are_served() -> None:
    for path in ("/healthz", "/v1/stats"):
        answer = ask(path)
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "daemon_unavailable", "1")
    metrics = ask("/metrics")
    assert (metrics.status, b"\ntiercache_up 0" in metrics.body) == (200, True)


def test_a_defect_is_answered_without_its_words() -> None:
    answer = ask("/healthz", error=RuntimeError("/etc/secret"))
    assert (answer.status, answer.code) == (500, "failed")
    assert (b"RuntimeError" in answer.body, b"secret" in answer.body) == (True, False)


@pytest.mark.parametrize(
    ("limit", "bodies"), [("MAX_QUERIES", (b"[]", b"[]")), ("MAX_SEARCHES", (SEARCH, SEARCH))], ids=["bodies", "orders"]
)
def test_more_queries_than_a_few_are_told_to_come_again(
    limit: str, bodies: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests whose bodies are still arriving count too, and each only as long as it takes."""
    monkeypatch.setattr(app, limit, 1)

    async def run() -> None:
        its, searching, end = port(), asyncio.Event(), asyncio.Event()

        async def hold(self: Any, question: Callable[[], Any]) -> dict[str, Any]:
            searching.set()
            await end.wait()
            return {"order": [[0, 1]]}

        monkeypatch.setattr(app.PortRoutes, "_ask", hold)
        monkeypatch.setattr(Affinity, "ask", None)
        for _ in range(2):
            first, second = (Query(its, "/v1/affinity", "POST", body) for body in bodies)
            task = asyncio.create_task(first.answer())
            await asyncio.wait_for(first.asked.wait(), DEADLINE_S)
            if limit == "MAX_SEARCHES":
                first.comes.set()
                await asyncio.wait_for(searching.wait(), DEADLINE_S)
            second.comes.set()
            busy = await second.answer()
            assert (busy.status, busy.code, busy.headers["retry-after"]) == (503, "busy", "1")
            first.comes.set()
            end.set()
            assert (await task).status == (200 if limit == "MAX_SEARCHES" else 400)
            searching.clear()
            end.clear()

    asyncio.run(run())


def test_clients_share_questions_and_each_gets_an_answer_newer_than_its_own() -> None:
    gates: list[asyncio.Event] = []

    async def question() -> dict[str, Any]:
        gates.append(asyncio.Event())
        number = len(gates)
        await gates[-1].wait()
        if number == 3:
            raise HttpError(503, "daemon_unavailable", "gone")
        return {"number": number}

    async def clients() -> list[Any]:
        trees, tasks = Trees(question), []
        for count in (1, 100, 2, 1):
            asked = len(gates)
            tasks += [asyncio.create_task(trees.get()) for _ in range(count)]  # while the one before is under way
            await asyncio.sleep(0)
            if asked:
                gates[asked - 1].set()
            while len(gates) == asked:
                await asyncio.sleep(0)
        gates[-1].set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = asyncio.run(clients())
    assert answers[:101] == [{"number": 1}] + [{"number": 2}] * 100
    assert [type(answer) for answer in answers[101:103]] == [HttpError] * 2
    assert answers[103] == {"number": 4}, "what failed is not an answer to the next"


def complaint(host: str = "", method: str = "GET", named: str = "", **headers: str) -> Any:
    async def nothing(scope: Any, receive: Any, send: Any) -> None: ...

    check = HostCheck(nothing, allowed_hosts("127.0.0.1", named), refusal, "--http-hosts")
    given = [("host", host), *((name.replace("_", "-"), value) for name, value in headers.items())]
    encoded = [(name.encode(), value.encode()) for name, value in given if value]
    return check._complaint({"type": "http", "method": method, "headers": encoded})


OURS = "localhost LocalHost.:81 127.0.0.1 127.0.0.1: 127.0.0.1:81 ::1 [::1]:81 [0:0:0:0:0:0:0:1] cache.x cache.x:1"
THEIRS = "evil.example localhost.evil.example:80 127.0.0.1.evil.example 192.0.2.1 localhost:80:90 ::1:80 null"


def test_names_of_this_host_are_served() -> None:
    for host in OURS.split():
        assert complaint(host, named="cache.x, proxy") is None, host
        assert complaint(host, named="cache.x, proxy", origin=f"http://{host}") is None, host


def test_another_name_and_pages_of_others_get_nothing() -> None:
    for host in THEIRS.split():
        found = complaint(host)
        assert (found.status, found.code) == (421, "wrong_host"), host
        assert repr(host) in found.text
        assert "--http-hosts" in found.text
        for origin in (f"http://{host}", "null", "file://"):
            found = complaint("localhost", origin=origin)
            assert (found.status, found.code) == (403, "wrong_origin"), origin
        assert len(complaint(host + "x" * 5000).text) < MAX_SHOWN_CHARS + 200


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; b=1", 415),
        ("", 415),
        ("Application/JSON; charset=utf-8", None),
    ],
)
def test_forms_of_a_page_are_no_queries(kind: str, status: int | None) -> None:
    found = complaint("localhost", "POST", content_type=kind)
    assert (found and found.status) == status


def test_where_other_hosts_connect_any_name_will_do_unless_some_are_given() -> None:
    assert allowed_hosts("0.0.0.0", "") == frozenset()
    assert allowed_hosts("0.0.0.0", "cache.internal") >= {"cache.internal", "localhost"}
    assert allowed_hosts("127.0.0.2", "") >= {"127.0.0.2", "localhost", "127.0.0.1", "::1"}
