"""Prompts for replays."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tiercache.protocol.messages import KEY_BYTES
from tiercache.replay.requests import TraceRequest, chain_keys, plain_spec
from tiercache.replay.simulation import Sizes

BLOCK_BYTES = 64 << 20
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
