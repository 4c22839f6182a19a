"""Requests that wait for a look-up in the shared store: the answer from this host alone would miss what others stored.

request ─► is anything missing on this host? ─ no ─► answered at once
                    └ yes ─► look-up, or one under way ─► claim, or time is up ─► the request is served
"""

from __future__ import annotations

import time
from collections import Counter

from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.protocol import messages as m
from tiercache.protocol.messages import KEY_BYTES

from .context import RequestContext
from .sessions import Session

MAX_WAITING = 64
"""Requests of one session that may wait for the store; further ones are answered from this host."""


class StoreWaits:
    """Event loop only."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._below = context.cache.below
        self._runs = context.cache.reads.runs
        self._waiting: Counter[Session] = Counter()

    def __len__(self) -> int:
        return self._waiting.total()

    def begin(
        self,
        session: Session,
        request: m.AnyRequest,
        namespaces: list[Namespace],
        keys: bytes,
        serve: Steps[m.Reply],
    ) -> Steps[m.Reply | None]:
        """Serve a request, after a look-up in the store if that can add something; None when it is served later.

        It waits no longer than half of the time that the client gives it.
        """
        identity = self._context.identity
        if self._below.may_extend and self._waiting[session] < MAX_WAITING:
            found = yield from self._runs.peek(namespaces, keys)
            if sum(found) * KEY_BYTES < len(keys):
                lengths = self._runs.lengths(namespaces, keys)

                def go() -> None:
                    self._waiting[session] -= 1
                    if not self._waiting[session]:
                        del self._waiting[session]
                    self._context.resume(identity, session, request, serve)

                left_us = request.deadline_us + session.clock_offset_us - time.monotonic_ns() // 1000
                if self._below.wait(namespaces, keys, lengths, go, patience_s=left_us / 2e6):
                    self._waiting[session] += 1
                    return None
        return (yield from serve)
