"""Look-ups in an index: how much of a chain is here, where, and whether it is whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiercache.protocol.messages import KEY_BYTES

from .entries import LIVE, SHARDS, LinkedEntries, Table
from .policy import NO_ENTRY

REMEMBERED = 32
"""One entry in this number, of those that a walk up has found attached, is remembered."""


class Lookups(LinkedEntries):
    """Finds entries; changes none."""

    def prefix_length(self, table: Table, keys: bytes, limit: int) -> int:
        """How many of the first `limit` keys are here, as a leading run.

        O(log n) look-ups. While part of the namespace is being unlinked it also walks up, at most to the root: see
        `attached`, which holds for a leading run too.
        """
        shards = table.shards

        def here(number: int) -> bool:
            key = keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
            return key in shards[key[0] & (SHARDS - 1)]

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
            return lambda key: key in shards[key[0] & (SHARDS - 1)]

        def here(key: bytes) -> bool:
            entry = shards[key[0] & (SHARDS - 1)].get(key, NO_ENTRY)
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
                return self._forward_frames(table, keys, first, count)
            frames[slot] = frame[entry]
            entry = parent[entry]
            offset -= KEY_BYTES
        expected = table.root if first == 0 else table.get(keys[offset : offset + KEY_BYTES])
        return frames if entry == expected else []

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
        """True if the entry and all before it are live. O(1), except for a first walk up while unlinking."""
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
        """True if each of these blocks is `attached`: one or two milliseconds for the widest windows.

        They hang below the same root, so the path before them is checked once for all of them.
        """
        state, parent = self.state, self.parent
        if [state[entry] for entry in entries].count(LIVE) < len(entries):
            return False
        return not self._unlinking or all(map(self.attached, {parent[entry] for entry in entries}))
