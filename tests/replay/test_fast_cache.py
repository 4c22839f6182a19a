"""The quick engine of a replay, the daemon's own cache and a naive model: the same answers and the same blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
from fast_and_exact import (
    BLOCK_BYTES,
    SPEC,
    TOKENS,
    ask,
    conversations,
    decides_as_the_daemon,
    sizes,
    spends_a_write_budget_as_the_daemon,
)

from tiercache.daemon.policies import POLICIES
from tiercache.protocol.namespaces import NamespaceSpec
from tiercache.replay import fast_cache as fast_module
from tiercache.replay import played as played_module
from tiercache.replay import simulation as simulation_module
from tiercache.replay.fast_cache import FastCache
from tiercache.replay.played import play
from tiercache.replay.requests import RequestKind, TraceRequest, chain_keys
from tiercache.replay.simulation import Outcome, Simulation, Sizes


@pytest.mark.parametrize(
    ("policy", "dram", "nvme"),
    [
        ("lru", 8, 0),
        ("lru", 30, 0),
        ("lru", 8, 40),
        ("hazard", 8, 40),
        ("lru", 50, 20),
        ("hazard", 50, 20),
        ("lru", 30, 60),
        ("hazard", 30, 60),
    ],
)
def test_the_fast_cache_decides_as_the_daemon(policy: str, dram: int, nvme: int) -> None:
    decides_as_the_daemon(policy, dram, nvme, POLICIES)


@pytest.mark.parametrize("policy", ["lru", "hazard"])
@pytest.mark.parametrize(("dram", "nvme", "headroom"), [(60, 60, 40), (60, 0, 20)])
def test_prompts_of_several_stores_are_kept_alike(
    policy: str, dram: int, nvme: int, headroom: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room is made between two stores of a prompt, while its end is kept."""
    monkeypatch.setattr(fast_module, "MAX_RESERVE", 3)
    monkeypatch.setattr(simulation_module, "MAX_RESERVE", 3)
    its = replace(sizes(dram, nvme, policy), headroom_bytes=headroom * BLOCK_BYTES)
    fast, exact = FastCache(its), Simulation(its, {1: SPEC})
    fast.declare(1, SPEC)
    for request in conversations(dram + headroom, 150):
        assert fast.play(request) == exact.play(request), f"request at {request.time_s}"
        assert fast.resident(1) == exact.resident(1), f"request at {request.time_s}"
    assert exact.check_integrity() == fast.check_integrity() == []


@pytest.mark.parametrize("policy", POLICIES)
def test_the_fast_cache_spends_a_write_budget_as_the_daemon(policy: str) -> None:
    spends_a_write_budget_as_the_daemon(policy, POLICIES)


class Naive:
    """Two tiers of leaf LRU in the plainest way: lists of blocks, oldest first. For `lru` alone."""

    def __init__(self, dram: int, nvme: int) -> None:
        self.most = {"dram": dram, "nvme": nvme}
        self.used: dict[str, dict[bytes, int]] = {"dram": {}, "nvme": {}}
        self.parent: dict[bytes, bytes] = {}
        self.clock = 0

    def run(self, tier: str, chain: list[bytes]) -> int:
        run = 0
        while run < len(chain) and chain[run] in self.used[tier]:
            run += 1
        return run

    def touch(self, tier: str, key: bytes) -> None:
        self.clock += 1
        self.used[tier][key] = self.clock

    def evict(self, tier: str, keep: bytes) -> bool:
        here = self.used[tier]
        leaves = set(here) - {self.parent.get(key, b"") for key in here} - {keep}
        if not leaves:
            return False
        coldest = min(leaves, key=lambda key: here[key])
        stamp, above = here.pop(coldest), self.parent.get(coldest, b"")
        if above in here:
            here[above] = max(here[above], stamp)
        return True

    def play(self, keys: bytes) -> Outcome:
        chain = [keys[at : at + 16] for at in range(0, len(keys), 16)]
        self.parent.update(zip(chain[1:], chain, strict=False))
        found = self.run("dram", chain)
        below = max(self.run("nvme", chain), found)
        if found:
            self.touch("dram", chain[found - 1])
        for at in range(found, below):
            self.touch("nvme", chain[at])
        for at in range(found, len(chain)):
            if len(self.used["dram"]) == self.most["dram"] and not self.evict("dram", chain[at - 1] if at else b""):
                break
            self.touch("dram", chain[at])
        return Outcome(found, below - found)


def test_dram_alone_is_what_a_naive_model_says() -> None:
    """Hits may differ by a few: within 64 stamps the daemon's order is that of arrival, for the sake of speed."""
    for seed in range(3):
        fast, naive, hits, naive_hits = FastCache(sizes(25, 0)), Naive(25, 0), 0, 0
        fast.declare(1, SPEC)
        for request in conversations(seed):
            hits += fast.play(request).dram
            naive_hits += naive.play(request.keys).dram
        assert naive_hits > 0
        assert abs(hits - naive_hits) <= 0.05 * naive_hits


def test_a_block_leaves_after_its_descendants_and_the_least_recent_chain_goes_first() -> None:
    a, b, c, d = [1, 2, 3], [11, 12, 13], [21, 22], [31]
    exact = Simulation(sizes(7, 0), {1: SPEC})
    for number, ids in enumerate((a, b, d, a, c)):
        exact.play(ask(float(number), ids))
    assert exact.resident(1)[0] == set(chunks(a) + chunks(b)[:1] + chunks(c) + chunks(d))
    assert exact.play(ask(9.0, a)) == Outcome(3, 0)
    assert exact.play(ask(9.0, b)) == Outcome(1, 0)


def test_what_dram_has_lost_comes_up_from_nvme() -> None:
    exact = Simulation(sizes(3, 20), {1: SPEC})
    for number, ids in enumerate(([1, 2, 3], [11, 12, 13])):
        assert exact.play(ask(float(number), ids)) == Outcome(0, 0)
    assert exact.play(ask(2.0, [1, 2, 3, 4])) == Outcome(0, 3)
    assert exact.play(ask(3.0, [1, 2])) == Outcome(2, 0)
    tallies = exact.tallies()
    assert (tallies.nvme_written, tallies.promoted, tallies.refused) == (6, 3, 1)


def test_a_prompt_longer_than_dram_keeps_its_beginning() -> None:
    for engine in (Simulation(sizes(4, 0), {1: SPEC}), FastCache(sizes(4, 0))):
        engine.declare(1, SPEC)
        engine.play(ask(0.0, range(100, 110)))
        assert engine.resident(1)[0] == set(chunks(range(100, 104)))
        assert engine.tallies().refused == 6


def test_looks_keeps_and_flushes_are_played_too() -> None:
    exact = Simulation(sizes(10, 40), {1: SPEC})
    keys = chain_keys([1, 2, 3, 4])
    assert exact.play(TraceRequest(0.0, keys, 0, kind=RequestKind.LOOK)) == Outcome(0, 0)
    assert exact.resident(1) == (set(), set())
    exact.play(TraceRequest(1.0, keys, 0, kind=RequestKind.KEEP))
    assert exact.play(TraceRequest(2.0, keys, 0, kind=RequestKind.LOOK)) == Outcome(4, 0)
    exact.play(TraceRequest(3.0, keys[:48], 0, kind=RequestKind.FORGET))
    assert exact.resident(1) == (set(chunks([1, 2])), set(chunks([1, 2])))
    exact.play(TraceRequest(4.0, b"", 0, kind=RequestKind.FORGET))
    assert exact.resident(1) == (set(), set())
    assert exact.check_integrity() == []


def test_a_look_at_what_another_daemon_had_stores_it() -> None:
    exact = Simulation(sizes(10, 0), {1: SPEC})
    exact.play(TraceRequest(0.0, chain_keys([1, 2, 3]), 0, kind=RequestKind.LOOK, had=(2, 0)))
    assert exact.resident(1)[0] == set(chunks([1, 2]))
    exact.play(TraceRequest(1.0, chain_keys([5, 6, 7]), 0, kind=RequestKind.KEEP, first=2))
    assert exact.resident(1)[0] == set(chunks([1, 2]) + chunks([5, 6, 7]))


def test_a_cache_begins_its_life_with_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace gives the times, not this machine's clock: policies that learn from ages would differ each time."""
    starts = []

    def made(its: Sizes, exact: bool, start_s: float) -> FastCache:
        starts.append(start_s)
        return FastCache(its, start_s)

    monkeypatch.setattr(played_module, "engine_for", made)
    prompts = Listed(request._replace(time_s=500.0 + request.time_s) for request in conversations(5, 20))
    play(prompts, sizes(30, 60, "hazard"))
    play(prompts, sizes(30, 60, "hazard"), start_s=480.0)
    assert starts == [500.0, 480.0]


class Listed(list[TraceRequest]):
    specs: ClassVar[dict[int, NamespaceSpec]] = {1: SPEC}


def test_hits_are_counted_by_tier_in_blocks_and_tokens() -> None:
    prompts = Listed(ask(float(at), ids) for at, ids in enumerate(([1, 2, 3], [11, 12, 13], [1, 2, 3], [1, 2, 3])))
    prompts.append(prompts[-1]._replace(input_tokens=3 * TOKENS + 5))
    played = play(prompts, sizes(3, 20), gpu_blocks=2, exact=True)
    assert (played.requests, played.asked_blocks, played.asked_tokens) == (5, 15, 15 * TOKENS + 5)
    assert {name: (tier.blocks, tier.tokens) for name, tier in played.tiers.items()} == {
        "gpu": (4, 4 * TOKENS),
        "dram": (2, 2 * TOKENS),
        "nvme": (3, 3 * TOKENS),
    }
    assert played.rate("gpu", "dram", "nvme") == pytest.approx(9 * TOKENS / (15 * TOKENS + 5))


def chunks(ids: Sequence[int]) -> list[bytes]:
    """The keys of a chain, one by one."""
    keys = chain_keys(ids)
    return [keys[at : at + 16] for at in range(0, len(keys), 16)]
