"""What was just stored is found, whatever the policy, and however fast the cache turns over."""

from __future__ import annotations

import random

import pytest
from cache_rig import SmallCache, branch

from tiercache.daemon.policies import POLICIES
from tiercache.daemon.policies.fresh_stores import SHARE
from tiercache.replay.requests import TraceRequest, chain_keys, plain_spec
from tiercache.replay.simulation import Simulation, Sizes

FRAMES = 120
BLOCK_BYTES = 64 << 20
LATEST = int(SHARE * FRAMES) // 4
"""Chains of four blocks that have to be there."""


def chains(count: int) -> list[list[bytes]]:
    return [branch(number % 250, number // 250, 1, 1) for number in range(count)]


@pytest.mark.parametrize(("asked", "step_s"), [("never", 1e-6), ("before", 30.0), ("after", 1e-6), ("both", 0.1)])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_stored_is_found_until_a_tenth_was_stored_after_it(policy: str, asked: str, step_s: float) -> None:
    h = SmallCache(frames=FRAMES, policy=policy)
    ns, all_of = h.space(), chains(80)
    for number, keys in enumerate(all_of):
        h.now_s += step_s
        if asked in ("before", "both"):
            h.length(ns, keys)
        h.store(ns, keys)
        assert [h.cache.peek([ns], one)[0] for one in all_of[max(0, number - LATEST) : number + 1]] == [4] * min(
            number + 1, LATEST + 1
        ), f"{number}"
        if asked in ("after", "both") and number >= LATEST:
            assert h.length(ns, all_of[number - LATEST]) == 4
    h.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_with_a_tier_below_it_is_found_in_one_of_the_two(policy: str) -> None:
    """DRAM may evict blocks that the tier below has, and that tier keeps them for as long."""
    sizes = Sizes(50 * BLOCK_BYTES, 200 * BLOCK_BYTES, policy=policy)
    engine, chance = Simulation(sizes, {1: plain_spec(16, BLOCK_BYTES)}), random.Random(3)
    stored: list[bytes] = []
    for number in range(400):
        again = chance.random() < 0.5
        ids = [chance.randrange(40), 7] if again else [1000 + number]
        found = engine.play(TraceRequest(0.001 * number, chain_keys(ids), 0))
        new = len(ids) - sum(found)
        stored = (stored + ([chain_keys(ids)[-16:]] if new else []))[-2:]  # of two blocks at most: five are a tenth
        dram, below = engine.resident(1)
        assert set(stored) <= dram | below, f"{number}"
    assert engine.tallies().dram_evicted > 100
    assert engine.check_integrity() == []
