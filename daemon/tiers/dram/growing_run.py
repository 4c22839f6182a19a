"""Runs of a growing read lease: what it waits for in each of its namespaces, and what it holds already.

    chain    |=================>..........|     blocks arrive in order; the last one that arrived is pinned
             0                end       target

    window                  |===.==>.==..|      they arrive in any order, and each is pinned on arrival;
                          first end    target   `end` is the first gap

Pinned blocks count as used. The policy is told when the run begins and when it is complete, not of every arrival, since
the disk decides in how many parts blocks arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tiercache.daemon.ground.slices import PINS
from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.protocol.messages import KEY_BYTES

from .space import Namespace, first_of_window


class GrowingRun:
    """What one namespace needs for a cut at `target`; `first ..< end` of it is in DRAM and pinned. Event loop only.

    A wide window is searched in slices, again and again: see `look` and `begin_pass`.
    """

    __slots__ = ("_here", "_index", "_keys", "end", "first", "missing", "namespace", "pins", "target", "to_look")

    def __init__(self, index: Index, namespace: Namespace, keys: bytes, target: int) -> None:
        self._index = index
        self._keys = keys
        self.namespace = namespace
        self.target = target
        self.first = self.end = first_of_window(namespace, target)
        self.missing = deque(range(self.first, target)) if namespace.table.windowed else deque[int]()
        self._here = bytearray(len(self.missing))
        self.to_look = len(self.missing)  # of those, in this pass
        self.pins: list[int] = []

    @property
    def complete(self) -> bool:
        """True if all of it is in DRAM, and pinned."""
        return self.end == self.target

    def key(self, number: int) -> bytes:
        """The key of a block."""
        return self._keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]

    def keys(self, numbers: Iterable[int]) -> list[bytes]:
        """The keys of some blocks."""
        keys = self._keys
        return [keys[number * KEY_BYTES : (number + 1) * KEY_BYTES] for number in numbers]

    def begin_pass(self) -> None:
        """Start another search for everything that is missing."""
        self.to_look = len(self.missing)

    def look(self) -> bool:
        """Pin the blocks that have arrived, a slice of them. True while this pass is not over."""
        if self.complete:
            return False
        if self.namespace.table.windowed:
            self._gather()
        elif self.namespace.table.get(self.key(self.end)) != NO_ENTRY:
            self._extend()
        return self.to_look > 0

    def advance(self) -> int:
        """Pin the blocks that have arrived, or a slice of those to search; returns how many were looked up."""
        if not self.to_look:
            self.begin_pass()
        looked = min(PINS, self.to_look)
        self.look()
        return looked

    def touch(self, first: int) -> int:
        """Tell the policy of the pinned blocks, a slice of them: a chain's end, or a window's blocks in order from
        `first` on. Returns where the next slice begins, `target` at the end."""
        table, pinned = self.namespace.table, set(self.pins)
        numbers = range(max(first, self.end - 1), self.end)
        if table.windowed:
            numbers = range(first, min(first + PINS, self.target))
        for entry in map(table.get, map(self.key, numbers)):
            if entry in pinned:
                self._index.touch(entry)
        return numbers.stop if table.windowed else self.target

    def _extend(self) -> None:
        table = self.namespace.table
        end = self._index.prefix_length(table, self._keys, self.target)
        if end > self.end:
            self._pin(table.get(self.key(end - 1)))
            if len(self.pins) > 1:
                self._index.unpin(self.pins.pop(0))
            self.end = end

    def _gather(self) -> None:
        table, parent, missing = self.namespace.table, self._index.parent, self.missing
        for _ in range(min(PINS, self.to_look)):
            number = missing.popleft()
            entry = table.get(self.key(number))
            if entry == NO_ENTRY or parent[entry] != table.root:
                missing.append(number)
            else:
                self._pin(entry)
                self._here[number - self.first] = 1
            self.to_look -= 1
        end = self._here.find(0, self.end - self.first)
        self.end = self.target if end < 0 else self.first + end

    def _pin(self, entry: int) -> None:
        self._index.pin(entry)
        self.pins.append(entry)
