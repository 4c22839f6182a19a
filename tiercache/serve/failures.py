"""Failed requests, with bodies like OpenAI's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from tiercache.engine.async_engine import EngineDied, QueueFull, Stalled, Stopping, StreamUnread
from tiercache.errors import ConfigError


def json_response(tree: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer in one piece."""
    return Response(msgspec.json.encode(tree), status, dict(headers or {}), "application/json")


def event(tree: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(tree) + b"\n\n"


END_OF_EVENTS = b"data: [DONE]\n\n"


_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "10"}}
# Limit in characters of a message, which may quote what the client sent.
_MAX_TEXT = 400


class ApiError(Exception):
    """A failed request. `param` is the field that is wrong, `code` a word for programs."""

    def __init__(self, status: int, text: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(_clip(text))
        self.status = status
        self.param = param and _clip(param)
        self.code = code

    def body(self) -> dict[str, Any]:
        """The error as clients get it."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body(), status=self.status, headers=_HEADERS.get(self.status, {}))


def _clip(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."


def api_error(error: Exception, fields: Collection[str] = ()) -> ApiError:
    """An error of the engine as the answer to a request with these `fields`; raises any other error again."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ConfigError):
        # Messages begin with the name of the setting, if it is about a setting.
        first = str(error).split(" ", 1)[0]
        return ApiError(400, str(error), param=first if first in fields else None)
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, StreamUnread):
        return ApiError(408, str(error), code="nobody_reads")
    if isinstance(error, EngineDied):
        return ApiError(503, str(error), code="engine_died")
    if isinstance(error, Stalled):
        return ApiError(503, str(error), code="engine_stalled")
    if isinstance(error, Stopping):
        return ApiError(503, str(error), code="stopping")
    raise error
