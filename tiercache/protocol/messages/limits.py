"""Version, sizes, limits and the small enumerations of the protocol."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Annotated

import msgspec

from tiercache.protocol.frames import KEY_BYTES as KEY_BYTES
from tiercache.protocol.frames import OFFSET_MASK as OFFSET_MASK
from tiercache.protocol.frames import REGION_SHIFT as REGION_SHIFT

PROTOCOL = 1
OLDEST_PROTOCOL = 1

TOKEN_BYTES = 16
INSTANCE_BYTES = 16
CHAIN_HASHING = "chain"
"""`ModelCard.hashing` of engines that use `keys.KeyChain`."""
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
MAX_PIN_TTL_MS = 7 * 86_400_000
MAX_HINT_MS = 7 * 86_400_000
MAX_INSPECTED = 256
MAX_LISTED_PINS = 1024
MAX_LISTED = 65_536
"""Values in one array of a request: a longer one is malformed and is not decoded."""

Numbers = Annotated[list[int], msgspec.Meta(max_length=MAX_LISTED)]
"""Numbers of namespaces or leases, in a request."""


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
    FORBIDDEN = "forbidden"
    VERSION = "version"
    FULL = "full"
    UNCONFIRMED = "unconfirmed"
    INTERNAL = "internal"


class Priority(IntEnum):
    """How much a client would mind the loss of blocks."""

    LOW = 1
    """Evicted before all others."""
    NORMAL = 2
    HIGH = 3
    """Evicted after all others, within the share for such blocks."""


class BlockState(IntEnum):
    """What `Reserve` found for one key."""

    HAVE = 0
    """Stored and visible: nothing to do."""
    PENDING = 1
    """Another client holds a write lease on it."""
    FRAME = 2
    """Reserved for the caller; its frame is in the reply."""
    NONE = 3
    """No frame free now (backpressure), or after a key that has none."""


class CommitState(IntEnum):
    """The result for one committed block."""

    VISIBLE = 0
    """Any match from now on finds it."""
    HELD = 1
    """Complete, and visible as soon as its parent is."""
    DROPPED = 2
    """Not kept: the lease was over, its parent was lost, or a flush came in between."""
