"""The protocol's messages: msgpack arrays, one typed struct each.

A struct is encoded as an array whose first element is its tag. Every request then carries four
fields: `request_id` (echoed), `session` (the token from `Welcome`), `generation` (the daemon's
life, from `Welcome`) and `deadline_us` (on the *sender's* monotonic clock; the daemon knows the
offset from `Hello.clock_us`, so it can tell how long a message lay in a queue). Every reply
carries `request_id` and `generation`.

Evolution: fields are only ever appended, with defaults; a receiver ignores elements it does not
know and fills in those that are missing. A change that this cannot express raises PROTOCOL.

Keys travel packed, 16 bytes each, in one bytes field. Frames travel packed as one u64le each:
region id in the top 16 bits, byte offset inside the region in the low 48.

`daemon/README.md` describes all of this from the bytes.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable
from enum import Enum, IntEnum
from typing import Any, NamedTuple

import msgspec

from tiercache.layout import NamespaceSpec

PROTOCOL = 1
OLDEST_PROTOCOL = 1

KEY_BYTES = 16
TOKEN_BYTES = 16
INSTANCE_BYTES = 16
CHAIN_HASHING = "chain"
"""`ModelCard.hashing` of those who use `keys.KeyChain`."""
NO_LEASE = 0
"""Lease id of a reply that grants none. Real ids are random and never 0."""

# Named limits. A message over one of these is answered with `too_large`.
MAX_KEYS = 65_536
MAX_RESOLVE = 512
MAX_RESERVE = 512
MAX_NAMESPACES_PER_REQUEST = 256
MAX_PAYLOAD_BYTES = 2 << 20
MAX_MESSAGE_BYTES = MAX_PAYLOAD_BYTES + (64 << 10)
MAX_HELLO_BYTES = 4096
MAX_FDS_PER_MESSAGE = 16
MAX_LEASE_TTL_MS = 600_000
MAX_PIN_TTL_MS = 7 * 86_400_000

REGION_SHIFT = 48
OFFSET_MASK = (1 << REGION_SHIFT) - 1


class ErrorCode(str, Enum):
    """Why a request was refused. `Error.code` on the wire is the value."""

    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    UNKNOWN_SESSION = "unknown_session"
    STALE_GENERATION = "stale_generation"
    EXPIRED = "expired"
    UNKNOWN_NAMESPACE = "unknown_namespace"
    UNKNOWN_LEASE = "unknown_lease"
    BAD_VALUE = "bad_value"
    LIMIT = "limit"
    VERSION = "version"
    FULL = "full"
    INTERNAL = "internal"


class BlockState(IntEnum):
    """What `Reserve` found for one key."""

    HAVE = 0
    """Stored and visible: nothing to do."""
    PENDING = 1
    """Somebody else holds a write lease on it."""
    FRAME = 2
    """Reserved for the caller; its frame is in the reply."""
    NONE = 3
    """No frame free now (backpressure), or behind one that has none."""


class CommitState(IntEnum):
    """What became of one committed block."""

    VISIBLE = 0
    """Any match from now on finds it."""
    HELD = 1
    """Complete, and visible as soon as its parent is."""
    DROPPED = 2
    """Not kept: the lease was over, its parent was lost, or a flush came in between."""


# --- session socket (SEQPACKET, one message per packet) ----------------------------------------


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """First packet of a client; carries its own pidfd as ancillary data.

    `instance` is random and shared by all sessions of one engine; `clock_us` is the sender's
    monotonic clock now; `map_arena` asks for the regions' descriptors.
    """

    protocol_min: int
    protocol_max: int
    instance: bytes
    name: str
    clock_us: int
    map_arena: bool


class Welcome(msgspec.Struct, array_like=True, tag="welcome"):
    """The daemon's answer. `control` is the ZeroMQ endpoint of the ROUTER.

    `kv_events`: the daemon publishes events, and wants an `EventRun` with what is stored.
    """

    protocol: int
    generation: int
    session: bytes
    control: str
    daemon_version: str
    arena_bytes: int
    kv_events: bool = False


class Regions(msgspec.Struct, array_like=True, tag="regions"):
    """Regions whose memfds come with this packet, in order: `[region_id, size_bytes]` each.

    Sent after `Welcome` for the regions that exist and again whenever one becomes ready, always
    before a frame of it is named to anyone.
    """

    regions: list[tuple[int, int]]


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """The daemon will not have this client; the socket is closed after it."""

    code: str
    text: str


SessionMessage = Welcome | Regions | Refused


# --- requests ----------------------------------------------------------------------------------


class EventRun(msgspec.Struct, array_like=True, frozen=True):
    """What KV events say of consecutive blocks of a chain: names and tokens as the engine has them.

    Attributes:
        hashes: the engine's own hash of each block.
        parent: that of the block before the first; None at the root.
        tokens: ids of all tokens, u32le, as many in each block as the namespace says.
        group, kind, window: which KV cache group of the engine, of which kind, and the tokens of its window.
        lora_id, lora_name: the adapter, if one was used.
        extra_keys: for each block what else the hash covers (images, salt), if anything.
    """

    hashes: list[int | bytes]
    parent: int | bytes | None
    tokens: bytes
    group: int | None = None
    kind: str | None = None
    window: int | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None

    def part(self, first: int, count: int) -> EventRun:
        """Blocks `first ..< first + count` of these."""
        size, end = len(self.tokens) // len(self.hashes), first + count
        return msgspec.structs.replace(
            self,
            hashes=self.hashes[first:end],
            parent=self.hashes[first - 1] if first else self.parent,
            tokens=self.tokens[first * size : end * size],
            extra_keys=self.extra_keys and self.extra_keys[first:end],
        )


class ModelCard(msgspec.Struct, array_like=True, frozen=True):
    """How an engine names the blocks of one model, but for the tenant's salt: what an affinity query works with.

    Attributes:
        names: what people call the model.
        content: what computes it, from `keys.content_id`.
        namespaces: fingerprints of its blocks' forms; a match is what all of them have.
        block_size: tokens in a block.
        hashing: what keys are made of: CHAIN_HASHING (`keys.KeyChain`), or a hash of vLLM's.
        hash_size, hash_seed: of a hash of the engine's own: its tokens, and what comes before the first one.
        adapter, adapter_path: name and path of the LoRA adapter, if there is one.
    """

    names: list[str]
    content: bytes
    namespaces: list[str]
    block_size: int
    hashing: str = CHAIN_HASHING
    hash_size: int = 0
    hash_seed: bytes = b""
    adapter: str = ""
    adapter_path: str = ""

    def problem(self) -> str | None:
        """Why nobody could make keys with it, or None. One line for the sender."""
        if len(self.content) != KEY_BYTES:
            return f"content is {len(self.content)} bytes: must be {KEY_BYTES}"
        if not 0 < len(self.namespaces) <= MAX_NAMESPACES_PER_REQUEST:
            return f"{len(self.namespaces)} namespaces: must be 1 to {MAX_NAMESPACES_PER_REQUEST}"
        if self.block_size < 1 or (self.hashing != CHAIN_HASHING and self.hash_size < 1):
            return f"block_size is {self.block_size}, hash_size {self.hash_size}: must be at least 1 token"
        return None


class Request(msgspec.Struct, array_like=True, tag="request"):
    """Fields that every request starts with."""

    request_id: int
    session: bytes
    generation: int
    deadline_us: int


class Ping(Request, tag="ping"):
    """Answered with `Done`."""


class RegisterNamespace(Request, tag="register_namespace"):
    """Answered with `Namespace`; the same spec always gets the same id from one daemon life.

    `direct`: blocks of it that go to NVMe from now on are stored so that a client can read them there
    itself and verify them on a GPU (as they are, with the checksum kind CHECKSUM_LANES).
    """

    spec: NamespaceSpec
    direct: bool = False


class Match(Request, tag="match"):
    """Longest stored prefix of `keys` that *all* `namespaces` have. Answered with `Matched`.

    With `ttl_ms` > 0 and at least one block, a read lease is granted. `resolve` asks for the
    frames of up to that many leading blocks in the same reply (at most MAX_RESOLVE). `promote`
    has the blocks that follow in a tier below brought up into DRAM, under the same lease. With
    `extents` the lease keeps them where they are instead, for `Extents`; they come up only when
    `Resolve` asks for one of them, and only if `promote` is set too.
    """

    namespaces: list[int]
    keys: bytes
    ttl_ms: int = 0
    resolve: int = 0
    promote: bool = False
    extents: bool = False


class Peek(Request, tag="peek"):
    """What a `Match` would find, without a trace: no lease, no recency, no counters. Answered with `Peeked`."""

    namespaces: list[int]
    keys: bytes


class Resolve(Request, tag="resolve"):
    """Frames of blocks `first ..< first + count` under a read lease. Answered with `Frames`."""

    lease: int
    namespace: int
    first: int
    count: int


class Hold(Request, tag="hold"):
    """Become a further holder of a read lease of the same instance. Answered with `Done`."""

    lease: int


class Release(Request, tag="release"):
    """End this session's hold on a read lease. Answered with `Released`. Idempotent."""

    lease: int


class Renew(Request, tag="renew"):
    """Extend leases (read or write). Answered with `Renewed`."""

    leases: list[int]
    ttl_ms: int


class Reserve(Request, tag="reserve"):
    """Ask to store `keys`, a run of a chain whose block before the first is `parent`.

    `parent` is empty for a run that starts at the root. Answered with `Reserved`. `events` is of all
    the keys, for a daemon whose `Welcome` wants it; blocks without it are in no event.
    """

    namespace: int
    parent: bytes
    keys: bytes
    ttl_ms: int
    events: EventRun | None = None


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

    namespaces: list[int]
    keys: bytes
    ttl_ms: int


class Unpin(Request, tag="unpin"):
    """End pins that were set with the same keys. Answered with `Pinned` (blocks unpinned)."""

    namespaces: list[int]
    keys: bytes


class Prefetch(Request, tag="prefetch"):
    """Bring the stored prefix of `keys` up into DRAM. Answered with `Matched`, without a lease."""

    namespaces: list[int]
    keys: bytes


class Flush(Request, tag="flush"):
    """Forget blocks. Answered with `Flushed`.

    `tier` is `all` or a tier's name. Empty `namespaces` means every one; `key` empty means
    everything, otherwise that block and all that follow it.
    """

    tier: str
    namespaces: list[int]
    key: bytes


class Report(Request, tag="report"):
    """What the client did with its mapping (`cuda`, `mlock`, `none`), its own counters, its models. -> `Done`."""

    registration: str
    counters: dict[str, int]
    models: list[ModelCard] = []


class Models(Request, tag="models"):
    """What the clients say of their models. Answered with `ModelList`."""


class Stats(Request, tag="stats"):
    """Answered with `StatsReply`."""


class Check(Request, tag="check"):
    """Compare the daemon's books with each other, and blocks on disks with their checksums.

    Answered with `CheckReply`, after as long as it takes to read `sample` blocks (-1: all) at
    `bytes_per_s` (0: no limit). The books are looked at in one go, during which nothing else is
    served; for a large cache that is refused without `force`.
    """

    sample: int = 0
    bytes_per_s: int = 200 << 20
    force: bool = False


class Bye(Request, tag="bye"):
    """End of this session. Answered with `Done`; its leases end as at a lost connection."""


class Extents(Request, tag="extents"):
    """Where blocks `first ..< first + count` of a lease are on NVMe. Answered with `ExtentList`.

    For leases of a match with `extents`; at most MAX_RESOLVE. The places stay what they are until
    the lease ends. Whoever reads them verifies every block, with the seed of the key that *it* wants.
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
    """Ask for places on NVMe to write `keys` there ourselves: a run whose block before the first is `parent`.

    `parent` is empty for a run that starts at the root; else it must be on NVMe. Answered with
    `ReservedExtents`. At most MAX_RESERVE keys. `events` as in `Reserve`.
    """

    namespace: int
    parent: bytes
    keys: bytes
    ttl_ms: int
    events: EventRun | None = None


class CommitExtents(Request, tag="commit_extents"):
    """The writes under this lease have ended; its leading blocks are complete and have these checksums (u64le).

    Of kind CHECKSUM_LANES, each seeded for its key. Answered with `Committed`, a state for each
    checksum. Ends the lease: blocks without a checksum are dropped. `Abort` and `Renew` work as for `Reserve`.
    """

    lease: int
    checksums: bytes


AnyRequest = (
    Ping | RegisterNamespace | Match | Resolve | Hold | Release | Renew | Reserve | Commit | Abort
    | Read | Write | Pin | Unpin | Prefetch | Flush | Report | Stats | Check | Bye | Extents | BadExtent
    | ReserveExtents | CommitExtents | Peek | Models
)  # fmt: skip


# --- replies -----------------------------------------------------------------------------------


class Reply(msgspec.Struct, array_like=True, tag="reply"):
    """Fields that every reply starts with."""

    request_id: int
    generation: int


class Done(Reply, tag="done"):
    """It was done, or had been done before."""


class Error(Reply, tag="error"):
    """Refused. `code` is an `ErrorCode` value; `text` says what to do."""

    code: str
    text: str


class Namespace(Reply, tag="namespace"):
    """The small integer of a registered spec, and the size of its frames."""

    namespace: int
    frame_bytes: int


class Matched(Reply, tag="matched"):
    """Blocks of the leading run found, by tier: in DRAM, then further ones in the tier below.

    `frames` holds one packed list per namespace for as many blocks as `resolve` asked for.
    `extents`: the lease keeps the blocks below where they are, and `Extents` says where.
    """

    dram_blocks: int
    below_blocks: int
    lease: int
    frames: list[bytes] = []
    extents: bool = False


class Peeked(Reply, tag="peeked"):
    """Blocks of the leading run by tier: that of all namespaces, then `[dram, below]` of each one alone."""

    dram_blocks: int
    below_blocks: int
    each: list[tuple[int, int]]


class Frames(Reply, tag="frames"):
    """Frames from block `first` on; fewer than asked when the run is shorter.

    `extents` is where a tier below will name its places; empty while there is none. `more`: further
    blocks of those asked for are on their way up; ask again. Such a request is answered when at
    least one block is there, or after a fifth of a second.
    """

    first: int
    frames: bytes
    extents: bytes = b""
    more: bool = False


class Released(Reply, tag="released"):
    """`good`: the lease was never revoked, so what was copied under it is right. Else a miss."""

    good: bool


class Renewed(Reply, tag="renewed"):
    """One byte per lease: 1 alive with the new deadline, 0 over."""

    alive: bytes


class Reserved(Reply, tag="reserved"):
    """One `BlockState` byte per key, and the frames of those in state FRAME, in order.

    `parent_missing`: the block before the first key is not here, so nothing was reserved; send
    an earlier part of the chain.
    """

    lease: int
    states: bytes
    frames: bytes
    parent_missing: bool = False


class Committed(Reply, tag="committed"):
    """One `CommitState` byte per index, in the order asked."""

    states: bytes


class Payload(Reply, tag="payload"):
    """The bytes follow as the next ZeroMQ frame."""

    length: int


class Pinned(Reply, tag="pinned"):
    """Blocks of the prefix that are (or were) pinned."""

    blocks: int


class Flushed(Reply, tag="flushed"):
    """Blocks forgotten so far; `more`: others are out of sight already and still being freed."""

    blocks: int
    more: bool = False


class StatsReply(Reply, tag="stats_reply"):
    """A tree of raw numbers and short strings; see `daemon/README.md`."""

    stats: dict[str, Any]


class ModelList(Reply, tag="model_list"):
    """Models of the sessions that are open, each once, and the numbers of their namespaces by fingerprint."""

    models: list[ModelCard]
    namespaces: dict[str, int]


class CheckReply(Reply, tag="check_reply"):
    """One line for each fault that was found: none when all is well."""

    findings: list[str]
    blocks: int
    scanned_blocks: int


class ExtentList(Reply, tag="extent_list"):
    """Extents from block `first` on, EXTENT_BYTES each; fewer than asked where a block has none.

    A block has none when it is not on NVMe, or stored in a form that a client cannot verify on a GPU.
    `directories` are paths; an extent names one by its place, and the file in it is
    `segments/<8 digits of the segment>.seg`.
    """

    first: int
    directories: list[str]
    extents: bytes


class ReservedExtents(Reply, tag="reserved_extents"):
    """How many leading keys are on NVMe, and places for a run of those that follow, EXTENT_BYTES each.

    Fewer than asked is backpressure; no place at all comes with lease NO_LEASE. `soon`: places are
    being made, or somebody writes the next block now, so ask again. A place's checksum is 0.
    """

    lease: int
    present: int
    directory: str
    extents: bytes
    soon: bool = False


AnyReply = (
    Done | Error | Namespace | Matched | Frames | Released | Renewed | Reserved | Committed
    | Payload | Pinned | Flushed | StatsReply | CheckReply | ExtentList | ReservedExtents
    | Peeked | ModelList
)  # fmt: skip


class Extent(NamedTuple):
    """One block in a segment file. `kind` and `codec` are as in the daemon's rows."""

    segment: int
    directory: int
    kind: int
    codec: int
    offset: int
    length: int
    stored_length: int
    checksum: int


_EXTENT = struct.Struct("<IHBBQIIQ")
EXTENT_BYTES = _EXTENT.size


def pack_extents(extents: Iterable[Extent]) -> bytes:
    """Extents as 32 bytes each: u32 segment, u16 directory, u8 kind, u8 codec, u64, u32, u32, u64."""
    return b"".join([_EXTENT.pack(*extent) for extent in extents])


def unpack_extents(packed: bytes) -> list[Extent]:
    """Inverse of `pack_extents`. Raises ValueError when the length is no multiple of 32."""
    if len(packed) % EXTENT_BYTES:
        raise ValueError(f"extents are {EXTENT_BYTES} bytes each, and these are {len(packed)} bytes")
    return list(map(Extent._make, _EXTENT.iter_unpack(packed)))


def pack_checksums(checksums: list[int]) -> bytes:
    """Checksums as u64le, 8 bytes each."""
    return pack_frames(checksums)


def unpack_checksums(packed: bytes) -> array[int]:
    """Inverse of `pack_checksums`. Raises ValueError when the length is no multiple of 8."""
    return unpack_frames(packed)


def pack_frames(frames: list[int]) -> bytes:
    """Frame numbers as u64le, 8 bytes each."""
    return _little_endian(array("Q", frames)).tobytes()


def unpack_frames(packed: bytes) -> array[int]:
    """Inverse of `pack_frames`. Raises ValueError when the length is no multiple of 8."""
    frames = array("Q")
    frames.frombytes(packed)
    return _little_endian(frames)


def pack_indices(indices: list[int]) -> bytes:
    """Block indices as u32le, 4 bytes each."""
    return _little_endian(array("I", indices)).tobytes()


def unpack_indices(packed: bytes) -> array[int]:
    """Inverse of `pack_indices`. Raises ValueError when the length is no multiple of 4."""
    indices = array("I")
    indices.frombytes(packed)
    return _little_endian(indices)


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
