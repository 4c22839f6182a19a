"""The routes: from a request to the engine, and from its tokens to an answer."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tiercache.engine.async_engine import AsyncEngine, EngineDied, Stalled, Stopping, Stream, StreamOutput, StreamUnread
from tiercache.engine.prompts import Prompts
from tiercache.http.hosts import Complaint, HostCheck, allowed_hosts
from tiercache.serve.answers import ChatAnswer, CompletionAnswer, Piece, TokenTexts, Usage
from tiercache.serve.failures import END_OF_EVENTS, ApiError, api_error, event, json_response
from tiercache.serve.metrics import Metrics
from tiercache.serve.requests import ChatRequest, CompletionRequest, check_size, parse

HUNG_UP = 499
"""Status of an answer whose client has hung up; nginx's code for it."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelService:
    """What the routes work with.

    `defaults` are the values of `SamplingParams` for this model; `hosts` are the hosts that requests may be for.
    """

    engine: AsyncEngine
    prompts: Prompts
    model: str
    metrics: Metrics
    defaults: Mapping[str, Any]
    api_key: str = ""
    created_s: int = 0
    hosts: frozenset[str] = allowed_hosts("127.0.0.1", "")


class _Accepted(NamedTuple):
    """A request that the engine has; its texts have been freed."""

    stream: Stream
    usage: Usage
    n: int
    streamed: bool
    include_usage: bool

    def pieces(self) -> list[Piece]:
        """One empty piece for each choice."""
        return [Piece(index) for index in range(self.stream.prompts * self.n)]

    def piece_of(self, item: StreamOutput) -> int:
        return item.prompt * self.n + item.output.index


class _EventStream(StreamingResponse):
    """Server-sent events of a stream; whatever ends them (the client, a shutdown) closes the stream."""

    def __init__(self, close: Callable[[], None], events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


class ServeRoutes:
    """The endpoints of one service."""

    def __init__(self, service: ModelService) -> None:
        self._service = service
        self._texts = TokenTexts(service.prompts.tokenizer)
        self._bodies = Bodies(service.engine.max_model_len)
        # One thread: a tokenizer is not thread-safe, and the loop must not wait for a long text.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def health(self, request: Request) -> Response:
        if (trouble := self._service.engine.death or self._service.engine.stall) is not None:
            raise trouble
        return json_response({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return json_response(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        service = self._service
        return {
            "id": service.model,
            "object": "model",
            "created": service.created_s,
            "owned_by": "tiercache",
            "max_model_len": service.engine.max_model_len,
        }

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, await self._accept(request, CompletionRequest), CompletionAnswer)

    async def chat_completions(self, request: Request) -> Response:
        return await self._answer(request, await self._accept(request, ChatRequest), ChatAnswer)

    async def _accept(self, request: Request, kind: type[CompletionRequest | ChatRequest]) -> _Accepted:
        """Read, check and submit a request. Raises ApiError."""
        service, loop = self._service, asyncio.get_running_loop()
        async with self._bodies.read(request) as body:
            asked = parse(body, kind)
            if asked.model is not None:
                self._check_model(asked.model)
            try:
                # One prompt at a time, so that other clients' prompts get their turn.
                encoders = asked.encoders(service.prompts)
                prompts = [await loop.run_in_executor(self._tokenizing, encode) for encode in encoders]
                params = asked.params(service.defaults, service.engine.max_model_len - max(map(len, prompts)))
                check_size(len(prompts), params)
                stream = service.engine.submit(prompts, params, asked.priority)
            except Exception as error:
                raise api_error(error, asked.__struct_fields__) from error
        service.metrics.note_accepted(params)
        return _Accepted(stream, Usage(sum(map(len, prompts))), params.n, asked.stream, asked.include_usage)

    async def _answer(self, request: Request, accepted: _Accepted, form: type[CompletionAnswer]) -> Response:
        answer, stream = form(self._service.model, self._texts), accepted.stream
        if accepted.streamed:
            return _EventStream(lambda: self._close(stream), self._events(accepted, answer))
        watcher = asyncio.create_task(_close_on_hang_up(request, lambda: self._close(stream)))
        try:
            pieces = await self._collect(accepted)
        finally:
            watcher.cancel()
            self._close(stream)
        if any(piece.finish_reason is None for piece in pieces):
            return Response(status_code=HUNG_UP)
        return json_response(answer.whole(pieces, accepted.usage))

    def _close(self, stream: Stream) -> None:
        self._service.metrics.note_aborted(stream.close())

    async def _collect(self, accepted: _Accepted) -> list[Piece]:
        note, pieces = self._service.metrics.watch(accepted.stream), accepted.pieces()
        async for item in accepted.stream:
            note(item)
            accepted.usage.note(item)
            pieces[accepted.piece_of(item)].add(item)
        return pieces

    async def _events(self, accepted: _Accepted, answer: CompletionAnswer) -> AsyncIterator[bytes]:
        note = self._service.metrics.watch(accepted.stream)
        for piece in accepted.pieces():
            if (first := answer.first(piece.index)) is not None:
                yield event(first)
        try:
            async for item in accepted.stream:
                note(item)
                accepted.usage.note(item)
                piece = Piece(accepted.piece_of(item))
                piece.add(item)
                if not piece.empty:
                    yield event(answer.piece(piece))
        except (EngineDied, StreamUnread, Stalled, Stopping) as error:
            yield event(api_error(error).body())
        else:
            if accepted.include_usage:
                yield event(answer.last(accepted.usage))
        yield END_OF_EVENTS

    def _check_model(self, name: str) -> None:
        if name != self._service.model:
            text = f"the model {name} does not exist: this server has {self._service.model}"
            raise ApiError(404, text, param="model", code="model_not_found")

    def authorise(self, request: Request) -> None:
        """Raises ApiError for a request without the key, if a key is set."""
        key = self._service.api_key
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key and not hmac.compare_digest(given.encode(), key.encode()):
            raise ApiError(401, "the API key is wrong: send Authorization: Bearer KEY", code="invalid_api_key")


async def _close_on_hang_up(request: Request, close: Callable[[], None]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    close()


Endpoint = Callable[[Request], Awaitable[Response]]


def _refusal(complaint: Complaint) -> Response:
    return ApiError(complaint.status, complaint.text, code=complaint.code).response()


def build_app(service: ModelService) -> ASGIApp:
    """The ASGI application of a service. Requests that a foreign page makes a browser send never reach its routes."""
    routes = ServeRoutes(service)

    def guarded(endpoint: Endpoint) -> Endpoint:
        async def authorised(request: Request) -> Response:
            routes.authorise(request)
            return await endpoint(request)

        return authorised

    app = Starlette(
        routes=[
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
            Route("/v1/models", guarded(routes.models)),
            Route("/v1/models/{model:path}", guarded(routes.model)),
            Route("/v1/completions", guarded(routes.completions), methods=["POST"]),
            Route("/v1/chat/completions", guarded(routes.chat_completions), methods=["POST"]),
        ],
        exception_handlers={
            ApiError: _on_api_error,
            EngineDied: _on_api_error,
            StreamUnread: _on_api_error,
            Stalled: _on_api_error,
            Stopping: _on_api_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_hang_up,
            Exception: _on_defect,
        },
    )
    return HostCheck(app, service.hosts, _refusal, "--allowed-hosts")


async def _on_api_error(request: Request, error: Exception) -> Response:
    return api_error(error).response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = {404: f"there is no {request.url.path} here", 405: f"{request.method} is not for {request.url.path}"}
    response = ApiError(error.status_code, text.get(error.status_code, error.detail)).response()
    response.headers.update(error.headers or {})
    return response


async def _on_hang_up(request: Request, error: Exception) -> Response:
    return Response(status_code=HUNG_UP)


async def _on_defect(request: Request, error: Exception) -> Response:
    """An unexpected error; the log has the traceback."""
    return ApiError(500, f"the server failed: {type(error).__name__}").response()
