"""What a tier's tables call: the plain policy until the first hint, and the one that follows hints from then on."""

from __future__ import annotations

from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import Policy

from .hinted_policy import HintedPolicy, Teller


class SwitchedPolicy:
    """See `Policy`: its methods are those of the policy in use.

    They are the hottest calls of the daemon, and most daemons get no hint. To pass each call on would cost some 5% of
    what `lru` takes for a block that comes and goes, so nothing stands in between.
    """

    __slots__ = (
        "add",
        "coldest_stamp",
        "evicted",
        "follows",
        "hinted",
        "inserted_many",
        "inserted_run",
        "remove",
        "replaced",
        "touched",
        "victim",
        "worth",
    )

    def __init__(self, index: Index, plain: Policy, teller: Teller, in_hits: bool) -> None:
        self.hinted = HintedPolicy(index, plain, teller, in_hits, self)
        """The policy with hints, in use or not."""
        self._use(plain)

    def follow_hints(self) -> None:
        """A first hint is coming: every block is tracked from here on."""
        self._use(self.hinted)

    def _use(self, policy: Policy) -> None:
        self.inserted_run = policy.inserted_run
        self.inserted_many = policy.inserted_many
        self.touched = policy.touched
        self.replaced = policy.replaced
        self.evicted = policy.evicted
        self.follows = policy.follows
        self.add = policy.add
        self.remove = policy.remove
        self.victim = policy.victim
        self.worth = policy.worth
        self.coldest_stamp = policy.coldest_stamp
