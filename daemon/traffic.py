"""What clients asked for and what of it was here: in tokens, by tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tiercache.daemon.hotpaths import HotPaths
from tiercache.metrics import POWERS_OF_TWO, Histogram

PROBE_ENGINE = "tiercache/probe"
"""The `engine` of namespaces in which only health checks store blocks: they are no traffic."""

if TYPE_CHECKING:
    from tiercache.daemon.reads import Found
    from tiercache.daemon.space import Namespace


class Traffic:
    """Plain counts, only ever raised, on the event loop.

    Of a request that asks for several namespaces (ranks, groups) tokens are counted once, those of the first.
    """

    def __init__(self) -> None:
        self.asked_tokens = Histogram(POWERS_OF_TWO)
        """Of each request that matched: what it asked for, and what was found in all tiers together."""
        self.hit_tokens = Histogram(POWERS_OF_TWO)
        self.dram_hit_tokens = 0
        self.below_hit_tokens = 0
        self.read_bytes = 0
        self.hot_paths = HotPaths()

    def matched(self, namespaces: Sequence[Namespace], keys: bytes, asked_blocks: int, found: Found) -> None:
        """A client asked for the blocks `keys`."""
        first = namespaces[0]
        if first.spec.engine == PROBE_ENGINE:
            return
        size, hit = first.spec.block_size, found.dram + found.below
        self.asked_tokens.observe(asked_blocks * size)
        self.hit_tokens.observe(hit * size)
        self.dram_hit_tokens += found.dram * size
        self.below_hit_tokens += found.below * size
        if hit:
            self.hot_paths.matched(first, keys, hit)

    def read(self, namespace: Namespace, size_bytes: int) -> None:
        """A client was told where so many bytes of blocks are, or was sent them."""
        if namespace.spec.engine != PROBE_ENGINE:
            self.read_bytes += size_bytes

    def stats(self) -> dict[str, Any]:
        """What `stats` shows of it."""
        return {
            "asked_tokens": self.asked_tokens.sum,
            "dram_hit_tokens": self.dram_hit_tokens,
            "below_hit_tokens": self.below_hit_tokens,
            "read_bytes": self.read_bytes,
        }
