"""The daemon itself: whether it is well, its memory and its process."""

from __future__ import annotations

from tiercache.http import readings as read
from tiercache.http.measured.family import Family

_GAUGES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
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
    *(Family("gauge", name, (), text, read.at(*path)) for name, text, path in _GAUGES),
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
