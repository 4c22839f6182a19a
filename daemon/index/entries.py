"""Entries of an index: rows in columns of plain integers, linked to their parents, kept by pins.

An entry is a row plus one dict item, about 200 bytes; objects would cost twice that and make every full garbage
collection a stall. The dict of a namespace is split in shards, because growing one dict of a million items blocks the
event loop for 66 ms.

Entry states:

    FREE ─insert→ LIVE ─unlink→ DEAD ─(no pin, no child)→ FREE

DEAD entries cannot be found any more; a holder of a pin still keeps their frame, but not those of the ancestors.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from .allocator import NO_FRAME
from .policy import MOVED, NO_ENTRY, Columns, Policy, Touch

FREE, LIVE, DEAD = 0, 1, 2
SHARDS = 64
_GROW_ENTRIES = 4096


def span(entries: Sequence[int]) -> slice | None:
    """Entries as a slice of a column, where each follows the one before it, as those of a run nearly always do."""
    if not entries:
        return None
    first, end = entries[0], entries[0] + len(entries)
    return slice(first, end) if entries[-1] == end - 1 and entries == list(range(first, end)) else None


class Table:
    """The blocks of one namespace."""

    __slots__ = ("blocks", "number", "policy", "root", "shards", "unlinking", "windowed")

    def __init__(self, number: int, policy: Policy, windowed: bool) -> None:
        self.number = number
        self.policy = policy
        self.windowed = windowed
        self.root = NO_ENTRY
        self.shards: list[dict[bytes, int]] = [{} for _ in range(SHARDS)]
        self.blocks = 0
        self.unlinking = 0  # dead entries that still have children to unlink

    def get(self, key: bytes) -> int:
        """The live entry of `key`, or NO_ENTRY. While `unlinking`, it may be about to be unlinked."""
        return self.shards[key[0] & (SHARDS - 1)].get(key, NO_ENTRY)

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of `keys` that `get` does not find."""
        shards = self.shards
        return [key for key in keys if key not in shards[key[0] & (SHARDS - 1)]]

    def leading(self, keys: Sequence[bytes]) -> list[int]:
        """The live entries of `keys`, up to the first that is not here."""
        shards = self.shards
        found = [shards[key[0] & (SHARDS - 1)].get(key, NO_ENTRY) for key in keys]
        return found[: found.index(NO_ENTRY)] if NO_ENTRY in found else found

    def get_many(self, keys: Iterable[bytes]) -> list[int]:
        """The live entries of those of `keys` that are here."""
        shards = self.shards
        found = [shards[key[0] & (SHARDS - 1)].get(key, NO_ENTRY) for key in keys]
        return [entry for entry in found if entry != NO_ENTRY] if NO_ENTRY in found else found


class LinkedEntries:
    """All entries of one tier, and the tables that they are in. Single-threaded; never blocks.

    `release_frame` is called with the frame of every entry that becomes FREE.
    """

    def __init__(self, release_frame: Callable[[int], None]) -> None:
        self._release_frame = release_frame
        self.on_left: Callable[[int, bytes], None] | None = None
        """Called for each block that can no longer be found, with its table's number and its key."""
        self.on_evicted: Callable[[int], None] | None = None
        """Called with each entry that is about to be evicted, while its frame is still its own."""
        self.on_held: Callable[[int], None] | None = None
        """Called with the frame of each dropped block whose children are gone and whose pins still keep its frame; its
        ancestors become FREE before it does."""
        self.has_cut = False
        """True if a pinned entry was unlinked; holders of pins check this flag and clear it."""
        self.drops = 0
        """How many drops there were: while this number is unchanged, what was attached still is."""
        self.columns = Columns()
        self.tables: dict[int, Table] = {}
        self.key: list[bytes] = []
        self.parent = array("i")
        self.children = array("i")
        self.first_child = array("i")
        self.next_sibling = array("i")
        self.prev_sibling = array("i")
        self.pins = array("i")
        self.frame = array("q")
        self.table = array("H")
        self.state = array("B")
        self.moved: bytearray | None = None
        """While pins are being counted: 1 for each entry whose holders have changed since the count began."""
        self._free = array("i")
        self.walked_from: list[int] = []
        """Entries pinned by walks that are under way; see `walks`."""
        self._unlinking: list[int] = []
        self.known_attached: set[int] = set()  # found attached since the last drop, while some are unlinking
        self.known_detached: set[int] = set()  # found below a dead entry; that is for good

    def add_table(self, number: int, policy: Policy, windowed: bool) -> Table:
        """Make the table of a new namespace."""
        table = self.tables[number] = Table(number, policy, windowed)
        self._plant(table)
        return table

    def _plant(self, table: Table) -> None:
        """Give the table a new root: live, pinned for good, never a candidate."""
        table.root = self._new_entry(table, b"", NO_ENTRY, NO_FRAME)
        self.pins[table.root] = 1
        self.note_moved((table.root,))

    def _new_entry(self, table: Table, key: bytes, parent: int, frame: int) -> int:
        if not self._free:
            self._grow()
        entry = self._free.pop()
        self.key[entry] = key
        self.frame[entry] = frame
        self.table[entry] = table.number
        self.state[entry] = LIVE
        self.parent[entry] = parent
        return entry

    def _grow(self) -> None:
        first, count = len(self.key), _GROW_ENTRIES
        self.key.extend([b""] * count)
        for column in (self.children, self.pins, self.frame, self.table, self.state):
            column.frombytes(bytes(column.itemsize * count))
        for column in (self.parent, self.first_child, self.next_sibling, self.prev_sibling):
            column.extend(array("i", [NO_ENTRY]) * count)
        self._grow_columns(count)
        self._free.extend(range(first + count - 1, first - 1, -1))

    def _grow_columns(self, count: int) -> None:
        self.columns.grow(count)
        if self.moved is not None:
            self.moved.extend(bytes(count))

    def _append_entries(self, table: Table, parents: list[int]) -> None:
        """Append the other columns of new entries."""
        count = len(parents)
        self.parent.extend(parents)
        self.table.extend(array("H", [table.number]) * count)
        self.state.extend(array("B", [LIVE]) * count)
        for column in (self.children, self.pins):
            column.extend(array("i", [0]) * count)
        for column in (self.first_child, self.next_sibling, self.prev_sibling):
            column.extend(array("i", [NO_ENTRY]) * count)
        self._grow_columns(count)

    def _adopt(self, table: Table, parent: int, entry: int) -> None:
        assert self.state[parent] == LIVE, "a block is published below a live one"
        if self.children[parent] == 0 and self.pins[parent] == 0:
            table.policy.remove(parent)
        self.children[parent] += 1
        sibling = self.first_child[parent]
        self.next_sibling[entry] = sibling
        if sibling != NO_ENTRY:
            self.prev_sibling[sibling] = entry
        self.first_child[parent] = entry

    def _leave_parent(self, entry: int) -> None:
        parent = self.parent[entry]
        before, after = self.prev_sibling[entry], self.next_sibling[entry]
        if before == NO_ENTRY:
            self.first_child[parent] = after
        else:
            self.next_sibling[before] = after
        if after != NO_ENTRY:
            self.prev_sibling[after] = before
        self.parent[entry] = self.prev_sibling[entry] = self.next_sibling[entry] = NO_ENTRY
        self.children[parent] -= 1
        if self.children[parent] == 0 and self.pins[parent] == 0 and self.state[parent] == LIVE:
            self.tables[self.table[parent]].policy.add(parent)

    def _free_entry(self, entry: int) -> None:
        self.state[entry] = FREE
        self.key[entry] = b""
        self.known_attached.discard(entry)
        self.known_detached.discard(entry)
        self._free.append(entry)
        if self.frame[entry] != NO_FRAME:
            self._release_frame(self.frame[entry])

    # --- touched and pinned ------------------------------------------------------------------------

    def touch(self, entry: int, how: Touch = MOVED) -> None:
        """A match ended here."""
        self.tables[self.table[entry]].policy.touched(entry, how)

    def pin(self, entry: int) -> None:
        """Keep the entry's frame, and with it all its ancestors, until `unpin`."""
        if self.pins[entry] == 0 and self.children[entry] == 0 and self.state[entry] == LIVE:
            self.tables[self.table[entry]].policy.remove(entry)
        self.pins[entry] += 1
        if self.moved is not None:
            self.moved[entry] = 1

    def note_moved(self, entries: Iterable[int]) -> None:
        """The holders of these entries' pins change, even if their number does not."""
        if self.moved is not None:
            for entry in entries:
                self.moved[entry] = 1

    def unpin(self, entry: int) -> None:
        """Undo one `pin`."""
        self.pins[entry] -= 1
        if self.moved is not None:
            self.moved[entry] = 1
        assert self.pins[entry] >= 0, "more unpins than pins"
        if self.pins[entry] == 0:
            self._settle(entry)

    def _settle(self, entry: int) -> None:
        """The entry has no pins: a live leaf becomes a candidate, a dead entry without children becomes free."""
        if self.children[entry]:
            return
        if self.state[entry] == LIVE:
            self.tables[self.table[entry]].policy.add(entry)
        elif self.state[entry] == DEAD:
            self._free_entry(entry)
