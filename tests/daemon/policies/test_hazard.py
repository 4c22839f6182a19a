"""What keeping a block is worth: what the policy learns from requests, and which block it evicts first."""

from __future__ import annotations

from dataclasses import replace

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
SPEC = plain_spec(TOKENS, BLOCK_BYTES)


ROOM = 1000
"""The capacity, in blocks of a byte each."""


class Learning:
    """A predictor, and prompts that are asked for and then stored."""

    def __init__(self) -> None:
        self.turnover = Turnover(lambda: 0.0)
        self.turnover.room_bytes = lambda: ROOM
        self.predictor = Predictor(self.turnover)

    def ask(self, keys: bytes, found: int = 0) -> None:
        blocks = len(keys) // KEY_BYTES
        self.predictor.asked(keys, found, found)
        self.go_on(blocks - found)
        new = [keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at in range(found, blocks)]
        if new:
            self.predictor.stored(keys[(found - 1) * KEY_BYTES : found * KEY_BYTES] if found else b"", new)

    def go_on(self, blocks: int) -> None:
        """A client stores that many blocks."""
        self.turnover.comes(blocks, stored=True)


def ask(time_s: float, keys: bytes) -> TraceRequest:
    return TraceRequest(time_s, keys, TOKENS * len(keys) // KEY_BYTES)


def sizes(dram: int, nvme: int, **others: object) -> Sizes:
    return replace(Sizes(dram * BLOCK_BYTES, nvme * BLOCK_BYTES, policy="hazard"), **others)  # type: ignore[arg-type]


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
    learning = Learning()
    for number in range(400):
        learning.ask(chain_of(number, 20))
        assert learning.predictor.sampled[0] <= 500
    blocks, share = learning.predictor.sampled
    assert blocks > 100
    assert share == pytest.approx(blocks / 8000, rel=0.5)
    assert len(learning.predictor.expected) <= 500


def loop(documents: int, blocks: int, laps: int) -> list[TraceRequest]:
    return [
        ask(5.0 * (lap * documents + number), chain_of(number, blocks))
        for lap in range(laps)
        for number in range(documents)
    ]


def test_a_loop_larger_than_the_cache_has_hits() -> None:
    """LRU has no hit at all: it evicts the block that comes next."""
    hits = {}
    for policy in ("lru", "hazard"):
        engine = Simulation(sizes(120, 0, policy=policy, headroom_bytes=20 * BLOCK_BYTES), {1: SPEC})
        hits[policy] = sum(engine.play(request).dram for request in loop(50, 10, 20))
        assert engine.check_integrity() == []
    assert hits["lru"] == 0
    assert hits["hazard"] > 0.6 * 100 * 19, "100 of 500 blocks can be kept for 19 laps"
