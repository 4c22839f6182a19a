"""One engine in one thread: vLLM's scheduler and its pool in a few lines, and both halves of our connector.

A block of KV is a list of cells, one for each token: the tokens up to there, and the oldest and newest weights that
have computed them. So every cell that a step reads, a store copies or a load brings can be told right or wrong. Copies
and lookups go on only when the caller says so, copies in two pieces, so that anything may happen meanwhile.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from tiercache.connector.stores import StoreResult
from tiercache.connectors.vllm import lookups, scheduler, worker
from tiercache.connectors.vllm.compat import RequestStatus
from tiercache.connectors.vllm.costs import EngineCosts
from tiercache.connectors.vllm.names import keys_of
from tiercache.connectors.vllm.orders import Orders
from tiercache.connectors.vllm.scheduler import RequestPlanner
from tiercache.connectors.vllm.stores import EngineFacts
from tiercache.connectors.vllm.worker import RankWorker
from tiercache.protocol.messages import KEY_BYTES
from tiercache.protocol.namespaces import NamespaceSpec

SIZE = 2
SPEC = NamespaceSpec(engine="t", layout="l", dtype="uint8", block_size=SIZE, block_bytes=64)
BUDGET = 5
"""Tokens of a step: prompts are computed in pieces."""
MOST_RUNNING = 3


class Cell(NamedTuple):
    """The KV of one token."""

    tokens: tuple[int, ...]
    oldest: int
    newest: int


GARBAGE = Cell((), -1, -1)


class ByHand:
    """Stands in for `JobQueue`: its work is done when somebody says so."""

    def __init__(self, name: str) -> None:
        self._collected: deque[Callable[[], object]] = deque()
        self._jobs: deque[Callable[[], object]] = deque()
        self.later, self.begin_with = self._collected.append, self._jobs.append

    def begin(self) -> None:
        self._jobs.extend(self._collected)
        self._collected.clear()

    def finish(self, timeout_s: float = 0) -> bool:
        self.begin()
        while self.work():
            pass
        return True

    def work(self) -> bool:
        """Do one piece of work, if there is any."""
        if self._jobs:
            self._jobs.popleft()()
            return True
        return False

    def close(self) -> None:
        """There is no thread."""

    def __len__(self) -> int:
        return len(self._jobs)


@contextmanager
def looked_up_by_hand(clock_s: Callable[[], float]) -> Iterator[None]:
    """Meanwhile lookups have this clock, and those that are made now are done when somebody says so."""
    time = SimpleNamespace(monotonic=clock_s)
    with mock.patch.object(lookups, "JobQueue", ByHand), mock.patch.object(lookups, "time", time):
        yield


class FoundBlocks:
    """A match. Its blocks stay until it is released."""

    def __init__(self, blocks: list[list[Cell]], number: int) -> None:
        self.blocks, self.below_blocks, self.shared_blocks = len(blocks), 0, 0
        self.contents, self.number, self.released = blocks, number, 0

    def ticket(self) -> bytes:
        return self.number.to_bytes(8, "big") if self.blocks else b""


class TinyCache:
    """A daemon, as its connectors show it. It may lose blocks and leases, and refuse to take blocks.

    Attributes:
        matches: all that it has ever given.
    """

    namespace = SPEC
    client = SimpleNamespace(request_timeout_s=60.0)

    def __init__(self) -> None:
        self.blocks: dict[bytes, list[Cell]] = {}
        self.matches: list[FoundBlocks] = []
        self.available, self.full = True, False
        self.below_blocks = self.shared_blocks = 0  # of every match
        self.wants_events = False
        self.hints: list[bytes] = []

    def match(self, keys: bytes, namespaces: Any) -> FoundBlocks:
        found: list[list[Cell]] = []
        for at in range(0, len(keys), KEY_BYTES):
            if (block := self.blocks.get(keys[at : at + KEY_BYTES])) is None:
                break
            found.append(block)
        match = FoundBlocks(found, len(self.matches))
        match.below_blocks, match.shared_blocks = self.below_blocks, self.shared_blocks
        self.matches.append(match)
        return match

    def release(self, match: FoundBlocks) -> None:
        if isinstance(match, FoundBlocks):
            match.released += 1

    def commit(self, keys: list[bytes], parent: bytes, contents: list[list[Cell]]) -> StoreResult:
        """Make blocks visible, as far as they have a parent."""
        if self.full or (parent and parent not in self.blocks):
            return StoreResult(0, 0, len(keys), bool(parent))
        new = [key for key in keys if key not in self.blocks]
        for key, cells in zip(keys, contents, strict=True):
            self.blocks.setdefault(key, cells)
        return StoreResult(len(new), len(keys) - len(new), 0)

    def close(self) -> None:
        """Nothing is open."""


class TinyCopy:
    """A transfer whose pieces are done one at a time."""

    def __init__(self, pieces: Iterable[Callable[[], object]], end: Callable[[TinyCopy], Any], hurry: bool) -> None:
        self._pieces, self._end, self.hurry = deque(pieces), end, hurry
        self._result: Any = None
        self.cancelled = self.over = False
        self.began_s = self.ended_s = 0.0
        self.limits_s: list[float] = []

    def work(self) -> None:
        """Do the next piece. The last one says how it has ended."""
        if self._pieces and not self.cancelled:
            self._pieces.popleft()()
        elif not self.over:
            self.over, self._result, self.ended_s = True, self._end(self), 1.0

    def done(self) -> bool:
        return self.over

    def wait(self, timeout_s: float) -> bool:
        self.limits_s.append(timeout_s)
        while self.hurry and not self.over:
            self.work()
        return self.over

    def result(self, timeout_s: float = 0) -> Any:
        assert self.over, "its result is not known"
        return self._result

    def cancel(self) -> None:
        self.cancelled = True

    void = cancel


class TinyWeights:
    """The weights of a rank. The result of a look is known at once."""

    def __init__(self) -> None:
        self.version = self.moves = self._known = 0

    def look(self, adopt: bool = False) -> Callable[[], bool]:
        version, named = self.version, self._known
        self._known = version
        if adopt:
            return lambda: True
        self.moves += version != named
        return lambda: version == named

    def settle(self, wait: bool = False) -> bool:
        return True

    def update(self, unseen: bool) -> None:
        self.version += 1
        self._known += unseen


class TinyRank:
    """The connector of a rank: it copies between blocks of the pool and the cache."""

    namespace = SPEC

    def __init__(self, cache: TinyCache, cells: list[list[Cell]]) -> None:
        self.cache, self.cells = cache, cells
        self.copies: list[TinyCopy] = []
        self.hurry = True  # a store that a step waits for ends in time
        self.counters: dict[str, int] = {}

    def store_async(self, keys: bytes, ids: list[int], first: int, events: Any, proof: Callable[[], bool]) -> TinyCopy:
        split = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        own, parent = split[first : first + len(ids)], split[first - 1] if first else b""
        read: list[list[Cell]] = []
        half = (len(ids) + 1) // 2

        def end(copy: TinyCopy) -> StoreResult:
            good = not copy.cancelled and proof()
            return self.cache.commit(own, parent, read) if good else StoreResult(0, 0, len(ids))

        def copy_out(some: list[int]) -> None:
            read.extend([*self.cells[block]] for block in some)

        pieces = [partial(copy_out, ids[:half]), partial(copy_out, ids[half:])]
        return self._begin(TinyCopy(pieces, end, self.hurry))

    def load_async(self, ticket: bytes, ids: list[int], first: int) -> TinyCopy:
        match = self.cache.matches[int.from_bytes(ticket, "big")] if ticket else None
        contents = match.contents[first : first + len(ids)] if match is not None else []

        def fill(places: range) -> None:
            for place in places:
                good = place < len(contents) and contents[place]
                self.cells[ids[place]][:] = [*good] if good else [GARBAGE] * SIZE

        def end(copy: TinyCopy) -> int:
            lost = next((place for place, block in enumerate(contents) if not block), len(contents))
            return 0 if copy.cancelled else lost

        half = len(ids) // 2
        pieces = [partial(fill, range(half, len(ids))), partial(fill, range(half))]
        return self._begin(TinyCopy(pieces, end, False))

    def _begin(self, copy: TinyCopy) -> TinyCopy:
        self.copies.append(copy)
        return copy

    def hint_async(self, keys: bytes, hint: Any) -> None:
        self.cache.hints.append(keys)

    def close(self) -> None:
        """Nothing is open."""


class TinyNames:
    """Each epoch has a root of its own.

    Attributes:
        pure: epochs whose blocks are all of the same weights, as vLLM had none of former ones when they began.
    """

    def __init__(self, mixed: Callable[[], bool]) -> None:
        self.epoch, self.pure, self._mixed = 0, {0}, mixed
        self.hangs, self.goes_on = threading.Event(), threading.Event()

    def read_later(self, who: str) -> None:
        """There is nothing to read."""

    def root(self, lora_request: Any, own: bool = False) -> bytes:
        if lora_request is not None and lora_request.lora_path == "hangs":
            self.hangs.set()
            assert self.goes_on.wait(60)
        return self.root_of(self.epoch, own)

    def root_of(self, epoch: int, own: bool = False) -> bytes:
        return bytes([epoch + 1, own]) * (KEY_BYTES // 2)

    def new_epoch(self) -> None:
        self.epoch += 1
        if not self._mixed():
            self.pure.add(self.epoch)


class Block:
    """A block of vLLM's pool."""

    is_null, block_hash_num_tokens = False, None

    def __init__(self, block_id: int) -> None:
        self.block_id, self.users = block_id, 0
        self.hash = b""  # in vLLM's own prefix cache


class TinyPool:
    """vLLM's pool of blocks. Free ones keep their KV until they are given away."""

    def __init__(self, count: int) -> None:
        self.free = OrderedDict((number, Block(number)) for number in range(count))
        self.cached_block_hash_to_block: dict[bytes, Block] = {}

    def take(self, count: int) -> list[Block] | None:
        if count > len(self.free):
            return None
        taken = [self.free.popitem(last=False)[1] for _ in range(count)]
        for block in taken:
            self.cached_block_hash_to_block.pop(block.hash, None)
            block.hash, block.users = b"", 1
        return taken

    def use(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.free.pop(block.block_id, None)
            block.users += 1

    def give_back(self, blocks: Sequence[Block]) -> None:
        for block in reversed(blocks):
            block.users -= 1
            if not block.users:
                self.free[block.block_id] = block

    def cache(self, blocks: Sequence[Block], hashes: Sequence[bytes]) -> None:
        for block, block_hash in zip(blocks, hashes, strict=False):
            if not block.hash and block_hash not in self.cached_block_hash_to_block:
                block.hash = block_hash
                self.cached_block_hash_to_block[block_hash] = block

    def find(self, hashes: Sequence[bytes]) -> list[Block]:
        found: list[Block] = []
        for block_hash in hashes:
            if (block := self.cached_block_hash_to_block.get(block_hash)) is None:
                break
            found.append(block)
        return found

    def evict(self) -> None:
        """Forget what free blocks hold."""
        for block in self.free.values():
            self.cached_block_hash_to_block.pop(block.hash, None)
            block.hash = b""

    def reset(self) -> None:
        for block in self.cached_block_hash_to_block.values():
            block.hash = b""
        self.cached_block_hash_to_block = {}


HASHED: dict[bytes, tuple[int, ...]] = {}
"""What each of vLLM's hashes stands for."""


class TinyRequest:
    """A request of vLLM."""

    def __init__(self, name: str, prompt: Sequence[int], answer: int) -> None:
        self.request_id, self.tokens = name, list(prompt)
        self.num_prompt_tokens, self.wanted = len(prompt), len(prompt) + answer
        self.num_computed_tokens = self.num_preemptions = 0
        self.lora_request = self.kv_transfer_params = None
        self.mm_features: Sequence[Any] = ()
        self.resumable = self.skip_reading_prefix_cache = False
        self.status: Any = None
        self.loads = self.loaded = self.failed = False
        self.loads_after = 0  # blocks
        self.block_hashes: list[bytes] = []
        self.hash()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def hash(self) -> None:
        for end in range(len(self.block_hashes) + 1, self.num_tokens // SIZE + 1):
            tokens = tuple(self.tokens[: end * SIZE])
            self.block_hashes.append(hashlib.blake2b(repr(tokens).encode(), digest_size=32).digest())
            HASHED[self.block_hashes[-1]] = tokens


Scheduled = tuple[str, int, Sequence[int] | None]
"""A request of a step: its name, how many of its tokens were computed before, and blocks that it is given."""


def step_output(tokens: dict[str, int], new: Iterable[Scheduled] = (), cached: Iterable[Scheduled] = ()) -> Any:
    """What vLLM tells its connectors of a step that computes `tokens` of each request, of which some are `new`."""
    known = list(cached)
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=computed, block_ids=(ids,)) for name, computed, ids in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, *_ in known],
            num_computed_tokens=[computed for _, computed, _ in known],
            new_block_ids=[(ids,) if ids else None for *_, ids in known],
            resumed_req_ids=set(),
        ),
        kv_cache_block_copies=None,
    )


class TinyVllm:
    """The engine. Requests arrive by `add` and go by `abort`; `step` is one step of it.

    Attributes:
        loaded_blocks: that loads have brought.
    """

    def __init__(self, blocks: int = 11, costs: EngineCosts | None = None, **facts: Any) -> None:
        """`facts`: fields of `EngineFacts`."""
        self.cache = TinyCache()
        self.now_s = 100.0
        self._patches = ExitStack()
        self._patches.enter_context(looked_up_by_hand(lambda: self.now_s))
        for module in (scheduler, worker):
            clock = SimpleNamespace(monotonic=lambda: self.now_s)
            self._patches.enter_context(mock.patch.object(module, "time", clock))
        self.tables: dict[str, list[Block]] = {}
        self.pool = TinyPool(blocks)
        self.cells = [[GARBAGE] * SIZE for _ in range(blocks)]
        manager = SimpleNamespace(
            coordinator=SimpleNamespace(single_type_managers=[SimpleNamespace(req_to_blocks=self.tables)]),
            block_pool=self.pool,
        )
        self.names: Any = TinyNames(lambda: self.mixed)
        connector: Any = self.cache
        self.planner = RequestPlanner(connector, EngineFacts([[SPEC]], 1, **facts), self.names, manager, costs)
        self.weights: Any = TinyWeights()
        self.rank = TinyRank(self.cache, self.cells)
        ranks: list[Any] = [self.rank]
        self.worker = RankWorker(ranks, [True], weights=self.weights)
        self.waiting: deque[TinyRequest] = deque()
        self.running: list[TinyRequest] = []
        self.leaving: dict[str, TinyRequest] = {}  # aborted while they load
        self.mixed = False  # vLLM has KV of former weights
        self.outdated = set[str]()  # requests whose load under way must bring nothing
        self._known: dict[bytes, tuple[int, tuple[int, ...]]] = {}  # the epoch and the tokens that a key stands for
        self._versions = {0: 0}  # of the weights of each epoch
        self.loaded_blocks = 0

    @property
    def lookups(self) -> ByHand:
        """The lookups' work."""
        queue: Any = self.planner._lookups._queue
        assert isinstance(queue, ByHand)
        return queue

    def add(self, request: TinyRequest) -> None:
        self.waiting.append(request)
        self.planner.add(request)

    def abort(self, request: TinyRequest) -> None:
        request.status = RequestStatus.FINISHED_ABORTED
        loads = request.loads and not request.loaded
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.planner.finished(request)
        if loads:
            self.leaving[request.request_id] = request
        else:
            self._free(request)

    def _free(self, request: TinyRequest) -> None:
        self.pool.give_back(self.tables.pop(request.request_id, []))

    # --- a step

    def step(self) -> Orders:
        """Schedule, compute, and handle the results."""
        new, cached, tokens = list[Scheduled](), list[Scheduled](), dict[str, int]()
        left = self._schedule_running(cached, tokens)
        if len(self.running) < MOST_RUNNING and left:
            self._schedule_waiting(new, tokens, left)
        orders = self.planner.step(step_output(tokens, new, cached))
        self.planner.check_integrity()
        for request in self.running:
            request.num_computed_tokens += tokens.get(request.request_id, 0)
        self.worker.begin(orders)
        for request in self.running:
            if request.request_id in tokens:
                self._compute(request, tokens[request.request_id])
        self._handle(*self.worker.ended_loads(orders.idle))
        for request in [each for each in self.running if each.request_id in tokens]:
            if request.num_computed_tokens == request.num_tokens:
                self._answer(request)
        return orders

    def _schedule_running(self, cached: list[Scheduled], tokens: dict[str, int]) -> int:
        left = BUDGET
        for request in list(self.running):
            if request not in self.running or not left:
                continue
            count = min(left, request.num_tokens - request.num_computed_tokens)
            blocks = self._allocate(request, request.num_computed_tokens + count)
            while blocks is None:
                last = self.running.pop()
                left += tokens.pop(last.request_id, 0)
                cached[:] = [each for each in cached if each[0] != last.request_id]
                self._preempt(last)
                if last is request:
                    break
                blocks = self._allocate(request, request.num_computed_tokens + count)
            else:
                tokens[request.request_id] = count
                cached.append((request.request_id, request.num_computed_tokens, [each.block_id for each in blocks]))
                left -= count
        return left

    def _preempt(self, request: TinyRequest) -> None:
        self._free(request)
        request.num_computed_tokens, request.num_preemptions = 0, request.num_preemptions + 1
        self.waiting.appendleft(request)

    def _schedule_waiting(self, new: list[Scheduled], tokens: dict[str, int], left: int) -> None:
        for request in sorted(self.waiting, key=lambda one: one.request_id not in self.tables):  # who has blocks first
            if len(self.running) == MOST_RUNNING or not left or (request.loads and not self._loaded(request)):
                continue
            external = 0
            table = self.tables.get(request.request_id)
            if not request.num_computed_tokens:
                reads = 0 if request.skip_reading_prefix_cache else (request.num_tokens - 1) // SIZE
                found = self.pool.find(request.block_hashes[:reads])
                matched = self.planner.matched_tokens(request, len(found) * SIZE)
                if request.skip_reading_prefix_cache:
                    matched = 0
                if matched is None:
                    continue
                computed, external = len(found) * SIZE + matched, matched
                count = 0 if external else min(left, request.num_tokens - computed)
                self.pool.use(found)
                fits = not external or self._left_for(request) + len(found) >= 0
                more = self.pool.take(-(-(computed + count) // SIZE) - len(found)) if fits else None
                if more is None:
                    self.pool.give_back(found)
                    return
                table = self.tables[request.request_id] = found + more
                request.num_computed_tokens = computed
            else:
                count = min(left, request.num_tokens - request.num_computed_tokens)
                if self._allocate(request, request.num_computed_tokens + count) is None:
                    return
            assert table is not None
            self.planner.allocated(request, SimpleNamespace(blocks=[table]), external)
            if external:
                request.loads, request.loaded, request.loads_after = True, False, len(found)
                continue
            self._cache(request, request.num_computed_tokens + count)
            self.waiting.remove(request)
            self.running.append(request)
            tokens[request.request_id] = count
            left -= count
            new.append((request.request_id, request.num_computed_tokens, [each.block_id for each in table]))

    def _left_for(self, request: TinyRequest) -> int:
        """Free blocks that are left when all requests that load, with this one, have all that they will ever need."""
        holding = [one for one in self.waiting if one is request or one.request_id in self.tables]
        return len(self.pool.free) - sum(
            -(-one.wanted // SIZE) - len(self.tables.get(one.request_id, ())) for one in holding
        )

    def _loaded(self, request: TinyRequest) -> bool:
        """Whether a request's load has ended; it then goes on with what has come."""
        if not request.loaded:
            return False
        request.loads = request.loaded = False
        if request.failed and not request.num_computed_tokens:
            self._free(request)
        self._cache(request, request.num_computed_tokens)
        request.failed = False
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1
        return True

    def _allocate(self, request: TinyRequest, tokens: int) -> list[Block] | None:
        table = self.tables.setdefault(request.request_id, [])
        more = self.pool.take(max(0, -(-tokens // SIZE) - len(table)))
        if more is not None:
            table += more
            self._cache(request, tokens)
        return more

    def _cache(self, request: TinyRequest, tokens: int) -> None:
        """vLLM's own prefix cache has a block as soon as the step is scheduled that fills it."""
        count = tokens // SIZE
        self.pool.cache(self.tables.get(request.request_id, [])[:count], request.block_hashes[:count])

    def _compute(self, request: TinyRequest, count: int) -> None:
        """What a step reads must be right, whoever has put it there."""
        end, table = request.num_computed_tokens, self.tables[request.request_id]
        oldest = newest = self.weights.version
        for place in range(end):
            cells, at = self.cells[table[place // SIZE].block_id], place % SIZE
            prefix = tuple(request.tokens[: place + 1])
            if place >= end - count:
                cells[at] = Cell(prefix, oldest, newest)
            else:
                assert cells[at].tokens == prefix, f"{request.request_id} reads {cells[at].tokens} in place of {prefix}"
                oldest = min(oldest, cells[at].oldest)

    def _handle(self, ended: set[str], failed: set[str]) -> None:
        """As vLLM's scheduler does with the results of workers, and the connector with them."""
        bad = self.worker.take_bad_blocks()
        for request in self.waiting:
            if request.loads and not request.loaded:
                table = self.tables[request.request_id][: -(-request.num_computed_tokens // SIZE)]
                first = next((place for place, block in enumerate(table) if block.block_id in bad), None)
                if first is not None:
                    request.num_computed_tokens, request.failed = first * SIZE, True
        if (report := self.worker.report()) is not None:
            self.planner.reported(report)
        if bad:
            self.planner.lost(bad)
        if ended:
            self.planner.loads_ended(ended, failed)
        for request in self.waiting:
            if request.request_id in ended:
                request.loaded = True
                self._check_loaded(request)
        for name in ended & self.leaving.keys():
            self._free(self.leaving.pop(name))
        self.planner.check_integrity()

    def _check_loaded(self, request: TinyRequest) -> None:
        """What a load has brought must be right, and computed by the weights that are there now."""
        table = self.tables[request.request_id]
        brought = request.num_computed_tokens // SIZE - request.loads_after
        assert brought <= 0 or request.request_id not in self.outdated, "a load from before a reset is used"
        self.outdated.discard(request.request_id)
        self.loaded_blocks += brought
        for place in range(request.num_computed_tokens):
            cell = self.cells[table[place // SIZE].block_id][place % SIZE]
            assert cell.tokens == tuple(request.tokens[: place + 1]), f"{request.request_id} was brought {cell.tokens}"
            if not self.mixed:
                assert cell.oldest == cell.newest == self.weights.version, f"{request.request_id} was brought {cell}"

    def _answer(self, request: TinyRequest) -> None:
        """The next token follows from all before it."""
        request.tokens.append(sum(request.tokens) % 3)
        request.hash()
        if request.num_tokens >= request.wanted:
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            self.running.remove(request)
            self.planner.finished(request)
            self._free(request)

    # --- the rest

    def update_weights(self, unseen: bool = False) -> None:
        """As a trainer does, who tells nobody; `unseen`: the ranks' samples of the weights stay as they were."""
        self.weights.update(unseen)
        self.mixed = self.mixed or bool(self.tables or self.pool.cached_block_hash_to_block)
        if self.mixed and self.planner._renamed:  # before the ranks have looked at the weights of this epoch
            self.names.pure.discard(self.names.epoch)

    def reset_connector(self, weights_stay: bool = False) -> None:
        """Nothing that was found so far may come from here on."""
        self.outdated |= {
            one.request_id for one in (*self.waiting, *self.leaving.values()) if one.loads and not one.loaded
        }
        self.planner.reset(weights_stay=weights_stay)

    def reset_prefix_cache(self) -> bool:
        """As vLLM does it: not while any request has blocks."""
        if self.tables:
            return False
        self.pool.reset()
        self.mixed = False
        return True

    def check(self) -> None:
        """What the cache has under a key is what the key stands for, computed by the weights that the key names.

        While vLLM has KV of former weights, keys are for this engine only, and as good as what vLLM itself would use.
        """
        self.planner.check_integrity()
        for key, cells in self.cache.blocks.items():
            epoch, tokens = self._meaning(key)
            first = len(tokens) - SIZE + 1
            assert [cell.tokens for cell in cells] == [tokens[: first + place] for place in range(SIZE)]
            if epoch in self.names.pure:
                version = self._versions.setdefault(epoch, cells[0].newest)
                assert all(cell.oldest == cell.newest == version for cell in cells), f"epoch {epoch} has {cells}"

    def _meaning(self, key: bytes) -> tuple[int, tuple[int, ...]]:
        if key not in self._known:
            for epoch in range(self.names.epoch + 1):
                for block_hash, tokens in HASHED.items():
                    self._known[keys_of(self.names.root_of(epoch), [block_hash], 1, 0, 1)] = epoch, tokens
        return self._known[key]

    def run_dry(self, steps: int = 500) -> None:
        """Go on until nothing is left to do."""
        for _ in range(steps):
            self.lookups.finish()
            for copy in self.rank.copies:
                while not copy.over:
                    copy.work()
            if not (self.waiting or self.running or self.leaving):
                break
            self.step()
        else:
            raise AssertionError("requests do not come to their end")
        for _ in range(3):
            self.step()
            for copy in self.rank.copies:
                while not copy.over:
                    copy.work()
            self.lookups.finish()

    def close(self) -> None:
        self.planner.close()
        self.worker.close()
        self._patches.close()


def adapter(number: int, path: str, **options: Any) -> Any:
    """The request of an adapter, as vLLM hands it on; reading one whose path is "hangs" hangs."""
    return SimpleNamespace(lora_int_id=number, lora_path=path, **{"load_inplace": False, **options})
