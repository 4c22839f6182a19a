"""The scheduler's half: what to load, what to store, and when blocks are somebody else's.

A request is looked up once, in the background, as soon as it arrives; vLLM asks again and again and
is answered from memory. What was found stays leased until it is loaded or not wanted.

    arrives ─ lookup ─► known ─ blocks allocated ─► loading ─► running ─► finished
                          └──── nothing new: lease back ─────────┘  stores on the way

Blocks that are being stored are not held: vLLM may give them away. A step that will write to such a
block names the job in `Orders.flush`, and the worker ends the job before that step or voids it.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from tiercache.connector import Connector
from tiercache.connectors.vllm_compat import CacheHitSource
from tiercache.connectors.vllm_events import name_blocks
from tiercache.connectors.vllm_names import Names, keys_of
from tiercache.connectors.vllm_orders import Load, Orders, Report, Run, Store
from tiercache.errors import TierCacheError
from tiercache.layout import NamespaceSpec
from tiercache.loading import Match
from tiercache.messages import KEY_BYTES, MAX_KEYS

MAX_LEASED = 512
"""Waiting requests that keep what was found for them; those behind are looked up when their turn comes."""
MAX_JOBS = 48
"""Stores under way; a request that finds no place offers its blocks again with a later step."""
MAX_STEP_STORES = 4
"""Running requests that offer blocks with one step; the others do so with the next one, so that no step waits long."""
DECODE_BLOCKS = 8
"""So many blocks of an answer are stored at once, or what there is at its end."""
CLOSE_TIMEOUT_S = 2.0

logger = logging.getLogger("tiercache.connectors.vllm")
BlockIds = tuple[list[int], ...]
"""The blocks of a request in each KV cache group."""


class Found(NamedTuple):
    """What a lookup brought. Without a root the request is not cached at all."""

    root: bytes = b""
    keys: bytes = b""
    match: Match = Match()


@dataclass(slots=True, eq=False)
class _Request:
    """A request of vLLM: what was found for it, and how many of its blocks have been offered to the cache."""

    request: Any
    asked: bool = False
    found: Found | None = None  # set by the lookups' thread
    root: bytes = b""  # with `keys`, from what was found
    keys: bytes = b""
    offered: int = 0
    due: int = 0  # with so many tokens computed there is something to offer
    local: int = 0  # blocks that vLLM had itself when it asked
    preemptions: int = 0  # as many as there were before the lookup
    retried: bool = False


class _Background:
    """One thread that does things in order. Most of what one costs is to wake it: once for all new ones."""

    def __init__(self) -> None:
        self._batch: list[Callable[[], object]] = []
        self._batches: queue.SimpleQueue[list[Callable[[], object]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tiercache-lookup", daemon=True)
        self._thread.start()

    def later(self, work: Callable[[], object]) -> None:
        """Have it done after the next `begin`."""
        self._batch.append(work)

    def begin(self) -> None:
        """Begin with what has been handed over."""
        if self._batch:
            batch, self._batch = self._batch, []
            self._batches.put(batch)

    def _run(self) -> None:
        while batch := self._batches.get():
            for work in batch:
                try:
                    work()
                except Exception:
                    # vLLM must go on whatever this is: the request is then a miss.
                    logger.exception("a lookup failed in a way that nobody foresaw")

    def close(self) -> None:
        self.begin()
        self._batches.put([])
        self._thread.join(CLOSE_TIMEOUT_S)


@dataclass(slots=True)
class _Job:
    """A store under way."""

    request_id: str
    runs: tuple[Run, ...]
    ranks_left: int  # at which it has yet to end


class Scheduler:
    """Decides, and never waits. Used by vLLM's scheduler thread; only lookups run in one of their own.

    Args:
        connector: a connector without a pool.
        ranks: the namespaces of each rank; a match is what all of them have.
        names: the roots of chains.
        per_block: block hashes of vLLM in one block.
        windowed: whether vLLM forgets the early blocks of any KV cache group.
    """

    def __init__(
        self,
        connector: Connector,
        ranks: Sequence[Sequence[NamespaceSpec]],
        names: Names,
        per_block: int,
        windowed: bool,
    ) -> None:
        self.connector = connector
        self.null_block = 0
        self._specs = list({spec.fingerprint(): spec for specs in ranks for spec in specs}.values())
        self._ranks = len(ranks)
        self._names = names
        self._per_block = per_block
        self._block_size = connector.namespace.block_size
        # What a window leaves behind is gone: it is stored at once.
        self._least, self._step_stores = (1, MAX_JOBS) if windowed else (DECODE_BLOCKS, MAX_STEP_STORES)
        self._background = _Background()
        self._requests: dict[str, _Request] = {}
        self._leased: set[str] = set()  # requests whose match has an end to come
        self._loads: dict[str, tuple[Match, bytes]] = {}  # under way, with the key of the first block
        self._jobs: dict[int, _Job] = {}
        self._ended: list[Callable[[list[Store]], None]] = []  # requests whose last blocks the next step offers
        self._numbers = itertools.count(1)
        self._reading: dict[int, int] = {}  # block -> the last job that reads it
        self._claimed: set[int] = set()  # blocks that loads of this step will write to
        self._orders = Orders()
        threading.Thread(target=self._read_names, name="tiercache-names", daemon=True).start()

    def _read_names(self) -> None:
        try:
            self._names.read_model()
            self._names.root()  # so that affinity queries know it before the first request
        except (TierCacheError, OSError) as error:
            logger.error("vLLM is served without the cache: %s", error)

    # --- lookups ---------------------------------------------------------------------------------

    def add(self, request: Any) -> None:
        """A new request: look it up."""
        state = self._requests[request.request_id] = _Request(request)
        if len(self._leased) < MAX_LEASED:
            self._look_up(state)

    def _look_up(self, state: _Request) -> None:
        state.asked, state.found, state.root = True, None, b""
        state.preemptions = state.request.num_preemptions
        self._leased.add(state.request.request_id)
        self._background.later(partial(self._find, state))

    def _find(self, state: _Request) -> None:
        """In the thread of lookups."""
        found = Found()
        try:
            root = self._names.root(state.request.lora_request)
            if root:
                hashes = list(state.request.block_hashes)
                keys = keys_of(root, hashes, self._per_block, 0, min(len(hashes) // self._per_block, MAX_KEYS))
                found = Found(root, keys, self.connector.match(keys, namespaces=self._specs))
        except (TierCacheError, OSError) as error:
            logger.warning("a request goes without the cache: %s", error)
        finally:
            state.found = found

    def matched_tokens(self, request: Any, local_tokens: int) -> int | None:
        """How many tokens can be loaded after the first `local_tokens`; None while that is not known."""
        request_id = request.request_id
        state = self._requests.get(request_id)
        if state is None:
            return 0
        if not state.asked or request.num_preemptions > state.preemptions:
            self._let_go(state)
            self._look_up(state)
        found = state.found
        if found is None:
            self._background.begin()
            return None
        if not found.root:
            self._let_go(state)
            del self._requests[request_id]
            return 0
        if not state.root:
            state.root, state.keys = found.root, found.keys
            self._offer_after(state, found.match.blocks)
        state.local = local_tokens // self._block_size
        blocks = found.match.blocks - state.local
        if blocks <= 0 or request_id not in self._leased or not self.connector.available:
            return 0
        first_key = found.keys[state.local * KEY_BYTES : (state.local + 1) * KEY_BYTES]
        if any(first_key == key for _, key in self._loads.values()):
            return None  # another request brings these blocks: they will be a hit in vLLM's own cache
        return blocks * self._block_size

    def _let_go(self, state: _Request) -> None:
        """Nothing more is loaded of what was found, or will be."""
        if state.request.request_id not in self._leased:
            return
        self._leased.discard(state.request.request_id)
        if state.found is None:
            self._background.later(partial(self._release, state))  # after the lookup, which is still to come
        elif state.found.match.blocks:
            self._background.later(partial(self.connector.release, state.found.match))

    def _release(self, state: _Request) -> None:
        if state.found is not None:
            self.connector.release(state.found.match)

    # --- loads -----------------------------------------------------------------------------------

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """vLLM has allocated the request's blocks and wants `tokens` of them loaded; 0: it wants nothing."""
        state = self._requests.get(request.request_id)
        if state is None or state.found is None:
            return
        if not tokens:
            self._let_go(state)
            return
        found = state.found
        runs = self._runs(blocks.get_block_ids(), state.local, state.local + tokens // self._block_size, 0)
        if self._reading:
            self._claimed.update(*(run.block_ids for run in runs))
        self._leased.discard(request.request_id)
        key = found.keys[state.local * KEY_BYTES : (state.local + 1) * KEY_BYTES]
        self._loads[request.request_id] = found.match, key
        self._orders.loads.append(Load(request.request_id, found.match.ticket(), runs))

    def hit_sources(self, request: Any, tokens: int) -> dict[CacheHitSource, int]:
        """From which tier the tokens of a load come."""
        state = self._requests.get(request.request_id)
        below = state.found.match.below_blocks if state is not None and state.found is not None else 0
        disk = min(below * self._block_size, tokens)
        sources = {CacheHitSource.HOST: tokens - disk, CacheHitSource.DISK: disk}
        return {source: count for source, count in sources.items() if count}

    def loads_ended(self, request_ids: set[str], failed: bool) -> None:
        """All ranks are done with these loads; with `failed` some block of them is not good."""
        for request_id in request_ids:
            ended = self._loads.pop(request_id, None)
            if ended is not None:
                self._background.later(partial(self.connector.release, ended[0]))
            if failed and request_id in self._requests:
                self._offer_after(self._requests[request_id], 0)  # what is computed now is offered again

    def _runs(self, block_ids: BlockIds, first: int, end: int, base: int) -> tuple[Run, ...]:
        """Blocks `first ..< end` in each group, without those that a window has left behind."""
        runs = []
        for ids in block_ids:
            part, skip = ids[first:end], 0
            while skip < len(part) and part[skip] == self.null_block:
                skip += 1
            runs.append(Run(first + skip - base, part[skip:]))
        return tuple(runs)

    # --- stores ----------------------------------------------------------------------------------

    def step(self, output: Any) -> Orders:
        """The orders of a step that has just been scheduled."""
        orders, self._orders = self._orders, Orders()
        self._background.begin()
        for offer in self._ended:
            offer(orders.ready)
        self._ended.clear()
        if self._reading:
            orders.flush = self._overwritten(output)
        self._claimed.clear()
        for request_id, tokens in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is not None and (computed := state.request.num_computed_tokens + tokens) >= state.due:
                self._offer(state, computed, output.kv_connector_block_state.get_block_ids, orders.fresh)
                if len(orders.fresh) == self._step_stores:
                    break
        orders.idle = not output.num_scheduled_tokens
        return orders

    def _offer_after(self, state: _Request, blocks: int) -> None:
        """The first `blocks` are not to be offered. After them it is some at a time, and what the prompt ends with."""
        prompt, state.offered = state.request.num_prompt_tokens, blocks
        state.due = (blocks + self._least) * self._block_size
        if prompt // self._block_size > blocks:
            state.due = min(state.due, prompt)

    def _offer(
        self, state: _Request, computed_tokens: int, resolve: Callable[[str], BlockIds], stores: list[Store]
    ) -> None:
        """Have what is full and hashed by then stored. No drafts have hashes."""
        hashes, per_block, first = state.request.block_hashes, self._per_block, state.offered
        end = min(computed_tokens // self._block_size, len(hashes) // per_block, MAX_KEYS)
        if end <= first or not state.root or len(self._jobs) >= MAX_JOBS or not self.connector.available:
            return
        known = len(state.keys) // KEY_BYTES
        if known < end:
            state.keys += keys_of(state.root, hashes, per_block, known, end)
        base, job = max(0, first - 1), next(self._numbers)
        runs = self._runs(resolve(state.request.request_id), first, end, base)
        self._jobs[job] = _Job(state.request.request_id, runs, self._ranks)
        for run in runs:
            self._reading.update(dict.fromkeys(run.block_ids, job))
        events = None
        if self.connector.wants_events:
            events = name_blocks(state.request, first, end, per_block, self._block_size)
        stores.append(Store(job, state.keys[base * KEY_BYTES : end * KEY_BYTES], runs, events))
        self._offer_after(state, end)

    def _overwritten(self, output: Any) -> list[int]:
        """Jobs that read blocks to which this step writes: what is new to a request, or what it loads."""
        size, written, cached = self._block_size, self._claimed, output.scheduled_cached_reqs
        for new in output.scheduled_new_reqs:
            for ids in new.block_ids:
                written.update(ids[new.num_computed_tokens // size :])
        for request_id, computed, added in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            resumed = request_id in cached.resumed_req_ids  # then these are all of its blocks
            for ids in added or ():
                written.update(ids[computed // size if resumed else 0 :])
        return sorted({self._reading[block] for block in written if block in self._reading})

    def finished(self, request: Any, block_ids: BlockIds) -> None:
        """A request has ended, and its blocks are free from here on."""
        state = self._requests.pop(request.request_id, None)
        if request.request_id in self._loads:
            self._orders.cancel.append(request.request_id)
        elif state is not None:
            self._let_go(state)
            self._ended.append(partial(self._offer, state, request.num_computed_tokens, lambda _: block_ids))

    def reported(self, report: Report) -> None:
        """What the workers say of stores."""
        for number, count in report.ended.items():
            job = self._jobs[number]
            job.ranks_left -= count
            state = self._requests.get(job.request_id)
            if number in report.incomplete and state is not None and not state.retried:
                state.retried = True  # the cache had no room, or has lost the blocks before
                self._offer_after(state, 0)
            if job.ranks_left:
                continue
            del self._jobs[number]
            for block in itertools.chain(*(run.block_ids for run in job.runs)):
                if self._reading.get(block) == number:
                    del self._reading[block]

    # --- the rest --------------------------------------------------------------------------------

    def reset(self) -> None:
        """The weights may have changed: nothing found or computed so far is used or stored from here on."""
        self._names.new_epoch()
        for state in self._requests.values():
            self._let_go(state)
        self._requests.clear()
        self._ended.clear()
        self._orders.cancel += self._loads

    def check_integrity(self) -> None:
        """Raise AssertionError where the books contradict each other."""
        assert all(0 < job.ranks_left <= self._ranks for job in self._jobs.values())
        assert set(self._reading.values()) <= self._jobs.keys()
        assert self._leased <= self._requests.keys()
        assert not self._leased & self._loads.keys()

    def close(self) -> None:
        """Blocks for seconds at most."""
        self._background.close()
        self.connector.close()
