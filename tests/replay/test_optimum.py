"""The offline optimum against all that a cache could do, on tiny traces; and against every policy."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations

import pytest
from replayed_prompts import SPEC, ask, sizes

from tiercache.daemon.policies import POLICIES
from tiercache.protocol.namespaces import NamespaceSpec
from tiercache.replay.optimum import Accesses
from tiercache.replay.played import play
from tiercache.replay.requests import RequestKind, TraceRequest


class Prompts(list[TraceRequest]):
    def __init__(self, chains: list[list[int]], kinds: list[RequestKind] | None = None) -> None:
        kinds = kinds or [RequestKind.ASK] * len(chains)
        both = enumerate(zip(chains, kinds, strict=True))
        super().__init__(ask(float(at), ids, kind=kind) for at, (ids, kind) in both)
        self.specs: dict[int, NamespaceSpec] = {1: SPEC}


def tiny(seed: int) -> list[list[int]]:
    """Chains in a small tree: a block's id names its way from the root."""
    chance = random.Random(seed)
    chains = []
    for _ in range(chance.randint(2, 7)):
        chain, node = [], 0
        for _ in range(chance.randint(1, 3)):
            node = 3 * node + chance.randint(1, 2)
            chain.append(node)
        chains.append(chain)
    return chains


def best_by_trying(chains: list[list[int]], capacity: int, counted: list[bool]) -> int:
    """The hits of the best choice, by trying every prefix-closed set of at most `capacity` blocks at each request."""
    parent = {block: before for chain in chains for block, before in zip(chain, [0, *chain], strict=False)}

    @cache
    def best(number: int, here: frozenset[int]) -> int:
        if number == len(chains):
            return 0
        run = 0
        for block in chains[number]:
            if block not in here:
                break
            run += 1
        could = sorted(here | set(chains[number]))
        kept = (
            frozenset(some)
            for size in range(min(capacity, len(could)) + 1)
            for some in combinations(could, size)
            if all(parent[block] in (0, *some) for block in some)
        )
        return run * counted[number] + max(best(number + 1, some) for some in kept)

    return best(0, frozenset())


@pytest.mark.parametrize("capacity", [1, 2, 3, 5])
def test_no_choice_of_what_to_keep_has_more_hits(capacity: int) -> None:
    for seed in range(25):
        chains = tiny(seed)
        best = best_by_trying(chains, capacity, [True] * len(chains))
        assert Accesses(Prompts(chains)).best_hits(capacity) == best, f"seed {seed}: {chains}"


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_has_more(policy: str) -> None:
    chance = random.Random(5)
    chats = [[1000 * chat + at for at in range(30)] for chat in range(20)]
    prompts = Prompts([chance.choice(chats)[: chance.randint(1, 30)] for _ in range(300)])
    accesses = Accesses(prompts)
    for blocks in (10, 50, 200):
        played = play(prompts, sizes(blocks, 3 * blocks, policy))
        assert 0 < played.tiers["dram"].blocks <= accesses.best_hits(blocks)
        assert sum(tier.blocks for tier in played.tiers.values()) <= accesses.best_hits(4 * blocks)
    assert accesses.asked_blocks == sum(prompt.blocks for prompt in prompts)
    assert accesses.best_hits(600) == accesses.asked_blocks - accesses.unique_blocks
