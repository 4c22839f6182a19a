"""A session with the context of its requests."""

from __future__ import annotations

from cache_at_once import CacheAtOnce

from tiercache.daemon.requests.context import RequestContext
from tiercache.daemon.requests.sessions import Session
from tiercache.protocol.messages import Hello

MIB = 1 << 20


def context_of(tenant: str, max_leases: int = 1000) -> tuple[RequestContext, Session]:
    session = Session(Hello(1, 1, bytes(16), "s", 0, False), "p", tenant=tenant)
    context = RequestContext(CacheAtOnce(lambda: 0.0), 1, {session.token: session}, {}, 60.0, max_leases, MIB)
    context.tenant = tenant
    return context, session
