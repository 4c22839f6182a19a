"""What it is worth to keep blocks, by their class and by how long ago they were used.

For each class the sample tells the *hazard* at each age since the last use: which share of the blocks that got so
old was used while they were just that old (Kaplan and Meier's estimate; blocks not yet used again count as far as they
got). From the hazards follows what keeping a block is worth: the greatest rate of hits that any further stay promises,

    worth(class, age) = max over L of  P(used within L | age) / E[seconds until it is used or L is over | age]

which is Gittins' index, and what LHD (Beckmann et al., NSDI 2018) calls hit density. Classes with little evidence
lean on wider ones, and all of them on a hazard that falls with age, which is least recently used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

AGES = 46
"""Age buckets: the first to a 32nd of a turnover, then two for each doubling."""
FIRST_AGE = 1 / 1024
TURNS, NEW, LENGTHS = 10, 8, 7
_CHAINS = TURNS * NEW * LENGTHS
_COUNTS, _GAPS = 9, 9
CLASSES = _CHAINS + _COUNTS * _GAPS
PRIOR = 0.1
"""Hazard in each age bucket before anything is known: it falls with age as the buckets grow."""
LEAN = 128.0
"""How many blocks' evidence a class takes over from the wider one, at least."""
LEAN_PROMPTS = 64.0
"""And how many prompts': blocks of one prompt come back together, so that a hundred of them say no more than one."""
ROWS_AT_ONCE = 128
"""Classes whose worths are estimated in one part of that: the more, the less it takes in all."""

_WIDTHS = np.diff(np.concatenate([[0.0], FIRST_AGE * 2.0 ** (np.arange(AGES) / 2)]))
_MOST = 1.0 - 2.0**-20
"""Hazard: of no blocks nothing would be left to divide by."""


def age_bucket(age: float) -> int:
    """Which of the age buckets; an age is in turnovers."""
    if age < FIRST_AGE:
        return 0
    age /= FIRST_AGE
    return min(AGES - 1, math.frexp(age * age)[1])  # by the exponent: two for each doubling


def age_buckets(ages: Floats) -> npt.NDArray[np.int64]:
    """The same for many."""
    squares = np.maximum(ages, 0.0) / FIRST_AGE
    squares *= squares
    np.maximum(squares, 0.5, out=squares)
    buckets = squares.view(np.int64) >> 52  # the exponent
    buckets -= 1022
    result: npt.NDArray[np.int64] = np.minimum(buckets, AGES - 1, out=buckets)
    return result


def chain_class(turn: int, new_blocks: int, blocks: int) -> int:
    """The class of blocks whose last user was turn `turn` of a chain; 0: it had nothing in common with any before."""
    new = min(NEW - 1, new_blocks.bit_length())
    return (min(TURNS - 1, turn) * NEW + new) * LENGTHS + min(LENGTHS - 1, blocks.bit_length() // 2)


def shared_class(uses: int, gap_bucket: int) -> int:
    """The class of a block below which requests part."""
    return _CHAINS + min(_COUNTS - 1, uses) * _GAPS + gap_bucket * _GAPS // AGES


_NUMBERS = np.arange(CLASSES)
_IS_CHAIN = _NUMBERS < _CHAINS
_BY_TURN = np.where(_IS_CHAIN, _NUMBERS // (NEW * LENGTHS), TURNS)
"""The group of each class, ascending; all classes of blocks below which requests part are one."""
_BY_NEW = np.where(_IS_CHAIN, _NUMBERS // LENGTHS, TURNS * NEW + (_NUMBERS - _CHAINS) // _GAPS)
"""Smaller groups: by turn and new blocks."""
_TURN_OF = _BY_TURN[np.flatnonzero(np.diff(_BY_NEW, prepend=-1))]
"""Of each smaller group, which turn it is."""
_BLOCKS = np.where(_IS_CHAIN, 4.0 ** (_NUMBERS % LENGTHS), 1.0)
"""How many blocks a prompt of each class has, about."""


class _Seen(NamedTuple):
    """What was seen of some classes, or of groups of them: a row each."""

    used: Floats
    """By age bucket, how many blocks were used when they were so old."""
    at_risk: Floats
    """How many got so old."""
    leaning: Floats
    """How many blocks' evidence they take over from wider ones, times the blocks seen: the sum of a group stands for
    the mean of its classes."""

    def by(self, group: npt.NDArray[np.int64]) -> _Seen:
        """Each group that there is; theirs ascend."""
        firsts = np.flatnonzero(np.diff(group, prepend=-1))
        return _Seen(*(np.add.reduceat(rows, firsts, axis=0) for rows in self)) if len(group) else self

    def hazards(self, wider: Floats) -> Floats:
        """As they were seen, as far as there is more evidence than they take over from wider ones."""
        lean = self.leaning / self.at_risk[:, :1]
        hazards: Floats = (self.used + lean * wider) / (self.at_risk + lean)
        return hazards


def worths_before() -> Floats:
    """What each class is worth at each age before anything is known."""
    return indices(np.full((1, AGES), PRIOR)).repeat(CLASSES, axis=0)


def estimate(used: Floats, ended: Floats, share: float = 1.0) -> Iterator[Floats | None]:
    """By class and age bucket, from how many blocks were used at that age, and at what age blocks were seen last.

    `share`: which share of all blocks these are a sample of. Yields None where others may go on, and then the worths.
    """
    known = np.flatnonzero(ended.any(axis=1))
    at_risk = np.cumsum(ended[known, ::-1], axis=1)[:, ::-1]
    lean = np.maximum(LEAN, LEAN_PROMPTS * share * _BLOCKS[known, None])
    seen, its_group, its_turn = _Seen(used[known], at_risk, lean * at_risk[:, :1]), _BY_NEW[known], _BY_TURN[known]
    groups, turns = np.unique(its_group), np.unique(its_turn).tolist()
    of_all = wider = _of_all(seen.used.sum(axis=0), at_risk.sum(axis=0))
    of_turn, by_turn = np.empty((TURNS + 1, AGES)), seen.by(its_turn)
    for turn in range(TURNS + 1):  # what has gone on five times is like what has four times
        if turn == TURNS:
            wider = of_all
        if turn in turns:
            row = turns.index(turn)
            wider = _Seen(*(its[row : row + 1] for its in by_turn)).hazards(wider)[0]
        of_turn[turn] = wider
    of_group = of_turn[_TURN_OF]
    of_group[groups] = seen.by(its_group).hazards(of_group[groups])
    own = seen.hazards(of_group[its_group])
    hazards = np.concatenate([of_turn, of_group[groups], own])
    worth = np.empty_like(hazards)
    for row in range(0, len(hazards), ROWS_AT_ONCE):
        yield None
        worth[row : row + ROWS_AT_ONCE] = indices(hazards[row : row + ROWS_AT_ONCE])
    yield None
    # Groups of which nothing is known are as their turn, and such classes as their group.
    rows = _TURN_OF.copy()
    rows[groups] = np.arange(len(of_turn), len(of_turn) + len(groups))
    rows = rows[_BY_NEW]
    rows[known] = np.arange(len(of_turn) + len(groups), len(hazards))
    result: Floats = worth[rows]
    yield result


def _of_all(used: Floats, at_risk: Floats) -> Floats:
    """Hazards of all blocks together. Each age leans on the one before it, so that no age which was hardly ever
    reached is thought better of than those that were."""
    hazards, before = [], PRIOR
    for its_used, its_risk in zip(used.tolist(), at_risk.tolist(), strict=True):
        before = (its_used + LEAN * before) / (its_risk + LEAN)
        hazards.append(before)
    return np.array(hazards)


def indices(hazards: Floats) -> Floats:
    """The index of each row of hazards at each age."""
    by_age = np.minimum(hazards, _MOST).T
    left = np.ones((AGES + 1, len(hazards)))  # of all, those that get so old
    np.cumprod(1.0 - by_age, axis=0, out=left[1:])
    stay = np.zeros_like(left)  # of all, how long they stay from that age on
    stay[:-1] = left[:-1] * (1.0 - by_age / 2.0) * _WIDTHS[:, None]
    np.cumsum(stay[::-1], axis=0, out=stay[::-1])
    worth = np.empty_like(left[:-1])
    for age in range(AGES):
        hits = left[age] - left[age + 1 :]
        hits /= stay[age] - stay[age + 1 :]
        np.max(hits, axis=0, out=worth[age])
    result: Floats = worth.T
    return result
