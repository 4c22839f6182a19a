"""Slots that the index has left, until they are free.

A slot becomes free only when the deletion of its row is committed, so that a crash never finds an old row over new
bytes:

    leave the index ─► delete the row ─► (committed) ─► slot free ─► write new bytes ─► insert a row

The row of a block is deleted before that of the block before it, so that a crash never leaves a row without the rows
before it. A dropped block that is still read, or whose child is still being written, keeps its slot but not its row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from .parts import CatalogRows
from .slot_numbers import place_of_slot

DELETE_AT_ONCE = 512
"""Rows whose deletion is requested again in one go."""
DELETED_TOGETHER = 128
"""Rows deleted by one change of the catalog, whose slots are freed together."""


class LeftSlots:
    """Event loop only; never blocks. `free(slots)` is called when slots may be used again."""

    def __init__(self, catalog: CatalogRows, free: Callable[[list[int]], None]) -> None:
        self._catalog = catalog
        self._free = free
        self._together: list[int] | None = None  # slots whose rows are deleted by the batch, while one is made
        self._leaving: set[int] = set()  # slots out of the index whose row is to be deleted, the lost ones too
        self._held: dict[int, bool] = {}  # slots of dropped blocks that pins keep, and whether their row is gone
        self._undeleted: deque[int] = deque()  # slots whose row could not be deleted, also held ones: retried

    def __len__(self) -> int:
        return len(self._leaving)

    def __contains__(self, slot: object) -> bool:
        return slot in self._leaving

    @property
    def lost(self) -> int:
        """Slots whose row could not be deleted yet."""
        return len(self._undeleted)

    @property
    def being_freed(self) -> int:
        """Slots that will be free soon, unless the deletion of their row fails."""
        return len(self._leaving) - len(self._leaving.intersection(self._undeleted) if self._undeleted else ())

    def leave(self, slot: int) -> None:
        """The index no longer uses the slot: delete its row, then free the slot."""
        held = self._held.pop(slot, None)
        if held:
            self._free([slot])
            return
        self._leaving.add(slot)
        if held is None:
            self._delete_row(slot)

    def hold(self, slot: int) -> None:
        """A dropped block keeps its slot: delete its row now, before those of the blocks before it."""
        self._held[slot] = False
        self._delete_row(slot)

    @contextmanager
    def deleted_together(self) -> Iterator[None]:
        """Rows of slots that are left meanwhile are deleted by the batch, in the order in which they were left."""
        if self._together is not None:
            yield
            return
        self._together = []
        try:
            yield
        finally:
            slots, self._together = self._together, None
            if slots:
                self._post_deletions(slots)

    def try_again(self) -> None:
        """Request a slice of the deletions that have failed once more."""
        if self._catalog.error:
            return
        again = [self._undeleted.popleft() for _ in range(min(len(self._undeleted), DELETE_AT_ONCE))]
        for first in range(0, len(again), DELETED_TOGETHER):
            self._post_deletions(again[first : first + DELETED_TOGETHER])

    def _delete_row(self, slot: int) -> None:
        if self._undeleted:
            self._undeleted.append(slot)  # after those, which may be of blocks behind it
        elif self._together is None:
            self._post_deletions([slot])
        else:
            self._together.append(slot)
            if len(self._together) == DELETED_TOGETHER:
                slots, self._together = self._together, []
                self._post_deletions(slots)

    def _post_deletions(self, slots: list[int]) -> None:
        """Have their rows deleted, in this order; at most `DELETED_TOGETHER`."""
        done = partial(self._rows_deleted, slots)
        if len(slots) == 1:
            self._catalog.delete(place_of_slot(slots[0]), done)
        else:
            self._catalog.delete_many([place_of_slot(slot) for slot in slots], done)

    def _rows_deleted(self, slots: list[int], ok: bool) -> None:
        if not ok:
            self._undeleted.extend(slots)  # not reused: their old rows could come back over new bytes
            return
        free, held = list[int](), self._held
        for slot in slots:
            if slot in held:
                held[slot] = True
            else:
                free.append(slot)
        self._leaving.difference_update(free)
        if free:
            self._free(free)
