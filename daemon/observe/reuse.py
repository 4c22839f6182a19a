"""What-if estimate: the hit rate that caches of other sizes would have.

Every look-up and every store goes to a `ReuseStack`, which keeps a sample of the blocks in the order of their last use.
A look-up asks for a chain; an LRU cache of C bytes has the leading run of blocks whose reuse distances are all at most
C (leaves go first, so a block never stays longer than the one before it). The first missing block of the sample tells
where the run ends: there, or somewhat before. At a rate of 1/R the run ends R - 1 blocks before it on average (the
number of failures before a success is geometric); if none is missing, the whole chain is there. So:

    chain       0  1  2  3  4  5  6  7  8  9 10 11      rate 1/4
    sample               3        6        9
    distance             1 GiB    1 GiB    6 GiB
    a cache of  512 MiB has 3 - 3 = 0 blocks, one of 2 GiB 9 - 3 = 6, one of 8 GiB all 12

The mean over all samples is the true length, at any rate and for any chain. Counting misses instead of hits goes one
step further than the correction of SHARDS (SHARDS-adj in Waldspurger et al., FAST 2015), which attributes a sample's
surplus or shortage to the most used blocks: these, system prompts above all, are few, and so sampled badly; misses come
from many different blocks.

Bounds: MAX_SAMPLES blocks in the sample, MAX_SAMPLES_PER_REQUEST of one request, and those of `Pace`: each lowers the
rate when it is reached, and after a quiet slice of the window the rate doubles again.
"""

from __future__ import annotations

from bisect import bisect_left as _place
from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest
from math import ceil, inf, log2
from typing import Any, NamedTuple

from tiercache.daemon.ground.slices import Steps, finish
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.protocol.messages import KEY_BYTES

from .reuse_curve import RecentLookups
from .reuse_stack import (
    MAX_SHIFT,
    NAME_START,
    Looked,
    ReuseStack,
    chosen,
    is_chosen,
    marks,
    still_chosen,
)
from .traffic import PROBE_ENGINE

MAX_SAMPLES = 16384
"""Blocks in the sample: about 2.5 MB."""
MAX_SAMPLES_PER_REQUEST = 512
QUIET = 4
"""The rate doubles after a slice in which every bound was missed by this factor."""
MIN_SAMPLED_LOOKUPS = 1000
"""Sampled blocks looked up within the window before there is a curve."""
TOGETHER_S = 1.0
"""The chain that a store continues becomes newer with it, so that it is evicted after it. This is done at the first
store after a look-up; then, when stores follow one another, after this time or when they have added half as much
again."""
MAX_NOTED = 64
_MARKS_EACH = 128
"""One sampled block costs as much to check as this number of membership tests."""
MAX_NOTED_BYTES = 4096 * KEY_BYTES
"""Beyond them notes are processed, the oldest first (`work`)."""
MOST_NOTED = 8 * MAX_NOTED
MOST_NOTED_BYTES = 4 << 20
"""Beyond them notes are processed with each further request."""
LOOKED_INTO = 512
"""Sampled blocks processed in one go, about a millisecond; the request in progress is finished."""
TIMES_DRAM = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
TIMES_BELOW = (1 / 2, 1, 2)


_Noted = tuple[float, Sequence[Namespace], bytes | None, bytes, int, int]
"""Time, namespaces, parent (None for a look-up), keys, how many were in DRAM and below it. A flush has no keys."""


MAX_CHAIN = 512
MAX_TAIL_SAMPLES = 16384
"""Of all chains together; beyond that the oldest are dropped."""


MAX_SAMPLES_PER_S = 500
"""Sampled blocks looked up or stored, over SAMPLES_S: long, so that bursts do not lower the rate."""
SAMPLES_S = 40.0
MAX_REQUESTS_PER_S = 30
"""Requests with any sampled block, over REQUESTS_S; they cost the most, and those without next to nothing."""
REQUESTS_S = 4.0
SUSTAINED_S = 2.0
"""Shorter excess is ignored: to have fewer such requests takes a much lower rate, for half an hour or more."""


class Pace:
    """Measures the work. Within both bounds it is below 1 ms of a core per second."""

    def __init__(self, now_s: float) -> None:
        self._samples = _Bound(MAX_SAMPLES_PER_S, SAMPLES_S, 0.0, now_s)
        self._requests = _Bound(MAX_REQUESTS_PER_S, REQUESTS_S, SUSTAINED_S, now_s)
        self._each = 0.0  # samples per request

    def spend(self, samples: int, now_s: float) -> int:
        """Count a request and its sampled blocks. Returns how often to halve the rate now: nearly always 0."""
        too_many, too_often = self._samples.add(samples, now_s), self._requests.add(1, now_s)
        self._each += (samples - self._each) / 16
        if not too_many and not too_often:
            return 0
        self._samples.begin(now_s)
        self._requests.begin(now_s)
        if too_often:  # so low a rate that at most half of the allowed requests have any
            return 1 + ceil(log2(max(self._each, 1.0) * max(too_often, 1.0)))
        return 1

    def turn(self) -> float:
        """The largest part of a bound that was reached since the last turn."""
        return max(self._samples.turn(), self._requests.turn())


class _Bound:
    """A limit per second, over a span of time; it is exceeded once excess has lasted for `patience_s`."""

    def __init__(self, per_s: float, span_s: float, patience_s: float, now_s: float) -> None:
        self._count = self._worst = 0
        self._most = per_s * span_s
        self._span_s = span_s
        self._patience_s = patience_s
        self._since_s = now_s

    def add(self, count: int, now_s: float) -> float:
        """By what factor the limit was exceeded; 0 when it was not."""
        past_s = now_s - self._since_s
        if past_s >= self._span_s:
            self.begin(now_s)
            past_s = 0.0
        self._count += count
        if self._count <= self._most or past_s < self._patience_s:
            return 0.0
        return self._span_s / max(past_s, 1.0)

    def begin(self, now_s: float) -> None:
        """Begin another span."""
        self._worst = max(self._worst, self._count)
        self._count, self._since_s = 0, now_s

    def turn(self) -> float:
        """The largest part of the limit reached in one span since the last turn."""
        worst, self._worst = max(self._worst, self._count), 0
        return worst / self._most


class Tail(NamedTuple):
    """The sampled blocks in a chain up to some block, from the root on.

    The first `used` of them were used at `used_s`, perhaps by a look-up, the others since: these are newer than the
    blocks before them until all are used again.
    """

    used_s: float
    looked_up: bool
    used: int
    chain: list[bytes]


class Tails:
    """Tails by the last block of each, `key[8:16]` and a tag of the namespace."""

    def __init__(self) -> None:
        self._tails: dict[bytes, Tail] = {}
        self._samples = 0

    def put(self, end: bytes, tail: Tail) -> None:
        """Remember the chain up to block `end`, which a store may continue."""
        self.take(end)
        if tail.chain:
            if len(tail.chain) > MAX_CHAIN:
                tail = tail._replace(chain=tail.chain[-MAX_CHAIN:])
            self._tails[end] = tail
            self._samples += len(tail.chain)
            while self._samples > MAX_TAIL_SAMPLES:
                self.take(next(iter(self._tails)))

    def take(self, end: bytes) -> Tail | None:
        """Return the tail of a block and forget it; None if there is none."""
        tail = self._tails.pop(end, None)
        if tail is not None:
            self._samples -= len(tail.chain)
        return tail

    def thin(self, shift: int) -> None:
        """Keep the samples of a lower rate."""
        for end, tail in self._tails.items():
            self._tails[end] = tail._replace(chain=still_chosen(tail.chain, shift))
        self._samples = sum(len(tail.chain) for tail in self._tails.values())

    def clear(self) -> None:
        """Forget all."""
        self._tails.clear()
        self._samples = 0


class WhatIf:
    """The estimate for one daemon: the bytes of DRAM and of the tier below. Event loop only.

    Requests are noted when they come, in a microsecond or two, and processed together: when the estimate is requested,
    or when many wait and there is time (`work`).
    """

    def __init__(
        self, clock_s: Callable[[], float], dram_bytes: int, below_bytes: int = 0, max_samples: int = MAX_SAMPLES
    ) -> None:
        self._noted: deque[_Noted] = deque()
        self._noted_bytes = 0
        self._left = 0  # sampled blocks that may still be processed in this go
        self._stack = ReuseStack()
        self.capacities = capacities(dram_bytes, below_bytes)
        self._lookups = RecentLookups(clock_s())
        self._clock_s = clock_s
        self._dram_bytes = dram_bytes
        self._all_bytes = dram_bytes + below_bytes
        self._max_samples = max_samples
        self._counted_shift = 0  # of what counts: less than the sample's while its newest part has no past yet
        self._tags: dict[int, bytes] = {}
        self._tails = Tails()
        self._pace = Pace(clock_s())
        self._most_at_once = 0  # in this slice

    @property
    def stack(self) -> ReuseStack:
        """The sample."""
        finish(self.catch_up())
        return self._stack

    @property
    def lookups(self) -> RecentLookups:
        """Sizes that look-ups needed."""
        finish(self.catch_up())
        return self._lookups

    # --- what the cache is asked and given ---------------------------------------------------------

    def looked_up(self, namespaces: Sequence[Namespace], keys: bytes, dram_blocks: int, below_blocks: int) -> None:
        """A client asked for `keys` in all of `namespaces`. The counts are of leading blocks."""
        self._note((self._clock_s(), namespaces, None, keys, dram_blocks, below_blocks))

    def stored(self, namespace: Namespace, parent: bytes, keys: bytes) -> None:
        """A client stores the run `keys` below `parent`. The chain it continues stays longer with it."""
        self._note((self._clock_s(), (namespace,), parent, keys, 0, 0))

    def forget(self, namespaces: Sequence[Namespace]) -> None:
        """These namespaces were flushed."""
        self._note((self._clock_s(), namespaces, None, b"", 0, 0))

    def _note(self, noted: _Noted) -> None:
        self._noted.append(noted)
        self._noted_bytes += len(noted[3])
        if len(self._noted) >= MOST_NOTED or self._noted_bytes > MOST_NOTED_BYTES:
            self._look_into_some()

    def work(self) -> bool:
        """Process some of the notes, if there are many; True while there is more."""
        if self._has_many:
            self._look_into_some()
        return self._has_many

    @property
    def _has_many(self) -> bool:
        return len(self._noted) >= MAX_NOTED or self._noted_bytes > MAX_NOTED_BYTES

    def catch_up(self) -> Steps[None]:
        """Process the notes."""
        until_s = self._clock_s()  # what comes meanwhile is left for the next request
        while self._noted and self._noted[0][0] <= until_s:
            self._look_into_some()
            if self._noted:
                yield

    def _look_into_some(self) -> None:
        """Process a part of the notes, the oldest, at least one."""
        self._left = LOOKED_INTO
        while self._noted and self._left > 0:
            self._look_into(self._take())

    def _take(self) -> list[_Noted]:
        """Take some notes, as many as are searched together for sampled blocks."""
        taken, size = list[_Noted](), 0
        while self._noted and (not taken or size + len(self._noted[0][3]) <= MAX_NOTED_BYTES):
            taken.append(self._noted.popleft())
            size += len(taken[-1][3])
        self._noted_bytes -= size
        return taken

    def _put_back(self, noted: Sequence[_Noted]) -> None:
        """Return notes that are not processed now."""
        self._noted.extendleft(reversed(noted))
        self._noted_bytes += sum(len(one[3]) for one in noted)

    def _look_into(self, noted: list[_Noted]) -> None:
        """Process notes. Most have no sampled blocks, which one search tells. The rest may be put back."""
        shift, sample, start = self._stack.shift, marks(b"".join([one[3] for one in noted]), self._stack.shift), 0
        self._left -= 1 + len(sample) // _MARKS_EACH
        for number, one in enumerate(noted):
            at_s, namespaces, parent, keys, dram_blocks, below_blocks = one
            if at_s >= self._lookups.end_s:
                self._turn(at_s)
            if self._stack.shift < shift or (self._left <= 0 and number):
                self._put_back(noted[number:])  # at a higher rate, or later
                return
            blocks = len(keys) // KEY_BYTES
            end = start + blocks
            has_some = sample.find(1, start, end) >= 0
            start = end
            if not keys:
                self._forget(namespaces)
                continue
            if namespaces[0].spec.engine == PROBE_ENGINE:
                continue
            if parent is None:
                self._lookups.add(blocks, dram_blocks + below_blocks, not has_some)
            if has_some:
                self._sample(one)
            elif parent:
                self._move_tail(namespaces[0], parent, keys)

    def _sample(self, noted: _Noted) -> None:
        """Process a look-up or a store of which some blocks may be in the sample."""
        at_s, namespaces, parent, keys, dram_blocks, below_blocks = noted
        positions = self._chosen(keys, len(namespaces))
        if positions:
            self._left -= len(positions) * len(namespaces)
            slower = self._pace.spend(len(positions) * len(namespaces), at_s)
            if parent is None:
                self._look_up(at_s, namespaces, keys, positions, dram_blocks, below_blocks)
            else:
                self._store(at_s, namespaces[0], parent, keys, positions)
            if slower:
                self._thin(min(self._stack.shift + slower, MAX_SHIFT))
        elif positions is not None and parent:
            self._move_tail(namespaces[0], parent, keys)

    def _look_up(
        self,
        at_s: float,
        namespaces: Sequence[Namespace],
        keys: bytes,
        positions: list[int],
        dram_blocks: int,
        below_blocks: int,
    ) -> None:
        asked, found = len(keys) // KEY_BYTES, dram_blocks + below_blocks
        window = _window(namespaces)
        certain = len(positions) if window else _place(positions, found)
        looked = [self._stack.look(keys, positions, self._tag(namespace), certain) for namespace in namespaces]
        self._count(asked, keys, positions, self._needed(namespaces, looked, positions, dram_blocks, found))
        if window:  # what lies before the window is not held either
            held = positions[_place(positions, found - window) : _place(positions, found)][::-1]
            looked = [self._stack.look(keys, held, self._tag(namespace), len(held)) for namespace in namespaces]
        elif certain:
            self._remember(at_s, namespaces, keys, positions[:certain], found)
        self._use([name for names in zip_longest(*(one.known for one in looked)) for name in names if name])

    def _store(self, now_s: float, namespace: Namespace, parent: bytes, keys: bytes, positions: list[int]) -> None:
        tag = self._tag(namespace)
        names = _names(keys, positions, tag)
        if namespace.table.windowed:  # no chain: the last one is the newest
            self._use(names[::-1])
            return
        above = self._tails.take(parent[NAME_START:] + tag) if parent else None
        chain = names if above is None else above.chain + names
        if above is None or above.looked_up or now_s - above.used_s >= TOGETHER_S or 2 * len(chain) >= 3 * above.used:
            above = Tail(now_s, False, len(chain), chain)
            names = chain
        self._tails.put(keys[NAME_START - KEY_BYTES :] + tag, above._replace(chain=chain))
        self._use(names)

    def _move_tail(self, namespace: Namespace, parent: bytes, keys: bytes) -> None:
        """A store without sampled blocks continues where another ended."""
        tag = self._tag(namespace)
        tail = self._tails.take(parent[NAME_START:] + tag)
        if tail is not None and not namespace.table.windowed:
            self._tails.put(keys[NAME_START - KEY_BYTES :] + tag, tail)

    def _forget(self, namespaces: Sequence[Namespace]) -> None:
        tags = {self._tags[one.number] for one in namespaces if one.number in self._tags}
        if tags:
            self._stack.forget(tags)
            self._left = 0
        self._tails.clear()

    def _tag(self, namespace: Namespace) -> bytes:
        tag = self._tags.get(namespace.number)
        if tag is None:
            tag = self._tags[namespace.number] = namespace.number.to_bytes(2, "little")
            self._stack.frame_bytes[tag] = namespace.spec.frame_bytes
        return tag

    def _needed(
        self,
        namespaces: Sequence[Namespace],
        looked: list[Looked],
        positions: Sequence[int],
        dram_blocks: int,
        found: int,
    ) -> list[float]:
        """For each block the size of cache that has it in all namespaces."""
        window = _window(namespaces)
        columns = [
            one.needed
            for namespace, one in zip(namespaces, looked, strict=True)
            if window or not namespace.table.windowed  # the others say more: they need every block
        ]
        needed = columns[0] if len(columns) == 1 else list(map(max, *columns))
        for number, at in enumerate(positions):
            if at >= found:
                break
            if needed[number] == inf:  # stored before counting began, by an earlier daemon perhaps
                needed[number] = self._dram_bytes if at < dram_blocks else self._all_bytes
        return windowed(positions, needed, window) if window else needed

    def _count(self, asked: int, keys: bytes, positions: list[int], needed: list[float]) -> None:
        if self._counted_shift > self._stack.shift:
            sample = {at for at in positions if is_chosen(keys[at * KEY_BYTES + NAME_START :][:2], self._counted_shift)}
            needed = [size for at, size in zip(positions, needed, strict=False) if at in sample]
            positions = [at for at in positions if at in sample]
        self._lookups.add_run(asked, positions, needed, 1 << self._counted_shift)

    def _use(self, names: list[bytes]) -> None:
        """Mark a chain as used, its first block as the newest: the last one would be evicted first."""
        if names:
            self._stack.use(reversed(names))
            self._stack.trim(self.capacities[-1])
            if len(self._stack) > self._max_samples:
                self._thin(self._stack.shift + 1)

    def _remember(
        self, now_s: float, namespaces: Sequence[Namespace], keys: bytes, positions: Sequence[int], found: int
    ) -> None:
        """Remember where a look-up ended: a store may continue there."""
        end = keys[(found - 1) * KEY_BYTES + NAME_START : found * KEY_BYTES]
        for namespace in namespaces:
            tag = self._tag(namespace)
            self._tails.put(end + tag, Tail(now_s, True, len(positions), _names(keys, positions, tag)))

    # --- the rate --------------------------------------------------------------------------------

    def _chosen(self, keys: bytes, namespaces: int) -> list[int] | None:
        """Positions of the keys in the sample; lowers the rate from now on if there are too many.

        None where no rate is low enough for one request: the keys are not hashes.
        """
        shift = self._stack.shift
        count = marks(keys, shift).count(1)
        if count * namespaces > self._most_at_once:  # more than the most so far
            most = max(1, MAX_SAMPLES_PER_REQUEST // namespaces)
            while count > most:
                if shift == MAX_SHIFT:
                    return None
                shift += 1
                count = marks(keys, shift).count(1)
            self._thin(shift)
            self._most_at_once = count * namespaces
        return chosen(keys, shift)

    def _thin(self, shift: int) -> None:
        if shift > self._stack.shift:
            self._stack.thin(shift)
            self._left = 0
            self._counted_shift = max(self._counted_shift, shift)
            self._tails.thin(shift)

    def _turn(self, now_s: float) -> None:
        """Begin a new slice if it is time, and perhaps double the rate."""
        if not self._lookups.turn(now_s):
            return
        self._counted_shift = self._stack.shift  # all of the sample has had a slice of time to be used again
        bounds = self._pace.turn(), len(self._stack) / self._max_samples, self._most_at_once / MAX_SAMPLES_PER_REQUEST
        if max(bounds) * QUIET <= 1 and self._stack.shift:
            self._stack.thicken()
        self._most_at_once = 0

    # --- what comes of it ------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """What `stats` shows. The curve is empty before MIN_SAMPLED_LOOKUPS. About 0.3 ms, once caught up."""
        finish(self.catch_up())
        self._turn(self._clock_s())
        lookups = self._lookups
        sizes = self.capacities if lookups.sampled >= MIN_SAMPLED_LOOKUPS else []
        return {
            "sample_rate": 2.0**-self._counted_shift,
            "sampled_blocks": len(self._stack),
            "accessed_blocks": lookups.asked,
            "window_s": self._clock_s() - lookups.since_s(),
            "hit_rate": lookups.hit_rate(),
            "curve": [
                {"capacity_bytes": size, "hit_rate": rate}
                for size, rate in zip(sizes, lookups.hit_rates(sizes), strict=True)
            ],
        }


def capacities(dram_bytes: int, below_bytes: int) -> list[int]:
    """The sizes of the curve, ascending: DRAM alone, and with a tier below."""
    sizes = {int(dram_bytes * times) for times in TIMES_DRAM}
    if below_bytes:
        sizes |= {dram_bytes + int(below_bytes * times) for times in TIMES_BELOW}
    return sorted(sizes)


def windowed(positions: Sequence[int], needed: Sequence[float], window: int) -> list[float]:
    """For each position the cache size that has a whole window before the end of some run from there on."""
    whole, first = [], 0
    for number, at in enumerate(positions):
        while positions[first] <= at - window:
            first += 1
        whole.append(max(needed[first : number + 1]))
    least = inf
    return [least := min(least, size) for size in reversed(whole)][::-1]


def _window(namespaces: Sequence[Namespace]) -> int:
    """How many blocks before its end a match needs; 0: all of them."""
    for namespace in namespaces:
        if not namespace.table.windowed:
            return 0
    return max(namespace.spec.window_blocks for namespace in namespaces)


def _names(keys: bytes, positions: Sequence[int], tag: bytes) -> list[bytes]:
    return [keys[at * KEY_BYTES + NAME_START : (at + 1) * KEY_BYTES] + tag for at in positions]
