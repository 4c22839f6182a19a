"""The interface between the engine and a cache, and the handling of its failures.

`tiercache.Connector` implements the interface, tests bring their own. For a model with several groups of layers the
connector makes a sibling for each (see `tiercache.engine.connect`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from tiercache.copies.pool import Pool
from tiercache.errors import TierCacheError
from tiercache.protocol.hints import Hint
from tiercache.protocol.messages import EventRun, ModelCard
from tiercache.protocol.namespaces import NamespaceSpec

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class MatchLike(Protocol):
    """A prefix found in the cache, under a lease.

    `blocks` is its length; 0 is a miss. The last `below_blocks` of them are promoted from a tier below DRAM, and of
    these the last `shared_blocks` come over the network, from a store that hosts share.
    """

    @property
    def blocks(self) -> int: ...
    @property
    def below_blocks(self) -> int: ...
    @property
    def shared_blocks(self) -> int: ...


class TransferLike(Protocol):
    """Copies in progress. Their memory is free once `done()`.

    The work lasted from `began_s` to `ended_s` of `time.monotonic()`; both are 0 if there was none.
    """

    @property
    def began_s(self) -> float: ...
    @property
    def ended_s(self) -> float: ...
    def done(self) -> bool: ...
    def result(self, timeout_s: float = ...) -> Any: ...
    def cancel(self) -> None: ...


class GroupLike(Protocol):
    """A cache for the blocks of one namespace.

    `keys` is a chain from its root, 16 bytes a key; blocks `first..` of it are those of `block_ids`. A load's result is
    the number of leading `block_ids` proven good; a store's result has `stored`, `present`, `dropped` and
    `parent_missing` blocks. Matched or promoted blocks must be in all `namespaces`. `match`, `release` and `prefetch`
    wait for the daemon, so an engine's step has them called in the background: `ask_async` calls a question there and
    has its result, or `miss` if it was cancelled before that.
    """

    @property
    def available(self) -> bool: ...
    @property
    def wants_events(self) -> bool: ...
    def match(self, keys: bytes, *, namespaces: Sequence[NamespaceSpec] | None = None) -> MatchLike: ...
    def release(self, match: Any) -> None: ...
    def prefetch(self, keys: bytes, *, namespaces: Sequence[NamespaceSpec] | None = None) -> int: ...
    def ask_async(self, question: Callable[[], T], miss: T) -> TransferLike: ...
    def release_async(self, match: Any) -> None: ...
    def announce(self, models: Sequence[ModelCard]) -> None: ...
    def load_async(
        self, match: Any, block_ids: Sequence[int], *, first: int = 0, timeout_s: float | None = None
    ) -> TransferLike: ...
    def store_async(
        self,
        keys: bytes,
        block_ids: Sequence[int],
        *,
        first: int = 0,
        events: EventRun | None = None,
        hint: Hint | None = None,
    ) -> TransferLike: ...
    def close(self) -> None: ...


class CacheLike(GroupLike, Protocol):
    """A connector, which has siblings for the other namespaces of its engine."""

    def sibling(self, namespace: NamespaceSpec, pool: Pool) -> GroupLike: ...


@dataclass(slots=True)
class OffloadCounters:
    """Totals of traffic with the cache, in blocks unless named otherwise."""

    loaded: int = 0
    load_misses: int = 0
    lookups_given_up_count: int = 0
    loads_given_up_count: int = 0
    stored: int = 0
    present: int = 0
    not_stored: int = 0
    errors_count: int = 0


class GroupsLike(Protocol):
    """A cache for each group of layers, used together. See `tiercache.engine.connect.GroupedCache`."""

    @property
    def available(self) -> bool: ...
    @property
    def wants_events(self) -> bool: ...
    def match(self, keys: bytes) -> MatchLike: ...
    def match_each(self, match: Any, keys: bytes) -> EachMatch | None: ...
    def release(self, match: Any) -> None: ...
    def prefetch(self, keys: bytes) -> int: ...
    def ask_async(self, question: Callable[[], T], miss: T) -> TransferLike: ...
    def release_async(self, match: EachMatch) -> None: ...
    def load_async(self, match: EachMatch, parts: Sequence[Part], *, timeout_s: float) -> TransferLike: ...
    def store_async(
        self,
        group: int,
        keys: bytes,
        block_ids: Sequence[int],
        *,
        first: int = 0,
        events: EventRun | None = None,
        hint: Hint | None = None,
    ) -> TransferLike: ...


class EachMatch(NamedTuple):
    """A match of several groups, under a lease of each: `matches`, from which a load takes those that it uses."""

    blocks: int
    below_blocks: int
    shared_blocks: int
    matches: list[MatchLike | None]


class Part(NamedTuple):
    """Blocks of a match from `first` on, to be loaded into `block_ids`."""

    first: int
    block_ids: list[int]


class GuardedCache:
    """Wraps a cache, or none, so that no request fails: errors are counted, logged once, and become a miss."""

    def __init__(self, cache: GroupsLike | None) -> None:
        self.counters = OffloadCounters()
        self._cache = cache
        self._error_logged = False

    @property
    def exists(self) -> bool:
        return self._cache is not None

    @property
    def available(self) -> bool:
        return self._cache is not None and self._cache.available

    @property
    def wants_events(self) -> bool:
        """True if stores should bring the tokens of their blocks, for KV events."""
        return self._cache is not None and self._cache.wants_events

    def ask_async(self, question: Callable[[], T], miss: T) -> TransferLike:
        """Call a question in the background; there must be a cache."""
        assert self._cache is not None
        return self._cache.ask_async(question, miss)

    def release_async(self, match: EachMatch) -> None:
        """End what no load has taken of a match, in the background."""
        if self._cache is not None:
            self._cache.release_async(match)

    def ask(self, question: Callable[[GroupsLike], T]) -> T | None:
        """The result of `question(cache)`, or None if the cache fails or is missing."""
        if self._cache is None:
            return None
        try:
            return question(self._cache)
        except TierCacheError as error:
            self.counters.errors_count += 1
            if not self._error_logged:
                self._error_logged = True
                _LOG.warning("the cache failed and is a miss from here on where it does: %s", error)
            return None
