"""The interface of eviction policies: which block is evicted first when room is needed. See `policies/` for them.

A policy only ever sees *candidates*: blocks with no child and no pin, so whatever it answers keeps the index
prefix-closed. There is one policy object per size class and account, all over the same columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

NO_ENTRY = -1
"""No entry, in columns of entry ids."""


class Columns:
    """What policies keep per entry, by entry id; grows together with the index."""

    __slots__ = ("_own", "clock", "next", "prev", "stamp")

    def __init__(self) -> None:
        self.clock = 0
        self._own: dict[str, array[int] | array[float]] = {}
        self.stamp = array("q")
        self.prev = array("i")
        self.next = array("i")

    def grow(self, count: int) -> None:
        """Make room for `count` more entries."""
        self.stamp.frombytes(bytes(8 * count))
        self.prev.frombytes(bytes(4 * count))
        self.next.frombytes(bytes(4 * count))
        for column in self._own.values():
            column.frombytes(bytes(column.itemsize * count))

    def integers(self, name: str, typecode: str) -> array[int]:
        """A policy's own column, zero in new entries; created at first use. All columns grow together."""
        column = self._column(name, typecode)
        return column  # type: ignore[return-value]  # by its type code

    def floats(self, name: str) -> array[float]:
        """As `integers`, of doubles."""
        column = self._column(name, "d")
        return column  # type: ignore[return-value]  # by its type code

    def _column(self, name: str, typecode: str) -> array[int] | array[float]:
        if name not in self._own:
            column = self._own[name] = array(typecode)
            column.frombytes(bytes(column.itemsize * len(self.stamp)))
        return self._own[name]


class Touch(NamedTuple):
    """Why a block is touched."""

    by_client: bool
    """A client uses the block; the daemon merely moves it otherwise."""
    counts: bool = False
    """True if policies learn from it: not from a prompt that is looked up again, nor where others came in between."""
    request_class: int = 0
    """Of the request, by a policy that predicts."""


MOVED, USED = Touch(by_client=False), Touch(by_client=True)
"""Touches from which nothing is learnt."""


class Learner(Protocol):
    """What policies learn from requests, once for all tiers. Event loop only; never blocks."""

    def asked(self, keys: bytes, found_dram: int, found: int) -> Touch:
        """A prompt was looked up; `found` of its blocks are known, `found_dram` in DRAM. Says how it touches them."""

    def stored(self, parent: bytes, keys: Sequence[bytes]) -> None:
        """A client has stored a run of blocks, each below the one before it, the first below `parent`."""


class Policy(Protocol):
    """The decisions of an eviction policy. All methods are called on the event loop: O(1), no blocking.

    A candidate has `columns.next[entry]` set, as `Rings` does it; of any other entry it is 0. The check of the index
    and hints tell candidates by that.
    """

    def inserted_run(self, entries: Sequence[int], stored: bool = False) -> None:
        """New blocks, already below their parents; none is a candidate yet. `stored`: a client stores them now.

        Each but the first is the only child of the one before it.
        """

    def inserted_many(self, first: int, count: int) -> None:
        """New blocks, `first ..< first + count` in turn, of an earlier life."""

    def touched(self, entry: int, how: Touch) -> None:
        """A match ended at this block (its ancestors are not touched one by one)."""

    def replaced(self, entry: int, child: int) -> None:
        """`child`, a candidate and the last child of `entry`, is evicted; `entry` becomes a candidate in its place."""

    def evicted(self, entry: int, parent: int) -> None:
        """`entry`, a candidate below `parent`, is evicted, and `parent` does not take its place at once."""

    def follows(self, entry: int, child: int) -> bool:
        """True if `entry`, if it became a candidate in the place of the victim `child`, would be the next victim.

        If so it is evicted too, before anything else is asked; `child` stands for both from here on.
        """

    def add(self, entry: int) -> None:
        """The block has become a candidate."""

    def remove(self, entry: int) -> None:
        """The block is no longer a candidate (pinned, got a child, or lost)."""

    def victim(self) -> int:
        """The candidate to evict next, which stays a candidate, or NO_ENTRY."""

    def worth(self, entry: int) -> float:
        """Worth of keeping the block for a second, in hits; the same for all blocks if the policy does not predict."""

    def coldest_stamp(self) -> int | None:
        """The age of `victim()` on the clock that all size classes share; None without candidates."""


def coldest_of(policies: Sequence[Policy]) -> Policy | None:
    """The policy whose next victim has waited longest; None where none has a victim."""
    if len(policies) == 1:
        return None if policies[0].victim() == NO_ENTRY else policies[0]
    stamps = [(stamp, number) for number, one in enumerate(policies) if (stamp := one.coldest_stamp()) is not None]
    return policies[min(stamps)[1]] if stamps else None
