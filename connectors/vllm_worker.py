"""The worker's half: it copies what the scheduler's orders say, in the background, and tells how it went."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tiercache.connector import Connector
from tiercache.connectors.vllm_events import Group, of_group
from tiercache.connectors.vllm_orders import Load, Orders, Report, Run, Store
from tiercache.jobs import Transfer
from tiercache.messages import KEY_BYTES, EventRun
from tiercache.storing import StoreResult

FLUSH_TIMEOUT_S = 0.1
"""A step waits so long for stores whose blocks it overwrites; then they count for nothing."""
IDLE_WAIT_S = 0.001
"""A step without tokens gives so much time to the loads that it waits for, instead of spinning."""
COUNTERS = ("loaded_blocks", "loaded_bytes", "loads_short", "stored_blocks", "stored_bytes", "dropped_blocks")


class Worker:
    """Copies between one rank's pools and the cache. Used by vLLM's worker thread only.

    Args:
        groups: a connector for each KV cache group.
        writers: of each group, whether this rank stores it.
        names: of each group, how KV events name it; None where another rank's blocks are in events.
    """

    def __init__(
        self, groups: Sequence[Connector], writers: Sequence[bool], names: Sequence[Group] | None = None
    ) -> None:
        self._groups = groups
        self._names = names
        self._writers = writers
        self._loads: dict[str, list[tuple[Run, Transfer[int]]]] = {}
        self._stores: dict[int, list[Transfer[StoreResult]]] = {}
        self._fresh: list[Store] = []  # computed by the step before
        self._cancelled: set[str] = set()
        self._load_seconds: dict[str, float] = {}  # of loads that have ended and are not reported
        self._bad_blocks: set[int] = set()
        self._counted = dict.fromkeys(COUNTERS, 0)
        self._moved = False  # since they were counted

    def begin(self, orders: Orders) -> None:
        """Before a step computes. Waits for FLUSH_TIMEOUT_S at most, and only if it writes to what is stored."""
        for store in (*self._fresh, *orders.ready):
            self._store(store)
        for said in orders.hints:
            for connector, writes in zip(self._groups, self._writers, strict=True):
                if writes:
                    connector.hint_async(said.keys, said.hint)
        self._fresh = orders.fresh
        if orders.flush:
            self._flush(orders.flush)
        for load in orders.loads:
            self._load(load)
        for request_id in orders.cancel:
            if request_id in self._loads:
                self._cancelled.add(request_id)
                for _, transfer in self._loads[request_id]:
                    transfer.cancel()

    def _store(self, store: Store) -> None:
        self._stores[store.job] = [
            connector.store_async(store.keys, run.block_ids, first=run.first, events=self._events(store, number))
            for number, (connector, writes, run) in enumerate(zip(self._groups, self._writers, store.runs, strict=True))
            if writes and run.block_ids
        ]

    def _events(self, store: Store, number: int) -> EventRun | None:
        """What KV events say of the blocks of one group."""
        if store.events is None or self._names is None:
            return None
        run, before = store.runs[number], len(store.keys) // KEY_BYTES - len(store.events.hashes)
        return of_group(store.events, self._names[number], run.first - before, len(run.block_ids))

    def _load(self, load: Load) -> None:
        self._loads[load.request_id] = [
            (run, connector.load_async(load.ticket, run.block_ids, first=run.first))
            for connector, run in zip(self._groups, load.runs, strict=True)
            if run.block_ids
        ]

    def _flush(self, jobs: list[int]) -> None:
        deadline_s = time.monotonic() + FLUSH_TIMEOUT_S
        for transfer in (transfer for job in jobs for transfer in self._stores.get(job, ())):
            if not transfer.wait(max(0.0, deadline_s - time.monotonic())):
                transfer.void()

    def ended_loads(self, idle: bool) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended, and those of them that must be computed from the start instead.

        A load into one KV cache group that came short has its bad blocks reported, and the good ones are kept.
        """
        ended: set[str] = set()
        failed: set[str] = set()
        for request_id, parts in list(self._loads.items()):
            if not all(transfer.wait(IDLE_WAIT_S) if idle else transfer.done() for _, transfer in parts):
                continue
            del self._loads[request_id]
            ended.add(request_id)
            self._moved = True
            cancelled = request_id in self._cancelled
            self._cancelled.discard(request_id)
            if not cancelled and parts:
                self._load_seconds[request_id] = max(part.ended_s - part.began_s for _, part in parts)
            for run, transfer in parts:
                good = 0 if cancelled else transfer.result(0)
                if good < len(run.block_ids) and len(self._groups) > 1:
                    failed.add(request_id)
                elif good < len(run.block_ids):
                    self._bad_blocks.update(run.block_ids[good:])
        return ended, failed

    def take_bad_blocks(self) -> set[int]:
        """Blocks that loads were to fill and did not, since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def report(self) -> Report | None:
        """Stores and loads that have ended since the last call."""
        ended = [job for job, parts in self._stores.items() if all(transfer.done() for transfer in parts)]
        if not ended and not self._load_seconds:
            return None
        self._moved = True
        incomplete = {job for job in ended if any(part.result(0).dropped for part in self._stores[job])}
        for job in ended:
            del self._stores[job]
        seconds, self._load_seconds = self._load_seconds, {}
        return Report(dict.fromkeys(ended, 1), incomplete, seconds)

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
        """End what is under way. Blocks for seconds at most."""
        for connector in self._groups:
            connector.close()
