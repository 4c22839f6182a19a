"""What the daemon and a store's helper process say to each other: one message is one packet.

The process is started with `Start`. On a line: `Staging` has the descriptor of a buffer with it and no answer; the
others are answered in order. A value's place in the staging buffer is its slot.
"""

from __future__ import annotations

import msgspec

from tiercache.daemon.tiers.shared.stores.store import Fate, StoreProblem

MAX_MESSAGE_BYTES = 160 << 10
"""Less than what a socket of this kind takes by default."""
MAX_NAMES_BYTES = 32 << 10
"""Names in one message: a longer list goes in several."""
MAX_NOTES = 16
"""Notes in one message, likewise: each may be 4 KiB."""


class Staging(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The buffer that the descriptor with this message is from now on."""

    slots: int
    slot_bytes: int


class FindNames(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """`Connection.exists`; answered by FoundNames."""

    names: list[bytes]
    notes: list[bytes]
    deadline_s: float


class ReadItem(msgspec.Struct, array_like=True, frozen=True):
    """One value to read into a slot."""

    slot: int
    name: bytes
    offset: int
    length: int
    ttl_s: float
    ranged: bool = False


class Read(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """`Connection.get`; answered by Notes if it names some, one Settled for each value, in any order, and Done."""

    items: list[ReadItem]
    notes: list[bytes]
    deadline_s: float


class WriteItem(msgspec.Struct, array_like=True, frozen=True):
    """One value to write, from a slot."""

    slot: int
    name: bytes
    length: int
    ttl_s: float


class Write(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """`Connection.put`; answered by one Settled for each value, and then Done."""

    items: list[WriteItem]
    notes: list[bytes]
    deadline_s: float


class Delete(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """`Connection.delete`; answered by Done."""

    names: list[bytes]
    deadline_s: float


class WriteNote(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """`Connection.set_note`; answered by Done with the note."""

    name: bytes
    value: bytes
    deadline_s: float
    only_if_missing: bool


class ReadReplicatedNote(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """`Connection.replicated_note`; answered by Done with the note."""

    name: bytes
    deadline_s: float


class FoundNames(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Answer to FindNames."""

    there: list[bool]
    notes: list[bytes | None]


class Notes(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The notes of a Read, before its values."""

    notes: list[bytes | None]


class Settled(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What became of the value in a slot, and how many bytes were read."""

    slot: int
    fate: Fate
    length: int


class Done(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The call is over."""

    notes: list[bytes | None]


class Failed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The call is over with a StoreError."""

    problem: StoreProblem
    text: str


class Start(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Which store to make: `maker` is `module:function`, which takes the URL."""

    maker: str
    url: str


Asked = Staging | FindNames | Read | Write | Delete | WriteNote | ReadReplicatedNote
Answered = FoundNames | Notes | Settled | Done | Failed
encode = msgspec.msgpack.Encoder().encode
decode_asked = msgspec.msgpack.Decoder(Asked).decode
decode_answered = msgspec.msgpack.Decoder(Answered).decode
decode_start = msgspec.msgpack.Decoder(Start).decode
