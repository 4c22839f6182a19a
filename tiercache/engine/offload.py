"""The engine's side of the cache: its loads and stores, and the blocks that they hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

from tiercache.engine.blocks import BlockManager
from tiercache.engine.cache import GroupsLike, GuardedCache
from tiercache.engine.clock import Clock
from tiercache.engine.cost import CostModel
from tiercache.engine.loads import LoadResult, Loads
from tiercache.engine.settings import EngineSettings
from tiercache.engine.stores import Stores

_POLL_S = 0.0001


class Offload:
    """Loads and stores of one engine. Without a `cache` everything is a miss and nothing is stored."""

    def __init__(
        self, blocks: BlockManager, cache: GroupsLike | None, cost: CostModel, settings: EngineSettings, clock: Clock
    ) -> None:
        self._blocks = blocks
        self._cache = GuardedCache(cache)
        self._clock = clock
        self.cost = cost
        self.loads = Loads(blocks, self._cache, cost, settings, clock)
        self.stores = Stores(blocks, self._cache, settings)

    @property
    def exists(self) -> bool:
        """True if there is a cache, reachable or not."""
        return self._cache.exists

    @property
    def busy(self) -> bool:
        return bool(self.loads.transfers or self.stores.transfers)

    def poll(self) -> list[LoadResult]:
        """Handle transfers that have ended, and loads that are too late. Never blocks."""
        self.stores.poll()
        return self.loads.poll()

    def makes_room(self, count: int) -> bool:
        """True if idle blocks will become available without taking a sequence's; `count` are wanted."""
        self.stores.ask_for(count)
        if self._blocks.idle_count > self._blocks.clean_count:
            return True
        return any(self._blocks.references(block_id) == count for block_id, count in self.holds().items())

    def holds(self) -> Counter[int]:
        """References held by transfers, per block."""
        return self.loads.holds() + self.stores.holds()

    def wait(self, timeout_s: float) -> None:
        """Block until a transfer has ended, for `timeout_s` at most."""
        deadline_s = self._clock.now_s() + timeout_s
        transfers = self.loads.transfers + self.stores.transfers
        while transfers and self._clock.now_s() < deadline_s:
            if any(transfer.done() for transfer in transfers):
                return
            self._clock.sleep(_POLL_S)

    def stats(self) -> dict[str, int]:
        """Counters since the start."""
        costs = {"loads_avoided": self.cost.loads_avoided, "loads_regretted": self.cost.loads_regretted}
        return {**asdict(self._cache.counters), **costs}
