"""Stores of vLLM's scheduler: which blocks, when, and whether they are still those that were computed.

    step n        computes blocks: a store of them is in its orders
    step n + 1    the workers begin to copy them, in the background
    step m        writes to a block that is being stored: `Orders.flush` names the store

Blocks being stored are not held: vLLM may give them away. Before a step that writes to them the workers end the store,
or void it. Blocks count as written to from when a request gets them: another connector may fill them, at any time from
then on, whether or not the step computes that request.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiercache.connector.connector import Connector
from tiercache.protocol.messages import KEY_BYTES, MAX_KEYS
from tiercache.protocol.namespaces import NamespaceSpec

from .groups import GroupPart
from .names import keys_of
from .orders import BlockRun, Orders, Store, WorkerReport, name_blocks

MAX_JOBS = 48
"""Stores in progress; a request that finds no place offers its blocks again with a later step."""
TURN_STEPS = 16
"""One running request in this number may offer blocks with a step, and at least one: no step takes long."""
DECODE_BLOCKS = 8
"""Blocks of an answer that are stored together, or the rest at its end."""
AT_ITS_END = sys.maxsize


def runs_of(
    parts: Sequence[GroupPart],
    tables: Sequence[Sequence[Any]],
    first: int,
    end: int,
    base: int = 0,
    computed_tokens: int | None = None,
) -> tuple[BlockRun, ...]:
    """The last run of blocks that each part has of `first ..< end`, counted from `base` on.

    `tables` are a request's blocks in each group. vLLM has null blocks where a window has left them, and between
    states. A state is what its place says if it is that after `computed_tokens`, or if vLLM has put it into its own
    prefix cache as that; in all other places it may be one of any token. Without `computed_tokens` all are taken.
    """
    runs = []
    for part in parts:
        places = slice(first * part.every + part.offset, end * part.every, part.every)
        blocks = tables[part.group][places]
        there = [not block.is_null for block in blocks]
        if part.state and computed_tokens is not None:
            ends = range((places.start + 1) * part.block_size, sys.maxsize, part.every * part.block_size)
            there = [
                not block.is_null and tokens in (computed_tokens, block.block_hash_num_tokens)
                for block, tokens in zip(blocks, ends, strict=False)
            ]
        last = len(blocks)
        while last and not there[last - 1]:
            last -= 1
        start = last
        while start and there[start - 1]:
            start -= 1
        runs.append(BlockRun(first + start - base, [block.block_id for block in blocks[start:last]]))
    return tuple(runs)


def _ids(tables: Iterable[Sequence[Any]]) -> set[int]:
    return {block.block_id for table in tables for block in table if not block.is_null}


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the scheduler's half knows of its engine.

    Attributes:
        ranks: the namespaces of each rank.
        per_block: block hashes of vLLM in one block.
        batches: steps that vLLM has in progress at once: it knows the result of one before it schedules the last of so
            many after it.
        media_ids: ids of images name their content, no matter who has set them.
        parts: of its KV cache groups, one for each namespace of a rank; without, each group is one.
        leaves_last: the block of a request's last token is always computed.
        alone: there are no other connectors.
    """

    ranks: Sequence[Sequence[NamespaceSpec]]
    per_block: int
    batches: int = 1
    media_ids: bool = False
    parts: Sequence[GroupPart] = ()
    leaves_last: bool = False
    alone: bool = False

    @property
    def windowed(self) -> bool:
        """True if vLLM forgets the early blocks of any KV cache group."""
        return any(spec.window_blocks for spec in self.ranks[0])


@dataclass(slots=True, eq=False)
class _Chain:
    """The blocks of a request, as far as they have been offered to the cache."""

    request: Any  # None when it has ended: we must not be the last owner, whose hook would free all of it
    root: bytes
    keys: bytes  # as far as they have been needed
    offered: int = 0
    due: int = 0  # number of computed tokens at which there is something to offer
    retried: bool = False


@dataclass(slots=True)
class _Storing:
    """A store in progress."""

    chain: _Chain
    runs: tuple[BlockRun, ...]
    preemptions: int  # of the request, before it
    ranks_left: int  # that have not ended it yet

    def exposed(self) -> bool:
        """True if vLLM may give the blocks to others: it has taken them from the request."""
        request = self.chain.request
        return request is None or bool(request.num_preemptions != self.preemptions)


class StorePlanner:
    """The stores of one engine. Used by vLLM's scheduler thread.

    Args:
        connector: tells whether there is a cache, and whether it wants events.
        tables: for each KV cache group, vLLM's blocks of each request.
        engine: its ranks each store their part.
    """

    def __init__(
        self, connector: Connector, tables: Sequence[Mapping[str, Sequence[Any]]], engine: EngineFacts
    ) -> None:
        self._connector = connector
        self._tables = tables
        self._ranks = len(engine.ranks)
        self._per_block = engine.per_block
        self._windowed = engine.windowed
        self._alone = engine.alone
        self._block_size = connector.namespace.block_size
        self.parts = engine.parts or [GroupPart(group, self._block_size) for group in range(len(tables))]
        self._sizes = [self._block_size] * len(tables)  # of the blocks of each group
        for part in self.parts:
            self._sizes[part.group] = part.block_size
        # Blocks that a window leaves are gone: they are stored at once.
        self._least, self._turn_steps = (1, 1) if self._windowed else (DECODE_BLOCKS, TURN_STEPS)
        self._chains: dict[str, _Chain] = {}
        self._last: list[Store] = []  # of requests that have ended, for the next step
        # What requests were given since the last step: their blocks, and the number of tokens in them.
        self._given: dict[str, tuple[Sequence[Sequence[Any]], int]] = {}
        # Blocks that other connectors load in steps whose result vLLM may not know yet.
        self._brought: deque[set[int]] = deque(maxlen=engine.batches)
        # Requests that have blocks but were in no step since: another connector may be filling these.
        self._unstepped: set[str] = set()
        self._jobs: dict[int, _Storing] = {}
        self._job_ids = itertools.count(1)

    # --- which

    def begin(self, request: Any, root: bytes, keys: bytes, blocks: int) -> None:
        """Store a request's blocks from here on, except the first `blocks`. `keys` are of its first ones."""
        chain = self._chains[request.request_id] = _Chain(request, root, keys)
        self._go_on_after(chain, blocks)

    def _go_on_after(self, chain: _Chain, blocks: int) -> None:
        """Do not offer the first `blocks`. After them blocks are offered some at a time, and those at the end of the
        prompt."""
        prompt, chain.offered = chain.request.num_prompt_tokens, blocks
        if chain.due == AT_ITS_END:
            return
        chain.due = (blocks + self._least) * self._block_size
        if prompt // self._block_size > blocks:
            chain.due = min(chain.due, prompt)

    def begin_again(self, request_id: str) -> None:
        """Blocks of a request that were assumed to be in the cache are not: offer what is computed of it again."""
        if request_id in self._chains:
            self._go_on_after(self._chains[request_id], 0)

    def end(self, request: Any, computed_tokens: int, *, aborted: bool = False) -> bytes:
        """Store no more of a request than what is computed now, though its blocks may be free from here on.

        Nothing is stored that another connector is still filling, or may have failed to fill if the request was
        `aborted`. Returns the keys of the blocks that are stored then, if all goes well.
        """
        chain = self._chains.pop(request.request_id, None)
        if chain is None:
            return b""
        filling = request.request_id in self._unstepped or (aborted and chain.due == AT_ITS_END)
        self._unstepped.discard(request.request_id)
        if not filling:
            self._offer(chain, computed_tokens, self._last)
        chain.request = None
        return chain.keys[: chain.offered * KEY_BYTES]

    def _offer(self, chain: _Chain, computed_tokens: int, stores: list[Store]) -> None:
        """Store the blocks that are full and hashed by then. Draft tokens have no hashes."""
        request, first, per_block = chain.request, chain.offered, self._per_block
        end = min(computed_tokens // self._block_size, len(request.block_hashes) // per_block, MAX_KEYS)
        if end <= first or len(self._jobs) >= MAX_JOBS or not self._connector.available:
            return
        known = len(chain.keys) // KEY_BYTES
        if known < end:
            chain.keys += keys_of(chain.root, request.block_hashes, per_block, known, end)
        base = max(0, first - 1)
        tables = [table.get(request.request_id, ()) for table in self._tables]
        runs = runs_of(self.parts, tables, first, end, base, computed_tokens)
        events = None
        if self._connector.wants_events:
            events = name_blocks(request, first, end, per_block, self._block_size)
        job_id = next(self._job_ids)
        store = Store(job_id, chain.keys[base * KEY_BYTES : end * KEY_BYTES], runs, events)
        self._jobs[job_id] = _Storing(chain, runs, request.num_preemptions, self._ranks)
        stores.append(store)
        self._go_on_after(chain, end)

    # --- when

    def allocated(self, request_id: str, tables: Sequence[Sequence[Any]], tokens: int) -> None:
        """A request has these blocks in each group; only its first `tokens` are in them yet."""
        self._given[request_id] = tables, tokens
        if request_id in self._chains:
            self._unstepped.add(request_id)

    def step(self, output: Any, orders: Orders) -> None:
        """Add to the orders of a step that has just been scheduled, whose loads are in them."""
        orders.ready, self._last, orders.begins = self._last, [], bool(self._given)
        if self._jobs and (self._windowed or any(job.exposed() for job in self._jobs.values())):
            orders.flush = self._overwritten(output)
        self._leave_to_others(output)
        self._given.clear()
        running = output.num_scheduled_tokens
        if self._unstepped:
            self._unstepped.difference_update(running)
        most = -(-len(running) // self._turn_steps)
        for request_id, tokens in running.items():
            chain = self._chains.get(request_id)
            if chain is not None and (computed := chain.request.num_computed_tokens + tokens) >= chain.due:
                self._offer(chain, computed, orders.fresh)
                if len(orders.fresh) == most:
                    break

    def _leave_to_others(self, output: Any) -> None:
        """Requests into whose blocks another connector loads in this very step are stored only at their end.

        If that load fails, what this step computes after it is computed again, which is known only after later steps.
        The same holds for requests that share these blocks until then: vLLM counts them as its own at once. Without
        other connectors, tokens beyond those that vLLM told of are its own too: it rounds down what it tells.
        """
        if self._alone:
            return
        sizes, brought = self._sizes, set[int]()
        if output.num_scheduled_tokens:
            self._brought.append(brought)
        if not self._given:
            return
        cached = output.scheduled_cached_reqs
        new = ((request.req_id, request.num_computed_tokens) for request in output.scheduled_new_reqs)
        there = (*new, *zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        begun = [(name, computed, *self._given[name]) for name, computed in there if name in self._given]
        for _, computed, tables, tokens in begun:
            if computed > tokens:
                brought |= _ids(
                    table[tokens // size : -(-computed // size)] for table, size in zip(tables, sizes, strict=False)
                )
        if not any(self._brought):
            return
        for request_id, computed, tables, _ in begun:
            ids = _ids(table[: -(-computed // size)] for table, size in zip(tables, sizes, strict=False))
            if request_id in self._chains and not all(map(ids.isdisjoint, self._brought)):
                self._chains[request_id].due = AT_ITS_END

    def _overwritten(self, output: Any) -> list[int]:
        """Jobs that may read blocks to which this step writes, or another connector from now on."""
        sizes, cached = self._sizes, output.scheduled_cached_reqs
        written = {copy.dst_block_id for copy in output.kv_cache_block_copies or ()}
        for tables, tokens in self._given.values():
            written |= _ids(table[tokens // size :] for table, size in zip(tables, sizes, strict=False))
        for new in output.scheduled_new_reqs:
            for ids, size in zip(new.block_ids, sizes, strict=False):
                written.update(ids[new.num_computed_tokens // size :])
        for request_id, computed, added in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            resumed = request_id in cached.resumed_req_ids  # then these are all of its blocks
            for ids, size in zip(added or (), sizes, strict=False):
                written.update(ids[computed // size if resumed else 0 :])
        if not written:
            return []
        # Requests with the same beginning share blocks, so several may read one. Workers end them in order.
        last = 0
        for job_id, job in self._jobs.items():
            if any(not written.isdisjoint(run.block_ids) for run in job.runs):
                last = job_id
        return [job_id for job_id in self._jobs if job_id <= last]

    def reported(self, report: WorkerReport) -> None:
        """Handle the workers' report of stores."""
        for job_id, count in report.ended.items():
            job = self._jobs[job_id]
            job.ranks_left -= count
            if job_id in report.incomplete and not job.chain.retried and job.chain.request is not None:
                job.chain.retried = True  # the cache had no room, or has lost the blocks before
                self._go_on_after(job.chain, 0)
            if not job.ranks_left:
                del self._jobs[job_id]

    def brought(self, block_ids: set[int]) -> bool:
        """True if another connector was to load any of these blocks within a step."""
        return not all(map(block_ids.isdisjoint, self._brought))

    # --- the rest

    def forget(self) -> None:
        """Store nothing from here on that has been computed so far."""
        for chain in self._chains.values():
            chain.request = None
        self._chains.clear()
        self._unstepped.clear()
        for store in self._last:
            del self._jobs[store.job_id]
        self._last.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        assert all(0 < job.ranks_left <= self._ranks for job in self._jobs.values())
        assert {store.job_id for store in self._last} <= self._jobs.keys()
        assert self._unstepped <= self._chains.keys()
        assert all(chain.offered <= MAX_KEYS for chain in self._chains.values())
