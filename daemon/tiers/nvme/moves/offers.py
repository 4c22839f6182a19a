"""Offers: blocks used in DRAM count as used on NVMe too, and missing ones are offered for writing, in slices.

A request's first chains are handled at once, so that the policies learn of them while it is answered; nearly always
those are all. Further chains, and windows, follow later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.index.policy import USED, Touch
from tiercache.daemon.tiers.dram.space import Namespace, first_of_window
from tiercache.protocol.messages import KEY_BYTES

from .placement import ShelfPlacement
from .writebehind import WriteBehind

LOOKED_AT_ONCE = 1024
"""Blocks of windows looked up, and perhaps offered, in one go of the event loop."""
CHAINS_AT_ONCE = 16
"""Chains looked up in one go: each directory is asked. One, where that may take a walk up to its root."""
MATCHED_AT_ONCE = 256
"""Blocks of one chain offered for writing with a match; the next match offers those after them."""
MATCHED_OF_ALL = 1024
"""The same, for all chains of a match together."""
MAX_BYTES = 4 << 20
"""Size of the waiting keys; blocks beyond that are considered again when they are next asked for."""


class Offers:
    """Event loop only. `may_write()`: whether directories can be written to."""

    def __init__(
        self,
        writes: WriteBehind,
        placement: ShelfPlacement,
        may_write: Callable[[], bool],
        soon: Callable[[], None],
    ) -> None:
        self._writes = writes
        self._placement = placement
        self._may_write = may_write
        self._soon = soon
        self._windows: deque[tuple[Namespace, bytes, int]] = deque()  # first of its blocks not looked up yet
        self._chains: deque[tuple[Steps[None], int]] = deque()  # look-ups in progress, and the bytes of their keys
        self._bytes = 0

    @property
    def idle(self) -> bool:
        """True if nothing waits."""
        return not (self._windows or self._chains)

    def matched(
        self, namespaces: Sequence[Namespace], keys: bytes, dram_blocks: int, found_blocks: int, how: Touch
    ) -> None:
        """See `TierBelow`."""
        may_write = self._has_room
        for namespace in namespaces if may_write and dram_blocks else ():
            if namespace.table.windowed and not namespace.spec.dram_only:
                self._add_window(namespace, keys, dram_blocks)
        chains = [namespace for namespace in namespaces if not namespace.table.windowed]
        steps = self._use(chains, keys, dram_blocks, found_blocks, how)
        for _ in steps:
            if self._bytes + len(keys) <= MAX_BYTES:
                self._bytes += len(keys)
                self._chains.append((steps, len(keys)))
                self._soon()
            return

    @property
    def _has_room(self) -> bool:
        """True if blocks that a request finds missing may be offered."""
        return self._may_write() and self._writes.room >= MATCHED_OF_ALL

    def _use(
        self, chains: Sequence[Namespace], keys: bytes, dram_blocks: int, found_blocks: int, how: Touch
    ) -> Steps[None]:
        """Chains were used up to their first `found_blocks`; DRAM has `dram_blocks` of them."""
        most = min(MATCHED_AT_ONCE, MATCHED_OF_ALL // max(1, len(chains)))
        for number, namespace in enumerate(chains):
            if number and (not number % CHAINS_AT_ONCE or self._placement.takes_walks):
                yield
                how = USED
            shelf, here = self._placement.find(namespace, keys, found_blocks)
            if shelf is not None:
                shelf.index.touch(shelf.table(namespace).get(_key(keys, here - 1)), how)
            if here < dram_blocks and not namespace.spec.dram_only and self._has_room:
                places = range(here, min(here + most, dram_blocks))
                self._writes.add_many(namespace, [_key(keys, place) for place in places], asked_again=True)

    def _add_window(self, namespace: Namespace, keys: bytes, cut: int) -> None:
        """The window before a cut was used: look it up soon."""
        first = first_of_window(namespace, cut)
        before = max(0, first - 1)
        window = keys[before * KEY_BYTES : cut * KEY_BYTES]
        if self._bytes + len(window) <= MAX_BYTES:
            self._windows.append((namespace, window, first - before))
            self._bytes += len(window)
            self._soon()

    def work(self) -> bool:
        """Run a slice; True while there is more."""
        if self._chains:
            self._go_on(*self._chains.popleft())
        if self._windows:  # in turn with chains, which may always be there
            self._look_for_windows()
        return not self.idle

    def _go_on(self, steps: Steps[None], size_bytes: int) -> None:
        """Run the next step of a look-up of chains."""
        more = False
        try:
            more = next(steps, self) is not self
        finally:
            if not more:
                self._bytes -= size_bytes
        if more:
            self._chains.append((steps, size_bytes))

    def _look_for_windows(self) -> None:
        left = LOOKED_AT_ONCE
        while self._windows and left > 0:
            namespace, keys, first = self._windows.popleft()
            here, last = self._placement.lookup(namespace), len(keys) // KEY_BYTES
            end = min(last, first + left)
            for number in range(first, end):
                key = keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
                if here is None or not here(key):
                    self._writes.add_many(namespace, [key], asked_again=True, before=_key(keys, number - 1))
            left -= end - first
            if end < last:
                self._windows.appendleft((namespace, keys, end))
            else:
                self._bytes -= len(keys)


def _key(keys: bytes, number: int) -> bytes:
    """A key of a packed list; empty before the first one."""
    return keys[number * KEY_BYTES : (number + 1) * KEY_BYTES] if number >= 0 else b""
