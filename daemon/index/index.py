"""The prefix-closed index of one tier: which blocks are here, where, and after which.

Every block hangs below the block before it, a first block below its namespace's root. A block leaves only after all its
descendants, so "key i is here" implies "keys 0..i are here" and the longest match is a binary search. Blocks of
windowed namespaces all hang below the root and leave in any order. A root is an entry without key and frame; to drop it
is to flush the namespace.

An entry is a row in columns of plain integers plus one dict item, about 200 bytes; objects would
cost twice that and make every full garbage collection a stall. The dict of a namespace is split
in shards, because growing one dict of a million items blocks the event loop for 66 ms.

Entry states:

    FREE ─insert→ LIVE ─unlink→ DEAD ─(no pin, no child)→ FREE

DEAD entries cannot be found any more; a holder of a pin still keeps their frame.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from tiercache.daemon.ground.slices import finish
from tiercache.daemon.index.allocator import NO_FRAME
from tiercache.daemon.index.check import check_index
from tiercache.daemon.index.policy import MOVED, NO_ENTRY, Columns, Policy, Touch
from tiercache.protocol.messages import KEY_BYTES

FREE, LIVE, DEAD = 0, 1, 2
REFUSED = -2
"""Instead of an entry, from `insert_many`."""
_SHARDS = 64
_GROW_ENTRIES = 4096
REMEMBERED = 32


class Table:
    """The blocks of one namespace."""

    __slots__ = ("blocks", "number", "policy", "root", "shards", "unlinking", "windowed")

    def __init__(self, number: int, policy: Policy, windowed: bool) -> None:
        self.number = number
        self.policy = policy
        self.windowed = windowed
        self.root = NO_ENTRY
        self.shards: list[dict[bytes, int]] = [{} for _ in range(_SHARDS)]
        self.blocks = 0
        self.unlinking = 0  # dead entries that still have children to unlink

    def get(self, key: bytes) -> int:
        """The live entry of `key`, or NO_ENTRY. While `unlinking`, it may be about to be unlinked."""
        return self.shards[key[0] & (_SHARDS - 1)].get(key, NO_ENTRY)


class Index:
    """All entries of one tier. Single-threaded; never blocks.

    `release_frame` is called with the frame of every entry that becomes FREE.
    """

    def __init__(self, release_frame: Callable[[int], None]) -> None:
        self._release_frame = release_frame
        self.on_left: Callable[[int, bytes], None] | None = None
        """Called for each block that can no longer be found, with its table's number and its key."""
        self.has_cut = False
        """Whether a pinned entry was unlinked; holders of pins check this flag and clear it."""
        self.drops = 0
        """How many drops there were: while this number is unchanged, what was attached still is."""
        self.columns = Columns()
        self.tables: dict[int, Table] = {}
        self.invariant_failures = 0
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

    # --- finding ---------------------------------------------------------------------------------

    def prefix_length(self, table: Table, keys: bytes, limit: int) -> int:
        """How many of the first `limit` keys are here, as a leading run.

        O(log n) look-ups. While part of the namespace is being unlinked it also walks up, at most to the root: see
        `attached`, which holds for a leading run too.
        """
        shards = table.shards

        def here(number: int) -> bool:
            key = keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
            return key in shards[key[0] & (_SHARDS - 1)]

        def attached(number: int) -> bool:
            entry = table.get(keys[number * KEY_BYTES : (number + 1) * KEY_BYTES])
            return entry != NO_ENTRY and self.attached(entry)

        found = attached if table.unlinking else here
        if limit == 0 or found(limit - 1):  # a full hit is the common case
            return limit
        low, high = 0, limit - 1  # all keys below `low` are here, key `high` is not
        while low < high:
            middle = (low + high) // 2
            if found(middle):
                low = middle + 1
            else:
                high = middle
        return low

    def lookup(self, table: Table) -> Callable[[bytes], bool] | None:
        """A function that tells whether a windowed table has a block, to be used at once; None if it has none."""
        if not table.blocks:
            return None
        shards, parent, root = table.shards, self.parent, table.root
        if not table.unlinking:
            return lambda key: key in shards[key[0] & (_SHARDS - 1)]

        def here(key: bytes) -> bool:
            entry = shards[key[0] & (_SHARDS - 1)].get(key, NO_ENTRY)
            return entry != NO_ENTRY and parent[entry] == root

        return here

    def run_frames(self, table: Table, keys: bytes, first: int, count: int) -> list[int]:
        """Frames of keys `first ..< first + count`; fewer where the chain is broken.

        Walks the parent links back from the last key and compares each key on the way, so that neither a permuted list
        nor a bug in the closure can name a frame of another key.
        """
        if table.windowed:
            return self._forward_frames(table, keys, first, count)
        last = first + count - 1
        entry = table.get(keys[last * KEY_BYTES : (last + 1) * KEY_BYTES])
        frames = [0] * count
        key_of, parent, frame = self.key, self.parent, self.frame
        offset = last * KEY_BYTES
        for slot in range(count - 1, -1, -1):
            if entry < 0 or key_of[entry] != keys[offset : offset + KEY_BYTES]:
                self.invariant_failures += 1
                return self._forward_frames(table, keys, first, count)
            frames[slot] = frame[entry]
            entry = parent[entry]
            offset -= KEY_BYTES
        expected = table.root if first == 0 else table.get(keys[offset : offset + KEY_BYTES])
        if entry != expected:
            self.invariant_failures += 1
            return []
        return frames

    def _forward_frames(self, table: Table, keys: bytes, first: int, count: int) -> list[int]:
        frames: list[int] = []
        before = table.get(keys[(first - 1) * KEY_BYTES : first * KEY_BYTES]) if first else table.root
        for number in range(first, first + count):
            entry = table.get(keys[number * KEY_BYTES : (number + 1) * KEY_BYTES])
            if entry == NO_ENTRY or (not table.windowed and self.parent[entry] != before):
                break
            frames.append(self.frame[entry])
            before = entry
        return frames

    def attached(self, entry: int) -> bool:
        """Whether the entry and all before it are live. O(1), except for a first walk up while unlinking."""
        if self.state[entry] != LIVE:
            return False
        if not self.tables[self.table[entry]].unlinking:
            return True  # a live entry below a dead one waits to be unlinked
        known, lost, state, parent = self.known_attached, self.known_detached, self.state, self.parent
        path = [entry]  # entries at intervals are remembered, so that later walks stop early
        steps = 0
        while entry != NO_ENTRY and entry not in known:
            if state[entry] != LIVE or entry in lost:
                lost.update(path)
                return False
            steps += 1
            if not steps % REMEMBERED:
                path.append(entry)
            entry = parent[entry]
        known.update(path)
        return True

    def all_attached(self, entries: Sequence[int]) -> bool:
        """Whether each of these blocks is `attached`: one or two milliseconds for the widest windows.

        They hang below the same root, so the path before them is checked once for all of them.
        """
        state, parent = self.state, self.parent
        if [state[entry] for entry in entries].count(LIVE) < len(entries):
            return False
        return not self._unlinking or all(map(self.attached, {parent[entry] for entry in entries}))

    # --- changing --------------------------------------------------------------------------------

    def insert(self, table: Table, key: bytes, parent: int, frame: int, pins: int = 0) -> int:
        """Publish a block below `parent`, a live entry, with so many pins. The key must not be here."""
        shard = table.shards[key[0] & (_SHARDS - 1)]
        assert key not in shard, "a key is published once"
        entry = self._new_entry(table, key, parent, frame)
        shard[key] = entry
        table.blocks += 1
        self._adopt(table, parent, entry)
        table.policy.inserted(entry)
        if pins:
            self.pins[entry] = pins
            self.note_moved((entry,))
        else:
            table.policy.add(entry)
        return entry

    def insert_run(
        self, table: Table, keys: Sequence[bytes], parent: int, frames: Sequence[int], pins: int = 0
    ) -> list[int]:
        """Publish a run of blocks, each below the one before it, the first below `parent`; the last one gets `pins`.

        As repeated `insert`, but the policy is told once, and only the last block is announced as a candidate. Returns
        their entries.
        """
        free, number = self._free, table.number
        while len(free) < len(keys):
            self._grow()
        entries = free[: -len(keys) - 1 : -1].tolist()
        del free[-len(keys) :]
        shards, key_of, frame_of, parent_of = table.shards, self.key, self.frame, self.parent
        first_child, children, numbers, state = self.first_child, self.children, self.table, self.state
        self._adopt(table, parent, entries[0])
        above = parent
        for entry, key, frame in zip(entries, keys, frames, strict=True):
            is_new = shards[key[0] & (_SHARDS - 1)].setdefault(key, entry) == entry
            assert is_new, "a key is published once"
            key_of[entry] = key
            frame_of[entry] = frame
            parent_of[entry] = above
            first_child[above] = entry
            numbers[entry] = number
            children[entry] = state[entry] = 1  # LIVE; the last one has no child
            above = entry
        children[above] = 0
        table.blocks += len(entries)
        table.policy.inserted_run(entries)
        if pins:
            self.pins[above] = pins
            self.note_moved((above,))
        else:
            table.policy.add(above)
        return entries

    def insert_many(
        self,
        table: Table,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        frames: Sequence[int],
        root_key: bytes,
        admit: Callable[[int, int, int], bool] | None = None,
    ) -> list[int]:
        """Publish blocks one after another, each below the one whose key is its parent; much faster than `insert`.

        Returns for each its entry, NO_ENTRY when its parent is not here, or REFUSED when the key is here already or
        `admit(number, parent entry, its entry to be)` said no. `root_key` stands for the root. The entries are new and
        adjacent; no free entry is reused.
        """
        first = entry = len(self.key)
        shards, root = table.shards, table.root
        before, before_entry = root_key, root
        entries, above = [], []
        for number, (key, parent) in enumerate(zip(keys, parents, strict=True)):
            if parent == before:
                at = before_entry  # the common case
            elif parent == root_key:
                at = root
            else:
                at = shards[parent[0] & (_SHARDS - 1)].get(parent, NO_ENTRY)
                if at == NO_ENTRY:
                    entries.append(NO_ENTRY)
                    continue
            refused = admit is not None and not admit(number, at, entry)
            if refused or shards[key[0] & (_SHARDS - 1)].setdefault(key, entry) != entry:
                entries.append(REFUSED)
                continue
            before, before_entry = key, entry
            above.append(at)
            entries.append(entry)
            entry += 1
        if len(above) == len(keys):
            self.key.extend(keys)
            self.frame.extend(frames)
        else:
            self.key.extend(key for key, its in zip(keys, entries, strict=True) if its >= 0)
            self.frame.extend(frame for frame, its in zip(frames, entries, strict=True) if its >= 0)
        self._append_entries(table, above)
        table.blocks += len(above)
        self._adopt_many(table, first, above)
        return entries

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

    def _adopt_many(self, table: Table, first: int, parents: list[int]) -> None:
        """Link the entries from `first` on to their parents; those left without a child become candidates."""
        children, first_child, pins, policy = self.children, self.first_child, self.pins, table.policy
        for entry, parent in enumerate(parents, first):
            sibling = first_child[parent]
            first_child[parent] = entry
            children[parent] += 1
            if sibling != NO_ENTRY:
                self.next_sibling[entry] = sibling
                self.prev_sibling[sibling] = entry
            elif parent < first and pins[parent] == 0:
                policy.remove(parent)
        policy.inserted_many(first, len(parents))
        for entry, below in enumerate(children[first:], first):
            if below == 0:
                policy.add(entry)

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

    def evict(self, entry: int) -> None:
        """Evict a candidate; its frame is released at once and its parent may become a candidate."""
        assert self.children[entry] == 0
        assert self.pins[entry] == 0
        parent = self.parent[entry]
        if self.children[parent] != 1 or self.pins[parent] or self.state[parent] != LIVE:
            self._evict_apart(entry, parent)
            return
        # The common case, a chain that is evicted from its end.
        table = self.tables[self.table[entry]]
        table.policy.replaced(parent, entry)
        key = self.key[entry]
        del table.shards[key[0] & (_SHARDS - 1)][key]
        table.blocks -= 1
        if self.on_left is not None:
            self.on_left(table.number, key)
        self.children[parent] = 0
        self.first_child[parent] = self.parent[entry] = NO_ENTRY
        self._free_entry(entry)

    def _evict_apart(self, entry: int, parent: int) -> None:
        """Evict a candidate that its parent does not replace."""
        self.tables[self.table[entry]].policy.evicted(entry, parent)
        self._unlink(entry)

    def evict_run(self, entry: int, count: int) -> int:
        """Evict the policy's victim and, while they would be the next victims, its ancestors; at most `count`.

        As repeated `evict`, but the policy is asked and told once. Returns how many were evicted.
        """
        assert self.children[entry] == 0
        assert self.pins[entry] == 0
        table = self.tables[self.table[entry]]
        run, top, follows = [entry], entry, table.policy.follows
        parent, children, pins, state = self.parent, self.children, self.pins, self.state
        while True:
            above = parent[top]
            next_one = children[above] == 1 and not pins[above] and state[above] == LIVE
            if not next_one or len(run) == count or not follows(above, entry):
                break
            run.append(above)
            top = above
        if next_one:
            table.policy.replaced(above, entry)
            children[above] = 0
            self.first_child[above] = NO_ENTRY
        else:
            table.policy.evicted(entry, above)
            table.policy.remove(entry)
            self._leave_parent(top)
        self._free_run(table, run)
        return len(run)

    def _free_run(self, table: Table, run: list[int]) -> None:
        """Free entries without children, already unlinked from their parent: remove them from the table."""
        shards, key_of, frame_of, on_left = table.shards, self.key, self.frame, self.on_left
        release = self._release_frame
        first_child, children, state = self.first_child, self.children, self.state
        for entry in run:
            key = key_of[entry]
            del shards[key[0] & (_SHARDS - 1)][key]
            if on_left is not None:
                on_left(table.number, key)
            state[entry] = children[entry] = 0  # FREE
            first_child[entry] = NO_ENTRY
            key_of[entry] = b""
            if frame_of[entry] != NO_FRAME:
                release(frame_of[entry])
        if self._unlinking:
            self.known_attached.difference_update(run)
            self.known_detached.difference_update(run)
        self._free.extend(run)
        table.blocks -= len(run)

    def drop(self, entry: int) -> None:
        """Drop an entry and all its descendants, the latter in slices (`unlink_slice`).

        The entry, and with it everything after it, is out of sight at once. Readers with a lease below it must be told
        (`attached` says which): frames go to new owners from here on.
        """
        assert self.state[entry] == LIVE
        self.drops += 1
        self.known_attached.clear()
        self._unlink(entry)

    def is_untouched(self, table: Table) -> bool:
        """Whether a namespace has no blocks, no store in progress below its root, and none to be unlinked there."""
        return not self.children[table.root] and self.pins[table.root] == 1

    def drop_table(self, table: Table) -> int:
        """Drop all blocks of a namespace, in slices; returns how many there were."""
        root, blocks = table.root, table.blocks
        self.drops += 1
        self.known_attached.clear()
        self._plant(table)
        self.state[root] = DEAD
        if self.children[root]:
            table.unlinking += 1
            self._unlinking.append(root)  # its lasting pin serves as this list's
        else:
            self.unpin(root)
        return blocks

    def _unlink(self, entry: int) -> None:
        """LIVE → DEAD: out of the table, unlinked from its parent; freed when it has no pin and no child."""
        table = self.tables[self.table[entry]]
        if self.children[entry] == 0 and self.pins[entry] == 0:
            table.policy.remove(entry)
        key = self.key[entry]
        del table.shards[key[0] & (_SHARDS - 1)][key]
        table.blocks -= 1
        if self.on_left is not None:
            self.on_left(table.number, key)
        self.state[entry] = DEAD
        if self.pins[entry]:
            self.has_cut = True
        self._leave_parent(entry)
        if self.children[entry]:
            # Pinned while it waits for its children to be unlinked, so that it is not freed meanwhile.
            self.pins[entry] += 1
            self.note_moved((entry,))
            table.unlinking += 1
            self._unlinking.append(entry)
        elif self.pins[entry] == 0:
            self._free_entry(entry)

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

    def unlink_slice(self, limit: int) -> int:
        """Continue unlinking what hangs below dropped entries, at most `limit` steps; returns how many were done.

        Each block takes a step or two. Fewer than `limit` means that all is done and matches are logarithmic again; 0
        that there was nothing to do.
        """
        done = 0
        while self._unlinking and done < limit:
            entry = self._unlinking[-1]
            done += 1
            if self.children[entry]:
                # A child with children of its own joins the stack, so the order is depth first.
                self._unlink(self.first_child[entry])
                continue
            # A step too: a chain is freed from its end, all of it after its last block was unlinked.
            self._unlinking.pop()
            self.tables[self.table[entry]].unlinking -= 1
            self.unpin(entry)
        if not self._unlinking:
            self.known_attached.clear()
            self.known_detached.clear()
        return done

    def _free_entry(self, entry: int) -> None:
        self.state[entry] = FREE
        self.key[entry] = b""
        self.known_attached.discard(entry)
        self.known_detached.discard(entry)
        self._free.append(entry)
        if self.frame[entry] != NO_FRAME:
            self._release_frame(self.frame[entry])

    @property
    def is_unlinking(self) -> bool:
        """Whether anything waits to be unlinked."""
        return bool(self._unlinking)

    def unlinking_entries(self) -> list[int]:
        """Dead entries that wait for their children to be unlinked."""
        return list(self._unlinking)

    def frames_in_use(self) -> list[int]:
        """Frames of all entries, including dead ones that are still pinned. O(entries)."""
        rows = zip(self.frame, self.state, strict=True)
        return [frame for frame, state in rows if state != FREE and frame != NO_FRAME]

    # --- checking --------------------------------------------------------------------------------

    def check_integrity(self) -> list[str]:
        """Every way in which the columns, the tables and the counts disagree. O(entries)."""
        return finish(check_index(self))
