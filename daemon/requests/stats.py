"""The tree that answers `stats`: raw numbers and short strings, units last in the names."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from tiercache import __version__
from tiercache.daemon.ground.counters import Counters
from tiercache.daemon.ground.slices import Steps
from tiercache.ground.histograms import Histogram, LatencyHistogram
from tiercache.protocol.messages import Stats

if TYPE_CHECKING:
    from tiercache.config.daemon_config import DaemonConfig
    from tiercache.copies.arena import Region
    from tiercache.daemon.cache import Cache
    from tiercache.daemon.events.events import Events
    from tiercache.daemon.ground.regions import RegionMaker
    from tiercache.daemon.observe.http_process import HttpProcess
    from tiercache.daemon.observe.recorder import Recorder
    from tiercache.daemon.observe.traffic import Traffic
    from tiercache.daemon.tiers.dram.quotas import Quotas
    from tiercache.daemon.tiers.dram.space import Namespace
    from tiercache.daemon.tiers.nvme.tier import NvmeTier
    from tiercache.daemon.tiers.shared.tier import SharedTier

    from .service import Service
    from .sessions import SessionGate

# Clients choose the names that they give and register; the reply has to fit into one message.
MAX_LISTED_NAMESPACES = 1024
MAX_LISTED_SESSIONS = 256
MAX_LISTED_QUOTAS = 256
_NAMESPACES_AT_ONCE = 128
_MAX_CHARS = 48
_COUNTERS = [field.name for field in fields(Counters)]


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_START_FIELD = 19
"""Index of the start time among the fields of /proc/self/stat after the process's name (proc(5))."""


class Daemon(Protocol):
    """The part of the daemon that `stats` reports on."""

    config: DaemonConfig
    generation: int
    started_s: float
    log_figures: Callable[[], dict[str, Any]]
    cache: Cache
    regions: dict[int, Region]
    maker: RegionMaker
    gate: SessionGate
    service: Service
    nvme: NvmeTier | None
    shared: SharedTier | None
    events: Events | None
    recorder: Recorder | None
    http: HttpProcess | None

    def refused_connections(self) -> int:
        """Refused connections of clients and subscribers."""


def build_stats(daemon: Daemon, request: Stats) -> Steps[dict[str, Any]]:
    """Everything that is known, as of now; the lists of namespaces and sessions are cut.

    Very many namespaces, and the optional parts, come in slices of their own.
    """
    if daemon.cache.observers.what_if is not None:
        yield from daemon.cache.observers.what_if.catch_up()
    stats = _figures(daemon)
    stats["namespaces"] = yield from _namespaces(daemon)
    stats["sessions"] = _sessions(daemon)
    if request.histograms:
        yield
        cache = daemon.cache
        leases = {"read": cache.reads.ages, "write": cache.writes.ages}
        latency = daemon.service.latency
        stats["histograms"] = build_histograms(cache.observers.traffic, leases, latency, daemon.nvme)
    if request.hot_prefixes > 0:
        yield
        paths, index = daemon.cache.observers.traffic.hot_paths, daemon.cache.space.index
        stats["hot_prefixes"] = paths.snapshot(request.hot_prefixes, index)
    return stats


def _figures(daemon: Daemon) -> dict[str, Any]:
    cache, space, pins = daemon.cache, daemon.cache.space, daemon.cache.reads.pins
    blocks = sum(table.blocks for table in space.index.tables.values())
    counters = {name: getattr(cache.counters, name) for name in _COUNTERS}  # asdict() takes twenty times as long
    counters["connections_refused"] = daemon.refused_connections()
    return {
        "daemon": _daemon(daemon),
        "health": health_of(daemon),
        "arena": _arena(daemon),
        "tiers": {
            "dram": {
                "blocks": blocks,
                "bytes": space.allocator.used_bytes,
                "capacity_bytes": space.allocator.arena_bytes,
            },
            **cache.below.stats_by_tier(),
        },
        **({} if cache.observers.what_if is None else {"what_if": cache.observers.what_if.stats()}),
        "counters": counters,
        "traffic": cache.observers.traffic.stats(),
        "latency": {name: histogram.snapshot() for name, histogram in sorted(daemon.service.latency.items())},
        "leases": {
            "read": len(cache.reads.leases) - len(pins.leases),
            "write": len(cache.writes.leases),
            "quarantined": len(cache.writes.quarantined),
            "pending_blocks": len(cache.writes.pending.by_key),
            "parked_requests": daemon.service.reads.parked,
        },
        **({} if daemon.events is None else {"kv_events": daemon.events.stats()}),
        **({} if daemon.recorder is None else {"record": daemon.recorder.stats()}),
        "pins": {"count": len(pins.leases), "bytes": pins.bytes},
        "hints": {**space.policies.hints.stats(), "plans": cache.ahead.plans, "ahead_blocks": cache.ahead.blocks},
        **({"quotas": quotas} if (quotas := _quotas(daemon)) else {}),
    }


def _daemon(daemon: Daemon) -> dict[str, Any]:
    rss, shared = rss_bytes()
    return {
        "version": __version__,
        "pid": os.getpid(),
        "run_dir": str(daemon.config.run_dir),
        "generation": daemon.generation,
        "uptime_s": time.monotonic() - daemon.started_s,
        "rss_bytes": rss,
        "rss_besides_arena_bytes": rss - shared,
        **process_figures(),
        "policy": daemon.config.policy,
        **daemon.log_figures(),
    }


def health_of(daemon: Daemon) -> dict[str, Any]:
    """The state, `ok` or `degraded`, and why.

    `parts` says in how many ways each part is not well; reasons are for people and may change their wording.
    """
    parts: dict[str, list[str]] = {"arena": [], "nvme": [], "shared": [], "http": []}
    if daemon.maker.shortage and daemon.cache.space.allocator.arena_bytes < daemon.config.arena_bytes:
        parts["arena"].append(daemon.maker.shortage)
    parts["arena"] += daemon.cache.writes.unfinished.reasons()
    if daemon.nvme is not None:
        parts["nvme"] += daemon.nvme.reasons()
    if daemon.shared is not None:
        parts["shared"] += daemon.shared.reasons()
    if daemon.http is not None and daemon.http.problem:
        parts["http"].append(daemon.http.problem)
    reasons = [reason for of_part in parts.values() for reason in of_part]
    return {
        "state": "degraded" if reasons else "ok",
        "reasons": reasons,
        "parts": {part: len(of_part) for part, of_part in parts.items()},
    }


def _sessions(daemon: Daemon) -> list[dict[str, Any]]:
    return [
        {
            "name": session.name,
            "pid": session.pid,
            "tenant": session.tenant,
            "mapped": session.mapped,
            "registration": session.registration,
            "protocol": session.protocol,
            "connected_s": round(session.age_s, 1),
            "read_leases": len(session.owner.reads),
            "write_leases": len(session.owner.writes),
            "broken_chains": session.owner.broken_chains,
            "counters": session.counters,
        }
        for session in islice(daemon.gate.sessions.values(), MAX_LISTED_SESSIONS)
    ]


def _quotas(daemon: Daemon) -> list[dict[str, Any]]:
    """The owners with a limit, and how far it is used; tenants under `*` only if they have namespaces."""
    space, nvme = daemon.cache.space, daemon.nvme
    used: dict[str, tuple[Quotas, Callable[[str], int]]] = {"dram": (space.quotas, space.used_bytes)}
    if nvme is not None:
        used["nvme"] = space.quotas_below, nvme.fairness.used_bytes
    taken = space.allocator.taken_bytes()
    return [
        {
            "name": account,
            "tier": tier,
            "used_bytes": used_bytes(account),
            **({"region_bytes": taken[space.quotas.numbers[account]]} if tier == "dram" else {}),
            "limit_bytes": quotas.limit_bytes(account),
            "refused_blocks": quotas.refused[account],
        }
        for tier, (quotas, used_bytes) in used.items()
        for account in islice(quotas.members, MAX_LISTED_QUOTAS)
    ]


def _arena(daemon: Daemon) -> dict[str, Any]:
    allocator = daemon.cache.space.allocator
    locked = sum(region.size_bytes for region in daemon.regions.values() if region.locked)
    return {
        "bytes": daemon.config.arena_bytes,
        "populated_bytes": allocator.arena_bytes,
        "locked_bytes": locked,
        "regions": len(daemon.regions),
        "used_bytes": allocator.used_bytes,
        "free_bytes": allocator.arena_bytes - allocator.used_bytes,
        "quarantined_bytes": daemon.cache.writes.unfinished.quarantined_bytes,
        "classes": [
            {
                "frame_bytes": size_class.frame_bytes,
                "regions": len(size_class.regions),
                "frames": size_class.frames,
                "free": size_class.free,
            }
            for size_class in allocator.classes.values()
        ],
    }


def _namespaces(daemon: Daemon) -> Steps[list[dict[str, Any]]]:
    cache = daemon.cache
    pinned, below = cache.reads.pins.blocks, cache.below.local.blocks_of
    views: list[dict[str, Any]] = []
    for one in list(islice(cache.space.namespaces.values(), MAX_LISTED_NAMESPACES)):
        if len(views) % _NAMESPACES_AT_ONCE == _NAMESPACES_AT_ONCE - 1:
            yield
        views.append(_namespace(one, cache.clock_s(), pinned[one.number], below(one.number)))
    return views


def _namespace(namespace: Namespace, now_s: float, pinned: int, below: int) -> dict[str, Any]:
    spec, use = namespace.spec, namespace.use
    return {
        "id": namespace.number,
        "fingerprint": namespace.fingerprint,
        "engine": spec.engine[:_MAX_CHARS],
        "layout": spec.layout[:_MAX_CHARS],
        "dtype": spec.dtype[:_MAX_CHARS],
        "group": spec.group[:_MAX_CHARS],
        "tenant": spec.tenant,
        "quantization": spec.quantization[:_MAX_CHARS],
        "block_size": spec.block_size,
        "block_bytes": spec.block_bytes,
        "rank": f"tp {spec.tp_rank}/{spec.tp_size} pp {spec.pp_rank}/{spec.pp_size}",
        "blocks": namespace.table.blocks,
        "below_blocks": below,
        "pinned_blocks": pinned,
        "asked_blocks": use.asked_blocks,
        "hit_blocks": use.hit_blocks,
        "hit_below_blocks": use.below_blocks,
        "hit_shared_blocks": use.shared_blocks,
        "stored_blocks": use.stored_blocks,
        "refused_blocks": use.refused_blocks,
        "idle_s": None if use.used_s is None else round(now_s - use.used_s, 1),
    }


# --- histograms, and figures of this process -----------------------------------------------------------


def build_histograms(
    traffic: Traffic,
    leases: Mapping[str, LatencyHistogram],
    latency: Mapping[str, LatencyHistogram],
    nvme: NvmeTier | None,
) -> dict[str, list[dict[str, Any]]]:
    """By name, one for each combination of labels. Sums and bucket bounds are in the unit that ends the name.

    `leases`: how long leases of clients were held, by kind. `latency`: that of requests, by kind. Some 10 us for each
    non-empty one.
    """
    found = {
        "request_ns": [_shown(histogram, request=name) for name, histogram in sorted(latency.items())],
        "asked_tokens": [_shown(traffic.asked_tokens)],
        "hit_tokens": [_shown(traffic.hit_tokens)],
        "lease_ns": [_shown(histogram, kind=kind) for kind, histogram in leases.items()],
    }
    if nvme is not None:
        found |= {"promotion_ns": [], "demotion_ns": [], "disk_call_ns": [], "disk_call_bytes": []}
        for path, queue in nvme.queues().items():
            for urgency in ("load", "prefetch"):
                found["promotion_ns"].append(_shown(queue.latency[urgency], directory=path, urgency=urgency))
            found["demotion_ns"].append(_shown(queue.latency["write"], directory=path))
            for call in ("read", "write"):
                labels = {"directory": path, "call": call}
                found["disk_call_ns"].append(_shown(queue.latency[f"{call}_call"], **labels))
                found["disk_call_bytes"].append(_shown(queue.call_bytes[f"{call}_call"], **labels))
    return found


def _shown(histogram: Histogram, **labels: str) -> dict[str, Any]:
    return {"labels": labels, "count": histogram.count, "sum": histogram.sum, "buckets": histogram.buckets()}


def process_figures() -> dict[str, Any]:
    """CPU time, start, address space and descriptors. Some 50 us, and 0.2 us per open descriptor."""
    with open("/proc/self/statm", "rb") as file:
        pages = int(file.read().split()[0])
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "started_unix_s": _STARTED_S,
        "cpu_s": time.process_time(),
        "vm_bytes": pages * _PAGE_BYTES,
        "open_fds": len(os.listdir("/proc/self/fd")) - 1,  # one is that of the listing
        **({} if soft == resource.RLIM_INFINITY else {"max_fds": soft}),
    }


def rss_bytes() -> tuple[int, int]:
    """Resident bytes of this process: all, and those that are shared memory."""
    fd = os.open("/proc/self/status", os.O_RDONLY)
    try:
        text = os.read(fd, 8192)
    finally:
        os.close(fd)
    fields = (text.partition(name)[2].split(None, 1)[0] for name in (b"VmRSS:", b"RssShmem:"))
    resident, shared = (int(field) * 1024 for field in fields)
    return resident, shared


def _started_s() -> float:
    """Start time of this process, in Unix time: read once, so that setting the clock does not look like a restart."""
    with open("/proc/self/stat", "rb") as file:
        ticks = int(file.read().rpartition(b")")[2].split()[_START_FIELD])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / _TICKS_PER_S


_STARTED_S = round(_started_s(), 3)
