"""The daemon's cache for tests: work that the daemon does in slices is done at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiercache.daemon.cache import Cache
from tiercache.daemon.ground.slices import finish
from tiercache.daemon.hints.hints import GivenHint
from tiercache.daemon.tiers.dram.leases import Owner
from tiercache.daemon.tiers.dram.reads import Found
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.dram.write_lease import Reservation


class CacheAtOnce(Cache):
    """The cache without a daemon around it; requests are methods that return when they are done."""

    def match(self, owner: Owner, namespaces: Sequence[Namespace], keys: bytes, ttl_s: float, **how: Any) -> Found:
        """See `Reads.match`."""
        found = finish(self.reads.match(owner, namespaces, keys, ttl_s, **how))
        self.observers.looked_up(namespaces, keys, found, False)
        return found

    def peek(self, namespaces: Sequence[Namespace], keys: bytes) -> tuple[int, int]:
        """See `Runs.peek`: blocks in DRAM, and below."""
        found = finish(self.reads.runs.peek(namespaces, keys))
        return found.dram, found.below + found.shared

    def prefetch(self, owner: Owner, namespaces: Sequence[Namespace], keys: bytes) -> Found:
        """See `Reads.prefetch`."""
        return finish(self.reads.prefetch(owner, namespaces, keys))

    def pin(self, namespaces: Sequence[Namespace], keys: bytes, ttl_s: float) -> int:
        """See `ClientPins.pin`."""
        return finish(self.reads.pins.pin(namespaces, keys, ttl_s))

    def reserve(self, owner: Owner, namespace: Namespace, parent: bytes, keys: bytes, *rest: Any) -> Reservation:
        """See `Writes.reserve`."""
        reservation = self.writes.reserve(owner, namespace, parent, keys, *rest)
        self.observers.reserved(namespace, parent, keys)
        return reservation

    def hint_now(self, namespaces: Sequence[Namespace], keys: bytes, first: int, said: GivenHint) -> int:
        """See `Cache.hint`."""
        return finish(self.hint(namespaces, keys, first, said))

    def flush_dram(self, numbers: Sequence[int], key: bytes) -> tuple[int, bool]:
        """See `Cache.flush`."""
        return finish(self.flush([self.space.namespaces[number] for number in numbers], key, None))

    def check_integrity(self) -> list[str]:
        """See `Cache.check`."""
        return finish(self.check())
