"""Region shares: what accounts take of the arena in whole regions, and which regions they must give back.

A region holds one size of frames as long as one of its frames is in use. So an account with one small block in each of
many regions would take them all from accounts that need another frame size, within a quota that counts frames.
Therefore whole regions count too: each account with frames in a region takes its part of it. An account that takes more
than its quota in this way, and more than one region, keeps that only until others need room.
"""

from __future__ import annotations

from collections import Counter

from tiercache.daemon.index.allocator import NO_ACCOUNT, Allocator, SizeClass
from tiercache.daemon.tiers.quotas import Quotas


class Shares:
    """Event loop only. Each call costs a step per region, and per account in it."""

    def __init__(self, allocator: Allocator, quotas: Quotas) -> None:
        self._allocator = allocator
        self._quotas = quotas

    def taken_bytes(self) -> Counter[int]:
        """By number of the account."""
        taken = Counter[int]()
        for _, size_bytes, owned, counts in self._allocator.shares():
            for account, count in counts.items():
                taken[account] += size_bytes * count // owned
        return taken

    def _entitled(self) -> dict[int, int]:
        """What accounts may take: at least one region, and everything where a quota was removed."""
        region_bytes = max((size_bytes for _, size_bytes, _, _ in self._allocator.shares()), default=0)
        entitled = {}
        for name, number in self._quotas.numbers.items():
            limit_bytes = self._quotas.limit_bytes(name)
            entitled[number] = self._allocator.arena_bytes if limit_bytes is None else max(limit_bytes, region_bytes)
        return entitled

    def at_limit(self, account: int) -> bool:
        """Whether one more region would be more than an account may take from others."""
        if account == NO_ACCOUNT:
            return False
        entitled = self._entitled()[account]
        region_bytes = max((size_bytes for _, size_bytes, _, _ in self._allocator.shares()), default=0)
        return self.taken_bytes()[account] + region_bytes > entitled

    def to_give_back(self, size_class: SizeClass, account: int) -> int | None:
        """A region to take back for frames of that size and an account within its share: the one with the least in it.

        None where no account takes too much, or has such a region for itself.
        """
        if not self._quotas.numbers:
            return None
        taken, entitled = self.taken_bytes(), self._entitled()
        over = {number for number, its_bytes in taken.items() if its_bytes > entitled[number]}
        if not over or account in over:
            return None
        usable = [
            (self._allocator.bytes_in_use(region_id), region_id)
            for region_id, size_bytes, owned, counts in self._allocator.shares()
            if size_bytes >= size_class.frame_bytes and region_id not in size_class.regions
            if counts.keys() <= over and sum(counts.values()) == owned > 0
            if self._allocator.entries_of(region_id, emptying=False) is not None
        ]
        return min(usable)[1] if usable else None
