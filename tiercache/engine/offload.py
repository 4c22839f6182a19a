"""The engine's side of the cache: its stores, its loads (`loads.py`), and the blocks that they hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass

from tiercache.connector.costs import CostModel
from tiercache.engine.blocks import BlockManager, Origin
from tiercache.engine.cache import GroupsLike, GuardedCache, TransferLike
from tiercache.engine.loads import LoadResult, Loads
from tiercache.engine.sequence import Sequence
from tiercache.engine.settings import Clock, EngineSettings
from tiercache.protocol.hints import Hint
from tiercache.protocol.messages import Priority

# --- stores ------------------------------------------------------------------------------------------
#
# A store's blocks may not change before its copies have ended. So it has its own reference on each,
# even if the sequence ends or is preempted meanwhile.

_HINTS = {-1: Hint(priority=Priority.HIGH), 0: None, 1: Hint(priority=Priority.LOW)}
"""The hint for the blocks of a request, by the sign of its priority: requests served later are kept less."""


def _sign(priority: int) -> int:
    return (priority > 0) - (priority < 0)


@dataclass(slots=True)
class _Store:
    transfer: TransferLike
    origin: Origin  # of the first block
    block_ids: list[int]
    sequence: Sequence | None = None


class Stores:
    """See the module's docstring."""

    def __init__(self, blocks: BlockManager, cache: GuardedCache, settings: EngineSettings) -> None:
        self._blocks = blocks
        self._cache = cache
        self._settings = settings
        self._stores: list[_Store] = []
        self._asked_blocks = 0

    # --- write-through

    def store_full_blocks(self, sequence: Sequence) -> None:
        """Write-through: store the blocks that became full since the last time, as one transfer."""
        first, end = sequence.stored_blocks, sequence.keyed_full_blocks()
        if not self._cache.exists or self._settings.write != "through" or first >= end:
            return
        # While the cache is unreachable or behind, blocks wait here for a later step of the sequence.
        if len(self._stores) >= self._settings.max_stores or not self._cache.available:
            return
        sequence.stored_blocks = end
        for group, table in enumerate(sequence.tables):
            for position, block_ids in table.held_runs(first, end):
                self._start(Origin(sequence.chain, position, group), block_ids, sequence)

    # --- write-back

    def clean(self, all_blocks: bool = False) -> None:
        """Write-back: store dirty blocks until enough (or all) idle blocks can be given out at once."""
        if self._settings.write != "back" or not self._cache.exists:
            return
        wanted = max(self._asked_blocks, self._settings.clean_blocks)
        self._asked_blocks = 0
        coming = sum(len(store.block_ids) for store in self._stores)
        short = self._blocks.num_blocks if all_blocks else wanted - self._blocks.clean_count - coming
        if short > 0:
            for origin, block_ids in self._blocks.dirty_blocks(short):
                if len(self._stores) >= self._settings.max_stores:
                    break
                self._start(origin, block_ids, None)

    def ask_for(self, count: int) -> None:
        """Ask for `count` clean blocks at a time, which the next `clean` provides."""
        self._asked_blocks = max(self._asked_blocks, count)

    # --- storing

    def _start(self, origin: Origin, block_ids: list[int], sequence: Sequence | None) -> None:
        chain, first, group = origin
        keys = chain.packed(first + len(block_ids))
        events = chain.events(first, len(block_ids)) if self._cache.wants_events else None
        hint = None if sequence is None else _HINTS[_sign(sequence.rank.priority)]
        transfer = self._cache.ask(
            lambda cache: cache.store_async(group, keys, block_ids, first=first, events=events, hint=hint)
        )
        self._blocks.hold(block_ids)
        if transfer is None:
            self._blocks.mark_stored(block_ids)
            self._blocks.release(block_ids)
            return
        self._stores.append(_Store(transfer, origin, block_ids, sequence))

    def poll(self) -> None:
        """Handle stores that have ended. Never blocks."""
        for store in [store for store in self._stores if store.transfer.done()]:
            self._stores.remove(store)
            self._finish(store)
            self._blocks.release(store.block_ids)

    def _finish(self, store: _Store) -> None:
        count, counters = len(store.block_ids), self._cache.counters
        result = self._cache.ask(lambda _: store.transfer.result(0))
        stored, present = (result.stored, result.present) if result is not None else (0, 0)
        counters.stored += stored
        counters.present += present
        counters.not_stored += count - stored - present
        # With write-back a block has one chance: else blocks that the cache refuses would fill the pool forever.
        kept = count if store.sequence is None else stored + present
        self._blocks.mark_stored(store.block_ids[:kept])
        sequence = store.sequence
        if result is None or not result.parent_missing or sequence is None:
            return
        chain, first, group = store.origin
        if sequence.chain is chain and not sequence.store_retried:
            # The cache has lost the blocks before it (a restart, an eviction): offer the chain once more.
            sequence.store_retried = True
            self._blocks.mark_lost(chain, first, group)
            sequence.stored_blocks = 0

    @property
    def transfers(self) -> list[TransferLike]:
        return [store.transfer for store in self._stores]

    def holds(self) -> Counter[int]:
        """References held by stores, per block."""
        return Counter(block_id for store in self._stores for block_id in store.block_ids)


# --- loads and stores together -----------------------------------------------------------------------

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
