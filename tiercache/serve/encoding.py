"""JSON over HTTP and in server-sent events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response


def json_response(tree: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer in one piece."""
    return Response(msgspec.json.encode(tree), status, dict(headers or {}), "application/json")


def event(tree: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(tree) + b"\n\n"


END_OF_EVENTS = b"data: [DONE]\n\n"
