"""Load or recompute: the estimates, the choice, and that neither stays wrong."""

from __future__ import annotations

import math

import pytest

from tiercache.connector.costs import CostModel, FittedLine, LoadChoice, Reach

BLOCK_BYTES = 64 << 10


def model_of(token_s: float = 0.001, per_context_s: float = 0.0) -> CostModel:
    """A model whose computing has been measured: blocks of 16 tokens."""
    cost = CostModel(16, BLOCK_BYTES)
    for context in (256, 2048, 4096) * 8:
        cost.note_prefill(512, context, 512 * (token_s + per_context_s * context))
    return cost


def choose_all(cost: CostModel, blocks: int, nvme: int = 0, shared: int = 0, queue_s: float = 0.0) -> LoadChoice:
    """The choice for a match of `blocks` blocks with nothing in the pool."""
    local = blocks - shared
    dram = local - nvme
    return cost.choose(0, [Reach(dram, dram), Reach(local, dram, nvme), Reach(blocks, dram, nvme, shared)], queue_s)


def note(cost: CostModel, choice: LoadChoice, seconds: float) -> None:
    cost.note_load(choice, seconds, waited_s=seconds)


def test_a_line_is_what_it_was_given_until_there_are_samples_of_which_old_ones_fade() -> None:
    line = FittedLine(1.0, 0.25, spread=4.0)
    assert line.at(8.0) == 3.0
    line.add(100.0, 60.0)
    assert [line.at(100.0), line.at(104.0)] == pytest.approx([60.0, 61.0]), "its slope is kept for one place"
    for _ in range(30):
        line.add(100.0, 5.0)
    assert line.at(100.0) == pytest.approx(5.0, rel=0.02)
    steep = FittedLine(0.0, 0.0, spread=1.0)
    steep.add(10.0, 1.0)
    steep.add(20.0, 9.0)
    assert all(steep.at(x) >= 0 for x in (0.0, 1.0, 10.0, 1000.0)), "no time is less than nothing"


def test_steps_that_did_not_wait_for_the_device_count_with_the_one_that_did() -> None:
    cost = CostModel(16, BLOCK_BYTES)
    cost.note_step([(0, 512)], 0.1, waited=False)
    cost.note_step([(512, 1024), (9, 10)], 0.1, waited=False)
    assert cost.prefill_s(0, 512) == math.inf
    cost.note_step([(7, 8)], 0.824, waited=True)
    assert cost.prefill_s(0, 1024) == pytest.approx(1.024)
    cost.note_step([(8, 9)], 5.0, waited=True)  # only decoded
    assert cost.prefill_s(0, 1024) == pytest.approx(1.024)


def test_everything_is_loaded_until_computing_has_been_measured() -> None:
    cost = CostModel(16, BLOCK_BYTES)
    for _ in range(50):
        note(cost, LoadChoice(100, 100), 1000.0)
    choice = choose_all(cost, 100)
    assert (choice.blocks, choice.end, choice.saved_s) == (100, 100, math.inf)
    assert cost.loads_avoided == 0


def test_a_load_that_came_short_is_no_proof_of_speed() -> None:
    cost = model_of()
    cost.note_miss(choose_all(cost, 64), 1.0, 1.0)
    assert cost.load_s(64, 0) == 0, "it was never tried"
    note(cost, LoadChoice(64, 64), 0.01)
    before = cost.load_s(64, 0)
    cost.note_miss(choose_all(cost, 64), 1e-9, 1e-9)
    assert cost.load_s(64, 0) == before
    cost.note_miss(choose_all(cost, 64), 1.0, 1.0)
    assert cost.load_s(64, 0) > before


def test_one_stall_does_not_turn_a_fast_tier_off() -> None:
    cost = model_of()
    for blocks in (8, 64, 256) * 5:
        note(cost, LoadChoice(blocks, blocks), 0.001 + blocks * 1e-5)
    note(cost, LoadChoice(32, 32), 60.0)
    for blocks in (32, 64, 512):
        assert choose_all(cost, blocks).end == blocks


def test_only_what_reaches_further_than_the_pool_is_loaded() -> None:
    cost = model_of()
    choice = cost.choose(kept=32, reaches=[Reach(64, 24), Reach(96, 30, 26)], queue_s=0.0)
    assert (choice.blocks, choice.end, choice.nvme_blocks, choice.dram_blocks) == (56, 96, 26, 30)
    nothing = cost.choose(kept=32, reaches=[Reach(32, 0)], queue_s=0.0)
    assert (nothing.blocks, nothing.end) == (0, 32)
    assert cost.loads_avoided == 0


def test_patience_is_what_computing_would_take() -> None:
    cost = model_of()
    assert cost.patience_s(LoadChoice(64, 64, load_s=0.01, saved_s=1.0)) == 1.0
    assert cost.patience_s(LoadChoice(1, 1, load_s=0.001, saved_s=0.01)) == 0.25
    assert cost.patience_s(LoadChoice(64, 64, saved_s=math.inf)) == math.inf


def test_prefill_takes_longer_in_a_long_context() -> None:
    cost = model_of(0.001, 1e-6)
    assert cost.prefill_s(0, 512) == pytest.approx(512 * (0.001 + 256e-6), rel=0.02)
    assert cost.prefill_s(7680, 8192) == pytest.approx(512 * (0.001 + 7936e-6), rel=0.02)
    assert cost.prefill_s(0, 8192) == pytest.approx(cost.prefill_s(0, 4096) + cost.prefill_s(4096, 8192))


def test_loads_that_queue_behind_others_count_those_too() -> None:
    cost = model_of()
    assert choose_all(cost, 4, queue_s=10.0).end == 0
    assert choose_all(cost, 1024, queue_s=10.0).end == 1024


def test_a_step_that_compiles_or_stalls_is_soon_forgotten() -> None:
    cost = CostModel(16, BLOCK_BYTES)
    cost.note_prefill(512, 0, 20.0)
    for _ in range(2):
        cost.note_prefill(200, 0, 0.2)
    assert cost.prefill_s(0, 1000) == pytest.approx(1.0)
    cost.note_prefill(8192, 0, 1000.0)
    assert cost.prefill_s(0, 1000) < 4.0
    cost.note_prefill(8192, 0, 1000.0)
    assert cost.prefill_s(0, 1000) > 10.0


def test_each_tier_is_charged_for_its_own_blocks() -> None:
    cost = model_of()
    for choice, seconds in (
        (LoadChoice(100, 100), 1.0),
        (LoadChoice(110, 100, nvme_blocks=10), 1.0 + 0.5),
        (LoadChoice(120, 100, nvme_blocks=10, shared_blocks=10), 1.0 + 0.5 + 2.0),
    ):
        for _ in range(20):
            note(cost, choice, seconds)
    each = [cost.load_s(100), cost.load_s(0, 10), cost.load_s(0, 0, 10)]
    assert each == pytest.approx([1.0, 0.5, 2.0], rel=0.1)
