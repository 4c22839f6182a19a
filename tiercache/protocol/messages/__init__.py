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

`daemon/PROTOCOL.md` describes all of this from the bytes.

    greeting   the session socket          limits    version, sizes, enumerations
    requests   what clients ask            replies   what they are answered
    admin      what operators ask          names     how engines name their blocks          packing   packed fields

A new message is a struct in one of these and a member of `AnyRequest` or `AnyReply`.
"""

from __future__ import annotations

from tiercache.protocol.messages.admin import (
    BlockView,
    Changed,
    ChangeSetting,
    Check,
    CheckReply,
    Flush,
    Flushed,
    Inspect,
    Inspected,
    ModelList,
    Models,
    PinList,
    Pins,
    PinView,
    Report,
    SettingList,
    Settings,
    SettingView,
    SpecList,
    Specs,
    Stats,
    StatsReply,
)
from tiercache.protocol.messages.greeting import (
    Hello,
    Refused,
    Regions,
    SessionMessage,
    Welcome,
)
from tiercache.protocol.messages.limits import (
    CHAIN_HASHING,
    INSTANCE_BYTES,
    KEY_BYTES,
    MAX_FDS_PER_MESSAGE,
    MAX_HELLO_BYTES,
    MAX_HINT_MS,
    MAX_INSPECTED,
    MAX_KEYS,
    MAX_LEASE_TTL_MS,
    MAX_LISTED_PINS,
    MAX_MESSAGE_BYTES,
    MAX_NAMESPACES_PER_REQUEST,
    MAX_PAYLOAD_BYTES,
    MAX_PIN_TTL_MS,
    MAX_RESERVE,
    MAX_RESOLVE,
    NO_LEASE,
    OFFSET_MASK,
    OLDEST_PROTOCOL,
    PROTOCOL,
    REGION_SHIFT,
    TOKEN_BYTES,
    BlockState,
    CommitState,
    ErrorCode,
    Priority,
)
from tiercache.protocol.messages.names import (
    EventRun,
    ModelCard,
    ReceivedRun,
)
from tiercache.protocol.messages.packing import (
    EXTENT_BYTES,
    Extent,
    pack_checksums,
    pack_extents,
    pack_frames,
    pack_indices,
    unpack_checksums,
    unpack_extents,
    unpack_frames,
    unpack_indices,
)
from tiercache.protocol.messages.replies import (
    Committed,
    Done,
    Error,
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
from tiercache.protocol.messages.requests import (
    Abort,
    BadExtent,
    Bye,
    Commit,
    CommitExtents,
    Extents,
    Hint,
    Hold,
    Match,
    Peek,
    Pin,
    Ping,
    Prefetch,
    Read,
    RegisterNamespace,
    Release,
    Renew,
    Request,
    Reserve,
    ReserveExtents,
    Resolve,
    Unpin,
    Write,
)

AnyRequest = (
    Ping
    | RegisterNamespace
    | Match
    | Resolve
    | Hold
    | Release
    | Renew
    | Reserve
    | Commit
    | Abort
    | Read
    | Write
    | Pin
    | Unpin
    | Prefetch
    | Flush
    | Report
    | Stats
    | Check
    | Bye
    | Extents
    | BadExtent
    | ReserveExtents
    | CommitExtents
    | Peek
    | Models
    | Inspect
    | Pins
    | Specs
    | Hint
    | Settings
    | ChangeSetting
)

AnyReply = (
    Done
    | Error
    | Namespace
    | Matched
    | Frames
    | Released
    | Renewed
    | Reserved
    | Committed
    | Payload
    | Pinned
    | Flushed
    | StatsReply
    | CheckReply
    | ExtentList
    | ReservedExtents
    | Peeked
    | ModelList
    | Inspected
    | PinList
    | SpecList
    | Hinted
    | SettingList
    | Changed
)

__all__ = [
    "CHAIN_HASHING",
    "EXTENT_BYTES",
    "INSTANCE_BYTES",
    "KEY_BYTES",
    "MAX_FDS_PER_MESSAGE",
    "MAX_HELLO_BYTES",
    "MAX_HINT_MS",
    "MAX_INSPECTED",
    "MAX_KEYS",
    "MAX_LEASE_TTL_MS",
    "MAX_LISTED_PINS",
    "MAX_MESSAGE_BYTES",
    "MAX_NAMESPACES_PER_REQUEST",
    "MAX_PAYLOAD_BYTES",
    "MAX_PIN_TTL_MS",
    "MAX_RESERVE",
    "MAX_RESOLVE",
    "NO_LEASE",
    "OFFSET_MASK",
    "OLDEST_PROTOCOL",
    "PROTOCOL",
    "REGION_SHIFT",
    "TOKEN_BYTES",
    "Abort",
    "AnyReply",
    "AnyRequest",
    "BadExtent",
    "BlockState",
    "BlockView",
    "Bye",
    "ChangeSetting",
    "Changed",
    "Check",
    "CheckReply",
    "Commit",
    "CommitExtents",
    "CommitState",
    "Committed",
    "Done",
    "Error",
    "ErrorCode",
    "EventRun",
    "Extent",
    "ExtentList",
    "Extents",
    "Flush",
    "Flushed",
    "Frames",
    "Hello",
    "Hint",
    "Hinted",
    "Hold",
    "Inspect",
    "Inspected",
    "Match",
    "Matched",
    "ModelCard",
    "ModelList",
    "Models",
    "Namespace",
    "Payload",
    "Peek",
    "Peeked",
    "Pin",
    "PinList",
    "PinView",
    "Ping",
    "Pinned",
    "Pins",
    "Prefetch",
    "Priority",
    "Read",
    "ReceivedRun",
    "Refused",
    "Regions",
    "RegisterNamespace",
    "Release",
    "Released",
    "Renew",
    "Renewed",
    "Reply",
    "Report",
    "Request",
    "Reserve",
    "ReserveExtents",
    "Reserved",
    "ReservedExtents",
    "Resolve",
    "SessionMessage",
    "SettingList",
    "SettingView",
    "Settings",
    "SpecList",
    "Specs",
    "Stats",
    "StatsReply",
    "Unpin",
    "Welcome",
    "Write",
    "pack_checksums",
    "pack_extents",
    "pack_frames",
    "pack_indices",
    "unpack_checksums",
    "unpack_extents",
    "unpack_frames",
    "unpack_indices",
]
