"""Requests that store blocks: register, reserve, commit, abort, write, and places on NVMe."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tiercache.daemon.events.events import Named, NamedBlocks
from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.tiers.dram.below import Granted
from tiercache.daemon.tiers.dram.leases import Owner
from tiercache.daemon.tiers.dram.space import MAX_TENANT_NAMESPACES, Namespace, NoRoom
from tiercache.errors import RequestRefused
from tiercache.protocol import messages as m
from tiercache.protocol.messages import KEY_BYTES, OFFSET_MASK, REGION_SHIFT, ErrorCode
from tiercache.protocol.wire import UNREADABLE

from .context import Method, RequestContext, check_range, check_run, encoder
from .sessions import Session

MAX_SPEC_BYTES = 8192


class WriteRequests:
    """One method for each kind of request. Event loop only."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._space = context.cache.space
        self._writes = context.cache.writes
        self._below = context.cache.below
        self._events = context.cache.events
        self._counters = context.cache.counters
        self._observers = context.cache.observers
        self._generation = context.generation

    def methods(self) -> dict[type, Method]:
        """The method that answers each kind of request."""
        return {
            m.RegisterNamespace: self._register,
            m.Reserve: self._reserve,
            m.Commit: self._commit,
            m.Abort: self._abort,
            m.ReserveExtents: self._reserve_extents,
            m.CommitExtents: self._commit_extents,
        }

    def _register(self, session: Session, request: m.RegisterNamespace) -> m.Reply:
        problem = request.spec.problem()
        if problem is None and request.spec.frame_bytes > self._context.region_bytes:
            problem = (
                f"a block has {request.spec.block_bytes} bytes and a region of the arena {self._context.region_bytes}: "
                "start the daemon with a larger --region, and an --arena that is no smaller"
            )
        if problem is None and len(encoder.encode(request.spec)) > MAX_SPEC_BYTES:
            problem = f"the spec is longer than {MAX_SPEC_BYTES} bytes"
        if problem is not None:
            raise RequestRefused(ErrorCode.BAD_VALUE.value, problem)
        spec = request.spec.of_tenant(session.tenant) if session.tenant else request.spec
        try:
            namespace = self._space.open_namespace(spec)
        except NoRoom as error:
            raise RequestRefused(ErrorCode.LIMIT.value, str(error)) from error
        if session.tenant and len(session.registered) < MAX_TENANT_NAMESPACES:
            session.registered[request.spec.fingerprint()] = namespace.fingerprint
        namespace.direct |= request.direct and not session.tenant
        return m.Namespace(request.request_id, self._generation, namespace.number, request.spec.frame_bytes)

    def _reserve(self, session: Session, request: m.Reserve) -> m.Reply:
        check_run(request.parent, request.keys)
        ttl_s = self._context.lease_ttl_s(session, request.ttl_ms)
        namespace = self._context.namespace(request.namespace)
        named = self._named(session.owner, request, namespace)
        got = self._writes.reserve(session.owner, namespace, request.parent, request.keys, ttl_s, named)
        self._observers.reserved(namespace, request.parent, request.keys)
        if named is not None:
            self._name_present(namespace, request.keys, got.states, named)
        frames, states = m.pack_frames(got.frames), bytes(got.states)
        return m.Reserved(request.request_id, self._generation, got.lease_id, states, frames, got.parent_missing)

    def _named(self, owner: Owner, request: m.Reserve | m.ReserveExtents, namespace: Namespace) -> Named | None:
        """What events will say of a store's blocks; None without events, or if it is too much to keep."""
        run, block_size = request.events, namespace.spec.block_size
        if run is None or self._events is None:
            return None
        blocks = len(request.keys) // KEY_BYTES
        extra = blocks if run.extra_keys is None else len(run.extra_keys)
        if not blocks == len(run.hashes) == extra or len(run.tokens) != 4 * blocks * block_size:
            text = f"events name {len(run.hashes)} blocks, {extra} extra keys and {len(run.tokens)} bytes of tokens"
            text += f": must be {blocks} blocks of {block_size} tokens"
            raise RequestRefused(ErrorCode.BAD_VALUE.value, text)
        named, events = NamedBlocks(run, block_size, namespace.spec.tenant), self._events
        try:
            fits = named.check() and not named.too_large
        except UNREADABLE as error:
            raise RequestRefused(ErrorCode.MALFORMED.value, f"extra keys of events: {error}") from error
        if not fits or not events.waits(owner.party, named):
            events.unnamed_blocks += blocks
            return None
        return named

    def _name_present(self, namespace: Namespace, keys: bytes, states: Sequence[m.BlockState], named: Named) -> None:
        """Blocks that are here already are in events from now on, also where they came without names."""
        events = self._events
        assert events is not None
        for place, state in enumerate(states):
            if state is m.BlockState.HAVE:
                key = keys[place * KEY_BYTES : (place + 1) * KEY_BYTES]
                said, on_disks = partial(named, place), lambda key=key: len(self._below.local.places(namespace, key))
                events.named_late(namespace.number, key, said, on_disks)

    def _commit(self, session: Session, request: m.Commit) -> Steps[m.Reply]:
        if len(request.blocks) % 4 or len(request.blocks) > 4 * m.MAX_RESERVE:
            text = f"blocks must be u32le indices, at most {m.MAX_RESERVE}"
            raise RequestRefused(ErrorCode.BAD_VALUE.value, text)
        numbers = m.unpack_indices(request.blocks)
        states = yield from self._writes.commit_in_slices(session.owner, request.lease, numbers)
        return m.Committed(request.request_id, self._generation, bytes(states))

    def _abort(self, session: Session, request: m.Abort) -> m.Reply:
        self._writes.abort(session.owner, request.lease, request.finished)
        if self._below.local.grants is not None:
            self._below.local.grants.abort(session.owner, request.lease, request.finished)
        return m.Done(request.request_id, self._generation)

    def _reserve_extents(self, session: Session, request: m.ReserveExtents) -> m.Reply:
        check_run(request.parent, request.keys)
        ttl_s = self._context.lease_ttl_s(session, request.ttl_ms)
        namespace = self._context.namespace(request.namespace)
        grants, got = self._below.local.grants, Granted()
        if grants is not None:
            named = self._named(session.owner, request, namespace)
            got = grants.reserve(session.owner, namespace, request.parent, request.keys, ttl_s, named)
            self._observers.reserved_below(namespace, request.parent, request.keys)
        extents = m.pack_extents(got.extents)
        return m.ReservedExtents(
            request.request_id, self._generation, got.lease_id, got.present, got.directory, extents, got.soon
        )

    def _commit_extents(self, session: Session, request: m.CommitExtents) -> m.Reply:
        if len(request.checksums) % 8 or len(request.checksums) > 8 * m.MAX_RESERVE:
            text = f"checksums must be u64le, at most {m.MAX_RESERVE}"
            raise RequestRefused(ErrorCode.BAD_VALUE.value, text)
        checksums, grants = m.unpack_checksums(request.checksums), self._below.local.grants
        states = [m.CommitState.DROPPED] * len(checksums)
        if grants is not None:
            states = grants.commit(session.owner, request.lease, checksums)
        return m.Committed(request.request_id, self._generation, bytes(states))

    def write(self, session: Session, request: m.Write, payload: memoryview) -> m.Reply:
        block = self._writes.writable_block(session.owner, request.lease, request.index)
        if block is None:
            text = f"block {request.index} is not reserved under this lease (any more)"
            raise RequestRefused(ErrorCode.UNKNOWN_LEASE.value, text)
        [frame] = block.frames
        check_range(request.offset, len(payload), self._space.allocator.frame_bytes(frame))
        if request.offset > block.written:
            text = f"offset {request.offset} leaves a gap after byte {block.written}: write a block from its start"
            raise RequestRefused(ErrorCode.BAD_VALUE.value, text)
        block.written = max(block.written, request.offset + len(payload))
        region = self._context.regions[frame >> REGION_SHIFT]
        # At most 2 MiB: a third of a millisecond of the event loop.
        region.view((frame & OFFSET_MASK) + request.offset, len(payload))[:] = payload
        self._counters.payload_bytes_written += len(payload)
        return m.Done(request.request_id, self._generation)
