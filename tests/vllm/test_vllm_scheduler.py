"""The scheduler's half by itself: what becomes of lookups whose requests change or end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus
from vllm_engines import PATIENCE_S, wait_until

import tiercache
from tiercache.connectors.vllm.apart import MAX_THREADS
from tiercache.connectors.vllm.compat import CacheHitSource
from tiercache.connectors.vllm.costs import LAST_LOADS, LEAST_SAMPLES, EngineCosts
from tiercache.connectors.vllm.lookups import SLOW_LOOKUP_S
from tiercache.connectors.vllm.orders import WorkerReport
from tiercache.connectors.vllm.scheduler import DECLINED, RequestPlanner
from tiercache.connectors.vllm.stores import EngineFacts
from tiercache.protocol.messages import KEY_BYTES, Priority
from tiercache.protocol.namespaces import NamespaceSpec

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
        self.found_blocks: int | None = None
        self.asked, self.go_on = threading.Event(), threading.Event()
        self.found: list[Any] = []
        self.released: list[Any] = []

    def match(self, keys: bytes, namespaces: Any) -> Any:
        self.asked.set()
        assert self.go_on.wait(PATIENCE_S)
        blocks = len(keys) // KEY_BYTES if self.found_blocks is None else self.found_blocks
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

    def __init__(self) -> None:
        self.epochs = 0
        self.hangs, self.goes_on = threading.Event(), threading.Event()

    def root(self, lora_request: Any, own: bool = False) -> bytes:
        if lora_request is not None and lora_request.lora_path == "hangs":
            self.hangs.set()
            assert self.goes_on.wait(PATIENCE_S)
        return bytes([self.epochs, own]) * (KEY_BYTES // 2)

    def new_epoch(self) -> None:
        self.epochs += 1


class Rig:
    """A scheduler's half, and a vLLM as far as it needs one."""

    def __init__(self) -> None:
        self.cache = Cache()
        self.tables: dict[str, list[Any]] = {}
        manager = SimpleNamespace(req_to_blocks=self.tables)
        blocks = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=[manager]))
        blocks.block_pool = self.pool = SimpleNamespace(cached_block_hash_to_block={})
        cache: Any = self.cache
        self.names = Names()
        names: Any = self.names
        self.costs = EngineCosts(SIZE)
        self.scheduler = RequestPlanner(cache, EngineFacts([[SPEC]], 1), names, blocks, self.costs)

    def add(self, name: str, blocks: int, adapter: Any = None, media: Sequence[Any] = ()) -> Any:
        """A request of so many blocks, all of which begin alike."""
        request = SimpleNamespace(
            request_id=name,
            num_prompt_tokens=blocks * SIZE + 1,
            num_computed_tokens=0,
            num_preemptions=0,
            block_hashes=[bytes([block]) * 32 for block in range(blocks)],
            lora_request=adapter,
            kv_transfer_params=None,
            mm_features=media,
            resumable=False,
            status=RequestStatus.FINISHED_STOPPED,
        )
        self.tables[name] = [SimpleNamespace(block_id=block, is_null=False) for block in range(blocks)]
        self.scheduler.add(request)
        return request

    def looked_up(self) -> None:
        """Wait until all lookups and releases so far are done."""
        assert self.scheduler._lookups.finish(PATIENCE_S)

    def load(self, request: Any, tokens: int) -> None:
        blocks = SimpleNamespace(blocks=[self.tables[request.request_id]])
        self.scheduler.allocated(request, blocks, tokens)

    def step(self, tokens: dict[str, int] | None = None, new: Sequence[Any] = ()) -> Any:
        """Schedules `tokens` of each request, of which some are `new`."""
        tokens = tokens or {}
        cached = SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set())
        started = [
            SimpleNamespace(req_id=each.request_id, num_computed_tokens=each.num_computed_tokens, block_ids=())
            for each in new
        ]
        output = SimpleNamespace(
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_new_reqs=started,
            scheduled_cached_reqs=cached,
        )
        orders = self.scheduler.step(output)
        self.scheduler.check_integrity()
        return orders


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.cache.go_on.set()
    rig.names.goes_on.set()
    rig.scheduler.close()


def test_a_lookup_that_comes_when_the_request_has_asked_again_is_given_back(rig: Rig) -> None:
    request = rig.add("a", 2)
    rig.step()
    assert rig.cache.asked.wait(PATIENCE_S)
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


def test_a_request_that_has_gone_is_not_looked_up(rig: Rig) -> None:
    rig.add("a", 2)
    gone = rig.add("b", 2)
    rig.step()
    assert rig.cache.asked.wait(PATIENCE_S)
    rig.scheduler.finished(gone)
    rig.cache.go_on.set()
    rig.looked_up()
    assert len(rig.cache.found) == 1


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


@pytest.mark.parametrize("number", [None, 1])
def test_images_have_names_in_one_engine_only_unless_ids_are_content(rig: Rig, number: int | None) -> None:
    """A user's id can look like a hash: vLLM makes it one where images have options."""

    def own(*ids: str, in_parts: bool = False) -> bool:
        images = [SimpleNamespace(mm_hash=name, identifier=f"adapter:{name}") for name in ids]
        request = rig.add(f"{ids}{in_parts}", 2, None if number is None else adapter(number, "fine"), images)
        request.resumable = in_parts
        answer(rig, request)
        lookup = rig.scheduler._requests[request.request_id].lookup
        assert lookup is not None
        return bool(lookup.root[1])

    rig.cache.go_on.set()
    hashed = "0123456789abcdef" * 4
    assert [own(), own(hashed), own(hashed, "cat.png"), own("cat.png")] == [False, True, True, True]
    assert own(in_parts=True), "a later part may have images"
    rig.scheduler._engine = EngineFacts([[SPEC]], 1, media_ids=True)
    assert not own("dog.png", hashed)
    assert not own("cat.png", in_parts=True)


def adapter(number: int, path: str, **options: Any) -> Any:
    return SimpleNamespace(lora_int_id=number, lora_path=path, **{"load_inplace": False, **options})


def answer(rig: Rig, request: Any) -> int:
    """The answer that vLLM gets in the end, as it asks again and again."""
    told: list[int] = []

    def asked() -> bool:
        tokens = rig.scheduler.matched_tokens(request, 0)
        told.extend([] if tokens is None else [tokens])
        return bool(told)

    wait_until(asked)
    return told[0]


def test_an_adapter_that_cannot_be_read_holds_up_its_own_requests_alone(rig: Rig) -> None:
    hanging = [rig.add(f"hangs {number}", 2, adapter(1, "hangs")) for number in range(20)]
    plain, other = rig.add("plain", 2), rig.add("other", 2, adapter(2, "fine"))
    rig.cache.go_on.set()
    rig.step()
    assert answer(rig, plain) == answer(rig, other) == 2 * SIZE
    assert rig.names.hangs.wait(PATIENCE_S)
    assert {rig.scheduler.matched_tokens(request, 0) for request in hanging} == {None}, "the deadline is far away"
    for request in hanging[1:]:
        lookup = rig.scheduler._requests[request.request_id].lookup
        assert lookup is not None
        lookup.until_s = 0.0
    assert [rig.scheduler.matched_tokens(request, 0) for request in hanging[1:]] == [0] * 19, "they are computed"
    rig.names.goes_on.set()
    assert answer(rig, hanging[0]) == 2 * SIZE, "its name came in time"
    rig.looked_up()
    assert len(rig.cache.found) == 3, "nothing is looked up for those that have gone on without"


def test_adapters_that_hang_are_no_more_than_so_many_threads(rig: Rig) -> None:
    names = [rig.add(f"{number}", 2, adapter(number, "hangs")) for number in range(MAX_THREADS + 2)]
    rig.cache.go_on.set()
    rig.step()
    assert [answer(rig, request) for request in names[MAX_THREADS:]] == [0, 0]
    assert answer(rig, rig.add("plain", 2)) == 2 * SIZE
    rig.names.goes_on.set()
    assert answer(rig, names[0]) == 2 * SIZE


@pytest.mark.parametrize("number", [None, 1])
@pytest.mark.parametrize("broken", ["media", "name", "answer"])
def test_a_lookup_that_fails_in_whatever_way_is_a_miss(
    rig: Rig, number: int | None, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig.cache.go_on.set()
    request = rig.add("a", 2, number and adapter(number, "fine"))
    if broken == "media":
        del request.mm_features
    else:
        monkeypatch.setattr(*((rig.names, "root") if broken == "name" else (rig.cache, "match")), None)
    assert answer(rig, request) == 0
    wait_until(lambda: "unexpectedly" in caplog.text)
    monkeypatch.undo()
    assert answer(rig, rig.add("b", 2)) == 2 * SIZE


def test_an_adapter_for_which_there_is_no_thread_is_read_when_there_is_one(
    rig: Rig, no_threads: pytest.MonkeyPatch
) -> None:
    rig.cache.go_on.set()
    assert answer(rig, rig.add("a", 2, adapter(1, "fine"))) == 0
    no_threads.undo()
    assert answer(rig, rig.add("b", 2, adapter(1, "fine"))) == 2 * SIZE


def test_a_lookup_that_hangs_is_waited_for_no_longer_than_for_one_answer(rig: Rig) -> None:
    first, second = rig.add("a", 2), rig.add("b", 2)
    rig.step()
    assert rig.cache.asked.wait(PATIENCE_S)
    wait_until(lambda: time.monotonic() - rig.scheduler._lookups._moved_s > SLOW_LOOKUP_S)
    assert rig.scheduler.matched_tokens(second, 0) is None
    for request in (first, second):
        lookup = rig.scheduler._requests[request.request_id].lookup
        assert lookup is not None
        lookup.until_s = 0.0
    assert [rig.scheduler.matched_tokens(request, 0) for request in (first, second)] == [0, 0]


def test_names_are_given_anew_when_a_rank_says_that_its_weights_have_changed(rig: Rig) -> None:
    loading, waiting = rig.add("a", 2), rig.add("b", 3)
    rig.cache.go_on.set()
    rig.looked_up()
    assert rig.scheduler.matched_tokens(loading, 0) == 2 * SIZE
    rig.load(loading, 2 * SIZE)
    rig.step()
    rig.scheduler.reported(WorkerReport(moves={1: 1}).aggregate(WorkerReport(moves={0: 2})))
    assert rig.names.epochs == 1
    orders = rig.step()
    assert (orders.moves, orders.renamed, orders.cancel) == ({0: 2, 1: 1}, True, ["a"])
    assert rig.scheduler.matched_tokens(waiting, 0) == 0
    rig.scheduler.reported(WorkerReport(moves={1: 1}))
    orders = rig.step()
    assert (orders.moves, orders.renamed, rig.names.epochs) == ({0: 2, 1: 1}, False, 1), "that was known"
    rig.scheduler.reported(WorkerReport(moves={1: 2}))
    assert rig.names.epochs == 2
    assert orders.moves == {0: 2, 1: 1}, "orders that were given do not change"
    rig.scheduler.loads_ended({"a"}, True)


def test_vllm_forgets_what_it_had_when_the_weights_changed(rig: Rig) -> None:
    """Until `reset_prefix_cache` it may store old blocks of its own under the names of the new weights."""
    rig.pool.cached_block_hash_to_block = {}
    assert not rig.step().renamed, "as for a benchmark"
    rig.scheduler.reported(WorkerReport(moves={0: 1}))
    assert rig.step().renamed
    rig.pool.cached_block_hash_to_block = {}
    assert rig.step().renamed
    assert rig.names.epochs == 2
    rig.pool.cached_block_hash_to_block = {}
    assert not rig.step().renamed, "vLLM has no older block any more"


def test_a_reset_while_vllm_keeps_its_own_cache_begins_anew_when_vllm_has_forgotten_it(rig: Rig) -> None:
    """As with requests that run: until then what vLLM had before may be stored under the new names."""
    rig.pool.cached_block_hash_to_block = {}
    rig.scheduler.reset()
    rig.step()
    rig.pool.cached_block_hash_to_block = {}
    assert not rig.step().renamed, "vLLM had no older block"
    rig.scheduler.reset()
    assert rig.step().renamed
    assert not rig.step().renamed
    rig.pool.cached_block_hash_to_block = {}
    assert rig.step().renamed
    assert rig.names.epochs == 3


def test_what_vllm_computes_after_a_failed_load_within_a_step_is_its_own(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests that share its blocks go on, and what they compute is in vLLM's cache: others may begin with it."""
    rig.cache.found_blocks = 0
    loads, shares = rig.add("loads", 2), rig.add("shares", 2)
    rig.cache.go_on.set()
    rig.looked_up()
    for request, local in ((loads, 0), (shares, SIZE)):
        assert rig.scheduler.matched_tokens(request, local) == 0
        rig.load(request, 0)
        request.num_computed_tokens = SIZE
    rig.step({"loads": SIZE + 1, "shares": SIZE + 1}, new=[loads, shares])
    rig.scheduler.lost({5})
    assert not rig.step().renamed, "one of requests that waited for it"
    rig.scheduler.matched_tokens(shares, 0)
    rig.load(shares, 0)
    rig.step({"shares": 1}, new=[shares])
    rig.scheduler.lost({0})
    shares.num_computed_tokens = 2 * SIZE + 1
    rig.scheduler.finished(shares)
    orders = rig.step()
    assert (orders.renamed, orders.ready, rig.names.epochs) == (True, [], 1)
    assert "a load of another connector failed" in caplog.text


def test_a_failed_load_of_our_own_begins_no_epoch_beside_a_sibling(rig: Rig) -> None:
    """Its blocks are those that a sibling has filled within a step that was the last one with tokens."""
    rig.cache.found_blocks = 0
    brought = rig.add("brought", 2)
    rig.cache.go_on.set()
    rig.looked_up()
    assert rig.scheduler.matched_tokens(brought, 0) == 0
    rig.load(brought, 0)
    brought.num_computed_tokens = 2 * SIZE
    rig.step({"brought": 1}, new=[brought])
    rig.scheduler.finished(brought)
    rig.cache.found_blocks = 2
    ours = rig.add("ours", 2)
    rig.tables["ours"] = rig.tables["brought"]
    rig.looked_up()
    tokens = rig.scheduler.matched_tokens(ours, 0)
    assert tokens
    rig.load(ours, tokens)
    lost = {block.block_id for block in rig.tables["ours"]}
    rig.step()
    rig.scheduler.lost(lost)
    assert rig.names.epochs == 0
    rig.scheduler.loads_ended({"ours"}, True)
    rig.scheduler.lost(lost)
    assert rig.names.epochs == 1, "else this test would check nothing"


@pytest.mark.parametrize("how", ["FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED", "FINISHED_ERROR"])
def test_what_a_sibling_loads_in_a_step_is_stored_only_if_the_end_says_that_it_has_come(rig: Rig, how: str) -> None:
    rig.cache.found_blocks = 0
    request = rig.add("a", 2)
    rig.cache.go_on.set()
    rig.looked_up()
    assert rig.scheduler.matched_tokens(request, 0) == 0
    rig.load(request, 0)
    request.num_computed_tokens = SIZE
    assert not rig.step({"a": SIZE + 1}, new=[request]).fresh
    request.num_computed_tokens, request.status = 2 * SIZE + 1, RequestStatus[how]
    rig.scheduler.finished(request)
    assert len(rig.step().ready) == (how in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"))


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
            both = WorkerReport(load_seconds={request.request_id: 2.1}).aggregate(
                WorkerReport(load_seconds={"gone": 9.0})
            )
            rig.scheduler.reported(both)
            rig.scheduler.reported(WorkerReport(load_seconds={request.request_id: 0.1}))
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
    assert [each.hint for each in rig.step().hints] == ([hint] if hint else [])
    assert not rig.step().hints
