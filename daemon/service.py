"""Requests, one by one: decode, check, ask the cache, encode the answer.

Whatever arrives is answered: a malformed message, an unknown session, a value out of range and a
bug of ours each get a typed error, are counted, and disturb nobody else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import zmq

from tiercache import messages as m
from tiercache.arena import Region
from tiercache.daemon.below import Granted, HeldBelow
from tiercache.daemon.cache import Cache
from tiercache.daemon.clock import LeaseClock
from tiercache.daemon.events import Named, name_blocks
from tiercache.daemon.leases import ReadLease
from tiercache.daemon.router import Answer
from tiercache.daemon.sessions import Session
from tiercache.daemon.space import Namespace, NoRoom
from tiercache.errors import RequestRefused
from tiercache.messages import KEY_BYTES, NO_LEASE, OFFSET_MASK, REGION_SHIFT, ErrorCode
from tiercache.metrics import LatencyHistogram
from tiercache.wire import UNREADABLE

log = logging.getLogger("tiercache.daemon")

MAX_SPEC_BYTES = 8192
MAX_CLIENT_COUNTERS = 64
MAX_UNSENT_BYTES = 64 << 20
"""Payload on its way to one session: what a peer that does not read can hold of the arena."""
MAX_PARKED = 64
"""Requests of one session that may wait for the tier below."""
PARK_S = 0.2
"""How long at most, and at most half of the time that the client gives the request."""
MAX_COUNTER_NAME_BYTES = 32
MAX_MODELS_BYTES = 32 << 10
"""Of one session, encoded: room for about a hundred LoRA adapters."""
MAX_LISTED_MODELS_BYTES = 1 << 20
"""Of all sessions, in one reply."""
MAX_CHECKED_BLOCKS = 200_000
"""Blocks whose books are compared without `force`: about a fifth of a second in which nobody is served."""
MAX_FINDINGS = 1000
MAX_ERROR_CHARS = 400

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(m.AnyRequest)


class _Start(msgspec.Struct, array_like=True):
    """How every request starts; what comes after is skipped, not built."""

    tag: str
    request_id: int


_decode_start = msgspec.msgpack.Decoder(_Start).decode


class _Parked(NamedTuple):
    """A `Resolve` that waits for blocks on their way up."""

    identity: bytes
    session: Session
    lease: ReadLease
    namespace: Namespace
    request: m.Resolve
    until_s: float


def _nowhere(identity: bytes, answer: Answer) -> None:
    raise AssertionError("the service was not connected to a router")


class Service:
    """Answers requests from the cache. Event loop only.

    `sessions` maps tokens to sessions; `end(session)` ends one once its reply is sent; `stats()`
    builds the tree that `Stats` is answered with.
    """

    def __init__(
        self, cache: Cache, clock: LeaseClock, generation: int, sessions: dict[bytes, Session],
        regions: dict[int, Region], end: Callable[[Session], None], stats: Callable[[], dict[str, Any]],
        lease_ttl_max_s: float, max_leases: int, region_bytes: int,
    ) -> None:  # fmt: skip
        self.latency: dict[str, LatencyHistogram] = {}
        self._cache = cache
        self._clock = clock
        self._generation = generation
        self._sessions = sessions
        self._regions = regions
        self._end = end
        self._stats = stats
        self._lease_ttl_max_s = lease_ttl_max_s
        self._max_leases = max_leases
        self._region_bytes = region_bytes
        self.send: Callable[[bytes, Answer], None] = _nowhere
        self._identity = b""
        self._parked: list[_Parked] = []
        self._methods: dict[type, Callable[[Session, Any], m.Reply | None]] = {
            m.Ping: lambda session, request: m.Done(request.request_id, generation),
            m.RegisterNamespace: self._register,
            m.Match: self._match,
            m.Peek: self._peek,
            m.Resolve: self._resolve,
            m.Hold: self._hold,
            m.Release: self._release,
            m.Renew: self._renew,
            m.Reserve: self._reserve,
            m.Commit: self._commit,
            m.Abort: self._abort,
            m.Pin: self._pin,
            m.Unpin: self._unpin,
            m.Prefetch: self._prefetch,
            m.Flush: self._flush,
            m.Report: self._report,
            m.Models: self._models,
            m.Stats: lambda session, request: m.StatsReply(request.request_id, generation, self._stats()),
            m.Check: self._check,
            m.Bye: self._bye,
            m.Extents: self._extents,
            m.BadExtent: self._bad_extent,
            m.ReserveExtents: self._reserve_extents,
            m.CommitExtents: self._commit_extents,
        }

    def handle(self, identity: bytes, header: bytes, parts: list[zmq.Frame]) -> Answer | None:
        """Answer one message: its header part, and the payload parts that followed.

        None for what waits for the tier below and is given to `send` later.
        """
        started_ns = time.perf_counter_ns()
        counters = self._cache.counters
        counters.requests += 1
        self._clock.observe()
        self._identity = identity
        request_id = 0
        session: Session | None = None
        try:
            request = self._decode(header)
            request_id = request.request_id
            session = self._session_of(request)
            answer: Answer | None = self._dispatch(session, request, parts)
        except RequestRefused as refusal:
            counters.requests_refused += 1
            text = refusal.text[:MAX_ERROR_CHARS]  # some quote what was sent
            error = m.Error(request_id or _request_id_of(header), self._generation, refusal.code, text)
            answer = Answer(_encoder.encode(error), session)
        except Exception:
            # The one place where a bug of ours must not become a client that waits for ever.
            log.exception("a request failed")
            counters.requests_failed += 1
            text = "the daemon failed at this request; its log says where"
            error = m.Error(request_id, self._generation, ErrorCode.INTERNAL.value, text)
            answer = Answer(_encoder.encode(error), session)
        else:
            self._observe(type(request), started_ns)
        return answer

    def _observe(self, kind: type, started_ns: int) -> None:
        histogram = self.latency.get(kind.__name__)
        if histogram is None:
            histogram = self.latency[kind.__name__] = LatencyHistogram()
        histogram.observe_ns(time.perf_counter_ns() - started_ns)

    def _decode(self, header: bytes) -> m.Request:
        try:
            request: m.Request = _decoder.decode(header)
            return request
        except UNREADABLE as error:
            self._cache.counters.requests_malformed += 1
            raise RequestRefused(ErrorCode.MALFORMED.value, str(error)) from error

    def _session_of(self, request: m.Request) -> Session:
        if request.generation != self._generation:
            text = "the daemon was restarted since this session began: connect again"
            raise RequestRefused(ErrorCode.STALE_GENERATION.value, text)
        session = self._sessions.get(request.session)
        if session is None:
            raise RequestRefused(ErrorCode.UNKNOWN_SESSION.value, "this session has ended: connect again")
        if request.deadline_us + session.clock_offset_us < time.monotonic_ns() // 1000:
            self._cache.counters.requests_expired += 1
            raise RequestRefused(ErrorCode.EXPIRED.value, "its deadline was over before it was read")
        return session

    def _dispatch(self, session: Session, request: m.Request, parts: list[zmq.Frame]) -> Answer | None:
        if len(parts) != (1 if isinstance(request, m.Write) else 0):
            self._cache.counters.requests_malformed += 1
            raise RequestRefused(ErrorCode.MALFORMED.value, f"{len(parts)} payload parts do not belong to this request")
        if isinstance(request, m.Read):
            return self._read(session, request)
        if isinstance(request, m.Write):
            reply: m.Reply | None = self._write(session, request, parts[0].buffer)
        else:
            reply = self._methods[type(request)](session, request)
        return None if reply is None else Answer(_encoder.encode(reply), session)

    # --- namespaces and keys, as requests name them ----------------------------------------------

    def _register(self, session: Session, request: m.RegisterNamespace) -> m.Reply:
        problem = request.spec.problem()
        if problem is None and request.spec.frame_bytes > self._region_bytes:
            problem = (
                f"block_bytes is {request.spec.block_bytes}: a region holds {self._region_bytes}; "
                "start the daemon with a larger --region"
            )
        if problem is None and len(_encoder.encode(request.spec)) > MAX_SPEC_BYTES:
            problem = f"the spec is longer than {MAX_SPEC_BYTES} bytes"
        if problem is not None:
            raise RequestRefused(ErrorCode.BAD_VALUE.value, problem)
        try:
            namespace = self._cache.space.open_namespace(request.spec)
        except NoRoom as error:
            raise RequestRefused(ErrorCode.LIMIT.value, str(error)) from error
        namespace.direct |= request.direct
        return m.Namespace(request.request_id, self._generation, namespace.number, request.spec.frame_bytes)

    def _namespace(self, number: int) -> Namespace:
        namespace = self._cache.space.namespaces.get(number)
        if namespace is None:
            raise RequestRefused(ErrorCode.UNKNOWN_NAMESPACE.value, f"{number} is not registered: register its spec")
        return namespace

    def _namespaces(self, numbers: Sequence[int]) -> list[Namespace]:
        if not 0 < len(numbers) <= m.MAX_NAMESPACES_PER_REQUEST or len(set(numbers)) != len(numbers):
            text = f"{len(numbers)} namespaces: 1 to {m.MAX_NAMESPACES_PER_REQUEST} different ones are allowed"
            raise RequestRefused(ErrorCode.BAD_VALUE.value, text)
        return [self._namespace(number) for number in numbers]

    def _lease_ttl_s(self, session: Session, ttl_ms: int) -> float:
        owner = session.owner
        if len(owner.reads) + len(owner.writes) + len(owner.grants) >= self._max_leases:
            raise RequestRefused(ErrorCode.LIMIT.value, f"{self._max_leases} leases are open in this session")
        return min(_positive(ttl_ms, "ttl_ms") / 1000, self._lease_ttl_max_s)

    # --- reading ---------------------------------------------------------------------------------

    def _match(self, session: Session, request: m.Match) -> m.Reply:
        _check_keys(request.keys, m.MAX_KEYS)
        namespaces = self._namespaces(request.namespaces)
        ttl_s = self._lease_ttl_s(session, request.ttl_ms) if request.ttl_ms else 0.0
        wants = request.promote, request.extents
        found = self._cache.match(session.owner, namespaces, request.keys, ttl_s, *wants)
        if found.lease is None:
            return m.Matched(request.request_id, self._generation, found.dram, found.below, NO_LEASE)
        named = min(request.resolve, m.MAX_RESOLVE)
        frames = []
        if named > 0:
            for namespace in namespaces:
                frames.append(m.pack_frames(self._cache.reads.frames(found.lease, namespace, 0, named)))
        lease_id = found.lease.lease_id
        held = found.lease.held is not None
        return m.Matched(request.request_id, self._generation, found.dram, found.below, lease_id, frames, held)

    def _peek(self, session: Session, request: m.Peek) -> m.Reply:
        _check_keys(request.keys, m.MAX_KEYS)
        namespaces = self._namespaces(request.namespaces)
        together = self._cache.reads.peek(namespaces, request.keys)
        each = [self._cache.reads.peek([namespace], request.keys) for namespace in namespaces]
        return m.Peeked(request.request_id, self._generation, *together, each)

    def _resolve(self, session: Session, request: m.Resolve) -> m.Reply | None:
        if not request.first >= 0 or not 0 < request.count <= m.MAX_RESOLVE:
            text = f"blocks {request.first} + {request.count}: at most {m.MAX_RESOLVE} in one request, from 0 on"
            raise RequestRefused(ErrorCode.BAD_VALUE.value, text)
        lease = session.owner.reads.get(request.lease)
        if lease is None:
            raise RequestRefused(ErrorCode.UNKNOWN_LEASE.value, "this read lease is over: take it as a miss")
        namespace = self._namespace(request.namespace)
        self._cache.bring_up(lease, request.first + request.count)
        reply = self._resolved(lease, namespace, request)
        mine = sum(parked.session is session for parked in self._parked)
        if reply.frames or not reply.more or mine >= MAX_PARKED:
            return reply
        left_us = request.deadline_us + session.clock_offset_us - time.monotonic_ns() // 1000
        until_s = time.monotonic() + min(PARK_S, left_us / 2e6)
        self._parked.append(_Parked(self._identity, session, lease, namespace, request, until_s))
        return None

    def _resolved(self, lease: ReadLease, namespace: Namespace, request: m.Resolve) -> m.Frames:
        frames = self._cache.reads.frames(lease, namespace, request.first, request.count)
        growing = lease.blocks < lease.target and not lease.over
        more = growing and request.first + len(frames) < min(request.first + request.count, lease.target)
        packed = m.pack_frames(frames)
        return m.Frames(request.request_id, self._generation, request.first, packed, more=more)

    def answer_parked(self) -> None:
        """Answer what waited for blocks that have landed, or has waited long enough."""
        if not self._parked:
            return
        now_s, still = time.monotonic(), []
        for parked in self._parked:
            reply = self._resolved(parked.lease, parked.namespace, parked.request)
            if not parked.session.open:
                continue
            if reply.frames or not reply.more or now_s >= parked.until_s:
                self.send(parked.identity, Answer(_encoder.encode(reply), parked.session))
            else:
                still.append(parked)
        self._parked = still

    def _extents(self, session: Session, request: m.Extents) -> m.Reply:
        if not request.first >= 0 or not 0 < request.count <= m.MAX_RESOLVE:
            text = f"blocks {request.first} + {request.count}: at most {m.MAX_RESOLVE} in one request, from 0 on"
            raise RequestRefused(ErrorCode.BAD_VALUE.value, text)
        held, namespace = self._held(session, request.lease, request.namespace)
        directories, extents = held.extents(namespace, request.first, request.count)
        packed = m.pack_extents(extents)
        return m.ExtentList(request.request_id, self._generation, request.first, directories, packed)

    def _bad_extent(self, session: Session, request: m.BadExtent) -> m.Reply:
        held, namespace = self._held(session, request.lease, request.namespace)
        held.doubt(namespace, request.index)
        return m.Done(request.request_id, self._generation)

    def _held(self, session: Session, lease_id: int, number: int) -> tuple[HeldBelow, Namespace]:
        """What a lease keeps in the tier below for one of its namespaces."""
        lease = session.owner.reads.get(lease_id)
        if lease is None:
            raise RequestRefused(ErrorCode.UNKNOWN_LEASE.value, "this read lease is over: take it as a miss")
        namespace = self._namespace(number)
        if lease.held is None or namespace not in lease.namespaces:
            text = "this lease keeps no extents of that namespace: ask for its frames"
            raise RequestRefused(ErrorCode.BAD_VALUE.value, text)
        return lease.held, namespace

    def _hold(self, session: Session, request: m.Hold) -> m.Reply:
        self._lease_ttl_s(session, 1)
        if not self._cache.reads.hold(session.owner, request.lease):
            raise RequestRefused(ErrorCode.UNKNOWN_LEASE.value, "this read lease is over: take it as a miss")
        return m.Done(request.request_id, self._generation)

    def _release(self, session: Session, request: m.Release) -> m.Reply:
        good = self._cache.reads.release(session.owner, request.lease)
        return m.Released(request.request_id, self._generation, good)

    def _renew(self, session: Session, request: m.Renew) -> m.Reply:
        ttl_s = min(_positive(request.ttl_ms, "ttl_ms") / 1000, self._lease_ttl_max_s)
        alive = bytearray()
        owner, grants = session.owner, self._cache.below.grants
        for lease_id in request.leases[: self._max_leases]:
            read, write = owner.reads.get(lease_id), owner.writes.get(lease_id)
            granted = grants is not None and lease_id in owner.grants
            if read is not None:
                self._cache.reads.renew(read, ttl_s)
            elif write is not None:
                self._cache.writes.renew(write, ttl_s)
            elif grants is not None and granted:
                grants.renew(lease_id, ttl_s)
            alive.append(read is not None or write is not None or granted)
        return m.Renewed(request.request_id, self._generation, bytes(alive))

    def _read(self, session: Session, request: m.Read) -> Answer:
        lease = session.owner.reads.get(request.lease)
        if lease is None:
            raise RequestRefused(ErrorCode.UNKNOWN_LEASE.value, "this read lease is over: take it as a miss")
        namespace = self._namespace(request.namespace)
        _check_range(request.offset, request.length, namespace.spec.block_bytes)
        frames = self._cache.reads.frames(lease, namespace, request.index, 1) if request.index >= 0 else []
        if not frames:
            raise RequestRefused(ErrorCode.BAD_VALUE.value, f"block {request.index} is not under this lease")
        if session.unsent_bytes + request.length > MAX_UNSENT_BYTES:
            text = f"{session.unsent_bytes} payload bytes wait to be read: read them first"
            raise RequestRefused(ErrorCode.LIMIT.value, text)
        frame, allocator = frames[0], self._cache.space.allocator
        allocator.hold(frame)
        session.unsent_bytes += request.length
        self._cache.counters.payload_bytes_read += request.length
        region = self._regions[frame >> REGION_SHIFT]
        view = region.view((frame & OFFSET_MASK) + request.offset, request.length)
        header = _encoder.encode(m.Payload(request.request_id, self._generation, request.length))


        def sent() -> None:
            session.unsent_bytes -= request.length
            allocator.unhold(frame)

        return Answer(header, session, view, sent)

    # --- writing ---------------------------------------------------------------------------------

    def _reserve(self, session: Session, request: m.Reserve) -> m.Reply:
        _check_run(request.parent, request.keys)
        ttl_s = self._lease_ttl_s(session, request.ttl_ms)
        namespace = self._namespace(request.namespace)
        named = self._named(request, namespace)
        got = self._cache.reserve(session.owner, namespace, request.parent, request.keys, ttl_s, named)
        frames, states = m.pack_frames(got.frames), bytes(got.states)
        return m.Reserved(request.request_id, self._generation, got.lease_id, states, frames, got.parent_missing)

    def _named(self, request: m.Reserve | m.ReserveExtents, namespace: Namespace) -> Named | None:
        """What events will say of the blocks of a store, if there are events."""
        run, block_size = request.events, namespace.spec.block_size
        if run is None or self._cache.events is None:
            return None
        blocks = len(request.keys) // KEY_BYTES
        extra = blocks if run.extra_keys is None else len(run.extra_keys)
        if not blocks == len(run.hashes) == extra or len(run.tokens) != 4 * blocks * block_size:
            text = f"events name {len(run.hashes)} blocks, {extra} extra keys and {len(run.tokens)} bytes of tokens"
            text += f": must be {blocks} blocks of {block_size} tokens"
            raise RequestRefused(ErrorCode.BAD_VALUE.value, text)
        return name_blocks(run, block_size)

    def _commit(self, session: Session, request: m.Commit) -> m.Reply:
        if len(request.blocks) % 4 or len(request.blocks) > 4 * m.MAX_RESERVE:
            text = f"blocks must be u32le indices, at most {m.MAX_RESERVE}"
            raise RequestRefused(ErrorCode.BAD_VALUE.value, text)
        numbers = m.unpack_indices(request.blocks)
        if not session.map_arena:
            # What such a client did not write is a former owner's, and not for its eyes.
            self._cache.writes.fail_unwritten(session.owner, request.lease, numbers)
        states = self._cache.writes.commit(session.owner, request.lease, numbers)
        return m.Committed(request.request_id, self._generation, bytes(states))

    def _abort(self, session: Session, request: m.Abort) -> m.Reply:
        self._cache.writes.abort(session.owner, request.lease, request.finished)
        if self._cache.below.grants is not None:
            self._cache.below.grants.abort(session.owner, request.lease, request.finished)
        return m.Done(request.request_id, self._generation)

    def _reserve_extents(self, session: Session, request: m.ReserveExtents) -> m.Reply:
        _check_run(request.parent, request.keys)
        ttl_s = self._lease_ttl_s(session, request.ttl_ms)
        namespace = self._namespace(request.namespace)
        grants, got = self._cache.below.grants, Granted()
        if grants is not None:
            named = self._named(request, namespace)
            got = grants.reserve(session.owner, namespace, request.parent, request.keys, ttl_s, named)
        extents = m.pack_extents(got.extents)
        return m.ReservedExtents(
            request.request_id, self._generation, got.lease_id, got.present, got.directory, extents, got.soon
        )

    def _commit_extents(self, session: Session, request: m.CommitExtents) -> m.Reply:
        if len(request.checksums) % 8 or len(request.checksums) > 8 * m.MAX_RESERVE:
            text = f"checksums must be u64le, at most {m.MAX_RESERVE}"
            raise RequestRefused(ErrorCode.BAD_VALUE.value, text)
        checksums, grants = m.unpack_checksums(request.checksums), self._cache.below.grants
        states = [m.CommitState.DROPPED] * len(checksums)
        if grants is not None:
            states = grants.commit(session.owner, request.lease, checksums)
        return m.Committed(request.request_id, self._generation, bytes(states))

    def _write(self, session: Session, request: m.Write, payload: memoryview) -> m.Reply:
        block = self._cache.writes.writable_block(session.owner, request.lease, request.index)
        if block is None:
            text = f"block {request.index} is not reserved under this lease (any more)"
            raise RequestRefused(ErrorCode.UNKNOWN_LEASE.value, text)
        frame = block.frame
        _check_range(request.offset, len(payload), self._cache.space.allocator.frame_bytes(frame))
        if request.offset > block.written:
            text = f"offset {request.offset} leaves a gap after byte {block.written}: write a block from its start"
            raise RequestRefused(ErrorCode.BAD_VALUE.value, text)
        block.written = max(block.written, request.offset + len(payload))
        region = self._regions[frame >> REGION_SHIFT]
        # At most 2 MiB: a third of a millisecond of the loop.
        region.view((frame & OFFSET_MASK) + request.offset, len(payload))[:] = payload
        self._cache.counters.payload_bytes_written += len(payload)
        return m.Done(request.request_id, self._generation)

    # --- the rest --------------------------------------------------------------------------------

    def _pin(self, session: Session, request: m.Pin) -> m.Reply:
        _check_keys(request.keys, m.MAX_KEYS)
        ttl_s = min(_positive(request.ttl_ms, "ttl_ms"), m.MAX_PIN_TTL_MS) / 1000
        blocks = self._cache.reads.pin(self._namespaces(request.namespaces), request.keys, ttl_s)
        return m.Pinned(request.request_id, self._generation, blocks)

    def _unpin(self, session: Session, request: m.Unpin) -> m.Reply:
        _check_keys(request.keys, m.MAX_KEYS)
        blocks = self._cache.reads.unpin(self._namespaces(request.namespaces), request.keys)
        return m.Pinned(request.request_id, self._generation, blocks)

    def _prefetch(self, session: Session, request: m.Prefetch) -> m.Reply:
        _check_keys(request.keys, m.MAX_KEYS)
        found = self._cache.prefetch(session.owner, self._namespaces(request.namespaces), request.keys)
        return m.Matched(request.request_id, self._generation, found.dram, found.below, NO_LEASE)

    def _flush(self, session: Session, request: m.Flush) -> m.Reply | None:
        tiers = ["all", "dram", *filter(None, [self._cache.below.name])]
        if request.tier not in tiers:
            raise RequestRefused(ErrorCode.BAD_VALUE.value, f"there is no tier {request.tier!r}: {', '.join(tiers)}")
        if request.key:
            _check_keys(request.key, 1)
        namespaces = self._namespaces(request.namespaces) if request.namespaces else self._cache.all_namespaces()
        blocks, more = 0, False
        if self._cache.events is not None and not (request.namespaces or request.key) and request.tier == "all":
            self._cache.events.cleared()
        if request.tier != self._cache.below.name:
            blocks, more = self._cache.flush([namespace.number for namespace in namespaces], request.key)
        if request.tier == "dram" or not self._cache.below.name:
            # A single prefix, as probes of the data path do it every few seconds, is nothing for the log.
            level = logging.DEBUG if request.key else logging.INFO
            log.log(level, "session %s flushed %d blocks", session.name, blocks)
            return m.Flushed(request.request_id, self._generation, blocks, more)
        identity = self._identity

        def done(below_blocks: int, durable: bool) -> None:
            log.info("session %s flushed %d blocks, %d of them below DRAM", session.name, blocks, below_blocks)
            reply: m.Reply = m.Flushed(request.request_id, self._generation, blocks + below_blocks, more)
            if not durable:
                text = "flushed, but a disk did not take note of it: a restart may bring blocks back; flush again"
                reply = m.Error(request.request_id, self._generation, ErrorCode.INTERNAL.value, text)
            self.send(identity, Answer(_encoder.encode(reply), session))

        self._cache.below.flush(namespaces, request.key, done)
        return None

    def _report(self, session: Session, request: m.Report) -> m.Reply:
        if request.registration not in ("cuda", "mlock", "none") or len(request.counters) > MAX_CLIENT_COUNTERS:
            text = f"registration is cuda, mlock or none, with at most {MAX_CLIENT_COUNTERS} counters"
            raise RequestRefused(ErrorCode.BAD_VALUE.value, text)
        if any(len(name.encode()) > MAX_COUNTER_NAME_BYTES for name in request.counters):
            text = f"a counter's name is longer than {MAX_COUNTER_NAME_BYTES} bytes"  # all go into one `stats` reply
            raise RequestRefused(ErrorCode.BAD_VALUE.value, text)
        if problem := next(filter(None, (card.problem() for card in request.models)), None):
            raise RequestRefused(ErrorCode.BAD_VALUE.value, f"a model card: {problem}")
        models = {_encoder.encode(card): card for card in request.models}
        if sum(map(len, models)) > MAX_MODELS_BYTES:
            text = f"the models are described in more than {MAX_MODELS_BYTES} bytes: name fewer"
            raise RequestRefused(ErrorCode.TOO_LARGE.value, text)
        session.registration, session.counters, session.models = request.registration, request.counters, models
        return m.Done(request.request_id, self._generation)

    def _models(self, session: Session, request: m.Models) -> m.Reply:
        models: dict[bytes, m.ModelCard] = {}
        left_bytes = MAX_LISTED_MODELS_BYTES
        for one in self._sessions.values():
            left_bytes -= sum(map(len, one.models.keys() - models.keys()))
            if left_bytes < 0:
                break
            models |= one.models
        known = self._cache.space.numbers({name for card in models.values() for name in card.namespaces})
        return m.ModelList(request.request_id, self._generation, list(models.values()), known)

    def _check(self, session: Session, request: m.Check) -> m.Reply | None:
        if request.sample < -1 or request.bytes_per_s < 0:
            text = f"sample {request.sample}, bytes_per_s {request.bytes_per_s}: from 0, or sample -1 for all blocks"
            raise RequestRefused(ErrorCode.BAD_VALUE.value, text)
        cache = self._cache
        blocks = sum(table.blocks for table in cache.space.index.tables.values())
        blocks += int(cache.below.stats().get("blocks", 0))
        if blocks > MAX_CHECKED_BLOCKS and not request.force:
            text = (
                f"{blocks} blocks: looking at them all would hold up requests for about {blocks * 1e-6:.1f} s; "
                "force it, or check the nvme directories while no daemon runs"
            )
            raise RequestRefused(ErrorCode.LIMIT.value, text)
        findings = cache.check_integrity() + cache.below.check_integrity()
        if not request.sample:
            return self._checked(request, findings, blocks, 0)
        identity = self._identity

        def done(bad: list[str], scanned: int) -> None:
            reply = self._checked(request, findings + bad, blocks, scanned)
            self.send(identity, Answer(_encoder.encode(reply), session))

        if not cache.below.scan(request.sample, request.bytes_per_s, lambda: session.open, done):
            raise RequestRefused(ErrorCode.LIMIT.value, "another check reads blocks: wait until it has ended")
        return None

    def _checked(self, request: m.Check, findings: list[str], blocks: int, scanned: int) -> m.CheckReply:
        for finding in findings[:MAX_FINDINGS]:
            log.error("check: %s", finding)
        if len(findings) > MAX_FINDINGS:
            findings = [*findings[:MAX_FINDINGS], f"{len(findings) - MAX_FINDINGS} more"]
        return m.CheckReply(request.request_id, self._generation, findings, blocks, scanned)

    def _bye(self, session: Session, request: m.Bye) -> m.Reply:
        self._end(session)
        return m.Done(request.request_id, self._generation)


def _positive(value: int, name: str) -> int:
    if value <= 0:
        raise RequestRefused(ErrorCode.BAD_VALUE.value, f"{name} is {value}: must be more than 0")
    return value


def _check_keys(keys: bytes, limit: int) -> None:
    if not keys or len(keys) % KEY_BYTES:
        raise RequestRefused(ErrorCode.BAD_VALUE.value, f"keys are {len(keys)} bytes: 16 for each, at least one")
    if len(keys) > limit * KEY_BYTES:
        raise RequestRefused(ErrorCode.TOO_LARGE.value, f"{len(keys) // KEY_BYTES} keys: at most {limit} here")


def _check_run(parent: bytes, keys: bytes) -> None:
    _check_keys(keys, m.MAX_RESERVE)
    if len(parent) not in (0, KEY_BYTES):
        raise RequestRefused(ErrorCode.BAD_VALUE.value, f"parent is a key of {KEY_BYTES} bytes, or empty")


def _check_range(offset: int, length: int, end: int) -> None:
    if offset < 0 or not 0 < length <= m.MAX_PAYLOAD_BYTES or offset + length > end:
        text = f"bytes {offset} + {length} of {end}: must lie inside, at most {m.MAX_PAYLOAD_BYTES} in one message"
        raise RequestRefused(ErrorCode.BAD_VALUE.value, text)


def _request_id_of(header: bytes) -> int:
    """The request id of a message that could not be decoded, if it got that far; else 0."""
    try:
        return _decode_start(header).request_id
    except UNREADABLE:
        return 0
