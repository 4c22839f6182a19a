"""The engine's side of the cache: which transfers are under way and whose blocks they hold.

A load's blocks belong to the load until its last copy has ended, and a store's may not change until
then. So every transfer has its own reference on every block that it copies, whatever becomes of the
sequence meanwhile. A load that failed, was late or came short is a miss: its tokens are computed.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tiercache.engine.blocks import BlockManager
from tiercache.engine.sequence import Sequence
from tiercache.engine.settings import EngineSettings
from tiercache.errors import TierCacheError
from tiercache.keys import KeyChain

_LOG = logging.getLogger(__name__)
_POLL_S = 0.0001


class MatchLike(Protocol):
    """A prefix found in the cache, under a lease. `blocks` is its length; 0 is a miss."""

    @property
    def blocks(self) -> int: ...


class TransferLike(Protocol):
    """Copies under way. What they touch is free once `done()`."""

    def done(self) -> bool: ...
    def result(self, timeout_s: float = ...) -> Any: ...
    def cancel(self) -> None: ...


class CacheLike(Protocol):
    """What the engine asks of a connector (`tiercache.connector.Connector` has it).

    `keys` is a chain from its root, 16 bytes a key; blocks `first..` of it are those of `block_ids`.
    A load's result is the number of leading `block_ids` proven good; a store's tells
    `stored`, `present`, `dropped` and `parent_missing` blocks.
    """

    @property
    def available(self) -> bool: ...
    def match(self, keys: bytes) -> MatchLike: ...
    def release(self, match: Any) -> None: ...
    def load_async(
        self, match: Any, block_ids: SequenceOf[int], *, first: int = 0, timeout_s: float | None = None
    ) -> TransferLike: ...
    def store_async(self, keys: bytes, block_ids: SequenceOf[int], *, first: int = 0) -> TransferLike: ...
    def close(self) -> None: ...


class LoadOrder(NamedTuple):
    """Blocks `[first, end)` of a sequence are to be loaded from what `match` found."""

    sequence: Sequence
    match: MatchLike
    first: int
    end: int

    def keys(self) -> list[bytes]:
        return [self.sequence.chain.key(number) for number in range(self.first, self.end)]


class LoadResult(NamedTuple):
    """`good_blocks` leading blocks of the order are proven good. Unless `ended`, the copies may still run."""

    order: LoadOrder
    good_blocks: int
    ended: bool


@dataclass(slots=True)
class OffloadCounters:
    """What went through the cache so far, in blocks unless named otherwise."""

    loaded: int = 0
    load_misses: int = 0
    loads_given_up_count: int = 0
    stored: int = 0
    present: int = 0
    not_stored: int = 0
    errors_count: int = 0


@dataclass(slots=True)
class _Load:
    order: LoadOrder
    transfer: TransferLike
    block_ids: list[int]
    deadline_s: float
    wanted: bool = True


@dataclass(slots=True)
class _Store:
    transfer: TransferLike
    chain: KeyChain
    first: int
    block_ids: list[int]
    sequence: Sequence | None = None


@dataclass(slots=True)
class Offload:
    """Loads and stores of one engine. Without a `cache` everything is a miss and nothing is stored."""

    blocks: BlockManager
    cache: CacheLike | None
    settings: EngineSettings
    counters: OffloadCounters = field(default_factory=OffloadCounters)
    _loads: list[_Load] = field(default_factory=list)
    _stores: list[_Store] = field(default_factory=list)
    _loading_keys: set[bytes] = field(default_factory=set)
    _asked_blocks: int = 0
    _error_logged: bool = False

    @property
    def busy(self) -> bool:
        return bool(self._loads or self._stores)

    # -- loads

    def match(self, sequence: Sequence) -> MatchLike | None:
        """What the cache has of a sequence, or None. Blocks for one exchange with the daemon."""
        if self.cache is None or not self.cache.available or not len(sequence.chain):
            return None
        try:
            return self.cache.match(sequence.chain.packed(sequence.max_hit_blocks))
        except TierCacheError as error:
            self._count_error(error)
            return None

    def give_up(self, match: MatchLike | None) -> None:
        """End the lease of a match that is not loaded."""
        if match is None or self.cache is None:
            return
        try:
            self.cache.release(match)
        except TierCacheError as error:
            self._count_error(error)

    def is_loading(self, key: bytes) -> bool:
        """Whether the block of `key` is on its way into the pool."""
        return key in self._loading_keys

    def order_load(self, sequence: Sequence, match: MatchLike, first: int, end: int) -> LoadOrder:
        """A load for `start_load`; from here on others see that its blocks are on their way."""
        order = LoadOrder(sequence, match, first, end)
        self._loading_keys.update(order.keys())
        return order

    def start_load(self, order: LoadOrder) -> bool:
        """Begin a load into the sequence's blocks; False (and no load) if the cache refused it."""
        assert self.cache is not None, "a load is ordered after a match"
        block_ids = order.sequence.block_table[order.first : order.end]
        timeout_s = self.settings.load_timeout_s
        try:
            transfer = self.cache.load_async(order.match, block_ids, first=order.first, timeout_s=timeout_s)
        except TierCacheError as error:
            self._count_error(error)
            self._loading_keys.difference_update(order.keys())
            return False
        self.blocks.hold(block_ids)
        self._loads.append(_Load(order, transfer, block_ids, time.monotonic() + timeout_s))
        return True

    def abandon(self, sequence: Sequence) -> None:
        """The sequence no longer wants its load. Its blocks stay held until the copies have ended."""
        for load in self._loads:
            if load.order.sequence is sequence and load.wanted:
                self._disown(load)

    def _disown(self, load: _Load) -> None:
        load.wanted = False
        load.transfer.cancel()
        self._loading_keys.difference_update(load.order.keys())

    def poll(self) -> list[LoadResult]:
        """Take note of all transfers that have ended, and of loads that are too late. Never blocks."""
        results: list[LoadResult] = []
        now_s = time.monotonic()
        for load in list(self._loads):
            if load.transfer.done():
                self._loads.remove(load)
                if load.wanted:
                    self._loading_keys.difference_update(load.order.keys())
                    good = self._good_blocks(load)
                    results.append(LoadResult(load.order, good, ended=True))
                self.blocks.release(load.block_ids)
            elif load.wanted and now_s >= load.deadline_s:
                self._disown(load)
                self.counters.loads_given_up_count += 1
                results.append(LoadResult(load.order, 0, ended=False))
        for store in [store for store in self._stores if store.transfer.done()]:
            self._stores.remove(store)
            self._finish_store(store)
            self.blocks.release(store.block_ids)
        return results

    def _good_blocks(self, load: _Load) -> int:
        try:
            good = min(int(load.transfer.result(0)), len(load.block_ids))
        except TierCacheError as error:
            self._count_error(error)
            good = 0
        self.counters.loaded += good
        self.counters.load_misses += len(load.block_ids) - good
        return good

    # -- stores

    def store_full_blocks(self, sequence: Sequence) -> None:
        """Write-through: store what became full since the last time, as one transfer."""
        first, end = sequence.stored_blocks, sequence.keyed_full_blocks()
        if self.cache is None or self.settings.write != "through" or first >= end:
            return
        # While the cache is away or behind, blocks wait here for a later step of the sequence.
        if len(self._stores) >= self.settings.max_stores or not self.cache.available:
            return
        sequence.stored_blocks = end
        self._start_store(sequence.chain, first, sequence.block_table[first:end], sequence)

    def clean(self, all_blocks: bool = False) -> None:
        """Write-back: store dirty blocks until enough (or all) idle ones can be given out at once."""
        if self.settings.write != "back" or self.cache is None:
            return
        wanted = max(self._asked_blocks, self.settings.clean_blocks)
        self._asked_blocks = 0
        coming = sum(len(store.block_ids) for store in self._stores)
        short = self.blocks.num_blocks if all_blocks else wanted - self.blocks.clean_count - coming
        if short > 0:
            for origin, block_ids in self.blocks.dirty_blocks(short):
                if len(self._stores) >= self.settings.max_stores:
                    break
                self._start_store(origin.chain, origin.number, block_ids, None)

    def ask_for(self, count: int) -> None:
        """`count` clean blocks are wanted at one time: the next `clean` sees to it."""
        self._asked_blocks = max(self._asked_blocks, count)

    def makes_room(self) -> bool:
        """Whether idle blocks will become available without anyone giving up theirs."""
        self.ask_for(1)
        if self.blocks.idle_count > self.blocks.clean_count:
            return True
        return any(self.blocks.references(block_id) == count for block_id, count in self.holds().items())

    def _start_store(
        self, chain: KeyChain, first: int, block_ids: list[int], sequence: Sequence | None
    ) -> None:
        assert self.cache is not None
        try:
            transfer = self.cache.store_async(chain.packed(first + len(block_ids)), block_ids, first=first)
        except TierCacheError as error:
            self._count_error(error)
            self.blocks.mark_stored(block_ids)
            return
        self.blocks.hold(block_ids)
        self._stores.append(_Store(transfer, chain, first, block_ids, sequence))

    def _finish_store(self, store: _Store) -> None:
        count = len(store.block_ids)
        try:
            result = store.transfer.result(0)
            stored, present, missing = result.stored, result.present, result.parent_missing
        except TierCacheError as error:
            self._count_error(error)
            stored = present = missing = 0
        self.counters.stored += stored
        self.counters.present += present
        self.counters.not_stored += count - stored - present
        # With write-back a block has one chance: else what the cache refuses would fill the pool for ever.
        kept = count if store.sequence is None else stored + present
        self.blocks.mark_stored(store.block_ids[:kept])
        sequence = store.sequence
        if missing and sequence is not None and sequence.chain is store.chain and not sequence.store_retried:
            # The cache has lost the blocks before (a restart, an eviction): offer the chain once more.
            sequence.store_retried = True
            self.blocks.mark_lost(store.chain, store.first)
            sequence.stored_blocks = 0

    # -- all transfers

    def holds(self) -> Counter[int]:
        """References that transfers have, per block."""
        held: Counter[int] = Counter()
        for load in self._loads:
            held.update(load.block_ids)
        for store in self._stores:
            held.update(store.block_ids)
        return held

    def wait(self, timeout_s: float) -> None:
        """Block until a transfer has ended, for `timeout_s` at most."""
        deadline_s = time.monotonic() + timeout_s
        transfers = [load.transfer for load in self._loads] + [store.transfer for store in self._stores]
        while transfers and time.monotonic() < deadline_s:
            if any(transfer.done() for transfer in transfers):
                return
            time.sleep(_POLL_S)

    def _count_error(self, error: TierCacheError) -> None:
        self.counters.errors_count += 1
        if not self._error_logged:
            self._error_logged = True
            _LOG.warning("the cache failed and is a miss from here on where it does: %s", error)
