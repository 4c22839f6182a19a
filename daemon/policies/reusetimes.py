"""After how long blocks are used again, by what kind of request used them last; learnt from a sample of them.

Of each category: a share q of its blocks is used again, after a time that is exponentially distributed with rate r,

    P(used again within t) = q · (1 - exp(-r t))

Both are fitted (expectation maximisation) to the times that were seen and to the ages of the blocks that still wait.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tiercache.daemon.policies.predictor import FIRST_AGE_S, LENGTHS, NEW, REFRESH_S, TURNS, Context, Predictor
from tiercache.messages import KEY_BYTES

Floats = npt.NDArray[np.float64]

CATEGORIES = TURNS
"""0: a prompt with nothing in common with any before; 1: it shares a beginning; then turns of a conversation."""
MAX_TIMES = 16_384
EVENTS_KEPT = 16 * MAX_TIMES
"""Beyond so many observations all of them are halved: what happened lately counts more."""
LEAN = 16.0
"""How many blocks' evidence a category takes over from all together."""
FIRST_RATE = 1.0 / 60.0
"""Before anything is known."""
_STEPS = 3
_KEYS_ALL = 1 << 32


def category(context: Context) -> int:
    """Which kind of request."""
    return min(CATEGORIES - 1, context.block_class // (NEW * LENGTHS))


class ReuseTimes(Predictor):
    """A predictor, for what it says of the request at hand, and the reuse times by category.

    The sample outlives the blocks themselves and is spatial, as the predictor's.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        super().__init__(clock_s)
        self.shares = np.full(CATEGORIES, 0.5)
        """Of the blocks of a category, those that will be used again."""
        self.rates = np.full(CATEGORIES, FIRST_RATE)
        """By category: one over the mean of the reuse times, in 1/s."""
        self._last_use: dict[bytes, tuple[float, int]] = {}  # when, and by which category
        self._keys_below = _KEYS_ALL
        self._reused = np.zeros(CATEGORIES)
        self._reused_s = np.zeros(CATEGORIES)
        self._whole = np.array([0.5]), np.array([FIRST_RATE])  # of all categories together

    def asked(self, keys: bytes, found_dram: int, found: int) -> None:
        super().asked(keys, found_dram, found)
        if self.context is None:
            return
        now_s, its, last_use = self.clock_s(), category(self.context), self._last_use
        words = np.frombuffer(keys, dtype="<u4")[1 :: KEY_BYTES // 4]
        for number in np.flatnonzero(words < self._keys_below).tolist():
            key = keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
            if key in last_use:
                used_s, by = last_use[key]
                self._reused[by] += 1.0
                self._reused_s[by] += max(FIRST_AGE_S, now_s - used_s)
            last_use[key] = now_s, its
        while len(last_use) > MAX_TIMES:
            self._keep_fewer()

    def _keep_fewer(self) -> None:
        """Half as large a sample from here on."""
        self._keys_below //= 2
        most = self._keys_below
        for key in [key for key in self._last_use if int.from_bytes(key[4:8], "little") >= most]:
            del self._last_use[key]
        self._reused *= 0.5
        self._reused_s *= 0.5

    def _refresh(self, now_s: float) -> None:
        """Fit all anew, instead of the hazards: at first often, later once a minute."""
        self._refresh_s = now_s + min(REFRESH_S, max(1.0, 0.03 * (now_s - self._started_s)))
        if self._reused.sum() > EVENTS_KEPT:
            self._reused *= 0.5
            self._reused_s *= 0.5
        waiting = np.array(list(self._last_use.values()), np.float64).reshape(-1, 2)
        ages_s, by = np.maximum(FIRST_AGE_S, now_s - waiting[:, 0]), waiting[:, 1].astype(np.int64)
        reused, reused_s, alike = self._reused.sum(keepdims=True), self._reused_s.sum(keepdims=True), np.zeros_like(by)
        self._whole = _fitted(reused, reused_s, ages_s, alike, *self._whole, *self._whole)
        lean = self._whole[0].repeat(CATEGORIES), self._whole[1].repeat(CATEGORIES)
        self.shares, self.rates = _fitted(self._reused, self._reused_s, ages_s, by, *lean, self.shares, self.rates)


def _fitted(
    reused: Floats, reused_s: Floats, ages_s: Floats, by: npt.NDArray[np.int64], lean_share: Floats, lean_rate: Floats,
    shares: Floats, rates: Floats,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Shares and rates of each category, from those of the last time, which are near; they lean on those given.

    `reused`, `reused_s`: how many were seen again, and after how long, added up. `ages_s`, `by`: each block that waits,
    and its category.
    """
    count = len(reused)
    blocks = reused + np.bincount(by, minlength=count)
    leant_on, leant_s = LEAN * lean_share, LEAN * lean_share / lean_rate
    for _ in range(_STEPS):
        later = shares[by] * np.exp(-rates[by] * ages_s)
        later /= 1.0 - shares[by] + later
        again = reused + np.bincount(by, later, count) + leant_on
        again_s = reused_s + np.bincount(by, later * (ages_s + 1.0 / rates[by]), count) + leant_s
        shares, rates = np.minimum(0.999, again / (blocks + LEAN)), again / again_s
    return shares, rates
