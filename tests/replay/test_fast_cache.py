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


class Naive:
    """Leaf LRU in the plainest way: keys with the time of their last use."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.used: dict[bytes, int] = {}
        self.parent: dict[bytes, bytes] = {}
        self.clock = 0

    def touch(self, key: bytes) -> None:
        self.clock += 1
        self.used[key] = self.clock

    def evict(self, keep: bytes) -> bool:
        leaves = set(self.used) - {self.parent.get(key, b"") for key in self.used} - {keep}
        if not leaves:
            return False
        coldest = min(leaves, key=lambda key: self.used[key])
        stamp, above = self.used.pop(coldest), self.parent.get(coldest, b"")
        if above in self.used:
            self.used[above] = max(self.used[above], stamp)
        return True

    def play(self, keys: bytes) -> int:
        chain = [keys[at : at + 16] for at in range(0, len(keys), 16)]
        self.parent.update(zip(chain[1:], chain, strict=False))
        found = next((number for number, key in enumerate(chain) if key not in self.used), len(chain))
        if found:
            self.touch(chain[found - 1])
        for at in range(found, len(chain)):
            if len(self.used) == self.blocks and not self.evict(chain[at - 1] if at else b""):
                break
            self.touch(chain[at])
        return found


@pytest.mark.parametrize("seed", range(3))
def test_dram_alone_is_what_a_naive_model_says(seed: int) -> None:
    """Hits may differ by a few: within 64 stamps the daemon's order is that of arrival, for the sake of speed."""
    fast, naive, hits, naive_hits = FastCache(sizes(25, 0)), Naive(25), 0, 0
    fast.declare(1, SPEC)
    for request in conversations(seed):
        hits += fast.play(request).dram
        naive_hits += naive.play(request.keys)
    assert naive_hits > 0
    assert abs(hits - naive_hits) <= 0.05 * naive_hits


def test_a_prompt_longer_than_dram_keeps_its_beginning() -> None:
    for engine in (Simulation(sizes(4, 0), {1: SPEC}), FastCache(sizes(4, 0))):
        engine.declare(1, SPEC)
        engine.play(ask(0.0, range(100, 110)))
        assert engine.resident(1)[0] == keys_of(range(100, 104))
        assert engine.tallies().refused == 6
