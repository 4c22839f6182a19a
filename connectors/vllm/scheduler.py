"""The scheduler's half: what to load, and, with `stores.py`, what to store.

A request is looked up once, in the background, as soon as it arrives (`lookups.py`); vLLM asks again and again and is
answered from memory. A match stays leased until it is loaded or not wanted. A separate thread reads an adapter's files:
only requests for that adapter wait for them, and no longer than for one answer.

    arrives ─ lookup ─► known ─ blocks allocated ─► loading ─► running ─► finished
                          └──── nothing new: lease back ─────────┘  stores on the way
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec

from tiercache.connector.connector import Connector
from tiercache.connector.loads import Match
from tiercache.errors import TierCacheError
from tiercache.ground import forks
from tiercache.protocol.hints import Hint
from tiercache.protocol.messages import KEY_BYTES, MAX_KEYS, Priority

from .compat import CacheHitSource, block_tables, ended_by_output, local_cache
from .costs import EngineCosts, TierBlocks, tiers_of
from .log import DECLINED, RequestLog
from .lookups import Lookup, MatchLookups
from .names import Names, keys_of
from .orders import ChainHint, Load, Orders, WorkerReport
from .stores import EngineFacts, StorePlanner, runs_of

MAX_LEASED = 512
"""Waiting requests that are looked up as they arrive; later ones when vLLM first asks for them."""
STORED_WAIT_S = 1.0
"""Longest wait of a request for blocks that another engine is storing, as the request says."""
STORED_PAUSES_S = 0.005, 0.05
"""Time between two lookups while it waits: at first, and at most. Each is twice as long as the one before."""

logger = logging.getLogger("tiercache.connectors.vllm")


MAX_THREADS = 8
MAX_WAITING = 1024
"""Pieces of work with one key."""


PARAMETER = "tiercache"
_PRIORITIES = {"": None, "low": Priority.LOW, "normal": Priority.NORMAL, "high": Priority.HIGH}


class _Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of `tiercache.Hint`."""

    done: bool = False
    return_in_s: float | None = None
    ttl_s: float | None = None
    priority: Literal["", "low", "normal", "high"] = ""
    stored: int = 0


def hint_of(request: Any) -> Hint | None:
    """The hint of a request of vLLM, if it has one. Raises ValueError that says what is wrong with it."""
    said = _said(request)
    if said is None:
        return None
    try:
        fields = msgspec.convert(said, _Fields)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    if msgspec.structs.replace(fields, stored=0) == _Fields():
        return None
    return Hint(fields.done, fields.return_in_s, fields.ttl_s, _PRIORITIES[fields.priority])


def awaited_tokens(request: Any) -> int:
    """How many leading tokens of a request another engine is storing, as the request says; 0 if it does not."""
    said = _said(request)
    stored = said.get("stored", 0) if isinstance(said, dict) else 0
    return max(0, stored) if type(stored) is int else 0


def stored_answer(request: Any, tokens: int) -> dict[str, Any] | None:
    """What the answer to a request says of its stored tokens, for the engine that goes on with it.

    None if the request asks for nothing of the kind: it has neither our name nor vLLM's `do_remote_decode`.
    """
    parameters = request.kv_transfer_params
    if not isinstance(parameters, dict) or not (PARAMETER in parameters or parameters.get("do_remote_decode")):
        return None
    return {PARAMETER: {"stored": tokens}}


def _said(request: Any) -> Any:
    parameters = request.kv_transfer_params
    return parameters.get(PARAMETER) if isinstance(parameters, dict) else None


class Apart:
    """Runs work in order for each key, and independently for different keys. Thread-safe.

    A thread lives while it has work. A hung thread delays only its own key; when so many hang that none is left, work
    is refused.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, deque[Callable[[], object]]] = {}  # of keys that have a thread
        forks.watch(self, "_lock")

    def forget_in_child(self) -> None:
        """After a fork, in the child, where its threads do not exist."""
        self._waiting.clear()

    def begin(self, key: Hashable, work: Callable[[], object]) -> bool:
        """Have work done soon; returns whether it will be."""
        with self._lock:
            waiting = self._waiting.get(key)
            if waiting is None:
                if len(self._waiting) >= MAX_THREADS:
                    return False
                self._waiting[key] = deque([work])
                try:
                    threading.Thread(target=self._run, args=(key,), name=self._name, daemon=True).start()
                except RuntimeError:  # too many threads in this process
                    del self._waiting[key]
                    return False
                return True
            if len(waiting) >= MAX_WAITING:
                return False
            waiting.append(work)
            return True

    def _run(self, key: Hashable) -> None:
        while True:
            with self._lock:
                waiting = self._waiting[key]
                if not waiting:
                    del self._waiting[key]
                    return
                work = waiting.popleft()
            try:
                work()
            except Exception:
                # The engine must go on after any error.
                logger.exception("work in the background failed unexpectedly")


@dataclass(slots=True, eq=False)
class _Request:
    """A request of vLLM, and its lookup."""

    request: Any
    lookup: Lookup | None = None  # not yet: there were too many before it
    running: bool = False  # its blocks are stored from here on
    local: int = 0  # blocks that vLLM had itself when it asked
    end: int | None = None  # of the blocks worth loading after those; None: not decided
    preemptions: int = 0  # as many as there were before the lookup
    awaited: int = 0  # leading blocks that another engine is storing
    arrived_s: float = 0.0
    looked_s: float = 0.0  # when it was looked up last
    pause_s: float = STORED_PAUSES_S[0]  # until it is looked up again


@dataclass(slots=True, eq=False)
class _Loading:
    """A load in progress."""

    lookup: Lookup
    first_key: bytes
    blocks: TierBlocks
    local: int  # blocks before it
    prompt_tokens: int
    block_ids: set[int]  # vLLM's, that it fills
    short: bool = False  # a rank has said that some of these are not good
    seconds: float = 0.0  # at the slowest rank of those that have ended


class RequestPlanner:
    """Decides, and never waits. Used by vLLM's scheduler thread; only lookups run in a thread of their own.

    Args:
        connector: a connector without a pool.
        engine: facts about vLLM, such as its ranks.
        names: the roots of chains.
        kv_cache_manager: vLLM's, which knows the blocks of its requests.
        costs: tell which loads are worth it; without, all are.
        log: logs what requests got.
        introduce: logs which cache this is, and returns whether it is there. May block for a request.
    """

    def __init__(
        self,
        connector: Connector,
        engine: EngineFacts,
        names: Names,
        kv_cache_manager: Any,
        costs: EngineCosts | None = None,
        log: RequestLog | None = None,
        introduce: Callable[[], bool] = lambda: True,
    ) -> None:
        self.connector = connector
        self._engine = engine
        self._names = names
        self._block_size = connector.namespace.block_size
        specs = {spec.fingerprint(): spec for specs in engine.ranks for spec in specs}
        self._lookups = MatchLookups(connector, list(specs.values()))
        self._adapters = Apart("tiercache-adapter")
        self._requests: dict[str, _Request] = {}
        self._leased: set[str] = set()  # requests whose match has yet to end
        self._loads: dict[str, _Loading] = {}
        self._asked: dict[str, int] = {}  # tokens in vLLM's own cache, for requests without any other match yet
        self.costs = costs
        self._declined = 0  # blocks, when they were last counted
        self.stores = StorePlanner(connector, block_tables(kv_cache_manager), engine)
        self._orders = Orders()
        self._moves: dict[int, int] = {}  # of each rank's weights
        self._renamed = False  # since the last orders
        # Blocks that vLLM had itself when the weights changed may be stored under the new names, until vLLM resets.
        self._mixed = False
        self._kv_cache_manager = kv_cache_manager
        self._local = local_cache(kv_cache_manager)
        self._log = log or RequestLog("off")
        self._introduce, self._introduced = introduce, False
        names.read_later("vLLM")
        self._lookups.begin_with(self._greet)

    # --- lookups ---------------------------------------------------------------------------------

    def add(self, request: Any) -> None:
        """A new request: look it up."""
        state = self._requests[request.request_id] = _Request(request)
        if tokens := awaited_tokens(request):
            state.awaited = min(tokens // self._block_size, self._most(request.num_prompt_tokens))
            state.arrived_s = time.monotonic()
        if len(self._leased) < MAX_LEASED:
            self._look_up(state)

    def _look_up(self, state: _Request) -> None:
        state.lookup = lookup = self._lookups.prepare()
        state.running, state.end, state.preemptions = False, None, state.request.num_preemptions
        state.looked_s = time.monotonic() if state.awaited else 0.0
        self._leased.add(state.request.request_id)
        self._lookups.later(partial(self._find, state.request, lookup))

    def _find(self, request: Any, lookup: Lookup) -> None:
        """In the background thread."""
        adapter = request.lora_request
        if adapter is None:
            self._match(request, lookup, lambda: self._names.root(None, self._own(request)))
        elif not self._adapters.begin(adapter.lora_int_id, partial(self._find_adapter, request, lookup)):
            lookup.done = True

    def _own(self, request: Any) -> bool:
        """True if a request's blocks are for this engine only: an apparent image hash may be an id set by a user.

        A prompt that comes in parts may have images in a later one.
        """
        return not self._engine.media_ids and bool(request.mm_features or request.resumable)

    def _greet(self) -> None:
        """In the background thread."""
        self._introduced = self._introduced or self._introduce()

    def _find_adapter(self, request: Any, lookup: Lookup) -> None:
        """In a thread of the adapter's, where its files may take long."""
        root = b""
        try:
            if lookup.wanted:
                root = self._names.root(request.lora_request, self._own(request))
        except (TierCacheError, OSError) as error:
            logger.warning("a request goes without the cache: %s", error)
        finally:
            self._lookups.begin_with(partial(self._match, request, lookup, lambda: root))

    def _match(self, request: Any, lookup: Lookup, name: Callable[[], bytes]) -> None:
        """In the background thread."""
        self._lookups.find(lookup, lambda: self._chain(request, name()))
        if lookup.root:
            self._greet()

    def _chain(self, request: Any, root: bytes) -> tuple[bytes, bytes]:
        """In the background thread: the root of a request's chain, and the keys of its blocks."""
        per_block, hashes = self._engine.per_block, list(request.block_hashes)
        end = min(len(hashes) // per_block, self._most(request.num_tokens))
        if request.skip_reading_prefix_cache:
            end = 0  # vLLM loads nothing, as for prompt logprobs
        return root, keys_of(root, hashes, per_block, 0, end) if root else b""

    def _most(self, tokens: int) -> int:
        """The most blocks that a match for that many tokens can have."""
        return min((tokens - self._engine.leaves_last) // self._block_size, MAX_KEYS)

    def matched_tokens(self, request: Any, local_tokens: int) -> int | None:
        """How many tokens can be loaded after the first `local_tokens`; None while that is not known."""
        request_id = request.request_id
        state = self._requests.get(request_id)
        self._asked[request_id] = local_tokens
        if state is None:
            return 0
        if state.lookup is None or request.num_preemptions > state.preemptions:
            self._let_go(state)
            self._look_up(state)
        lookup = state.lookup
        assert lookup is not None
        if not lookup.done and not self._lookups.overdue(lookup, slow=request.lora_request is not None):
            return None
        if not lookup.done or not lookup.root:
            self._let_go(state)
            self.stores.end(request, 0)
            del self._requests[request_id]
            return 0
        local = local_tokens // self._block_size
        most_local = (request.num_tokens - 1) // self._block_size  # vLLM computes the last token itself
        missing = lookup.match.blocks < state.awaited and local < min(state.awaited, most_local)
        if not state.running and missing and self._await_stored(state):
            return None
        if not state.running:
            state.running = True
            self.stores.begin(request, lookup.root, lookup.keys, self._named_blocks(lookup.match))
            if not lookup.match.blocks:
                self._log.missed(request_id, request.num_prompt_tokens)
        if local != state.local:
            state.local, state.end = local, None
        if lookup.match.blocks <= local or request_id not in self._leased or not self.connector.available:
            return 0
        first_key = self._first_key(state)
        if any(first_key == load.first_key for load in self._loads.values()):
            return None  # another request brings these blocks: they will be a hit in vLLM's own cache
        if state.end is None:
            state.end = self._worth(lookup.match, local)
        return (state.end - local) * self._block_size

    def _await_stored(self, state: _Request) -> bool:
        """True if a request waits on for what another engine is storing; looks it up again from time to time."""
        now_s = time.monotonic()
        if now_s - state.arrived_s > STORED_WAIT_S:
            return False
        if now_s - state.looked_s > state.pause_s:
            state.pause_s = min(2 * state.pause_s, STORED_PAUSES_S[1])
            self._let_go(state)
            self._look_up(state)
            self._lookups.begin()
        return True

    def _named_blocks(self, match: Match) -> int:
        """The leading blocks of a match that need no store.

        The daemon does not know what blocks from a shared store are called. Where it publishes KV events, a store names
        them, which copies nothing as long as they are there.
        """
        return match.blocks - match.shared_blocks if self.connector.wants_events else match.blocks

    def _worth(self, match: Match, local: int) -> int:
        """The end of the blocks of a match that are worth a load after the first `local`."""
        if self.costs is None:
            return match.blocks
        return local + self.costs.choose(tiers_of(match, local, match.blocks))

    def _first_key(self, state: _Request) -> bytes:
        """The key of the first block that vLLM does not have itself."""
        assert state.lookup is not None
        return state.lookup.keys[state.local * KEY_BYTES : (state.local + 1) * KEY_BYTES]

    def _let_go(self, state: _Request) -> None:
        """Load nothing more of the match; release it."""
        lookup = state.lookup
        if lookup is None or state.request.request_id not in self._leased:
            return
        self._leased.discard(state.request.request_id)
        self._lookups.drop(lookup)

    # --- loads -----------------------------------------------------------------------------------

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """vLLM has allocated the request's blocks and wants `tokens` of them loaded; 0: none, or not by us.

        vLLM may defer this until steps under way have ended. A load of a request that is forgotten by then fails.
        """
        filled = self._asked.pop(request.request_id, request.num_computed_tokens)
        self.stores.allocated(request.request_id, blocks.blocks, filled)
        state = self._requests.get(request.request_id)
        if not tokens:
            # vLLM does not wait for the lookup of a request that loads nothing: its root is for `finished`.
            if state is not None and not request.skip_reading_prefix_cache:
                self._let_go(state)
            return
        if state is None or state.lookup is None:
            state = _Request(request, Lookup(0.0, 0.0, done=True), local=filled // self._block_size)
            self._orders.cancel.append(request.request_id)
        lookup = state.lookup
        assert lookup is not None
        end = state.local + tokens // self._block_size
        runs = runs_of(self.stores.parts, blocks.blocks, state.local, end)
        self._leased.discard(request.request_id)
        self._loads[request.request_id] = _Loading(
            lookup,
            self._first_key(state),
            tiers_of(lookup.match, state.local, end),
            state.local,
            request.num_prompt_tokens,
            {block for run in runs for block in run.block_ids},
        )
        self._orders.loads.append(Load(request.request_id, lookup.ticket, runs))

    def hit_sources(self, request: Any, tokens: int) -> dict[CacheHitSource, int]:
        """The tiers that the tokens of a load come from."""
        state = self._requests.get(request.request_id)
        if state is None or state.lookup is None:
            return {}
        end = state.local + tokens // self._block_size
        _, disk, shared = (count * self._block_size for count in tiers_of(state.lookup.match, state.local, end))
        sources = {
            CacheHitSource.HOST: tokens - disk - shared,
            CacheHitSource.DISK: disk,
            CacheHitSource.EXTERNAL_UNSPECIFIED: shared,
        }
        return {source: count for source, count in sources.items() if count}

    def loads_ended(self, request_ids: set[str], failed: set[str]) -> None:
        """All ranks are done with these loads, of which those of `failed` have brought nothing good."""
        short = set[str]()
        for request_id in request_ids:
            ended = self._loads.pop(request_id, None)
            if ended is None:
                continue
            self._lookups.drop(ended.lookup)
            ended.short |= request_id in failed
            if self.costs is not None and ended.seconds:
                self.costs.loaded(ended.blocks, ended.seconds, ended.short)
            if ended.short:
                short.add(request_id)
                self.stores.begin_again(request_id)
            else:
                size = self._block_size
                tokens = TierBlocks(*(count * size for count in ended.blocks))
                self._log.served(request_id, tokens, ended.prompt_tokens, ended.local * size, ended.seconds)
        if short:
            self._log.failed(short)

    # --- steps and their end

    def reported(self, report: WorkerReport) -> None:
        """Handle the workers' report of ended stores and loads."""
        self.stores.reported(report)
        for request_id, seconds in report.load_seconds.items():
            if (load := self._loads.get(request_id)) is not None:
                load.seconds = max(load.seconds, seconds)
        if any(moves > self._moves.get(rank, 0) for rank, moves in report.moves.items()):
            self._moves.update(report.moves)
            logger.warning("the weights have changed: vLLM finds only what it has computed itself since then")
            self.reset()

    def lost(self, block_ids: set[int]) -> None:
        """Loads have not filled these blocks. After one within a step vLLM may go on with what is in them."""
        # Blocks of an aborted request belong to no load before the steps under way are known: vLLM defers their return.
        for load in self._loads.values():
            load.short |= not block_ids.isdisjoint(load.block_ids)
            block_ids = block_ids - load.block_ids
        if self.stores.brought(block_ids):
            logger.warning("a load of another connector failed: vLLM finds only what it has computed itself since then")
            self.reset()

    def step(self, output: Any) -> Orders:
        """The orders of a step that has just been scheduled."""
        local = local_cache(self._kv_cache_manager)
        if self._mixed and local is not self._local:
            self._mixed = False
            self.reset()
        self._local = local
        orders, self._orders = self._orders, Orders()
        orders.moves, orders.renamed, self._renamed = dict(self._moves), self._renamed, False
        self._lookups.begin()
        self.stores.step(output, orders)
        orders.idle = not output.num_scheduled_tokens
        if self.costs is not None:
            self.costs.stepped(output.num_scheduled_tokens, output.total_num_scheduled_tokens, time.monotonic())
        return orders

    def finished(self, request: Any) -> dict[str, Any] | None:
        """A request has ended, and its blocks are free from here on. Returns what its answer says of them."""
        state = self._requests.pop(request.request_id, None)
        self._asked.pop(request.request_id, None)
        keys = b""
        if request.request_id in self._loads:
            self._orders.cancel.append(request.request_id)
            keys = self.stores.end(request, 0)
        elif state is not None:
            lookup, by_output = state.lookup, ended_by_output(request)
            if not state.running and by_output and lookup is not None and lookup.done and lookup.root:
                self.stores.begin(request, lookup.root, lookup.keys, 0)
            self._let_go(state)
            keys = self.stores.end(request, request.num_computed_tokens, aborted=not by_output)
        if request.kv_transfer_params and keys:
            self._pass_on(request, keys)
        return stored_answer(request, len(keys) // KEY_BYTES * self._block_size)

    def _pass_on(self, request: Any, keys: bytes) -> None:
        """Send a request's hint about the further use of its blocks, if it has one."""
        try:
            hint = hint_of(request)
        except ValueError as error:
            logger.warning("a request's hint is not passed on: %s", error)
            return
        if hint is not None:
            self._orders.hints.append(ChainHint(keys, hint))

    # --- the rest --------------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """Blocks found but not loaded since the last call."""
        declined = self.costs.declined_blocks if self.costs is not None else 0
        if declined == self._declined:
            return {}
        new, self._declined = declined - self._declined, declined
        return {DECLINED: new}

    def reset(self, weights_stay: bool = False) -> None:
        """Nothing found or computed so far is used or stored from here on, since the weights may have changed.

        With `weights_stay` they have not as far as vLLM knows, and what is stored keeps its names: the ranks look at
        the weights before their next load.
        """
        # vLLM has not emptied its own cache: it was not told to, or requests are running.
        self._mixed = self._mixed or local_cache(self._kv_cache_manager) is self._local
        if not weights_stay:
            self._names.new_epoch()
            self._renamed = True
        for state in self._requests.values():
            self._let_go(state)
        self._requests.clear()
        self.stores.forget()
        self._orders.cancel += self._loads

    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        self.stores.check_integrity()
        assert self._leased <= self._requests.keys()
        assert not self._leased & self._loads.keys()

    def close(self) -> None:
        """Blocks for seconds at most."""
        self._lookups.close()
