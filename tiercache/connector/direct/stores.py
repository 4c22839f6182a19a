"""Direct stores: reserve places on NVMe at the daemon, write the blocks there ourselves, commit.

    reserve ─► keys that are on NVMe already, then places for a run of the others
    write      from the pool to the places
    commit ──► the leading blocks written, with their checksums: visible

Blocks that cannot go this way (the block before it is not on NVMe, no room, no budget, a failure) are left for DRAM.
When the lease ends, the daemon is told whether a write of ours may still be in progress.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

from tiercache.client.client import Client
from tiercache.client.session import Session
from tiercache.connector.blocks import WINDOW_BLOCKS, WINDOW_BYTES, NewBlocks
from tiercache.connector.direct.gds import DirectStorer, block_seeds
from tiercache.connector.write_lease import WRITE_TTL_MS, WriteLease
from tiercache.copies.pool import Limit
from tiercache.errors import ProtocolError, RequestRefused
from tiercache.protocol.messages import (
    NO_LEASE,
    CommitExtents,
    CommitState,
    Extent,
    ReservedExtents,
    ReserveExtents,
    pack_checksums,
    unpack_extents,
)
from tiercache.protocol.namespaces import NamespaceSpec

PATIENCE_S = 1.0
"""How long to keep asking for a place that will be there soon."""
ASK_AGAIN_S = 0.002


class PastDram(NamedTuple):
    """Leading blocks of a store that are on NVMe now: `present` of them were there before.

    `refused`: the blocks written after them are not wanted (a flush came in between, the lease was over), so the rest
    of this store must not be kept in another way either.
    """

    stored: int = 0
    present: int = 0
    refused: bool = False


class _WhileUp(Limit):
    """A limit that is also reached when the session is over: another life of the daemon may give the places away."""

    def __init__(self, limit: Limit, session: Session) -> None:
        super().__init__(limit.deadline_s)
        self._limit = limit
        self._session = session

    def reached(self) -> bool:
        return self._limit.reached() or self._session.fileno() < 0

    def passed(self) -> bool:
        return self._limit.passed() or self._session.fileno() < 0


def store_past_dram(client: Client, storer: DirectStorer, spec: NamespaceSpec, blocks: NewBlocks) -> PastDram:
    """Write blocks to NVMe, as far as that works.

    When it returns or raises, no write is in progress (except for CopyLost). Raises TierCacheError.
    """
    with client.leases.operation(blocks.limit):
        return _DirectStore(client, storer, spec, blocks).run()


class _DirectStore:
    """One store, window after window."""

    def __init__(self, client: Client, storer: DirectStorer, spec: NamespaceSpec, blocks: NewBlocks) -> None:
        self._leases = client.leases
        self._session = session = client.session()
        self._storer = storer
        self._namespace_id = session.namespace_id(spec)
        self._fingerprint = spec.fingerprint()
        self._blocks = blocks.for_daemon(session, spec)
        self._while_up = _WhileUp(blocks.limit, session)

    def run(self) -> PastDram:
        """Run all windows, until the end, the limit, or blocks that cannot go this way."""
        blocks = self._blocks
        most = max(1, min(WINDOW_BLOCKS, WINDOW_BYTES // self._storer.pool.block_bytes))
        done = stored = 0
        refused = False
        while done < len(blocks) and not self._storer.off and not blocks.limit.reached():
            window = blocks.part(done, done + most)
            reserved = self.reserve(window)
            if reserved is None or (not reserved.present and reserved.lease == NO_LEASE):
                break
            done += reserved.present
            if reserved.lease == NO_LEASE:
                continue
            granted, written, visible = self.write(reserved, window.part(reserved.present, most))
            stored += visible
            done += visible
            if visible < granted:
                refused = visible < written
                break
        return PastDram(stored, done - stored, refused)

    def reserve(self, window: NewBlocks) -> ReservedExtents | None:
        """Reserve places for a window; asks again where there will be some soon. None: refused."""
        until_s = time.monotonic() + PATIENCE_S
        fields = window.reserve_fields(self._namespace_id, WRITE_TTL_MS)
        while True:
            try:
                reserved = self._session.call(ReserveExtents, **fields)
            except RequestRefused as error:
                self._storer.note(str(error))  # the daemon is older, or has too many leases of ours
                return None
            if not 0 <= reserved.present <= len(window):
                self._lease(reserved).give_up()
                raise ProtocolError("the daemon has more blocks than it was asked about")
            waits = reserved.soon and not reserved.present and reserved.lease == NO_LEASE
            if not waits or self._while_up.reached() or time.monotonic() > until_s:
                return reserved
            time.sleep(ASK_AGAIN_S)

    def _lease(self, reserved: ReservedExtents) -> WriteLease:
        return WriteLease(self._leases, self._session, reserved.lease)

    def write(self, reserved: ReservedExtents, window: NewBlocks) -> tuple[int, int, int]:
        """Write the granted blocks and commit them; returns how many were granted, written, and visible."""
        session, lease = self._session, self._lease(reserved)
        try:
            with lease:
                places = _places(reserved, len(window))
                granted = replace(window.part(0, len(places)), limit=self._while_up)
                seeds = block_seeds(granted.own_keys, self._fingerprint, self._storer.pool.block_bytes)
                sums = self._storer.store(session.generation, reserved.directory, places, seeds, granted)
                # `void` is read after the sums: if it came too late for this, the summed blocks had not changed.
                if not sums or window.limit.void:
                    return len(places), 0, 0
                checksums = pack_checksums(sums)
                states = session.call(CommitExtents, lease=lease.lease_id, checksums=checksums).states
                lease.committed()
        finally:
            lease.give_up()
        if len(states) != len(sums):
            raise ProtocolError(f"{len(sums)} blocks were committed and {len(states)} answered")
        return len(places), len(sums), len(states) - len(states.lstrip(bytes([CommitState.VISIBLE])))


def _places(reserved: ReservedExtents, most: int) -> list[Extent]:
    try:
        places = unpack_extents(reserved.extents)
    except ValueError as error:
        raise ProtocolError(str(error)) from error
    if not 0 < len(places) <= most:
        raise ProtocolError(f"the daemon granted {len(places)} places where {most} were asked for")
    return places
