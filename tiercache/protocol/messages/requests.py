"""Requests of clients: their common head, and those that find, read, write and keep blocks."""

from __future__ import annotations

import msgspec

from tiercache.protocol.messages.limits import Numbers
from tiercache.protocol.messages.names import ReceivedRun
from tiercache.protocol.namespaces import NamespaceSpec


class Request(msgspec.Struct, array_like=True, tag="request"):
    """Fields that every request starts with."""

    request_id: int
    session: bytes
    generation: int
    deadline_us: int


class Ping(Request, tag="ping"):
    """Answered with `Done`. `clock_us`: the sender's monotonic clock now, to which deadlines refer; 0: unknown."""

    clock_us: int = 0


class RegisterNamespace(Request, tag="register_namespace"):
    """Answered with `Namespace`; the same spec always gets the same id from one daemon life.

    `direct`: blocks of it that go to NVMe from now on are stored so that a client can read them there itself and verify
    them on a GPU (raw, with the checksum kind CHECKSUM_LANES).
    """

    spec: NamespaceSpec
    direct: bool = False


class Match(Request, tag="match"):
    """Longest stored prefix of `keys` that *all* `namespaces` have. Answered with `Matched`.

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


class Peek(Request, tag="peek"):
    """What a `Match` would find, without side effects: no lease, no recency, no counters. Answered with `Peeked`."""

    namespaces: Numbers
    keys: bytes


class Resolve(Request, tag="resolve"):
    """Frames of blocks `first ..< first + count` under a read lease. Answered with `Frames`."""

    lease: int
    namespace: int
    first: int
    count: int


class Hold(Request, tag="hold"):
    """Join the holders of a read lease of the same instance. Answered with `Done`."""

    lease: int


class Release(Request, tag="release"):
    """End this session's hold on a read lease. Answered with `Released`. Idempotent."""

    lease: int


class Renew(Request, tag="renew"):
    """Extend leases (read or write). Answered with `Renewed`."""

    leases: Numbers
    ttl_ms: int


class Reserve(Request, tag="reserve"):
    """Ask to store `keys`, a run of a chain whose block before the first is `parent`.

    `parent` is empty for a run that starts at the root. Answered with `Reserved`. `events` covers all the keys, for a
    daemon whose `Welcome` wants it; blocks without it are in no event.
    """

    namespace: int
    parent: bytes
    keys: bytes
    ttl_ms: int
    events: ReceivedRun | None = None


class Commit(Request, tag="commit"):
    """The copies of these blocks (u32le indices into the reserved keys) are complete.

    Answered with `Committed`. Idempotent.
    """

    lease: int
    blocks: bytes


class Abort(Request, tag="abort"):
    """Give up what a write lease has not committed. Answered with `Done`. Idempotent.

    `finished` says that no copy of this client still writes to the frames; without it they stay
    in quarantine until a later `Abort` says so or the client's process has ended.
    """

    lease: int
    finished: bool


class Read(Request, tag="read"):
    """Bytes `offset ..< offset + length` of leased block `index`. Answered with `Payload`.

    For clients that do not map the arena; at most MAX_PAYLOAD_BYTES.
    """

    lease: int
    namespace: int
    index: int
    offset: int
    length: int


class Write(Request, tag="write"):
    """The payload frame that follows goes to `offset` of reserved block `index`. -> `Done`."""

    lease: int
    index: int
    offset: int


class Pin(Request, tag="pin"):
    """Keep the stored prefix of `keys` from eviction for `ttl_ms`. Answered with `Pinned`."""

    namespaces: Numbers
    keys: bytes
    ttl_ms: int


class Unpin(Request, tag="unpin"):
    """End pins that were set with the same keys. Answered with `Pinned` (blocks unpinned)."""

    namespaces: Numbers
    keys: bytes


class Prefetch(Request, tag="prefetch"):
    """Promote the stored prefix of `keys` to DRAM. Answered with `Matched`, without a lease."""

    namespaces: Numbers
    keys: bytes


class Hint(Request, tag="hint"):
    """What a client knows of the further use of the stored prefix of `keys`. Answered with `Hinted`.

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


class Bye(Request, tag="bye"):
    """End this session. Answered with `Done`; its leases end as at a lost connection."""


class Extents(Request, tag="extents"):
    """Where blocks `first ..< first + count` of a lease are on NVMe. Answered with `ExtentList`.

    For leases of a match with `extents`; at most MAX_RESOLVE. The places stay valid until the lease ends. The reader
    verifies every block, with the seed of the key that *it* wants.
    """

    lease: int
    namespace: int
    first: int
    count: int


class BadExtent(Request, tag="bad_extent"):
    """Block `index` of a lease was read from its extent and failed its checksum. Answered with `Done`.

    The daemon reads it itself, and drops it if it agrees.
    """

    lease: int
    namespace: int
    index: int


class ReserveExtents(Request, tag="reserve_extents"):
    """Ask for places on NVMe to write `keys` there directly: a run whose block before the first is `parent`.

    `parent` is empty for a run that starts at the root; else it must be on NVMe. Answered with
    `ReservedExtents`. At most MAX_RESERVE keys. `events` as in `Reserve`.
    """

    namespace: int
    parent: bytes
    keys: bytes
    ttl_ms: int
    events: ReceivedRun | None = None


class CommitExtents(Request, tag="commit_extents"):
    """The writes under this lease have ended; its leading blocks are complete and have these checksums (u64le).

    Of kind CHECKSUM_LANES, each seeded for its key. Answered with `Committed`, a state for each
    checksum. Ends the lease: blocks without a checksum are dropped. `Abort` and `Renew` work as for `Reserve`.
    """

    lease: int
    checksums: bytes
