"""A uvicorn connection with deadlines, which answers bad requests in JSON.

uvicorn itself has no deadline for a request that comes slowly or for an answer that the client does not read.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 128
MAX_HEADER_BYTES = 16 << 10
GRACE_S = 5.0
"""Extra seconds in which a connection is told that the time for its request is over."""


def error_body(code: str, text: str) -> bytes:
    """The body of every failed request."""
    return msgspec.json.encode({"error": {"code": code, "message": text}})


class LimitedConnection(H11Protocol):
    """One connection. `request_s`: how long a request may take, from its first byte to the end of its answer."""

    request_s: ClassVar[float] = 30.0
    _timer: asyncio.TimerHandle | None = None
    _armed_s: float = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Arm the timer. A connection above the limit replaces the one that has sent no request for longest."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            # Otherwise a client that opens so many and stays silent keeps out the liveness probes of a pod.
            silent = [one for one in self.connections if isinstance(one, LimitedConnection) and one._is_silent]
            if silent:
                given_up = min(silent, key=lambda one: one._armed_s)
                given_up.transport.abort()
                # Its end is reported later. Until then the next connection above the limit must not choose it again.
                self.connections.discard(given_up)
            else:
                self._refuse(503, "busy", f"{MAX_CONNECTIONS} connections are open: try again")
        self._arm()

    @property
    def _is_silent(self) -> bool:
        """True if no request, or not its whole head, has come since the last one was answered."""
        return self._armed_s > 0 and (self.cycle is None or self.cycle.response_complete)

    def connection_lost(self, exc: Exception | None) -> None:
        """Disarm it."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Restart the timer for the next request; between two requests uvicorn waits for less than that."""
        self._arm()
        super().on_response_complete()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_s = self.loop.time()
        self._timer = self.loop.call_later(self.request_s + GRACE_S, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Answer input that is not an HTTP request."""
        self._refuse(400, "bad_request", "this is not an HTTP request, or its head is too long")

    def _refuse(self, status: int, code: str, text: str) -> None:
        headers = [("content-type", "application/json"), ("connection", "close")]
        body = error_body(code, text)
        events: list[Any] = [
            h11.Response(status_code=status, headers=[*headers, ("content-length", str(len(body)))]),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()
