"""Plays a whole trace on one cache, and counts hits by tier, in blocks and tokens, and blocks written."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import msgspec

from tiercache.daemon.policies import POLICIES, Maker
from tiercache.protocol.messages import KEY_BYTES
from tiercache.protocol.namespaces import NamespaceSpec
from tiercache.replay.hosts import HostCache, Hosts
from tiercache.replay.requests import RequestKind, TraceRequest
from tiercache.replay.shared import PaperStore
from tiercache.replay.simulation import Outcome, Simulation, Sizes, Tallies

TELL_EVERY = 64
"""Requests between two reports of progress."""
PLAYED_BYTES = 4 << 20
"""Larger blocks are played as blocks of this size: the hits are the same, and the daemon's work goes by the run."""
LEAST_FRAMES = 1024
"""Not on a smaller NVMe tier, where it matters how much the daemon keeps free ahead."""
_IN_BYTES = (
    "dram_bytes",
    "nvme_bytes",
    "region_bytes",
    "segment_bytes",
    "nvme_write_budget_bytes",
    "headroom_bytes",
    "shared_bytes",
)
"""Fields of `Sizes`."""


class Requests(Protocol):
    """The input: requests, and the namespaces of those read so far."""

    def __iter__(self) -> Iterator[TraceRequest]: ...

    @property
    def specs(self) -> Mapping[int, NamespaceSpec]: ...


class PlayedCache(Protocol):
    """A cache on which requests are played."""

    def declare(self, number: int, spec: NamespaceSpec) -> None: ...

    def play(self, request: TraceRequest) -> Outcome: ...

    def tallies(self) -> Tallies: ...


@dataclass
class TierHits:
    """The hits of one tier, beyond those of the tiers before it."""

    blocks: int = 0
    tokens: int = 0


@dataclass
class Played:
    """Result of a trace on caches of certain sizes. Tokens are those of prompts, partial blocks included."""

    requests: int = 0
    asked_blocks: int = 0
    asked_tokens: int = 0
    tiers: dict[str, TierHits] = field(default_factory=dict)
    of_others: TierHits = field(default_factory=TierHits)
    """Those of the shared tier's hits that another host had stored."""
    agreed: int = 0
    """Matches with the same hits as the recorded daemon's in each tier."""
    recorded: int = 0
    """Matches whose recorded hits are known."""
    first_s: float = 0.0
    last_s: float = 0.0
    cpu_s: float = 0.0
    tallies: Tallies = field(default_factory=Tallies)

    def rate(self, *tiers: str) -> float:
        """Share of all tokens that these tiers hit."""
        hit = sum(self.tiers[tier].tokens for tier in tiers if tier in self.tiers)
        return hit / self.asked_tokens if self.asked_tokens else 0.0

    @property
    def others_share(self) -> float:
        """The share of all hits that another host had stored."""
        hits = sum(tier.tokens for tier in self.tiers.values())
        return self.of_others.tokens / hits if hits else 0.0

    def block_rate(self, *tiers: str) -> float:
        """Share of all full blocks that these tiers hit."""
        hit = sum(self.tiers[tier].blocks for tier in tiers if tier in self.tiers)
        return hit / self.asked_blocks if self.asked_blocks else 0.0

    def as_tree(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class GpuPool:
    """An engine's own pool in front of the cache: a fixed number of blocks, evicting the least recently used leaf."""

    def __init__(self, blocks: int) -> None:
        self._most = blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def ask(self, request: TraceRequest) -> int:
        """Length of a prompt's leading run in the pool; afterwards the pool has all of its blocks that fit."""
        keys = request.keys
        chain = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        pool, run = self._blocks, 0
        for key in chain:
            if key not in pool:
                break
            run += 1
        # From the end, as engines free them: so a prompt's first blocks are evicted last.
        for key in reversed(chain[: self._most]):
            pool[key] = None
            pool.move_to_end(key)
        while len(pool) > self._most:
            pool.popitem(last=False)
        return run


def engine_for(
    sizes: Sizes, start_s: float, policies: Mapping[str, Maker] = POLICIES, frame_bytes: int = 0
) -> PlayedCache:
    """A cache for each host, and the store that they share.

    frame_bytes: the size of all frames of the trace, 0 if it is not known or there are several. Larger ones are played
    as frames of `PLAYED_BYTES`.
    """
    is_small = 0 < sizes.nvme_bytes < LEAST_FRAMES * frame_bytes
    scale = 1.0 if is_small else max(1.0, frame_bytes / PLAYED_BYTES)
    if scale > 1.0:
        parts = {name: getattr(sizes, name) * PLAYED_BYTES // frame_bytes for name in _IN_BYTES}
        sizes = replace(sizes, **parts)
    store = PaperStore(sizes.shared_bytes) if sizes.shared_bytes else None
    caches: list[HostCache] = [Simulation(sizes, {}, start_s, policies, store, host) for host in range(sizes.hosts)]
    engine = caches[0] if sizes.hosts == 1 else Hosts(caches, sizes.spread)
    return engine if scale == 1.0 else _Scaled(engine, scale)


class _Scaled:
    """A cache whose frames, and all that is counted in bytes, are smaller by a factor."""

    def __init__(self, engine: PlayedCache, scale: float) -> None:
        self._engine = engine
        self._scale = scale

    def declare(self, number: int, spec: NamespaceSpec) -> None:
        self._engine.declare(number, msgspec.structs.replace(spec, block_bytes=PLAYED_BYTES))

    def play(self, request: TraceRequest) -> Outcome:
        return self._engine.play(request)

    def tallies(self) -> Tallies:
        tallies = self._engine.tallies()
        written = round(tallies.nvme_written_bytes * self._scale), round(tallies.shared_written_bytes * self._scale)
        return replace(tallies, nvme_written_bytes=written[0], shared_written_bytes=written[1])


def play(
    requests: Requests,
    sizes: Sizes,
    gpu_blocks: int = 0,
    scaled: bool = False,
    tell: Callable[[Played], None] = lambda played: None,
    engine: PlayedCache | None = None,
    each: Callable[[TraceRequest, int, Outcome], None] | None = None,
    start_s: float | None = None,
) -> Played:
    """Play all requests. Calls `tell` now and then, and `each` for every prompt, with the hits in GPU and tiers.

    `gpu_blocks`: of each host. `scaled`: the trace has one namespace, whose blocks may be played as smaller ones.
    `start_s`: when the cache starts, on the trace's clock; at the first request if unknown.
    """
    pools = [GpuPool(gpu_blocks) for _ in range(sizes.hosts)] if gpu_blocks else []
    played, known = Played(), 0
    played.tiers = {name: TierHits() for name in ("gpu", "dram", "nvme", "shared")}
    began_s = time.process_time()
    for request in requests:
        if engine is None:
            frame_bytes = next(iter(requests.specs.values())).frame_bytes if scaled else 0
            began = request.time_s if start_s is None else start_s
            engine = engine_for(sizes, began, frame_bytes=frame_bytes)
        if len(requests.specs) != known:
            for number, spec in list(requests.specs.items())[known:]:
                engine.declare(number, spec)
            known = len(requests.specs)
        outcome = engine.play(request)
        if request.kind not in (RequestKind.ASK, RequestKind.LOOK):
            continue
        in_gpu = pools[outcome.host].ask(request) if pools else request.in_gpu
        _count(played, request, requests.specs[request.namespaces[0]].block_size, in_gpu, outcome)
        if request.kind is RequestKind.LOOK:
            played.recorded += 1
            played.agreed += (outcome.dram, outcome.nvme + outcome.shared) == request.had
        if each is not None:
            each(request, in_gpu, outcome)
        if played.requests % TELL_EVERY == 0:
            tell(played)
    played.cpu_s = time.process_time() - began_s
    played.tallies = Tallies() if engine is None else engine.tallies()
    if not sizes.nvme_bytes:
        del played.tiers["nvme"]
    if not sizes.shared_bytes:
        del played.tiers["shared"]
    if not pools and not played.tiers["gpu"].blocks:
        del played.tiers["gpu"]
    return played


def _count(played: Played, request: TraceRequest, block_tokens: int, in_gpu: int, outcome: Outcome) -> None:
    if not played.requests:
        played.first_s = request.time_s
    played.requests += 1
    played.last_s = request.time_s
    played.asked_blocks += request.blocks
    played.asked_tokens += request.input_tokens
    before, local = 0, outcome.dram + outcome.nvme
    for name, end in (("gpu", in_gpu), ("dram", outcome.dram), ("nvme", local), ("shared", outcome.found)):
        if end > before:
            tier = played.tiers[name]
            tier.blocks += end - before
            tier.tokens += (end - before) * block_tokens
            before = end
    of_others = min(outcome.of_others, outcome.found - max(in_gpu, local))
    if of_others > 0:
        played.of_others.blocks += of_others
        played.of_others.tokens += of_others * block_tokens
