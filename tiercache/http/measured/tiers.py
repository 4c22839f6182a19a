"""Tiers and the disks below them."""

from __future__ import annotations

from tiercache.http import readings as read
from tiercache.http.measured.family import Family

_TIER_COUNTERS = {
    "written_blocks": "Blocks written from DRAM to this tier.",
    "promoted_blocks": "Blocks read from this tier into DRAM.",
    "direct_blocks": "Blocks that clients read from this tier's disks themselves (GPUDirect).",
    "direct_stored_blocks": "Blocks that clients wrote to this tier's disks themselves (GPUDirect).",
    "bad_blocks": "Blocks of this tier that failed their checksum when they were read, and were dropped.",
    "failed_reads": "Reads of blocks of this tier that a disk failed.",
    "write_failed_blocks": "Blocks that could not be written to this tier.",
}

_GAUGES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
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
    *(Family("gauge", name, (), text, read.at(*path)) for name, text, path in _GAUGES),
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
        "Time to write a block from DRAM to NVMe, in seconds: waiting and writing.",
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
