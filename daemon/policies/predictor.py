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
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.ma  # imported by `unique` at its first call: 15 ms in the middle of a client's match
import numpy.typing as npt

from tiercache.daemon.policies.requests import Again
from tiercache.daemon.policies.turnover import Turnover
from tiercache.daemon.policies.worths import (
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
from tiercache.protocol.messages import KEY_BYTES

MAX_SAMPLES = 16_384
LOOKED_AT = 8
"""Samples looked at for each new block once the sample is full: half of them go, but not all in one go of the loop."""
MAX_AT_ONCE = 512
"""Samples updated by one request."""
HORIZON = 256.0
"""A block not used for so many turnovers may leave the sample: no tier keeps it for as long."""
FIRST_EVENTS, MOST_EVENTS = 64, 2048
"""The worths are estimated anew after so many sampled blocks were stored or used."""
FIRST_RETURNS = 32
"""But not before so many prompts have used sampled blocks again: a few say too little about all the others."""
EVENTS_KEPT = 16 * MAX_SAMPLES
"""Beyond so many observations all of them are halved: recent ones count more."""

_HASHES = 1 << 32
_WORD = (1 << 64) - 1
_ODD, _HALF, _LESS = np.uint64(0x9E3779B97F4A7C15), np.uint64(32), np.uint64(29)


class Context(NamedTuple):
    """What the current request says about the blocks it uses."""

    block_class: int
    turn: int
    length: int


class Sample:
    """What is known of one sampled block. Its class and time of last use are in columns, at `place`."""

    __slots__ = ("following", "hashed", "length", "place", "shared", "turn", "uses")

    def __init__(self, place: int, hashed: int, context: Context, following: bytes) -> None:
        self.place = place
        self.hashed = hashed
        self.turn = context.turn
        self.length = context.length
        self.following = following
        self.uses = 1
        self.shared = False


class Predictor:
    """One for all tiers of a daemon. Event loop only; never blocks.

    A request costs some microseconds, plus about one for each of its sampled blocks, at most `MAX_AT_ONCE`. A refresh
    takes some milliseconds and is done in parts by the requests that follow. `secret` selects the sample: a client that
    does not know it can neither fill the sample nor keep its blocks out.
    """

    def __init__(self, turnover: Turnover, secret: int = 0) -> None:
        self.turnover = turnover
        self.context: Context | None = None
        """Of the request being answered."""
        self.version = 0
        """Raised when `worth` has changed."""
        self.worth: Floats = worths_before()
        """Expected hits per turnover, by class and age bucket."""
        self._secret = secret
        self._hashed = b"", hashes(b"", secret)  # of the prompt that was looked up last
        self._samples: dict[bytes, Sample] = {}  # least recently used first
        self._doubtful: list[bytes] = []  # samples to look at: some of them are to go
        self._places: list[int] = []  # free places in the columns
        self._classes = array("H")
        self._used_at = array("d")
        self._threshold = _HASHES
        self._used = np.zeros((CLASSES, AGES))
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

    def asked(self, keys: bytes, found_dram: int, found: int) -> None:
        """A prompt was looked up; `found` of its blocks are known, `found_dram` in DRAM. Sets `context`."""
        if self._again.asked(keys):
            return
        sampled = self._sampled(keys)
        length = len(keys) // KEY_BYTES
        self.context = context = self._classify(keys, sampled, found, length)
        self._observe(keys, sampled, context, found)
        for first in {found_dram, found}:
            if first < length:
                _put(self.expected, keys[first * KEY_BYTES : (first + 1) * KEY_BYTES], context)
        if self._refreshing is None and self._events >= self._refresh_at and self._returns >= FIRST_RETURNS:
            self._refreshing = self._refresh()
        if self._refreshing is not None and next(self._refreshing, None) is None:
            self._refreshing = None

    def answered(self) -> None:
        """The current request is over."""
        self.context = None

    def stored(self, parent: bytes, keys: Sequence[bytes]) -> None:
        """A client has stored a run of blocks, each below the one before it, the first below `parent`."""
        context = self.expected.get(keys[0]) or self._stored.get(parent)
        if context is None:  # not looked up before
            context = Context(chain_class(0, len(keys), len(keys)), 0, 0)
        _put(self._stored, keys[-1], context)
        packed = b"".join(keys)
        samples, begin, last = self._samples, self._begin, len(keys) - 1
        for number, hashed in self._sampled(packed):
            if (key := keys[number]) not in samples:
                begin(key, hashed, context, keys[number + 1] if number < last else b"")

    def _sampled(self, keys: bytes) -> list[tuple[int, int]]:
        """Which of the keys are in the sample, or would be, each with its hash; at most `MAX_AT_ONCE`."""
        hashed = self._hashes(keys)
        threshold = self._threshold
        if threshold == _HASHES and len(hashed) <= MAX_AT_ONCE:
            return list(enumerate(hashed.tolist()))
        chosen = (hashed < threshold).nonzero()[0]
        while len(chosen) > MAX_AT_ONCE:
            threshold //= 2
            chosen = (hashed < threshold).nonzero()[0]
            if threshold == 0:
                return []  # the same key over and over
        return list(zip(chosen.tolist(), hashed[chosen].tolist(), strict=True))

    def _hashes(self, keys: bytes) -> npt.NDArray[np.uint64]:
        """Hashes of packed keys. Reuses the last result: a store is mostly the end of the last look-up."""
        before, hashed = self._hashed
        if before.endswith(keys):
            return hashed[len(hashed) - len(keys) // KEY_BYTES :]
        self._hashed = keys, hashes(keys, self._secret)
        return self._hashed[1]

    def _classify(self, keys: bytes, sampled: list[tuple[int, int]], found: int, length: int) -> Context:
        """Classify a request by its deepest known sampled block: where its last user ended, and its turn."""
        seen, last, slack = found, None, 1
        for number, _ in reversed(sampled):
            last = self._samples.get(keys[number * KEY_BYTES : (number + 1) * KEY_BYTES])
            if last is not None:
                if number + 1 > seen:
                    seen = number + 1
                    slack += 2 * (_HASHES // max(1, self._threshold)) - 2
                break
        turn = 1 if seen else 0
        if last is not None and last.length <= seen + slack:
            turn = 1 + max(1, last.turn)
        return Context(chain_class(turn, length - seen, length), turn, length)

    def _observe(self, keys: bytes, sampled: list[tuple[int, int]], context: Context, found: int) -> None:
        samples, classes, used_at = self._samples, self._classes, self._used_at
        now, length, returns = self.turnover.now, context.length, False
        for number, hashed in sampled:
            key = keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
            following = keys[(number + 1) * KEY_BYTES : (number + 2) * KEY_BYTES]
            sample = samples.pop(key, None)
            if sample is None:
                if number < found:  # stored in an earlier life, or before the sample was as large
                    self._begin(key, hashed, context, following)
                continue
            samples[key] = sample
            place = sample.place
            gap, returns = self._used_again(sample, now - used_at[place]), True
            sample.uses += 1
            if following:
                sample.shared = sample.shared or (sample.following != following and sample.following != b"")
                sample.following = following
            used_at[place], sample.turn, sample.length = now, context.turn, length
            classes[place] = shared_class(sample.uses, gap) if sample.shared else context.block_class
        self._returns += returns

    def _used_again(self, sample: Sample, age: float) -> int:
        """Count the use of a sampled block at that age; returns the age bucket."""
        gap = age_bucket(age)
        self._used[self._classes[sample.place], gap] += 1.0
        self._events += 1
        return gap

    # --- the sample ------------------------------------------------------------------------------

    def _begin(self, key: bytes, hashed: int, context: Context, following: bytes) -> None:
        if len(self._samples) >= MAX_SAMPLES and not self._doubtful:
            self._plan_room()
        if self._doubtful:
            self._make_room()
        if hashed >= self._threshold:
            return
        if not self._places:
            self._places.append(len(self._classes))
            self._classes.append(0)
            self._used_at.append(0.0)
        place = self._places.pop()
        self._samples[key] = Sample(place, hashed, context, following)
        self._classes[place], self._used_at[place] = context.block_class, self.turnover.now
        self._events += 1

    def _plan_room(self) -> None:
        """Drop what was not used for longest; where all samples still matter, halve the sampling rate."""
        classes, ages = np.array(self._classes, np.int64), self.turnover.now - np.array(self._used_at)
        ages[self._places] = 0.0
        before = np.flatnonzero(ages >= HORIZON)
        np.add.at(self._ended, (classes[before], age_buckets(ages[before])), 1.0)
        if len(before) < MAX_SAMPLES // 4:
            self._threshold //= 2
            self._used *= 0.5
            self._ended *= 0.5
        elif MAX_SAMPLES - len(before) < MAX_SAMPLES // 4:
            self._threshold = min(_HASHES, 2 * self._threshold)
        self._doubtful = list(self._samples)

    def _make_room(self) -> None:
        """Drop some of the samples that are to go; the rest follows as further blocks come."""
        samples, used_at, last = self._samples, self._used_at, self.turnover.now - HORIZON
        for _ in range(min(LOOKED_AT, len(self._doubtful))):
            key = self._doubtful.pop()
            its = samples.get(key)
            if its is not None and (its.hashed >= self._threshold or used_at[its.place] <= last):
                self._let_go(key)

    def _let_go(self, key: bytes) -> None:
        self._places.append(self._samples.pop(key).place)

    # --- learning --------------------------------------------------------------------------------

    def _refresh(self) -> Iterator[bool]:
        """Estimate anew what blocks are worth: one part per request, of a millisecond at most."""
        self._plan_refresh()
        if self._used.sum() > EVENTS_KEPT:
            self._used *= 0.5
            self._ended *= 0.5
        classes, ages = np.array(self._classes, np.int64), self.turnover.now - np.array(self._used_at)
        cells = classes * AGES + age_buckets(ages)
        if self._places:
            cells = np.delete(cells, self._places)
        waiting = np.bincount(cells, minlength=CLASSES * AGES).reshape(CLASSES, AGES)
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


def _put(known: dict[bytes, Context], key: bytes, context: Context) -> None:
    """Remember a context; at most as many are kept as there are samples, the newest."""
    known.pop(key, None)
    known[key] = context
    if len(known) > MAX_SAMPLES:
        del known[next(iter(known))]


def hashes(keys: bytes, secret: int) -> npt.NDArray[np.uint64]:
    """A hash below `_HASHES` for each of the packed keys; without the secret it tells nothing about the keys."""
    words = np.frombuffer(keys, dtype="<u8").reshape(-1, 2)
    low, high, first, second = _numbers_of(secret)
    mixed: npt.NDArray[np.uint64] = np.bitwise_xor(words[:, 0], low)
    mixed *= first
    mixed ^= mixed >> _HALF
    mixed ^= words[:, 1]
    mixed ^= high
    mixed *= second
    mixed ^= mixed >> _LESS
    mixed *= _ODD
    mixed >>= _HALF
    return mixed


@functools.lru_cache(maxsize=8)
def _numbers_of(secret: int) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    low, high = np.uint64(secret & _WORD), np.uint64(secret >> 64 & _WORD)
    return low, high, _ODD | low << np.uint64(1), _ODD ^ high << np.uint64(1)
