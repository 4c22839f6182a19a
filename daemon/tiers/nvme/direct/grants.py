"""Grants: slots that clients write themselves, under a write lease; stores that bypass DRAM.

    reserve ─► how many keys are here, then a run of free slots, in no index and without a row
    write      from the client's device into the slots
    commit  ─► the leading blocks that are complete, with their checksums: in the index, visible
    abort   ─► none of them

A run begins below a block that is here, so NVMe stays prefix-closed by itself. A branch may go to another directory
than its head (see `placement`): then the client, which has all blocks of the head, writes them there too.

A slot granted to a client gets no other owner before that client says that its writes have ended (commit, or abort with
that word) or its process has exited; if the lease ends earlier the slot is in quarantine. Writes that outlive the
daemon, or a directory that was away in the meantime, are the exception: nothing is known of them then, and a block that
they spoil fails its checksum.

The checksum is the client's own word. Every reader of the block computes the same sum over what is on the disk, so a
wrong one costs a miss; and a client that may open the segment files could write anything there anyway. Such clients
trust each other as those that map the arena do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from tiercache.daemon.events.events import Named
from tiercache.daemon.ground.counters import Counters
from tiercache.daemon.index.allocator import NO_FRAME
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.tiers.dram.below import Granted
from tiercache.daemon.tiers.dram.leases import KeepsStores, Owner, StoreLease
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.dram.store_leases import StoreLeases
from tiercache.daemon.tiers.dram.unfinished import Unfinished
from tiercache.daemon.tiers.forms.codecs import RAW
from tiercache.daemon.tiers.nvme.disk.disk import PAGE_BYTES
from tiercache.daemon.tiers.nvme.moves.budget import WriteBudget
from tiercache.daemon.tiers.nvme.moves.fairness import Fairness, Room
from tiercache.daemon.tiers.nvme.moves.placement import ShelfPlacement
from tiercache.daemon.tiers.nvme.shelf.shelf import Forms, Shelf
from tiercache.protocol.checksums import CHECKSUM_LANES
from tiercache.protocol.messages import KEY_BYTES, OFFSET_MASK, REGION_SHIFT, CommitState, Extent

_VISIBLE, _DROPPED = CommitState.VISIBLE, CommitState.DROPPED


class Grant(StoreLease):
    """Slots granted to one writer: block `i` of the run is `keys[i]`, at `slots[i]` while that is the writer's."""

    __slots__ = ("copies", "epoch", "first", "keys", "namespace", "parent", "pin", "shelf", "slots")

    def __init__(
        self,
        kept_by: KeepsStores,
        owner: Owner,
        started_s: float,
        ttl_s: float,
        shelf: Shelf,
        namespace: Namespace,
        parent: bytes,
        pin: int,
        keys: list[bytes],
        slots: list[int],
        first: int,
    ) -> None:
        super().__init__(kept_by, owner, started_s, ttl_s, namespace.spec.frame_bytes)
        self.shelf = shelf
        self.namespace = namespace
        self.epoch = shelf.epoch(namespace)
        self.parent = parent
        self.pin = pin  # the parent's entry: keeps room for the run from being made of its ancestors
        self.keys = keys
        self.slots = slots
        self.copies = 0  # blocks at its beginning that another directory has
        self.first = first  # position in the request, from which on events are named

    @property
    def flushed(self) -> bool:
        """True if anything of the namespace was flushed since."""
        return self.epoch != self.shelf.epoch(self.namespace)


class Grants(StoreLeases[Grant]):
    """All slots that clients write to. Event loop only; never blocks.

    Args:
        may_write: whether chains may begin or continue now, for all directories.
        limit_bytes: of one client's slots, quarantine included. It can always get one slot.
    """

    def __init__(
        self,
        placement: ShelfPlacement,
        budget: WriteBudget,
        fairness: Fairness,
        may_write: Callable[[], bool],
        counters: Counters,
        clock_s: Callable[[], float],
        limit_bytes: int,
    ) -> None:
        super().__init__(Unfinished(limit_bytes), counters, clock_s)
        self.stored_blocks = 0
        self.stored_bytes = 0
        self._placement = placement
        self._budget = budget
        self._fairness = fairness
        self._may_write = may_write
        self._pending: dict[tuple[int, bytes], Grant] = {}  # writer of a block, by namespace number and key

    # --- reserve ---------------------------------------------------------------------------------

    def reserve(
        self, owner: Owner, namespace: Namespace, parent: bytes, keys: bytes, ttl_s: float, named: Named | None = None
    ) -> Granted:
        """Slots for a run of `keys` below the block `parent` (empty: the root), past those that are here.

        None where the parent is not here, or nothing may be written: the client can use DRAM for that.
        """
        shelf, copies = self._shelf_of(namespace, parent, keys)
        if shelf is None or not self._takes(shelf, namespace):
            return Granted()
        entry, present = _present(shelf, namespace, parent, keys)
        rest = [keys[at : at + KEY_BYTES] for at in range(present * KEY_BYTES, len(keys), KEY_BYTES)]
        if entry == NO_ENTRY or not rest:
            return Granted(present)
        before = keys[(present - 1) * KEY_BYTES : present * KEY_BYTES] if present else parent
        shelf.index.pin(entry)  # before anything is evicted
        slots, soon = self._take_slots(owner, shelf, namespace, before, rest)
        if not slots:
            shelf.index.unpin(entry)
            return Granted(present, soon=soon)
        mine = rest[: len(slots)]
        grant = Grant(self, owner, self._clock_s(), ttl_s, shelf, namespace, before, entry, mine, slots, present)
        grant.copies = copies
        grant.named = named
        self._begin(grant, len(slots))
        shelf.slots.tails.went_on(owner.instance, entry)
        self._pending.update(((namespace.number, key), grant) for key in mine)
        extents = [_place(slot, namespace.spec.block_bytes) for slot in slots]
        return Granted(present, grant.lease_id, str(shelf.directory.path), extents)

    def _shelf_of(self, namespace: Namespace, parent: bytes, keys: bytes) -> tuple[Shelf | None, int]:
        """The shelf that the run belongs on, and how many blocks of it are copies of a head that is elsewhere."""
        spec, placement = namespace.spec, self._placement
        # For windows in several directories `present` and one place for the rest do not suffice: they go through DRAM.
        if namespace.table.windowed or spec.dram_only or spec.block_bytes % PAGE_BYTES or not self._may_write():
            return None, 0
        shelves = placement.holders(namespace, parent) if parent else placement.shelves
        present = {shelf: _present(shelf, namespace, parent, keys)[1] for shelf in shelves}
        if not present:
            return None, 0
        longest = max(present.values())
        holders = [shelf for shelf in shelves if present[shelf] == longest]
        following = keys[longest * KEY_BYTES : (longest + 1) * KEY_BYTES]
        if not following:
            return next((shelf for shelf in holders if self._takes(shelf, namespace)), holders[0]), 0
        before = keys[(longest - 1) * KEY_BYTES : longest * KEY_BYTES] if longest else parent
        branch = placement.branch(namespace, following, before, holders) if before else None
        if branch is not None and branch.shelf in present:
            copies = longest - present[branch.shelf]
            if copies <= branch.most_copied:
                return branch.shelf, copies
        return placement.home(namespace, following, holders), 0

    @staticmethod
    def _takes(shelf: Shelf, namespace: Namespace) -> bool:
        """True if a client can write to a shelf now."""
        if not shelf.may_write or namespace.spec.frame_bytes > shelf.directory.segment_bytes:
            return False
        if shelf.directory.cipher is not None:
            return False  # only the daemon encrypts
        # Our own reads and writes must not go through the page cache while clients bypass it.
        return shelf.directory.direct and str(shelf.directory.path).isprintable()

    def _take_slots(
        self, owner: Owner, shelf: Shelf, namespace: Namespace, parent: bytes, keys: Iterable[bytes]
    ) -> tuple[list[int], bool]:
        """Free slots for the leading ones of `keys`; and if there is none, whether there may be one soon."""
        size_bytes = namespace.spec.frame_bytes
        most = self.unfinished.most_places(owner, size_bytes)
        table, slots = shelf.table(namespace), list[int]()
        self._fairness.look_again()
        for key in keys:
            other = self._pending.get((namespace.number, key))
            if other is not None and not other.flushed:
                return slots, True
            if table.get(key) != NO_ENTRY or len(slots) == most or not self._budget.admits(size_bytes, False):
                return slots, False
            room = self._fairness.room(shelf, namespace, parent)
            slot = shelf.take_slot(namespace, parent) if room is Room.HERE else NO_FRAME
            if slot == NO_FRAME:
                return slots, room is not Room.NONE
            self._fairness.took(shelf, namespace)
            self._budget.charge(size_bytes)
            slots.append(slot)
        return slots, False

    # --- commit ----------------------------------------------------------------------------------

    def commit(self, owner: Owner, lease_id: int, checksums: Sequence[int]) -> list[CommitState]:
        """The writes of a grant have ended, and its leading blocks are complete, with these checksums.

        Ends the lease; of one that is over nothing is kept.
        """
        grant = self._find(owner, lease_id)
        if grant is None:
            return [_DROPPED] * len(checksums)
        visible = 0 if grant.over or grant.shelf.retired else self._publish(grant, checksums)
        self.give_up(grant, finished=True)  # what was not kept is free
        return [_VISIBLE] * visible + [_DROPPED] * (len(checksums) - visible)

    def _publish(self, grant: Grant, checksums: Sequence[int]) -> int:
        """Make blocks visible, parents first, as far as nothing was lost meanwhile; returns how many are."""
        shelf, namespace, parent = grant.shelf, grant.namespace, grant.parent
        turnover = shelf.turnover
        table, length = shelf.table(namespace), namespace.spec.block_bytes
        visible, left = 0, list[int]()
        places = enumerate(zip(grant.keys, grant.slots, checksums, strict=False), grant.first)
        for place, (key, slot, checksum) in places:
            before = table.get(parent) if parent else table.root
            if grant.flushed or before == NO_ENTRY or not shelf.index.attached(before):
                break
            if table.get(key) == NO_ENTRY:
                written = Forms([slot], [length], [RAW], [CHECKSUM_LANES], [checksum])
                turnover.comes(namespace.size_class.frame_bytes, stored=True)
                shelf.add_run(namespace, [key], parent, written, [grant.named and grant.named(place)], stored=True)
                self.stored_blocks += 1
                self.stored_bytes += length
                self._placement.copies.written_bytes += grant.frame_bytes
            else:
                left.append(slot)  # it was also written from DRAM
            parent, visible = key, visible + 1
        copied = min(grant.copies, visible - len(left))
        self._placement.copies.copied(copied, copied * grant.frame_bytes)
        if visible and (end := table.get(parent)) != NO_ENTRY and not shelf.index.children[end]:
            shelf.slots.tails.stored(grant.owner.instance, end)
        namespace.use.pending_below_blocks -= visible - len(left)
        self.unfinished.count(grant, len(left) - visible)
        grant.slots = left + grant.slots[visible:]
        return visible

    # --- the ends of leases ----------------------------------------------------------------------

    def _close(self, grant: Grant) -> None:
        grant.named = None
        grant.shelf.index.unpin(grant.pin)
        for key in grant.keys:
            if self._pending.get((grant.namespace.number, key)) is grant:
                del self._pending[grant.namespace.number, key]

    def _free(self, grant: Grant) -> None:
        self.unfinished.count(grant, -len(grant.slots))
        grant.namespace.use.pending_below_blocks -= len(grant.slots)
        for slot in grant.slots:
            grant.shelf.allocator.give_back(slot)
        grant.slots = []

    # --- what is held ----------------------------------------------------------------------------

    def slots_of(self, shelf: Shelf) -> list[int]:
        """Slots of a directory that are granted to clients."""
        return [slot for grant in self._all() if grant.shelf is shelf for slot in grant.slots]

    def pending(self) -> Counter[int]:
        """Number of slots granted to clients, by namespace number."""
        counts = Counter[int]()
        for grant in self._all():
            counts[grant.namespace.number] += len(grant.slots)
        return counts

    def stats(self) -> dict[str, int]:
        """What `stats` shows of direct stores."""
        return {
            "direct_stored_blocks": self.stored_blocks,
            "direct_stored_bytes": self.stored_bytes,
            "direct_write_leases": len(self.leases),
            "direct_quarantined_bytes": self.unfinished.quarantined_bytes,
        }


def _place(slot: int, length: int) -> Extent:
    return Extent(slot >> REGION_SHIFT, 0, CHECKSUM_LANES, RAW, slot & OFFSET_MASK, length, length, 0)


def _present(shelf: Shelf, namespace: Namespace, parent: bytes, keys: bytes) -> tuple[int, int]:
    """The last entry of the run that is here below `parent`, and the run's length; NO_ENTRY without the parent."""
    index, table = shelf.index, shelf.table(namespace)
    entry, present = (table.get(parent) if parent else table.root), 0
    if entry == NO_ENTRY or not index.attached(entry):
        return NO_ENTRY, 0
    for at in range(0, len(keys), KEY_BYTES):
        found = table.get(keys[at : at + KEY_BYTES])
        if found == NO_ENTRY or index.parent[found] != entry:
            break
        entry, present = found, present + 1
    if present:
        index.touch(entry)
    return entry, present
