"""Ends of chains that a writer is about to continue, kept for a moment.

A long prompt is stored in several parts, and blocks not used yet may be worth the least of all: without this a policy
may evict the last block of one part before the next part names it as its parent, and the rest of the prompt is refused.
So the end of what a writer has committed stays pinned until the writer has continued below it, for a second at most. It
takes no room from others: if nothing else is left to evict, all of these pins are released first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from tiercache.daemon.index.index import Index
from tiercache.protocol.messages import KEY_BYTES

TAIL_S = 1.0
"""How long to wait for a writer to continue."""
MAX_TAILS = 64
"""Per writer: an engine that stores so many prompts at a time."""
MAX_PROMPTS = 1024


class PromptEnds:
    """Where the prompts looked up last end: a writer that has stored one as far as that is done with it."""

    __slots__ = ("_ends",)

    def __init__(self) -> None:
        self._ends: dict[bytes, None] = {}

    def asked(self, keys: bytes) -> None:
        """A prompt was looked up; `keys` is a packed list of at least one key."""
        end = keys[-KEY_BYTES:]
        self._ends.pop(end, None)
        self._ends[end] = None
        if len(self._ends) > MAX_PROMPTS:
            del self._ends[next(iter(self._ends))]

    def ends_at(self, key: bytes) -> bool:
        """Whether one of those prompts ends at this block."""
        return key in self._ends


class ChainEnds:
    """The pinned ends in one index, with their deadlines, by writer. Event loop only."""

    def __init__(self, index: Index, prompts: PromptEnds, clock_s: Callable[[], float]) -> None:
        self._index = index
        self._prompts = prompts
        self._clock_s = clock_s
        self._of: dict[bytes, dict[int, float]] = {}  # oldest first
        self._first_s = math.inf  # no deadline is before that

    def __iter__(self) -> Iterator[int]:
        """The entries, each of which has a pin for it."""
        return (entry for its in self._of.values() for entry in its)

    def stored(self, writer: bytes, entry: int) -> None:
        """The writer has committed its chain as far as this block, a live one without children."""
        if self._prompts.ends_at(self._index.key[entry]):
            return
        its = self._of.setdefault(writer, {})
        if its.pop(entry, None) is None:
            self._index.pin(entry)
        its[entry] = self._clock_s() + TAIL_S
        self._first_s = min(self._first_s, its[entry])
        if len(its) > MAX_TAILS:
            self._let_go(writer, next(iter(its)))

    def went_on(self, writer: bytes, entry: int) -> None:
        """The writer has reserved blocks below this one; that reservation keeps it from here on."""
        if entry in self._of.get(writer, ()):
            self._let_go(writer, entry)

    def lapse(self) -> None:
        """Unpin what is past its deadline."""
        now_s = self._clock_s()
        if now_s < self._first_s:
            return
        self._let_go_all(lambda entry, end_s: end_s <= now_s)
        self._first_s = min((end_s for its in self._of.values() for end_s in its.values()), default=math.inf)

    def give_up(self) -> bool:
        """Unpin all of them; False when there were none."""
        had = bool(self._of)
        self._let_go_all(lambda entry, end_s: True)
        self._first_s = math.inf
        return had

    def let_go_detached(self) -> None:
        """Unpin what was dropped, or hangs below a dropped block."""
        self._let_go_all(lambda entry, end_s: not self._index.attached(entry))

    def writer_gone(self, writer: bytes) -> None:
        """The writer is gone: unpin its ends, since it will not continue them."""
        for entry in list(self._of.get(writer, ())):
            self._let_go(writer, entry)

    def _let_go_all(self, which: Callable[[int, float], bool]) -> None:
        stamp = self._index.columns.stamp
        gone = [
            (stamp[entry], writer, entry)
            for writer, its in self._of.items()
            for entry, end_s in its.items()
            if which(entry, end_s)
        ]
        for _, writer, entry in sorted(gone):  # become candidates in the order in which they were used
            self._let_go(writer, entry)

    def _let_go(self, writer: bytes, entry: int) -> None:
        its = self._of[writer]
        del its[entry]
        if not its:
            del self._of[writer]
        self._index.unpin(entry)
