"""The server's process: a cache, a model, a socket; and its shutdown.

SIGTERM: no new connections ─► running requests finish; after `grace_s` they fail ─► the engine gives its blocks
to the cache ─► a private daemon writes them to NVMe, if it has any ─► exit status 0
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import time
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tiercache.engine import Connect, Engine, connect_to
from tiercache.engine.async_engine import AsyncEngine, Stopping
from tiercache.engine.llm import TextEngine
from tiercache.engine.prompts import Prompts, load_tokenizer
from tiercache.engine.settings import EngineSettings
from tiercache.errors import ConfigError
from tiercache.ground import listening
from tiercache.http.hosts import allowed_hosts
from tiercache.serve.app import ModelService, build_app
from tiercache.serve.metrics import Metrics
from tiercache.serve.private_daemon import PrivateDaemon
from tiercache.serve.requests import sampling_defaults
from tiercache.serve.settings import ServeSettings

logger = logging.getLogger(__name__)
_BACKLOG = 2048
# How long answers may take to be sent when the time for requests is over.
_LAST_WORDS_S = 5
_MAX_FILES = 65536
_TICKS_PER_S = 10  # uvicorn's


SWEEP_S = 30
"""Seconds between sweeps; a connection that has not moved from one sweep to the next is closed."""


def serve(settings: ServeSettings, engine_settings: EngineSettings) -> int:
    """Serve until SIGTERM or SIGINT; the exit status: 0, or 1 when the engine has failed.

    Raises ConfigError, ModelRefused and DaemonUnavailable before it listens.
    """
    _allow_many_files()
    with ExitStack() as resources:
        # Bound before the model is loaded: loading may take minutes, and the port may not be free.
        listener = resources.enter_context(listening.bind(settings.host, settings.port, settings.where))
        tokenizer, template = load_tokenizer(settings.model), settings.read_chat_template()
        defaults = sampling_defaults(settings.model)
        engine = Engine(settings.model, engine_settings, _cache(settings, resources))
        engine.announce([settings.name, str(settings.model.resolve())])
        server = _Server(settings, engine, Prompts(tokenizer, template, engine.max_model_len), defaults)
        try:
            # Only now: clients that connect while the model is loading are to be refused and not to wait.
            listening.listen(listener, _BACKLOG, settings.where)
        except ConfigError:
            engine.close()
            raise
        # Loaded objects stay: garbage collection over them again and again would delay every request for a moment.
        gc.collect()
        gc.freeze()
        resources.callback(gc.unfreeze)
        return asyncio.run(server.run(listener))


def _allow_many_files() -> None:
    """Raise the limit of open files: each connection is a file, and the usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _cache(settings: ServeSettings, resources: ExitStack) -> Connect | None:
    """Start a private daemon if one is wanted; returns what connects the engine to its cache."""
    if not settings.cache:
        return None
    if settings.daemon is not None:
        return connect_to(settings.daemon, name="serve")
    wanted: dict[str, Any] = {"nvme": settings.nvme, "nvme_size": settings.nvme_size}
    given = {key: value for key, value in wanted.items() if value}
    daemon = resources.enter_context(PrivateDaemon(settings.arena, **given))
    logger.info("private daemon at %s, log in %s", daemon.address, daemon.log)
    return connect_to(daemon.address, name="serve", required=True)


class _Uvicorn(uvicorn.Server):
    """Closes stalled connections; when time is up, sends waiting clients an error instead of cutting them off."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, grace_s: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._grace_s = grace_s
        self._sweeper = Sweeper()

    async def on_tick(self, counter: int) -> bool:
        if counter % (SWEEP_S * _TICKS_PER_S) == 0:
            self._sweeper.sweep(self.server_state.connections)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._grace_s, self.end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def end_requests(self) -> None:
        cut_unsent(self.server_state.connections)
        self._engine.end(Stopping("the server is stopping: send the request again when it is back"))


class _Server:
    """uvicorn around the engine."""

    def __init__(self, settings: ServeSettings, engine: Engine, prompts: Prompts, defaults: dict[str, object]) -> None:
        self._settings = settings
        self._engine = engine
        self._prompts = prompts
        self._defaults = defaults
        self._uvicorn: _Uvicorn | None = None

    async def run(self, listener: socket.socket) -> int:
        settings = self._settings
        text_engine = TextEngine(self._engine, self._prompts.tokenizer)
        engine = AsyncEngine(
            text_engine,
            max_waiting=settings.max_queued_requests,
            stall_timeout_s=settings.stall_timeout_s,
            on_death=self._stop,
        )
        service = ModelService(
            engine=engine,
            prompts=self._prompts,
            model=settings.name,
            metrics=Metrics(settings.name, engine.max_model_len, lambda: engine.stats),
            defaults=self._defaults,
            api_key=settings.api_key,
            created_s=int(time.time()),
            hosts=allowed_hosts(settings.host, settings.allowed_hosts),
        )
        config = uvicorn.Config(
            build_app(service),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=int(settings.grace_s) + _LAST_WORDS_S,
        )
        self._uvicorn = _Uvicorn(config, engine, settings.grace_s)
        # When uvicorn has stopped it raises the signals that it got once more: that must not kill this process.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop())
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        logger.info("%s is served at %s/v1", settings.name, url)
        await self._uvicorn.serve(sockets=[listener])
        self._uvicorn.end_requests()  # a second SIGINT does not wait for them
        logger.info("stopping: blocks go to the cache")
        await engine.close()
        return 0 if engine.death is None else 1

    def _stop(self) -> None:
        assert self._uvicorn is not None
        self._uvicorn.should_exit = True


# --- connections that stall: half a request, or an answer that the client does not read ----------------


class Sweeper:
    """Remembers the state of each connection at the last sweep."""

    def __init__(self) -> None:
        self._stood: dict[H11Protocol, tuple[object, int]] = {}

    def sweep(self, connections: Iterable[object]) -> None:
        stand = {
            connection: _stand(connection)
            for connection in connections
            if isinstance(connection, H11Protocol) and _waits_for_client(connection)
        }
        for connection, how in stand.items():
            if self._stood.get(connection) == how:
                connection.transport.abort()
        self._stood = stand


def cut_unsent(connections: Iterable[object]) -> None:
    """Close the connections whose request is incomplete."""
    for connection in list(connections):
        if isinstance(connection, H11Protocol) and connection.conn.their_state is h11.SEND_BODY:
            connection.transport.abort()


def _waits_for_client(connection: H11Protocol) -> bool:
    """True if the client has to act: read, or send a request. A body that does not come has its own deadline."""
    cycle = connection.cycle
    return cycle is None or bool(cycle.response_complete) or connection.flow.write_paused


def _stand(connection: H11Protocol) -> tuple[object, int]:
    """What changes when the client acts: its last request, and the part of the answer it has not read."""
    return connection.cycle, connection.transport.get_write_buffer_size()
