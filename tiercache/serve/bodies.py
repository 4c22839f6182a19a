"""Reads request bodies within limits: on the size and the time of each, and on the total held at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from tiercache.serve.failures import ApiError

BODY_TIMEOUT_S = 60.0
# A token rarely takes more bytes in JSON, as an id or as a text full of escapes.
_TOKEN_BYTES = 32
_LEAST_BYTES = 1 << 20
_MOST_BYTES = 16 << 20
MAX_HELD_BYTES = 256 << 20


class Bodies:
    """Reads bodies. `max_model_len` bounds their size, since decoding JSON blocks the event loop."""

    def __init__(self, max_model_len: int) -> None:
        self._max_bytes = min(_LEAST_BYTES + max_model_len * _TOKEN_BYTES, _MOST_BYTES)
        self._held_bytes = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytearray]:
        """The body, which counts as held within the `with`. Raises ApiError if it is too large or too late."""
        body = bytearray()
        try:
            try:
                await asyncio.wait_for(self._read(request, body), BODY_TIMEOUT_S)
            except asyncio.TimeoutError:
                raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:.0f} s") from None
            yield body
        finally:
            self._held_bytes -= len(body)

    async def _read(self, request: Request, body: bytearray) -> None:
        async for part in request.stream():
            if len(body) + len(part) > self._max_bytes:
                text = f"the body has more than {self._max_bytes} bytes: ask for less in one request"
                raise ApiError(413, text, code="body_too_large")
            if self._held_bytes + len(part) > MAX_HELD_BYTES:
                raise ApiError(503, f"requests of {MAX_HELD_BYTES} bytes are being read: try again later")
            body += part
            self._held_bytes += len(part)
