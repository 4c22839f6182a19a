"""Loads: match under a read lease, copy, then the daemon confirms that the copies are good.

match ──► lease on blocks 0 ..< n, frames of the first 64 in the same reply
copy      in windows of 512: resolve the frames that are missing, copy
release ─► good: the lease was never revoked while we copied. Anything else is a miss.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tiercache.client.channels import Pending
from tiercache.client.client import Client
from tiercache.client.session import Session
from tiercache.connector.blocks import Blocks, LeasedBlocks
from tiercache.connector.direct.gds import DirectLoader
from tiercache.connector.direct.loads import load_direct
from tiercache.connector.mover import Mover
from tiercache.errors import CallInterrupted, DaemonUnavailable, ProtocolError, RequestRefused, TierCacheError
from tiercache.protocol.messages import (
    KEY_BYTES,
    MAX_KEYS,
    MAX_RESOLVE,
    NO_LEASE,
    Frames,
    Hold,
    Release,
    Resolve,
)
from tiercache.protocol.messages import Match as MatchRequest
from tiercache.protocol.namespaces import NamespaceSpec
from tiercache.protocol.wire import UNREADABLE

READ_TTL_MS = 10_000
RESOLVE_WITH_MATCH = 64
FRAME_BYTES = 8


class Match:
    """A leading run of stored blocks, kept from eviction until it is loaded or released.

    Attributes:
        blocks: length of the run; 0 is a miss.
        below_blocks: how many of them, at its end, are promoted from a tier below DRAM while it is loaded.
        shared_blocks: how many of those, at their end, come over the network, from a store that hosts share.
    """

    __slots__ = (
        "__weakref__",
        "_frames",
        "_keys",
        "_lease",
        "_session",
        "_turns",
        "below_blocks",
        "blocks",
        "shared_blocks",
    )

    def __init__(
        self,
        session: Session | None = None,
        lease: int = NO_LEASE,
        blocks: int = 0,
        below_blocks: int = 0,
        frames: dict[int, bytes] | None = None,
        keys: bytes = b"",
        shared_blocks: int = 0,
    ) -> None:
        self.blocks = blocks
        self.below_blocks = below_blocks
        self.shared_blocks = shared_blocks
        self._session = session
        self._lease = lease
        self._frames = frames or {}  # by namespace id: frames of the first blocks, packed
        self._keys = keys  # of the whole run, if the lease keeps its end on NVMe
        self._turns = [1]  # taking it means ending the lease; taking is atomic

    def __repr__(self) -> str:
        return f"Match(blocks={self.blocks}, below_blocks={self.below_blocks}, shared_blocks={self.shared_blocks})"

    def ticket(self) -> bytes:
        """This match for another process of the same instance (`Connector.adopt`); empty for a miss.

        This match keeps its hold on the lease: release it when the other process has adopted it.
        """
        session, lease = self._session, self._lease
        if session is None or lease == NO_LEASE:
            return b""
        below, shared = self.below_blocks, self.shared_blocks
        known = _Ticket(session.generation, lease, self.blocks, self._frames, below, self._keys, shared)
        return msgspec.msgpack.encode(known)

    @property
    def direct_keys(self) -> bytes:
        """The keys of the run, when blocks below DRAM stay there for us to read; else empty."""
        return self._keys

    def frames(self, namespace: int, first: int, count: int) -> bytes:
        """The frames of blocks `first ..< first + count` as far as they came with the match, packed."""
        return self._frames.get(namespace, b"")[first * FRAME_BYTES : (first + count) * FRAME_BYTES]

    def take(self) -> tuple[Session, int] | None:
        """Session and lease, for the first caller, who must end it; None for later ones, and for a miss."""
        try:
            self._turns.pop()
        except IndexError:
            return None
        lease, self._lease = self._lease, NO_LEASE
        return None if self._session is None or lease == NO_LEASE else (self._session, lease)


class _Ticket(msgspec.Struct, array_like=True):
    generation: int
    lease: int
    blocks: int
    frames: dict[int, bytes]
    below_blocks: int = 0
    keys: bytes = b""
    shared_blocks: int = 0


_decode_ticket = msgspec.msgpack.Decoder(_Ticket).decode


def match_blocks(
    client: Client, keys: bytes, specs: Sequence[NamespaceSpec], *, with_frames: bool, extents: bool = False
) -> Match:
    """Ask for the longest leading run of `keys` that all namespaces have. Raises TierCacheError.

    With `extents` blocks on NVMe stay there, if the daemon agrees, for `load_blocks` to read.
    """
    session = client.session()
    namespace_ids = [session.namespace_id(spec) for spec in specs]
    keys = keys[: MAX_KEYS * KEY_BYTES]
    count = len(keys) // KEY_BYTES
    # The first blocks of a windowed namespace are usually gone: their frames are asked for when loading.
    resolve = min(count, RESOLVE_WITH_MATCH) if with_frames and not any(s.window_blocks for s in specs) else 0
    reply = session.call(
        MatchRequest,
        namespaces=namespace_ids,
        keys=keys,
        ttl_ms=READ_TTL_MS,
        resolve=resolve,
        promote=True,
        extents=extents,
    )
    blocks = reply.dram_blocks + reply.below_blocks
    if blocks == 0 or reply.lease == NO_LEASE:
        if reply.lease != NO_LEASE:
            session.give_back(Release, lease=reply.lease)
        return Match()
    if blocks > count or len(reply.frames) not in (0, len(namespace_ids)):
        raise ProtocolError(f"{blocks} blocks were matched of {count} keys")
    if not 0 <= reply.shared_blocks <= reply.below_blocks:
        raise ProtocolError(f"{reply.shared_blocks} blocks of {reply.below_blocks} below DRAM are in a shared store")
    frames = dict(zip(namespace_ids, reply.frames, strict=False))
    held = keys[: blocks * KEY_BYTES] if reply.extents else b""
    match = Match(session, reply.lease, blocks, reply.below_blocks, frames, held, reply.shared_blocks)
    client.leases.keep(session, reply.lease, READ_TTL_MS, match, writing=False)
    return match


def adopt_match(client: Client, ticket: bytes) -> Match:
    """Join the holders of another process's match. Raises TierCacheError."""
    if not ticket:
        return Match()
    try:
        known = _decode_ticket(ticket)
    except UNREADABLE as error:
        raise ProtocolError(f"this is not a ticket of a match: {error}") from error
    session = client.session()
    if known.generation != session.generation:
        return Match()
    try:
        session.call(Hold, lease=known.lease)
    except RequestRefused:
        return Match()  # it is over
    except (DaemonUnavailable, CallInterrupted):
        session.give_back(Release, lease=known.lease)
        raise
    below, shared = known.below_blocks, known.shared_blocks
    match = Match(session, known.lease, known.blocks, below, known.frames, known.keys, shared)
    client.leases.keep(session, known.lease, READ_TTL_MS, match, writing=False)
    return match


def end_match(client: Client, match: Match) -> bool:
    """Release the lease. True if the daemon says that it was good to the end."""
    taken = match.take()
    return taken is not None and _release(client, *taken)


def load_blocks(
    client: Client,
    mover: Mover,
    spec: NamespaceSpec,
    match: Match,
    blocks: Blocks,
    loader: DirectLoader | None = None,
) -> int:
    """Copy blocks of a match into the pool's; returns how many leading ones are good.

    What the match keeps on NVMe is read there by `loader`; the rest comes through DRAM. Ends the lease. When it returns
    or raises, no copy is in progress (except for CopyLost).
    """
    taken = match.take()
    if taken is None:
        return 0
    session, lease = taken
    matched = blocks.part(0, max(0, match.blocks - blocks.first))
    with client.leases.operation(blocks.limit):
        copied = 0
        try:
            leased = LeasedBlocks(session, lease, session.namespace_id(spec))
            if loader is None or not match.direct_keys:
                copied = _copy(leased, mover, match, matched)
            else:
                copied = _copy_past_dram(leased, mover, match, matched, loader, spec)
        finally:
            # This confirmation alone makes the bytes good: requested after the last of them has arrived.
            good = _release(client, session, lease)
    return copied if good else 0


def _copy_past_dram(
    leased: LeasedBlocks, mover: Mover, match: Match, blocks: Blocks, loader: DirectLoader, spec: NamespaceSpec
) -> int:
    """As `_copy`, but what is below DRAM is read directly; what cannot be comes through DRAM after all."""
    in_dram = max(0, match.blocks - match.below_blocks - blocks.first)
    copied = _copy(leased, mover, match, blocks.part(0, in_dram))
    if copied == in_dram:
        below = blocks.part(copied, len(blocks))
        copied += load_direct(leased, loader, spec.fingerprint(), match.direct_keys, below)
    return copied + _copy(leased, mover, match, blocks.part(copied, len(blocks)))


def _copy(leased: LeasedBlocks, mover: Mover, match: Match, blocks: Blocks) -> int:
    """Window after window; the frames of the next one are requested while one is copied.

    Returns how many leading blocks arrived. An answer without frames says whether to ask again: blocks may be in
    promotion from a tier below.
    """
    session, lease, namespace_id = leased
    first, count = blocks.first, len(blocks)
    frames = match.frames(namespace_id, first, count)
    coming: Pending[Frames] | None = None
    done, more = 0, True
    try:
        while done < count and not blocks.limit.reached():
            named = len(frames) // FRAME_BYTES
            begin, window = first + done + named, min(count - done - named, MAX_RESOLVE)
            if window and more:
                coming = session.post(Resolve, lease=lease, namespace=namespace_id, first=begin, count=window)
            if named:
                moved = mover.fetch(leased, frames, blocks.part(done, done + named))
                done += moved
                if moved < named:
                    break
            if coming is None:
                break
            pending, coming = coming, None
            reply = session.wait(pending)
            if reply.first != begin or len(reply.frames) > window * FRAME_BYTES:
                raise ProtocolError("the daemon resolved other blocks than were asked for")
            # Without either the run is shorter than it was: nothing more is asked for.
            frames, more = reply.frames, bool(reply.frames) or reply.more
    finally:
        session.abandon(coming)
    return done


def _release(client: Client, session: Session, lease: int) -> bool:
    client.leases.let_go(lease)
    try:
        return session.call(Release, lease=lease).good
    except TierCacheError:
        session.give_back(Release, lease=lease)
    return False
