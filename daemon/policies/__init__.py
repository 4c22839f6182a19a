"""The eviction policies, by the name that the setting `policy` takes; ../POLICIES.md compares them.

    fresh_stores ──► a policy: lru or hazard              which leaf goes first
    hazard     least worth first ◄── predictor: a sample of blocks ──► worths: what keeping each is worth
    turnover   the clock of policies         rings     candidates in order

A new policy is a file with the methods of `index.policy.Policy`, a maker in `POLICIES`, a choice in
tiercache/config/settings.py (write the chart's schema again: tiercache/config/settings_schema.py), and a row in
../POLICIES.md. If the policy needs numpy, import the policy inside its maker, and add its module to `ON_DEMAND` in
tests/test_layering.py. bench/policies has others, for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tiercache.daemon.hints.hints import Hints
from tiercache.daemon.hints.switched_policy import SwitchedPolicy
from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import Learner, Policy

from .fresh_stores import SHARE, FreshStores
from .lru import LeafLRU
from .turnover import Turnover

__all__ = ["POLICIES", "Made", "Maker", "Policies"]


class Made(NamedTuple):
    """One policy for all tiers of a daemon."""

    policy: Callable[[Index], Policy]
    """Makes the policy of one size class and account, for candidates of that index."""
    learner: Learner | None = None
    """Told of every request; None where the policy does not ask for that."""
    in_hits: bool = False
    """True if its worths are in hits a second."""


Maker = Callable[[Turnover, int], Made]
"""Makes a policy, given the clock and a secret that selects what it samples."""


def _lru(turnover: Turnover, secret: int) -> Made:
    return Made(lambda index: LeafLRU(index.columns))


def _hazard(turnover: Turnover, secret: int) -> Made:
    from .hazard import LeastWorth  # loads numpy
    from .predictor import Predictor

    predictor = Predictor(turnover, secret)
    return Made(lambda index: LeastWorth(index, predictor), predictor, in_hits=True)


POLICIES: Mapping[str, Maker] = {"lru": _lru, "hazard": _hazard}


class Policies:
    """Makes the policies of one daemon. What they learn from requests is learnt once, for all tiers.

    `policy`: the name of one of POLICIES, or what makes another one.
    """

    def __init__(self, policy: str | Maker, clock_s: Callable[[], float], secret: int = 0) -> None:
        self.clock_s = clock_s
        self.hints = Hints(clock_s)
        self.turnover = Turnover(clock_s)
        maker = POLICIES[policy] if isinstance(policy, str) else policy
        self._made = maker(self.turnover, secret)
        self.predictor = self._made.learner

    def stored_bytes(self) -> int:
        """What clients have stored so far."""
        return self.turnover.stored_bytes

    def window_bytes(self) -> int:
        """How much is stored while a block is fresh; see `fresh_stores`."""
        return int(SHARE * self.turnover.room_bytes())

    def make(self, index: Index, below: bool = False) -> Policy:
        """A policy for candidates of that index, behind the window of fresh stores. `below`: for a tier below DRAM."""
        return FreshStores(index, self._made.policy(index), self.turnover, self.predictor, below)

    def hinted(self, index: Index, below: bool = False) -> SwitchedPolicy:
        """The same policy, taking hints of clients into account too."""
        return self.hints.policy(index, self.make(index, below), self._made.in_hits)
