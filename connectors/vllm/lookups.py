"""Lookups of one engine: what the cache has of its requests, asked in the background for vLLM's scheduler thread.

    ask ─► queued ─► make keys ─► match ─► done ─► loaded ─► drop: the match is released
             └─────────── drop ─────────────┴──────────► the same, in its turn

One thread makes the lookups and releases in order. While the daemon is slow with each lookup, a request waits for its
turn no longer than for one answer, and then goes without the cache. While the lookups are quick it waits longer, but
not forever: very many may be before it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tiercache.connector.connector import Connector
from tiercache.connector.jobs import JobQueue
from tiercache.connector.loads import Match
from tiercache.errors import TierCacheError
from tiercache.protocol.namespaces import NamespaceSpec

SLOW_LOOKUP_S = 0.05
"""A lookup that takes longer than this is slow: those behind it could wait for many of them."""
LONGEST_WAIT = 5
"""Behind quick lookups a request waits as long as for this number of answers."""
MISS = Match()

logger = logging.getLogger("tiercache.connectors.vllm")


@dataclass(slots=True, eq=False)
class Lookup:
    """Result of one lookup. The lookups' thread sets it, `done` last; without a root there is no cache."""

    until_s: float  # how long to wait if lookups are slow
    latest_s: float  # and if they are quick
    wanted: bool = True
    root: bytes = b""
    keys: bytes = b""
    match: Match = MISS
    ticket: bytes = b""
    done: bool = False


class MatchLookups:
    """Asks for matches, and releases them. Used by vLLM's scheduler thread, except where it says otherwise.

    Args:
        connector: for matches; without a pool, because another process or connector adopts them.
        specs: a match is what all of these namespaces have.
    """

    def __init__(self, connector: Connector, specs: Sequence[NamespaceSpec]) -> None:
        self._connector = connector
        self._specs = specs
        self._queue = JobQueue("tiercache-lookup")
        self._slow = False  # whether the last lookup was; set by their thread
        self._moved_s = 0.0  # when the thread last began or ended work, or was given work after all else
        self._collected = False  # there is work for the next `begin`
        self._closed = False
        self.begin_with, self.finish = self._queue.begin_with, self._queue.finish

    def later(self, work: Callable[[], object]) -> None:
        """Collect work for the thread. To wake it is most of the cost, so `begin` does that once for all."""
        self._collected = True
        self._queue.later(work)

    def begin(self) -> None:
        """Start the collected work."""
        if self._collected:
            self._collected = False
            if not len(self._queue):
                self._moved_s = time.monotonic()
            self._queue.begin()

    def prepare(self) -> Lookup:
        """A lookup that `find` is yet to answer."""
        now_s, patience_s = time.monotonic(), self._connector.client.request_timeout_s
        return Lookup(now_s + patience_s, now_s + LONGEST_WAIT * patience_s)

    def ask(self, chain: Callable[[], tuple[bytes, bytes]]) -> Lookup:
        """Begin a lookup with the next `begin`; `chain` returns the root and the keys, in the background."""
        lookup = self.prepare()
        self.later(partial(self.find, lookup, chain))
        return lookup

    def find(self, lookup: Lookup, chain: Callable[[], tuple[bytes, bytes]]) -> None:
        """Answer a lookup, unless it is not wanted any more. In the background thread."""
        self._moved_s = time.monotonic()
        try:
            root, keys = chain() if lookup.wanted and not self._closed else (b"", b"")
            if root and lookup.wanted:
                began_s = time.monotonic()
                lookup.match = self._connector.match(keys, namespaces=self._specs)
                self._slow = time.monotonic() - began_s > SLOW_LOOKUP_S
                lookup.ticket = lookup.match.ticket()
                lookup.root, lookup.keys = root, keys
        except (TierCacheError, OSError) as error:
            logger.warning("a request goes without the cache: %s", error)
        finally:
            self._moved_s = time.monotonic()
            lookup.done = True

    def overdue(self, lookup: Lookup, *, slow: bool = False) -> bool:
        """True if a request should wait no longer for a lookup that is not done. While lookups are quick it waits on.

        `slow`: they are for this request. Begins what is collected.
        """
        self.begin()
        now_s = time.monotonic()
        if now_s > lookup.latest_s:
            return True
        return now_s > lookup.until_s and (slow or self._slow or now_s - self._moved_s > SLOW_LOOKUP_S)

    def drop(self, lookup: Lookup) -> None:
        """Release the match with the next `begin`, or as soon as it comes. What is not looked up yet never is."""
        lookup.wanted = False
        if not lookup.done or lookup.match.blocks:
            self.later(partial(self._release, lookup))  # after the lookup, which may still be to come

    def _release(self, lookup: Lookup) -> None:
        """In the background thread."""
        self._moved_s = time.monotonic()
        self._connector.release(lookup.match)

    def close(self) -> None:
        """Begin no further lookup. Blocks for seconds at most."""
        self._closed = True
        self._queue.close()
        self._connector.close()
