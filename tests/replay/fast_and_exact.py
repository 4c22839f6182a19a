"""Requests that the quick engine of a replay and the daemon's own cache both play."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from tiercache.daemon.policies import Maker
from tiercache.replay.fast_cache import FastCache
from tiercache.replay.requests import TraceRequest, chain_keys, plain_spec
from tiercache.replay.simulation import Simulation, Sizes

BLOCK_BYTES = 64 << 20
"""Blocks so large that the daemon has one write under way at a time: it writes smaller ones in batches."""
TOKENS = 16
SPEC = plain_spec(TOKENS, BLOCK_BYTES)


def ask(time_s: float, ids: Sequence[int]) -> TraceRequest:
    return TraceRequest(time_s, chain_keys(ids), TOKENS * len(ids))


def conversations(seed: int, requests: int = 200) -> Iterator[TraceRequest]:
    """A few conversations that grow turn by turn and share beginnings; now and then one is longer than DRAM."""
    chance, fresh = random.Random(seed), iter(range(1, 1 << 40))
    chats = [[next(fresh) for _ in range(chance.randint(0, 4))] for _ in range(5)]
    for number in range(requests):
        at = chance.randrange(len(chats))
        if chance.random() < 0.1:
            chats[at] = chats[chance.randrange(len(chats))][: chance.randint(0, 6)]
        longer = 60 if chance.random() < 0.02 else chance.randint(0, 5)
        chats[at] = chats[at] + [next(fresh) for _ in range(longer)]
        yield ask(number / 5, chats[at])
        if len(chats[at]) > 40:
            chats[at] = chats[at][: chance.randint(0, 10)]


def sizes(dram: int, nvme: int, policy: str = "lru", budget_bytes: int = 0) -> Sizes:
    return Sizes(dram * BLOCK_BYTES, nvme * BLOCK_BYTES, nvme_write_budget_bytes=budget_bytes, policy=policy)


def decides_as_the_daemon(policy: str, dram: int, nvme: int, policies: Mapping[str, Maker]) -> None:
    its = sizes(dram, nvme, policy)
    for seed in range(2):
        fast, exact = FastCache(its, policies=policies), Simulation(its, {1: SPEC}, policies=policies)
        fast.declare(1, SPEC)
        for request in conversations(seed):
            assert fast.play(request) == exact.play(request), f"seed {seed}, request at {request.time_s}"
            assert fast.resident(1) == exact.resident(1), f"seed {seed}, request at {request.time_s}"
        assert fast.tallies() == exact.tallies()
        assert exact.check_integrity() == fast.check_integrity() == []
        assert exact.tallies().dram_evicted > 0


def spends_a_write_budget_as_the_daemon(policy: str, policies: Mapping[str, Maker]) -> None:
    day_bytes = 40 * 12 * BLOCK_BYTES  # 40 blocks in two hours
    limited = sizes(20, 60, policy, day_bytes)
    fast, exact = FastCache(limited, policies=policies), Simulation(limited, {1: SPEC}, policies=policies)
    fast.declare(1, SPEC)
    for request in conversations(3):
        assert fast.play(request._replace(time_s=300 * request.time_s)) == exact.play(
            request._replace(time_s=300 * request.time_s)
        )
    unlimited = FastCache(sizes(20, 60, policy), policies=policies)
    unlimited.declare(1, SPEC)
    for request in conversations(3):
        unlimited.play(request)
    assert 0 < fast.tallies().nvme_written == exact.tallies().nvme_written < unlimited.tallies().nvme_written
