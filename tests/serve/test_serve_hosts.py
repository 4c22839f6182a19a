"""What web pages of others can have a browser send to a server on this host: none of it comes to a route."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Message

from tiercache.errors import ConfigError
from tiercache.http.hosts import allowed_hosts
from tiercache.serve.app import Service, build_app
from tiercache.serve.settings import ServeSettings

JSON = "application/json"


class _NoEngine:
    max_model_len = 100
    death = stall = None


def _service(hosts: frozenset[str] | None = None) -> Service:
    parts: dict[str, Any] = {
        "engine": _NoEngine(),
        "prompts": SimpleNamespace(tokenizer=SimpleNamespace(get_vocab=lambda: {"a": 0})),
        "model": "m",
        "metrics": SimpleNamespace(text=lambda: b""),
        "defaults": {},
    }
    return Service(**parts, **({} if hosts is None else {"hosts": hosts}))


def _ask(service: Service, method: str, path: str, **headers: str) -> tuple[int, bytes]:
    """Status and body of one request with the body `{}`; underscores stand for hyphens in headers."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": encoded,
        "scheme": "http",
        "http_version": "1.1",
    }
    asyncio.run(cast("Any", build_app(service))(scope, receive, send))
    return sent[0]["status"], sent[1]["body"]


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/health", "/v1/completions", "/nothing"])
def test_names_that_were_made_to_mean_this_host_get_nothing(path: str) -> None:
    for host in ("evil.example", "localhost.evil.example:8000", "192.0.2.1"):
        status, body = _ask(_service(), "GET", path, host=host)
        assert status == 421
        assert b"wrong_host" in body
        assert b"--allowed-hosts" in body


def test_this_host_is_served_by_its_names() -> None:
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000"):
        assert _ask(_service(), "GET", "/v1/models", host=host)[0] == 200
    assert _ask(_service(), "GET", "/v1/models", host="localhost", origin="http://localhost:8000")[0] == 200
    assert _ask(_service(), "GET", "/v1/models")[0] == 200, "no browser leaves Host out"


def test_pages_of_others_and_their_forms_do_not_come_to_the_engine() -> None:
    """The stand-in for an engine has no `submit`: to come there is a 500."""
    post = "POST", "/v1/completions"
    assert _ask(_service(), *post, host="localhost", origin="https://evil.example", content_type=JSON)[0] == 403
    for kind in ({}, {"content_type": "text/plain"}, {"content_type": "application/x-www-form-urlencoded"}):
        assert _ask(_service(), *post, host="localhost", **kind)[0] == 415
    assert _ask(_service(), *post, host="localhost", content_type="application/json; charset=utf-8")[0] == 400
    status, body = _ask(_service(), "OPTIONS", "/v1/completions", host="localhost", origin="https://evil.example")
    assert status == 403, "a browser that asks first is not let through"
    assert b"wrong_origin" in body


def test_further_names_can_be_allowed() -> None:
    service = _service(allowed_hosts("127.0.0.1", "llm.internal"))
    assert _ask(service, "GET", "/v1/models", host="llm.internal", origin="https://llm.internal")[0] == 200
    assert _ask(service, "GET", "/v1/models", host="evil.example")[0] == 421
    everywhere = _service(allowed_hosts("0.0.0.0", ""))
    assert _ask(everywhere, "GET", "/v1/models", host="node7")[0] == 200
    assert _ask(everywhere, "POST", "/v1/completions", host="node7", content_type="text/plain")[0] == 415


def test_what_is_no_name_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts is http://x: 'http://x' is no host"):
        ServeSettings(model=tmp_path, allowed_hosts="http://x")
