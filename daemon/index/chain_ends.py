"""Ends of chains that a writer is about to continue, kept for a moment.

A long prompt is stored in several parts, and blocks not used yet may be worth the least of all: without this a policy
may evict the last block of one part before the next part names it as its parent, and the rest of the prompt is refused.
So the end of what a writer has committed stays pinned until the writer has continued below it, for a second at most,
and at most until as much has been stored after it as the window of fresh stores holds (`policies/fresh_stores.py`):
whole chains hang on these pins, and what is in use must not make room for them. They take no room from others: if
nothing else is left to evict, all of these pins are released first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tiercache.protocol.messages import KEY_BYTES

from .index import Index

TAIL_S = 1.0
"""How long to wait for a writer to continue."""
MAX_TAILS = 64
"""Prompts, for each writer: an engine stores this many at a time."""
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
        """True if one of those prompts ends at this block."""
        return key in self._ends


class _Limit(NamedTuple):
    """Up to when an end is kept: a time, and what clients have stored by then."""

    time_s: float
    stored_bytes: int


class ChainEnds:
    """The pinned ends in one index, with their limits, by writer. Event loop only.

    Args:
        stored_bytes: what clients have stored so far.
        window_bytes: how much is stored while a block is fresh.
    """

    def __init__(
        self,
        index: Index,
        prompts: PromptEnds,
        clock_s: Callable[[], float],
        stored_bytes: Callable[[], int],
        window_bytes: Callable[[], int],
    ) -> None:
        self._index = index
        self._prompts = prompts
        self._clock_s = clock_s
        self._stored_bytes = stored_bytes
        self._window_bytes = window_bytes
        self._of: dict[bytes, dict[int, _Limit]] = {}  # oldest first
        self._first = _NEVER  # no limit is before that

    def __iter__(self) -> Iterator[int]:
        """The entries, each of which has a pin for it."""
        return (entry for ends in self._of.values() for entry in ends)

    def stored(self, writer: bytes, entry: int) -> None:
        """The writer has committed its chain as far as this block, a live one without children."""
        if self._prompts.ends_at(self._index.key[entry]):
            return
        ends = self._of.setdefault(writer, {})
        if ends.pop(entry, None) is None:
            self._index.pin(entry)
        limit = ends[entry] = _Limit(self._clock_s() + TAIL_S, self._stored_bytes() + self._window_bytes())
        self._first = _earlier(self._first, limit)
        if len(ends) > MAX_TAILS:
            self._let_go(writer, next(iter(ends)))

    def went_on(self, writer: bytes, entry: int) -> None:
        """The writer has reserved blocks below this one; that reservation keeps it from here on."""
        if entry in self._of.get(writer, ()):
            self._let_go(writer, entry)

    def lapse(self) -> None:
        """Unpin what is past its limit."""
        if not self._of:
            return
        now = _Limit(self._clock_s(), self._stored_bytes())
        if not _reached(self._first, now):
            return
        self._let_go_all(lambda entry, limit: _reached(limit, now))
        self._first = _NEVER
        for ends in self._of.values():
            for limit in ends.values():
                self._first = _earlier(self._first, limit)

    def give_up(self) -> bool:
        """Unpin all of them; False when there were none."""
        had = bool(self._of)
        self._let_go_all(lambda entry, limit: True)
        self._first = _NEVER
        return had

    def let_go_detached(self) -> None:
        """Unpin what was dropped, or hangs below a dropped block."""
        self._let_go_all(lambda entry, limit: not self._index.attached(entry))

    def writer_gone(self, writer: bytes) -> None:
        """The writer is gone: unpin its ends, since it will not continue them."""
        for entry in list(self._of.get(writer, ())):
            self._let_go(writer, entry)

    def _let_go_all(self, which: Callable[[int, _Limit], bool]) -> None:
        stamp = self._index.columns.stamp
        gone = [
            (stamp[entry], writer, entry)
            for writer, ends in self._of.items()
            for entry, limit in ends.items()
            if which(entry, limit)
        ]
        for _, writer, entry in sorted(gone):  # become candidates in the order in which they were used
            self._let_go(writer, entry)

    def _let_go(self, writer: bytes, entry: int) -> None:
        ends = self._of[writer]
        del ends[entry]
        if not ends:
            del self._of[writer]
        self._index.unpin(entry)


_NEVER = _Limit(math.inf, 1 << 62)


def _earlier(one: _Limit, other: _Limit) -> _Limit:
    return _Limit(min(one.time_s, other.time_s), min(one.stored_bytes, other.stored_bytes))


def _reached(limit: _Limit, now: _Limit) -> bool:
    return now.time_s >= limit.time_s or now.stored_bytes > limit.stored_bytes
