"""The worker's half: copies what the scheduler orders, in the background, and reports the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tiercache.connector.connector import Connector
from tiercache.connector.jobs import Transfer
from tiercache.connector.stores import StoreResult
from tiercache.copies.pool import COPY_GIVE_UP_S
from tiercache.errors import DeadlineExceeded
from tiercache.protocol.messages import KEY_BYTES, EventRun

from .log import COUNTERS
from .orders import BlockRun, CacheGroup, Load, Orders, Store, WorkerReport, of_group
from .weights import Weights

FLUSH_TIMEOUT_S = 0.1
"""Time that a step waits for stores whose blocks it overwrites; after that they are void."""
SLEEP_TIMEOUT_S = 2.0
"""Time for stores to end before vLLM goes to sleep; after that they are void."""
IDLE_WAIT_S = 0.001
"""Time that a step without tokens waits for its loads, instead of spinning."""

Proof = Callable[[], bool]


class RankWorker:
    """Copies between one rank's pools and the cache. Used by vLLM's worker thread only.

    Args:
        groups: a connector for each part of the KV cache groups.
        writers: for each part, whether this rank stores it.
        names: for each part, its group's name in KV events; None where other blocks stand for these in events.
        weights: those that compute this rank's blocks; without, they are assumed never to change.
        rank: which of the engine's ranks this is.
    """

    def __init__(
        self,
        groups: Sequence[Connector],
        writers: Sequence[bool],
        names: Sequence[CacheGroup | None] | None = None,
        weights: Weights | None = None,
        rank: int = 0,
    ) -> None:
        self._groups = groups
        # Blocks at the beginning of a window or before a state are not a prefix: a load of them is good or it is not.
        self._whole = len(groups) > 1 or any(connector.namespace.window_blocks for connector in groups)
        self._names = names
        self._writers = writers
        self._weights = weights
        self._rank = rank
        self._known_moves = 0  # of the weights, as known to the last orders
        self._loads: dict[str, list[tuple[BlockRun, Transfer[int]]]] = {}
        self._load_moves: dict[str, int] = {}
        self._stores: dict[int, list[Transfer[StoreResult]]] = {}
        self._fresh: list[Store] = []  # computed by the step before
        self._cancelled: set[str] = set()
        self._load_seconds: dict[str, float] = {}  # of loads that have ended and are not reported
        self._bad_blocks: set[int] = set()
        self._counted = dict.fromkeys(COUNTERS, 0)
        self._moved = False  # since they were counted

    def begin(self, orders: Orders) -> None:
        """Before a step computes. Waits only if the step writes to blocks being stored, for at most FLUSH_TIMEOUT_S."""
        proof = self._look(orders)
        for stores, moves in ((self._fresh, self._known_moves), (orders.ready, orders.moves.get(self._rank, 0))):
            for store in stores:
                self._store(store, proof if moves == self._moves() else None)
        self._known_moves = orders.moves.get(self._rank, 0)
        for hint in orders.hints:
            for connector, writes in zip(self._groups, self._writers, strict=True):
                if writes:
                    connector.hint_async(hint.keys, hint.hint)
        self._fresh = orders.fresh
        if orders.flush:
            self._flush(orders.flush)
        for load in orders.loads:
            self._load(load, self._known_moves == self._moves())
        for request_id in orders.cancel:
            if request_id in self._loads:
                self._cancelled.add(request_id)
                for _, transfer in self._loads[request_id]:
                    transfer.cancel()

    def _moves(self) -> int:
        return self._weights.moves if self._weights is not None else 0

    def _look(self, orders: Orders) -> Proof:
        """Look at the weights if it matters. The proof tells whether all computed so far is of them."""
        matters = orders.renamed or orders.begins or self._fresh or orders.ready or orders.loads or self._loads
        if self._weights is None or not matters:
            return lambda: True
        if not orders.renamed:
            return self._weights.look()
        self._weights.look(adopt=True)
        return lambda: False  # nothing with the new names has been computed yet

    def _store(self, store: Store, proof: Proof | None) -> None:
        """Store blocks, and commit them if `proof` holds; without a proof they are not stored."""
        self._stores[store.job_id] = [
            connector.store_async(
                store.keys, run.block_ids, first=run.first, events=self._events(store, group), proof=proof
            )
            if proof is not None
            else Transfer.finished(StoreResult(dropped=len(run.block_ids)))
            for group, (connector, writes, run) in enumerate(zip(self._groups, self._writers, store.runs, strict=True))
            if writes and run.block_ids
        ]

    def _events(self, store: Store, group: int) -> EventRun | None:
        """What KV events say of the blocks of one group."""
        name = self._names[group] if self._names is not None else None
        if store.events is None or name is None:
            return None
        run, before = store.runs[group], len(store.keys) // KEY_BYTES - len(store.events.hashes)
        return of_group(store.events, name, run.first - before, len(run.block_ids))

    def _load(self, load: Load, begin: bool) -> None:
        """Begin a load, or have it fail."""
        self._load_moves[load.request_id] = self._moves()
        self._loads[load.request_id] = [
            (run, connector.load_async(load.ticket, run.block_ids, first=run.first) if begin else Transfer.finished(0))
            for connector, run in zip(self._groups, load.runs, strict=True)
            if run.block_ids
        ]

    def _flush(self, jobs: list[int]) -> None:
        deadline_s = time.monotonic() + FLUSH_TIMEOUT_S
        for transfer in (transfer for job in jobs for transfer in self._stores.get(job, ())):
            if not transfer.wait(max(0.0, deadline_s - time.monotonic())):
                transfer.void()

    def end_copies(self) -> None:
        """End all copies, because vLLM takes its memory away. Blocks for seconds at most.

        Raises DeadlineExceeded if a copy does not end.
        """
        unbegun, self._fresh = self._fresh, []
        for order in unbegun:
            self._store(order, None)
        loads: list[Transfer[Any]] = [load for parts in self._loads.values() for _, load in parts]
        stores: list[Transfer[Any]] = [store for parts in self._stores.values() for store in parts]
        self._cancelled.update(self._loads)
        for load in loads:
            load.cancel()
        deadline_s = time.monotonic() + SLEEP_TIMEOUT_S
        for store in stores:
            if not store.wait(max(0.0, deadline_s - time.monotonic())):
                store.void()
        for copy in loads + stores:
            if not copy.wait(max(0.0, deadline_s + COPY_GIVE_UP_S - time.monotonic())):
                raise DeadlineExceeded("a copy to or from vLLM's memory has not ended: vLLM cannot go to sleep")

    def ended_loads(self, idle: bool) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended, and those of them that must be computed from the start instead.

        If a load into the only KV cache group fell short, its bad blocks are reported, and the good ones are kept.
        """
        ended: set[str] = set()
        failed: set[str] = set()
        if self._weights is not None and self._loads and not self._weights.settle(wait=idle):
            return ended, failed  # whether they are of these weights is not known yet
        for request_id, parts in list(self._loads.items()):
            if not all(transfer.wait(IDLE_WAIT_S) if idle else transfer.done() for _, transfer in parts):
                continue
            del self._loads[request_id]
            ended.add(request_id)
            self._moved = True
            cancelled = self._load_moves.pop(request_id) != self._moves() or request_id in self._cancelled
            self._cancelled.discard(request_id)
            if not cancelled and parts:
                self._load_seconds[request_id] = max(part.ended_s - part.began_s for _, part in parts)
            for run, transfer in parts:
                bad = run.block_ids[0 if cancelled else transfer.result(0) :]
                if not self._whole:
                    self._bad_blocks.update(bad)
                elif bad:
                    failed.add(request_id)
        return ended, failed

    def take_bad_blocks(self) -> set[int]:
        """Blocks that loads have failed to fill since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def report(self) -> WorkerReport | None:
        """Stores and loads that have ended since the last call."""
        ended = [job for job, parts in self._stores.items() if all(transfer.done() for transfer in parts)]
        if self._weights is not None:
            self._weights.settle()
        moves = {self._rank: self._moves()} if self._moves() != self._known_moves else {}
        if not ended and not self._load_seconds:
            return WorkerReport(moves=moves) if moves else None
        self._moved = True
        incomplete = {job for job in ended if any(part.result(0).dropped for part in self._stores[job])}
        for job in ended:
            del self._stores[job]
        seconds, self._load_seconds = self._load_seconds, {}
        return WorkerReport(dict.fromkeys(ended, 1), incomplete, seconds, moves)

    def counters(self) -> dict[str, int]:
        """What was moved since the last call, in blocks and bytes."""
        if not self._moved:
            return {}
        self._moved = False
        totals = dict.fromkeys(COUNTERS, 0)
        for connector in self._groups:
            for name, count in connector.counters.items():
                if name in totals:
                    totals[name] += count
        new = {name: count - self._counted[name] for name, count in totals.items() if count > self._counted[name]}
        self._counted = totals
        return new

    def close(self) -> None:
        """End the transfers in progress. Blocks for seconds at most."""
        for connector in self._groups:
            connector.close()
