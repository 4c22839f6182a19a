"""What the shared tier asks of a store: the interface that each kind of store implements.

    SharedStore.connect() ─► Connection: exists, get, put, delete     one thread uses it; every call has a deadline

A store is trusted with nothing but room: it may lose values, return others, or be written by strangers. The tier checks
each value that it reads (`value.py`). So a store's one duty beyond speed is to end each call at its deadline.

Notes are small values without a lifetime that any host may replace at any time. Each batch names some: they are read
from the store before everything else in that batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

MAX_NOTE_BYTES = 4096
"""A longer note is taken as missing."""


class StoreProblem(Enum):
    """Why a store did not do what it was asked."""

    UNREACHABLE = "unreachable"
    """No connection: refused, reset, no route, or its name does not resolve."""
    TIMEOUT = "timeout"
    """The call's deadline passed."""
    DENIED = "denied"
    """It rejects our credentials, our certificate, or what we ask with them."""
    FULL = "full"
    """It has no room, or a quota is used up."""
    BUSY = "busy"
    """It is there, and asks to come back later: it is loading, changes its shape, or limits rates."""
    READ_ONLY = "read_only"
    """It takes no writes: a replica, or a file system that is mounted read-only."""
    PROTOCOL = "protocol"
    """Its answer is not what the protocol allows, or the store lacks something that we need."""


class StoreError(Exception):
    """A call failed as a whole. `text` says what happened, and where it can, what to do; it holds no secret."""

    def __init__(self, problem: StoreProblem, text: str) -> None:
        super().__init__(text)
        self.problem = problem
        self.text = text


class NotReplicated(StoreError):
    """The store has done it, and one that may take its place has not yet."""


class Fate(Enum):
    """What became of one value of a batch."""

    UNKNOWN = "unknown"
    """The call failed before this value's turn. It may or may not have been read, written or deleted."""
    DONE = "done"
    MISSING = "missing"
    MISFIT = "misfit"
    """The stored value is shorter than `head`, or longer than `head` and `body` and not `ranged`: none of ours."""
    REFUSED = "refused"
    """The store refused this value alone, such as one that is too long; `StoreError` says what concerns all."""


@dataclass(slots=True, eq=False)
class Get:
    """One value to read; if it is `ranged`, as many bytes of it as fit, from byte `offset` on.

    The first bytes go to `head`, the following ones to `body`; both are writable and contiguous. The value may fill
    `body` only in part: `body_bytes` says how much of it. Unless `fate` is DONE, both hold undefined bytes. A `ttl_s`
    renews the lifetime of the value, where the store can do that in the same step; 0 leaves it.
    """

    name: bytes
    head: memoryview
    body: memoryview
    offset: int = 0
    ranged: bool = False
    ttl_s: float = 0.0
    fate: Fate = Fate.UNKNOWN
    body_bytes: int = 0


@dataclass(slots=True, eq=False)
class Put:
    """One value to write: `parts`, one after another. A `ttl_s` of 0 means until the store evicts it.

    No reader ever finds a part of it.
    """

    name: bytes
    parts: Sequence[memoryview | bytes]
    ttl_s: float = 0.0
    fate: Fate = Fate.UNKNOWN


class Exists(NamedTuple):
    """Answer to `exists`, in the order of the names."""

    there: list[bool]
    notes: list[bytes | None]


Arrived = Callable[[Get], None]
Noted = Callable[[list["bytes | None"]], None]


class Connection(Protocol):
    """One line to a store, used by one thread at a time.

    Each call blocks until `deadline_s` (`time.monotonic`) at most: for name resolution, connecting, TLS and every byte
    of the call together. Raises StoreError; the next call then begins with a new connection, so a late answer never
    reaches it. A connection is made at the first call.
    """

    def exists(self, names: Sequence[bytes], notes: Sequence[bytes], deadline_s: float) -> Exists:
        """Which of these values are there. Names may repeat."""

    def get(
        self,
        wanted: Sequence[Get],
        notes: Sequence[bytes],
        deadline_s: float,
        arrived: Arrived | None = None,
        noted: Noted | None = None,
    ) -> list[bytes | None]:
        """Read values, and before them the notes. Sets `fate` and `body_bytes` of each.

        Calls `noted` with the notes, then `arrived` with each value that is settled (any fate but UNKNOWN), while
        others are still on their way.
        """

    def put(self, values: Sequence[Put], notes: Sequence[bytes], deadline_s: float) -> list[bytes | None]:
        """Write values, and read the notes before. Sets `fate` of each."""

    def delete(self, names: Sequence[bytes], deadline_s: float) -> None:
        """Delete values and notes. Missing names are ignored."""

    def set_note(self, name: bytes, value: bytes, deadline_s: float, only_if_missing: bool = False) -> bytes:
        """Replace a note. With `only_if_missing`, an existing note stays. Returns the note as it then is.

        Raises NotReplicated where it has replaced the note, and what may take the store's place has not.
        """

    def replicated_note(self, name: bytes, deadline_s: float) -> bytes | None:
        """The note as it is, once what may take the store's place has it too; `NotReplicated` as with `set_note`."""

    def close(self) -> None:
        """Close the line; may be called from another thread to end a call under way."""


class SharedStore(Protocol):
    """A configured store. Making it uses no network: a mistake in the URL is a ConfigError before the daemon serves."""

    address: str
    """The URL without its secrets, for logs and statistics."""
    pack_blocks: int
    """Blocks in one value: 1 where requests are cheap."""
    connections: int
    """How many connections to use for transfers side by side."""

    @property
    def trouble(self) -> str:
        """What is not well with it although calls may work, in words; empty: all is."""

    def connect(self) -> Connection:
        """A new connection, not yet open."""

    def close(self) -> None:
        """The daemon ends: release what its connections have shared. Does not wait for calls under way."""
