"""The routes: from a request to the engine, and from its tokens to an answer."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tiercache.engine.async_engine import AsyncEngine, EngineDied, NobodyReads, Stopping, Stream, StreamOutput
from tiercache.engine.prompts import Prompts
from tiercache.serve.answers import ChatAnswer, CompletionAnswer, Piece, TokenTexts, Usage
from tiercache.serve.encoding import END_OF_EVENTS, event, json_response
from tiercache.serve.failures import ApiError, api_error
from tiercache.serve.metrics import Metrics
from tiercache.serve.requests import MAX_CHOICES, ChatRequest, CompletionRequest, parse

MAX_BODY_BYTES = 16 << 20
BODY_TIMEOUT_S = 60.0
HUNG_UP = 499
"""Status of an answer that nobody reads; nginx's word for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What the routes work with. `defaults` are those of `SamplingParams` for this model."""

    engine: AsyncEngine
    prompts: Prompts
    model: str
    metrics: Metrics
    defaults: Mapping[str, Any]
    api_key: str = ""
    created_s: int = 0


class _EventStream(StreamingResponse):
    """Server-sent events of a stream; whatever ends them (the client, a shutdown) closes the stream."""

    def __init__(self, stream: Stream, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()


class Routes:
    """The endpoints of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._texts = TokenTexts(service.prompts.tokenizer)
        # One thread: a tokenizer is not for several, and the loop must not wait for a long text.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def health(self, request: Request) -> Response:
        if self._service.engine.death is not None:
            raise self._service.engine.death
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
            "id": service.model, "object": "model", "created": service.created_s, "owned_by": "tiercache",
            "max_model_len": service.engine.max_model_len,
        }  # fmt: skip

    async def completions(self, request: Request) -> Response:
        asked = parse(await _read_body(request), CompletionRequest)
        return await self._answer(request, asked, CompletionAnswer)

    async def chat_completions(self, request: Request) -> Response:
        asked = parse(await _read_body(request), ChatRequest)
        return await self._answer(request, asked, ChatAnswer)

    async def _answer(
        self, request: Request, asked: CompletionRequest | ChatRequest, form: type[CompletionAnswer]
    ) -> Response:
        service = self._service
        if asked.model is not None:
            self._check_model(asked.model)
        try:
            loop = asyncio.get_running_loop()
            prompts = await loop.run_in_executor(self._tokenizing, asked.tokens, service.prompts)
            params = asked.params(service.defaults, service.engine.max_model_len - max(map(len, prompts)))
            if len(prompts) * params.n > MAX_CHOICES:
                text = f"{len(prompts)} prompts with n {params.n}: a request may have {MAX_CHOICES} choices"
                raise ApiError(400, text, param="n")
            stream = service.engine.submit(prompts, params, asked.priority)
        except Exception as error:
            raise api_error(error, asked.__struct_fields__) from error
        answer = form(service.model, self._texts)
        usage = Usage(sum(map(len, prompts)))
        pieces = [Piece(index) for index in range(len(prompts) * params.n)]
        if asked.stream:
            events = self._events(stream, answer, pieces, usage, params.n, include_usage=asked.include_usage)
            return _EventStream(stream, events)
        watcher = asyncio.create_task(_close_on_hang_up(request, stream))
        try:
            await self._collect(stream, pieces, usage, params.n)
        finally:
            watcher.cancel()
            stream.close()
        if any(piece.finish_reason is None for piece in pieces):
            return Response(status_code=HUNG_UP)
        return json_response(answer.whole(pieces, usage))

    async def _collect(self, stream: Stream, pieces: list[Piece], usage: Usage, n: int) -> None:
        note = self._service.metrics.watch(stream)
        async for item in stream:
            note(item)
            usage.note(item)
            pieces[_choice(item, n)].add(item)

    async def _events(
        self, stream: Stream, answer: CompletionAnswer, pieces: list[Piece], usage: Usage, n: int, *,
        include_usage: bool,
    ) -> AsyncIterator[bytes]:  # fmt: skip
        note = self._service.metrics.watch(stream)
        for piece in pieces:
            if (first := answer.first(piece.index)) is not None:
                yield event(first)
        try:
            async for item in stream:
                note(item)
                usage.note(item)
                piece = Piece(_choice(item, n))
                piece.add(item)
                if not piece.empty:
                    yield event(answer.piece(piece))
        except (EngineDied, NobodyReads, Stopping) as error:
            yield event(api_error(error).body())
        else:
            if include_usage:
                yield event(answer.last(usage))
        yield END_OF_EVENTS

    def _check_model(self, name: str) -> None:
        if name != self._service.model:
            text = f"the model {name} does not exist: this server has {self._service.model}"
            raise ApiError(404, text, param="model", code="model_not_found")

    def authorise(self, request: Request) -> None:
        """Raises ApiError for a request without the key, where there is one."""
        key = self._service.api_key
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key and not hmac.compare_digest(given.encode(), key.encode()):
            raise ApiError(401, "the API key is wrong: send Authorization: Bearer KEY", code="invalid_api_key")


def _choice(item: StreamOutput, n: int) -> int:
    return item.prompt * n + item.output.index


async def _close_on_hang_up(request: Request, stream: Stream) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    stream.close()


async def _read_body(request: Request) -> bytes:
    """Raises ApiError for one that is too large or does not come."""

    async def read() -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), BODY_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:.0f} s") from None


Endpoint = Callable[[Request], Awaitable[Response]]


def build_app(service: Service) -> Starlette:
    """The ASGI application of a service."""
    routes = Routes(service)

    def guarded(endpoint: Endpoint) -> Endpoint:
        async def authorised(request: Request) -> Response:
            routes.authorise(request)
            return await endpoint(request)

        return authorised

    return Starlette(
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
            NobodyReads: _on_api_error,
            Stopping: _on_api_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_hang_up,
            Exception: _on_defect,
        },
    )


async def _on_api_error(request: Request, error: Exception) -> Response:
    return api_error(error).response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = {404: f"there is no {request.url.path} here", 405: f"{request.method} is not for {request.url.path}"}
    return ApiError(error.status_code, text.get(error.status_code, error.detail)).response()


async def _on_hang_up(request: Request, error: Exception) -> Response:
    return Response(status_code=HUNG_UP)


async def _on_defect(request: Request, error: Exception) -> Response:
    """Whatever nobody foresaw; the log has the traceback."""
    return ApiError(500, f"the server failed: {type(error).__name__}").response()
