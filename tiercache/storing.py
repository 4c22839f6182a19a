"""Stores: reserve frames under a write lease, copy, commit.

    reserve ─► per key: have it / pending / a frame for you / none free; frames as a leading run
    copy       the blocks that got a frame
    commit ──► per block: visible / held until its parent is / dropped

What was reserved and not committed is aborted; with `finished` only when no copy of ours can
still write to the frames, because the daemon gives them to others after that word.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tiercache.client import Client
from tiercache.errors import DaemonUnavailable, ProtocolError, RequestRefused
from tiercache.layout import NamespaceSpec
from tiercache.messages import (
    KEY_BYTES,
    MAX_RESERVE,
    NO_LEASE,
    Abort,
    BlockState,
    Commit,
    CommitState,
    Committed,
    Done,
    Reserve,
    Reserved,
    pack_indices,
)
from tiercache.moves import Mover
from tiercache.session import Session
from tiercache.transfer import Addresses, CopyLost, Limit

WRITE_TTL_MS = 10_000
WINDOW_BYTES = 256 << 20
"""Reserved at once: frames that wait for their copy are of no use to anyone."""
FRAME_BYTES = 8


class StoreResult(NamedTuple):
    """What became of the blocks of one store; the first three add up to their number.

    `stored` are visible to others now, or as soon as their parents are. `present` were there
    already or are being written by somebody else. `dropped` were not kept: no frame was free, the
    store was stopped, or the daemon failed. With `parent_missing` the block before the first one is
    not in the cache, so nothing could be stored: begin with an earlier block.
    """

    stored: int = 0
    present: int = 0
    dropped: int = 0
    parent_missing: bool = False


class _Writing:
    """Exists while a write lease is in use; its end stops the renewals."""


def store_blocks(
    client: Client,
    mover: Mover,
    spec: NamespaceSpec,
    keys: bytes,
    block_ids: Addresses,
    first: int,
    limit: Limit,
    after: Any = None,
) -> StoreResult:
    """Store `block_ids` as the blocks `first..` of the chain `keys`. Raises TierCacheError.

    When it returns or raises, no copy is under way (but for CopyLost).
    """
    session = client.session()
    number = session.namespace_id(spec)
    count = len(block_ids)
    window = max(1, min(MAX_RESERVE, WINDOW_BYTES // spec.block_bytes))
    stored = present = done = 0
    while done < count and not limit.reached():
        ids = block_ids[done : done + window]
        begin = (first + done) * KEY_BYTES
        reserved = session.call(
            Reserve,
            Reserved,
            namespace=number,
            parent=keys[max(0, begin - KEY_BYTES) : begin],
            keys=keys[begin : begin + len(ids) * KEY_BYTES],
            ttl_ms=WRITE_TTL_MS,
        )
        if reserved.parent_missing:
            return StoreResult(stored, present, count - stored - present, parent_missing=done == 0)
        stored += _fill(client, session, mover, reserved, ids, limit, after)
        present += reserved.states.count(BlockState.HAVE) + reserved.states.count(BlockState.PENDING)
        done += len(ids)
        if BlockState.NONE in reserved.states:
            break  # no frame free: what follows would have no parent
    return StoreResult(stored, present, count - stored - present)


def _fill(
    client: Client,
    session: Session,
    mover: Mover,
    reserved: Reserved,
    block_ids: Addresses,
    limit: Limit,
    after: Any,
) -> int:
    """Copy and commit what was reserved; returns how many blocks were kept."""
    indices = [index for index, state in enumerate(reserved.states) if state == BlockState.FRAME]
    lease = reserved.lease
    if len(reserved.states) != len(block_ids) or len(reserved.frames) != len(indices) * FRAME_BYTES:
        _abort(session, lease, finished=True)
        raise ProtocolError("the daemon reserved other blocks than were asked for")
    if lease == NO_LEASE or not indices:
        return 0
    writing = _Writing()
    client.keep(session, lease, WRITE_TTL_MS, writing)
    kept = 0
    copied = 0
    committed = False
    finished = True
    try:
        copied = mover.put(session, lease, indices, reserved.frames, block_ids[indices], limit, after)
        if copied:
            kept = _commit(session, lease, indices[:copied])
        committed = copied == len(indices)
    except CopyLost:
        finished = False
        raise
    finally:
        client.let_go(lease)
        if not committed:
            _abort(session, lease, finished=finished)
    return kept


def _commit(session: Session, lease: int, indices: list[int]) -> int:
    states = session.call(Commit, Committed, lease=lease, blocks=pack_indices(indices)).states
    if len(states) != len(indices):
        raise ProtocolError(f"{len(indices)} blocks were committed and {len(states)} answered")
    return states.count(CommitState.VISIBLE) + states.count(CommitState.HELD)


def _abort(session: Session, lease: int, *, finished: bool) -> None:
    if lease == NO_LEASE:
        return
    try:
        session.call(Abort, Done, lease=lease, finished=finished)
    except (RequestRefused, ProtocolError):
        pass  # it is over already
    except DaemonUnavailable:
        session.give_back(Abort, lease=lease, finished=finished)
