"""A cache in a dict that keeps the engine's side of the connector's contract, and can misbehave on order."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tiercache.connector.stores import StoreResult
from tiercache.copies.pool import Pool
from tiercache.engine.settings import Clock
from tiercache.errors import DaemonUnavailable
from tiercache.protocol.hints import Hint
from tiercache.protocol.messages import KEY_BYTES, EventRun, ModelCard
from tiercache.protocol.namespaces import NamespaceSpec

NO_LIMIT = 1 << 30


class MemoryMatch(NamedTuple):
    keys: tuple[bytes, ...]
    number: int
    below_blocks: int
    shared_blocks: int

    @property
    def blocks(self) -> int:
        return len(self.keys)


class MemoryTransfer:
    """The copy happens when it is finished, cancelled or not: a block reused too early is a wrong byte then."""

    def __init__(self, copy: Any, miss: Any, seconds: float, clock: Clock) -> None:
        self._copy, self._result = copy, miss
        self._done = self._cancelled = False
        self.began_s = self.ended_s = 0.0
        self._seconds = seconds
        self._clock = clock

    def finish(self) -> None:
        if not self._done:
            copied = self._copy()
            self._result = self._result if self._cancelled else copied
            self.began_s = self._clock.now_s()
            self.ended_s = self.began_s + self._seconds
        self._done = True

    def done(self) -> bool:
        return self._done

    def result(self, timeout_s: float = 60.0) -> Any:
        assert self._done, "the engine asks only for results of transfers that are done"
        return self._result

    def cancel(self) -> None:
        self._cancelled = True


class MemoryCache:
    """Blocks by key, prefix-closed unless the namespace has a window, with copies of the real bytes.

    `groups` are this one and its siblings, one for each group of layers.

    Attributes:
        blocks: what is stored.
        hold_transfers: while true, transfers wait in `pending` for `finish_all`.
        hold_lookups: while true, answers wait in `lookups` for `finish_lookups`.
        good_blocks: loads report at most this many blocks as good, and spoil the rest.
        boast_blocks: loads report this many more than they were asked for.
        capacity: blocks that fit; more are dropped.
        refuse: every call raises, as a connector must not; `refuse_loads` is for loads alone, `refuse_others` for
            matches of all groups but the first.
        flush_between: all groups but the first lose the last block of a match of several groups.
        below_from, shared_from: blocks of a match from this one on are said to come from below DRAM, or from a store
            that hosts share.
        dram_block_s, below_block_s, shared_block_s: what a load says that it took for each block.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.blocks: dict[bytes, torch.Tensor] = {}
        self.clock = clock or Clock()
        self.pool: torch.Tensor | None = None
        self.namespace: NamespaceSpec | None = None
        self.available = True
        self.wants_events = False
        self.hold_transfers = self.hold_lookups = False
        self.lookups: list[MemoryTransfer] = []
        self.refuse = self.refuse_loads = self.refuse_others = self.flush_between = False
        self.good_blocks = self.capacity = NO_LIMIT
        self.boast_blocks = 0
        self.pending: list[MemoryTransfer] = []
        self.leases: set[int] = set()
        self.store_calls: list[tuple[int, int]] = []
        self.hints: list[Hint | None] = []
        self.load_calls: list[tuple[int, int]] = []
        self.prefetches: list[int] = []
        self.announced: list[ModelCard] = []
        self.below_from = self.shared_from = NO_LIMIT
        self.dram_block_s = self.below_block_s = self.shared_block_s = 0.0
        self.closed = False
        self.groups = [self]
        self._root = self
        self._lease_numbers = itertools.count()

    def connect(self, namespace: NamespaceSpec, pool: torch.Tensor) -> MemoryCache:
        self.namespace, self.pool = namespace, pool
        return self

    def sibling(self, namespace: NamespaceSpec, pool: Pool) -> MemoryCache:
        """For another group of layers; what it had before it still has. All behave as the first one is told to."""
        known = [one for one in self.groups[1:] if one.namespace == namespace]
        other = known[0] if known else MemoryCache(self.clock)
        if not known:
            self.groups.append(other)
        other._root = self
        return other.connect(namespace, pool.arrays[0])

    def match(self, keys: bytes, *, namespaces: Sequence[NamespaceSpec] | None = None) -> MemoryMatch:
        root = self._root
        root._check()
        if root.refuse_others and self is not root:
            raise DaemonUnavailable("it has gone between two groups")
        chain = split(keys)
        asked = [self] if namespaces is None else [one for one in self.groups if one.namespace in namespaces]
        assert len(asked) == len(namespaces or [None])
        ends = (cut for cut in range(len(chain), 0, -1) if all(one._has_all(chain[:cut]) for one in asked))
        found = chain[: next(ends, 0)]
        below, shared = (max(0, len(found) - first) for first in (root.below_from, root.shared_from))
        match = MemoryMatch(tuple(found), next(root._lease_numbers), max(below, shared), shared)
        if found:
            root.leases.add(match.number)
        if found and root.flush_between and namespaces is not None:
            for one in self.groups[1:]:
                one.blocks.pop(found[-1], None)
        return match

    def _has_all(self, chain: list[bytes]) -> bool:
        """As the daemon: whether a request may continue behind this chain."""
        window = self.namespace.window_blocks if self.namespace is not None else 0
        return all(key in self.blocks for key in (chain[-window:] if window else chain))

    def prefetch(self, keys: bytes, *, namespaces: Sequence[NamespaceSpec] | None = None) -> int:
        self._root._check()
        self._root.prefetches.append(len(keys) // KEY_BYTES)
        return 0

    def announce(self, models: Sequence[ModelCard]) -> None:
        self.announced = list(models)

    def ask_async(self, question: Callable[[], Any], miss: Any) -> MemoryTransfer:
        """The question is asked at once; with `hold_lookups` its answer is late."""
        answer = question()
        transfer = MemoryTransfer(lambda: answer, answer, 0.0, self.clock)
        self._root.lookups.append(transfer)
        if not self._root.hold_lookups:
            self.finish_lookups()
        return transfer

    def finish_lookups(self) -> None:
        """The answers to all questions are there."""
        for transfer in self._root.lookups:
            transfer.finish()
        self._root.lookups.clear()

    def release_async(self, match: MemoryMatch) -> None:
        self.release(match)

    def release(self, match: MemoryMatch) -> None:
        self._root.leases.discard(match.number)

    def load_async(
        self, match: MemoryMatch, block_ids: Sequence[int], *, first: int = 0, timeout_s: float | None = None
    ) -> MemoryTransfer:
        root = self._root
        root._check()
        if root.refuse_loads:
            raise DaemonUnavailable("no loads today")
        keys = match.keys[first : first + len(block_ids)]
        assert len(keys) == len(block_ids), "a load asks for what was matched"
        window = self.namespace.window_blocks if self.namespace is not None else 0
        assert not window or first >= match.blocks - window, "only the window is under the lease"
        root.load_calls.append((first, len(block_ids)))
        root.leases.discard(match.number)

        def copy() -> int:
            assert self.pool is not None
            present = [key in self.blocks for key in keys]
            good = min(present.index(False) if False in present else len(keys), root.good_blocks)
            for number, (key, block_id) in enumerate(zip(keys, block_ids, strict=True)):
                spoilt = float("nan") if self.pool.is_floating_point() else 255
                self.pool[block_id] = self.blocks[key] if number < good else spoilt
            return good + root.boast_blocks if good == len(keys) else good

        below, shared = (
            max(0, first + len(keys) - max(first, match.blocks - farther))
            for farther in (match.below_blocks, match.shared_blocks)
        )
        each_s = root.dram_block_s, root.below_block_s, root.shared_block_s
        seconds = sum(map(operator.mul, (len(keys) - below, below - shared, shared), each_s))
        return self._begin(copy, 0, seconds)

    def store_async(
        self,
        keys: bytes,
        block_ids: Sequence[int],
        *,
        first: int = 0,
        events: EventRun | None = None,
        hint: Hint | None = None,
    ) -> MemoryTransfer:
        root = self._root
        root._check()
        chain = split(keys)
        assert len(chain) >= first + len(block_ids)
        root.store_calls.append((first, len(block_ids)))
        root.hints.append(hint)

        def copy() -> StoreResult:
            assert self.pool is not None
            orphans = self.namespace is not None and self.namespace.window_blocks
            if not orphans and not all(key in self.blocks for key in chain[:first]):
                return StoreResult(dropped=len(block_ids), parent_missing=True)
            stored = present = 0
            for key, block_id in zip(chain[first:], block_ids, strict=False):
                if key in self.blocks:
                    present += 1
                elif len(self.blocks) < root.capacity:
                    self.blocks[key] = self.pool[block_id].clone()
                    stored += 1
                else:
                    break
            return StoreResult(stored, present, len(block_ids) - stored - present)

        return self._begin(copy, StoreResult(dropped=len(block_ids)))

    def _begin(self, copy: Any, miss: Any, seconds: float = 0.0) -> MemoryTransfer:
        transfer = MemoryTransfer(copy, miss, seconds, self.clock)
        self._root.pending.append(transfer)
        if not self._root.hold_transfers:
            self.finish_all()
        return transfer

    def finish_all(self) -> None:
        """End the held transfers, oldest first. Further ones are held as before."""
        for transfer in self._root.pending:
            transfer.finish()
        self._root.pending.clear()

    def behave(self) -> None:
        """From here on everything works, at once."""
        self.refuse = self.refuse_loads = self.refuse_others = self.flush_between = self.hold_transfers = False
        self.good_blocks = self.capacity = NO_LIMIT
        self.boast_blocks = 0
        self.available = True
        self.hold_lookups = False
        self.finish_lookups()
        self.finish_all()

    def _check(self) -> None:
        if self._root.refuse:
            raise DaemonUnavailable("the cache is away")

    def close(self) -> None:
        self.closed = True


def split(keys: bytes) -> list[bytes]:
    """Packed keys, one by one."""
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]
