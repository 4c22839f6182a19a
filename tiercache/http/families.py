"""Every metric there is: its name, kind, labels and meaning, and how it is read from the stats.

Names are stable: what is there keeps its name and meaning. `daemon/README.md` has the same table, which is
what this module prints; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tiercache.http import readings as read
from tiercache.http.readings import Samples, Steps, Tree

PREFIX = "tiercache_"


class Family(NamedTuple):
    """One metric. `samples` reads a tree of stats with histograms; nothing where the daemon has no such thing."""

    kind: str
    name: str
    labels: tuple[str, ...]
    text: str
    samples: Callable[[Tree], Samples]
    steps: Steps = Steps((), 1)


_NAMESPACE = ("namespace", "engine", "rank")
_QUOTA = ("quota", "tier")

COUNTERS = {
    "match_requests": "Lookups, prefetches included.",
    "match_blocks_asked": "Blocks looked up.",
    "match_blocks_hit": "Blocks found in DRAM.",
    "match_blocks_below": "Blocks found in the tier below, behind those in DRAM.",
    "loads_good": "Read leases that were released as good.",
    "loads_revoked": "Read leases that had been revoked when they were released: the load is a miss.",
    "reserved_blocks": "Blocks for which a frame was given to a writer.",
    "dedup_blocks": "Blocks that were offered and are here already, or on their way.",
    "refused_blocks": "Blocks for which there was no frame.",
    "refused_by_quota_blocks": "Those of them that a tenant's quota left no room for.",
    "stored_blocks": "Blocks stored by clients and visible.",
    "stored_bytes": "Their bytes.",
    "dropped_blocks": "Blocks that were reserved and never became visible.",
    "evicted_blocks": "Blocks evicted from DRAM.",
    "flushed_blocks": "Blocks that a flush took.",
    "flushes": "Flushes.",
    "leases_expired": "Leases whose time was up.",
    "quarantines": "Write leases that ended without a word that their copies have.",
    "regions_drained": "Regions of the arena that were emptied for blocks of another size.",
    "invariant_failures": "Contradictions in the index, or lists of keys that are no chain. 0 in a healthy system.",
    "payload_bytes_read": "Bytes sent to clients that do not map the arena.",
    "payload_bytes_written": "Bytes that such clients sent.",
    "requests": "Requests, all of them.",
    "requests_malformed": "Those that are no message of the protocol.",
    "requests_refused": "Those answered with an error.",
    "requests_expired": "Those read after their deadline.",
    "requests_slow": "Those that took so long that the log has a line.",
    "requests_failed": "Those at which the daemon failed: its log has a traceback.",
    "sessions_opened": "Sessions of clients.",
    "sessions_refused": "Clients that were not let in.",
    "sessions_cut": "Sessions that the daemon ended.",
    "handshakes_refused": "Connections of other hosts whose key is not allowed.",
    "loop_stalls": "Times that the daemon did not run for more than a tenth of a second.",
    "connections_refused": "Connections to the control socket beyond the limit.",
}
"""The daemon's counters, by their names in the stats."""

_GAUGES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("uptime_seconds", "Since the daemon was started.", ("daemon", "uptime_s")),
    ("resident_bytes", "Memory of the daemon besides the arena.", ("daemon", "rss_besides_arena_bytes")),
    ("arena_bytes", "Size of the arena that was asked for.", ("arena", "bytes")),
    ("arena_populated_bytes", "What of it has its memory.", ("arena", "populated_bytes")),
    ("arena_locked_bytes", "What of it is locked in memory.", ("arena", "locked_bytes")),
    ("arena_used_bytes", "Frames in use.", ("arena", "used_bytes")),
    ("arena_free_bytes", "What is left of the populated part.", ("arena", "free_bytes")),
    ("arena_quarantined_bytes", "Frames that wait for the end of a writer.", ("arena", "quarantined_bytes")),
    ("arena_regions", "Pieces that the arena is made of.", ("arena", "regions")),
    ("pinned_bytes", "Bytes that pins keep.", ("pins", "bytes")),
    (
        "nvme_write_budget_bytes_per_day", "How much may be written in a day; 0: no limit.",
        ("tiers", "nvme", "write_budget_bytes_per_day"),
    ),
    ("nvme_write_budget_left_ratio", "What is left of two hours' worth of it.", ("tiers", "nvme", "write_budget_left")),
    (
        "nvme_write_amplification_ratio", "Bytes written to disks for each byte of a block kept there.",
        ("tiers", "nvme", "write_amplification"),
    ),
    ("nvme_promotion_in_flight_bytes", "Reads under way for DRAM.", ("tiers", "nvme", "promotion_in_flight_bytes")),
    ("nvme_write_in_flight_bytes", "Writes under way.", ("tiers", "nvme", "write_in_flight_bytes")),
)  # fmt: skip

_TIER_COUNTERS = {
    "written_blocks": "Blocks written from DRAM.",
    "promoted_blocks": "Blocks read into DRAM.",
    "direct_blocks": "Blocks that clients read there themselves.",
    "direct_stored_blocks": "Blocks that clients wrote there themselves.",
    "bad_blocks": "Blocks that failed their checksum when somebody wanted them, and were dropped.",
    "failed_reads": "Reads that a disk failed.",
    "write_failed_blocks": "Blocks that could not be written.",
}


_STATE = (
    Family("gauge", "up", (), "1 when the daemon answers; without it nothing else is here.", lambda tree: ()),
    Family(
        "gauge", "build_info", ("version",), "The daemon's version.",
        lambda tree: [((tree["daemon"]["version"],), 1)],
    ),
    Family(
        "gauge", "healthy", (), "0 when there is a reason to look.",
        lambda tree: [((), int(tree["health"]["state"] == "ok"))],
    ),
    Family(
        "gauge", "health_problems", ("part",), "What is not well in each part of the daemon, counted.",
        lambda tree: (((part,), count) for part, count in tree["health"]["parts"].items()),
    ),
    Family("gauge", "health_reason_info", ("reason",), f"Why, in words (the first {read.MAX_REASONS}).", read.reasons),
    *(Family("gauge", name, (), text, read.at(*path)) for name, text, path in _GAUGES),
    Family(
        "gauge", "sessions", (), "Clients that are connected (up to 256).",
        lambda tree: [((), len(tree["sessions"]))],
    ),
)  # fmt: skip
_TRAFFIC = (
    Family(
        "histogram", "request_seconds", ("request",), "In the daemon, from decoding to the encoded reply.",
        read.histogram("request_ns", "request"), read.seconds(10_000, 10 * read.NS),
    ),
    Family(
        "histogram", "match_asked_tokens", (), "Tokens that a lookup asked for.",
        read.histogram("asked_tokens"), read.powers(4, 20),
    ),
    Family(
        "histogram", "match_hit_tokens", (), "Tokens that it found, in all tiers together.",
        read.histogram("hit_tokens"), read.powers(4, 20),
    ),
    Family(
        "counter", "asked_tokens_total", (), "Tokens looked up, without those of prefetches.",
        read.at("traffic", "asked_tokens"),
    ),
    Family(
        "counter", "hit_tokens_total", ("tier",), "Those found, by tier: over `asked_tokens_total` it is the hit rate.",
        read.hit_tokens,
    ),
    Family(
        "counter", "hit_blocks_total", ("tier",), "Blocks found, by tier: over `match_blocks_asked_total`.",
        read.hit_blocks,
    ),
    Family(
        "counter", "moved_bytes_total", ("tier", "direction"),
        "Bytes of blocks `in` to a tier and `out` of it. Out of DRAM: of frames that were named to readers.",
        read.moved,
    ),
    Family(
        "gauge", "leases", ("kind",), "Leases that are open (`read`, `write`), and writes in quarantine.",
        lambda tree: (((kind,), tree["leases"][kind]) for kind in ("read", "write", "quarantined")),
    ),
    Family(
        "histogram", "lease_seconds", ("kind",), "How long leases had been open when they ended.",
        read.histogram("lease_ns", "kind"), read.seconds(100_000, 1000 * read.NS),
    ),
    Family(
        "gauge", "queue_depth", ("queue", "directory"),
        "What waits: requests for blocks on their way up, blocks for their writers, blocks to be written, operations "
        "for each disk and those it is at.", read.queues,
    ),
)  # fmt: skip
_TIERS = (
    Family("gauge", "tier_blocks", ("tier",), "Blocks in a tier.", read.each_tier("blocks")),
    Family("gauge", "tier_bytes", ("tier",), "Their bytes.", read.each_tier("bytes")),
    Family("gauge", "tier_capacity_bytes", ("tier",), "Bytes that fit.", read.each_tier("capacity_bytes")),
    Family("counter", "tier_evicted_blocks_total", ("tier",), "Blocks evicted to make room.", read.evicted),
    *(
        Family("counter", f"tier_{name}_total", ("tier",), text, read.each_tier(name))
        for name, text in _TIER_COUNTERS.items()
    ),
    Family(
        "counter", "tier_skipped_blocks_total", ("reason",), "Blocks that were not written to NVMe, and why.",
        read.skipped,
    ),
)  # fmt: skip
_DISKS = (
    Family(
        "histogram", "promotion_seconds", ("directory", "urgency"),
        "A block from NVMe into DRAM: waiting, reading, checksum. `load`: somebody waits for it; else `prefetch`.",
        read.histogram("promotion_ns", "directory", "urgency"), read.seconds(10_000, 10 * read.NS),
    ),
    Family(
        "histogram", "demotion_seconds", ("directory",), "A block from DRAM to NVMe, likewise.",
        read.histogram("demotion_ns", "directory"), read.seconds(10_000, 10 * read.NS),
    ),
    Family(
        "histogram", "disk_call_seconds", ("directory", "call"),
        "In the system calls of one run of blocks that adjoin; `read` or `write`.",
        read.histogram("disk_call_ns", "directory", "call"), read.seconds(10_000, 10 * read.NS),
    ),
    Family(
        "histogram", "disk_call_bytes", ("directory", "call"), "What these moved.",
        read.histogram("disk_call_bytes", "directory", "call"), read.powers(12, 24),
    ),
    Family(
        "gauge", "disk_oldest_seconds", ("directory",), "How long the oldest operation has been with the disk.",
        read.each_directory("oldest_age_s"),
    ),
    Family(
        "counter", "disk_checksum_failures_total", ("directory",), "Blocks read that are not what was stored.",
        read.each_directory("checksum_failures"),
    ),
    Family("counter", "disk_errors_total", ("directory", "errno"), "Operations that a disk failed.", read.errors),
)  # fmt: skip
_NAMESPACES = (
    Family(
        "gauge", "namespaces", (), "Namespaces that are registered (up to 1024).",
        lambda tree: [((), len(tree["namespaces"]))],
    ),
    Family(
        "gauge", "namespace_blocks", (*_NAMESPACE, "tier"),
        f"Blocks of a namespace: of the {read.MAX_NAMESPACES} that have most or are asked for most.",
        read.namespaces(read.blocks_by_tier),
    ),
    Family("gauge", "namespace_bytes", (*_NAMESPACE, "tier"), "Their bytes.", read.namespaces(read.bytes_by_tier)),
    Family(
        "counter", "namespace_asked_blocks_total", _NAMESPACE, "Blocks looked up.", read.namespaces(read.asked_blocks)
    ),
    Family(
        "counter", "namespace_hit_blocks_total", (*_NAMESPACE, "tier"), "Those found.",
        read.namespaces(read.hits_by_tier),
    ),
    Family(
        "gauge", "quota_bytes", _QUOTA,
        f"What a tenant or namespace with a quota may have (the first {read.MAX_QUOTAS}).", read.quotas("limit_bytes"),
    ),
    Family("gauge", "quota_used_bytes", _QUOTA, "What it has.", read.quotas("used_bytes")),
    Family(
        "counter", "quota_refused_blocks_total", _QUOTA,
        "Blocks that were not stored there because nothing more of its own could go.", read.quotas("refused_blocks"),
    ),
)  # fmt: skip

_HINTS = (
    Family(
        "counter", "hints_total", ("said",), "What hints of clients said; one may say several things.",
        read.hints("done", "returning", "ttl", "priority"),
    ),
    Family(
        "counter", "hint_expired_blocks_total", (), "Blocks that were evicted because the time of a hint was up.",
        read.at("hints", "expired_blocks"),
    ),
    Family(
        "counter", "hint_ahead_blocks_total", (), "Blocks brought up to DRAM shortly before a client was to be back.",
        read.at("hints", "ahead_blocks"),
    ),
    Family(
        "gauge", "hint_kept_blocks", ("why",), "Blocks that are kept for a client to be back, or of high priority.",
        read.hints("awaited_blocks", "high_blocks"),
    ),
)  # fmt: skip

FAMILIES: tuple[Family, ...] = (
    *_STATE, *_TRAFFIC, *_TIERS, *_DISKS, *_NAMESPACES, *_HINTS,
    *(Family("counter", f"{name}_total", (), text, read.at("counters", name)) for name, text in COUNTERS.items()),
)  # fmt: skip


def table() -> str:
    """What there is, as the documentation has it."""
    lines = ["| name | kind | labels | meaning |", "|---|---|---|---|"]
    for family in FAMILIES:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        lines.append(f"| `{PREFIX}{family.name}` | {family.kind} | {labels} | {family.text} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
