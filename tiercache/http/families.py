"""The daemon's metrics: name, kind, labels, meaning, and how each is read from the stats.

A metric keeps its name and meaning. `FAMILIES`, at the end, has all of them in the order of `/metrics`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tiercache.http import readings as read
from tiercache.http.readings import Samples, Steps, Tree

PREFIX = "tiercache_"


class Family(NamedTuple):
    """One metric. `samples` reads it from a tree of stats with histograms; empty if the daemon has no such figure."""

    kind: str
    name: str
    labels: tuple[str, ...]
    text: str
    samples: Callable[[Tree], Samples]
    steps: Steps = Steps((), 1)

    @property
    def full_name(self) -> str:
        """The exported name: metrics of the process have the names that all programs use."""
        return self.name if self.name.startswith("process_") else PREFIX + self.name


_STATE_GAUGES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("uptime_seconds", "Seconds since the daemon started.", ("daemon", "uptime_s")),
    (
        "resident_bytes",
        "Physical memory of the daemon in bytes, without the arena.",
        ("daemon", "rss_besides_arena_bytes"),
    ),
    ("arena_bytes", "Configured size of the arena, the memory for blocks in DRAM, in bytes.", ("arena", "bytes")),
    ("arena_populated_bytes", "Bytes of the arena that have physical memory by now.", ("arena", "populated_bytes")),
    (
        "arena_locked_bytes",
        "Bytes of the arena that are locked in memory and cannot be swapped.",
        ("arena", "locked_bytes"),
    ),
    ("arena_used_bytes", "Bytes of the arena in use by blocks and stores under way.", ("arena", "used_bytes")),
    ("arena_free_bytes", "Bytes of the populated arena that are free.", ("arena", "free_bytes")),
    (
        "arena_quarantined_bytes",
        "Bytes of the arena that stay unused until the process of a client that broke off a store has exited.",
        ("arena", "quarantined_bytes"),
    ),
    ("arena_regions", "Regions that the arena is made of.", ("arena", "regions")),
)

STATE = (
    Family(
        "gauge",
        "up",
        (),
        "1 if the daemon answers, 0 if only its HTTP process does; then there are no other metrics.",
        lambda tree: (),
    ),
    Family(
        "gauge",
        "build_info",
        ("version",),
        "Always 1; the label has the daemon's version.",
        lambda tree: [((tree["daemon"]["version"],), 1)],
    ),
    Family(
        "gauge",
        "healthy",
        (),
        "1 if nothing is wrong, 0 if health_problems and health_reason_info say what is.",
        lambda tree: [((), int(tree["health"]["state"] == "ok"))],
    ),
    Family(
        "gauge",
        "health_problems",
        ("part",),
        "Problems that each part of the daemon has now; 0 if it is well.",
        lambda tree: (((part,), count) for part, count in tree["health"]["parts"].items()),
    ),
    Family(
        "gauge",
        "health_reason_info",
        ("reason",),
        f"Always 1 for each problem that there is now, in words (the first {read.MAX_REASONS}).",
        read.reasons,
    ),
    *(Family("gauge", name, (), text, read.at(*path)) for name, text, path in _STATE_GAUGES),
    Family(
        "gauge",
        "sessions",
        (),
        "Clients connected now, with the daemon's HTTP process and the commands (up to 256).",
        lambda tree: [((), len(tree["sessions"]))],
    ),
    Family(
        "gauge",
        "engines",
        (),
        "Clients connected now, without the daemon's HTTP process and the commands.",
        read.engines,
    ),
)

PROCESS = (
    Family(
        "counter",
        "process_cpu_seconds_total",
        (),
        "Processor time that the daemon has used, user and system, in seconds.",
        read.at("daemon", "cpu_s"),
    ),
    Family(
        "gauge",
        "process_start_time_seconds",
        (),
        "When the daemon started, in seconds since 1970 (UTC).",
        read.at("daemon", "started_unix_s"),
    ),
    Family(
        "gauge",
        "process_resident_memory_bytes",
        (),
        "Physical memory of the daemon in bytes, the arena included.",
        read.at("daemon", "rss_bytes"),
    ),
    Family(
        "gauge",
        "process_virtual_memory_bytes",
        (),
        "Address space of the daemon in bytes.",
        read.at("daemon", "vm_bytes"),
    ),
    Family(
        "gauge",
        "process_open_fds",
        (),
        "File descriptors that the daemon has open.",
        read.at("daemon", "open_fds"),
    ),
    Family(
        "gauge",
        "process_max_fds",
        (),
        "File descriptors that the daemon may have open.",
        read.at("daemon", "max_fds"),
    ),
)
"""Metrics of the daemon's process, under the names that every dashboard looks for. The daemon reports them: this
process may be in another PID namespace, where prometheus_client's collector would read another process."""


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


_TIER_COUNTERS = {
    "written_blocks": "Blocks written from DRAM to this tier.",
    "promoted_blocks": "Blocks read from this tier into DRAM.",
    "direct_blocks": "Blocks that clients read from this tier's disks themselves (GPUDirect).",
    "direct_stored_blocks": "Blocks that clients wrote to this tier's disks themselves (GPUDirect).",
    "bad_blocks": "Blocks of this tier that failed their checksum when they were read, and were dropped.",
    "failed_reads": "Reads of blocks of this tier that a disk failed.",
    "write_failed_blocks": "Blocks that could not be written to this tier.",
}

_DISK_GAUGES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("pinned_bytes", "Bytes of the arena that `tiercache pin` keeps from eviction.", ("pins", "bytes")),
    (
        "nvme_write_budget_bytes_per_day",
        "Bytes that may be written to NVMe in a day (nvme_write_budget); 0 means no limit.",
        ("tiers", "nvme", "write_budget_bytes_per_day"),
    ),
    (
        "nvme_write_budget_left_ratio",
        "Part of the write budget of two hours that is left, 0 to 1; near 0 only blocks that were asked for twice are "
        "written.",
        ("tiers", "nvme", "write_budget_left"),
    ),
    (
        "nvme_write_amplification_ratio",
        "Bytes written to disks, the index included, for each byte of a block kept there; missing until 64 MiB of "
        "blocks are written.",
        ("tiers", "nvme", "write_amplification"),
    ),
    (
        "nvme_promotion_in_flight_bytes",
        "Bytes being read from NVMe into DRAM now.",
        ("tiers", "nvme", "promotion_in_flight_bytes"),
    ),
    (
        "nvme_write_in_flight_bytes",
        "Bytes being written to NVMe now, until their blocks are visible there.",
        ("tiers", "nvme", "write_in_flight_bytes"),
    ),
)

TIERS = (
    Family("gauge", "tier_blocks", ("tier",), "Blocks that a tier holds now.", read.each_tier("blocks")),
    Family("gauge", "tier_bytes", ("tier",), "Bytes of the blocks that a tier holds now.", read.each_tier("bytes")),
    Family(
        "gauge",
        "tier_capacity_bytes",
        ("tier",),
        "Bytes of blocks that a tier can hold.",
        read.each_tier("capacity_bytes"),
    ),
    Family(
        "counter",
        "tier_evicted_blocks_total",
        ("tier",),
        "Blocks evicted from a tier to make room for others.",
        read.evicted,
    ),
    *(
        Family("counter", f"tier_{name}_total", ("tier",), text, read.each_tier(name))
        for name, text in _TIER_COUNTERS.items()
    ),
    Family(
        "counter",
        "tier_skipped_blocks_total",
        ("reason",),
        "Blocks that were not written to NVMe, by reason.",
        read.skipped,
    ),
    Family(
        "counter",
        "nvme_head_copied_bytes_total",
        (),
        "Bytes of blocks written to a further NVMe directory, because many chains that go there begin with them.",
        read.at("tiers", "nvme", "head_copied_bytes"),
    ),
    *(Family("gauge", name, (), text, read.at(*path)) for name, text, path in _DISK_GAUGES),
)

DISKS = (
    Family(
        "histogram",
        "promotion_seconds",
        ("directory", "urgency"),
        "Time to bring a block from NVMe into DRAM, in seconds: waiting, reading, checksum; urgency is load if a "
        "client waits, else prefetch.",
        read.histogram("promotion_ns", "directory", "urgency"),
        read.seconds(10_000, 10 * read.NS),
    ),
    Family(
        "histogram",
        "demotion_seconds",
        ("directory",),
        "Time to write a block from DRAM to NVMe, in seconds: waiting, writing, and up to 0.05 until the loop is told, "
        "while others wait.",
        read.histogram("demotion_ns", "directory"),
        read.seconds(10_000, 10 * read.NS),
    ),
    Family(
        "histogram",
        "disk_call_seconds",
        ("directory", "call"),
        "Time of one system call that reads or writes adjoining blocks, in seconds; with AIO, from its submission to "
        "its result.",
        read.histogram("disk_call_ns", "directory", "call"),
        read.seconds(10_000, 10 * read.NS),
    ),
    Family(
        "histogram",
        "disk_call_bytes",
        ("directory", "call"),
        "Bytes moved by one system call that reads or writes adjoining blocks.",
        read.histogram("disk_call_bytes", "directory", "call"),
        read.powers(12, 24),
    ),
    Family(
        "gauge",
        "disk_oldest_seconds",
        ("directory",),
        "Age of the oldest operation that a disk has not finished, in seconds; it grows while the disk hangs.",
        read.each_directory("oldest_age_s"),
    ),
    Family(
        "gauge",
        "disk_open",
        ("directory",),
        "1 if the daemon uses a directory, 0 while it goes on without it and tries to open it again.",
        read.open_directories,
    ),
    Family(
        "counter",
        "disk_open_failures_total",
        ("directory",),
        "Attempts to open a directory that failed.",
        read.each_directory("open_failures"),
    ),
    Family(
        "counter",
        "disk_worker_starts_total",
        ("directory",),
        "Worker processes that served a directory since the daemon opened it; 0 without such processes.",
        read.each_directory("worker_starts"),
    ),
    Family(
        "counter",
        "disk_other_key_blocks_total",
        ("directory",),
        "Blocks read that were stored under another nvme_key, and were dropped; no fault of the disk.",
        read.each_directory("other_key_blocks"),
    ),
    Family(
        "counter",
        "disk_write_failures_total",
        ("directory",),
        "Writes of blocks, and new segments, that a disk failed.",
        read.each_directory("write_failures"),
    ),
    Family(
        "counter",
        "disk_checksum_failures_total",
        ("directory",),
        "Blocks read from a directory whose bytes are not those that were written; they were dropped.",
        read.each_directory("checksum_failures"),
    ),
    Family(
        "counter",
        "disk_failures_total",
        ("directory",),
        "Reads and writes of blocks that a disk failed, for any reason.",
        read.failures,
    ),
    Family(
        "counter",
        "disk_errors_total",
        ("directory", "errno"),
        "Reads and writes of blocks that a disk failed, by errno; 5, 28 and 30 are listed from the start.",
        read.errors,
    ),
)


BREAKER_STATES = ("closed", "open", "half_open")

_SHARED_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("lookups", "lookups", "Look-ups in the shared store."),
    ("lookups_joined", "lookups_shared", "Requests that waited for a look-up that another request had begun."),
    (
        "lookups_late",
        "lookups_late",
        "Requests answered from this host alone, as shared_lookup_timeout or half of their own time was over.",
    ),
    ("fetched_blocks", "fetched_blocks", "Blocks fetched from the shared store into DRAM."),
    ("fetched_bytes", "fetched_bytes", "Bytes fetched from the shared store for these blocks, as they are stored."),
    (
        "bad_blocks",
        "bad_blocks",
        "Blocks of the shared store whose bytes are not those that a host stored there; they were not used.",
    ),
    (
        "other_version_blocks",
        "other_version_blocks",
        "Blocks of the shared store that a host of another release stored in a form of its own; they were not used.",
    ),
    ("failed_fetches", "failed_fetches", "Fetches of blocks that the shared store failed or did not answer in time."),
    ("written_blocks", "written_blocks", "Blocks sent to the shared store."),
    ("written_bytes", "written_bytes", "Bytes sent to the shared store for these blocks, as they are stored."),
    ("there_blocks", "there_blocks", "Blocks that were not sent, because the shared store had them already."),
    ("write_failed_blocks", "write_failed_blocks", "Blocks that could not be written to the shared store."),
    ("epoch_changes", "epoch_changes", "Times that this host found a flush by another host in the shared store."),
)
"""Names of the metrics without their ending, of the figures in the stats, and their meaning."""

_SHARED_GAUGES: tuple[tuple[str, str], ...] = (
    ("lookups_under_way", "Look-ups in the shared store that have not been answered yet."),
    ("write_queue_blocks", "Blocks that wait to be sent to the shared store."),
    ("write_in_flight_bytes", "Bytes being sent to the shared store now."),
    (
        "flushes_waiting",
        "Notes that the shared store has yet to replace, one or more for each flush; until then this host uses nothing "
        "that they are about.",
    ),
)

SHARED = (
    Family(
        "gauge",
        "shared_breaker_state",
        ("state",),
        "1 for the state of the shared store's breaker: closed (in use), open (the store is away), half_open (this "
        "host asks whether it is back).",
        read.shared_states(BREAKER_STATES),
    ),
    Family(
        "counter",
        "shared_breaker_opened_total",
        (),
        "Times that the shared store went away.",
        read.at("tiers", read.SHARED, "breaker", "opened"),
    ),
    *(Family("counter", f"shared_{name}_total", (), text, read.shared(path)) for name, path, text in _SHARED_COUNTERS),
    Family(
        "counter",
        "shared_skipped_blocks_total",
        ("reason",),
        "Blocks that were not sent to the shared store: queue_full (too many waited), evicted (they left DRAM before "
        "their turn), unplaced (their place in the prompt was no longer known).",
        read.shared_skipped,
    ),
    *(Family("gauge", f"shared_{name}", (), text, read.shared(name)) for name, text in _SHARED_GAUGES),
)


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


COUNTERS = {
    "match_requests": "Requests that looked up a prompt's blocks, including prefetches.",
    "match_blocks_asked": "Blocks that clients looked up, including prefetches.",
    "match_blocks_hit": "Blocks that were looked up and found in DRAM.",
    "match_blocks_below": "Blocks that were looked up and found below DRAM (on NVMe or in the shared store), beyond "
    "those found in DRAM.",
    "match_blocks_shared": "Blocks that were looked up and found in the shared store alone; part of "
    "match_blocks_below. They were claimed: what could not be fetched is computed.",
    "loads_good": "Loads that the daemon confirmed after the client had copied the blocks.",
    "loads_revoked": "Loads that the daemon revoked before the client had copied the blocks; the client computes "
    "them instead.",
    "reserved_blocks": "Blocks for which a client was given a frame of the arena to write to.",
    "dedup_blocks": "Blocks that a client offered and that were stored already, or were being stored by another "
    "client.",
    "refused_blocks": "Blocks that were not stored because no frame of the arena was free for them.",
    "refused_by_quota_blocks": "Blocks that were not stored because the client's quota left no room; part of "
    "refused_blocks.",
    "refused_populating_blocks": "Blocks that were not stored because the arena was still being populated after the "
    "daemon's start; part of refused_blocks.",
    "stored_blocks": "Blocks that clients have stored in DRAM.",
    "stored_bytes": "Bytes of the blocks that clients have stored in DRAM.",
    "dropped_blocks": "Blocks whose store was begun and never finished.",
    "evicted_blocks": "Blocks evicted from DRAM to make room; they may still be on NVMe.",
    "flushed_blocks": "Blocks removed by `tiercache flush`.",
    "flushes": "Calls of `tiercache flush`.",
    "leases_expired": "Loads and stores that the daemon ended because the client did not renew them in time.",
    "quarantines": "Stores whose client went away before it said that its copies had ended; their frames wait for "
    "its process to exit.",
    "regions_drained": "Regions of the arena that were emptied to hold blocks of another size.",
    "broken_chains": "Lists of keys from clients that are not chains: a client repeats, leaves out or mixes keys. The "
    "sessions in `tiercache stats --json` say which client; 0 with correct clients.",
    "payload_bytes_read": "Bytes of blocks sent in messages to clients that do not share the arena's memory.",
    "payload_bytes_written": "Bytes of blocks received in messages from clients that do not share the arena's memory.",
    "requests": "Requests that the daemon received.",
    "requests_malformed": "Requests that are not a valid message of the protocol.",
    "requests_refused": "Requests that were answered with an error.",
    "requests_expired": "Requests that the daemon did not carry out because their deadline had passed.",
    "requests_slow": "Requests that took longer than the setting slow_request; each has a line in the log.",
    "requests_failed": "Requests during which the daemon itself failed; each has a traceback in the log. 0 in a "
    "healthy system.",
    "sessions_opened": "Connections that clients opened and the daemon accepted.",
    "sessions_refused": "Connections that the daemon refused, for example beyond max_sessions or without a common "
    "protocol version.",
    "sessions_cut": "Connections that the daemon ended, for example of a client that did not read its replies.",
    "handshakes_refused": "Connections from other hosts whose key is not among the allowed clients.",
    "loop_stalls": "Times that the daemon's event loop stood still for more than 0.1 s, usually for want of a "
    "processor.",
    "connections_refused": "Connections to the control socket beyond its limit.",
}
"""The daemon's counters, by their names in the stats."""

COUNTED = tuple(
    Family("counter", f"{name}_total", (), text, read.at("counters", name)) for name, text in COUNTERS.items()
)


FAMILIES: tuple[Family, ...] = (
    *STATE,
    *TRAFFIC,
    *TIERS,
    *DISKS,
    *SHARED,
    *NAMESPACES,
    *HINTS,
    *PROCESS,
    *COUNTED,
)
