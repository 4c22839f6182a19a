"""A cache in a dict that keeps the engine's side of the connector's contract, and can misbehave on order."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tiercache.errors import DaemonUnavailable
from tiercache.layout import NamespaceSpec
from tiercache.messages import ModelCard


class StoreResult(NamedTuple):
    stored: int
    present: int
    dropped: int
    parent_missing: bool


class MemoryMatch(NamedTuple):
    keys: tuple[bytes, ...]
    number: int

    below_blocks: int

    @property
    def blocks(self) -> int:
        return len(self.keys)


class MemoryTransfer:
    """The copy happens when it is finished, cancelled or not: a block reused too early is a wrong byte then."""

    def __init__(self, copy: Any, miss: Any, seconds: float) -> None:
        self._copy, self._result = copy, miss
        self._done = self._cancelled = False
        self.began_s = self.ended_s = 0.0
        self._seconds = seconds

    def finish(self) -> None:
        if not self._done:
            copied = self._copy()
            self._result = self._result if self._cancelled else copied
            self.began_s = time.monotonic()
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

    Attributes:
        blocks: what is stored.
        hold_transfers: while true, transfers wait in `pending` for `finish_all`.
        good_blocks: loads report at most this many blocks as good, and spoil the rest.
        capacity: blocks that fit; more are dropped.
        refuse: every call raises, as a connector must not.
        below_from: blocks of a match from this one on are said to come from below DRAM.
        dram_block_s, below_block_s: what a load says that it took for each block.
    """

    def __init__(self) -> None:
        self.blocks: dict[bytes, torch.Tensor] = {}
        self.pool: torch.Tensor | None = None
        self.namespace: NamespaceSpec | None = None
        self.available = True
        self.hold_transfers = False
        self.refuse = False
        self.good_blocks = 1 << 30
        self.capacity = 1 << 30
        self.pending: list[MemoryTransfer] = []
        self.leases: set[int] = set()
        self.store_calls: list[tuple[int, int]] = []
        self.load_calls: list[tuple[int, int]] = []
        self.prefetches: list[int] = []
        self.announced: list[ModelCard] = []
        self.below_from = 1 << 30
        self.dram_block_s = self.below_block_s = 0.0
        self.closed = False
        self._lease_numbers = itertools.count()

    def connect(self, namespace: NamespaceSpec, pool: torch.Tensor) -> MemoryCache:
        self.namespace, self.pool = namespace, pool
        return self

    def match(self, keys: bytes) -> MemoryMatch:
        self._check()
        chain = [keys[start : start + 16] for start in range(0, len(keys), 16)]
        found = chain[: self._match_end([key in self.blocks for key in chain])]
        match = MemoryMatch(tuple(found), next(self._lease_numbers), max(0, len(found) - self.below_from))
        if found:
            self.leases.add(match.number)
        return match

    def _match_end(self, there: list[bool]) -> int:
        """As the daemon: the longest leading run, or with a window the last place behind a whole one."""
        window = self.namespace.window_blocks if self.namespace is not None else 0
        if not window:
            return [*there, False].index(False)
        return next((cut for cut in range(len(there), 0, -1) if all(there[max(0, cut - window) : cut])), 0)

    def prefetch(self, keys: bytes) -> int:
        self._check()
        self.prefetches.append(len(keys) // 16)
        return 0

    def announce(self, models: Sequence[ModelCard]) -> None:
        self.announced = list(models)

    def release(self, match: MemoryMatch) -> None:
        self.leases.discard(match.number)

    def load_async(
        self, match: MemoryMatch, block_ids: Sequence[int], *, first: int = 0, timeout_s: float | None = None
    ) -> MemoryTransfer:
        self._check()
        keys = match.keys[first : first + len(block_ids)]
        assert len(keys) == len(block_ids), "a load asks for what was matched"
        window = self.namespace.window_blocks if self.namespace is not None else 0
        assert not window or first >= match.blocks - window, "only the window is under the lease"
        self.load_calls.append((first, len(block_ids)))
        self.leases.discard(match.number)

        def copy() -> int:
            assert self.pool is not None
            there = [key in self.blocks for key in keys]
            good = min(there.index(False) if False in there else len(keys), self.good_blocks)
            for number, (key, block_id) in enumerate(zip(keys, block_ids, strict=True)):
                spoilt = float("nan") if self.pool.is_floating_point() else 255
                self.pool[block_id] = self.blocks[key] if number < good else spoilt
            return good

        below = max(0, first + len(keys) - max(first, match.blocks - match.below_blocks))
        seconds = (len(keys) - below) * self.dram_block_s + below * self.below_block_s
        return self._begin(copy, 0, seconds)

    def store_async(self, keys: bytes, block_ids: Sequence[int], *, first: int = 0) -> MemoryTransfer:
        self._check()
        chain = [keys[start : start + 16] for start in range(0, len(keys), 16)]
        assert len(chain) >= first + len(block_ids)
        self.store_calls.append((first, len(block_ids)))

        def copy() -> StoreResult:
            assert self.pool is not None
            orphans = self.namespace is not None and self.namespace.window_blocks
            if not orphans and not all(key in self.blocks for key in chain[:first]):
                return StoreResult(0, 0, len(block_ids), True)
            stored = present = 0
            for key, block_id in zip(chain[first:], block_ids, strict=False):
                if key in self.blocks:
                    present += 1
                elif len(self.blocks) < self.capacity:
                    self.blocks[key] = self.pool[block_id].clone()
                    stored += 1
                else:
                    break
            return StoreResult(stored, present, len(block_ids) - stored - present, False)

        return self._begin(copy, StoreResult(0, 0, len(block_ids), False))

    def _begin(self, copy: Any, miss: Any, seconds: float = 0.0) -> MemoryTransfer:
        transfer = MemoryTransfer(copy, miss, seconds)
        self.pending.append(transfer)
        if not self.hold_transfers:
            self.finish_all()
        return transfer

    def finish_all(self) -> None:
        for transfer in self.pending:
            transfer.finish()
        self.pending.clear()

    def _check(self) -> None:
        if self.refuse:
            raise DaemonUnavailable("the cache is away")

    def close(self) -> None:
        self.closed = True
