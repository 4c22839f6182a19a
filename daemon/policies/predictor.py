"""How soon blocks are likely to be used again, learnt from what has happened to a sample of them.

Every block belongs to a *class*, set by the request that used it last: whether that went on where an earlier one had
ended and for the how-manieth time, how many of its blocks were new, and how long it was. Blocks below which
requests part, such as a system prompt, have classes of their own, by how often and how closely they were used.

For each class the sample tells the *hazard* at each age since the last use: which share of the blocks that got so
old was used while they were just that old (Kaplan and Meier's estimate; blocks not yet used again count as far as they
got). From the hazards follows what keeping a block is worth: the greatest rate of hits that any further stay promises,

    worth(class, age) = max over L of  P(used within L | age) / E[seconds until it is used or L is over | age]

which is Gittins' index, and what LHD (Beckmann et al., NSDI 2018) calls hit density. Classes with little evidence
lean on wider ones, and all of them on a hazard that falls with age, which is least recently used.

The sample is spatial: blocks whose key is below a threshold, which falls as there are more of them (SHARDS, Waldspurger
et al., FAST 2015). It outlives the blocks themselves, so it also tells when what was evicted would have been used.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tiercache.messages import KEY_BYTES

Floats = npt.NDArray[np.float64]

AGES = 36
"""Age buckets: the first to 0.25 s, then two for each doubling, so that the last begins after 12 hours."""
FIRST_AGE_S = 0.25
TURNS, NEW, LENGTHS = 6, 8, 7
_CHAINS = TURNS * NEW * LENGTHS
_COUNTS, _GAPS = 9, 9
CLASSES = _CHAINS + _COUNTS * _GAPS
PRIOR = 0.1
"""Hazard in each age bucket before anything is known: it falls with age as the buckets grow."""
LEAN = 128.0
"""How many blocks' evidence a class takes over from the wider one."""
MAX_SAMPLES = 16_384
REFRESH_S = 60.0
EVENTS_KEPT = 16 * MAX_SAMPLES
"""Beyond so many observations all of them are halved: what happened lately counts more."""

_EDGES_S = np.concatenate([[0.0], FIRST_AGE_S * 2.0 ** (np.arange(AGES) / 2)])
_WIDTHS_S = np.diff(_EDGES_S)
_KEYS_ALL = 1 << 32


def age_bucket(age_s: float) -> int:
    """Which of the age buckets."""
    if age_s < FIRST_AGE_S:
        return 0
    return min(AGES - 1, 1 + int(2.0 * math.log2(age_s / FIRST_AGE_S)))


def chain_class(turn: int, new_blocks: int, blocks: int) -> int:
    """The class of blocks whose last user was turn `turn` of a chain; 0: it had nothing in common with any before."""
    new = min(NEW - 1, new_blocks.bit_length())
    return (min(TURNS - 1, turn) * NEW + new) * LENGTHS + min(LENGTHS - 1, blocks.bit_length() // 2)


def shared_class(uses: int, gap_bucket: int) -> int:
    """The class of a block below which requests part."""
    return _CHAINS + min(_COUNTS - 1, uses) * _GAPS + gap_bucket // 4


class Context(NamedTuple):
    """What the request at hand says of the blocks that it uses."""

    block_class: int
    turn: int


class _Sample:
    """What is known of one block of the sample; its class and when it was used are in columns, at `place`."""

    __slots__ = ("following", "length", "place", "shared", "turn", "uses")

    def __init__(self, place: int, turn: int, following: bytes, length: int) -> None:
        self.place = place
        self.turn = turn
        self.following = following
        self.length = length
        self.uses = 1
        self.shared = False


class Predictor:
    """One for all tiers of a daemon. Event loop only; nothing here blocks.

    A request costs some microseconds and about one for each of its blocks in the sample; a refresh, some milliseconds.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self.clock_s = clock_s
        self.context: Context | None = None
        """Of the request that is being answered."""
        self.version = 0
        """Raised when `worth` has changed."""
        self.worth: Floats = _worth(np.full((1, AGES), PRIOR)).repeat(CLASSES, axis=0)
        """Hits a second, by class and age bucket."""
        self.worth_rows: list[list[float]] = self.worth.tolist()
        """The same, quicker to look up one by one."""
        self._samples: dict[bytes, _Sample] = {}
        self._classes = array("H")
        self._used_s = array("d")
        self._threshold = _KEYS_ALL
        self._used = np.zeros((CLASSES, AGES))
        self._started_s = self._refresh_s = clock_s()
        self._expected: dict[bytes, Context] = {}  # by the first block of a chain that will probably be stored
        self._asked: tuple[bytes, float] = b"", 0.0

    # --- a request -------------------------------------------------------------------------------

    def asked(self, keys: bytes, found_dram: int, found: int) -> None:
        """A prompt was looked up; `found` of its blocks are known, `found_dram` in DRAM. `context` until `answered`."""
        now_s, last_key = self.clock_s(), keys[-KEY_BYTES:]
        before, self._asked = self._asked, (last_key, now_s)
        if before[0] == last_key and now_s - before[1] < FIRST_AGE_S:
            return  # the same one again: another worker's, or a second try
        numbers = self._sampled(keys)
        length = len(keys) // KEY_BYTES
        self.context = context = self._classify(keys, numbers, found, length)
        self._observe(keys, numbers, context, now_s, length)
        for first in {found_dram, found}:
            if first < length:
                self._expect(keys[first * KEY_BYTES : (first + 1) * KEY_BYTES], context)
        if now_s >= self._refresh_s:
            self._refresh(now_s)

    def answered(self) -> None:
        """The request at hand is over."""
        self.context = None

    def expected(self, key: bytes) -> Context | None:
        """What a lookup said that missed this block."""
        return self._expected.get(key)

    def _expect(self, key: bytes, context: Context) -> None:
        self._expected.pop(key, None)
        self._expected[key] = context
        if len(self._expected) > MAX_SAMPLES:
            del self._expected[next(iter(self._expected))]

    def _sampled(self, keys: bytes) -> list[int]:
        """Which of the keys are in the sample, or would be."""
        if self._threshold == _KEYS_ALL:
            return list(range(len(keys) // KEY_BYTES))
        words = np.frombuffer(keys, dtype="<u4")[1 :: KEY_BYTES // 4]
        chosen: list[int] = np.flatnonzero(words < self._threshold).tolist()
        return chosen

    def _classify(self, keys: bytes, numbers: list[int], found: int, length: int) -> Context:
        """By the deepest block of the sample that is known: where its last user ended, and which turn that was."""
        seen, last, slack = found, None, 1
        for number in reversed(numbers):
            last = self._samples.get(keys[number * KEY_BYTES : (number + 1) * KEY_BYTES])
            if last is not None:
                if number + 1 > seen:
                    seen = number + 1
                    slack += 2 * (_KEYS_ALL // self._threshold) - 2
                break
        if last is not None and last.length <= seen + slack:
            return Context(chain_class(1 + last.turn, length - seen, length), last.turn + 1)
        return Context(chain_class(1 if seen else 0, length - seen, length), 1)

    def _observe(self, keys: bytes, numbers: list[int], context: Context, now_s: float, length: int) -> None:
        samples, used, classes, used_s = self._samples, self._used, self._classes, self._used_s
        for number in numbers:
            key = keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
            following = keys[(number + 1) * KEY_BYTES : (number + 2) * KEY_BYTES]
            sample = samples.get(key)
            if sample is None:
                samples[key] = _Sample(len(classes), context.turn, following, length)
                classes.append(context.block_class)
                used_s.append(now_s)
                continue
            place = sample.place
            gap = age_bucket(now_s - used_s[place])
            used[classes[place], gap] += 1.0
            sample.uses += 1
            if following:
                sample.shared = sample.shared or (sample.following != following and sample.following != b"")
                sample.following = following
            used_s[place], sample.turn, sample.length = now_s, context.turn, length
            classes[place] = shared_class(sample.uses, gap) if sample.shared else context.block_class
        while len(samples) > MAX_SAMPLES:
            self._thin()

    def _thin(self) -> None:
        """Half as many samples from here on."""
        self._threshold //= 2
        most = self._threshold
        gone = [key for key in self._samples if int.from_bytes(key[4:8], "little") >= most]
        for key in gone:
            del self._samples[key]
        kept = [sample.place for sample in self._samples.values()]
        self._classes = array("H", [self._classes[place] for place in kept])
        self._used_s = array("d", [self._used_s[place] for place in kept])
        for place, sample in enumerate(self._samples.values()):
            sample.place = place
        self._used *= 0.5

    # --- learning --------------------------------------------------------------------------------

    def _refresh(self, now_s: float) -> None:
        """Estimate anew what blocks are worth; at first often, later once a minute."""
        self._refresh_s = now_s + min(REFRESH_S, max(1.0, 0.03 * (now_s - self._started_s)))
        if self._used.sum() > EVENTS_KEPT:
            self._used *= 0.5
        classes = np.array(self._classes, np.int64)
        ages = now_s - np.array(self._used_s)
        cells = classes * AGES + np.searchsorted(_EDGES_S[1:-1], ages, side="right")
        waiting = np.bincount(cells, minlength=CLASSES * AGES).reshape(CLASSES, AGES)
        self.worth = _worths(self._used, self._used + waiting)
        self.worth_rows = self.worth.tolist()
        self.version += 1

    @property
    def sampled(self) -> tuple[int, float]:
        """How many blocks the sample has, and which share of all blocks it stands for."""
        return len(self._samples), self._threshold / _KEYS_ALL


def _groups() -> list[npt.NDArray[np.int64]]:
    """For each class, the number of its group, ascending: all alike, then by turn, then by turn and new blocks."""
    numbers = np.arange(CLASSES)
    chain = numbers < _CHAINS
    uses = (numbers - _CHAINS) // _GAPS
    by_turn = np.where(chain, numbers // (NEW * LENGTHS), TURNS)
    by_new = np.where(chain, numbers // LENGTHS, TURNS * NEW + uses)
    return [np.zeros(CLASSES, np.int64), by_turn, by_new]


_GROUPS = _groups()


def _worths(used: Floats, ended: Floats) -> Floats:
    """By class and age bucket, from how many blocks were used at that age, and at what age blocks were seen last."""
    at_risk = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1]
    wider: Floats = np.full((CLASSES, AGES), PRIOR)
    for group in _GROUPS:
        starts = np.flatnonzero(np.diff(group, prepend=-1))
        its_used, its_risk = np.add.reduceat(used, starts, axis=0), np.add.reduceat(at_risk, starts, axis=0)
        wider = (its_used[group] + LEAN * wider) / (its_risk[group] + LEAN)
    known = np.flatnonzero(at_risk[:, 0])
    first = np.flatnonzero(np.diff(_GROUPS[-1], prepend=-1))
    own = (used[known] + LEAN * wider[known]) / (at_risk[known] + LEAN)
    worth = _worth(np.concatenate([wider[first], own]))
    result: Floats = worth[_GROUPS[-1]]  # classes of which nothing is known are as their group
    result[known] = worth[len(first) :]
    return result


def _worth(hazards: Floats) -> Floats:
    """The index of each row of hazards at each age."""
    by_age = np.ascontiguousarray(np.minimum(hazards, 1.0).T)
    worth, hits, stay_s = np.empty_like(by_age), np.empty_like(by_age), np.empty_like(by_age)
    # From the last age to the first; row `end` of `hits` and `stay_s` is for a stay from `age` to the end of that age.
    for age in range(AGES - 1, -1, -1):
        hazard = by_age[age]
        left, here_s = 1.0 - hazard, _WIDTHS_S[age] * (1.0 - hazard / 2.0)
        hits[age + 1 :] *= left
        hits[age + 1 :] += hazard
        stay_s[age + 1 :] *= left
        stay_s[age + 1 :] += here_s
        hits[age], stay_s[age] = hazard, here_s
        worth[age] = np.max(hits[age:] / stay_s[age:], axis=0)
    result: Floats = worth.T
    return result
