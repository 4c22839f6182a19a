"""What this host has of prompts in namespaces with a window: a look-up asks the store for the rest.

Such namespaces have no leading run: each block is looked for by itself, in DRAM and in the tiers below it.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Sequence

from tiercache.daemon.index.index import Index
from tiercache.daemon.tiers.dram.below import Claim
from tiercache.daemon.tiers.dram.space import Namespace, first_of_window
from tiercache.protocol.messages import KEY_BYTES

MAX_LOOKED_FOR = 16_384
"""Blocks that one request may look for on this host, about three milliseconds; with more, nothing is asked of the store
for it."""
_KEY = struct.Struct(f"{KEY_BYTES}s")

Has = Callable[[bytes], bool]


class LocalWindows:
    """Event loop only. `lookup_below`: see `TierBelow.lookup`, of the tiers between DRAM and the store."""

    def __init__(self, index: Index, lookup_below: Callable[[Namespace], Has | None]) -> None:
        self._index = index
        self._lookup_below = lookup_below

    def are_short_work(self, namespaces: Sequence[Namespace], blocks: int) -> bool:
        """True if that many blocks of each of these can be looked for. A namespace without blocks costs nothing."""
        return blocks * sum(len(self._lookups(one)) for one in namespaces if one.table.windowed) <= MAX_LOOKED_FOR

    def here(self, namespace: Namespace, keys: Sequence[bytes]) -> bytes:
        """For each of the keys not 0 if this host has its block, in any tier."""
        found = bytes(len(keys))
        for number, has in enumerate(self._lookups(namespace)):
            present = map(has, keys)
            found = bytes(map(operator.or_, found, present) if number else present)
        return found

    def completes(self, claim: Claim, place: int, namespace: Namespace, keys: bytes) -> bool:
        """True if this host still has what the store lacks of the window before the end of a claim.

        `place`: of the namespace in the claim.
        """
        stored = claim.stored.get(place, set())
        numbers = [one for one in range(first_of_window(namespace, claim.end), claim.end) if one not in stored]
        return all(self.here(namespace, [keys[one * KEY_BYTES : (one + 1) * KEY_BYTES] for one in numbers]))

    def _lookups(self, namespace: Namespace) -> list[Has]:
        """Of those tiers that have any block of it."""
        found = self._index.lookup(namespace.table), self._lookup_below(namespace)
        return [lookup for lookup in found if lookup is not None]


def split(keys: bytes) -> list[bytes]:
    """Packed keys, one by one."""
    return [key for (key,) in _KEY.iter_unpack(keys)]
