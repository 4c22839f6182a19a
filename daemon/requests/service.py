"""Requests, one by one: decode, check, dispatch, encode the answer.

Every message is answered: a malformed message, an unknown session, a value out of range and a bug of ours each get a
typed error, are counted, and disturb no other client. The requests themselves are handled in `reads`, `writes`, `admin`
and `flushes`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgspec
import zmq

from tiercache.daemon.ground.clock import LeaseClock
from tiercache.daemon.ground.slices import AnswerNow, Steps
from tiercache.errors import RequestRefused
from tiercache.ground.histograms import LatencyHistogram
from tiercache.protocol import messages as m
from tiercache.protocol.messages import ErrorCode
from tiercache.protocol.namespaces import NamespaceSpec
from tiercache.protocol.wire import UNREADABLE

from .admin import AdminRequests
from .context import Method, RequestContext, encoder
from .flushes import FlushRequests
from .reads import ReadRequests
from .router import Answer
from .sessions import Session
from .slow import SlowRequests
from .store_waits import StoreWaits
from .writes import MAX_SPEC_BYTES, WriteRequests

log = logging.getLogger("tiercache.daemon")

MAX_ERROR_CHARS = 400
MAX_REGISTER_BYTES = 2 * MAX_SPEC_BYTES
"""Of a message with a spec, and of one decoded again to skip fields that we do not know."""
MAX_SLICED = 16
"""Requests of one session that may be under way in slices: each keeps its keys, up to 1 MiB."""

FOR_TENANTS = frozenset(
    (
        m.Ping,
        m.RegisterNamespace,
        m.Match,
        m.Peek,
        m.Resolve,
        m.Hold,
        m.Release,
        m.Renew,
        m.Reserve,
        m.Commit,
        m.Abort,
        m.Read,
        m.Write,
        m.Pin,
        m.Unpin,
        m.Prefetch,
        m.Hint,
        m.Flush,
        m.Report,
        m.Models,
        m.Bye,
    )
)
"""Requests allowed from other hosts. The others would tell one tenant about others, or are only useful on this host."""

TO_THE_END = frozenset((m.Flush,))
"""Requests that are finished even if the client has gone or its time is up: half of the work would be useless."""

_decoder = msgspec.msgpack.Decoder(m.ANY_REQUEST)


class _Start(msgspec.Struct, array_like=True):
    """The beginning of every request; the rest is skipped, not built."""

    tag: str
    request_id: int


_decode_start = msgspec.msgpack.Decoder(_Start).decode
_decode_elements = msgspec.msgpack.Decoder(list[Any]).decode
_REGISTER = str(m.RegisterNamespace.__struct_config__.tag)
_TAG_WITHIN = 32
"""A request's tag ends here at the latest, however it is packed; a number and random bytes follow it."""
_SPEC = 1 + m.RegisterNamespace.__struct_fields__.index("spec")
"""Position of the spec in the array, which begins with the tag."""


class Service:
    """Answers requests. Event loop only.

    `end(session)` ends a session once its reply is sent; `stats(request)` builds the tree that answers `Stats`.
    """

    def __init__(
        self,
        context: RequestContext,
        clock: LeaseClock,
        end: Callable[[Session], None],
        stats: Callable[[m.Stats], Steps[dict[str, Any]]],
        slow: SlowRequests,
    ) -> None:
        self.latency: dict[str, LatencyHistogram] = {}
        self.context = context
        self._counters = context.cache.counters
        self._slices = context.cache.slices
        self._clock = clock
        self._generation = context.generation
        self._sessions = context.sessions
        self._end = end
        self._stats = stats
        self.slow = slow
        self.soon: Callable[[], None] = lambda: None
        """Called when a slice should be run before the next tick."""
        self._sliced: Counter[Session] = Counter()  # requests under way in slices, by session
        context.resume = self._resume
        store_waits = StoreWaits(context)
        self.reads = ReadRequests(context, slow, store_waits)
        self._writes = WriteRequests(context)
        self._methods: dict[type, Method] = {
            m.Ping: self._ping,
            m.Stats: self._statistics,
            m.Bye: self._bye,
            **self.reads.methods(),
            **self._writes.methods(),
            **FlushRequests(context).methods(),
            **AdminRequests(context, store_waits).methods(),
        }

    def handle(self, identity: bytes, header: bytes | memoryview, parts: list[zmq.Frame]) -> Answer | None:
        """Answer one message: its header part, and the payload parts that followed.

        None if the request waits for the tier below or takes several slices; its answer is given to `send` later.
        """
        started_ns = time.perf_counter_ns()
        self._counters.requests += 1
        self._clock.observe()
        self.context.identity = identity
        request_id = 0
        session: Session | None = None
        request: m.AnyRequest | None = None
        try:
            request = self._decode(header)
            request_id = request.request_id
            session = self._session_of(request)
            self.context.tenant = session.tenant
            if session.tenant and type(request) not in FOR_TENANTS:
                text = "clients of other hosts may not ask this: ask on the daemon's own host"
                raise RequestRefused(ErrorCode.FORBIDDEN.value, text)
            answer: Answer | None = self._dispatch(session, request, parts)
        except RequestRefused as refusal:
            error = self._refused(request_id or _request_id_of(header), refusal)
            answer = Answer(encoder.encode(error), session)
        except Exception:
            log.exception("a request failed")
            answer = Answer(encoder.encode(self._failed(request_id)), session)
        else:
            self._observe(session, request, started_ns)
        return answer

    def _observe(self, session: Session, request: m.AnyRequest, started_ns: int) -> None:
        kind, ended_ns = type(request).__name__, time.perf_counter_ns()
        histogram = self.latency.get(kind)
        if histogram is None:
            histogram = self.latency[kind] = LatencyHistogram()
        histogram.observe(ended_ns - started_ns)
        self.slow.served(session, request, started_ns, ended_ns)

    def _decode(self, header: bytes | memoryview) -> m.AnyRequest:
        if len(header) > MAX_REGISTER_BYTES and _REGISTER.encode() in bytes(header[:_TAG_WITHIN]):
            # Building a spec of megabytes would hold up the event loop.
            raise RequestRefused(ErrorCode.BAD_VALUE.value, f"the spec is longer than {MAX_SPEC_BYTES} bytes")
        try:
            return _decode(header)
        except UNREADABLE as error:
            self._counters.requests_malformed += 1
            raise RequestRefused(ErrorCode.MALFORMED.value, str(error)) from error

    def _session_of(self, request: m.AnyRequest) -> Session:
        if request.generation != self._generation:
            text = "the daemon was restarted since this session began: connect again"
            raise RequestRefused(ErrorCode.STALE_GENERATION.value, text)
        session = self._sessions.get(request.session)
        if session is None:
            raise RequestRefused(ErrorCode.UNKNOWN_SESSION.value, "this session has ended: connect again")
        now_us = time.monotonic_ns() // 1000
        if isinstance(request, m.Ping) and request.clock_us:
            # Clocks of two hosts drift, and stand still while a machine is paused. A ping never expires: it would not
            # be handled.
            session.clock_offset_us = now_us - request.clock_us
        elif request.deadline_us + session.clock_offset_us < now_us:
            self._counters.requests_expired += 1
            raise RequestRefused(ErrorCode.EXPIRED.value, "its deadline was over before it was read")
        return session

    def _dispatch(self, session: Session, request: m.AnyRequest, parts: list[zmq.Frame]) -> Answer | None:
        if len(parts) != (1 if isinstance(request, m.Write) else 0):
            self._counters.requests_malformed += 1
            raise RequestRefused(ErrorCode.MALFORMED.value, f"{len(parts)} payload parts do not belong to this request")
        if isinstance(request, m.Read):
            return self.reads.read(session, request)
        if isinstance(request, m.Write):
            reply: m.Reply | None = self._writes.write(session, request, parts[0].buffer)
        else:
            asked = self._methods[type(request)](session, request)
            reply = asked if asked is None or isinstance(asked, m.Reply) else self._begin(session, request, asked)
        return None if reply is None else Answer(encoder.encode(reply), session)

    # --- requests that take several slices -----------------------------------------------------------

    def _begin(self, session: Session, request: m.AnyRequest, steps: Steps[m.Reply | None]) -> m.Reply | None:
        """Run the first slice of a request: nearly always all of it."""
        full = self._sliced.get(session, 0) >= MAX_SLICED
        if full and type(request) in TO_THE_END:
            raise _too_many()  # before any of the work is done
        try:
            next(steps)
            if full:
                steps.throw(AnswerNow())
                steps.close()  # it takes yet more slices
                raise _too_many()
        except StopIteration as end:
            reply: m.Reply | None = end.value
            return reply
        except AnswerNow:
            raise _too_many() from None
        self._sliced[session] += 1
        self._slices.add(self._go_on(self.context.identity, session, request, steps))
        self.soon()
        return None

    def _resume(self, identity: bytes, session: Session, request: m.AnyRequest, steps: Steps[m.Reply | None]) -> None:
        """Serve a request that had to wait, which returned None before."""
        self._sliced[session] += 1
        # Not at once: one look-up may have been what a thousand requests waited for.
        self._slices.add(self._go_on(identity, session, request, steps))
        self.soon()

    def _go_on(
        self, identity: bytes, session: Session, request: m.AnyRequest, steps: Steps[m.Reply | None]
    ) -> Steps[None]:
        """Run the further slices of a request and answer it; stops when the session ends or its client no longer waits.

        `TO_THE_END` requests are finished in any case.
        """
        until_us = request.deadline_us + session.clock_offset_us
        to_the_end = type(request) in TO_THE_END
        reply: m.Reply | None = None  # in `TO_THE_END` it is answered otherwise
        with closing(steps):
            while session.open or to_the_end:
                try:
                    if until_us < time.monotonic_ns() // 1000 and not to_the_end:
                        self._counters.requests_expired += 1
                        raise RequestRefused(ErrorCode.EXPIRED.value, "its deadline was over before it was answered")
                    next(steps)
                except StopIteration as end:
                    reply = end.value
                except RequestRefused as refusal:
                    reply = self._refused(request.request_id, refusal)
                except Exception:
                    log.exception("a request failed")
                    reply = self._failed(request.request_id)
                else:
                    yield
                    continue
                break
        self._sliced[session] -= 1
        if not self._sliced[session]:
            del self._sliced[session]
        if reply is not None and session.open:
            self.context.answer(identity, session, reply)

    def _refused(self, request_id: int, refusal: RequestRefused) -> m.Error:
        self._counters.requests_refused += 1
        text = refusal.text[:MAX_ERROR_CHARS]  # some quote what was sent
        return m.Error(request_id, self._generation, refusal.code, text)

    def _failed(self, request_id: int) -> m.Error:
        """Answer after a bug of ours, so that no client waits forever."""
        self._counters.requests_failed += 1
        text = "the daemon failed at this request; its log says where"
        return m.Error(request_id, self._generation, ErrorCode.INTERNAL.value, text)

    # --- answers of its own --------------------------------------------------------------------------

    def _ping(self, session: Session, request: m.Ping) -> m.Reply:
        return m.Done(request.request_id, self._generation)

    def _statistics(self, session: Session, request: m.Stats) -> Steps[m.Reply]:
        return m.StatsReply(request.request_id, self._generation, (yield from self._stats(request)))

    def _bye(self, session: Session, request: m.Bye) -> m.Reply:
        self._end(session)
        return m.Done(request.request_id, self._generation)


def _too_many() -> RequestRefused:
    text = f"{MAX_SLICED} long requests of this session are being answered: wait for one of them"
    return RequestRefused(ErrorCode.LIMIT.value, text)


def _decode(header: bytes | memoryview) -> m.AnyRequest:
    """Decode a request, skipping what a later release has added to it. Raises one of UNREADABLE."""
    try:
        request: m.AnyRequest = _decoder.decode(header)
        return request
    except msgspec.ValidationError:
        # Further elements of arrays are skipped; the one map is a namespace's spec, in which nothing may be skipped.
        elements = _decode_elements(header) if len(header) <= MAX_REGISTER_BYTES else []
        if elements[:1] != [_REGISTER] or len(elements) <= _SPEC or not isinstance(elements[_SPEC], dict):
            raise
        spec = NamespaceSpec.received(elements[_SPEC])
        request = _decoder.decode(encoder.encode([*elements[:_SPEC], spec, *elements[_SPEC + 1 :]]))
        return request


def _request_id_of(header: bytes | memoryview) -> int:
    """The request id of a message that could not be decoded, if it got that far; else 0."""
    try:
        return _decode_start(header).request_id
    except UNREADABLE:
        return 0
