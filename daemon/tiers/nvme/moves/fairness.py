"""Quotas on NVMe: what each account uses, and room for its next block, made among its own blocks.

The quota counts over all directories together; room is made first where the block goes, then in the others. A block of
another account is never evicted for it: a block that does not fit is not written, and stays in DRAM for now.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum

from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.tiers.dram.space import Namespace, Space
from tiercache.daemon.tiers.nvme.shelf.shelf import Shelf


class Room(Enum):
    """True if a quota has room for one more block."""

    HERE = "here"
    SOON = "soon"  # more must be evicted than one slice can
    NONE = "none"  # no block of its own can be evicted


class Fairness:
    """Event loop only; never blocks. `shelves` are the open ones."""

    def __init__(self, space: Space, shelves: Sequence[Shelf]) -> None:
        self._space = space
        self._quotas = space.quotas_below
        self._shelves = shelves
        self._used: dict[str, int] = {}  # counted since `look_again`

    def look_again(self) -> None:
        """Recount at the next use; until the next call counts only change by what goes through here."""
        self._used.clear()

    def room(self, shelf: Shelf, namespace: Namespace, parent: bytes) -> Room:
        """Make room for a block below `parent` (empty: the root) on that shelf, if its account has a quota."""
        account = namespace.account_below
        limit_bytes = self._quotas.limit_bytes(account)
        if limit_bytes is None:
            return Room.HERE
        over_bytes = self._counted(account) + shelf.slot_bytes(namespace) - limit_bytes
        if over_bytes <= 0:
            return Room.HERE
        # Room for a child must not be made of its ancestors.
        keep = shelf.table(namespace).get(parent) if parent else NO_ENTRY
        if keep != NO_ENTRY:
            shelf.index.pin(keep)
        evicted_bytes = 0
        for one in (shelf, *(other for other in self._shelves if other is not shelf and other.may_write)):
            evicted_bytes += one.slots.evict_of(account, over_bytes - evicted_bytes)
        if keep != NO_ENTRY:
            shelf.index.unpin(keep)
        self._used[account] -= evicted_bytes
        if evicted_bytes >= over_bytes:
            return Room.HERE
        if evicted_bytes:
            return Room.SOON
        self._quotas.refused[account] += 1
        return Room.NONE

    def spare(self, shelf: Shelf, namespace: Namespace) -> float:
        """How many blocks have room in their quota as it is; infinite without one."""
        account = namespace.account_below
        limit_bytes = self._quotas.limit_bytes(account)
        if limit_bytes is None:
            return math.inf
        return (limit_bytes - self._counted(account)) // shelf.slot_bytes(namespace)

    def took(self, shelf: Shelf, namespace: Namespace, slots: int = 1) -> None:
        """Count slots that were taken for blocks of that namespace; see `Use.pending_below_blocks`."""
        namespace.use.pending_below_blocks += slots
        if namespace.account_below in self._used:
            self._used[namespace.account_below] += slots * shelf.slot_bytes(namespace)

    def _counted(self, account: str) -> int:
        if account not in self._used:
            self._used[account] = self.used_bytes(account)
        return self._used[account]

    def check_integrity(self, pending: Mapping[int, int]) -> list[str]:
        """Namespaces whose counts of pending writes differ from `pending`, by number."""
        counted = {number: one.use.pending_below_blocks for number, one in self._space.namespaces.items()}
        return [
            f"namespace {number} counts {count} blocks on their way to NVMe, there are {pending.get(number, 0)}"
            for number, count in counted.items()
            if count != pending.get(number, 0)
        ]

    def used_bytes(self, account: str) -> int:
        """What an account with a quota uses, writes under way included. O(its namespaces, directories)."""
        used_bytes = 0
        for number in self._quotas.members.get(account, ()):
            namespace = self._space.namespaces[number]
            tables = [table for shelf in self._shelves if (table := shelf.index.tables.get(number)) is not None]
            blocks = namespace.use.pending_below_blocks + sum(table.blocks for table in tables)
            if blocks and self._shelves:
                used_bytes += blocks * self._shelves[0].slot_bytes(namespace)
        return used_bytes
