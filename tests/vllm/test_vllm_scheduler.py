"""The scheduler's half by itself: what becomes of lookups whose requests change their mind."""

from __future__ import annotations

import dataclasses
import time
from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_rig import SIZE, Rig, adapter
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.request import RequestStatus
from vllm_engines import PATIENCE_S, wait_until

import tiercache
from tiercache.connectors.vllm import scheduler
from tiercache.connectors.vllm.compat import CacheHitSource
from tiercache.connectors.vllm.costs import LAST_LOADS, LEAST_SAMPLES, TierBlocks
from tiercache.connectors.vllm.lookups import SLOW_LOOKUP_S
from tiercache.connectors.vllm.orders import WorkerReport
from tiercache.connectors.vllm.scheduler import DECLINED
from tiercache.protocol.messages import Priority, unpack_indices

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_a_lookup_that_comes_when_the_request_has_asked_again_is_given_back(rig: Rig) -> None:
    request = rig.add("a", 2)
    rig.step()
    assert rig.cache.asked.wait(PATIENCE_S)
    request.num_preemptions = 1
    assert rig.scheduler.matched_tokens(request, 0) is None
    rig.go_on()
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
    rig.go_on()
    assert rig.cache.released == rig.cache.found
    assert rig.scheduler.matched_tokens(request, 0) == 0


def test_a_request_that_has_gone_is_not_looked_up(rig: Rig) -> None:
    rig.add("a", 2)
    gone = rig.add("b", 2)
    rig.step()
    assert rig.cache.asked.wait(PATIENCE_S)
    rig.scheduler.finished(gone)
    rig.go_on()
    assert len(rig.cache.found) == 1


def test_a_request_waits_for_the_load_of_another_with_its_beginning(rig: Rig) -> None:
    first, second = rig.add("a", 2), rig.add("b", 3)
    rig.go_on()
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


def test_a_load_that_vllm_defers_fails_if_the_request_is_forgotten_by_then(rig: Rig) -> None:
    """vLLM may tell of blocks steps after it asked, and then waits for their load."""
    request = rig.add("deferred", 3)
    rig.go_on()
    assert rig.answer(request) == 3 * SIZE
    rig.scheduler.reset()
    rig.step()
    rig.load(request, 3 * SIZE)
    orders = rig.step()
    assert [(load.request_id, load.runs[0].block_ids) for load in orders.loads] == [("deferred", [0, 1, 2])]
    assert orders.cancel == ["deferred"]
    rig.scheduler.lost({0, 1, 2})
    rig.scheduler.loads_ended({"deferred"}, True)
    rig.scheduler.finished(request)
    assert rig.step().cancel == []
    rig.looked_up()
    assert rig.cache.released == rig.cache.found


def test_a_block_is_stored_when_it_has_a_hash(rig: Rig) -> None:
    """Hashes that look ahead come with the tokens after their blocks."""
    rig.cache.found_blocks = 0
    request = rig.add("looks ahead", 4)
    hashes = request.block_hashes
    request.block_hashes = hashes[:3]
    rig.go_on()
    assert rig.answer(request) == 0
    (store,) = rig.step({"looks ahead": 4 * SIZE + 1}, [request]).fresh
    assert [run.block_ids for run in store.runs] == [[0, 1, 2]]
    request.num_computed_tokens, request.block_hashes = 4 * SIZE + 1, hashes
    rig.scheduler.finished(request)
    (store,) = rig.step().ready
    assert [run.block_ids for run in store.runs] == [[3]]


def test_what_is_not_wanted_is_given_back_and_a_reset_forgets(rig: Rig) -> None:
    unwanted, reset = rig.add("a", 2), rig.add("b", 2)
    rig.go_on()
    assert rig.scheduler.matched_tokens(unwanted, 2 * SIZE) == 0
    rig.load(unwanted, 0)
    rig.looked_up()
    assert rig.cache.released == rig.cache.found[:1]
    rig.scheduler.reset()
    rig.looked_up()
    assert rig.cache.released == rig.cache.found
    assert rig.scheduler.matched_tokens(reset, 0) == 0


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
    assert rig.answer(request) == 0
    wait_until(lambda: "unexpectedly" in caplog.text)
    monkeypatch.undo()
    assert rig.answer(rig.add("b", 2)) == 2 * SIZE


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


@pytest.mark.parametrize("how", ["FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED", "FINISHED_ERROR"])
def test_what_a_sibling_loads_in_a_step_is_stored_only_if_the_end_says_that_it_has_come(rig: Rig, how: str) -> None:
    rig.cache.found_blocks = 0
    request = rig.add("a", 2)
    rig.go_on()
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
        rig.costs.loaded(TierBlocks(0, 2), 3.0)
    request = rig.add("a", 5)
    rig.cache.below_blocks = 2
    rig.go_on()
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


def test_what_a_slow_store_has_of_a_match_is_computed_and_the_rest_loaded(rig: Rig) -> None:
    prefill_takes(rig, 1.0)
    for _ in range(LEAST_SAMPLES):
        rig.costs.loaded(TierBlocks(0, 0, 1), 3.0)
    request = rig.add("a", 5)
    rig.cache.below_blocks, rig.cache.shared_blocks = 2, 1
    rig.go_on()
    assert rig.scheduler.matched_tokens(request, 0) == 4 * SIZE
    assert rig.scheduler.counters() == {DECLINED: 1}
    sources = {CacheHitSource.HOST: 3 * SIZE, CacheHitSource.DISK: SIZE}
    assert rig.scheduler.hit_sources(request, 4 * SIZE) == sources


def test_all_tiers_of_a_load_are_named(rig: Rig) -> None:
    request = rig.add("a", 6)
    rig.cache.below_blocks, rig.cache.shared_blocks = 3, 1
    rig.go_on()
    assert rig.scheduler.matched_tokens(request, 2 * SIZE) == 4 * SIZE
    sources = {
        CacheHitSource.HOST: SIZE,
        CacheHitSource.DISK: 2 * SIZE,
        CacheHitSource.EXTERNAL_UNSPECIFIED: SIZE,
    }
    assert rig.scheduler.hit_sources(request, 4 * SIZE) == sources


@pytest.mark.parametrize("wanted", [True, False])
def test_blocks_of_a_shared_store_are_named_to_a_daemon_that_publishes_events(rig: Rig, wanted: bool) -> None:
    """A store names them; the daemon has them, so that nothing is copied. Without events there is nothing to name."""
    request = rig.add("a", 6)
    request.all_token_ids, request.cache_salt, request.prompt_embeds = list(range(6 * SIZE + 1)), None, None
    rig.cache.below_blocks, rig.cache.shared_blocks, rig.cache.wants_events = 4, 2, wanted
    rig.go_on()
    assert rig.scheduler.matched_tokens(request, 0) == 6 * SIZE
    rig.load(request, 6 * SIZE)
    rig.step()
    rig.scheduler.loads_ended({"a"}, False)
    request.num_computed_tokens = 6 * SIZE
    stores = rig.step({"a": 1}, [request]).fresh
    if not wanted:
        assert stores == []
        return
    [store] = stores
    assert [run.block_ids for run in store.runs] == [[4, 5]]
    assert store.events is not None
    assert store.events.hashes == [maybe_convert_block_hash(request.block_hashes[place]) for place in (4, 5)]
    assert unpack_indices(store.events.tokens).tolist() == list(range(4 * SIZE, 6 * SIZE))


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
        ({"tiercache": {"stored": 8}}, None),
        ({"tiercache": {"stored": 8, "priority": "low"}}, tiercache.Hint(priority=Priority.LOW)),
        ({"other": 1}, None),
        (["tiercache"], None),
    ],
)
def test_what_a_request_says_goes_with_the_next_step(rig: Rig, parameters: Any, hint: tiercache.Hint | None) -> None:
    request = rig.add("a", 2)
    request.kv_transfer_params = parameters
    rig.go_on()
    rig.scheduler.matched_tokens(request, 0)
    rig.scheduler.allocated(request, SimpleNamespace(blocks=[]), 0)
    request.num_computed_tokens = 2 * SIZE
    rig.scheduler.finished(request)
    assert [each.hint for each in rig.step().hints] == ([hint] if hint else [])
    assert not rig.step().hints


def test_a_request_waits_for_what_another_engine_is_storing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "STORED_WAIT_S", PATIENCE_S)
    rig.cache.found_blocks = 1
    request = rig.add("a", 4, transfer={"tiercache": {"stored": 3 * SIZE}})
    rig.go_on()
    for _ in range(3):  # lookups, each of which finds too little
        looked = len(rig.cache.found)
        wait_until(lambda looked=looked: rig.scheduler.matched_tokens(request, 0) or len(rig.cache.found) > looked)
        rig.looked_up()
    rig.cache.found_blocks = 3
    assert rig.answer(request) == 3 * SIZE
    rig.load(request, 3 * SIZE)
    rig.scheduler.finished(request)
    rig.step()
    rig.looked_up()
    assert rig.cache.released.count(rig.cache.found[0]) == 1
    assert len(rig.cache.released) == len(rig.cache.found) - 1  # all but that of the load, which is under way


def test_a_request_does_not_wait_long_for_another_engine(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "STORED_WAIT_S", 0.05)
    rig.cache.found_blocks = 1
    request = rig.add("a", 4, transfer={"tiercache": {"stored": 1 << 40}})
    rig.go_on()
    assert rig.answer(request) == SIZE


def test_a_request_does_not_wait_for_a_block_that_is_computed_in_any_case(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "STORED_WAIT_S", PATIENCE_S)
    rig.scheduler._engine = dataclasses.replace(rig.scheduler._engine, leaves_last=True)
    request = rig.add("a", 3, transfer={"tiercache": {"stored": 3 * SIZE}}, rest=0)
    rig.go_on()
    assert rig.scheduler.matched_tokens(request, 0) == 2 * SIZE


def test_a_request_that_waits_asks_less_and_less_often(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, asked_ms = 100.0, []
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: now_s))
    rig.cache.found_blocks = 1
    request = rig.add("a", 2, transfer={"tiercache": {"stored": 2 * SIZE}})
    rig.go_on()
    for ms in range(300):
        now_s, before = 100 + ms / 1000, len(rig.cache.found)
        assert rig.scheduler.matched_tokens(request, 0) is None
        rig.looked_up()
        asked_ms += [ms] * (len(rig.cache.found) - before)
    assert asked_ms[0] < 10
    assert len(asked_ms) < 10
    assert 40 < asked_ms[-1] - asked_ms[-2] < 60
    rig.scheduler.finished(request)
    rig.step()
    rig.looked_up()
    assert rig.cache.released == rig.cache.found, "each once"


@pytest.mark.parametrize("stored", [-1, 0, True, "8", 8.0, None, [8]])
def test_a_number_that_makes_no_sense_is_not_waited_for(rig: Rig, stored: Any) -> None:
    rig.cache.found_blocks = 0
    request = rig.add("a", 2, transfer={"tiercache": {"stored": stored}})
    rig.go_on()
    assert rig.scheduler.matched_tokens(request, 0) == 0


@pytest.mark.parametrize(
    ("parameters", "answer"),
    [
        ({"do_remote_decode": True}, {"tiercache": {"stored": 2 * SIZE}}),
        ({"tiercache": {}}, {"tiercache": {"stored": 2 * SIZE}}),
        ({"do_remote_decode": False}, None),
        (None, None),
    ],
)
def test_an_answer_says_how_much_is_stored_if_it_is_asked(rig: Rig, parameters: Any, answer: Any) -> None:
    request = rig.add("a", 2, transfer=parameters)
    rig.cache.found_blocks = 0
    rig.go_on()
    rig.answer(request)
    rig.load(request, 0)
    rig.step({"a": 2 * SIZE + 1}, [request])
    request.num_computed_tokens = 2 * SIZE + 1
    assert rig.scheduler.finished(request) == answer
