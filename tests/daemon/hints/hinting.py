"""A cache that gets hints about its blocks."""

from __future__ import annotations

from typing import Any

from cache_rig import SmallCache, branch

from tiercache.daemon.hints.hinted_policy import HintedPolicy
from tiercache.daemon.hints.hints import hint_given_at
from tiercache.daemon.hints.switched_policy import SwitchedPolicy
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.protocol.messages import Priority

LOW, HIGH = Priority.LOW, Priority.HIGH


class Hinting(SmallCache):
    """A cache that gets hints about its blocks."""

    def hint(self, ns: Namespace, keys: bytes, first: int = 0, **said: Any) -> int:
        values = {"done": False, "return_in_s": 0.0, "ttl_s": 0.0, "priority": None, **said}
        blocks = self.cache.hint_now([ns], keys, first, hint_given_at(self.now_s, **values))
        self.check()
        return blocks

    def later(self, seconds: float) -> None:
        """Time passes, and only the daemon's own tick runs."""
        self.now_s += seconds
        self.cache.expire()
        self.check()

    def fill(self, ns: Namespace, first: int, count: int) -> None:
        """Store `count` chains of one block that no client has asked for."""
        for number in range(first, first + count):
            self.now_s += 2.0  # no client is about to continue the chain before
            self.store(ns, branch(number))

    def here(self, ns: Namespace, *chains: bytes) -> list[int]:
        """How many blocks of each chain are here; looking does not count as a use."""
        return [self.cache.peek([ns], keys)[0] for keys in chains]

    def policy(self, ns: Namespace) -> HintedPolicy:
        policy = ns.table.policy
        assert isinstance(policy, SwitchedPolicy)
        return policy.hinted
