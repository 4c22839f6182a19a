"""The routes of the HTTP server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tiercache.client.client import Client
from tiercache.errors import DaemonUnavailable, TierCacheError
from tiercache.http.affinity import Affinity, Query, UnknownModel
from tiercache.http.history import History
from tiercache.http.limits import error_body
from tiercache.http.metrics import CONTENT_TYPE, metrics_text
from tiercache.http.models import models_by_namespace
from tiercache.http.probe import Probe
from tiercache.protocol.messages import Models

MAX_BODY_BYTES = 2 << 20
"""Limit of a body: a prompt of about 300 000 tokens."""
MAX_QUERIES = 32
"""Affinity queries at a time, including those whose bodies are still arriving."""
THREADS = 8
MAX_SEARCHES = 2
"""Affinity queries with segments at a time: each may take a thread for a second or two."""
_JSON = "application/json"
HUNG_UP = 499
"""Status of an answer whose client has hung up; nginx's code for it."""

T = TypeVar("T")
logger = logging.getLogger("tiercache.http")
_decode_query = msgspec.json.Decoder(Query).decode


EVERY_S = 0.1
"""Least seconds between two requests to the daemon."""


FOLDER = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGE = "dashboard.html"
HEADERS = {
    # Nothing inline, nothing from elsewhere, and no framing.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


class Trees:
    """One request at a time. Callers that come while it is under way share the answer to the next one, which is newer.

    An answer is never older than its request. For one event loop.
    """

    def __init__(
        self, ask: Callable[[], Awaitable[Mapping[str, Any]]], clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._clock_s = clock_s
        self._lock = asyncio.Lock()
        self._asked_s = float("-inf")
        self._answer: Mapping[str, Any] | Exception = {}

    async def get(self) -> Mapping[str, Any]:
        """The tree as of some time after this call. Raises what the request to the daemon raises."""
        came_s = self._clock_s()
        async with self._lock:
            if self._asked_s < came_s:
                await asyncio.sleep(max(0.0, self._asked_s + EVERY_S - self._clock_s()))
                self._asked_s = self._clock_s()
                try:
                    self._answer = await self._ask()
                except asyncio.CancelledError:
                    self._asked_s = float("-inf")
                    raise
                except Exception as error:  # noqa: BLE001 - given to each caller
                    self._answer = error  # so that callers do not ask a hung daemon one by one
            if isinstance(self._answer, Exception):
                raise self._answer
            return self._answer


class HttpError(Exception):
    """A request that fails."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.code = code

    def response(self) -> Response:
        headers = {"Retry-After": "1"} if self.status == 503 else {}
        return Response(error_body(self.code, str(self)), self.status, headers, _JSON)


class PortRoutes:
    """The endpoints. A few threads do all that waits for the daemon, with the deadlines of the client."""

    def __init__(self, client: Client, request_s: float) -> None:
        self._client = client
        self._affinity = Affinity(client)
        self._probe = Probe(client)
        self._trees = Trees(lambda: self._ask(lambda: client.stats(histograms=True)))
        self._history = History(
            lambda hot: client.stats(histograms=True, hot_prefixes=hot),
            lambda: models_by_namespace(client.session().call(Models).models),
        )
        self._history.start()
        self._request_s = request_s
        self._queries = 0
        self._searches = 0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="http")

    async def _ask(self, question: Callable[[], T]) -> T:
        """The daemon's answer. Raises HttpError if there is none."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, question)
        except UnknownModel as error:
            raise HttpError(404, "unknown_model", str(error)) from None
        except DaemonUnavailable as error:
            raise HttpError(503, "daemon_unavailable", str(error)) from None
        except TierCacheError as error:
            raise HttpError(502, "daemon_refused", str(error)) from None

    async def healthz(self, request: Request) -> Response:
        round_trip_s = await self._ask(self._client.ping)
        return _json({"status": "ok", "ping_us": round(round_trip_s * 1e6, 1)})

    async def readyz(self, request: Request) -> Response:
        problem, remark = await self._ask(self._probe.ask)
        if problem:
            raise HttpError(503, "not_ready", problem)
        return _json({"status": "ready", **({"remark": remark} if remark else {})})

    async def stats(self, request: Request) -> Response:
        tree = await self._trees.get()
        return _json({name: branch for name, branch in tree.items() if name != "histograms"})

    async def metrics(self, request: Request) -> Response:
        try:
            tree = await self._trees.get()
        except HttpError:
            tree = {}
        return Response(metrics_text(tree), headers={"Content-Type": CONTENT_TYPE})

    async def history(self, request: Request) -> Response:
        after = request.query_params.get("after", "0")
        if not after.isdecimal() or len(after) > 15:
            raise HttpError(400, "bad_query", "after must be the number of a sample")
        return Response(self._history.encode(int(after), request.query_params.get("life", "")), media_type=_JSON)

    async def affinity(self, request: Request) -> Response:
        if self._queries >= MAX_QUERIES:
            raise HttpError(503, "busy", f"{MAX_QUERIES} queries are being answered: try again")
        self._queries += 1
        try:
            query = _parse(await self._read_body(request))
            if query.groups:
                return await self._search(query)
            return _json(await self._ask(lambda: self._affinity.ask(query)))
        finally:
            self._queries -= 1

    async def _search(self, query: Query) -> Response:
        if self._searches >= MAX_SEARCHES:
            raise HttpError(503, "busy", f"{MAX_SEARCHES} queries with segments are being answered: try again")
        self._searches += 1
        try:
            return _json(await self._ask(lambda: self._affinity.ask(query)))
        finally:
            self._searches -= 1

    async def _read_body(self, request: Request) -> bytes:
        async def read() -> bytes:
            body = bytearray()
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise HttpError(413, "too_large", f"the body has more than {MAX_BODY_BYTES} bytes")
            return bytes(body)

        try:
            return await asyncio.wait_for(read(), self._request_s)
        except asyncio.TimeoutError:
            raise HttpError(408, "too_slow", f"the body did not come within {self._request_s:g} s") from None


def _json(tree: Mapping[str, Any]) -> Response:
    return Response(msgspec.json.encode(tree), media_type=_JSON)


def _parse(body: bytes) -> Query:
    try:
        return _decode_query(body)
    except msgspec.ValidationError as error:
        text = str(error)
        if "required field `salt`" in text:
            text = 'salt is missing: give that of the tenant, or "" where the engines have none'
        raise HttpError(400, "bad_query", text) from None
    except (ValueError, RecursionError) as error:
        raise HttpError(400, "bad_query", f"the body is not JSON: {error}") from None


def build_app(client: Client, request_s: float) -> Starlette:
    """The ASGI application. `request_s`: how long a body may take to arrive."""
    routes = PortRoutes(client, request_s)
    return Starlette(
        routes=[
            Route("/healthz", routes.healthz),
            Route("/readyz", routes.readyz),
            Route("/metrics", routes.metrics),
            Route("/v1/stats", routes.stats),
            Route("/v1/history", routes.history),
            Route("/v1/affinity", routes.affinity, methods=["POST"]),
            *page_routes(),
        ],
        exception_handlers={
            HttpError: _on_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_hang_up,
            Exception: _on_defect,
        },
    )


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return error.response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = {404: f"there is no {request.url.path} here", 405: f"{request.method} is not for {request.url.path}"}
    answer = HttpError(error.status_code, "bad_request", text.get(error.status_code, error.detail)).response()
    answer.headers.update(error.headers or {})
    return answer


async def _on_hang_up(request: Request, error: Exception) -> Response:
    return Response(status_code=HUNG_UP)


async def _on_defect(request: Request, error: Exception) -> Response:
    """An unexpected error; the log has the traceback."""
    return HttpError(500, "failed", f"the server failed: {type(error).__name__}").response()


# --- the dashboard -------------------------------------------------------------------------------------


def page_routes() -> list[Route]:
    """Routes of the page at `/` and `/dashboard`, and of its other files under `/static`. Reads all files once."""
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in _TYPES}
    paths = {"/": PAGE, "/dashboard": PAGE, **{f"/static/{name}": name for name in files if name != PAGE}}
    return [_route(path, files[name], _TYPES[Path(name).suffix]) for path, name in paths.items()]


def _route(path: str, content: bytes, media_type: str) -> Route:
    async def answer(request: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)

    return Route(path, answer)
