"""Work and times of one prompt, with a cache and without."""

from __future__ import annotations

import pytest

from tiercache.plan.model import load_model
from tiercache.replay.estimate import Costs, Estimate
from tiercache.replay.requests import TraceRequest, chain_keys
from tiercache.replay.simulation import Outcome

MODEL = load_model("Llama-3.1-8B")
PROMPT = TraceRequest(0.0, chain_keys(range(8)), 8 * 512)
BLOCK_BYTES = 512 * 1e5


def test_work_and_times_of_one_prompt() -> None:
    estimate = Estimate(Costs(MODEL, flops_per_s=1e15, dram_bytes_per_s=1e10, nvme_bytes_per_s=1e9))
    for tokens in (1, 600, 4096):
        assert estimate.prefill_flops(tokens) == pytest.approx(MODEL.prefill_flops(tokens))
    estimate.add(PROMPT, 512, 1e5, 1, Outcome(3, 2))
    whole, own, hit = (MODEL.prefill_flops(512 * blocks) for blocks in (8, 1, 5))
    assert (estimate.flops, estimate.saved_flops) == (pytest.approx(whole), pytest.approx(hit))
    assert estimate.without.mean_s == pytest.approx((whole - own) / 1e15)
    loads_s = 2 * BLOCK_BYTES / 1e10 + 2 * BLOCK_BYTES / 1e9
    assert estimate.with_cache.mean_s == pytest.approx(loads_s + (whole - hit) / 1e15)
    assert estimate.with_cache.percentile_s(0.5) == pytest.approx(estimate.with_cache.mean_s, rel=0.01)
    saved = estimate.saved_flops
    estimate.add(PROMPT, 512, 1e5, 0, Outcome(8, 0))
    assert estimate.saved_flops < saved + whole, "the last token is computed all the same"


def test_a_shared_store_is_asked_over_a_network() -> None:
    costs = Costs(MODEL, 1e15, 1e10, 1e9, shared_bytes_per_s=1e8, shared_round_trip_s=0.25)
    far = Estimate(costs, shared=True)
    far.add(PROMPT, 512, 1e5, 1, Outcome(3, 2, 2))
    whole, hit = (MODEL.prefill_flops(512 * blocks) for blocks in (8, 7))
    assert far.saved_flops == pytest.approx(hit)
    loads_s = 2 * BLOCK_BYTES / 1e10 + 2 * BLOCK_BYTES / 1e9 + 2 * BLOCK_BYTES / 1e8 + 2 * 0.25
    assert far.with_cache.mean_s == pytest.approx(loads_s + (whole - hit) / 1e15)
