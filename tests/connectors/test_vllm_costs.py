"""Which hits are loaded and which are computed, by how long each has taken."""

from __future__ import annotations

import pytest

from tiercache.connectors.vllm.costs import ASK_AGAIN, LAST_LOADS, LEAST_SAMPLES, MEASURED_TOKENS, EngineCosts

SIZE = 16
STEP_TOKENS = 1600
BLOCK_S = 0.01
"""Seconds of prefill for a block in these tests."""


def measured(costs: EngineCosts, batches: int = 1) -> EngineCosts:
    """Costs after steps of one long prompt at a hundred blocks a second."""
    for step in range(LEAST_SAMPLES + batches):
        costs.stepped({"long": STEP_TOKENS}, STEP_TOKENS, step * BLOCK_S * STEP_TOKENS / SIZE)
    return costs


@pytest.fixture
def costs() -> EngineCosts:
    return measured(EngineCosts(SIZE))


def load(costs: EngineCosts, in_dram: int, below: int, seconds: float, times: int = LEAST_SAMPLES) -> None:
    for _ in range(times):
        costs.loaded(in_dram, below, seconds)


def test_all_is_loaded_while_nothing_is_known_of_prefill() -> None:
    costs = EngineCosts(SIZE)
    load(costs, 4, 4, 1000.0)
    assert costs.choose(4, 4) == 8


def test_all_is_loaded_while_too_little_is_known_of_loads(costs: EngineCosts) -> None:
    load(costs, 0, 8, 1000.0, LEAST_SAMPLES - 1)
    assert costs.choose(0, 8) == 8
    load(costs, 0, 8, 1000.0, 1)
    assert costs.choose(0, 8) == 0


def test_a_load_that_is_faster_than_prefill_is_done(costs: EngineCosts) -> None:
    load(costs, 8, 0, 7.9 * BLOCK_S)
    assert costs.choose(8, 0) == 8
    assert costs.declined_blocks == 0


def test_a_load_that_is_slower_is_not(costs: EngineCosts) -> None:
    load(costs, 8, 0, 8.1 * BLOCK_S)
    assert costs.choose(8, 0) == 0
    assert costs.declined_blocks == 8


def test_what_is_in_dram_is_loaded_without_the_rest_from_a_slow_disk(costs: EngineCosts) -> None:
    load(costs, 8, 0, 1 * BLOCK_S)
    load(costs, 8, 4, 6 * BLOCK_S)  # five for the four on the disk
    assert costs.choose(8, 4) == 8
    assert costs.declined_blocks == 4


def test_a_fast_start_does_not_pay_for_a_slow_end(costs: EngineCosts) -> None:
    """The whole is faster than computing it, but computing its end is faster still."""
    load(costs, 100, 0, 1 * BLOCK_S)
    load(costs, 100, 4, 6 * BLOCK_S)
    assert costs.choose(100, 4) == 100


def test_a_match_with_holes_is_loaded_whole_or_not_at_all() -> None:
    costs = measured(EngineCosts(SIZE, partial=False))
    load(costs, 8, 0, 1 * BLOCK_S)
    load(costs, 8, 4, 6 * BLOCK_S)
    assert costs.choose(8, 4) == 12
    load(costs, 8, 4, 30 * BLOCK_S, LAST_LOADS)
    assert costs.choose(8, 4) == 0


def test_short_loads_say_nothing_of_long_ones(costs: EngineCosts) -> None:
    load(costs, 2, 0, 100 * BLOCK_S)
    assert (costs.choose(2, 0), costs.choose(200, 0)) == (0, 200)


def test_one_slow_load_of_many_changes_nothing(costs: EngineCosts) -> None:
    load(costs, 8, 0, 1 * BLOCK_S)
    load(costs, 8, 0, 1000.0, 1)
    assert costs.choose(8, 0) == 8


def test_what_was_slow_is_asked_again_and_loaded_when_it_is_fast(costs: EngineCosts) -> None:
    load(costs, 0, 8, 1000.0, LAST_LOADS)
    loads = 0
    for _ in range(LAST_LOADS * ASK_AGAIN):
        if costs.choose(0, 8):
            loads += 1
            load(costs, 0, 8, 1 * BLOCK_S, 1)
    assert loads > LAST_LOADS  # more than were asked for: it is trusted again
    assert costs.choose(0, 8) == 8


def test_the_time_in_which_an_engine_was_idle_is_not_that_of_a_step() -> None:
    costs = EngineCosts(SIZE)
    for number in range(20):
        costs.stepped({f"one step {number}": STEP_TOKENS}, STEP_TOKENS, 1000.0 * number)
    load(costs, 0, 8, 100.0)
    assert costs.choose(0, 8) == 8


def test_short_steps_say_nothing_of_prefill() -> None:
    costs = EngineCosts(SIZE)
    for number in range(20):
        costs.stepped({"decode": 1}, MEASURED_TOKENS - 1, 0.001 * number)
    load(costs, 0, 8, 100.0)
    assert costs.choose(0, 8) == 8


@pytest.mark.parametrize("batches", [1, 2, 4])
def test_with_steps_in_flight_the_time_is_that_of_the_oldest(batches: int) -> None:
    """A long step among short ones; each step is scheduled when the step `batches` before it has ended."""
    costs = EngineCosts(SIZE, batches)
    now_s = 0.0
    flight: list[int] = []
    for number in range(40):
        if len(flight) == batches:
            now_s += flight.pop(0) / SIZE * BLOCK_S
        tokens = STEP_TOKENS if number % 5 == 0 else 1
        costs.stepped({"long": tokens}, tokens, now_s)
        flight.append(tokens)
    load(costs, 0, 8, 7.9 * BLOCK_S)
    load(costs, 0, 4, 4.1 * BLOCK_S)
    assert (costs.choose(0, 8), costs.choose(0, 4)) == (8, 0)
