"""Stores: first past DRAM, where that is wanted and works; the rest into DRAM: reserve frames, copy, commit.

    reserve ─► per key: have it / pending / a frame for you / none free; frames as a leading run
    copy       the blocks that got a frame
    commit ──► per block: visible / held until its parent is / dropped

    window 0   reserve  copy...........  commit
    window 1            reserve          copy...........  commit

Reserved blocks that were not committed are given up: see `tiercache.connector.write_lease`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from tiercache.client.channels import Pending
from tiercache.client.client import Client
from tiercache.connector.blocks import WINDOW_BLOCKS, WINDOW_BYTES, NewBlocks
from tiercache.connector.direct.gds import DirectStorer
from tiercache.connector.direct.stores import PastDram, store_past_dram
from tiercache.connector.mover import Mover
from tiercache.connector.write_lease import WRITE_TTL_MS, WriteLease
from tiercache.errors import ProtocolError, TierCacheError
from tiercache.protocol.messages import (
    NO_LEASE,
    BlockState,
    Commit,
    CommitState,
    Committed,
    Reserve,
    Reserved,
    pack_indices,
)
from tiercache.protocol.namespaces import NamespaceSpec

EDGE_BYTES = 8 << 20
"""The size of the first and the last window, because no copy hides the first reserve and the last commit.

The last one also keeps the daemon awake: it has just been told of the window before.
"""
FRAME_BYTES = 8


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
    client: Client, mover: Mover, spec: NamespaceSpec, blocks: NewBlocks, storer: DirectStorer | None = None
) -> StoreResult:
    """Store `blocks`: with a `storer` as many as possible straight to NVMe, the rest into DRAM. Raises TierCacheError.

    When it returns or raises, no copy is in progress (except for CopyLost).
    """
    past = PastDram() if storer is None else store_past_dram(client, storer, spec, blocks)
    done = past.stored + past.present
    if done == len(blocks) or past.refused:
        return StoreResult(past.stored, past.present, len(blocks) - done)
    with client.leases.operation(blocks.limit):
        rest = _DramStore(client, mover, spec, blocks.part(done, len(blocks))).run()
    return rest._replace(
        stored=past.stored + rest.stored,
        present=past.present + rest.present,
        parent_missing=rest.parent_missing and not done,
    )


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


class _DramStore:
    """One store, in windows: while one is copied, the next is reserved and the last one committed."""

    def __init__(self, client: Client, mover: Mover, spec: NamespaceSpec, blocks: NewBlocks) -> None:
        self._leases = client.leases
        self._session = session = client.session()
        self._mover = mover
        self._namespace_id = session.namespace_id(spec)
        self._blocks = blocks.for_daemon(session, spec)
        self._sizes: Iterator[int] = iter(window_sizes(len(blocks), spec.block_bytes))
        self._reserving: _Reserve | None = None
        self._filled = 0  # frames of the last window that had any
        self._lease = WriteLease(self._leases, session, NO_LEASE)  # of the window that is copied
        self._committing: _Commit | None = None
        self._stored = 0
        self._present = 0

    def run(self) -> StoreResult:
        """Run all windows, until the end, the limit, or no room."""
        done = 0
        try:
            self._reserve(done)
            while self._reserving is not None and not self._blocks.limit.reached():
                (pending, window), self._reserving = self._reserving, None
                reserved = self._session.wait(pending)
                self._lease = WriteLease(self._leases, self._session, reserved.lease)
                if reserved.parent_missing:
                    missing = done == 0
                    self._finish_commit()
                    return self._result(missing)
                cut = reserved.states.find(BlockState.NONE)
                done += len(window) if cut < 0 else cut
                if cut < 0:
                    self._reserve(done)
                self._fill(reserved, window)
                self._present += reserved.states.count(BlockState.HAVE)
                self._present += reserved.states.count(BlockState.PENDING)
                if cut >= 0:
                    self._go_on_after(done, reserved.states[:cut].count(BlockState.FRAME))
            self._finish_commit()
        finally:
            if self._reserving is not None:
                self._session.abandon(self._reserving.pending)
            if self._committing is not None:
                self._session.abandon(self._committing.pending)
                self._committing.lease.give_up()
            self._lease.give_up()
        assert self._stored + self._present <= len(self._blocks)
        return self._result()

    def _result(self, parent_missing: bool = False) -> StoreResult:
        dropped = len(self._blocks) - self._stored - self._present
        return StoreResult(self._stored, self._present, dropped, parent_missing)

    def _go_on_after(self, done: int, granted: int) -> None:
        """Fewer frames were given than requested: finish with those, then request as many again.

        If there was none, the blocks being committed may have been all that one client may have at a time: then
        continue with half of that, so that one window is copied while the next is reserved.
        """
        size = granted or (self._filled + 1) // 2
        more = self._committing is not None  # of these frames too, unless their copy was stopped
        self._finish_commit()
        if more:
            self._sizes = itertools.repeat(size)
            self._reserve(done)

    def _reserve(self, done: int) -> None:
        count = next(self._sizes, 0)
        if count and done < len(self._blocks):
            window = self._blocks.part(done, done + count)
            fields = window.reserve_fields(self._namespace_id, WRITE_TTL_MS)
            self._reserving = _Reserve(self._session.post(Reserve, **fields), window)

    def _fill(self, reserved: Reserved, window: NewBlocks) -> None:
        """Copy what was reserved and send its commit."""
        indices = [index for index, state in enumerate(reserved.states) if state == BlockState.FRAME]
        if len(reserved.states) != len(window) or len(reserved.frames) != len(indices) * FRAME_BYTES:
            raise ProtocolError("the daemon reserved other blocks than were asked for")
        lease = self._lease
        if lease.lease_id == NO_LEASE or not indices:
            return
        self._filled = len(indices)
        with lease:
            copied = self._mover.put(lease, indices, reserved.frames, window)
            self._finish_commit()
            if window.limit.void:  # read after the copies: those that `void` came too late for had ended before it
                copied = 0
            if copied:
                names = pack_indices(indices[:copied])
                pending = self._session.post(Commit, lease=lease.lease_id, blocks=names)
                self._committing = _Commit(lease, copied, copied == len(indices), pending)
            if copied < len(indices):
                self._finish_commit()
                lease.give_up()

    def _finish_commit(self) -> None:
        """Take the answer to the commit in progress, if there is one."""
        if self._committing is None:
            return
        commit, self._committing = self._committing, None
        try:
            states = self._session.wait(commit.pending).states
        except TierCacheError:
            # Whether it was done is unknown; it is idempotent, and the rest is given up.
            commit.lease.give_up()
            raise
        if commit.whole:
            commit.lease.committed()
        if len(states) != commit.blocks:
            raise ProtocolError(f"{commit.blocks} blocks were committed and {len(states)} answered")
        self._stored += states.count(CommitState.VISIBLE) + states.count(CommitState.HELD)


class _Reserve(NamedTuple):
    """A reserve in progress."""

    pending: Pending[Reserved]
    window: NewBlocks


class _Commit(NamedTuple):
    """A commit in progress."""

    lease: WriteLease
    blocks: int
    whole: bool
    """These are all that the lease has."""
    pending: Pending[Committed]
