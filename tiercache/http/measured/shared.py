"""The shared tier: what this host asks of a store that other hosts use too."""

from __future__ import annotations

from tiercache.http import readings as read
from tiercache.http.measured.family import Family

BREAKER_STATES = ("closed", "open", "half_open")

_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("lookups", "lookups", "Look-ups in the shared store."),
    ("lookups_joined", "lookups_shared", "Requests that waited for a look-up that another request had begun."),
    (
        "lookups_late",
        "lookups_late",
        "Look-ups that took longer than shared_lookup_timeout; their requests were answered from this host alone.",
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

_GAUGES: tuple[tuple[str, str], ...] = (
    ("lookups_under_way", "Look-ups in the shared store that have not been answered yet."),
    ("write_queue_blocks", "Blocks that wait to be sent to the shared store."),
    ("write_in_flight_bytes", "Bytes being sent to the shared store now."),
    (
        "flushes_waiting",
        "Flushes that the shared store has not been told of yet; this host uses nothing of the store until it has.",
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
    *(Family("counter", f"shared_{name}_total", (), text, read.shared(path)) for name, path, text in _COUNTERS),
    Family(
        "counter",
        "shared_skipped_blocks_total",
        ("reason",),
        "Blocks that were not sent to the shared store: queue_full (too many waited), evicted (they left DRAM before "
        "their turn), unplaced (their place in the prompt was no longer known).",
        read.shared_skipped,
    ),
    *(Family("gauge", f"shared_{name}", (), text, read.shared(name)) for name, text in _GAUGES),
)
