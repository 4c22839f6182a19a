"""Requests of clients: their common head, and those that find, read, write and keep blocks."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from tiercache.protocol.namespaces import NamespaceSpec

from .limits import Numbers
from .names import ReceivedRun
from .replies import (
    Committed,
    Done,
    ExtentList,
    Frames,
    Hinted,
    Matched,
    Namespace,
    Payload,
    Peeked,
    Pinned,
    Released,
    Renewed,
    Reply,
    Reserved,
    ReservedExtents,
)

ReplyT = TypeVar("ReplyT", bound=Reply)


class Request(msgspec.Struct, Generic[ReplyT], array_like=True, tag="request"):
    """Fields that every request starts with. The daemon answers it with a `ReplyT`, or with `Error`."""

    request_id: int
    session: bytes
    generation: int
    deadline_us: int


class Ping(Request[Done], tag="ping"):
    """`clock_us`: the sender's monotonic clock now, to which deadlines refer; 0: unknown."""

    clock_us: int = 0


class RegisterNamespace(Request[Namespace], tag="register_namespace"):
    """The same spec always gets the same id from one daemon life.

    `direct`: blocks of it that go to NVMe from now on are stored so that a client can read them there itself and verify
    them on a GPU (raw, with the checksum kind CHECKSUM_LANES).
    """

    spec: NamespaceSpec
    direct: bool = False


class Match(Request[Matched], tag="match"):
    """Longest stored prefix of `keys` that *all* `namespaces` have.

    With `ttl_ms` > 0 and at least one block, a read lease is granted. `resolve` asks for the frames of up to that many
    leading blocks in the same reply (at most MAX_RESOLVE). `promote` promotes the blocks that follow in a tier below to
    DRAM, under the same lease. With `extents` the lease keeps them in place instead, for `Extents`; they are promoted
    only when `Resolve` asks for one of them, and only if `promote` is set too.
    """

    namespaces: Numbers
    keys: bytes
    ttl_ms: int = 0
    resolve: int = 0
    promote: bool = False
    extents: bool = False


class Peek(Request[Peeked], tag="peek"):
    """What a `Match` would find, without side effects: no lease, no recency, no counters."""

    namespaces: Numbers
    keys: bytes


class Resolve(Request[Frames], tag="resolve"):
    """Frames of blocks `first ..< first + count` under a read lease."""

    lease: int
    namespace: int
    first: int
    count: int


class Hold(Request[Done], tag="hold"):
    """Join the holders of a read lease of the same instance."""

    lease: int


class Release(Request[Released], tag="release"):
    """End this session's hold on a read lease. Idempotent."""

    lease: int


class Renew(Request[Renewed], tag="renew"):
    """Extend leases (read or write)."""

    leases: Numbers
    ttl_ms: int


class Reserve(Request[Reserved], tag="reserve"):
    """Ask to store `keys`, a run of a chain whose block before the first is `parent`.

    `parent` is empty for a run that starts at the root. `events` covers all the keys, for a
    daemon whose `Welcome` wants it; blocks without it are in no event.
    """

    namespace: int
    parent: bytes
    keys: bytes
    ttl_ms: int
    events: ReceivedRun | None = None


class Commit(Request[Committed], tag="commit"):
    """The copies of these blocks (u32le indices into the reserved keys) are complete.

    Idempotent.
    """

    lease: int
    blocks: bytes


class Abort(Request[Done], tag="abort"):
    """Give up what a write lease has not committed. Idempotent.

    `finished` says that no copy of this client still writes to the frames; without it they stay
    in quarantine until a later `Abort` says so or the client's process has ended.
    """

    lease: int
    finished: bool


class Read(Request[Payload], tag="read"):
    """Bytes `offset ..< offset + length` of leased block `index`.

    For clients that do not map the arena; at most MAX_PAYLOAD_BYTES.
    """

    lease: int
    namespace: int
    index: int
    offset: int
    length: int


class Write(Request[Done], tag="write"):
    """The payload frame that follows goes to `offset` of reserved block `index`."""

    lease: int
    index: int
    offset: int


class Pin(Request[Pinned], tag="pin"):
    """Keep the stored prefix of `keys` from eviction for `ttl_ms`."""

    namespaces: Numbers
    keys: bytes
    ttl_ms: int


class Unpin(Request[Pinned], tag="unpin"):
    """End pins that were set with the same keys. Answered with `Pinned` (blocks unpinned)."""

    namespaces: Numbers
    keys: bytes


class Prefetch(Request[Matched], tag="prefetch"):
    """Promote the stored prefix of `keys` to DRAM. Answered with `Matched`, without a lease."""

    namespaces: Numbers
    keys: bytes


class Hint(Request[Hinted], tag="hint"):
    """What a client knows of the further use of the stored prefix of `keys`.

    It is about the blocks from `first` on that no other chain shares. A field that is 0 or false leaves what was said
    before: `done`: they will not be asked for again; `return_in_ms`: they will be asked for in about so long (each of
    these two replaces the other); `ttl_ms`: they are of no use after that time; `priority`: a `Priority`. Times are cut
    to MAX_HINT_MS.
    """

    namespaces: Numbers
    keys: bytes
    first: int = 0
    done: bool = False
    return_in_ms: int = 0
    ttl_ms: int = 0
    priority: int = 0


class Bye(Request[Done], tag="bye"):
    """End this session. Answered with `Done`; its leases end as at a lost connection."""


class Extents(Request[ExtentList], tag="extents"):
    """Where blocks `first ..< first + count` of a lease are on NVMe.

    For leases of a match with `extents`; at most MAX_RESOLVE. The places stay valid until the lease ends. The reader
    verifies every block, with the seed of the key that *it* wants.
    """

    lease: int
    namespace: int
    first: int
    count: int


class BadExtent(Request[Done], tag="bad_extent"):
    """Block `index` of a lease was read from its extent and failed its checksum.

    The daemon reads it itself, and drops it if it agrees.
    """

    lease: int
    namespace: int
    index: int


class ReserveExtents(Request[ReservedExtents], tag="reserve_extents"):
    """Ask for places on NVMe to write `keys` there directly: a run whose block before the first is `parent`.

    `parent` is empty for a run that starts at the root; else it must be on NVMe. Answered with
    `ReservedExtents`. At most MAX_RESERVE keys. `events` as in `Reserve`.
    """

    namespace: int
    parent: bytes
    keys: bytes
    ttl_ms: int
    events: ReceivedRun | None = None


class CommitExtents(Request[Committed], tag="commit_extents"):
    """The writes under this lease have ended; its leading blocks are complete and have these checksums (u64le).

    Of kind CHECKSUM_LANES, each seeded for its key. Answered with `Committed`, a state for each
    checksum. Ends the lease: blocks without a checksum are dropped. `Abort` and `Renew` work as for `Reserve`.
    """

    lease: int
    checksums: bytes
