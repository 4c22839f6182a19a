"""The scheduler's half by itself: what becomes of lookups whose requests change their mind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_engines import PATIENCE_S

import tiercache
from tiercache.connectors.vllm_compat import CacheHitSource
from tiercache.connectors.vllm_costs import LAST_LOADS, LEAST_SAMPLES, Costs
from tiercache.connectors.vllm_orders import Report
from tiercache.connectors.vllm_scheduler import DECLINED, Scheduler
from tiercache.layout import NamespaceSpec
from tiercache.messages import KEY_BYTES, Priority

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
SIZE = 4
SPEC = NamespaceSpec(engine="t", layout="l", dtype="uint8", block_size=SIZE, block_bytes=64)


class Cache:
    """A connector that finds all blocks of everything when `go_on` is set."""

    namespace = SPEC
    available = True
    wants_events = False
    client = SimpleNamespace(request_timeout_s=PATIENCE_S)

    def __init__(self) -> None:
        self.below_blocks = 0
        self.asked, self.go_on = threading.Event(), threading.Event()
        self.found: list[Any] = []
        self.released: list[Any] = []

    def match(self, keys: bytes, namespaces: Any) -> Any:
        self.asked.set()
        assert self.go_on.wait(PATIENCE_S)
        blocks = len(keys) // KEY_BYTES
        self.found.append(SimpleNamespace(blocks=blocks, below_blocks=self.below_blocks, ticket=lambda: b"ticket"))
        return self.found[-1]

    def release(self, match: Any) -> None:
        self.released.append(match)

    def close(self) -> None:
        """Nothing is open."""


class Names:
    """Requests have a root at once."""

    def read_later(self, who: str) -> None:
        """There is nothing to read."""

    def root(self, lora_request: Any) -> bytes:
        return b"r" * KEY_BYTES

    def new_epoch(self) -> None:
        """Not looked at here."""


class Rig:
    """A scheduler's half, and a vLLM as far as it needs one."""

    def __init__(self) -> None:
        self.cache = Cache()
        self.tables: dict[str, list[Any]] = {}
        manager = SimpleNamespace(req_to_blocks=self.tables)
        blocks = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=[manager]))
        cache: Any = self.cache
        names: Any = Names()
        self.costs = Costs(SIZE)
        self.scheduler = Scheduler(cache, [[SPEC]], names, 1, False, blocks, self.costs)

    def add(self, name: str, blocks: int) -> Any:
        """A request of so many blocks, all of which begin alike."""
        request = SimpleNamespace(
            request_id=name, num_prompt_tokens=blocks * SIZE + 1, num_computed_tokens=0, num_preemptions=0,
            block_hashes=[bytes([block]) * 32 for block in range(blocks)], lora_request=None, kv_transfer_params=None,
        )  # fmt: skip
        self.tables[name] = [SimpleNamespace(block_id=block, is_null=False) for block in range(blocks)]
        self.scheduler.add(request)
        return request

    def looked_up(self) -> None:
        """Wait until all lookups and releases so far are done."""
        assert self.scheduler._background.finish(PATIENCE_S)

    def load(self, request: Any, tokens: int) -> None:
        blocks = SimpleNamespace(blocks=[self.tables[request.request_id]])
        self.scheduler.allocated(request, blocks, tokens)

    def step(self) -> Any:
        cached = SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set())
        output = SimpleNamespace(
            num_scheduled_tokens={}, total_num_scheduled_tokens=0, scheduled_new_reqs=[], scheduled_cached_reqs=cached
        )
        orders = self.scheduler.step(output)
        self.scheduler.check_integrity()
        return orders


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.cache.go_on.set()
    rig.scheduler.close()


def test_a_lookup_that_comes_when_the_request_has_asked_again_is_given_back(rig: Rig) -> None:
    request = rig.add("a", 2)
    rig.step()
    request.num_preemptions = 1
    assert rig.scheduler.matched_tokens(request, 0) is None
    rig.cache.go_on.set()
    rig.looked_up()
    first, second = rig.cache.found
    assert rig.cache.released == [first]
    assert rig.scheduler.matched_tokens(request, 0) == 2 * SIZE
    rig.scheduler.finished(request)
    rig.looked_up()
    assert rig.cache.released == [first, second]


def test_a_lookup_that_comes_when_the_request_has_gone_is_given_back(rig: Rig) -> None:
    request = rig.add("a", 2)
    rig.step()
    assert rig.cache.asked.wait(PATIENCE_S)
    rig.scheduler.finished(request)
    rig.cache.go_on.set()
    rig.looked_up()
    assert rig.cache.released == rig.cache.found
    assert rig.scheduler.matched_tokens(request, 0) == 0


def test_a_request_waits_for_the_load_of_another_with_its_beginning(rig: Rig) -> None:
    first, second = rig.add("a", 2), rig.add("b", 3)
    rig.cache.go_on.set()
    rig.looked_up()
    assert rig.scheduler.matched_tokens(first, 0) == 2 * SIZE
    rig.load(first, 2 * SIZE)
    assert rig.scheduler.matched_tokens(second, 0) is None
    [load] = rig.step().loads
    assert (load.request_id, load.runs[0].block_ids) == ("a", [0, 1])
    rig.scheduler.loads_ended({"a"}, False)
    assert rig.scheduler.matched_tokens(second, 2 * SIZE) == SIZE, "vLLM has the others by now"
    rig.load(second, SIZE)
    [load] = rig.step().loads
    assert (load.request_id, load.runs[0]) == ("b", (2, [2]))
    rig.scheduler.loads_ended({"b"}, False)
    rig.looked_up()
    assert rig.cache.released == rig.cache.found


def test_what_is_not_wanted_is_given_back_and_a_reset_forgets(rig: Rig) -> None:
    unwanted, reset = rig.add("a", 2), rig.add("b", 2)
    rig.cache.go_on.set()
    rig.looked_up()
    assert rig.scheduler.matched_tokens(unwanted, 2 * SIZE) == 0
    rig.load(unwanted, 0)
    rig.looked_up()
    assert rig.cache.released == rig.cache.found[:1]
    rig.scheduler.reset()
    rig.looked_up()
    assert rig.cache.released == rig.cache.found
    assert rig.scheduler.matched_tokens(reset, 0) == 0


def prefill_takes(rig: Rig, seconds_per_block: float) -> None:
    for step in range(LEAST_SAMPLES + 1):
        rig.costs.stepped({"long": 100 * SIZE}, 100 * SIZE, step * 100 * seconds_per_block)


def test_what_a_slow_disk_has_of_a_match_is_computed_and_the_rest_loaded(rig: Rig) -> None:
    prefill_takes(rig, 1.0)
    for _ in range(LEAST_SAMPLES):
        rig.costs.loaded(0, 2, 3.0)
    request = rig.add("a", 5)
    rig.cache.below_blocks = 2
    rig.cache.go_on.set()
    rig.looked_up()
    assert [rig.scheduler.matched_tokens(request, 0) for _ in range(2)] == [3 * SIZE] * 2
    assert rig.scheduler.counters() == {DECLINED: 2}
    assert rig.scheduler.counters() == {}
    assert rig.scheduler.hit_sources(request, 3 * SIZE) == {CacheHitSource.HOST: 3 * SIZE}
    rig.load(request, 3 * SIZE)
    (load,) = rig.step().loads
    assert load.runs == ((0, [0, 1, 2]),)
    rig.scheduler.loads_ended({"a"}, False)
    rig.looked_up()
    assert rig.cache.released == rig.cache.found


def test_both_tiers_of_a_load_are_named(rig: Rig) -> None:
    request = rig.add("a", 5)
    rig.cache.below_blocks = 2
    rig.cache.go_on.set()
    rig.looked_up()
    assert rig.scheduler.matched_tokens(request, 2 * SIZE) == 3 * SIZE
    sources = {CacheHitSource.HOST: SIZE, CacheHitSource.DISK: 2 * SIZE}
    assert rig.scheduler.hit_sources(request, 3 * SIZE) == sources


def test_the_slowest_rank_is_what_a_load_has_taken(rig: Rig) -> None:
    prefill_takes(rig, 1.0)
    rig.cache.go_on.set()
    for number in range(LAST_LOADS):
        request = rig.add(f"{number}", 2)
        rig.looked_up()
        assert rig.scheduler.matched_tokens(request, 0) == (2 * SIZE if number < LEAST_SAMPLES else 0)
        if number < LEAST_SAMPLES:
            rig.load(request, 2 * SIZE)
            both = Report(load_seconds={request.request_id: 2.1}).aggregate(Report(load_seconds={"gone": 9.0}))
            rig.scheduler.reported(both)
            rig.scheduler.reported(Report(load_seconds={request.request_id: 0.1}))
            rig.scheduler.loads_ended({request.request_id}, False)


@pytest.mark.parametrize(
    ("parameters", "hint"),
    [
        ({"tiercache": {"return_in_s": 40}, "other": 1}, tiercache.Hint(return_in_s=40.0)),
        ({"tiercache": {"priority": "low", "ttl_s": 3.5}}, tiercache.Hint(ttl_s=3.5, priority=Priority.LOW)),
        ({"tiercache": {}}, None),
        ({"tiercache": {"ttl_s": float("nan")}}, None),
        ({"other": 1}, None),
        (["tiercache"], None),
    ],
)
def test_what_a_request_says_goes_with_the_next_step(rig: Rig, parameters: Any, hint: tiercache.Hint | None) -> None:
    request = rig.add("a", 2)
    request.kv_transfer_params = parameters
    rig.cache.go_on.set()
    rig.looked_up()
    rig.scheduler.matched_tokens(request, 0)
    rig.scheduler.allocated(request, SimpleNamespace(blocks=[]), 0)
    request.num_computed_tokens = 2 * SIZE
    rig.scheduler.finished(request)
    assert [said.hint for said in rig.step().hints] == ([hint] if hint else [])
    assert not rig.step().hints
