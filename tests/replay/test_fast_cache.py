"""The quick engine of a replay, the daemon's own cache and a naive model: the same answers and the same blocks."""

from __future__ import annotations

import pytest
from replayed_prompts import (
    BLOCK_BYTES,
    SPEC,
    ask,
    conversations,
    decides_as_the_daemon,
    keys_of,
    plays_as_the_daemon,
    sizes,
    spends_a_write_budget_as_the_daemon,
)

from tiercache.daemon.policies import POLICIES
from tiercache.replay import fast_cache as fast_module
from tiercache.replay import simulation as simulation_module
from tiercache.replay.fast_cache import FastCache
from tiercache.replay.simulation import Simulation


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("dram", "nvme"), [(8, 0), (8, 40), (50, 20), (30, 60)])
def test_the_fast_cache_decides_as_the_daemon(policy: str, dram: int, nvme: int) -> None:
    decides_as_the_daemon(policy, dram, nvme, POLICIES)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_fast_cache_spends_a_write_budget_as_the_daemon(policy: str) -> None:
    spends_a_write_budget_as_the_daemon(policy, POLICIES)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("dram", "nvme", "headroom"), [(60, 60, 40), (60, 0, 20)])
def test_prompts_of_several_stores_are_kept_alike(
    policy: str, dram: int, nvme: int, headroom: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room is made between two stores of a prompt, while its end is kept."""
    monkeypatch.setattr(fast_module, "MAX_RESERVE", 3)
    monkeypatch.setattr(simulation_module, "MAX_RESERVE", 3)
    its = sizes(dram, nvme, policy, headroom_bytes=headroom * BLOCK_BYTES)
    plays_as_the_daemon(its, POLICIES, conversations(dram + headroom, 150))


def test_a_prompt_longer_than_dram_keeps_its_beginning() -> None:
    for engine in (Simulation(sizes(4, 0), {1: SPEC}), FastCache(sizes(4, 0))):
        engine.declare(1, SPEC)
        engine.play(ask(0.0, range(100, 110)))
        assert engine.resident(1)[0] == keys_of(range(100, 104))
        assert engine.tallies().refused == 6
