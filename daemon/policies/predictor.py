"""Reuse predictor: learns from a sample of blocks how soon blocks are likely to be used again.

Every block belongs to a *class*, set by the request that used it last: whether that request went on where an earlier
one had ended and which turn of the chain it was, how many of its blocks were new, and how long it was. Blocks below
which requests diverge, such as a system prompt, have classes of their own, by how often and at what intervals they were
used. The worth of keeping a block follows from when blocks of its class were used again: see worths.py.

The sample is spatial: blocks whose key hash is below a threshold, which falls as there are more of them (SHARDS,
Waldspurger et al., FAST 2015). Samples outlive their blocks, so they also tell when an evicted block would have been
used.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.ma
import numpy.typing as npt

from tiercache.daemon.index.policy import USED, Touch
from tiercache.protocol.messages import KEY_BYTES

from .turnover import Turnover
from .worths import (
    AGES,
    CLASSES,
    Floats,
    age_bucket,
    age_buckets,
    chain_class,
    estimate,
    shared_class,
    worths_before,
)

MAX_SAMPLES = 16_384
LOOKED_AT = 8
"""Samples looked at for each new block once the sample is full: half of them go, but not all in one go of the loop."""
MAX_AT_ONCE = 512
"""Samples updated by one request."""
HORIZON = 256.0
"""Turnovers after which an unused block may leave the sample: no tier keeps it for as long."""
FIRST_EVENTS, MOST_EVENTS = 64, 8192
"""Sampled blocks stored or used between two estimates of the worths."""
FIRST_RETURNS = 32
"""Prompts that must have used sampled blocks again before the next estimate: a few say too little about the others."""
EVENTS_KEPT = 16 * MAX_SAMPLES
"""Observations beyond which all of them are halved: recent ones count more."""

_HASHES = 1 << 64
_WORD = (1 << 64) - 1
_GONE = CLASSES
"""The class of places in the columns that no sample has."""
_ODD, _HALF, _LESS = np.uint64(0x9E3779B97F4A7C15), np.uint64(32), np.uint64(29)


Sampled: TypeAlias = tuple[int, int, int]
"""A block of a prompt that is in the sample, or would be: its place in the prompt, from 0, its hash, and the hash of
the prompt's next block, or 0."""


class Again:
    """Tells whether a prompt is looked up again: by another worker, or repeatedly until it has been stored."""

    __slots__ = ("_last", "_turnover")

    def __init__(self, turnover: Turnover) -> None:
        self._turnover = turnover
        self._last = b"", 0

    def asked(self, keys: bytes) -> bool:
        """True if this prompt was also the last one looked up, with nothing stored since."""
        before, self._last = self._last, (keys[-KEY_BYTES:], self._turnover.stored_bytes)
        return before == self._last


class Context(NamedTuple):
    """What the current request says about the blocks it uses."""

    block_class: int
    turn: int
    length: int


class Predictor:
    """One for all tiers of a daemon. Event loop only; never blocks.

    A request costs some microseconds, plus about one for each of its sampled blocks, at most `MAX_AT_ONCE`. A refresh
    takes some milliseconds and is done in parts by the requests that follow. `secret` selects the sample: a client that
    does not know it can neither fill the sample nor keep its blocks out.
    """

    def __init__(self, turnover: Turnover, secret: int = 0) -> None:
        self.turnover = turnover
        self.version = 0
        """Raised when `worth` has changed."""
        self.worth: Floats = worths_before()
        """Expected hits per turnover, by class and age bucket."""
        self._secret = secret
        self._last: tuple[bytes, list[Sampled]] = b"", []  # the prompt that was looked up last
        self._samples: dict[int, int] = {}  # each sample's place in the columns, by the hash of its key
        self._doubtful: list[int] = []  # samples to look at: some of them are to go
        self._places: list[int] = []  # free places in the columns
        self._classes = array("H")
        self._used_at = array("d")
        self._contexts: list[Context] = []  # of the request that used it last
        self._following = array("Q")  # the hash of the block that came after it; 0: none has
        self._uses = array("B")
        self._shared = bytearray()  # whether requests diverge below it
        self._threshold = _HASHES
        self._used = np.zeros((CLASSES, AGES))
        self._used_cells = self._used.reshape(-1)
        self._ended = np.zeros((CLASSES, AGES))  # left the sample at that age
        self._events = 0
        self._returns = 0  # prompts that used sampled blocks again
        self._refresh_at = FIRST_EVENTS
        self._refreshing: Iterator[bool] | None = None
        self.expected: dict[bytes, Context] = {}
        """What a look-up that missed said about this block, the first of a chain that will probably be stored."""
        self._stored: dict[bytes, Context] = {}  # by the last block of a store, below which the next store may continue
        self._again = Again(turnover)

    # --- a request -------------------------------------------------------------------------------

    def asked(self, keys: bytes, found_dram: int, found: int) -> Touch:
        """A prompt was looked up; `found` of its blocks are known, `found_dram` in DRAM."""
        if self._again.asked(keys):
            return USED
        sampled = self._sampled(keys)
        length = len(keys) // KEY_BYTES
        context = self._classify(sampled, found, length)
        self._observe(sampled, context, found)
        for first in {found_dram, found}:
            if first < length:
                _put(self.expected, keys[first * KEY_BYTES : (first + 1) * KEY_BYTES], context)
        if self._refreshing is None and self._events >= self._refresh_at and self._returns >= FIRST_RETURNS:
            self._refreshing = self._refresh()
        if self._refreshing is not None and next(self._refreshing, None) is None:
            self._refreshing = None
        return Touch(by_client=True, counts=True, request_class=context.block_class)

    def stored(self, parent: bytes, keys: Sequence[bytes]) -> None:
        """A client has stored a run of blocks, each below the one before it, the first below `parent`."""
        context = self.expected.get(keys[0]) or self._stored.get(parent)
        if context is None:  # not looked up before
            context = Context(chain_class(0, len(keys), len(keys)), 0, 0)
        _put(self._stored, keys[-1], context)
        samples = self._samples
        new = [(hashed, following) for _, hashed, following in self._sampled(b"".join(keys)) if hashed not in samples]
        if new:
            self._begin(new, context)

    def _sampled(self, keys: bytes) -> list[Sampled]:
        """Which of the packed keys are in the sample, or would be; at most `MAX_AT_ONCE`.

        Reuses the last result: a store is mostly the end of the last look-up.
        """
        before, sampled = self._last
        if before.endswith(keys):
            skipped = (len(before) - len(keys)) // KEY_BYTES
            if skipped:
                return [(number - skipped, hashed, next_) for number, hashed, next_ in sampled if number >= skipped]
            return sampled
        self._last = keys, sampled = keys, self._choose(keys)
        return sampled

    def _choose(self, keys: bytes) -> list[Sampled]:
        hashed, count = hashes(keys, self._secret), len(keys) // KEY_BYTES
        threshold = min(self._threshold, _WORD)
        chosen = (hashed[:-1] < threshold).nonzero()[0]
        while len(chosen) > MAX_AT_ONCE:
            threshold //= 2
            chosen = (hashed[:-1] < threshold).nonzero()[0]
            if threshold == 0:
                return []  # the same key over and over
        if len(chosen) == count:
            every = hashed.tolist()
            return list(zip(range(count), every, every[1:], strict=False))
        return list(zip(chosen.tolist(), hashed[chosen].tolist(), hashed[chosen + 1].tolist(), strict=True))

    def _classify(self, sampled: list[Sampled], found: int, length: int) -> Context:
        """Classify a request by its deepest known sampled block: where its last user ended, and its turn."""
        seen, last, slack = found, None, 1
        for number, hashed, _ in reversed(sampled):
            if (place := self._samples.get(hashed)) is not None:
                last = self._contexts[place]
                if number + 1 > seen:
                    seen = number + 1
                    slack += 2 * (_HASHES // max(1, self._threshold)) - 2
                break
        turn = 1 if seen else 0
        if last is not None and last.length <= seen + slack:
            turn = 1 + max(1, last.turn)
        return Context(chain_class(turn, length - seen, length), turn, length)

    def _observe(self, sampled: list[Sampled], context: Context, found: int) -> None:
        """Count the uses of sampled blocks by a request; `found` of its blocks were found."""
        samples, classes, used_at, used = self._samples, self._classes, self._used_at, self._used_cells
        now, block_class, events, new = self.turnover.now, context.block_class, 0, []
        last_used, gap, last_cell, uses = math.nan, 0, 0, 0
        for number, hashed, following in sampled:
            place = samples.get(hashed)
            if place is None:
                if number < found:  # stored in an earlier life, or before the sample was as large
                    new.append((hashed, following))
                continue
            if used_at[place] != last_used:  # else it was used with the block before, and its age is the same
                last_used = used_at[place]
                gap = age_bucket(now - last_used)
            cell = classes[place] * AGES + gap
            if cell != last_cell:
                used[last_cell] += uses
                last_cell, uses = cell, 0
            uses += 1
            events += 1
            self._contexts[place], used_at[place] = context, now
            self._uses[place] = min(255, self._uses[place] + 1)
            if following:
                before, self._following[place] = self._following[place], following
                if before != following and before:
                    self._shared[place] = 1
            classes[place] = shared_class(self._uses[place], gap) if self._shared[place] else block_class
        used[last_cell] += uses
        self._events += events
        self._returns += events > 0
        if new:
            self._begin(new, context)

    # --- the sample ------------------------------------------------------------------------------

    def _begin(self, new: list[tuple[int, int]], context: Context) -> None:
        """Sample these blocks: for each the hash of its key, and that of the next block."""
        samples, places = self._samples, self._places
        if len(samples) + len(new) > MAX_SAMPLES and not self._doubtful:
            self._plan_room()
        if self._doubtful:
            self._make_room(len(new))
        if len(places) < len(new):
            self._make_places(len(new) - len(places))
        now, threshold, block_class = self.turnover.now, self._threshold, context.block_class
        for hashed, following in new:
            if hashed < threshold and hashed not in samples:
                place = samples[hashed] = places.pop()
                self._classes[place], self._used_at[place], self._contexts[place] = block_class, now, context
                self._following[place], self._uses[place], self._shared[place] = following, 1, 0
                self._events += 1

    def _make_places(self, count: int) -> None:
        """Lengthen the columns."""
        first = len(self._classes)
        self._places.extend(range(first, first + count))
        self._classes.extend([_GONE] * count)
        self._used_at.extend([math.inf] * count)
        self._contexts.extend([_NO_CONTEXT] * count)
        self._following.extend([0] * count)
        self._uses.extend([0] * count)
        self._shared.extend(bytes(count))

    def _plan_room(self) -> None:
        """Drop what was not used for longest; where all samples still matter, halve the sampling rate."""
        classes, ages = np.array(self._classes, np.int64), self.turnover.now - np.array(self._used_at)
        before = np.flatnonzero(ages >= HORIZON)
        np.add.at(self._ended, (classes[before], age_buckets(ages[before])), 1.0)
        if len(before) < MAX_SAMPLES // 4:
            self._threshold //= 2
            self._used *= 0.5
            self._ended *= 0.5
        elif MAX_SAMPLES - len(before) < MAX_SAMPLES // 4:
            self._threshold = min(_HASHES, 2 * self._threshold)
        self._doubtful = list(self._samples)

    def _make_room(self, count: int) -> None:
        """Drop some of the samples that are to go, in proportion to those that come; the rest follows later."""
        samples, used_at, last = self._samples, self._used_at, self.turnover.now - HORIZON
        looked_at = self._doubtful[-LOOKED_AT * count :]
        del self._doubtful[-LOOKED_AT * count :]
        for hashed in looked_at:
            place = samples.get(hashed)
            if place is not None and (hashed >= self._threshold or used_at[place] <= last):
                self._let_go(hashed)

    def _let_go(self, hashed: int) -> None:
        place = self._samples.pop(hashed)
        self._places.append(place)
        self._classes[place], self._used_at[place], self._contexts[place] = _GONE, math.inf, _NO_CONTEXT

    # --- learning --------------------------------------------------------------------------------

    def _refresh(self) -> Iterator[bool]:
        """Estimate what blocks are worth: one part per request, of a millisecond at most."""
        self._plan_refresh()
        if self._used.sum() > EVENTS_KEPT:
            self._used *= 0.5
            self._ended *= 0.5
        classes, ages = np.array(self._classes, np.int64), self.turnover.now - np.array(self._used_at)
        cells = np.bincount(classes * AGES + age_buckets(ages), minlength=(_GONE + 1) * AGES)
        waiting = cells.reshape(-1, AGES)[:_GONE]
        worths = estimate(self._used.copy(), self._used + self._ended + waiting, self._threshold / _HASHES)
        while (worth := next(worths)) is None:
            yield True
        self.worth = worth
        self.version += 1

    def _plan_refresh(self) -> None:
        """Set when to refresh next: often at first."""
        self._refresh_at = self._events + min(MOST_EVENTS, max(FIRST_EVENTS, self._events // 32))

    @property
    def sampled(self) -> tuple[int, float]:
        """How many blocks the sample has, and which share of all blocks it stands for."""
        return len(self._samples), self._threshold / _HASHES


_NO_CONTEXT = Context(_GONE, 0, 0)


def _put(known: dict[bytes, Context], key: bytes, context: Context) -> None:
    """Remember a context; at most as many are kept as there are samples, the newest."""
    known.pop(key, None)
    known[key] = context
    if len(known) > MAX_SAMPLES:
        del known[next(iter(known))]


def hashes(keys: bytes, secret: int) -> npt.NDArray[np.uint64]:
    """A hash for each of the packed keys, and a 0; without the secret it tells nothing about the keys."""
    words = np.frombuffer(keys, dtype="<u8").reshape(-1, 2)
    low, high, first, second = _numbers_of(secret)
    result = np.zeros(len(words) + 1, np.uint64)
    mixed = result[:-1]
    np.bitwise_xor(words[:, 0], low, out=mixed)
    mixed *= first
    mixed ^= mixed >> _HALF
    mixed ^= words[:, 1]
    mixed ^= high
    mixed *= second
    mixed ^= mixed >> _LESS
    mixed *= _ODD
    return result


@functools.lru_cache(maxsize=8)
def _numbers_of(secret: int) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    low, high = np.uint64(secret & _WORD), np.uint64(secret >> 64 & _WORD)
    return low, high, _ODD | low << np.uint64(1), _ODD ^ high << np.uint64(1)
