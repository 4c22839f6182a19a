"""Requests that find blocks and read them: match, peek, resolve, read, extents, and read leases."""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from typing import NamedTuple

from tiercache.daemon.ground.slices import LOOKUPS, Steps
from tiercache.daemon.tiers.dram.leases import HeldBelow, ReadLease
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.errors import RequestRefused
from tiercache.protocol import messages as m
from tiercache.protocol.messages import NO_LEASE, OFFSET_MASK, REGION_SHIFT, ErrorCode

from .context import (
    Method,
    RequestContext,
    check_keys,
    check_range,
    check_windows,
    encoder,
    positive,
)
from .router import Answer
from .sessions import Session
from .slow import SlowRequests
from .store_waits import StoreWaits

MAX_PARKED = 64
"""Requests of one session that may wait for the tier below."""
MAX_MATCHED_FRAMES = 4096
"""Frames in the reply to a match, of all its namespaces together: about a millisecond."""
ANSWERED_AT_ONCE = 128
"""Parked requests answered in one turn, and the time after which the turn ends with the answer in progress."""
ANSWER_NS = 1_000_000
_PEEKS = 64
"""Namespaces peeked into in one slice where they are chains."""
PARK_S = 0.2
"""Longest wait for the tier below; never more than half of the time that the client gives the request."""


class _Parked(NamedTuple):
    """A `Resolve` that waits for blocks being promoted."""

    identity: bytes
    session: Session
    namespace: Namespace
    request: m.Resolve
    since_s: float
    until_s: float


class ReadRequests:
    """One method for each kind of request. Event loop only."""

    def __init__(self, context: RequestContext, slow: SlowRequests, store_waits: StoreWaits) -> None:
        self._slow = slow
        self._context = context
        self._reads = context.cache.reads
        self._slices = context.cache.slices
        self._allocator = context.cache.space.allocator
        self._counters = context.cache.counters
        self._observers = context.cache.observers
        self._traffic = context.cache.observers.traffic
        self._generation = context.generation
        self._store_waits = store_waits
        self._parked: dict[int, deque[_Parked]] = {}  # by lease
        self._parked_of: Counter[Session] = Counter()
        self._overdue: list[tuple[float, int]] = []  # a heap: deadline and lease of each
        self._due: dict[int, int] = {}  # leases with requests that may be answered, and how many of these to look at
        self._reads.growing.on_progress = self._progressed

    def methods(self) -> dict[type, Method]:
        """The method that answers each kind of request."""
        return {
            m.Match: self._match,
            m.Peek: self._peek,
            m.Resolve: self._resolve,
            m.Hold: self._hold,
            m.Release: self._release,
            m.Renew: self._renew,
            m.Extents: self._extents,
            m.BadExtent: self._bad_extent,
        }

    def _match(self, session: Session, request: m.Match) -> Steps[m.Reply | None]:
        check_keys(request.keys, m.MAX_KEYS)
        namespaces = self._context.namespaces(request.namespaces)
        check_windows(namespaces, request.keys)
        ttl_s = self._context.lease_ttl_s(session, request.ttl_ms) if request.ttl_ms else 0.0
        found = self._found(session, request, namespaces, ttl_s)
        return (yield from self._store_waits.begin(session, request, namespaces, request.keys, found))

    def _found(self, session: Session, request: m.Match, namespaces: list[Namespace], ttl_s: float) -> Steps[m.Reply]:
        # A client on another host cannot read the disks, so no extents are kept for it.
        wants = request.promote, request.extents and not session.tenant
        found = yield from self._reads.match(session.owner, namespaces, request.keys, ttl_s, *wants)
        self._observers.looked_up(namespaces, request.keys, found, request.promote and request.ttl_ms > 0)
        if found.lease is None:
            return m.Matched(
                request.request_id, self._generation, found.dram, found.below, NO_LEASE, shared_blocks=found.shared
            )
        named = min(request.resolve, m.MAX_RESOLVE, max(1, MAX_MATCHED_FRAMES // len(namespaces)))
        frames = []
        if named > 0:
            for namespace in namespaces:
                found_frames = self._reads.frames(found.lease, namespace, 0, named)
                self._traffic.read(namespace, len(found_frames) * namespace.spec.block_bytes)
                frames.append(m.pack_frames(found_frames))
        lease_id = found.lease.lease_id
        held = found.lease.held is not None
        return m.Matched(
            request.request_id, self._generation, found.dram, found.below, lease_id, frames, held, found.shared
        )

    def _peek(self, session: Session, request: m.Peek) -> Steps[m.Reply]:
        check_keys(request.keys, m.MAX_KEYS)
        namespaces = self._context.namespaces(request.namespaces)
        together = yield from self._reads.runs.peek(namespaces, request.keys)
        each, each_shared = [], []
        for number, namespace in enumerate(namespaces, 1):
            counts = yield from self._reads.runs.peek([namespace], request.keys)
            each.append((counts.dram, counts.below + counts.shared))
            each_shared.append(counts.shared)
            if not number % _PEEKS:
                yield
        dram, below, shared = together.dram, together.below + together.shared, together.shared
        return m.Peeked(request.request_id, self._generation, dram, below, each, shared, each_shared)

    def _resolve(self, session: Session, request: m.Resolve) -> m.Reply | None:
        if not request.first >= 0 or not 0 < request.count <= m.MAX_RESOLVE:
            text = f"blocks {request.first} + {request.count}: at most {m.MAX_RESOLVE} in one request, from 0 on"
            raise RequestRefused(ErrorCode.BAD_VALUE.value, text)
        lease = self._reads.find(session.owner, request.lease)
        if lease is None:
            raise RequestRefused(ErrorCode.UNKNOWN_LEASE.value, "this read lease is over: take it as a miss")
        namespace = self._context.namespace(request.namespace)
        self._slices.begin(self._reads.growing.bring_up(lease, request.first + request.count))
        reply = self._resolved(lease, namespace, request)
        if reply.frames or not reply.more or self._parked_of[session] >= MAX_PARKED:
            return reply
        left_us = request.deadline_us + session.clock_offset_us - time.monotonic_ns() // 1000
        since_s = time.monotonic()
        until_s = since_s + min(PARK_S, left_us / 2e6)
        parked = _Parked(self._context.identity, session, namespace, request, since_s, until_s)
        self._parked.setdefault(request.lease, deque()).append(parked)
        self._parked_of[session] += 1
        heapq.heappush(self._overdue, (until_s, request.lease))
        return None

    def _resolved(self, lease: ReadLease, namespace: Namespace, request: m.Resolve) -> m.Frames:
        frames = self._reads.frames(lease, namespace, request.first, request.count)
        growing = lease.blocks < lease.target
        self._traffic.read(namespace, len(frames) * namespace.spec.block_bytes)
        more = growing and request.first + len(frames) < min(request.first + request.count, lease.target)
        packed = m.pack_frames(frames)
        return m.Frames(request.request_id, self._generation, request.first, packed, more=more)

    @property
    def parked(self) -> int:
        """Requests that wait for blocks being promoted, or for the shared store."""
        return self._parked_of.total() + len(self._store_waits)

    def _progressed(self, lease_id: int) -> None:
        """A lease has grown, or will not grow any more."""
        if lease_id in self._parked:
            self._due[lease_id] = len(self._parked[lease_id])

    def answer_parked(self) -> bool:
        """Answer requests whose blocks have arrived or whose time is up; True while there is more."""
        now_s, left, until_ns = time.monotonic(), ANSWERED_AT_ONCE, time.perf_counter_ns() + ANSWER_NS
        while self._overdue and self._overdue[0][0] <= now_s:
            self._progressed(heapq.heappop(self._overdue)[1])
        while self._due and left > 0:
            lease_id, due = self._due.popitem()
            waiting, looked = self._parked[lease_id], 0
            while looked < due and left > 0:
                looked += 1
                left -= 1
                parked = waiting.popleft()
                if not self._answered(parked, now_s):
                    waiting.append(parked)
                if time.perf_counter_ns() >= until_ns:
                    left = 0
            # A lease that lost a block may have ended, and reported progress, only now: then all of its requests are
            # due.
            due = min(max(due - looked, self._due.pop(lease_id, 0)), len(waiting))
            if due:
                self._due[lease_id] = due
            if not waiting:
                del self._parked[lease_id]
        return bool(self._due)

    def _answered(self, parked: _Parked, now_s: float) -> bool:
        """Answer a parked request, if there is anything to say."""
        session, request = parked.session, parked.request
        if session.open:
            lease = self._reads.find(session.owner, request.lease)  # it may have lost a block meanwhile
            reply = m.Frames(request.request_id, self._generation, request.first, b"")
            if lease is not None:
                reply = self._resolved(lease, parked.namespace, request)
            if not reply.frames and reply.more and now_s < parked.until_s:
                return False
            self._context.answer(parked.identity, session, reply)
            self._slow.answered_late(session, request, now_s - parked.since_s)
        self._parked_of[session] -= 1
        if not self._parked_of[session]:
            del self._parked_of[session]
        return True

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
        lease = self._reads.find(session.owner, lease_id)
        if lease is None:
            raise RequestRefused(ErrorCode.UNKNOWN_LEASE.value, "this read lease is over: take it as a miss")
        namespace = self._context.namespace(number)
        if lease.held is None or namespace not in lease.namespaces:
            text = "this lease keeps no extents of that namespace: ask for its frames"
            raise RequestRefused(ErrorCode.BAD_VALUE.value, text)
        return lease.held, namespace

    def _hold(self, session: Session, request: m.Hold) -> m.Reply:
        self._context.lease_ttl_s(session, 1)
        if not self._reads.hold(session.owner, request.lease):
            raise RequestRefused(ErrorCode.UNKNOWN_LEASE.value, "this read lease is over: take it as a miss")
        return m.Done(request.request_id, self._generation)

    def _release(self, session: Session, request: m.Release) -> m.Reply:
        good = self._reads.release(session.owner, request.lease)
        return m.Released(request.request_id, self._generation, good)

    def _renew(self, session: Session, request: m.Renew) -> Steps[m.Reply]:
        ttl_s = min(positive(request.ttl_ms, "ttl_ms") / 1000, self._context.lease_ttl_max_s)
        alive, looked = bytearray(), 0
        owner = session.owner
        for lease_id in request.leases[: self._context.max_leases]:
            looked += len(owner.reads[lease_id].pins) if lease_id in owner.reads else 0
            read, write = self._reads.find(owner, lease_id), owner.writes.get(lease_id)
            if read is not None:
                self._reads.renew(read, ttl_s)
            elif write is not None:
                write.kept_by.renew(write, ttl_s)
            alive.append(read is not None or write is not None)
            if looked >= LOOKUPS:  # checked for each block of a window after a drop
                looked = 0
                yield
        return m.Renewed(request.request_id, self._generation, bytes(alive))

    def read(self, session: Session, request: m.Read) -> Answer:
        lease = self._reads.find(session.owner, request.lease)
        if lease is None:
            raise RequestRefused(ErrorCode.UNKNOWN_LEASE.value, "this read lease is over: take it as a miss")
        namespace = self._context.namespace(request.namespace)
        check_range(request.offset, request.length, namespace.spec.block_bytes)
        frames = self._reads.frames(lease, namespace, request.index, 1) if request.index >= 0 else []
        if not frames:
            raise RequestRefused(ErrorCode.BAD_VALUE.value, f"block {request.index} is not under this lease")
        if (problem := self._context.unsent.problem(session, request.length)) is not None:
            raise RequestRefused(ErrorCode.LIMIT.value, problem)
        frame, allocator = frames[0], self._allocator
        self._counters.payload_bytes_read += request.length
        self._traffic.read(namespace, request.length)
        region = self._context.regions[frame >> REGION_SHIFT]
        view = region.view((frame & OFFSET_MASK) + request.offset, request.length)
        header = encoder.encode(m.Payload(request.request_id, self._generation, request.length))
        if session.tenant:
            # A client on another host must not hold a frame by reading slowly; a copy costs little beside the network.
            return Answer(header, session, bytes(view))
        allocator.hold(frame)
        return Answer(header, session, view, lambda: allocator.unhold(frame))
