"""Windows that were used in DRAM and may not be on NVMe yet: what is missing there is offered, in slices."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tiercache.daemon.cuts import Lookup, first_of_window
from tiercache.daemon.nvme.writebehind import WriteBehind
from tiercache.daemon.space import Namespace
from tiercache.messages import KEY_BYTES

LOOKED_AT_ONCE = 1024
"""Blocks that are looked for, and perhaps offered, in one go of the loop."""
MAX_BYTES = 4 << 20
"""Of the keys that wait for that; further windows have another chance when they are asked for again."""


class Offers:
    """Event loop only. `lookup` tells of a namespace which blocks are on NVMe; see `TierBelow`."""

    def __init__(
        self, writes: WriteBehind, lookup: Callable[[Namespace], Lookup | None], soon: Callable[[], None]
    ) -> None:
        self._writes = writes
        self._lookup = lookup
        self._soon = soon
        self._windows: deque[tuple[Namespace, bytes, int]] = deque()  # the first of its blocks that was not looked for
        self._bytes = 0

    @property
    def idle(self) -> bool:
        """Whether nothing waits."""
        return not self._windows

    def add(self, namespace: Namespace, keys: bytes, cut: int) -> None:
        """The window before a cut was used: to be looked for soon."""
        first = first_of_window(namespace, cut)
        before = max(0, first - 1)
        its = keys[before * KEY_BYTES : cut * KEY_BYTES]
        if self._bytes + len(its) <= MAX_BYTES:
            self._windows.append((namespace, its, first - before))
            self._bytes += len(its)
            self._soon()

    def work(self) -> bool:
        """A slice; True while there is more."""
        left = LOOKED_AT_ONCE
        while self._windows and left > 0:
            namespace, keys, first = self._windows.popleft()
            here, last = self._lookup(namespace), len(keys) // KEY_BYTES
            end = min(last, first + left)
            for number in range(first, end):
                key = keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
                if here is None or not here(key):
                    before = keys[(number - 1) * KEY_BYTES : number * KEY_BYTES] if number else b""
                    self._writes.add(namespace, key, asked_again=True, before=before)
            left -= end - first
            if end < last:
                self._windows.appendleft((namespace, keys, end))
            else:
                self._bytes -= len(keys)
        return bool(self._windows)
