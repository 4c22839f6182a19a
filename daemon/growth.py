"""A read lease that grows: what it waits for in each of its namespaces, and what of that it holds already.

    chain    |=================>..........|     blocks come in order; the last one that has come is pinned
             0                end       target

    window                  |===.==>.==..|      they come in any order, and each that has come is pinned;
                          first end    target   `end` is the first gap

What is pinned is used: the policy is told when the run begins and when it is complete, and not of every landing, since
in how many goes blocks land is up to the disk.
"""

from __future__ import annotations

from tiercache.daemon.cuts import first_of_window
from tiercache.daemon.index import Index
from tiercache.daemon.policy import NO_ENTRY
from tiercache.daemon.space import Namespace
from tiercache.messages import KEY_BYTES


class Run:
    """What one namespace needs for a cut at `target`; `first ..< end` of it is in DRAM, and pinned. Event loop only."""

    __slots__ = ("_index", "_keys", "end", "first", "missing", "namespace", "pins", "target")

    def __init__(self, index: Index, namespace: Namespace, keys: bytes, target: int) -> None:
        self._index = index
        self._keys = keys
        self.namespace = namespace
        self.target = target
        self.first = self.end = first_of_window(namespace, target)
        self.missing = list(range(self.first, target)) if namespace.table.windowed else []
        self.pins: list[int] = []
        self.advance()
        if not self.complete:
            self._touch()

    @property
    def complete(self) -> bool:
        """Whether all of it is in DRAM, and pinned."""
        return self.end == self.target

    def key(self, number: int) -> bytes:
        """The key of a block."""
        return self._keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]

    def advance(self) -> bool:
        """Take in what has come: pinned from here on. Whether that makes it longer."""
        if self.complete:
            return False
        before = self.end
        if self.namespace.table.windowed:
            self._gather()
        elif self.namespace.table.get(self.key(self.end)) != NO_ENTRY:
            self._extend()
        if self.end == self.target:
            self._touch()
        return self.end > before

    def _touch(self) -> None:
        """Tell the policy of what is pinned: a chain's end, or a window's blocks in their order."""
        table = self.namespace.table
        numbers = range(self.first, self.target) if table.windowed else range(max(0, self.end - 1), self.end)
        pinned = set(self.pins)
        for entry in map(table.get, map(self.key, numbers)):
            if entry in pinned:
                self._index.touch(entry)

    def _extend(self) -> None:
        table = self.namespace.table
        end = self._index.prefix_length(table, self._keys, self.target)
        if end > self.end:
            self._pin(table.get(self.key(end - 1)))
            if len(self.pins) > 1:
                self._index.unpin(self.pins.pop(0))
            self.end = end

    def _gather(self) -> None:
        table, parent = self.namespace.table, self._index.parent
        still = []
        for number in self.missing:
            entry = table.get(self.key(number))
            if entry == NO_ENTRY or parent[entry] != table.root:
                still.append(number)
            else:
                self._pin(entry)
        self.missing = still
        self.end = still[0] if still else self.target

    def _pin(self, entry: int) -> None:
        self._index.pin(entry)
        self.pins.append(entry)
