"""Prefetches blocks into DRAM in the background, shortly before a client said it would return.

    hint(return_in) ─► plan ─ a moment before that ─► what lower tiers have of it is promoted, after clients' reads

A plan holds nothing: blocks that have left both tiers meanwhile are a miss. Prefetched blocks are kept in DRAM
like all awaited ones (`hinted_policy.py`); blocks that would not be kept, since other clients come sooner, are not
prefetched.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tiercache.daemon.ground.slices import Slices, Steps
from tiercache.daemon.hints.hints import GivenHint
from tiercache.daemon.hints.switched_policy import SwitchedPolicy
from tiercache.daemon.tiers.dram.reads import Reads
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.protocol.messages import KEY_BYTES

LEAD_SHARE = 0.1
LEAD_S = 1.0
"""How long before the time, as a share of the wait and at least: people and tools come early, and reads take time."""
MAX_PLANS = 4096
MAX_PLAN_BYTES = 16 << 20
"""Keys of all plans; beyond that the oldest plans are forgotten."""
AT_ONCE = 8
"""The most promotions in progress, prefetches of clients included: beyond it plans wait."""


class _Plan(NamedTuple):
    """`namespaces` are promoted up to `keys` from `begin_s` on; after `late_s` the client is no longer awaited."""

    namespaces: tuple[Namespace, ...]
    keys: bytes
    begin_s: float
    late_s: float


_Name = tuple[tuple[int, ...], bytes]


class Ahead:
    """Plans and starts prefetches. Event loop only; never blocks.

    `look_up(namespaces, keys, go)` has `go` called when it is known what a shared store has; False where it is known.
    """

    def __init__(
        self,
        reads: Reads,
        clock_s: Callable[[], float],
        slices: Slices,
        look_up: Callable[[Sequence[Namespace], bytes, Callable[[], None]], bool] = lambda namespaces, keys, go: False,
    ) -> None:
        self.blocks = 0
        """Blocks prefetched so far, including those under way."""
        self._reads = reads
        self._slices = slices
        self._look_up = look_up
        self._clock_s = clock_s
        self._plans: OrderedDict[_Name, _Plan] = OrderedDict()
        self._bytes = 0
        self._due: list[tuple[float, _Name]] = []

    @property
    def plans(self) -> int:
        """Chains that are awaited."""
        return len(self._plans)

    def say(self, namespaces: Sequence[Namespace], keys: bytes, said: GivenHint) -> None:
        """Record a hint that gives a return time, or cancels it with `done`."""
        name = tuple(one.number for one in namespaces), keys[-KEY_BYTES:]
        if said.done or said.late_s:
            self._drop(name)
        if not said.late_s:
            return
        now_s = self._clock_s()
        begin_s = said.back_s - max(LEAD_S, LEAD_SHARE * (said.back_s - now_s))
        self._plans[name] = _Plan(tuple(namespaces), keys, begin_s, said.late_s)
        self._bytes += len(keys)
        heapq.heappush(self._due, (begin_s, name))
        while len(self._plans) > MAX_PLANS or self._bytes > MAX_PLAN_BYTES:
            self._drop(next(iter(self._plans)))
        if len(self._due) > 2 * len(self._plans) + MAX_PLANS:  # most of them are of plans that were replaced
            self._due = [(plan.begin_s, one) for one, plan in self._plans.items()]
            heapq.heapify(self._due)

    def _drop(self, name: _Name) -> None:
        plan = self._plans.pop(name, None)
        if plan is not None:
            self._bytes -= len(plan.keys)

    def work(self) -> None:
        """Prefetch what will be asked for soon. O(1) while there is nothing."""
        now_s = self._clock_s()
        for _ in range(AT_ONCE):
            if not self._due or self._due[0][0] > now_s or len(self._reads.growing.leases) >= AT_ONCE:
                return
            name = heapq.heappop(self._due)[1]
            plan = self._plans.get(name)
            if plan is None or plan.begin_s > now_s:
                continue  # a later hint has moved the time: it has its own note
            self._drop(name)
            if plan.late_s > now_s:
                self._begin(plan)

    def _begin(self, plan: _Plan) -> None:
        def go() -> None:
            self._slices.add(self._bring(plan))

        if not self._look_up(plan.namespaces, plan.keys, go):
            go()

    def _bring(self, plan: _Plan) -> Steps[None]:
        blocks = yield from self._reads.bring_ahead(plan.namespaces, plan.keys, lambda: self._room(plan))
        self.blocks += blocks  # read only now: others have counted theirs between two slices

    def _room(self, plan: _Plan) -> int:
        """How many blocks of each namespace would stay in DRAM until they are asked for, not be evicted for others."""
        coming = sum(lease.target - lease.blocks for lease in self._reads.growing.leases.values() if not lease.holders)
        policies = (namespace.table.policy for namespace in plan.namespaces)
        return min(one.hinted.room_for(plan.late_s) for one in policies if isinstance(one, SwitchedPolicy)) - coming
