"""What is told of clients' requests: traffic, the what-if estimate, the recording."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tiercache.protocol.messages import KEY_BYTES, Hint

from .traffic import Traffic

if TYPE_CHECKING:
    from tiercache.daemon.tiers.dram.reads import Found
    from tiercache.daemon.tiers.dram.space import Namespace

    from .recorder import Recorder
    from .reuse import WhatIf


class Observers:
    """Told of requests that succeed; a flush is told when it begins. Event loop only.

    `what_if` and `recorder` are there if the settings ask for them.
    """

    def __init__(self, what_if: WhatIf | None = None) -> None:
        self.traffic = Traffic()
        self.what_if = what_if
        self.recorder: Recorder | None = None

    def looked_up(self, namespaces: Sequence[Namespace], keys: bytes, found: Found, promote: bool) -> None:
        """A match; `promote`: blocks below DRAM are promoted."""
        self.traffic.matched(namespaces, keys, len(keys) // KEY_BYTES, found)
        if self.what_if is not None:
            self.what_if.looked_up(namespaces, keys, found.dram, found.below)
        if self.recorder is not None:
            self.recorder.looked(namespaces, keys, found.dram, found.below, promote)

    def prefetched(self, namespaces: Sequence[Namespace], keys: bytes, found: Found) -> None:
        """A prefetch."""
        if self.what_if is not None:
            self.what_if.looked_up(namespaces, keys, found.dram, found.below)
        if self.recorder is not None:
            self.recorder.fetched(namespaces, keys)

    def reserved(self, namespace: Namespace, parent: bytes, keys: bytes) -> None:
        """Frames were requested for a run of blocks below `parent` (empty: the root)."""
        self.reserved_below(namespace, parent, keys)
        if self.recorder is not None:
            self.recorder.stored(namespace, parent, keys)

    def reserved_below(self, namespace: Namespace, parent: bytes, keys: bytes) -> None:
        """As `reserved`, but places in the tier below. Recordings have no such stores."""
        if self.what_if is not None:
            self.what_if.stored(namespace, parent, keys)

    def hinted(self, namespaces: Sequence[Namespace], hint: Hint) -> None:
        """A hint."""
        if self.recorder is not None:
            self.recorder.hinted(namespaces, hint)

    def flushed(self, namespaces: Sequence[Namespace], key: bytes, tier: str) -> None:
        """A flush has begun."""
        if self.recorder is not None:
            self.recorder.forgot(namespaces, key, tier)
