"""What belongs to clients: namespaces, quotas and hints."""

from __future__ import annotations

from tiercache.http import readings as read
from tiercache.http.measured.family import Family

_NAMESPACE = ("namespace", "engine", "rank")
_QUOTA = ("quota", "tier")

NAMESPACES = (
    Family(
        "gauge",
        "namespaces",
        (),
        "Namespaces (model, layout and rank) that clients have registered (up to 1024).",
        lambda tree: [((), len(tree["namespaces"]))],
    ),
    Family(
        "gauge",
        "namespace_blocks",
        (*_NAMESPACE, "tier"),
        f"Blocks of a namespace in a tier now, for the {read.MAX_NAMESPACES} namespaces with most blocks and lookups.",
        read.namespaces(read.blocks_by_tier),
    ),
    Family(
        "gauge",
        "namespace_bytes",
        (*_NAMESPACE, "tier"),
        "Bytes of the blocks of a namespace in a tier now.",
        read.namespaces(read.bytes_by_tier),
    ),
    Family(
        "counter",
        "namespace_asked_blocks_total",
        _NAMESPACE,
        "Blocks of a namespace that were looked up.",
        read.namespaces(read.asked_blocks),
    ),
    Family(
        "counter",
        "namespace_hit_blocks_total",
        (*_NAMESPACE, "tier"),
        "Blocks of a namespace that were looked up and found in a tier.",
        read.namespaces(read.hits_by_tier),
    ),
    Family(
        "gauge",
        "quota_bytes",
        _QUOTA,
        f"Bytes that a tenant or namespace with a quota may have in a tier (the first {read.MAX_QUOTAS} quotas).",
        read.quotas("limit_bytes"),
    ),
    Family(
        "gauge",
        "quota_used_bytes",
        _QUOTA,
        "Bytes that a tenant or namespace with a quota has in a tier now.",
        read.quotas("used_bytes"),
    ),
    Family(
        "counter",
        "quota_refused_blocks_total",
        _QUOTA,
        "Blocks that were not stored because their quota was used up and none of its own blocks could be evicted.",
        read.quotas("refused_blocks"),
    ),
)

HINTS = (
    Family(
        "counter",
        "hints_total",
        ("said",),
        "Hints from clients: the session is over (done), comes back (returning), expires (ttl), or has a priority.",
        read.hints("done", "returning", "ttl", "priority"),
    ),
    Family(
        "counter",
        "hint_expired_blocks_total",
        (),
        "Blocks evicted because the time that a hint gave them was over.",
        read.at("hints", "expired_blocks"),
    ),
    Family(
        "counter",
        "hint_ahead_blocks_total",
        (),
        "Blocks brought from NVMe to DRAM shortly before a hint said they would be needed.",
        read.at("hints", "ahead_blocks"),
    ),
    Family(
        "gauge",
        "hint_kept_blocks",
        ("why",),
        "Blocks kept now because a hint says that the client comes back (awaited), or that they matter more (high).",
        read.hints("awaited_blocks", "high_blocks"),
    ),
)
