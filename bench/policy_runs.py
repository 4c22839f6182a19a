"""Traces as bench_policies.py plays them: as they are, faster, or in shorter blocks; and the cache that plays them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

import numpy as np
from common import ROOT
from policies import ALL

from tiercache.protocol.messages import KEY_BYTES
from tiercache.protocol.namespaces import NamespaceSpec
from tiercache.replay.formats.mooncake import Mooncake
from tiercache.replay.formats.trace import Trace
from tiercache.replay.played import Played, Requests, engine_for, play
from tiercache.replay.requests import TraceRequest
from tiercache.replay.simulation import Sizes

NVME_TIMES = 5
BLOCK_BYTES = 4 << 20
"""What replays take larger blocks for; 512 tokens of an 8B model have 64 MiB."""
SAMPLE = ROOT / "tests" / "replay" / "sample.jsonl.gz"


def open_trace(path: Path) -> Trace:
    return Trace(path, [Mooncake()], lambda tokens: BLOCK_BYTES)


class Faster:
    """A trace with its times divided."""

    def __init__(self, trace: Trace, divisor: float) -> None:
        self._trace = trace
        self._divisor = divisor

    @property
    def specs(self) -> Mapping[int, NamespaceSpec]:
        return self._trace.specs

    def __iter__(self) -> Iterator[TraceRequest]:
        return (request._replace(time_s=request.time_s / self._divisor) for request in self._trace)


def replay(requests: Requests, sizes: Sizes) -> Played:
    """`play`, with any of the compared policies."""
    start_s = next(iter(requests)).time_s
    return play(requests, sizes, engine=engine_for(sizes, start_s, ALL))


def name_of(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl")


class Listed:
    """A trace in memory, so that reading it is not measured.

    `parts`: each block is cut into so many, as an engine with shorter blocks would ask for it; `prompts`: only the
    first so many are taken, since memory and time grow with the parts.
    """

    def __init__(self, trace: Trace, parts: int = 1, prompts: int | None = None) -> None:
        self._requests = [_cut(request, parts) for request in islice(trace, prompts)]
        self.specs = trace.specs

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self._requests)


_ODD = np.array([0xC2B2AE3D27D4EB4F, 0x9E3779B97F4A7C15], np.uint64)
"""Any two odd numbers: they make the keys of a block's parts differ in all bytes."""


def _cut(request: TraceRequest, parts: int) -> TraceRequest:
    keys = np.frombuffer(request.keys, np.uint64).reshape(-1, 1, KEY_BYTES // 8)
    numbers = np.arange(parts, dtype=np.uint64)[:, np.newaxis]
    return request._replace(keys=(keys ^ numbers * _ODD).tobytes())
