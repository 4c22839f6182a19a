"""Repeated readings of a daemon's statistics: the changes from one to the next, and the message while it is gone."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from tiercache.errors import TierCacheError

if TYPE_CHECKING:
    from tiercache.client.client import Client

Tree = dict[str, Any]


class Reading(NamedTuple):
    """One reading: the tree of statistics at that time, or why there is none."""

    time_s: float
    tree: Tree
    problem: str = ""

    @property
    def generation(self) -> object:
        """Identifies the start of the daemon that the reading is from."""
        return self.tree.get("daemon", {}).get("generation")


def take_reading(client: Client, hot_prefixes: int = 0) -> Reading:
    """Read the statistics now, also while the daemon is gone: the client reconnects by itself.

    Blocks for a round trip, at most the client's request deadline.
    """
    from tiercache.protocol.messages import Stats

    try:
        reply = client.session().call(Stats, hot_prefixes=hot_prefixes)
    except TierCacheError as error:
        return Reading(time.monotonic(), {}, str(error))
    return Reading(time.monotonic(), reply.stats)


@contextmanager
def quiet_client() -> Iterator[None]:
    """Keep the client's log off the terminal: the live view reports the same itself."""
    log = logging.getLogger("tiercache.client")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def at(tree: Tree, path: str) -> float:
    """The number at `a.b.c` of a tree; 0 if it is missing, as with a daemon of another release."""
    value: Any = tree
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return float(value) if isinstance(value, (int, float)) else 0.0


class Change:
    """The changes between two readings. After a restart of the daemon they count from zero, like its counters."""

    def __init__(self, before: Reading, now: Reading) -> None:
        self.restarted = before.generation != now.generation
        self.seconds = max(1e-6, now.time_s - before.time_s)
        self._before: Tree = {} if self.restarted else before.tree
        self._now = now.tree

    def grown(self, path: str) -> float:
        """The growth of a counter."""
        return max(0.0, at(self._now, path) - at(self._before, path))

    def rate(self, *paths: str) -> float:
        """The growth per second of the sum of some counters."""
        return sum(map(self.grown, paths)) / self.seconds
