"""The reuse curve: recent look-ups by the size of cache that would have had them, in a histogram that forgets.

Sizes are on a logarithmic scale, 16 steps to each doubling, so that a curve over all sizes is a few hundred numbers.
Time is in slices: results cover the newest ones, and an old slice is dropped as a whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf

WINDOW_S = 4 * 3600.0
SLICES = 8
"""Results cover the last 3.5 to 4 hours."""
SLICE_S = WINDOW_S / SLICES

_FINE_BITS = 4
_MISSED = -1  # instead of a step: no cache would have had it


class _Slice:
    """Look-ups in a part of the window; `blocks` by step of the size that has them."""

    __slots__ = ("asked", "blocks", "hit", "sampled", "since_s")

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.asked = self.hit = self.sampled = 0
        self.blocks: dict[int, int] = {0: 0, _MISSED: 0}


class RecentLookups:
    """Blocks looked up in the last WINDOW_S, and the sizes of cache that they need."""

    def __init__(self, now_s: float) -> None:
        self._slices = deque([_Slice(now_s)])

    @property
    def end_s(self) -> float:
        """When the newest slice ends."""
        return self._slices[-1].since_s + SLICE_S

    def turn(self, now_s: float) -> bool:
        """Drop old slices; True when a slice ends with this."""
        if now_s < self.end_s:
            return False
        self._slices.append(_Slice(now_s))
        while now_s - self._slices[0].since_s > WINDOW_S or len(self._slices) > SLICES:
            self._slices.popleft()
        return True

    def add(self, asked: int, hit: int, unsampled: bool) -> None:
        """A look-up as it was answered. An `unsampled` one has no sampled block: its actual run counts."""
        now = self._slices[-1]
        now.asked += asked
        now.hit += hit
        if unsampled:
            now.blocks[0] += asked

    def add_run(self, asked: int, positions: Sequence[int], needed: Sequence[float], rate: int) -> None:
        """A look-up of `asked` blocks: those at `positions` need a cache of the bytes given (`inf`: none has them).

        One block in `rate` has a position here. A cache that lacks the one at p, but has those before it, has a run of
        p + 1 - rate blocks on average. `needed` may fall; the largest so far counts. It may end early, after the first
        block that no cache has.
        """
        now = self._slices[-1]
        now.sampled += len(positions)
        blocks = now.blocks
        step, start, beyond = 0, 0, 0.0  # the run so far, and the size at which it grows
        for at, size in zip(positions, needed, strict=False):
            if size >= beyond:
                end = at + 1 - rate
                blocks[step] = blocks.get(step, 0) + end - start
                start = end
                if size == inf:
                    blocks[_MISSED] += asked - start
                    return
                step = step_of(int(size))
                beyond = step_end(step)
        blocks[step] = blocks.get(step, 0) + asked - start

    @property
    def sampled(self) -> int:
        """Sampled blocks that were looked up."""
        return sum(one.sampled for one in self._slices)

    @property
    def asked(self) -> int:
        """All blocks that were looked up."""
        return sum(one.asked for one in self._slices)

    def hit_rate(self) -> float:
        """The share of them found in some tier."""
        return sum(one.hit for one in self._slices) / max(1, self.asked)

    def since_s(self) -> float:
        """Start of the period covered."""
        return self._slices[0].since_s

    def hit_rates(self, sizes_bytes: Sequence[int]) -> list[float]:
        """The hit rate that an LRU cache of each of these sizes, ascending, would have had."""
        blocks: dict[int, int] = {}
        for one in self._slices:
            for step, count in one.blocks.items():
                blocks[step] = blocks.get(step, 0) + count
        asked = max(1, sum(blocks.values()))
        del blocks[_MISSED]
        rates, steps, hits, at = [], sorted(blocks), 0.0, 0
        for size in sizes_bytes:
            while at < len(steps) and step_end(steps[at]) <= size + 1:
                hits += blocks[steps[at]]
                at += 1
            part = blocks[steps[at]] * _share_within(steps[at], size) if at < len(steps) else 0.0
            rates.append(min(max((hits + part) / asked, 0.0), 1.0))
        return rates


def step_of(size: int) -> int:
    """The step of a size in bytes."""
    shift = max(0, size.bit_length() - _FINE_BITS - 1)
    return (shift << _FINE_BITS) + (size >> shift)


def step_end(step: int) -> int:
    """The smallest size beyond a step."""
    shift = max(0, (step >> _FINE_BITS) - 1)
    return (step + 1 - (shift << _FINE_BITS)) << shift


def _share_within(step: int, size: int) -> float:
    """The part of a step that is at most `size`."""
    start, end = step_end(step - 1), step_end(step)
    return max(0.0, min((size + 1 - start) / (end - start), 1.0))
