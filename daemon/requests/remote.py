"""Clients on other hosts: a second ROUTER socket, on TCP, that accepts CURVE only.

They use the same protocol, with the bytes of blocks in messages, and have no session socket: the hello is their first
request, and a session ends when nothing has come from it for `REMOTE_SILENCE_S`. A client's key identifies its tenant,
the only one whose namespaces it can name (see `RequestContext`). The allowed keys are read again with each handshake,
so adding or removing a file lets a client in or locks it out without a restart.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from tiercache.config.daemon_config import DaemonConfig
from tiercache.daemon.ground.counters import Counters
from tiercache.errors import ConfigError
from tiercache.protocol.curve import CLIENTS_DIR, load_allowed, load_server
from tiercache.protocol.messages import (
    INSTANCE_BYTES,
    MAX_HELLO_BYTES,
    PROTOCOL,
    Error,
    ErrorCode,
    Hello,
    Refused,
    Welcome,
)
from tiercache.protocol.wire import UNREADABLE

from .router import Answer, Handler, Router
from .sessions import Session, SessionGate, refusal
from .unsent import Unsent

log = logging.getLogger("tiercache.daemon")

REMOTE_SILENCE_S = 30.0
"""A session without a request for this time is ended. Clients ask more often, see `tiercache.client.session`."""
LOOK_S = 1.0
SESSION_SHARE = 4
"""One tenant has at most a quarter of `max_sessions`, and all tenants together leave one for clients of this host."""
_CLOCK_STEP_NS = 2_000_000_000
_DOMAIN = "tiercache"
_encode = msgspec.msgpack.Encoder().encode
_decode_hello = msgspec.msgpack.Decoder(Hello).decode


class _Start(msgspec.Struct, array_like=True):
    """The beginning of a request; the rest is skipped."""

    tag: str
    request_id: int
    session: bytes


_decode_start = msgspec.msgpack.Decoder(_Start).decode


class RemoteSession(Session):
    """A client on another host. `key`: its public key, which alone identifies it."""

    def __init__(self, hello: Hello, key: str, tenant: str, now_s: float) -> None:
        # Tenants cannot share a store by claiming to be the same engine.
        own = hashlib.blake2b(hello.instance, digest_size=INSTANCE_BYTES, key=tenant.encode()).digest()
        super().__init__(msgspec.structs.replace(hello, instance=own), f"tenant {tenant}", tenant=tenant)
        self.key = key
        self.heard_s = now_s


class AllowedClients:
    """The clients whose keys lie in a folder. `name_of` may be called in any thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._names: dict[bytes, str] = {}
        self._seen: list[tuple[str, int, int]] | None = None
        self._told: list[str] = []

    def read(self) -> None:
        """Read the files again if any was added, removed or changed. Costs a `stat` of each otherwise."""
        folder = self._directory / CLIENTS_DIR
        try:
            files = [(entry.name, entry.stat()) for entry in os.scandir(folder)]
            seen: list[tuple[str, int, int]] | None = sorted((name, st.st_mtime_ns, st.st_ino) for name, st in files)
        except OSError:
            seen = None
        if seen != self._seen or seen is None:
            # A second change within one step of the file system's clock leaves the same time stamp.
            young = seen is not None and any(time.time_ns() - changed < _CLOCK_STEP_NS for _, changed, _ in seen)
            unreadable: tuple[dict[bytes, str], list[str]] = {}, [f"{folder} cannot be read"]
            self._names, problems = unreadable if seen is None else load_allowed(self._directory)
            self._seen = None if young else seen
            if problems != self._told:
                for problem in problems:
                    log.warning("%s", problem)
            self._told = problems

    def name_of(self, public_key: bytes) -> str | None:
        """The name of the client with this key (Z85), as of the last `read`; None if the key is not allowed."""
        return self._names.get(public_key)


class _Authenticator(ThreadAuthenticator):
    """Tells ZeroMQ which clients may connect, in a thread of its own (https://rfc.zeromq.org/spec/27/)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: AllowedClients, counters: Counters) -> None:
        super().__init__(context, log=logging.getLogger("tiercache.daemon.zap"))
        self._clients = allowed
        self._counters = counters
        self.configure_curve_callback(_DOMAIN, credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """True if the owner of a key may connect."""
        self._clients.read()
        known = self._clients.name_of(key) is not None
        if not known:
            self._counters.handshakes_refused += 1
        return known

    def curve_user_id(self, client_public_key: bytes) -> str:
        """The id attached to messages of a connection: the key, since its file may belong to another client by then."""
        return z85.encode(client_public_key).decode()


class RemoteGate:
    """The TCP side of a daemon. Event loop only, except for the authenticator. Raises ConfigError."""

    def __init__(
        self,
        config: DaemonConfig,
        gate: SessionGate,
        handle: Handler,
        welcome: Callable[[Session, int], Welcome],
        counters: Counters,
        unsent: Unsent,
        connections: int,
        generation: int,
    ) -> None:
        assert config.curve_keys is not None
        self._gate = gate
        self._handle = handle
        self._welcome = welcome
        self._counters = counters
        self._generation = generation
        self._max_sessions = config.max_sessions
        self._allowed = AllowedClients(config.curve_keys)
        self._allowed.read()
        self._loop = asyncio.get_running_loop()
        self._looked_s = 0.0
        keys = load_server(config.curve_keys)
        try:
            self.router = Router(
                config.listen,
                self._serve,
                gate.cut,
                unsent,
                connections,
                lambda socket: self._guard(socket, keys.secure),
            )
        except ConfigError:
            self._authenticator.stop()
            raise

    def _guard(self, socket: zmq.Socket[bytes], secure: Callable[[zmq.Socket[bytes], str], None]) -> None:
        # The authenticator must be there before the first client can connect.
        self._authenticator = _Authenticator(socket.context, self._allowed, self._counters)
        self._authenticator.start()
        secure(socket, _DOMAIN)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 10_000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)

    def _serve(self, identity: bytes, header: bytes | memoryview, parts: list[zmq.Frame]) -> Answer | None:
        key = self.router.peer
        try:
            start = _decode_start(header)
        except UNREADABLE:
            greeted = self._greet(key, header)
            return self._handle(identity, header, parts) if greeted is None else greeted  # says what is wrong
        session = self._gate.sessions.get(start.session)
        if isinstance(session, RemoteSession) and session.key == key:
            session.heard_s = self._loop.time()
        elif session is not None:
            text = "this session is another client's: connect again"
            error = Error(start.request_id, self._generation, ErrorCode.UNKNOWN_SESSION.value, text)
            return Answer(_encode(error), None)
        return self._handle(identity, header, parts)

    def _greet(self, key: str, header: bytes | memoryview) -> Answer | None:
        """The answer to a hello; None for any other request."""
        if len(header) > MAX_HELLO_BYTES:
            return None
        try:
            hello = _decode_hello(header)
        except UNREADABLE:
            return None
        self._allowed.read()
        tenant = self._allowed.name_of(key.encode())
        refused = refusal(hello) or self._refusal_of(tenant)
        if tenant is None or refused is not None:
            self._counters.sessions_refused += 1
            return Answer(_encode(refused), None)
        session = RemoteSession(hello, key, tenant, self._loop.time())
        self._gate.sessions[session.token] = session
        self._counters.sessions_opened += 1
        log.info("session %s of tenant %s has begun", session.name, tenant)
        return Answer(_encode(self._welcome(session, min(PROTOCOL, hello.protocol_max))), session)

    def _refusal_of(self, tenant: str | None) -> Refused | None:
        """Why there is no session for a tenant now, or None."""
        if tenant is None:
            return Refused(ErrorCode.FORBIDDEN.value, "this key may connect no more")
        text = self._no_session_for(tenant)
        return None if text is None else Refused(ErrorCode.LIMIT.value, text)

    def _no_session_for(self, tenant: str) -> str | None:
        """Why a tenant may not have one more session, or None."""
        remote = [session for session in self._gate.sessions.values() if isinstance(session, RemoteSession)]
        if len(self._gate.sessions) >= self._max_sessions:
            return f"{self._max_sessions} sessions are open: raise max_sessions"
        share = max(1, self._max_sessions // SESSION_SHARE)
        if len(remote) >= self._max_sessions - share:
            return f"{len(remote)} sessions of other hosts are open: raise max_sessions"
        if sum(session.tenant == tenant for session in remote) >= share:
            return f"{share} sessions of tenant {tenant} are open: close some, or raise max_sessions"
        return None

    def tick(self) -> None:
        """Collect finished payloads and connections; now and then end sessions that are silent or no longer allowed."""
        self.router.tick()
        now_s = self._loop.time()
        if now_s < self._looked_s + LOOK_S:
            return
        self._looked_s = now_s
        self._allowed.read()
        for session in list(self._gate.sessions.values()):
            if not isinstance(session, RemoteSession):
                continue
            if self._allowed.name_of(session.key.encode()) != session.tenant:
                self._gate.cut(session, "its key may connect no more")
            elif now_s > session.heard_s + REMOTE_SILENCE_S:
                log.info("session %s of tenant %s is over: nothing heard of it", session.name, session.tenant)
                self._gate.end(session)

    def close(self) -> None:
        """Stop serving."""
        self._authenticator.stop()
        self.router.close()
