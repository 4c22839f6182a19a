"""Slots of one NVMe directory: segments, each divided into slots of one size, and the owners of the slots.

    NewSegments   segments: made, while the directory grows
    LeftSlots     slots that the index has left, until they are free

Where slots run short, `take_many` notes that, and `work` evicts ahead for those that come next, a slice in each go.
"""

from __future__ import annotations

import errno
import logging
import math
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from tiercache.config.setting_kinds import MAX_SEGMENT_BYTES
from tiercache.daemon.index.allocator import NO_FRAME, Allocator, SizeClass
from tiercache.daemon.index.chain_ends import ChainEnds
from tiercache.daemon.index.entries import LIVE
from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import NO_ENTRY, Policy, coldest_of
from tiercache.daemon.tiers.dram.quotas import UNLIMITED
from tiercache.daemon.tiers.dram.space import Space
from tiercache.daemon.tiers.nvme.catalog.catalog import CatalogState
from tiercache.daemon.tiers.nvme.catalog.rows import MAX_SLOTS, SLOT_BITS
from tiercache.daemon.tiers.nvme.disk.block_io import DiskOutcome, TaskOp
from tiercache.daemon.tiers.nvme.disk.health import WriteHealth
from tiercache.daemon.tiers.nvme.disk.queue import DiskPriority
from tiercache.protocol.messages import OFFSET_MASK, REGION_SHIFT

from .parts import BlockQueue, CatalogRows, DirectoryFiles

# --- numbers of slots --------------------------------------------------------------------------------

SLOT_MASK = MAX_SLOTS - 1
PAGE_SHIFT = 12  # a place counts pages of 4096 bytes inside its segment
assert MAX_SLOTS << PAGE_SHIFT == MAX_SEGMENT_BYTES, "each page of the largest segment has a number of its own"


def place_of_slot(slot: int) -> int:
    """The catalog's number of a slot: segment, then page inside it."""
    return (slot >> REGION_SHIFT) << SLOT_BITS | (slot & OFFSET_MASK) >> PAGE_SHIFT


def slot_of(place: int) -> int:
    """Inverse of `place_of_slot`."""
    return (place >> SLOT_BITS) << REGION_SHIFT | (place & SLOT_MASK) << PAGE_SHIFT


# --- slots that the index has left -------------------------------------------------------------------
#
# A slot becomes free only when the deletion of its row is committed, so that a crash never finds an old row over new
# bytes:
#
#     leave the index ─► delete the row ─► (committed) ─► slot free ─► write new bytes ─► insert a row
#
# The row of a block is deleted before that of the block before it, so that a crash never leaves a row without the rows
# before it. A dropped block that is still read, or whose child is still being written, keeps its slot but not its row.

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
        """How many slots will be free soon, unless the deletion of their row fails; fewer while some have failed."""
        return max(0, len(self._leaving) - len(self._undeleted))

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
        self._catalog.delete([place_of_slot(slot) for slot in slots], done)

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


EVICT_AT_ONCE = 64
"""Slots given up in one go of the event loop."""
FREE_AHEAD_BYTES = 64 << 20
"""Kept free, or being freed, in a directory that is full and written to: a slot that is given up is free some
milliseconds later, and writes should not wait for that."""
SCAN_AT_ONCE = 4096
"""Entries checked in one go while a segment is emptied."""
ASIDE_S = 600.0
"""How long a slot that could not be written to is not used: another one may be good."""


log = logging.getLogger("tiercache.daemon")

GROW_AGAIN_S = 30.0
"""Retry interval after a segment could not be made."""


class NewSegments:
    """Event loop only; never blocks. `grown(segment)` is called when there is one more.

    `known`: segments that the catalog names, whose numbers are not used again.
    """

    def __init__(
        self,
        directory: DirectoryFiles,
        queue: BlockQueue,
        health: WriteHealth,
        known: Iterable[int],
        grown: Callable[[int], None],
        clock_s: Callable[[], float],
    ) -> None:
        self.trouble = ""
        """Why no further segment could be made last time."""
        self.under_way = False
        self._directory = directory
        self._queue = queue
        self._health = health
        self._grown = grown
        self._clock_s = clock_s
        self._numbers = {*known, *directory.segments}
        self._again_s = 0.0
        if directory.max_segments == 0:
            self.trouble = "its part of nvme_size holds no segment: make that larger, or empty the directory"

    @property
    def is_possible(self) -> bool:
        """True if one more may be made now, as far as known."""
        room = self._directory.segment_count < self._directory.max_segments
        return room and self._clock_s() >= self._again_s

    def begin(self) -> None:
        """Ask for one more segment, while none is under way; it is there some milliseconds later."""
        segment = max(self._numbers, default=0) + 1
        op = TaskOp(done=lambda op: self._made(segment, op), call=lambda: self._directory.create_segment(segment))
        self.under_way = self._queue.submit(op, DiskPriority.WRITE)

    def _made(self, segment: int, op: TaskOp) -> None:
        self.under_way = False
        if op.outcome is DiskOutcome.OK:
            self._numbers.add(segment)
            self.trouble = ""
            self._grown(segment)
        elif op.outcome is DiskOutcome.IO_ERROR:
            if op.errno == errno.EEXIST:
                self._numbers.add(segment)  # a foreign file: try the next number
            problem = f"no further segment could be made: {os.strerror(op.errno)}"
            if not self._directory.segment_count:
                self._health.failed(problem)
                return
            # In the existing segments blocks can still be replaced.
            if not self.trouble:
                log.warning("%s: %s; blocks are replaced meanwhile", self._directory.path, problem)
            self.trouble = problem
            self._again_s = self._clock_s() + GROW_AGAIN_S

    def write_worked(self) -> None:
        """A write has worked: if the disk has just come back, segments can be made again too."""
        if self._health.worked():
            self.trouble, self._again_s = "", 0.0


class Slots:
    """Event loop only; never blocks. `soon()` is called when a slot has become free."""

    def __init__(
        self,
        directory: DirectoryFiles,
        catalog: CatalogRows,
        queue: BlockQueue,
        state: CatalogState,
        space: Space,
        index: Index,
        soon: Callable[[], None],
        clock_s: Callable[[], float],
    ) -> None:
        self.allocator = Allocator()
        self._clock_s = clock_s
        self.health = WriteHealth(str(directory.path), self._clock_s)
        self.evicted_blocks = 0
        size_bytes = directory.segment_bytes
        self.slot_bytes = {number: size for number, size in state.segments.items() if 0 < size <= size_bytes}
        """By segment."""
        self.owned: dict[int, bytearray] = {}
        """For segments of an earlier life, until `settle`: by segment, which slots have an owner."""
        for segment in set(self.slot_bytes) & set(directory.segments):
            self.owned[segment] = bytearray(size_bytes // self.slot_bytes[segment])
        self._directory = directory
        self._catalog = catalog
        self._index = index
        self._make = partial(space.policies.hinted, below=True)
        policies = space.policies
        self.tails = ChainEnds(index, space.prompts, policies.clock_s, policies.stored_bytes, policies.window_bytes)
        self._policies: dict[int, dict[str, Policy]] = {}  # by slot size, by account
        self._soon = soon
        self._short: set[int] = set()  # sizes whose slots have run short since `work` evicted for them
        self.left = LeftSlots(catalog, self._free)
        index.on_held = self.left.hold
        self._aside = OrderedDict[int, float]()  # slots that could not be written to, and until when
        self._emptying: tuple[int, int] | None = None  # a segment being emptied, next entry to look at
        self.growth = NewSegments(directory, queue, self.health, state.segments, self._grown, self._clock_s)

    def policy(self, frame_bytes: int, account: str = UNLIMITED) -> Policy:
        """The eviction policy for that size and account."""
        by_account = self._policies.setdefault(frame_bytes, {})
        if account not in by_account:
            by_account[account] = self._make(self._index)
        return by_account[account]

    def _of_size(self, frame_bytes: int) -> list[Policy]:
        return list(self._policies.get(frame_bytes, {}).values())

    # --- taking ----------------------------------------------------------------------------------

    def least_worth(self, frame_bytes: int) -> float:
        """What a block of that size must be worth: as much as the next victim, or anything while there is room."""
        if not self._is_short(self.allocator.size_class(frame_bytes)):
            return -math.inf
        policy = coldest_of(self._of_size(frame_bytes))
        return -math.inf if policy is None else policy.worth(policy.victim())

    def has_room(self, frame_bytes: int) -> bool:
        """True if there is room beyond what is kept free in a full directory."""
        if self.growth.under_way or self.growth.is_possible or self.allocator.unassigned:
            return True
        size_class = self.allocator.size_class(frame_bytes)
        return size_class.free > 2 * self._ahead(size_class)

    def spare(self, frame_bytes: int) -> int:
        """How many slots of that size can be taken before they run short; see `least_worth`."""
        size_class = self.allocator.size_class(frame_bytes)
        return 0 if self._is_short(size_class) else max(1, size_class.free - self._ahead(size_class))

    def take(self, frame_bytes: int, keep: int) -> int:
        """`take_many`, of one slot: it, or NO_FRAME."""
        slots = self.take_many(frame_bytes, 1, keep)
        return slots[0] if slots else NO_FRAME

    def take_many(self, frame_bytes: int, count: int, keep: int) -> list[int]:
        """Free slots, at most `count`, neighbours if possible; none while room is being made: ask again soon.

        Does not evict ancestors of `keep`, an entry or NO_ENTRY. A caller that gets slots keeps it pinned from here on
        as long as it is needed: room for others is made later, by `work`.
        """
        size_class = self.allocator.size_class(frame_bytes)
        slots = self.allocator.take_many(size_class, count)
        if not slots:
            self._make_room_keeping(size_class, keep)
            return slots
        if self._is_short(size_class):
            self._short.add(frame_bytes)
            self._soon()
        for segment in {slot >> REGION_SHIFT for slot in slots}:
            if self.slot_bytes.get(segment) != frame_bytes:
                self.slot_bytes[segment] = frame_bytes
                self._catalog.set_segment(segment, frame_bytes)
        return slots

    def _make_room_keeping(self, size_class: SizeClass, keep: int) -> None:
        """Make room now for a block that waits for it, but not of its ancestors: `keep` is its parent, if any."""
        if keep != NO_ENTRY:
            self._index.pin(keep)
        self._make_room(size_class)
        if keep != NO_ENTRY:
            self._index.unpin(keep)
            self._give_up_keeping(size_class.frame_bytes, keep)

    def _give_up_keeping(self, frame_bytes: int, keep: int) -> None:
        """A chain longer than all slots of its size gets no more of them: stop protecting it."""
        free = self.allocator.size_class(frame_bytes).free
        on_its_way = free or self.left or self._emptying or self.growth.under_way or self.growth.is_possible
        if not on_its_way and any(policy.victim() == keep for policy in self._of_size(frame_bytes)):
            self._index.evict(keep)
            self.evicted_blocks += 1

    def _is_short(self, size_class: SizeClass) -> bool:
        """True if slots of a size run out: few are left, and there is no segment to divide."""
        few = size_class.free * size_class.frame_bytes < FREE_AHEAD_BYTES and not self.allocator.unassigned
        return few and size_class.free < self._ahead(size_class)

    def _ahead(self, size_class: SizeClass) -> int:
        """How many slots should be free, or being freed; fewer in a small directory."""
        return max(1, min(FREE_AHEAD_BYTES // size_class.frame_bytes, size_class.frames // 8))

    def _make_room(self, size_class: SizeClass, ahead: bool = False) -> None:
        """Have a segment made; where there can be no more, evict, or empty a segment of another size.

        `ahead`: no block waits for it, so the ends of chains that a writer is about to continue stay.
        """
        if self.growth.under_way:
            return
        if self.growth.is_possible:
            self.growth.begin()
            return
        most = self._ahead(size_class) - size_class.free - self.left.being_freed
        if most <= 0:
            return  # enough slots are being freed already
        accounts = self._of_size(size_class.frame_bytes)
        self.tails.lapse()
        self._consider_emptying(size_class, accounts)
        with self.left.deleted_together():
            self._evict(accounts, min(most, EVICT_AT_ONCE), ahead)

    def _make_room_ahead(self) -> None:
        """A slice, for sizes that are written and have run short."""
        if self._catalog.full:
            return  # each eviction is a row to delete
        while self._short:
            size_class = self.allocator.size_class(self._short.pop())
            if self._is_short(size_class):
                self._make_room(size_class, ahead=True)

    def evict_of(self, account: str, size_bytes: int) -> int:
        """Evict the coldest leaves of an account, up to those bytes or `EVICT_AT_ONCE` leaves; returns the bytes."""
        policies = [by_account[account] for by_account in self._policies.values() if account in by_account]
        self.tails.lapse()
        evicted_bytes = 0
        with self.left.deleted_together():
            for _ in range(EVICT_AT_ONCE):
                slot = NO_FRAME if evicted_bytes >= size_bytes else self._evict_one(policies)
                if slot == NO_FRAME:
                    break
                evicted_bytes += self.slot_bytes[slot >> REGION_SHIFT]
        return evicted_bytes

    def _evict(self, policies: list[Policy], count: int, keep_ends: bool) -> None:
        """Evict the coldest leaves of these, `count` of them or all there are."""
        evicted = self._index.evict_coldest(policies, count)
        while policies and evicted < count and not keep_ends and self.tails.give_up():
            evicted += self._index.evict_coldest(policies, count - evicted)
        self.evicted_blocks += evicted

    def _evict_one(self, policies: list[Policy]) -> int:
        """Evict the coldest leaf of these; returns its slot, or NO_FRAME if there is nothing to evict."""
        policy = coldest_of(policies)
        if policy is None and policies and self.tails.give_up():
            policy = coldest_of(policies)
        if policy is None:
            return NO_FRAME
        victim = policy.victim()
        slot = self._index.frame[victim]
        self._index.evict(victim)
        self.evicted_blocks += 1
        return slot

    # A size without slots, or whose coldest block is much younger than another size's, gets a segment of that size. The
    # segment hands out no more slots, its blocks are dropped in slices, and once the last slot is back it can be
    # divided again.

    def _consider_emptying(self, size_class: SizeClass, accounts: list[Policy]) -> None:
        others = [frame_bytes for frame_bytes in self._policies if frame_bytes != size_class.frame_bytes]
        if self._emptying is not None or not others:
            return
        policy = coldest_of(accounts)
        own = policy.coldest_stamp() if policy is not None else None
        coldest: tuple[int, int] | None = None  # stamp, victim
        for frame_bytes in others:
            other = coldest_of(self._of_size(frame_bytes))
            stamp = None if other is None else other.coldest_stamp()
            if other is None or stamp is None:
                continue
            if own is not None and own - stamp < self._directory.segment_bytes // frame_bytes:
                continue
            if coldest is None or stamp < coldest[0]:
                coldest = stamp, other.victim()
        if coldest is not None:
            segment = self._index.frame[coldest[1]] >> REGION_SHIFT
            self.allocator.empty_region(segment)
            self._emptying = segment, 0

    def _empty_slice(self) -> None:
        """Drop blocks of the segment being emptied, round and round until the last slot is back."""
        if self._emptying is None or self._catalog.full:
            return
        with self.left.deleted_together():
            self._empty_some(*self._emptying)

    def _empty_some(self, segment: int, first: int) -> None:
        if self.allocator.entries_of(segment, emptying=True) is None:
            self._emptying = None
            return
        # Those behind a block go before another one is dropped, which may be the one before it; and so do their rows.
        left = EVICT_AT_ONCE - self._index.unlink_slice(EVICT_AT_ONCE)
        if not left:
            return
        last = min(first + SCAN_AT_ONCE, len(self._index.frame))
        for entry in range(first, last):
            slot = self._index.frame[entry]
            if slot >> REGION_SHIFT == segment and slot != NO_FRAME and self._index.state[entry] == LIVE:
                self._index.drop(entry)
                self.evicted_blocks += 1
                left -= self._index.unlink_slice(left)
                if not left:
                    last = entry + 1
                    break
        self.tails.let_go_detached()
        self._emptying = segment, 0 if last == len(self._index.frame) else last

    def _grown(self, segment: int) -> None:
        self.allocator.add_region(segment, self._directory.segment_bytes)

    # --- giving back -----------------------------------------------------------------------------

    def leave(self, slot: int) -> None:
        """The index no longer uses the slot: delete its row, then free the slot."""
        self.own(slot, 1)
        self.left.leave(slot)

    def _free(self, slots: list[int]) -> None:
        for slot in slots:
            if not self.own(slot, 0):
                self.allocator.give_back(slot)
        self._soon()

    def put_aside(self, slot: int) -> None:
        """Set aside a slot that could not be written to: it is used again, but not soon."""
        self._aside[slot] = self._clock_s() + ASIDE_S

    def work(self) -> None:
        """Run a slice of deferred work."""
        self._empty_slice()
        self._make_room_ahead()
        while self._aside and self._clock_s() >= next(iter(self._aside.values())):
            self.allocator.give_back(self._aside.popitem(last=False)[0])
        self.left.try_again()

    # --- segments of an earlier life -------------------------------------------------------------

    def own(self, slot: int, owned: int) -> bool:
        """Note whether a slot has an owner; False when the allocator already tracks that itself."""
        slots = self.owned.get(slot >> REGION_SHIFT)
        if slots is None:
            return False
        slots[(slot & OFFSET_MASK) // self.slot_bytes[slot >> REGION_SHIFT]] = owned
        return True

    def is_slot(self, place: int, slot_bytes: int) -> bool:
        """True if a slot of that size can be at a place of an earlier life."""
        offset, slots = slot_of(place) & OFFSET_MASK, self.owned.get(place >> SLOT_BITS, b"")
        return offset % slot_bytes == 0 and offset // slot_bytes < len(slots)

    def refuse(self, place: int) -> None:
        """Delete a row that is not taken in; the slot that it names stays in use until it is gone."""
        slot_bytes = self.slot_bytes.get(place >> SLOT_BITS, 0)
        if slot_bytes and self.is_slot(place, slot_bytes):
            self.leave(slot_of(place))
        else:
            self._catalog.delete([place])

    def settle(self) -> bool:
        """All owners are known: hand one more segment over to the allocator; False when that was the last."""
        size_bytes = self._directory.segment_bytes
        if self.owned:
            segment, owned = self.owned.popitem()
            self.allocator.adopt_region(segment, size_bytes, self.slot_bytes[segment], owned)
            return True
        for segment in set(self._directory.segments) - set(self.slot_bytes):
            self.allocator.add_region(segment, size_bytes)
        return False

    def __contains__(self, slot: object) -> bool:
        """True if a slot in use has no owner: its row is to be deleted, or it could not be written to."""
        return slot in self.left or slot in self._aside
