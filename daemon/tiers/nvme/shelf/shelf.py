"""Shelf: one open NVMe directory as the event loop sees it: which block is in which slot, and whether the disk works.

    Slots      slots: taken, left, free again
    Registry   namespaces and flushes
    Recovery   rows of an earlier life, while they come in

The index is prefix-closed by itself, with slots where DRAM's has frames. Nothing is written here before the last row is
loaded.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, repeat, takewhile
from typing import Any, NamedTuple

from tiercache.daemon.events.events import Block, Events
from tiercache.daemon.ground.slices import Steps, finish
from tiercache.daemon.index.allocator import NO_FRAME, Allocator
from tiercache.daemon.index.check import check_blocks, check_index
from tiercache.daemon.index.entries import Table, span
from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.tiers.dram.space import Namespace, Space
from tiercache.daemon.tiers.forms.cipher import sealed_bytes
from tiercache.daemon.tiers.nvme.catalog.catalog import CatalogState, Done
from tiercache.daemon.tiers.nvme.catalog.rows import ROOT_KEY, RowFields
from tiercache.daemon.tiers.nvme.disk.block_io import ReadOp
from tiercache.daemon.tiers.nvme.disk.health import WriteHealth
from tiercache.protocol.checksums import CHECKSUM_XXH3

from .parts import BlockQueue, CatalogRows, DirectoryFiles
from .recovery import ROWS_AT_ONCE, Recovery
from .registry import Registry
from .slots import EVICT_AT_ONCE, Slots, place_of_slot

log = logging.getLogger("tiercache.daemon")

OFFLINE_AGE_S = 10.0


class StoredBlock(NamedTuple):
    """What is needed to read a block back."""

    entry: int
    slot: int
    stored_length: int
    codec: int
    checksum: int
    kind: int = CHECKSUM_XXH3


@dataclass(slots=True)
class StoredBlocks:
    """`StoredBlock`s of a run, as columns."""

    entries: list[int]
    slots: list[int]
    stored_lengths: list[int]
    codecs: list[int]
    checksums: list[int]
    kinds: list[int]

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, part: slice) -> StoredBlocks:
        """Some of them."""
        columns = self.entries, self.slots, self.stored_lengths, self.codecs, self.checksums, self.kinds
        return StoredBlocks(*(column[part] for column in columns))

    def read_op(
        self, namespace: Namespace, keys: list[bytes], addresses: list[int], done: Callable[[ReadOp], object]
    ) -> ReadOp:
        """The operation that reads these blocks; see `ReadOp`."""
        return ReadOp(
            done=done,
            slots=self.slots,
            addresses=addresses,
            length=namespace.spec.block_bytes,
            keys=keys,
            fingerprint=namespace.fingerprint,
            codecs=self.codecs,
            kinds=self.kinds,
            stored_lengths=self.stored_lengths,
            checksums=self.checksums,
        )


class Forms(NamedTuple):
    """Where the blocks of a run were written to, and in which form: a column each."""

    slots: list[int]
    stored_lengths: list[int]
    codecs: list[int]
    kinds: list[int]
    checksums: list[int]


class Shelf:
    """Event loop only; never blocks. `soon()` asks for a `work` before the next tick; `clock_s`: see `NvmeTier`."""

    def __init__(
        self,
        directory: DirectoryFiles,
        catalog: CatalogRows,
        queue: BlockQueue,
        state: CatalogState,
        registry: Registry,
        space: Space,
        soon: Callable[[], None],
        clock_s: Callable[[], float],
    ) -> None:
        self.directory = directory
        self.catalog = catalog
        self.queue = queue
        self.index = Index(self._slot_left)
        self.registry = registry
        self.slots = Slots(directory, catalog, queue, state, space, self.index, soon, clock_s)
        self.directory_seed = int.from_bytes(directory.superblock.directory_id[:8], "little")
        self.loading = True
        self.retired = False
        """True if its directory has gone: operations still under way are void."""
        self.recovery: Recovery | None = None
        self._has_cut = False  # tails may hang below what was dropped
        self._soon = soon
        self._hints = space.policies.hints
        self.turnover = space.policies.turnover
        self._events: Events | None = None
        self._unrecorded: dict[int, tuple[Namespace, RowFields]] = {}  # by slot: rows that could not be inserted
        self._checksum = array("Q")
        self._stored = array("I")
        self._codec = array("B")
        self._kind = array("B")
        self._sequence = state.next_sequence
        self._key_since = self._adopt_key(state)

    def _adopt_key(self, state: CatalogState) -> int:
        """Note the key that blocks are encrypted with from now on, and the first sequence number with that key."""
        cipher = self.directory.cipher
        if cipher is None or state.key_id == cipher.key_id:
            return state.key_since
        self.catalog.set_key(cipher.key_id, state.next_sequence)
        return state.next_sequence

    @property
    def allocator(self) -> Allocator:
        """The owners of slots."""
        return self.slots.allocator

    @property
    def health(self) -> WriteHealth:
        """True if the disk can be written to."""
        return self.slots.health

    def table(self, namespace: Namespace) -> Table:
        """The namespace's table; at first use it is made and added to the catalog."""
        table = self.index.tables.get(namespace.number)
        if table is not None:
            return table
        self.registry.add(namespace)
        policy = self.slots.policy(self.slot_bytes(namespace), namespace.account_below)
        return self.index.add_table(namespace.number, policy, windowed=namespace.table.windowed)

    def slot_bytes(self, namespace: Namespace) -> int:
        """The size of a namespace's slots: that of its frames, or what encrypted blocks need."""
        frame_bytes = namespace.size_class.frame_bytes
        sealed = self.directory.cipher is not None
        return sealed_bytes(frame_bytes, namespace.spec.block_bytes) if sealed else frame_bytes

    def epoch(self, namespace: Namespace) -> int:
        """The epoch of rows written now; a flush raises it."""
        self.table(namespace)
        return self.registry.epochs[namespace.number]

    # --- finding ---------------------------------------------------------------------------------

    def length(self, namespace: Namespace, keys: bytes, limit: int) -> int:
        """How many of the first `limit` keys of a chain are here, as a leading run."""
        table = self.index.tables.get(namespace.number)
        return 0 if table is None else self.index.prefix_length(table, keys, limit)

    def lookup(self, namespace: Namespace) -> Callable[[bytes], bool] | None:
        """See `Index.lookup`."""
        table = self.index.tables.get(namespace.number)
        return None if table is None else self.index.lookup(table)

    def has(self, namespace: Namespace, key: bytes) -> bool:
        """True if this block is here, or was and is about to be unlinked: no other one can be added."""
        table = self.index.tables.get(namespace.number)
        return table is not None and table.get(key) != NO_ENTRY

    def branches(self, namespace: Namespace, key: bytes) -> int:
        """How many blocks hang directly below this one here."""
        table = self.index.tables.get(namespace.number)
        entry = NO_ENTRY if table is None else table.get(key)
        return 0 if entry == NO_ENTRY else self.index.children[entry]

    def missing(self, namespace: Namespace, keys: Sequence[bytes]) -> list[bytes]:
        """Those of `keys` that are not here; see `has`."""
        table = self.index.tables.get(namespace.number)
        return list(keys) if table is None else table.missing(keys)

    def has_any(self, numbers: Iterable[int], key: bytes) -> bool:
        """True if a block of that key is here, in any of these namespaces."""
        tables = self.index.tables
        return any(number in tables and tables[number].get(key) != NO_ENTRY for number in numbers)

    def find(self, namespace: Namespace, key: bytes) -> StoredBlock | None:
        """Where a block is, if it is here."""
        found = self.find_many(namespace, (key,))
        if not found:
            return None
        [entry], [slot] = found.entries, found.slots
        return StoredBlock(entry, slot, *found.stored_lengths, *found.codecs, *found.checksums, *found.kinds)

    def find_many(self, namespace: Namespace, keys: Sequence[bytes]) -> StoredBlocks:
        """`find` each of them, up to the first that is not here."""
        table, index = self.index.tables.get(namespace.number), self.index
        entries = [] if table is None else table.leading(keys)
        if table is not None and table.unlinking:
            entries = list(takewhile(index.attached, entries))
        its, columns = span(entries), (index.frame, self._stored, self._codec, self._checksum, self._kind)
        if its is not None:
            return StoredBlocks(entries, *(column[its].tolist() for column in columns))
        return StoredBlocks(entries, *([column[entry] for entry in entries] for column in columns))

    # --- changing --------------------------------------------------------------------------------

    def has_room(self, namespace: Namespace) -> bool:
        """True if blocks can be added without evicting others, as far as known while rows are loading."""
        return self.loading or self.slots.has_room(self.slot_bytes(namespace))

    def least_worth(self, namespace: Namespace) -> float:
        """What a block must be worth, not to be worth less than the one that would be evicted for it."""
        return self.slots.least_worth(self.slot_bytes(namespace))

    def take_slot(self, namespace: Namespace, parent: bytes) -> int:
        """A free slot for a block below `parent`, or NO_FRAME while room is being made: ask again soon."""
        slots = self.take_slots(namespace, parent, 1)
        return slots[0] if slots else NO_FRAME

    def take_slots(self, namespace: Namespace, parent: bytes, count: int) -> list[int]:
        """Free slots for a run of at most `count` blocks below `parent`; see `Slots.take_many`."""
        # Room for a child must not be made of its ancestors.
        keep = self.table(namespace).get(parent) if parent else NO_ENTRY
        return self.slots.take_many(self.slot_bytes(namespace), count, keep)

    def tell(self, events: Events) -> None:
        """Publish blocks that come and go from here on."""
        self._events = events
        self.index.on_left = partial(events.left, events.storage)

    def add_run(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        parent: bytes,
        written: Forms,
        said: Sequence[Block | None] | None,
        stored: bool = False,
    ) -> list[int]:
        """A run has been written, each block below the one before it, the first below `parent`; returns entries.

        It is visible now, and durable with the next commit. `said`: what events say of each block; may be None where
        none are published. `stored`: a client has written them, not the daemon.
        """
        table, slots = self.table(namespace), written.slots
        entries = self.index.insert_run(table, keys, table.get(parent) if parent else table.root, slots, stored=stored)
        self._pad_columns()
        checksums, lengths, codecs, kinds = self._checksum, self._stored, self._codec, self._kind
        _, *columns = written
        its = span(entries)
        if its is not None:
            lengths[its], codecs[its] = array("I", written.stored_lengths), array("B", written.codecs)
            kinds[its], checksums[its] = array("B", written.kinds), array("Q", written.checksums)
        else:
            for entry, length, codec, kind, checksum in zip(entries, *columns, strict=True):
                checksums[entry], lengths[entry], codecs[entry], kinds[entry] = checksum, length, codec, kind
        count, number, epoch = len(entries), self.registry.number(namespace), self.registry.epochs[namespace.number]
        rows: list[RowFields] = list(
            zip(
                keys,
                [parent or ROOT_KEY, *keys[:-1]],
                repeat(number, count),
                repeat(epoch, count),
                repeat(namespace.spec.block_bytes, count),
                *columns,
                range(self._sequence + 1, self._sequence + 1 + count),
                strict=True,
            )
        )
        self._sequence += count
        self._insert_rows(namespace, slots, rows)
        if self._events is not None:
            for key, block in zip(keys, said or [None] * len(keys), strict=True):
                self._events.arrived(self._events.storage, namespace.number, key, block)
        return entries

    def _insert_rows(self, namespace: Namespace, slots: list[int], rows: list[RowFields]) -> None:
        def inserted(ok: bool) -> None:
            if not ok:
                refused = zip(slots, rows, strict=True)
                here = ((slot, row) for slot, row in refused if self._is_in(slot, namespace, row[0]))
                self._unrecorded.update((slot, (namespace, row)) for slot, row in here)

        self.catalog.insert([place_of_slot(slot) for slot in slots], rows, inserted)

    def enter_many(
        self,
        table: Table,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        slots: Sequence[int],
        admit: Callable[[int, int, int], bool] | None,
        stored: Sequence[Sequence[int]],
    ) -> list[int]:
        """Make rows that are already recorded visible; see `Index.insert_many`.

        `stored`: their checksums, stored lengths, codecs and kinds.
        """
        self._pad_columns()
        entries = self.index.insert_many(table, keys, parents, slots, ROOT_KEY, admit)
        taken = [entry >= 0 for entry in entries]
        columns = self._checksum, self._stored, self._codec, self._kind
        for column, values in zip(columns, stored, strict=True):
            column.extend(values if all(taken) else compress(values, taken))
        return entries

    def _pad_columns(self) -> None:
        """Make our columns as long as the index's."""
        missing = len(self.index.key) - len(self._checksum)
        if missing > 0:
            for column in (self._checksum, self._stored, self._codec, self._kind):
                column.frombytes(bytes(column.itemsize * missing))

    def drop_damaged(self, namespace: Namespace, key: bytes) -> None:
        """The disk returned other bytes than were written: drop the block and what follows it."""
        log.error(
            "nvme directory %s: block %s fails its checksum and is dropped: see dmesg and smartctl",
            self.directory.path,
            key.hex(),
        )
        self.drop(namespace, key)

    def drop(self, namespace: Namespace, key: bytes) -> None:
        """Drop a block that cannot be read any more, and what follows it."""
        table = self.index.tables.get(namespace.number)
        entry = NO_ENTRY if table is None else table.get(key)
        if entry != NO_ENTRY:
            self.index.drop(entry)
            self._has_cut = True
            self._soon()

    def flush(self, namespace: Namespace, key: bytes, done: Done) -> int:
        """Drop a namespace's blocks, or one and what follows; `done(ok)` when that is durable.

        Where too many flushes of single blocks are remembered already, all of the namespace is dropped.
        """
        if not self.registry.knows(namespace):  # nothing of it is here, nor being written
            done(True)
            return 0
        table = self.table(namespace)
        if not key or self.registry.is_crowded(namespace):
            self.registry.flush(namespace, done)
            dropped = self.index.drop_table(table)
            self._has_cut = True
            self._soon()
            return dropped
        before = table.blocks
        self.registry.flush_key(namespace, key, done)
        with self.slots.left.deleted_together():
            self.drop(namespace, key)
            self.index.unlink_slice(EVICT_AT_ONCE)
        return before - table.blocks

    def drop_unserved(self, done: Done) -> None:
        """Drop what the directory has of namespaces that cannot be served; `done(ok)` when that is durable."""
        self.registry.drop_unserved(done)

    def _slot_left(self, slot: int) -> None:
        if self._unrecorded:
            self._unrecorded.pop(slot, None)  # else it would take the place of the row of the slot's next block
        self.slots.leave(slot)

    # --- what was put off ------------------------------------------------------------------------

    def start_loading(self) -> None:
        """Start reading the catalog's rows; `work` takes them in."""
        self.recovery = Recovery(self, self.catalog.load(self._soon, ROWS_AT_ONCE), self._key_since)

    def recovered(self, complete: bool, numbers: Container[int]) -> None:
        """All rows are in; `complete` if all of them could be read. `numbers`: namespaces that had some."""
        self.loading = False
        self.registry.loaded(complete)
        if complete:
            self.registry.forget(keep=self.index.tables, with_rows=numbers)

    def work(self) -> bool:
        """Run a slice of unlinking, loading and the like; True while there is more to do at once."""
        self.slots.work()
        self._record_again()
        if self._has_cut:
            self._has_cut = False
            self.slots.tails.let_go_detached()
        if self.catalog.full:
            return False  # what follows requests deletions of rows, which wait for the disk
        self._hints.expire(self.index, self.slots.tails)
        with self.slots.left.deleted_together():
            more = self.index.unlink_slice(EVICT_AT_ONCE) == EVICT_AT_ONCE
        if not self.index.is_unlinking:  # the deletion of all rows that were dropped is posted
            more = self.registry.bury() or more
        if self.recovery is not None and not self.recovery.over:
            return self.recovery.work() or more
        return more

    def _record_again(self) -> None:
        if self.catalog.error:
            return
        for _ in range(min(len(self._unrecorded), ROWS_AT_ONCE)):
            slot, (namespace, row) = self._unrecorded.popitem()
            if self._is_in(slot, namespace, row[0]):  # else it was dropped meanwhile
                self._insert_rows(namespace, [slot], [row])

    def _is_in(self, slot: int, namespace: Namespace, key: bytes) -> bool:
        stored = self.find(namespace, key)
        return stored is not None and stored.slot == slot

    # --- what is not well ------------------------------------------------------------------------

    @property
    def offline(self) -> bool:
        """True if the disk hangs: no request goes to it until its oldest I/O has come back."""
        return self.retired or self.queue.oldest_age_s() > OFFLINE_AGE_S

    @property
    def _catalog_hangs(self) -> bool:
        """True if rows wait for the disk while blocks, perhaps, do not: blocks that are there can be read."""
        return self.catalog.age_s() > OFFLINE_AGE_S

    @property
    def works(self) -> bool:
        """True if the disk is in order, as far as known."""
        return not (self.offline or self._catalog_hangs or self.catalog.error) and self.health.may_write

    @property
    def may_write(self) -> bool:
        """True if a write begun now may succeed. If not, nothing is evicted for one either."""
        return not self.loading and not self.catalog.full and self.works

    def reasons(self) -> list[str]:
        """What is not well, for people."""
        found = [self.directory.trouble, self.health.reason, self.slots.growth.trouble, self.catalog.error]
        if self.offline:
            found.append(f"an operation has been under way for {self.queue.oldest_age_s():.0f} s")
        elif self._catalog_hangs:
            found.append(f"its index has waited for the disk for {self.catalog.age_s():.0f} s: nothing is written")
        return [f"nvme directory {self.directory.path}: {reason}" for reason in found if reason]

    def stats(self) -> dict[str, Any]:
        """Everything known of this directory."""
        return {
            "path": str(self.directory.path),
            "state": "loading" if self.loading else "offline" if self.offline else "ok",
            "direct": self.directory.direct,
            "worker_pid": self.directory.worker_pid,
            "worker_starts": self.directory.worker_starts,
            "blocks": sum(table.blocks for table in self.index.tables.values()),
            "used_bytes": self.allocator.used_bytes,
            "capacity_bytes": self.directory.max_segments * self.directory.segment_bytes,
            "segments": self.directory.segment_count,
            "kept_bytes": self.directory.kept_bytes,
            "database_bytes": self.catalog.bytes_on_disk(),
            "database_queue": self.catalog.pending,
            "database_written_bytes": self.catalog.written_bytes,
            "loaded_rows": self.recovery.loaded_rows if self.recovery is not None else 0,
            "orphan_rows": self.recovery.orphan_rows if self.recovery is not None else 0,
            "other_key_rows": self.recovery.other_key_rows if self.recovery is not None else 0,
            "lost_slots": self.slots.left.lost,
            "evicted_blocks": self.slots.evicted_blocks,
            "writing": self.health.reason or "on",
            "write_failures": self.health.failures,
            **self.queue.stats(),
        }

    def check_integrity(self, written: list[int]) -> list[str]:
        """`check`, all of it at once."""
        return finish(self.check(lambda: written))

    def check(self, written: Callable[[], list[int]]) -> Steps[list[str]]:
        """Where index, slots and counts disagree; `written()` are the slots of writes under way. O(entries).

        While rows are loading slots have no owner yet, and only the index is checked.
        """
        if self.loading:
            findings = yield from check_index(self.index)
        else:
            # A list as the owner tells each of them from all others.
            findings = yield from check_blocks(
                self.index, self.allocator, lambda: [[(slot, [slot]) for slot in written()]], self.slots
            )
        return [f"nvme directory {self.directory.path}: {finding}" for finding in findings]
