"""The worth of keeping a block, by its class and the time since its last use.

For each class the sample gives the *hazard* at each age since the last use: the share of the blocks reaching that age
that were used at it (Kaplan and Meier's estimate; blocks not yet used again count up to their present age). The worth
of keeping a block follows from the hazards: the greatest rate of hits that any further stay promises,

    worth(class, age) = max over L of  P(used within L | age) / E[seconds until it is used or L is over | age]

which is Gittins' index; LHD (Beckmann et al., NSDI 2018) calls it hit density. Classes with little evidence lean on
wider ones, and all of them on a hazard that falls with age, which amounts to LRU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

AGES = 46
"""Age buckets: the first up to 1/32 of a turnover, then two for each doubling."""
FIRST_AGE = 1 / 1024
TURNS, NEW, LENGTHS = 10, 8, 7
_CHAINS = TURNS * NEW * LENGTHS
_COUNTS, _GAPS = 9, 9
CLASSES = _CHAINS + _COUNTS * _GAPS
PRIOR = 0.1
"""Hazard in each age bucket before anything is known: per unit of time it falls with age, as the buckets grow."""
LEAN = 128.0
"""Blocks, at least, whose evidence a class borrows from the wider class."""
LEAN_PROMPTS = 64.0
"""Prompts, at least, likewise: blocks of one prompt come back together, so a hundred of them say no more than one."""
ROWS_AT_ONCE = 256
"""Classes whose worths are estimated in one part: the larger, the less time it takes in all."""

_WIDTHS = np.diff(np.concatenate([[0.0], FIRST_AGE * 2.0 ** (np.arange(AGES) / 2)]))
_MOST = 1.0 - 2.0**-20
"""Cap of the hazard: at 1 no blocks would be left to divide by."""


def age_bucket(age: float) -> int:
    """The bucket of an age, which is in turnovers."""
    if age < FIRST_AGE:
        return 0
    age /= FIRST_AGE
    return min(AGES - 1, math.frexp(age * age)[1])  # from the exponent: two for each doubling


def age_buckets(ages: Floats) -> npt.NDArray[np.int64]:
    """As `age_bucket`, for many ages."""
    squares = np.maximum(ages, 0.0) / FIRST_AGE
    squares *= squares
    np.maximum(squares, 0.5, out=squares)
    buckets = squares.view(np.int64) >> 52  # the exponent
    buckets -= 1022
    result: npt.NDArray[np.int64] = np.minimum(buckets, AGES - 1, out=buckets)
    return result


def chain_class(turn: int, new_blocks: int, blocks: int) -> int:
    """The class of blocks whose last user was turn `turn` of a chain; 0: it shared nothing with any before."""
    new = min(NEW - 1, new_blocks.bit_length())
    return (min(TURNS - 1, turn) * NEW + new) * LENGTHS + min(LENGTHS - 1, blocks.bit_length() // 2)


def shared_class(uses: int, gap_bucket: int) -> int:
    """The class of a block below which requests diverge."""
    return _CHAINS + min(_COUNTS - 1, uses) * _GAPS + gap_bucket * _GAPS // AGES


_NUMBERS = np.arange(CLASSES)
_IS_CHAIN = _NUMBERS < _CHAINS
_BY_TURN = np.where(_IS_CHAIN, _NUMBERS // (NEW * LENGTHS), TURNS)
"""The group of each class, ascending; all classes of blocks below which requests diverge form one."""
_BY_NEW = np.where(_IS_CHAIN, _NUMBERS // LENGTHS, TURNS * NEW + (_NUMBERS - _CHAINS) // _GAPS)
"""Smaller groups: by turn and new blocks."""
_TURN_OF = _BY_TURN[np.flatnonzero(np.diff(_BY_NEW, prepend=-1))]
"""The turn of each smaller group."""
_BLOCKS = np.where(_IS_CHAIN, 4.0 ** (_NUMBERS % LENGTHS), 1.0)
"""Typical number of blocks of a prompt of each class."""


class _Seen(NamedTuple):
    """What was observed of some classes, or groups of classes: one row each."""

    used: Floats
    """By age bucket, how many blocks were used at that age."""
    at_risk: Floats
    """How many blocks reached that age."""
    leaning: Floats
    """How many blocks' evidence they borrow from wider ones, times the blocks seen: the sum over a group stands for the
    mean of its classes."""

    def by(self, group: npt.NDArray[np.int64]) -> _Seen:
        """Sums for each group; `group` ascends."""
        firsts = np.flatnonzero(np.diff(group, prepend=-1))
        return _Seen(*(np.add.reduceat(rows, firsts, axis=0) for rows in self)) if len(group) else self

    def hazards(self, wider: Floats) -> Floats:
        """The observed hazards, to the degree that there is more evidence than they borrow from the wider ones."""
        lean = self.leaning / self.at_risk[:, :1]
        hazards: Floats = (self.used + lean * wider) / (self.at_risk + lean)
        return hazards


def worths_before() -> Floats:
    """Worth of each class at each age before anything is known."""
    return indices(np.full((1, AGES), PRIOR)).repeat(CLASSES, axis=0)


def estimate(used: Floats, ended: Floats, share: float = 1.0) -> Iterator[Floats | None]:
    """Worths by class and age bucket, from how many blocks were used at that age, and at what age they were last seen.

    `share`: the share of all blocks that these are a sample of. Yields None where others may run, then the worths.
    """
    known = np.flatnonzero(ended.any(axis=1))
    at_risk = np.cumsum(ended[known, ::-1], axis=1)[:, ::-1]
    lean = np.maximum(LEAN, LEAN_PROMPTS * share * _BLOCKS[known, None])
    seen, row_group, row_turn = _Seen(used[known], at_risk, lean * at_risk[:, :1]), _BY_NEW[known], _BY_TURN[known]
    groups, turns = np.unique(row_group), np.unique(row_turn).tolist()
    of_all = wider = _of_all(seen.used.sum(axis=0), at_risk.sum(axis=0))
    of_turn, by_turn = np.empty((TURNS + 1, AGES)), seen.by(row_turn)
    for turn in range(TURNS + 1):  # turn five resembles turn four
        if turn == TURNS:
            wider = of_all
        if turn in turns:
            row = turns.index(turn)
            wider = _Seen(*(column[row : row + 1] for column in by_turn)).hazards(wider)[0]
        of_turn[turn] = wider
    of_group = of_turn[_TURN_OF]
    of_group[groups] = seen.by(row_group).hazards(of_group[groups])
    own = seen.hazards(of_group[row_group])
    hazards = np.concatenate([of_turn, of_group[groups], own])
    worth = np.empty_like(hazards)
    for row in range(0, len(hazards), ROWS_AT_ONCE):
        yield None
        worth[row : row + ROWS_AT_ONCE] = indices(hazards[row : row + ROWS_AT_ONCE])
    yield None
    # Groups without evidence take the values of their turn, and such classes those of their group.
    rows = _TURN_OF.copy()
    rows[groups] = np.arange(len(of_turn), len(of_turn) + len(groups))
    rows = rows[_BY_NEW]
    rows[known] = np.arange(len(of_turn) + len(groups), len(hazards))
    result: Floats = worth[rows]
    yield result


def _of_all(used: Floats, at_risk: Floats) -> Floats:
    """Hazards of all blocks together. Each age leans on the one before it, so that an age hardly ever reached is not
    rated better than those that were."""
    hazards, before = [], PRIOR
    for row_used, row_risk in zip(used.tolist(), at_risk.tolist(), strict=True):
        before = (row_used + LEAN * before) / (row_risk + LEAN)
        hazards.append(before)
    return np.array(hazards)


def indices(hazards: Floats) -> Floats:
    """Gittins' index of each row of hazards at each age."""
    by_age = np.minimum(hazards, _MOST).T
    left = np.ones((AGES + 1, len(hazards)))  # share of all blocks that reach each age
    np.cumprod(1.0 - by_age, axis=0, out=left[1:])
    stay = np.zeros_like(left)  # mean further stay from each age on, times that share
    stay[:-1] = left[:-1] * (1.0 - by_age / 2.0) * _WIDTHS[:, None]
    np.cumsum(stay[::-1], axis=0, out=stay[::-1])
    worth, hits, stays = np.empty_like(left[:-1]), np.empty_like(left), np.empty_like(left)
    for age in range(AGES):  # until each later age
        later = slice(age + 1, None)
        np.subtract(left[age], left[later], out=hits[later])
        np.subtract(stay[age], stay[later], out=stays[later])
        np.divide(hits[later], stays[later], out=hits[later])
        np.maximum.reduce(hits[later], axis=0, out=worth[age])
    result: Floats = worth.T
    return result
