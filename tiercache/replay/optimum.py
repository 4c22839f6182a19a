"""The offline optimum, which knows every request in advance: the upper bound for all policies.

After each request it keeps, of the resident blocks and the request's own, the `capacity` blocks with the soonest next
use, and drops blocks never used again at once. That is Belady's MIN with bypass. A block's next use is no later than
that of any block after it in a chain, and of equals the deeper one goes first: so the kept blocks are always
prefix-closed, and hits are leading runs, as in the daemon.

It needs the whole trace: 16 bytes for each block access and some 200 for each different block.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from tiercache.protocol.messages import KEY_BYTES
from tiercache.replay.requests import RequestKind, TraceRequest

_NEVER = 1 << 40
_SPARE_ENTRIES = 4096


class Accesses:
    """A trace as numbers: the blocks of each request, and the next use of each block."""

    def __init__(self, requests: Iterable[TraceRequest]) -> None:
        numbers: dict[bytes, int] = {}
        blocks, self.ends, self.counted = array("I"), array("q"), bytearray()
        self.depth = array("I")
        for request in requests:
            if request.kind is RequestKind.FORGET:
                continue  # so it is an upper bound there too
            keys = request.keys
            for at in range(0, len(keys), KEY_BYTES):
                key = keys[at : at + KEY_BYTES]
                number = numbers.get(key)
                if number is None:
                    number = numbers[key] = len(numbers)
                    self.depth.append(at // KEY_BYTES)
                blocks.append(number)
            self.ends.append(len(blocks))
            self.counted.append(request.kind in (RequestKind.ASK, RequestKind.LOOK))
        self.unique_blocks = len(numbers)
        self.blocks = np.frombuffer(blocks, "u4") if blocks else np.zeros(0, "u4")
        self.next_use = self._next_uses()

    @property
    def asked_blocks(self) -> int:
        """Block accesses that count: those of matches."""
        starts = [0, *self.ends]
        return sum(end - start for start, end, counted in zip(starts, self.ends, self.counted, strict=False) if counted)

    @property
    def longest(self) -> int:
        """Blocks of the longest request."""
        return int(np.diff(np.asarray(self.ends, "i8"), prepend=0).max(initial=0))

    def _next_uses(self) -> npt.NDArray[np.int64]:
        """For each access the number of the next request that asks for the block; `_NEVER` if none does."""
        ends = np.asarray(self.ends, "i8")
        request = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
        counted = np.frombuffer(self.counted, "u1").astype(bool)[request] if len(ends) else np.zeros(0, bool)
        # A store is not a use: the next use of a stored block and of those before it is the next match.
        order = np.argsort(self.blocks, kind="stable")
        following = np.full(len(self.blocks), _NEVER, "i8")
        same = self.blocks[order[1:]] == self.blocks[order[:-1]]
        when = np.where(counted[order], request[order], _NEVER)
        following[order[:-1][same]] = when[1:][same]
        if not counted.all():
            _skip_stores(order, same, when, following)
        return following

    def best_hits(self, capacity: int) -> int:
        """The most blocks that a cache of `capacity` blocks can hit. O(accesses * log)."""
        soonest: dict[int, int] = {}  # resident blocks and their next use
        heap: list[tuple[int, int, int]] = []  # latest and deepest first; outdated entries are skipped
        depth, hits, start = self.depth, 0, 0
        for end, counted in zip(self.ends, self.counted, strict=True):
            chain = self.blocks[start:end].tolist()
            following = self.next_use[start:end].tolist()
            start = end
            if counted:
                for block in chain:
                    if block not in soonest:
                        break
                    hits += 1
            for block, use in zip(chain, following, strict=True):
                if use == _NEVER:
                    soonest.pop(block, None)
                else:
                    soonest[block] = use
                    heapq.heappush(heap, (-use, -depth[block], block))
            while len(soonest) > capacity:
                use, _, block = heapq.heappop(heap)
                if soonest.get(block) == -use:
                    del soonest[block]
            if len(heap) > 2 * len(soonest) + _SPARE_ENTRIES:
                heap = [(-use, -depth[block], block) for block, use in soonest.items()]
                heapq.heapify(heap)
        return hits


def _skip_stores(
    order: npt.NDArray[np.int64],
    same: npt.NDArray[np.bool_],
    when: npt.NDArray[np.int64],
    following: npt.NDArray[np.int64],
) -> None:
    """If the next access of a block is a store, use the next match instead."""
    use = _NEVER
    for place in range(len(order) - 2, -1, -1):
        if not same[place]:
            use = _NEVER
        else:
            use = int(when[place + 1]) if when[place + 1] != _NEVER else use
        following[order[place]] = use
