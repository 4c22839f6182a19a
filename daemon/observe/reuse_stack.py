"""Approximate reuse (stack) distances in bytes, for a sample of blocks.

The stack distance of a block is how many bytes of other blocks were used since its own last use: an LRU cache of that
size, and no smaller one, still has it (Mattson et al., 1970). A block is in the sample when its key says so (spatial
sampling: SHARDS, Waldspurger et al., FAST 2015): one key in 2^shift, each standing for 2^shift blocks.

    oldest                                                              newest
    ├── 4 GiB ──┼── 2 GiB ──┼─ 1 GiB ─┼─ ... ─┼─ one request ─┼─ one request ┤     spans, with the bytes in each
         ↑ stamp of a block: all spans after its own, and its share of its own, were used since

Exact distances need a tree and a walk through it for each block. Here one sum over a few hundred spans serves a whole
request: each request begins a span, and old spans are joined so that none is longer than a small part of what was used
after it. The position of a block in its span is uncertain by that much.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from tiercache.protocol.messages import KEY_BYTES

MAX_SHIFT = 16
"""One block in 65,536: with the limit on samples enough for half a billion blocks."""
MAX_SPANS = 512
FINENESS = 32
"""A joined span has at most this part of the bytes that were used after it."""
_LEAST_SPAN = 2048  # ... or this part of all bytes
_TRIM_SLACK = 16  # what is too old is dropped when it is this part of what is kept

NAME_START = 8
"""The sample is chosen by bytes 8 and 9 of a key; names in the sample are bytes 8 ..< 16 and a tag of the namespace."""
_SHIFT_BITS = 5
_SHIFT_MASK = (1 << _SHIFT_BITS) - 1
_ONE = 1 << _SHIFT_BITS
_ENDLESS = 1 << 62
_TAG = KEY_BYTES - NAME_START
_CHOOSE = [bytes(int(byte < 256 >> shift) for byte in range(256)) for shift in range(9)]


def chosen(keys: bytes, shift: int) -> list[int]:
    """Positions of the keys in the sample, ascending. A few nanoseconds for a key that is not in it."""
    if shift == 0:
        return list(range(len(keys) // KEY_BYTES))
    sample, found = marks(keys, shift), []
    at = sample.find(1)
    while at >= 0:
        found.append(at)
        at = sample.find(1, at + 1)
    return found


def marks(keys: bytes, shift: int) -> bytes:
    """For each key 1 when it is in the sample, else 0. A few nanoseconds a key."""
    first = keys[NAME_START::KEY_BYTES].translate(_CHOOSE[min(shift, 8)])
    if shift <= 8 or first.find(1) < 0:
        return first
    second = keys[NAME_START + 1 :: KEY_BYTES].translate(_CHOOSE[shift - 8])
    both = int.from_bytes(first, "little") & int.from_bytes(second, "little")
    return both.to_bytes(len(first), "little")


def is_chosen(name: bytes, shift: int) -> bool:
    """True if a name is in the sample at this rate."""
    return name[0] < 256 >> shift if shift <= 8 else name[0] == 0 and name[1] < 256 >> (shift - 8)


def still_chosen(names: Iterable[bytes], shift: int) -> list[bytes]:
    """Those of the names that are in the sample at this rate."""
    first, second = _below(shift)
    if second == 256:
        return [name for name in names if name[0] < first]
    return [name for name in names if name[0] < first and name[1] < second]


def _below(shift: int) -> tuple[int, int]:
    """Upper limits of the first two bytes of sampled names."""
    return 256 >> min(shift, 8), 256 >> max(0, shift - 8)


class Looked(NamedTuple):
    """What is known of sampled blocks.

    `needed`: for each the size in bytes of the smallest LRU cache that still has it, `inf` for an unknown one; `known`:
    the names of the others.
    """

    needed: list[float]
    known: list[bytes]


class ReuseStack:
    """A sample of blocks in the order of their last use. Event loop only; about a microsecond per block.

    Names are `key[8:16]` and a tag for the namespace; `frame_bytes` has the size of a block for each tag.
    """

    def __init__(self) -> None:
        self.shift = 0
        self.used_bytes = 0
        self.frame_bytes: dict[bytes, int] = {}
        # Ascending stamps, since a used name moves to the end. A stamp grows with time and has in its low bits the
        # shift at which the block was counted: what it counts for in its span.
        self._stamps: dict[bytes, int] = {}
        self._number = 1
        self._starts: list[int] = [0]
        self._bytes: list[int] = [0]

    def __len__(self) -> int:
        return len(self._stamps)

    def __contains__(self, name: bytes) -> bool:
        return name in self._stamps

    def look(self, keys: bytes, positions: Sequence[int], tag: bytes, certain: int) -> Looked:
        """The blocks of a namespace at these positions, up to the first unknown one after `certain` of them."""
        starts, spans, get, frame_bytes = self._starts, self._bytes, self._stamps.get, self.frame_bytes[tag]
        needed: list[float] = []
        known: list[bytes] = []
        low = high = after = 0  # the span of the block before: those of a request lie in one or two
        slope = 0.0
        for at in positions:
            name = keys[at * KEY_BYTES + NAME_START : (at + 1) * KEY_BYTES] + tag
            stamp = get(name)
            if stamp is None:
                needed.append(inf)
                if len(needed) > certain:
                    break
                continue
            if not low <= stamp < high:
                span = bisect_right(starts, stamp) - 1
                low = starts[span]
                high = starts[span + 1] if span + 1 < len(starts) else self._number << _SHIFT_BITS
                after = sum(spans[span + 1 :]) + frame_bytes
                slope = spans[span] / (high - low)
            needed.append(after + (high - stamp - _ONE) * slope)
            known.append(name)
        return Looked(needed, known)

    def use(self, names: Iterable[bytes]) -> None:
        """These were used now, in this order: the last one is the newest. Unknown ones are added."""
        if len(self._starts) == MAX_SPANS:
            self._join()
        starts, spans, stamps, frames = self._starts, self._bytes, self._stamps, self.frame_bytes
        number, shift, before_bytes = self._number << _SHIFT_BITS | self.shift, self.shift, 0
        starts.append(self._number << _SHIFT_BITS)
        spans.append(0)
        new_bytes = low = high = span = 0
        for name in names:
            frame_bytes = frames[name[_TAG:]]
            stamp = stamps.pop(name, None)
            if stamp is not None:
                if not low <= stamp < high:
                    span = bisect_right(starts, stamp) - 1
                    low = starts[span]
                    high = starts[span + 1] if span + 1 < len(starts) else number + _ENDLESS
                counted = frame_bytes << (stamp & _SHIFT_MASK)
                spans[span] -= counted
                before_bytes += counted
            stamps[name] = number
            number += _ONE
            new_bytes += frame_bytes << shift
        spans[-1] += new_bytes
        self._number = number >> _SHIFT_BITS
        self.used_bytes += new_bytes - before_bytes

    def _join(self) -> None:
        """Join neighbours, from the newest on, as long as a span stays a small part of what was used after it."""
        starts, spans, after = [self._starts[-1]], [self._bytes[-1]], 0
        least = self.used_bytes // _LEAST_SPAN
        for start, span in zip(self._starts[-2::-1], self._bytes[-2::-1], strict=True):
            if spans[-1] + span <= max(least, after // FINENESS):
                starts[-1] = start
                spans[-1] += span
            else:
                after += spans[-1]
                starts.append(start)
                spans.append(span)
        if len(starts) > MAX_SPANS // 2:  # whole requests may be large spans: then join any two
            starts, spans = starts[1::2] + starts[-1:] * (len(starts) % 2), _pairs(spans)
        self._starts, self._bytes = starts[::-1], spans[::-1]

    def thin(self, shift: int) -> None:
        """Keep the samples of a lower rate: each counts for more. About 2 ms for 10,000 samples."""
        assert self.shift < shift <= MAX_SHIFT
        self.shift = shift
        mask, (first, second) = ~_SHIFT_MASK, _below(shift)
        self._stamps = {
            name: stamp & mask | max(stamp & _SHIFT_MASK, shift)
            for name, stamp in self._stamps.items()
            if name[0] < first and name[1] < second
        }
        self._recount()

    def thicken(self) -> None:
        """Double the rate from now on. New samples have no past: `WhatIf` waits until they have one."""
        assert self.shift > 0
        self.shift -= 1

    def trim(self, limit_bytes: int) -> None:
        """Drop what only a cache of more than `limit_bytes` would have."""
        if self.used_bytes <= limit_bytes + limit_bytes // _TRIM_SLACK:
            return
        doomed = []
        for name, stamp in self._stamps.items():
            if self.used_bytes <= limit_bytes:
                break
            doomed.append(name)
            counted = self.frame_bytes[name[_TAG:]] << (stamp & _SHIFT_MASK)
            self._bytes[bisect_right(self._starts, stamp) - 1] -= counted
            self.used_bytes -= counted
        for name in doomed:
            del self._stamps[name]

    def forget(self, tags: set[bytes]) -> None:
        """Drop the blocks of these namespaces."""
        self._stamps = {name: at for name, at in self._stamps.items() if name[_TAG:] not in tags}
        self._recount()

    def _recount(self) -> None:
        counted, frames, spans = 0, self.frame_bytes, list[int]()
        starts = [*self._starts[1:], self._number << _SHIFT_BITS]
        end = starts[0]
        for name, stamp in self._stamps.items():
            while stamp >= end:
                spans.append(counted)
                counted = 0
                end = starts[len(spans)]
            counted += frames[name[_TAG:]] << (stamp & _SHIFT_MASK)
        spans.append(counted)
        self._bytes = spans + [0] * (len(starts) - len(spans))
        self.used_bytes = sum(spans)

    def check_integrity(self) -> list[str]:
        """Every way in which stamps and spans disagree."""
        before = self._bytes, self.used_bytes
        self._recount()
        findings = []
        if before != (self._bytes, self.used_bytes):
            findings.append("the spans do not have the bytes of their blocks")
        stamps = list(self._stamps.values())
        if any(one >= other for one, other in pairwise(stamps)):
            findings.append("the stamps are not in the order of use")
        if list(accumulate(self._starts, max)) != self._starts or len(self._starts) > MAX_SPANS:
            findings.append("the spans are not in order")
        return findings


def _pairs(spans: list[int]) -> list[int]:
    """Sums of neighbours; an odd last one stays."""
    return [sum(spans[at : at + 2]) for at in range(0, len(spans), 2)]
