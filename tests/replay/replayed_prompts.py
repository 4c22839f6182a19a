"""Prompts that the quick engine of a replay and the daemon's own cache both play."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tiercache.daemon.policies import Maker
from tiercache.protocol.messages import KEY_BYTES
from tiercache.replay.fast_cache import FastCache
from tiercache.replay.requests import TraceRequest, chain_keys, plain_spec
from tiercache.replay.simulation import Simulation, Sizes

BLOCK_BYTES = 64 << 20
"""Blocks so large that the daemon has one write under way at a time: it writes smaller ones in batches."""
TOKENS = 16
SPEC = plain_spec(TOKENS, BLOCK_BYTES)


def keys_of(ids: Sequence[int]) -> set[bytes]:
    """The keys of a chain, one by one."""
    keys = chain_keys(ids)
    return {keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)}


def ask(time_s: float, ids: Sequence[int], **more: Any) -> TraceRequest:
    return TraceRequest(time_s, chain_keys(ids), TOKENS * len(ids), **more)


def conversations(seed: int, requests: int = 200, pause_s: float = 0.2) -> Iterator[TraceRequest]:
    """A few conversations that grow turn by turn and share beginnings; now and then one is longer than DRAM."""
    chance, fresh = random.Random(seed), iter(range(1, 1 << 40))
    chats = [[next(fresh) for _ in range(chance.randint(0, 4))] for _ in range(5)]
    for number in range(requests):
        at = chance.randrange(len(chats))
        if chance.random() < 0.1:
            chats[at] = chats[chance.randrange(len(chats))][: chance.randint(0, 6)]
        longer = 60 if chance.random() < 0.02 else chance.randint(0, 5)
        chats[at] = chats[at] + [next(fresh) for _ in range(longer)]
        yield ask(number * pause_s, chats[at])
        if len(chats[at]) > 40:
            chats[at] = chats[at][: chance.randint(0, 10)]


def sizes(dram: int, nvme: int, policy: str = "lru", **more: Any) -> Sizes:
    """Sizes in blocks."""
    return replace(Sizes(dram * BLOCK_BYTES, nvme * BLOCK_BYTES, policy=policy), **more)


def plays_as_the_daemon(
    its: Sizes, policies: Mapping[str, Maker], prompts: Iterator[TraceRequest]
) -> tuple[FastCache, Simulation]:
    """The quick engine and the daemon's cache, after they gave the same answers and kept the same blocks."""
    fast, exact = FastCache(its, policies=policies), Simulation(its, {1: SPEC}, policies=policies)
    fast.declare(1, SPEC)
    for request in prompts:
        assert fast.play(request) == exact.play(request), f"request at {request.time_s}"
        assert fast.resident(1) == exact.resident(1), f"request at {request.time_s}"
    assert exact.check_integrity() == fast.check_integrity() == []
    return fast, exact


def decides_as_the_daemon(policy: str, dram: int, nvme: int, policies: Mapping[str, Maker]) -> None:
    fast, exact = plays_as_the_daemon(sizes(dram, nvme, policy), policies, conversations(1))
    assert fast.tallies() == exact.tallies()
    assert exact.tallies().dram_evicted > 0


def spends_a_write_budget_as_the_daemon(policy: str, policies: Mapping[str, Maker]) -> None:
    """With a budget that is too small the answers and the writes are the same."""
    day_bytes = 40 * 12 * BLOCK_BYTES  # 40 blocks in two hours
    written = []
    for budget_bytes in (day_bytes, 0):
        its = sizes(20, 60, policy, nvme_write_budget_bytes=budget_bytes)
        fast, exact = FastCache(its, policies=policies), Simulation(its, {1: SPEC}, policies=policies)
        fast.declare(1, SPEC)
        for request in conversations(3, pause_s=60):
            assert fast.play(request) == exact.play(request), f"request at {request.time_s}"
        assert fast.tallies().nvme_written == exact.tallies().nvme_written
        written.append(exact.tallies().nvme_written)
    assert 0 < written[0] < written[1]
