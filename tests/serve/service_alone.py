"""The HTTP service without an engine behind it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from starlette.types import Message

from tiercache.serve.app import ModelService, build_app

JSON = "application/json"


class _NoEngine:
    max_model_len = 100
    death = stall = None


def bare_service(hosts: frozenset[str] | None = None) -> ModelService:
    parts: dict[str, Any] = {
        "engine": _NoEngine(),
        "prompts": SimpleNamespace(tokenizer=SimpleNamespace(get_vocab=lambda: {"a": 0})),
        "model": "m",
        "metrics": SimpleNamespace(text=lambda: b""),
        "defaults": {},
    }
    return ModelService(**parts, **({} if hosts is None else {"hosts": hosts}))


def ask(service: ModelService, method: str, path: str, **headers: str) -> tuple[int, bytes]:
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
