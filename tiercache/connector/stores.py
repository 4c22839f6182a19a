"""Stores: reserve frames under a write lease, copy, commit.

    reserve ─► per key: have it / pending / a frame for you / none free; frames as a leading run
    copy       the blocks that got a frame
    commit ──► per block: visible / held until its parent is / dropped

    window 0   reserve  copy...........  commit
    window 1            reserve          copy...........  commit

Reserved blocks that were not committed are aborted; with `finished` only when no copy of ours can still write to the
frames, because the daemon then gives them to others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from tiercache.client.channel import Pending
from tiercache.client.client import Client
from tiercache.client.session import Session
from tiercache.connector.mover import Mover
from tiercache.copies.pool import Addresses, CopyLost, Limit
from tiercache.errors import ProtocolError, TierCacheError
from tiercache.protocol.messages import (
    KEY_BYTES,
    MAX_PAYLOAD_BYTES,
    NO_LEASE,
    Abort,
    BlockState,
    Commit,
    CommitState,
    Committed,
    Done,
    EventRun,
    Reserve,
    Reserved,
    pack_indices,
)
from tiercache.protocol.namespaces import NamespaceSpec

WRITE_TTL_MS = 10_000
WINDOW_BLOCKS = 128
WINDOW_BYTES = 128 << 20
"""The largest window: blocks that wait for their copy are of no use yet."""
EDGE_BYTES = 8 << 20
"""The size of the first and the last window, because no copy hides the first reserve and the last commit.

The last one also keeps the daemon awake: it has just been told of the window before.
"""
FRAME_BYTES = 8
TOKEN_ID_BYTES = 4


class StoreResult(NamedTuple):
    """Outcome of one store; the first three numbers add up to its blocks.

    `stored` are visible to others now, or as soon as their parents are. `present` were there already or are being
    written by another client. `dropped` were not kept: no frame was free, the store was stopped, or the daemon failed.
    With `parent_missing` the block before the first one is not in the cache, so nothing could be stored: begin with an
    earlier block.
    """

    stored: int = 0
    present: int = 0
    dropped: int = 0
    parent_missing: bool = False


def store_blocks(
    client: Client,
    mover: Mover,
    spec: NamespaceSpec,
    keys: bytes,
    block_ids: Addresses,
    first: int,
    limit: Limit,
    after: Any = None,
    events: EventRun | None = None,
) -> StoreResult:
    """Store `block_ids` as the blocks `first..` of the chain `keys`. Raises TierCacheError.

    `events` is what KV events say of these blocks, for a daemon that publishes them. When it returns or raises, no copy
    is in progress (except for CopyLost).
    """
    session = client.session()
    sizes = window_sizes(len(block_ids), spec.block_bytes)
    events = wanted_events(session, spec, events)
    with client.leases.operation(limit):
        number = session.namespace_id(spec)
        return _Store(client, session, mover, number, keys, block_ids, first, sizes, events).run(limit, after)


def wanted_events(session: Session, spec: NamespaceSpec, events: EventRun | None) -> EventRun | None:
    """`events`, if the daemon publishes them and the tokens of a window fit into a request."""
    fits = WINDOW_BLOCKS * spec.block_size * TOKEN_ID_BYTES <= MAX_PAYLOAD_BYTES
    return events if session.welcome.kv_events and fits else None


def window_sizes(count: int, block_bytes: int) -> list[int]:
    """In how many blocks at a time a store of `count` blocks goes.

    >>> window_sizes(64, 2 << 20), window_sizes(300, 128 << 10), window_sizes(8, 2 << 20)
    ([4, 56, 4], [64, 128, 44, 64], [8])
    """
    edge = max(1, min(WINDOW_BLOCKS, EDGE_BYTES // block_bytes))
    if count <= 2 * edge:
        return [count] if count else []
    most = max(edge, min(WINDOW_BLOCKS, WINDOW_BYTES // block_bytes))
    whole, rest = divmod(count - 2 * edge, most)
    return [edge, *[most] * whole, *([rest] if rest else []), edge]


class _Store:
    """One store, in windows: while one is copied, the next is reserved and the last one committed."""

    def __init__(
        self,
        client: Client,
        session: Session,
        mover: Mover,
        number: int,
        keys: bytes,
        block_ids: Addresses,
        first: int,
        sizes: list[int],
        events: EventRun | None,
    ) -> None:
        self._client = client
        self._session = session
        self._mover = mover
        self._number = number
        self._keys = keys
        self._block_ids = block_ids
        self._first = first
        self._events = events
        self._sizes: Iterator[int] = iter(sizes)
        self._asked = 0  # blocks of the reserve in progress
        self._filled = 0  # frames of the last window that had any
        self._reserving: Pending[Reserved] | None = None
        self._granted = NO_LEASE  # until it is committed in full or given up
        self._finished = True  # no copy of ours can still write to its frames
        self._committing: _Commit | None = None
        self._stored = 0
        self._present = 0

    def run(self, limit: Limit, after: Any) -> StoreResult:
        """Run all windows, until the end, the limit, or no room."""
        count = len(self._block_ids)
        done = 0
        try:
            self._reserve(done)
            while self._reserving is not None and not limit.reached():
                pending, self._reserving = self._reserving, None
                reserved = self._session.wait(pending)
                self._granted = reserved.lease
                if reserved.parent_missing:
                    missing = done == 0
                    self._finish_commit()
                    return self._result(missing)
                ids = self._block_ids[done : done + self._asked]
                cut = reserved.states.find(BlockState.NONE)
                done += len(ids) if cut < 0 else cut
                if cut < 0:
                    self._reserve(done)
                self._fill(reserved, ids, limit, after)
                self._present += reserved.states.count(BlockState.HAVE)
                self._present += reserved.states.count(BlockState.PENDING)
                if cut >= 0:
                    self._go_on_after(done, reserved.states[:cut].count(BlockState.FRAME))
            self._finish_commit()
        finally:
            self._session.abandon(self._reserving)
            if self._committing is not None:
                self._session.abandon(self._committing.pending)
                abort_lease(self._session, self._committing.lease, finished=True)
            self._give_up_granted()
        assert self._stored + self._present <= count
        return self._result()

    def _result(self, parent_missing: bool = False) -> StoreResult:
        dropped = len(self._block_ids) - self._stored - self._present
        return StoreResult(self._stored, self._present, dropped, parent_missing)

    def _go_on_after(self, done: int, granted: int) -> None:
        """Fewer frames were given than requested: finish with those, then request as many again.

        If there was none, the blocks being committed may have been all that one client may have at a time: then
        continue with half of that, so that one window is copied while the next is reserved.
        """
        size = granted or (self._filled + 1) // 2
        more = granted > 0 or self._committing is not None
        self._finish_commit()
        if more:
            self._sizes = itertools.repeat(size)
            self._reserve(done)

    def _reserve(self, done: int) -> None:
        count = self._asked = min(next(self._sizes, 0), len(self._block_ids) - done)
        if count:
            begin = (self._first + done) * KEY_BYTES
            self._reserving = self._session.post(
                Reserve,
                Reserved,
                namespace=self._number,
                parent=self._keys[max(0, begin - KEY_BYTES) : begin],
                keys=self._keys[begin : begin + count * KEY_BYTES],
                ttl_ms=WRITE_TTL_MS,
                events=self._events and self._events.part(done, count),
            )

    def _fill(self, reserved: Reserved, block_ids: Addresses, limit: Limit, after: Any) -> None:
        """Copy what was reserved and send its commit."""
        indices = [index for index, state in enumerate(reserved.states) if state == BlockState.FRAME]
        session, lease = self._session, reserved.lease
        if len(reserved.states) != len(block_ids) or len(reserved.frames) != len(indices) * FRAME_BYTES:
            raise ProtocolError("the daemon reserved other blocks than were asked for")
        if lease == NO_LEASE or not indices:
            return
        self._filled = len(indices)
        writing = Writing()
        self._client.leases.keep(session, lease, WRITE_TTL_MS, writing, writing=True)
        try:
            ids = block_ids if len(indices) == len(block_ids) else block_ids[indices]
            copied = self._mover.put(session, lease, indices, reserved.frames, ids, limit, after)
            self._finish_commit()
            if limit.void:  # read after the copies: those that `void` came too late for had ended before it
                copied = 0
            if copied:
                blocks = pack_indices(indices[:copied])
                self._committing = _Commit(lease, copied, session.post(Commit, Committed, lease=lease, blocks=blocks))
            if copied == len(indices):
                self._granted = NO_LEASE  # it ends with the commit
            else:
                self._finish_commit()
                self._give_up_granted()
        except CopyLost:
            self._finished = False
            raise
        finally:
            self._client.leases.let_go(lease)

    def _give_up_granted(self) -> None:
        lease, self._granted = self._granted, NO_LEASE
        abort_lease(self._session, lease, finished=self._finished)

    def _finish_commit(self) -> None:
        """Take the answer to the commit in progress, if there is one."""
        if self._committing is None:
            return
        commit, self._committing = self._committing, None
        try:
            states = self._session.wait(commit.pending).states
        except TierCacheError:
            # Whether it was done is unknown; it is idempotent, and the rest is given up.
            abort_lease(self._session, commit.lease, finished=True)
            raise
        if len(states) != commit.blocks:
            raise ProtocolError(f"{commit.blocks} blocks were committed and {len(states)} answered")
        self._stored += states.count(CommitState.VISIBLE) + states.count(CommitState.HELD)


class _Commit(NamedTuple):
    lease: int
    blocks: int
    pending: Pending[Committed]


class Writing:
    """Exists while a write lease is in use; dropping it stops the renewals."""


def abort_lease(session: Session, lease: int, *, finished: bool) -> None:
    """Give up what is not committed, now or once the daemon answers; `finished`: no copy of ours is in progress."""
    if lease == NO_LEASE:
        return
    try:
        session.call(Abort, Done, lease=lease, finished=finished)
    except TierCacheError:
        # For a lease that is over the reply is `done`. So the daemon has not received it: without it the frames would
        # stay ours for as long as this process lives.
        session.give_back(Abort, lease=lease, finished=finished)
