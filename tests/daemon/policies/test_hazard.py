"""What keeping a block is worth: what the policy learns from requests, and which block it evicts first."""

from __future__ import annotations

import numpy as np
import pytest
from chains import chain_of

from tiercache.daemon.policies import predictor as predicting
from tiercache.daemon.policies.predictor import Predictor
from tiercache.daemon.policies.turnover import Turnover
from tiercache.daemon.policies.worths import (
    AGES,
    FIRST_AGE,
    indices,
)
from tiercache.protocol.messages import KEY_BYTES
from tiercache.replay.requests import TraceRequest, plain_spec
from tiercache.replay.simulation import Simulation, Sizes

BLOCK_BYTES = 4096
TOKENS = 16


def test_the_index_is_the_best_rate_of_any_stay() -> None:
    chance = np.random.default_rng(1)
    hazards = chance.random((5, AGES)) * chance.random((5, 1))
    widths = np.diff(np.concatenate([[0.0], FIRST_AGE * 2.0 ** (np.arange(AGES) / 2)]))
    found = indices(hazards)
    for row in range(5):
        for age in range(AGES):
            best, alive, hits, stay_s = 0.0, 1.0, 0.0, 0.0
            for bucket in range(age, AGES):
                hazard = hazards[row, bucket]
                stay_s += alive * widths[bucket] * (1 - hazard / 2)
                hits += alive * hazard
                alive *= 1 - hazard
                best = max(best, hits / stay_s)
            assert found[row, age] == pytest.approx(best)


def test_the_sample_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicting, "MAX_SAMPLES", 500)
    turnover = Turnover(lambda: 0.0)
    turnover.room_bytes = lambda: 1000  # blocks of a byte each
    learning = Predictor(turnover)
    for number in range(400):  # prompts that are asked for and then stored
        keys = chain_of(number, 20)
        learning.asked(keys, 0, 0)
        turnover.comes(20, stored=True)
        learning.stored(b"", [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)])
        assert learning.sampled[0] <= 500
    blocks, share = learning.sampled
    assert blocks > 100
    assert share == pytest.approx(blocks / 8000, rel=0.5)
    assert len(learning.expected) <= 500


def test_a_loop_larger_than_the_cache_has_hits() -> None:
    """LRU has no hit at all: it evicts the block that comes next."""
    hits, loop = {}, [chain_of(number, 10) for number in range(50)] * 20
    for policy in ("lru", "hazard"):
        sizes = Sizes(120 * BLOCK_BYTES, policy=policy, headroom_bytes=20 * BLOCK_BYTES)
        engine = Simulation(sizes, {1: plain_spec(TOKENS, BLOCK_BYTES)})
        asked = [TraceRequest(5.0 * number, keys, 10 * TOKENS) for number, keys in enumerate(loop)]
        hits[policy] = sum(engine.play(request).dram for request in asked)
        assert engine.check_integrity() == []
    assert hits["lru"] == 0
    assert hits["hazard"] > 0.6 * 100 * 19, "100 of 500 blocks can be kept for 19 laps"
