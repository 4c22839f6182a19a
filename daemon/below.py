"""The seam to the tier below DRAM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tiercache.daemon.leases import ReadLease
    from tiercache.daemon.space import Namespace


class TierBelow(Protocol):
    """What the DRAM tier asks and tells the tier below it. On the event loop; nothing blocks."""

    name: str

    def blocks_after(self, namespaces: Sequence[Namespace], keys: bytes, first: int) -> int:
        """How many blocks of the run that goes on at key `first` all namespaces have in this tier."""

    def matched(self, namespaces: Sequence[Namespace], keys: bytes, dram_blocks: int) -> None:
        """A client asked for `keys`; DRAM has the first `dram_blocks`."""

    def promote(self, lease: ReadLease) -> None:
        """Bring blocks `lease.blocks ..< lease.target` up; they land as if a client stored them."""

    def published(self, namespace: Namespace, key: bytes, entry: int) -> None:
        """A block has become visible in DRAM, as that entry of its index."""

    def flush(self, namespaces: Sequence[Namespace], key: bytes, done: Callable[[int, bool], None]) -> None:
        """Forget blocks at once; `done(blocks, durable)` when a crash cannot bring them back, or may."""

    def work(self) -> bool:
        """A slice of what was put off; True while there is more."""

    def stats(self) -> dict[str, Any]:
        """What `stats` shows of this tier; empty without one."""


class NoTierBelow:
    """DRAM is the last tier: what is evicted is gone."""

    name = ""

    def blocks_after(self, namespaces: Sequence[Namespace], keys: bytes, first: int) -> int:
        return 0

    def matched(self, namespaces: Sequence[Namespace], keys: bytes, dram_blocks: int) -> None:
        return

    def promote(self, lease: ReadLease) -> None:
        return

    def published(self, namespace: Namespace, key: bytes, entry: int) -> None:
        return

    def flush(self, namespaces: Sequence[Namespace], key: bytes, done: Callable[[int, bool], None]) -> None:
        done(0, True)

    def work(self) -> bool:
        return False

    def stats(self) -> dict[str, Any]:
        return {}
