"""Traces of requests as chains of blocks: read from files, or made; and LRU caches of any size played on them.

A trace file is JSON lines, packed or not: `timestamp` in ms and `hash_ids`, the ids of a prompt's blocks, each of which
stands for all before it too (the format of Mooncake's traces, kvcache-ai/Mooncake). TIERCACHE_TRACES names a directory.
"""

from __future__ import annotations

import gzip
import json
import os
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import NamedTuple

SUFFIXES = (".jsonl", ".jsonl.gz")


class Request(NamedTuple):
    """A prompt: when it came, and its blocks."""

    time_s: float
    blocks: tuple[int, ...]


FOLDER = os.environ.get("TIERCACHE_TRACES")


def trace_files(folder: str | None = FOLDER) -> list[Path]:
    """All traces in the directory; empty without one."""
    return sorted(path for path in Path(folder).iterdir() if path.name.endswith(SUFFIXES)) if folder else []


def read_trace(path: Path) -> list[Request]:
    """The requests of a file, in the order of its lines."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        rows = [json.loads(line) for line in lines]
    return [Request(row["timestamp"] / 1000, tuple(row["hash_ids"])) for row in rows]


def made_up_trace(seed: int, requests: int = 3000) -> list[Request]:
    """Conversations that share a few system prompts, grow from turn to turn, come in bursts and end at last.

    Some 40 blocks a request; the popularity of conversations is uneven, as it is in production traces.
    """
    chance, fresh = random.Random(seed), count()

    def more(blocks: int) -> tuple[int, ...]:
        return tuple(next(fresh) for _ in range(blocks))

    systems = [more(chance.randint(1, 12)) for _ in range(5)]
    open_chats: list[tuple[int, ...]] = []
    trace, time_s = [], 0.0
    for _ in range(requests):
        time_s += chance.expovariate(2.0)
        if not open_chats or chance.random() < 0.12:
            chat = chance.choice(systems)
        else:  # the newest are the likeliest, and an old one comes back now and then
            chat = open_chats.pop(-min(len(open_chats), 1 + int(chance.paretovariate(0.6))))
        chat += more(1 + int(chance.expovariate(1 / 6)))
        trace.append(Request(time_s, chat))
        if chance.random() > 0.1:
            open_chats.append(chat)
    return trace


def lru_hits(trace: Sequence[Request], size_blocks: int) -> int:
    """Hits of an LRU cache that evicts leaves first and stores all that it is asked for: blocks of leading runs."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in trace:
        run = 0
        for block in request.blocks:
            if block not in cache:
                break
            run += 1
        hits += run
        for block in reversed(request.blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > size_blocks:
            cache.popitem(last=False)
    return hits


def block_keys(seed: int) -> Callable[[Sequence[int]], bytes]:
    """Packed keys of blocks. Another seed gives other keys, and so another sample."""
    known: dict[int, bytes] = {}

    def key(block: int) -> bytes:
        if block not in known:
            known[block] = blake2b(b"%d %d" % (seed, block), digest_size=16).digest()
        return known[block]

    return lambda blocks: b"".join(map(key, blocks))


def unique_blocks(trace: Sequence[Request]) -> int:
    """How many different blocks are asked for."""
    return len({block for request in trace for block in request.blocks})


def asked_blocks(trace: Sequence[Request]) -> Iterator[int]:
    """How many blocks each request asks for."""
    return (len(request.blocks) for request in trace)
