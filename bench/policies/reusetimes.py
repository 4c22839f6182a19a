"""Reuse times by the kind of request that used a block last, learnt from a sample of blocks.

In each category a share q of the blocks is used again, after an exponentially distributed time with rate r:

    P(used again within t) = q · (1 - exp(-r t))

Both are fitted (expectation maximisation) to the observed times and to the ages of blocks not yet used again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tiercache.daemon.policies.predictor import EVENTS_KEPT, Context, Predictor, Sampled
from tiercache.daemon.policies.turnover import Turnover
from tiercache.daemon.policies.worths import FIRST_AGE, LENGTHS, NEW

Floats = npt.NDArray[np.float64]

CATEGORIES = 6
"""0: a prompt that shares nothing with any before; 1: it shares a beginning; then turns of a conversation."""
LEAN = 16.0
"""A category borrows the evidence of so many blocks from all categories together."""
FIRST_RATE = 1.0
"""Before anything is known: one use per turnover of DRAM."""
_STEPS = 3


def category(request_class: int) -> int:
    """The kind of request, by its class."""
    return min(CATEGORIES - 1, request_class // (NEW * LENGTHS))


class ReuseTimes(Predictor):
    """Reuse times by category, with the sample and the request's context of a `Predictor`."""

    def __init__(self, turnover: Turnover, secret: int = 0) -> None:
        super().__init__(turnover, secret)
        self.shares = np.full(CATEGORIES, 0.5)
        """For each category, the share of blocks that will be used again."""
        self.rates = np.full(CATEGORIES, FIRST_RATE)
        """For each category, one over the mean reuse time in turnovers."""
        self._reused = np.zeros(CATEGORIES)
        self._reused_after = np.zeros(CATEGORIES)
        self._whole = np.array([0.5]), np.array([FIRST_RATE])  # of all categories together

    def _observe(self, sampled: list[Sampled], context: Context, found: int) -> None:
        for _, hashed, _ in sampled:
            if (place := self._samples.get(hashed)) is not None:
                by = min(CATEGORIES - 1, self._contexts[place].turn)
                self._reused[by] += 1.0
                self._reused_after[by] += max(FIRST_AGE, self.turnover.now - self._used_at[place])
        super()._observe(sampled, context, found)

    def _refresh(self) -> Iterator[bool]:
        """Fit all categories again, in place of the hazards."""
        self._plan_refresh()
        if self._reused.sum() > EVENTS_KEPT:
            self._reused *= 0.5
            self._reused_after *= 0.5
        places = self._samples.values()
        by = np.fromiter((min(CATEGORIES - 1, self._contexts[at].turn) for at in places), np.int64, len(places))
        used_at = np.fromiter((self._used_at[at] for at in places), np.float64, len(places))
        ages = np.maximum(FIRST_AGE, self.turnover.now - used_at)
        yield True
        reused, after, alike = self._reused.sum(keepdims=True), self._reused_after.sum(keepdims=True), np.zeros_like(by)
        self._whole = _fitted(reused, after, ages, alike, *self._whole, *self._whole)
        yield True
        lean = self._whole[0].repeat(CATEGORIES), self._whole[1].repeat(CATEGORIES)
        self.shares, self.rates = _fitted(self._reused, self._reused_after, ages, by, *lean, self.shares, self.rates)


def _fitted(
    reused: Floats,
    after: Floats,
    ages: Floats,
    by: npt.NDArray[np.int64],
    lean_share: Floats,
    lean_rate: Floats,
    shares: Floats,
    rates: Floats,
) -> tuple[Floats, Floats]:
    """Shares and rates of each category, starting from the last ones, which are near; they lean on the given ones.

    `reused`, `after`: how many blocks were used again, and the sum of their reuse times. `ages`, `by`: age and category
    of each block not yet used again.
    """
    count = len(reused)
    blocks = reused + np.bincount(by, minlength=count)
    leant_on, leant_after = LEAN * lean_share, LEAN * lean_share / lean_rate
    for _ in range(_STEPS):
        later = shares[by] * np.exp(-rates[by] * ages)
        later /= 1.0 - shares[by] + later
        again = reused + np.bincount(by, later, count) + leant_on
        again_after = after + np.bincount(by, later * (ages + 1.0 / rates[by]), count) + leant_after
        shares, rates = np.minimum(0.999, again / (blocks + LEAN)), again / again_after
    return shares, rates
