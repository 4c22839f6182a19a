"""Direct stores: reserve places on NVMe at the daemon, write the blocks there ourselves, commit.

    reserve ─► keys that are on NVMe already, then places for a run of the others
    write      from the pool to the places
    commit ──► the leading blocks written, with their checksums: visible

Blocks that cannot go this way (the block before it is not on NVMe, no room, no budget, a failure) are left for DRAM.
When the lease ends, the daemon is told whether a write of ours may still be in progress.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from tiercache.client.client import Client
from tiercache.client.session import Session
from tiercache.connector.direct.backend import RAW
from tiercache.connector.direct.gds import DirectStorer
from tiercache.connector.stores import WINDOW_BLOCKS, WINDOW_BYTES, WRITE_TTL_MS, Writing, abort_lease, wanted_events
from tiercache.copies.pool import Addresses, CopyLost, Limit
from tiercache.errors import ProtocolError, RequestRefused
from tiercache.protocol.checksums import CHECKSUM_LANES, block_seed
from tiercache.protocol.messages import (
    KEY_BYTES,
    NO_LEASE,
    CommitExtents,
    CommitState,
    Committed,
    EventRun,
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


def store_past_dram(
    client: Client,
    storer: DirectStorer,
    spec: NamespaceSpec,
    keys: bytes,
    block_ids: Addresses,
    first: int,
    limit: Limit,
    after: Any = None,
    events: EventRun | None = None,
) -> PastDram:
    """Write `block_ids` to NVMe as the blocks `first..` of the chain `keys`, as far as that works.

    When it returns or raises, no write is in progress (except for CopyLost). Raises TierCacheError.
    """
    with client.leases.operation(limit):
        return _store(client, storer, spec, keys, block_ids, first, limit, after, events)


def _store(
    client: Client,
    storer: DirectStorer,
    spec: NamespaceSpec,
    keys: bytes,
    block_ids: Addresses,
    first: int,
    limit: Limit,
    after: Any,
    events: EventRun | None,
) -> PastDram:
    session = client.session()
    store = _Store(client, session, storer, spec, keys, limit, after)
    events = wanted_events(session, spec, events)
    most = max(1, min(WINDOW_BLOCKS, WINDOW_BYTES // spec.block_bytes))
    done = stored = 0
    refused = False
    while done < len(block_ids) and not storer.off and not limit.reached():
        window = block_ids[done : done + most]
        reserved = store.reserve(first + done, len(window), events and events.part(done, len(window)))
        if reserved is None or (not reserved.present and reserved.lease == NO_LEASE):
            break
        done += reserved.present
        if reserved.lease == NO_LEASE:
            continue
        granted, written, visible = store.write(reserved, window[reserved.present :], first + done)
        stored += visible
        done += visible
        if visible < granted:
            refused = visible < written
            break
    return PastDram(stored, done - stored, refused)


class _Store:
    """One store, window after window."""

    def __init__(
        self,
        client: Client,
        session: Session,
        storer: DirectStorer,
        spec: NamespaceSpec,
        keys: bytes,
        limit: Limit,
        after: Any,
    ) -> None:
        self._client = client
        self._session = session
        self._storer = storer
        self._number = session.namespace_id(spec)
        self._fingerprint = spec.fingerprint()
        self._keys = keys
        self._limit = limit
        self._while_up = _WhileUp(limit, session)
        self._after = after

    def reserve(self, first: int, count: int, events: EventRun | None) -> ReservedExtents | None:
        """Reserve places for the blocks from `first` on; asks again where there will be some soon. None: refused."""
        begin, until_s = first * KEY_BYTES, time.monotonic() + PATIENCE_S
        ask: dict[str, Any] = {
            "namespace": self._number,
            "parent": self._keys[max(0, begin - KEY_BYTES) : begin],
            "keys": self._keys[begin : begin + count * KEY_BYTES],
            "ttl_ms": WRITE_TTL_MS,
            "events": events,
        }
        while True:
            try:
                reserved = self._session.call(ReserveExtents, ReservedExtents, **ask)
            except RequestRefused as error:
                self._storer.note(str(error))  # the daemon is older, or has too many leases of ours
                return None
            if not 0 <= reserved.present <= count:
                abort_lease(self._session, reserved.lease, finished=True)
                raise ProtocolError("the daemon has more blocks than it was asked about")
            waits = reserved.soon and not reserved.present and reserved.lease == NO_LEASE
            if not waits or self._while_up.reached() or time.monotonic() > until_s:
                return reserved
            time.sleep(ASK_AGAIN_S)

    def write(self, reserved: ReservedExtents, block_ids: Addresses, first: int) -> tuple[int, int, int]:
        """Write the granted blocks and commit them; returns how many were granted, written, and visible."""
        session, lease = self._session, reserved.lease
        writing = Writing()
        over, finished = False, True
        try:
            self._client.leases.keep(session, lease, WRITE_TTL_MS, writing, writing=True)
            places = self._places(reserved, len(block_ids))
            seeds = [self._seed(first + number) for number in range(len(places))]
            ids, where = block_ids[: len(places)], reserved.directory
            sums = self._storer.store(session.generation, where, places, seeds, ids, self._while_up, self._after)
            # `void` is read after the sums: if it came too late for this, the summed blocks had not changed.
            if not sums or self._limit.void:
                return len(places), 0, 0
            states = session.call(CommitExtents, Committed, lease=lease, checksums=pack_checksums(sums)).states
            over = True
        except CopyLost:
            finished = False
            raise
        finally:
            self._client.leases.let_go(lease)
            if not over:
                abort_lease(session, lease, finished=finished)
        if len(states) != len(sums):
            raise ProtocolError(f"{len(sums)} blocks were committed and {len(states)} answered")
        return len(places), len(sums), len(states) - len(states.lstrip(bytes([CommitState.VISIBLE])))

    @staticmethod
    def _places(reserved: ReservedExtents, most: int) -> list[Extent]:
        try:
            places = unpack_extents(reserved.extents)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        if not 0 < len(places) <= most:
            raise ProtocolError(f"the daemon granted {len(places)} places where {most} were asked for")
        return places

    def _seed(self, number: int) -> int:
        key = self._keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
        return block_seed(key, self._fingerprint, self._storer.pool.block_bytes, RAW, CHECKSUM_LANES)
