"""Where blocks are promoted from: the protocol between `promotion` and the tiers below DRAM.

SourceTier.parts(wanted) ─► Source.hold ─► Source.fetch ─► Fetch.end ─► Source.let_go, or Source.failed
                             find          into frames                                  drop, if it is bad
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from tiercache.daemon.ground.slices import Steps

from .space import Namespace


class FetchOutcome(Enum):
    """How a fetch ended."""

    PENDING = "pending"
    OK = "ok"
    CORRUPT = "corrupt"
    """The bytes are not what was stored under this key. The frame holds undefined bytes."""
    OTHER_KEY = "other_key"
    """The bytes were encrypted with another key, or not at all. The frame holds undefined bytes."""
    OTHER_VERSION = "other_version"
    """A host of another release stored it, in a form that this one does not read. The frame holds undefined bytes."""
    MISSING = "missing"
    """The block is not there, or not any more."""
    FLUSHED = "flushed"
    """Another host has flushed it meanwhile. The frame holds undefined bytes."""
    FAILED = "failed"
    """The disk or the store did not deliver. The frame holds undefined bytes."""
    CANCELLED = "cancelled"
    """It never began: the frame is as it was."""
    ABANDONED = "abandoned"
    """Only at shutdown: something may still write to the frame."""


class Fetch:
    """Blocks of a chain on their way into the frames at `addresses`. `urgent`: a client waits for them.

    The source ends each fetch once, on the event loop. `held` is what its `hold` returned for these blocks.
    """

    __slots__ = ("addresses", "done", "held", "keys", "namespace", "outcomes", "stored_bytes", "urgent")

    def __init__(
        self,
        namespace: Namespace,
        keys: list[bytes],
        addresses: list[int],
        urgent: bool,
        held: Any,
        done: Callable[[Any], None],
    ) -> None:
        self.namespace = namespace
        self.keys = keys
        self.addresses = addresses
        self.urgent = urgent
        self.held = held
        self.done = done
        self.outcomes = [FetchOutcome.PENDING] * len(keys)
        self.stored_bytes = 0

    def end(self, outcomes: list[FetchOutcome], stored_bytes: Sequence[int]) -> None:
        """All of it has ended: of each block how, and the bytes that stood for it in its tier."""
        self.outcomes = outcomes
        arrived = [size for size, outcome in zip(stored_bytes, outcomes, strict=True) if outcome is FetchOutcome.OK]
        self.stored_bytes = sum(arrived)
        self.done(self)


class FetchTally:
    """What a tier has delivered to DRAM."""

    __slots__ = ("bad_blocks", "blocks", "failed", "other_version", "stored_bytes")

    def __init__(self) -> None:
        self.blocks = 0
        self.stored_bytes = 0
        self.bad_blocks = 0
        """Blocks whose bytes were not what was stored."""
        self.other_version = 0
        """Blocks in a form of another release."""
        self.failed = 0
        """Fetches that the disk or the store failed to serve."""


class Held(Protocol):
    """Blocks that a source has and keeps in place; each fetch of some of them has these."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Any: ...


class Source(Protocol):
    """One directory or one store that blocks are fetched from. Event loop only; never blocks."""

    tally: FetchTally

    @property
    def offline(self) -> bool:
        """True if nothing should be asked of it now."""

    @property
    def retired(self) -> bool:
        """True if it is gone for good: no fetch begins any more."""

    @property
    def trusted(self) -> bool:
        """True if it has what it is said to have. If not, one batch is under way at a time: frames are made free for
        it."""

    def kept_word(self, kept: bool) -> None:
        """Blocks have arrived; if not `kept`, none that a lease wanted, and it had said that it has some of them."""

    def most_together(self, namespace: Namespace) -> int:
        """How many blocks one fetch may have. They end together."""

    def hold(self, namespace: Namespace, keys: bytes, numbers: Sequence[int]) -> Held:
        """Find blocks of a chain `keys` and keep each in place until `let_go`; those before the first not here."""

    def fetch(self, fetches: Sequence[Any]) -> bool:
        """Begin these fetches, in order; False when some were refused, which end as CANCELLED at once."""

    def let_go(self, fetches: Sequence[Any]) -> None:
        """These fetches have ended, and so have their holds."""

    def failed(self, fetch: Fetch, place: int) -> bool:
        """A block of a fetch ended otherwise than OK: drop it, or forget it for a while, as the outcome demands.

        Returns whether the source had said that the block is there, and it is not.
        """

    def cancel(self) -> None:
        """End as CANCELLED what has not begun."""


class SourcePart(NamedTuple):
    """Blocks of one namespace, by their place in the request, that one source has."""

    source: Source
    numbers: Sequence[int]


class TierParts(NamedTuple):
    """What one tier has of the blocks that are wanted, and what is left for the tiers below it."""

    parts: list[SourcePart]
    rest: Sequence[int]


class SourceTier(Protocol):
    """A tier that blocks are promoted from."""

    def parts(self, namespace: Namespace, keys: bytes, wanted: Sequence[int]) -> Steps[TierParts]:
        """Which sources have which of the blocks `wanted` (their places in `keys`, ascending).

        Of a chain the parts follow one another without a gap, from the first of `wanted` on.
        """
