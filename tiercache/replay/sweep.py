"""Plays one trace on caches of several sizes and policies, and compares each with the offline optimum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tiercache.config.settings import SETTINGS
from tiercache.errors import ConfigError
from tiercache.ground.units import parse_bytes
from tiercache.replay.estimate import Costs, Estimate
from tiercache.replay.formats.recorded import RecordedReader
from tiercache.replay.formats.trace import Trace
from tiercache.replay.optimum import Accesses
from tiercache.replay.played import Played, play
from tiercache.replay.requests import TraceRequest
from tiercache.replay.simulation import Outcome, Sizes

AS_RECORDED = "as recorded"
Tell = Callable[[str, float], None]
"""Receives what is being done, and the share of it that is done."""


@dataclass(frozen=True)
class Wanted:
    """Requested sizes, as text; empty `dram` and `policies` stand for those of the recorded daemon."""

    dram: tuple[str, ...]
    nvme: str = "0"
    gpu_pool: str = "0"
    policies: tuple[str, ...] = ()
    write_budget_bytes: int = 0
    optimum: bool = True
    shared: str = "0"
    hosts: int = 1
    spread: str = "round-robin"


@dataclass
class Point:
    """Result of one size and one policy. The optimum's hit rates are shares of all tokens, None if not requested.

    Blocks of GPU, DRAM and NVMe are those of each host; the optimum has those of all hosts in one place.
    """

    label: str
    sizes: Sizes
    gpu_blocks: int
    dram_blocks: int
    nvme_blocks: int
    shared_blocks: int
    played: Played
    estimate: Estimate
    best_dram: float | None = None
    best_all: float | None = None

    def as_tree(self) -> dict[str, Any]:
        """For JSON."""
        played = self.played
        return {
            "dram": self.label,
            "policy": self.sizes.policy,
            "dram_bytes": self.sizes.dram_bytes,
            "nvme_bytes": self.sizes.nvme_bytes,
            "gpu_blocks": self.gpu_blocks,
            "dram_blocks": self.dram_blocks,
            "nvme_blocks": self.nvme_blocks,
            "shared_bytes": self.sizes.shared_bytes,
            "shared_blocks": self.shared_blocks,
            "hosts": self.sizes.hosts,
            "spread": self.sizes.spread,
            "hit_rates": {**{name: played.rate(name) for name in played.tiers}, "all": played.rate(*played.tiers)},
            "others_share": played.others_share,
            "optimum": {"dram": self.best_dram, "all": self.best_all},
            "nvme_written_bytes": played.tallies.nvme_written_bytes,
            **self.estimate.as_tree(),
            **played.as_tree(),
        }


@dataclass
class Swept:
    """A trace and its result at each size. `unique_blocks` is None if they were not counted."""

    trace: Trace
    unique_blocks: int | None
    points: list[Point]


def sweep(trace: Trace, wanted: Wanted, costs: Costs, tell: Tell) -> Swept:
    """Play the trace at every size with every policy. Raises ConfigError, and BadTrace for a bad trace file."""
    size_texts = (*wanted.dram, wanted.nvme, wanted.gpu_pool, wanted.shared)
    recorded = trace.reader if isinstance(trace.reader, RecordedReader) else None
    if not wanted.dram and recorded is None:
        raise ConfigError("--dram says how large the cache is: blocks (20000), bytes (64GiB) or a share (5%)")
    if wanted.hosts > 1 and not _has_prompts_alone(trace):
        text = f"{trace.format.name}: it tells of one host's cache; only a trace of prompts can be spread over several"
        raise ConfigError(f"--hosts {wanted.hosts}: {trace.path} is of the format {text}")
    accesses = None
    if wanted.optimum:
        accesses = Accesses(_told(trace, "first pass, for the optimum", tell))
        if len(trace.specs) != 1:
            accesses = None  # no blocks at all; or of several sizes, whose optimum is another, harder problem
    unique = accesses.unique_blocks if accesses is not None else None
    if unique is None and any(text.endswith("%") for text in size_texts):
        unique = _count_unique(trace, tell)
    points = []
    for label, sizes, gpu_blocks in _all_sizes(trace, wanted, unique):
        points.append(_point(trace, wanted, costs, label, sizes, gpu_blocks, tell))
        before = points[-2] if len(points) > 1 and points[-2].label == label else None
        if accesses is not None and before is not None:  # the same size, another policy
            points[-1].best_dram, points[-1].best_all = before.best_dram, before.best_all
        elif accesses is not None:
            _add_optimum(trace, points[-1], accesses, tell)
    return Swept(trace, unique, points)


def _all_sizes(trace: Trace, wanted: Wanted, unique: int | None) -> list[tuple[str, Sizes, int]]:
    budget = wanted.write_budget_bytes
    gpu_bytes = size_bytes("--gpu-pool", wanted.gpu_pool, trace, unique)
    gpu_blocks = gpu_bytes // _frame_bytes("--gpu-pool", trace) if gpu_bytes else 0
    found = []
    for text in wanted.dram:
        dram_bytes = size_bytes("--dram", text, trace, unique)
        if not dram_bytes:
            raise ConfigError(f"--dram {text}: must be at least one block")
        nvme_bytes = _below_bytes("--nvme", wanted.nvme, dram_bytes, trace, unique)
        found.append((text, Sizes(dram_bytes, nvme_bytes, nvme_write_budget_bytes=budget), gpu_blocks))
    if not found:
        assert isinstance(trace.reader, RecordedReader)
        sizes = trace.reader.sizes
        if not wanted.policies and SETTINGS["policy"].kind.check(sizes.policy):
            text = f"policy {sizes.policy}, which this release does not have: choose one, for example --policy hazard"
            raise ConfigError(f"{trace.path}: recorded with {text}")
        found = [(AS_RECORDED, replace(sizes, nvme_write_budget_bytes=budget or sizes.nvme_write_budget_bytes), 0)]
        found = [(label, sizes, gpu_blocks) for label, sizes, _ in found]
    return [
        (label, replace(_with_others(trace, wanted, sizes, unique), policy=policy), blocks)
        for label, sizes, blocks in found
        for policy in wanted.policies or (sizes.policy,)
    ]


def _with_others(trace: Trace, wanted: Wanted, sizes: Sizes, unique: int | None) -> Sizes:
    """The same, with as many hosts and the shared store that are wanted."""
    shared_bytes = _below_bytes("--shared", wanted.shared, sizes.dram_bytes, trace, unique)
    return replace(sizes, shared_bytes=shared_bytes, hosts=wanted.hosts, spread=wanted.spread)


def _below_bytes(flag: str, text: str, dram_bytes: int, trace: Trace, unique: int | None) -> int:
    """The size of a tier below DRAM, which may be a multiple of it."""
    if text.endswith("x"):
        return int(_number(flag, text[:-1], text) * dram_bytes)
    return size_bytes(flag, text, trace, unique)


def size_bytes(flag: str, text: str, trace: Trace, unique: int | None) -> int:
    """A size as people write it: `5%` of the trace's different blocks, `20000` blocks, or `64GiB`."""
    if text.isdigit():
        return int(text) * _frame_bytes(flag, trace) if int(text) else 0
    if text.endswith("%"):
        assert unique is not None
        return max(1, round(unique * _number(flag, text[:-1], text) / 100)) * _frame_bytes(flag, trace)
    try:
        return parse_bytes(text)
    except ValueError:
        raise _not_a_size(flag, text) from None


def _number(flag: str, text: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise _not_a_size(flag, whole) from None
    if not 0 <= value < float("inf"):
        raise _not_a_size(flag, whole)
    return value


def _not_a_size(flag: str, text: str) -> ConfigError:
    more = ", or 5x for five times --dram" if flag in ("--nvme", "--shared") else ""
    return ConfigError(f"{flag} {text}: is not a size: write blocks (20000), bytes (64GiB) or a share (5%){more}")


def _frame_bytes(flag: str, trace: Trace) -> int:
    if not trace.specs:  # the lines themselves define the namespaces
        next(iter(trace), None)
    if len({spec.frame_bytes for spec in trace.specs.values()}) != 1:
        raise ConfigError(f"{flag}: the trace has blocks of several sizes: say bytes, for example 64GiB")
    return next(iter(trace.specs.values())).frame_bytes


def _point(trace: Trace, wanted: Wanted, costs: Costs, label: str, sizes: Sizes, gpu_blocks: int, tell: Tell) -> Point:
    estimate = Estimate(costs, shared=bool(sizes.shared_bytes))

    def told(played: Played) -> None:
        tell(f"{label}, {sizes.policy}", _share(trace))

    def added(request: TraceRequest, in_gpu: int, outcome: Outcome) -> None:
        specs = [trace.specs[number] for number in request.namespaces]
        token_bytes = sum(spec.block_bytes / spec.block_size for spec in specs)
        estimate.add(request, specs[0].block_size, token_bytes, in_gpu, outcome)

    played = play(
        trace,
        sizes,
        gpu_blocks,
        scaled=_has_prompts_alone(trace),
        tell=told,
        start_s=trace.reader.header.clock_s if isinstance(trace.reader, RecordedReader) else None,
        each=added,
    )
    frames = {spec.frame_bytes for spec in trace.specs.values()}
    frame_bytes = frames.pop() if len(frames) == 1 else 0
    tiers = sizes.dram_bytes, sizes.nvme_bytes, sizes.shared_bytes
    dram, nvme, shared = (size // frame_bytes if frame_bytes else 0 for size in tiers)
    return Point(label, sizes, gpu_blocks, dram, nvme, shared, played, estimate)


def _has_prompts_alone(trace: Trace) -> bool:
    """True if a trace is prompts of one namespace, and tells of no host's stores, hints or flushes."""
    return trace.format.name in ("mooncake", "bailian")


def _add_optimum(trace: Trace, point: Point, accesses: Accesses, tell: Tell) -> None:
    tokens, asked = next(iter(trace.specs.values())).block_size, max(1, point.played.asked_tokens)
    tell(f"{point.label}: the optimum", 0.0)
    hosts = point.sizes.hosts
    dram_blocks = hosts * point.dram_blocks
    point.best_dram = accesses.best_hits(dram_blocks) * tokens / asked
    tell(f"{point.label}: the optimum", 0.5)
    all_blocks = dram_blocks + hosts * (point.gpu_blocks + point.nvme_blocks) + point.shared_blocks
    more = all_blocks > dram_blocks
    point.best_all = accesses.best_hits(all_blocks) * tokens / asked if more else point.best_dram


def _count_unique(trace: Trace, tell: Tell) -> int:
    seen: set[int] = set()
    for request in _told(trace, "first pass, to count blocks", tell):
        keys = request.keys
        seen.update(hash(keys[at : at + 16]) for at in range(0, len(keys), 16))
    return len(seen)


def _told(trace: Trace, what: str, tell: Tell) -> Sequence[Any]:
    """The requests, with reports of progress."""

    def all_of() -> Any:
        for number, request in enumerate(trace):
            if number % 256 == 0:
                tell(what, _share(trace))
            yield request

    return all_of()  # type: ignore[no-any-return]


def _share(trace: Trace) -> float:
    size = trace.lines.size_bytes
    return min(1.0, trace.lines.read_bytes / size) if size else 0.0
