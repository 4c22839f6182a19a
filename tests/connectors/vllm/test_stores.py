"""The records of stores by themselves: which blocks each step offers, and which stores a step must wait for."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tiny_vllm import step_output

from tiercache.connectors.vllm.orders import BlockRun, Orders, WorkerReport
from tiercache.connectors.vllm.stores import MAX_JOBS, TURN_STEPS, EngineFacts, StorePlanner
from tiercache.protocol.messages import KEY_BYTES
from tiercache.protocol.namespaces import NamespaceSpec

SIZE = 4
SPEC = NamespaceSpec(engine="t", layout="l", dtype="uint8", block_size=SIZE, block_bytes=64)
ROOT = b"r" * KEY_BYTES


class Request:
    """What stores need of vLLM's."""

    def __init__(self, name: str, prompt: int) -> None:
        self.request_id = name
        self.num_prompt_tokens = prompt
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.block_hashes = [f"{name} {number}".encode() for number in range(prompt // SIZE)]


class Engine:
    """A scheduler of vLLM's, as far as stores see it: requests with blocks `100 * n ..`."""

    def __init__(self, *, groups: int = 1, windowed: bool = False, batches: int = 1, alone: bool = False) -> None:
        self.connector: Any = SimpleNamespace(
            namespace=SimpleNamespace(block_size=SIZE), available=True, wants_events=False
        )
        self.tables: list[dict[str, list[Any]]] = [{} for _ in range(groups)]
        facts = EngineFacts([[msgspec.structs.replace(SPEC, window_blocks=int(windowed))]], 1, batches, alone=alone)
        self.stores = StorePlanner(self.connector, self.tables, facts)
        self.requests: dict[str, Request] = {}

    def add(self, name: str, blocks: list[int], *, found: int = 0) -> Request:
        request = self.requests[name] = Request(name, len(blocks) * SIZE)
        for table in self.tables:
            table[name] = [SimpleNamespace(block_id=block, is_null=block == 0) for block in blocks]
        self.stores.begin(request, ROOT, b"", found)
        return request

    def step(
        self, tokens: dict[str, int], starts: dict[str, tuple[int, list[int]]] | None = None, **new: list[int]
    ) -> Orders:
        """Schedules `tokens` of each request, and gives new blocks to some.

        `starts`: requests of which so many tokens are there already, and all of their blocks.
        """
        orders = Orders()
        started = [(name, computed, ids) for name, (computed, ids) in (starts or {}).items()]
        for name, computed, _ in started:
            if name in self.requests:
                self.requests[name].num_computed_tokens = computed
        output = step_output(tokens, started, [(name, 0, blocks) for name, blocks in new.items()])
        self.stores.step(output, orders)
        for name, count in tokens.items():
            self.requests[name].num_computed_tokens += count
        self.stores.check_integrity()
        return orders

    def finish(self, name: str) -> None:
        request = self.requests[name]
        self.stores.end(request, request.num_computed_tokens)


def test_blocks_are_offered_when_they_are_computed_and_each_once() -> None:
    engine = Engine()
    engine.add("a", list(range(10, 20)), found=2)
    assert engine.step({"a": 15}).fresh == []
    [store] = engine.step({"a": 25}).fresh
    assert store.runs == (BlockRun(1, list(range(12, 20))),)
    assert len(store.keys) == 9 * KEY_BYTES  # and the parent's
    assert engine.step({"a": 1}).fresh == []
    engine.finish("a")
    assert engine.step({}).ready == []


def test_requests_take_turns() -> None:
    engine = Engine()
    names = [f"r{number}" for number in range(2 * TURN_STEPS)]
    for place, name in enumerate(names):
        engine.add(name, [100 + place])
    counts = [len(engine.step(dict.fromkeys(names, SIZE)).fresh)]
    counts += [len(engine.step(dict.fromkeys(names, 0)).fresh) for _ in range(TURN_STEPS)]
    assert counts == [2] * TURN_STEPS + [0]


def test_a_window_takes_its_blocks_along() -> None:
    engine = Engine(groups=2, windowed=True)
    engine.add("a", [0, 0, 7, 8])
    [store] = engine.step({"a": 16}).fresh
    assert store.runs == (BlockRun(2, [7, 8]), BlockRun(2, [7, 8]))
    assert engine.step({"a": 1}, a=[7]).flush == [store.job_id]  # it has left the window, and comes back as a new one


def blocks(ids: list[int]) -> list[list[Any]]:
    return [[SimpleNamespace(block_id=block, is_null=block == 0) for block in ids]]


@pytest.mark.parametrize("waits", [True, False])
def test_blocks_that_another_connector_may_fill_end_the_stores_that_read_them(waits: bool) -> None:
    """Be it while their request waits, or in the step that computes it: what vLLM takes for computed is new too."""
    engine = Engine()
    engine.add("a", [1, 2, 3])
    engine.add("b", [4])
    [store] = engine.step({"a": 12}).fresh
    engine.finish("a")
    engine.stores.allocated("c", blocks([3, 4]), SIZE)
    assert engine.step({"b": 1}).flush == [], "it has the first from vLLM's own cache"
    engine.stores.allocated("c", blocks([0, 3, 4]), SIZE)
    orders = engine.step({"b": 1}) if waits else engine.step({"b": 1}, starts={"c": (8, [0, 3, 4])})
    assert orders.flush == [store.job_id]
    assert engine.step({"b": 1}).flush == [], "an earlier step has ordered it"


def test_what_follows_a_load_of_another_connector_in_the_same_step_is_stored_at_its_end() -> None:
    """Whether that has come is known only later, and what is computed from it is computed again if not."""
    engine = Engine()
    for name, tokens in (("loaded", 0), ("cached", 8)):
        engine.add(name, [1, 2, 3])
        engine.stores.allocated(name, blocks([1, 2, 3]), tokens)
        orders = engine.step({name: 4}, starts={name: (8, [1, 2, 3])})
        assert [len(store.keys) // KEY_BYTES for store in orders.fresh] == ([] if name == "loaded" else [3])
    assert engine.step({"loaded": 4}).fresh == []
    engine.finish("loaded")
    [store] = engine.step({}).ready
    assert store.runs == (BlockRun(0, [1, 2, 3]),)


def test_without_other_connectors_part_of_a_block_is_from_vllms_own_cache() -> None:
    """vLLM tells of whole blocks of its cache only, though it may continue within one."""
    engine = Engine(alone=True)
    engine.add("a", [1, 2, 3])
    engine.stores.allocated("a", blocks([1, 2, 3]), 8)
    [store] = engine.step({"a": 1}, starts={"a": (11, [1, 2, 3])}).fresh
    assert store.runs == (BlockRun(0, [1, 2, 3]),)


@pytest.mark.parametrize(("batches", "later", "shares"), [(1, 0, True), (1, 1, False), (2, 1, True), (2, 2, False)])
def test_what_shares_a_load_that_may_fail_is_stored_at_its_end(batches: int, later: int, shares: bool) -> None:
    """vLLM takes the blocks for its own cache before it knows, be it that the loading request was there before."""
    engine = Engine(batches=batches)
    for name, ids in (("loads", [1, 2, 3]), ("shares", [1, 2, 4]), ("other", [5])):
        engine.add(name, ids)
    starts = {"shares": (8, [1, 2, 4]), "loads": (8, [1, 2, 3])}
    engine.stores.allocated("loads", blocks([1, 2, 3]), 0)
    if later:
        engine.step({"loads": 4}, starts={"loads": starts.pop("loads")})
    for _ in range(1, later):
        engine.step({})
        engine.step({"other": 1})
    engine.stores.allocated("shares", blocks([1, 2, 4]), 8)
    orders = engine.step(dict.fromkeys(starts, 4), starts=starts)
    assert len(orders.fresh) == (not shares)
    engine.finish("shares")
    assert len(engine.step({}).ready) == shares


def test_what_a_sibling_still_fills_when_its_request_ends_is_not_stored() -> None:
    """vLLM counts what is to come as computed from the start."""
    engine = Engine()
    for name, again in (("aborted", False), ("computed", True)):
        request = engine.add(name, [1, 2, 3])
        engine.stores.allocated(name, blocks([1, 2, 3]), 0)
        request.num_computed_tokens = 8
        assert engine.step({}).fresh == []
        if again:
            engine.stores.allocated(name, blocks([1, 2, 3]), 8)
            engine.step({name: 1})
        engine.finish(name)
        assert [store.runs for store in engine.step({}).ready] == ([(BlockRun(0, [1, 2]),)] if again else [])


def test_what_is_stored_at_its_end_only_stays_so() -> None:
    """Though an earlier store must be repeated, or another load has failed."""
    engine = Engine()
    engine.add("a", [1, 2, 3])
    [store] = engine.step({"a": 12}).fresh
    engine.stores.allocated("a", blocks([1, 2, 3]), 0)
    engine.step({"a": 4}, starts={"a": (8, [1, 2, 3])})
    engine.stores.reported(WorkerReport({store.job_id: 1}, {store.job_id}))
    assert engine.step({"a": 0}).fresh == []
    engine.stores.begin_again("a")
    assert engine.step({"a": 0}).fresh == []
    engine.finish("a")
    [store] = engine.step({}).ready
    assert store.runs == (BlockRun(0, [1, 2, 3]),)


def test_a_request_that_has_ended_is_not_kept() -> None:
    """vLLM frees the request; no hook of ours keeps it until its last store ends."""
    engine = Engine()
    ended = weakref.ref(engine.add("a", [1, 2]))
    [store] = engine.step({"a": 8}).fresh
    engine.finish("a")
    del engine.requests["a"]
    assert ended() is None
    engine.stores.reported(WorkerReport({store.job_id: 1}, {store.job_id}))
    engine.stores.check_integrity()
    assert engine.step({}).ready == []


def test_a_store_that_was_cut_short_is_offered_once_more() -> None:
    engine = Engine()
    engine.add("a", [1, 2])
    jobs = []
    for _ in range(2):
        [store] = engine.step({"a": 8 * (not jobs)}).fresh
        jobs.append(store.job_id)
        engine.stores.reported(WorkerReport({store.job_id: 1}, {store.job_id}))
    assert (len(set(jobs)), engine.step({"a": 0}).fresh) == (2, [])


def test_nothing_is_offered_in_vain() -> None:
    engine = Engine()
    engine.add("a", [1, 2])
    engine.connector.available = False
    assert engine.step({"a": 8}).fresh == []
    engine.connector.available = True
    engine.stores.forget()
    assert engine.step({"a": 0}).fresh == []
    for number in range(MAX_JOBS + 1):
        engine.add(f"r{number}", [number])
        engine.step({f"r{number}": SIZE})
    assert len(engine.stores._jobs) == MAX_JOBS
    engine.finish("r0")
    engine.stores.forget()
    assert engine.step({}).ready == []
