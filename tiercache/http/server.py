"""The HTTP server's process: a client of the daemon, a listening socket, uvicorn; and its shutdown."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from tiercache.client.client import Client
from tiercache.config.setting_kinds import hosts_problem, http_problem, split_http
from tiercache.errors import ConfigError
from tiercache.ground import listening
from tiercache.http.app import build_app
from tiercache.http.hosts import HostCheck, allowed_hosts, refusal
from tiercache.http.limits import MAX_HEADER_BYTES, LimitedConnection

REQUEST_TIMEOUT_S = 2.0
"""Deadline of one request to the daemon: long, since a slow daemon is not dead."""
KEEP_ALIVE_S = 5
ACCEPTED_AT_ONCE = 8
BACKLOG = 1024
LAST_WORDS_S = 2
_REMEDY = "--hosts (a daemon: with --http-hosts)"
_PR_SET_PDEATHSIG = 1

logger = logging.getLogger("tiercache.http")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Settings of the process. Raises ConfigError.

    Attributes:
        run_dir: the daemon's run directory.
        listen: host and port; port 0 is any free port.
        allow_remote: allow an address to which other hosts can connect.
        hosts: further host names that requests may be for, separated by commas; see `hosts.allowed_hosts`.
        request_s: how long a request may take to come.
        parent_fd: the process ends when this pipe reads end of file.
        listen_fd: a socket that is already bound.
    """

    run_dir: Path
    listen: str = "127.0.0.1:8181"
    allow_remote: bool = False
    hosts: str = ""
    request_s: float = 30.0
    parent_fd: int | None = None
    listen_fd: int | None = None

    def __post_init__(self) -> None:
        if problem := http_problem(self.listen, self.allow_remote):
            raise ConfigError(f"listen = {self.listen}: {problem}")
        if problem := hosts_problem(self.hosts):
            raise ConfigError(f"hosts = {self.hosts}: {problem}")
        if not 0 < self.request_s <= 3600:
            raise ConfigError(f"request_timeout = {self.request_s}: must be more than 0 and at most 3600 seconds")


def serve(settings: HttpSettings) -> int:
    """Serve until SIGTERM, SIGINT or the end of the parent. Raises ConfigError before it listens."""
    if settings.parent_fd is not None:
        # In case this loop hangs when the daemon is killed. The thread that started us lives as long as the daemon.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with _bound(settings) as listener:
        client = Client(settings.run_dir, name="http", map_arena=False, request_timeout_s=REQUEST_TIMEOUT_S)
        with client:
            client.start(0, required=False)
            asyncio.run(_run(settings, client, listener))
    return 0


def _bound(settings: HttpSettings) -> socket.socket:
    if settings.listen_fd is not None:
        return socket.socket(fileno=settings.listen_fd)
    return listening.bind(*split_http(settings.listen), settings.listen)


class _Server(uvicorn.Server):
    """uvicorn that accepts a flood of connections a few at a time, so that those above the limit are closed first."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio accepts as many connections in one go as its backlog is long. The kernel's is longer, since a client
        # that finds it full tries again after a second.
        for listener in sockets or []:
            listener.listen(BACKLOG)


async def _run(settings: HttpSettings, client: Client, listener: socket.socket) -> None:
    connection = type("Connection", (LimitedConnection,), {"request_s": settings.request_s})
    allowed = allowed_hosts(split_http(settings.listen)[0], settings.hosts)
    app = build_app(client, settings.request_s)
    config = uvicorn.Config(
        HostCheck(app, allowed, refusal, _REMEDY),
        http=connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_WORDS_S,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        backlog=ACCEPTED_AT_ONCE,
    )
    server = _Server(config)

    def stop() -> None:
        server.should_exit = True

    def orphaned(parent_fd: int) -> None:
        asyncio.get_running_loop().remove_reader(parent_fd)
        stop()

    # When uvicorn has stopped it raises the signals that it got once more: that must not kill this process.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # there is no configuration to reload
    if settings.parent_fd is not None:
        asyncio.get_running_loop().add_reader(settings.parent_fd, orphaned, settings.parent_fd)
    listening.listen(listener, BACKLOG, settings.listen)
    host, port = listener.getsockname()[:2]
    logger.info("serving http://%s:%d for %s", f"[{host}]" if ":" in host else host, port, settings.run_dir)
    await server.serve(sockets=[listener])
