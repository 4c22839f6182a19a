"""Which hits vLLM loads and which it computes, by how long its steps and loads have taken."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tiercache.connectors.vllm.costs import EngineCosts, TierBlocks, tiers_of

SIZE = 16
BLOCK_BYTES = 1 << 10
STEP_TOKENS = 1600
BLOCK_S = 0.01
"""Seconds of prefill for a block in these tests."""


def measured(**how: Any) -> EngineCosts:
    """Costs after steps of one long prompt at a hundred blocks a second."""
    costs = EngineCosts(SIZE, BLOCK_BYTES, **how)
    for step in range(4):
        costs.stepped({"long": STEP_TOKENS}, STEP_TOKENS, step * BLOCK_S * STEP_TOKENS / SIZE)
    return costs


def load(costs: EngineCosts, dram: int, nvme: int, seconds: float, shared: int = 0) -> None:
    for _ in range(10):
        costs.loaded(TierBlocks(dram, nvme, shared), seconds)


def choose(costs: EngineCosts, dram: int, nvme: int = 0, shared: int = 0) -> int:
    return costs.choose(TierBlocks(dram, nvme, shared))


def test_what_a_slow_tier_has_is_computed_until_that_tier_is_fast(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    costs = measured()
    load(costs, 8, 0, 1 * BLOCK_S)
    load(costs, 8, 4, 2 * BLOCK_S)
    load(costs, 8, 4, 8 * BLOCK_S, shared=4)  # six for the four in the store
    assert [choose(costs, 8, 4, 4) for _ in range(3)] == [12] * 3
    assert costs.declined_blocks == 12
    assert [choose(costs, 8, 4), choose(costs, 0, 4), choose(costs, 0, 0, 4)] == [12, 4, 0]
    [line] = caplog.messages
    assert line.startswith("4 blocks from the shared store take ")
    assert 4 in [choose(costs, 0, 0, 4) for _ in range(20)], "it is tried again"
    load(costs, 0, 0, 1 * BLOCK_S, shared=4)
    assert choose(costs, 0, 0, 4) == 4


@pytest.mark.parametrize("blocks", [(8, 0, 0), (8, 4, 0), (8, 4, 4)])
def test_a_tier_that_was_never_tried_is_tried(blocks: tuple[int, int, int]) -> None:
    """However fast computing is: else it would be avoided for ever."""
    costs = EngineCosts(SIZE, 1 << 30)
    for step in range(4):
        costs.stepped({"long": STEP_TOKENS}, STEP_TOKENS, step * 1e-6)
    assert choose(costs, *blocks) == sum(blocks)


def test_loads_that_fail_at_once_do_not_make_a_slow_tier_fast() -> None:
    costs = measured()
    load(costs, 0, 8, 100 * BLOCK_S)
    for _ in range(20):
        costs.loaded(TierBlocks(0, 8), 0.001, failed=True)
    assert choose(costs, 0, 8) == 0


def test_a_slow_tier_makes_no_other_one_look_fast(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    costs = measured(partial=False)
    load(costs, 8, 0, 4 * BLOCK_S)
    load(costs, 8, 8, 1000 * BLOCK_S)
    assert {choose(costs, 8, 8) for _ in range(20)} == {0}
    assert [line.split(" take ")[0] for line in caplog.messages] == ["8 blocks from NVMe"]
    for _ in range(3):
        load(costs, 8, 8, 11 * BLOCK_S)
    assert choose(costs, 8, 8) == 16


def test_a_match_with_holes_is_loaded_whole_or_not_at_all() -> None:
    costs = measured(partial=False)
    load(costs, 8, 0, 1 * BLOCK_S)
    load(costs, 8, 4, 6 * BLOCK_S)
    assert choose(costs, 8, 4) == 12
    load(costs, 8, 4, 30 * BLOCK_S)
    assert choose(costs, 8, 4) == 0


@pytest.mark.parametrize("batches", [1, 2])
def test_the_time_in_which_an_engine_was_idle_is_not_that_of_a_step(batches: int) -> None:
    """After it the first steps are scheduled at once, as many as may be in flight."""
    costs = EngineCosts(SIZE, BLOCK_BYTES, batches)
    for number in range(20 * batches):
        costs.stepped({f"r{number // batches}": STEP_TOKENS}, STEP_TOKENS, 1000.0 * (number // batches))
    load(costs, 0, 8, 100.0)
    assert choose(costs, 0, 8) == 8


@pytest.mark.parametrize("batches", [1, 2, 4])
def test_with_steps_in_flight_the_time_is_that_of_the_oldest(batches: int) -> None:
    """A long step among short ones; each step is scheduled when the step `batches` before it has ended."""
    costs = EngineCosts(SIZE, BLOCK_BYTES, batches)
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
    assert (choose(costs, 0, 8), choose(costs, 0, 4)) == (8, 0)


@pytest.mark.parametrize(
    ("first", "end", "tiers"),
    [
        (0, 10, (4, 3, 3)),
        (2, 10, (2, 3, 3)),
        (4, 10, (0, 3, 3)),
        (5, 10, (0, 2, 3)),
        (8, 10, (0, 0, 2)),
        (0, 3, (3, 0, 0)),
        (3, 6, (1, 2, 0)),
    ],
)
def test_blocks_of_a_match_are_in_the_tier_that_has_them(first: int, end: int, tiers: tuple[int, int, int]) -> None:
    match: Any = SimpleNamespace(blocks=10, below_blocks=6, shared_blocks=3)
    assert tiers_of(match, first, end) == tiers
