"""The tree that `stats` answers: raw numbers and short strings, units last in the names."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercache.daemon.server import Server

# What clients name themselves and register is theirs to choose; the reply has to fit into one message.
MAX_LISTED_NAMESPACES = 1024
MAX_LISTED_SESSIONS = 256
_MAX_CHARS = 48


def build_stats(server: Server) -> dict[str, Any]:
    """Everything that is known, as of now; the lists of namespaces and sessions are cut. About a millisecond."""
    from tiercache.daemon.server import VERSION, rss_bytes

    cache, space = server.cache, server.cache.space
    rss, shared = rss_bytes()
    blocks = sum(table.blocks for table in space.index.tables.values())
    counters = asdict(cache.counters)
    counters["invariant_failures"] = space.index.invariant_failures
    counters["connections_refused"] = server.router.refused_connections
    return {
        "daemon": {
            "version": VERSION,
            "pid": os.getpid(),
            "run_dir": str(server.config.run_dir),
            "generation": server.generation,
            "uptime_s": time.monotonic() - server.started_s,
            "rss_bytes": rss,
            "rss_besides_arena_bytes": rss - shared,
            "policy": server.config.policy,
        },
        "health": _health(server),
        "arena": _arena(server),
        "tiers": {
            "dram": {
                "blocks": blocks,
                "bytes": space.allocator.used_bytes,
                "capacity_bytes": space.allocator.arena_bytes,
            },
            **({cache.below.name: cache.below.stats()} if cache.below.name else {}),
        },
        "counters": counters,
        "latency": {name: histogram.snapshot() for name, histogram in sorted(server.service.latency.items())},
        "leases": {
            "read": len(cache.reads.leases) - len(cache.reads.pins),
            "write": len(cache.writes.leases),
            "quarantined": len(cache.writes.quarantined),
            "pending_blocks": len(cache.writes.pending),
        },
        **({} if server.events is None else {"kv_events": server.events.stats()}),
        "pins": {"count": len(cache.reads.pins), "bytes": cache.reads.pinned_bytes},
        "namespaces": [_namespace(one) for one in islice(space.namespaces.values(), MAX_LISTED_NAMESPACES)],
        "sessions": [
            {
                "name": session.name,
                "pid": session.pid,
                "mapped": session.map_arena,
                "registration": session.registration,
                "read_leases": len(session.owner.reads),
                "write_leases": len(session.owner.writes) + len(session.owner.grants),
                "counters": session.counters,
            }
            for session in islice(server.gate.sessions.values(), MAX_LISTED_SESSIONS)
        ],
    }


def _health(server: Server) -> dict[str, Any]:
    reasons = []
    if server.maker.shortage and server.cache.space.allocator.arena_bytes < server.config.arena_bytes:
        reasons.append(server.maker.shortage)
    if server.cache.space.index.invariant_failures:
        reasons.append("the index has contradicted itself, or a client sent keys that are no chain")
    if server.nvme is not None:
        reasons += server.nvme.reasons()
    if server.http is not None and server.http.problem:
        reasons.append(server.http.problem)
    return {"state": "degraded" if reasons else "ok", "reasons": reasons}


def _arena(server: Server) -> dict[str, Any]:
    allocator = server.cache.space.allocator
    locked = sum(region.size_bytes for region in server.regions.values() if region.locked)
    return {
        "bytes": server.config.arena_bytes,
        "populated_bytes": allocator.arena_bytes,
        "locked_bytes": locked,
        "regions": len(server.regions),
        "used_bytes": allocator.used_bytes,
        "free_bytes": allocator.arena_bytes - allocator.used_bytes,
        "quarantined_bytes": sum(server.cache.writes.quarantine_bytes.values()),
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


def _namespace(namespace: Any) -> dict[str, Any]:
    spec = namespace.spec
    return {
        "id": namespace.number,
        "fingerprint": namespace.fingerprint,
        "engine": spec.engine[:_MAX_CHARS],
        "layout": spec.layout[:_MAX_CHARS],
        "dtype": spec.dtype[:_MAX_CHARS],
        "group": spec.group[:_MAX_CHARS],
        "quantization": spec.quantization[:_MAX_CHARS],
        "block_size": spec.block_size,
        "block_bytes": spec.block_bytes,
        "rank": f"tp {spec.tp_rank}/{spec.tp_size} pp {spec.pp_rank}/{spec.pp_size}",
        "blocks": namespace.table.blocks,
    }
