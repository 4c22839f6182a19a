"""What clients ask of the daemon: requests, lookups, bytes moved, leases and queues."""

from __future__ import annotations

from tiercache.http import readings as read
from tiercache.http.measured.family import Family

TRAFFIC = (
    Family(
        "histogram",
        "request_seconds",
        ("request",),
        "Time the daemon took for a request, in seconds, from decoding it to its encoded reply.",
        read.histogram("request_ns", "request"),
        read.seconds(10_000, 10 * read.NS),
    ),
    Family(
        "histogram",
        "match_asked_tokens",
        (),
        "Tokens that one lookup asked for.",
        read.histogram("asked_tokens"),
        read.powers(4, 20),
    ),
    Family(
        "histogram",
        "match_hit_tokens",
        (),
        "Tokens that one lookup found, in all tiers together.",
        read.histogram("hit_tokens"),
        read.powers(4, 20),
    ),
    Family(
        "counter",
        "asked_tokens_total",
        (),
        "Tokens of prompts that engines looked up, without prefetches.",
        read.at("traffic", "asked_tokens"),
    ),
    Family(
        "counter",
        "hit_tokens_total",
        ("tier",),
        "Tokens of prompts that were found, by tier; divided by asked_tokens_total it is the hit rate.",
        read.hit_tokens,
    ),
    Family(
        "counter",
        "hit_blocks_total",
        ("tier",),
        "Blocks that were looked up and found, by tier.",
        read.hit_blocks,
    ),
    Family(
        "counter",
        "moved_bytes_total",
        ("tier", "direction"),
        "Bytes of blocks moved into a tier (in) and out of it (out). Out of DRAM: bytes named to clients that copy "
        "them.",
        read.moved,
    ),
    Family(
        "gauge",
        "leases",
        ("kind",),
        "Loads (read) and stores (write) under way, and stores in quarantine (quarantined).",
        lambda tree: (((kind,), tree["leases"][kind]) for kind in ("read", "write", "quarantined")),
    ),
    Family(
        "histogram",
        "lease_seconds",
        ("kind",),
        "How long a load (read) or store (write) had been under way when it ended, in seconds.",
        read.histogram("lease_ns", "kind"),
        read.seconds(100_000, 1000 * read.NS),
    ),
    Family(
        "gauge",
        "queue_depth",
        ("queue", "directory"),
        "What waits now: requests for blocks that come up, or for a look-up in the shared store (parked_requests), "
        "blocks being stored (pending_blocks), blocks to be written to NVMe (write_behind), and for each disk "
        "operations that wait (disk_...) and run (disk_running).",
        read.queues,
    ),
)
