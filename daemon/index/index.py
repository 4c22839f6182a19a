"""The prefix-closed index of one tier: which blocks are here, where, and after which.

Every block hangs below the block before it, a first block below its namespace's root. A block leaves only after all its
descendants, so "key i is here" implies "keys 0..i are here" and the longest match is a binary search. Blocks of
windowed namespaces all hang below the root and leave in any order. A root is an entry without key and frame; to drop it
is to flush the namespace.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heapreplace

from .allocator import NO_FRAME
from .entries import DEAD, LIVE, SHARDS, Table, span
from .lookups import Lookups
from .policy import NO_ENTRY, Policy

REFUSED = -2
"""Instead of an entry, from `insert_many`."""
MANY = 8
"""From so many entries on, columns are changed by the slice."""


class Index(Lookups):
    """The blocks of one tier: published, evicted, dropped. Single-threaded; never blocks."""

    # --- published -------------------------------------------------------------------------------

    def insert_run(
        self,
        table: Table,
        keys: Sequence[bytes],
        parent: int,
        frames: Sequence[int],
        pins: int = 0,
        stored: bool = False,
    ) -> list[int]:
        """Publish a run of blocks, each below the one before it, the first below `parent`; the last one gets `pins`.

        `parent`: a live entry. None of the keys may be here. `stored`: a client stores them now, as opposed to blocks
        that the daemon moves between tiers. Only the last block may become a candidate. Returns their entries.
        """
        free, number = self._free, table.number
        while len(free) < len(keys):
            self._grow()
        entries = free[: -len(keys) - 1 : -1].tolist()
        del free[-len(keys) :]
        shards, key_of, frame_of, parent_of = table.shards, self.key, self.frame, self.parent
        first_child, children, numbers, state = self.first_child, self.children, self.table, self.state
        self._adopt(table, parent, entries[0])
        count, last, its = len(entries), entries[-1], span(entries) if len(entries) >= MANY else None
        if its is not None:
            for entry, key in zip(entries, keys, strict=True):
                is_new = shards[key[0] & (SHARDS - 1)].setdefault(key, entry) == entry
                assert is_new, "a key is published once"
            key_of[its], frame_of[its] = keys, array("q", frames)
            parent_of[its] = array("i", [parent, *entries[:-1]])
            first_child[its] = array("i", [*entries[1:], NO_ENTRY])
            numbers[its], state[its] = array("H", [number]) * count, array("B", [LIVE]) * count
            children[its] = array("i", [1]) * count
        else:
            above = parent
            for entry, key, frame in zip(entries, keys, frames, strict=True):
                is_new = shards[key[0] & (SHARDS - 1)].setdefault(key, entry) == entry
                assert is_new, "a key is published once"
                key_of[entry], frame_of[entry], parent_of[entry] = key, frame, above
                first_child[above] = entry
                numbers[entry] = number
                children[entry] = state[entry] = 1  # LIVE
                above = entry
        children[last] = 0
        table.blocks += len(entries)
        table.policy.inserted_run(entries, stored)
        if pins:
            self.pins[last] = pins
            self.note_moved((last,))
        else:
            table.policy.add(last)
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
                at = shards[parent[0] & (SHARDS - 1)].get(parent, NO_ENTRY)
                if at == NO_ENTRY:
                    entries.append(NO_ENTRY)
                    continue
            refused = admit is not None and not admit(number, at, entry)
            if refused or shards[key[0] & (SHARDS - 1)].setdefault(key, entry) != entry:
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
            self.key.extend(key for key, entry in zip(keys, entries, strict=True) if entry >= 0)
            self.frame.extend(frame for frame, entry in zip(frames, entries, strict=True) if entry >= 0)
        self._append_entries(table, above)
        table.blocks += len(above)
        self._adopt_many(table, first, above)
        return entries

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

    # --- evicted ---------------------------------------------------------------------------------

    def evict(self, entry: int) -> None:
        """Evict a candidate; its frame is released at once and its parent may become a candidate."""
        assert self.children[entry] == 0
        assert self.pins[entry] == 0
        if self.on_evicted is not None:
            self.on_evicted(entry)
        parent = self.parent[entry]
        if self.children[parent] != 1 or self.pins[parent] or self.state[parent] != LIVE:
            self._evict_apart(entry, parent)
            return
        # The common case, a chain that is evicted from its end.
        table = self.tables[self.table[entry]]
        table.policy.replaced(parent, entry)
        key = self.key[entry]
        del table.shards[key[0] & (SHARDS - 1)][key]
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
        if self.on_evicted is not None:
            for evicted in run:
                self.on_evicted(evicted)
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

    def evict_coldest(self, policies: Sequence[Policy], count: int, turn: int = 1) -> int:
        """Evict `count` victims of these policies, or all there are, the coldest first; returns how many.

        There may be thousands of policies, so each is asked once, and after that only the one that lost blocks: at most
        `turn` in a row.
        """
        order = [(stamp, place) for place, one in enumerate(policies) if (stamp := one.coldest_stamp()) is not None]
        heapify(order)
        evicted, turn = 0, count if len(policies) == 1 else turn
        while evicted < count and order:
            place = order[0][1]
            evicted += self.evict_run(policies[place].victim(), min(count - evicted, turn))
            if evicted < count:
                stamp = policies[place].coldest_stamp()
                if stamp is None:
                    heappop(order)
                else:
                    heapreplace(order, (stamp, place))
        return evicted

    def _free_run(self, table: Table, run: list[int]) -> None:
        """Free entries without children, already unlinked from their parent: remove them from the table."""
        shards, key_of, frame_of, on_left = table.shards, self.key, self.frame, self.on_left
        release = self._release_frame
        first_child, children, state = self.first_child, self.children, self.state
        for entry in run:
            key = key_of[entry]
            del shards[key[0] & (SHARDS - 1)][key]
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

    # --- dropped, and unlinked in slices -----------------------------------------------------------

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
        """True if a namespace has no blocks, no store in progress below its root, and none to be unlinked there."""
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
        del table.shards[key[0] & (SHARDS - 1)][key]
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
        else:
            self._say_held(entry)

    def _say_held(self, entry: int) -> None:
        if self.on_held is not None and self.frame[entry] != NO_FRAME:
            self.on_held(self.frame[entry])

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
            if self.pins[entry] > 1:
                self._say_held(entry)
            self.unpin(entry)
        if not self._unlinking:
            self.known_attached.clear()
            self.known_detached.clear()
        return done

    @property
    def is_unlinking(self) -> bool:
        """True if anything waits to be unlinked."""
        return bool(self._unlinking)

    def unlinking_entries(self) -> list[int]:
        """Dead entries that wait for their children to be unlinked."""
        return list(self._unlinking)
