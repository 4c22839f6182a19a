"""The scheduler's half by itself: what becomes of lookups whose requests change their mind."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_rig import SIZE, Rig, adapter
from vllm.v1.request import RequestStatus
from vllm_engines import PATIENCE_S, wait_until

import tiercache
from tiercache.connectors.vllm.compat import CacheHitSource
from tiercache.connectors.vllm.costs import LAST_LOADS, LEAST_SAMPLES, TierBlocks
from tiercache.connectors.vllm.lookups import SLOW_LOOKUP_S
from tiercache.connectors.vllm.orders import WorkerReport
from tiercache.connectors.vllm.scheduler import DECLINED
from tiercache.protocol.messages import Priority

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


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
    rig.go_on()
    rig.scheduler.matched_tokens(request, 0)
    rig.scheduler.allocated(request, SimpleNamespace(blocks=[]), 0)
    request.num_computed_tokens = 2 * SIZE
    rig.scheduler.finished(request)
    assert [each.hint for each in rig.step().hints] == ([hint] if hint else [])
    assert not rig.step().hints
