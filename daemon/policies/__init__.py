"""The eviction policies, by the name that the setting `policy` takes; ../POLICIES.md compares them.

    window ──► a policy: lru, hazard, arc, s3fifo, wtinylfu, workload_aware     which leaf goes first
    hazard     least worth first ◄── predictor: a sample of blocks ──► worths: what keeping each is worth
    turnover   the clock of policies         rings, queues, ghosts, sketch, reusetimes     what several are made of

A new policy is a file with the methods of `index.policy.Policy`, a name and a branch here, and a choice in
tiercache/config/settings.py. If it needs numpy, tests/test_layering.py must know it (`ON_DEMAND`).
"""

from __future__ import annotations

from collections.abc import Callable

from tiercache.daemon.hints.hinted_policy import HintedPolicy
from tiercache.daemon.hints.hints import Hints
from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import Learner, Policy
from tiercache.daemon.policies.arc import ARC
from tiercache.daemon.policies.lru import LeafLRU
from tiercache.daemon.policies.requests import Requests
from tiercache.daemon.policies.s3fifo import S3FIFO
from tiercache.daemon.policies.turnover import Turnover
from tiercache.daemon.policies.window import Window

__all__ = ["POLICIES", "Policies"]

POLICIES = ("lru", "hazard", "arc", "s3fifo", "wtinylfu", "workload-aware")


class Policies:
    """Makes the policies of one daemon. What they learn from requests is learnt once, for all tiers.

    Policies that learn with numpy are imported when they are asked for.
    """

    def __init__(self, name: str, clock_s: Callable[[], float], secret: int = 0) -> None:
        assert name in POLICIES, name
        self.clock_s = clock_s
        self.hints = Hints(clock_s)
        self.turnover = Turnover(clock_s)
        self._in_hits = name in ("hazard", "workload-aware")
        self.predictor: Learner | None = None
        """Told of every request; None where no policy asks for that."""
        self._make: Callable[[Index], Policy] = lambda index: LeafLRU(index.columns)
        if name == "hazard":
            from tiercache.daemon.policies.hazard import LeastWorth
            from tiercache.daemon.policies.predictor import Predictor

            self.predictor = predictor = Predictor(self.turnover, secret)
            self._make = lambda index: LeastWorth(index, predictor)
        elif name == "workload-aware":
            from tiercache.daemon.policies.reusetimes import ReuseTimes
            from tiercache.daemon.policies.workload_aware import WorkloadAware

            self.predictor = times = ReuseTimes(self.turnover, secret)
            self._make = lambda index: WorkloadAware(index, times)
        elif name == "wtinylfu":
            from tiercache.daemon.policies.sketch import Sketch
            from tiercache.daemon.policies.wtinylfu import WTinyLFU

            self.predictor = sketch = Sketch(self.turnover)
            self._make = lambda index: WTinyLFU(index, sketch)
        elif name == "arc":
            self.predictor = requests = Requests(self.turnover)
            self._make = lambda index: ARC(index, requests)
        elif name == "s3fifo":
            self.predictor = requests = Requests(self.turnover)
            self._make = lambda index: S3FIFO(index, requests)

    def make(self, index: Index, below: bool = False) -> Policy:
        """A policy for candidates of that index, behind the window of fresh stores. `below`: for a tier below DRAM."""
        return Window(index, self._make(index), self.turnover, self.predictor, below)

    def hinted(self, index: Index, below: bool = False) -> HintedPolicy:
        """The same policy, taking hints of clients into account too."""
        return self.hints.policy(index, self.make(index, below), self._in_hits)
