"""Traffic: what clients asked for and how much of it was found, in tokens, by tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tiercache.ground.histograms import POWERS_OF_TWO, Histogram

from .hot_prefixes import HotPaths

MAX_NOTED = 32
"""Matches that may wait to be counted: with the longest keys, 4 MiB."""
PROBE_ENGINE = "tiercache/probe"
"""The `engine` of namespaces in which only health checks store blocks: these do not count as traffic."""

if TYPE_CHECKING:
    from tiercache.daemon.tiers.dram.reads import Found
    from tiercache.daemon.tiers.dram.space import Namespace


class Traffic:
    """Plain counts, only ever raised, on the event loop.

    Tokens of a request for several namespaces (ranks, groups) count once, those of the first. A match is only noted
    when it comes; notes are counted together, when the figures are read or `MAX_NOTED` wait: counting one by one,
    between copies that evict our data from the CPU's caches, takes several times as long.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[Namespace, bytes, int, int, int, int]] = []
        self._asked_tokens = Histogram(POWERS_OF_TWO)
        self._hit_tokens = Histogram(POWERS_OF_TWO)
        self._dram_hit_tokens = 0
        self._below_hit_tokens = 0
        self._shared_hit_tokens = 0
        self.read_bytes = 0
        self._hot_paths = HotPaths()

    def matched(self, namespaces: Sequence[Namespace], keys: bytes, asked_blocks: int, found: Found) -> None:
        """A client asked for the blocks `keys`."""
        self._noted.append((namespaces[0], keys, asked_blocks, found.dram, found.below, found.shared))
        if len(self._noted) >= MAX_NOTED:
            self._count()

    def _count(self) -> None:
        for first, keys, asked_blocks, dram, below, shared in self._noted:
            if first.spec.engine == PROBE_ENGINE:
                continue
            size, hit = first.spec.block_size, dram + below
            self._asked_tokens.observe(asked_blocks * size)
            self._hit_tokens.observe(hit * size)
            self._dram_hit_tokens += dram * size
            self._below_hit_tokens += below * size
            self._shared_hit_tokens += shared * size
            if hit:
                self._hot_paths.matched(first, keys, hit)
        self._noted.clear()

    @property
    def asked_tokens(self) -> Histogram:
        """Tokens asked for by each request that matched."""
        self._count()
        return self._asked_tokens

    @property
    def hit_tokens(self) -> Histogram:
        """Tokens found in all tiers together for each request that matched."""
        self._count()
        return self._hit_tokens

    @property
    def hot_paths(self) -> HotPaths:
        """Where matches ended."""
        self._count()
        return self._hot_paths

    def read(self, namespace: Namespace, size_bytes: int) -> None:
        """Count bytes of blocks that a client was sent, or was told the place of."""
        if namespace.spec.engine != PROBE_ENGINE:
            self.read_bytes += size_bytes

    def stats(self) -> dict[str, Any]:
        """What `stats` shows of it."""
        return {
            "asked_tokens": self.asked_tokens.sum,
            "dram_hit_tokens": self._dram_hit_tokens,
            "below_hit_tokens": self._below_hit_tokens,
            "shared_hit_tokens": self._shared_hit_tokens,
            "read_bytes": self.read_bytes,
        }
