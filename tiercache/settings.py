"""Every setting of the daemon: its key, field and kind, and what it is for."""

from __future__ import annotations

from tiercache.setting_kinds import (
    ARENA,
    BUDGET,
    DIRECTORIES,
    DIRECTORY,
    ENDPOINT,
    GRACE,
    GROUP,
    HOSTS,
    HTTP,
    LISTEN,
    MAX_REGIONS,
    OPTIONAL_DIRECTORY,
    OPTIONAL_FILE,
    QUARANTINE,
    QUOTA,
    SHARE,
    SLOW,
    SWITCH,
    TOPIC,
    TTL,
    Setting,
    check_region,
    choice,
    count,
    size,
    toml_bytes,
    within,
)

_TABLE = (
    Setting(
        "run_dir", "run_dir", DIRECTORY,
        "Directory of the daemon's sockets. Its path is the daemon's address: clients that are given none "
        "look in the same place.",
    ),
    Setting(
        "arena", "arena_bytes", ARENA,
        "Page-locked host memory for KV blocks, shared with the clients that map it. Taken when the daemon "
        "starts, in whole 2MiB pages, and never grown.",
    ),
    Setting(
        "region", "region_bytes", size(check_region),
        "The arena is made of regions of this size, one memfd each: the unit in which memory is populated, "
        "registered with CUDA and re-split between block sizes. A multiple of 2MiB; raised by itself so that "
        f"{MAX_REGIONS} are enough, and never larger than the arena.",
    ),
    Setting(
        "lock_memory", "lock_memory", choice("auto", "off", "require"),
        "Lock the arena in RAM (mlock). auto: try, and say in `tiercache stats` when the limit (ulimit -l) "
        "is too low. require: do not start without it. off: do not try.",
    ),
    Setting(
        "policy", "policy", choice("lru", "hazard", "arc", "s3fifo", "wtinylfu", "workload-aware"),
        "Which blocks go first when a tier is full. lru: the end of the prefix that was used longest ago. "
        "hazard: what is least likely to be used soon for the room that it takes, learnt from what is asked for. "
        "arc: of those used once or those used again, in shares that adapt. "
        "s3fifo: in the order in which they came, but those used meanwhile stay. "
        "wtinylfu: what was asked for less often than what comes. "
        "workload-aware: what is least likely to be used again while it would last, by kind of request.",
    ),
    Setting(
        "headroom", "headroom_bytes", QUARANTINE,
        "Kept free in the arena, by evicting ahead of need when nothing waits to be written: stores and loads then "
        "find room at once, and new blocks stay only if the policy prefers them to what was there. 0: room is made "
        "when it is asked for.",
    ),
    Setting(
        "max_sessions", "max_sessions", count(1, 4096),
        "Clients connected at once. One more is refused with a line that says so.",
    ),
    Setting(
        "max_leases_per_session", "max_leases_per_session", count(1, 1 << 20),
        "Leases of one client at once: its loads and stores under way.",
    ),
    Setting(
        "lease_ttl_max", "lease_ttl_max_s", TTL,
        "Longest time that a lease lasts without being renewed: what a client that hangs can hold up.",
    ),
    Setting(
        "quarantine_per_client", "quarantine_per_client_bytes", QUARANTINE,
        "Frames of one client's unfinished stores that wait for proof that nobody writes to them any more; as much "
        "again of places on NVMe that it writes itself. "
        "Beyond it the client's stores are refused; its loads go on. 0: a quarter of the arena, at least 64MiB. Never "
        "more than half of the arena for a client (a process, or a tenant of other hosts), and three quarters for all.",
    ),
    Setting(
        "group", "group", GROUP,
        "Group whose members may connect too, by name or number: the run directory is 0750 then and its sockets 0660, "
        "not 0700 and 0600. Whoever connects can read and write the whole arena. Empty: the daemon's user alone.",
    ),
    Setting(
        "quota", "quota", QUOTA,
        "How much of the arena tenants may have: team-a=16GiB,team-b=4GiB,*=1GiB, * for each other one. A tenant at "
        "its limit makes room among its own blocks, and nobody else loses one for it. Clients on this host say their "
        "tenant, for others their key does; those of none have no limit. ns:5d1e0b3a=4GiB is for a namespace, by the "
        "start of its fingerprint (tiercache ls), which then does not count for its tenant. Empty: no quotas.",
    ),
    Setting(
        "listen", "listen", LISTEN,
        "Serve clients on other hosts at this address (tcp://0.0.0.0:7411), encrypted, and with the keys of curve_keys "
        "only. Their blocks go through messages, and each sees its own tenant's alone. Empty: this host only.",
    ),
    Setting(
        "curve_keys", "curve_keys", OPTIONAL_DIRECTORY,
        "Directory with the daemon's keys and those of the clients that may connect to listen; `tiercache keygen DIR` "
        "makes it.",
    ),
    Setting(
        "pin_share", "pin_share", SHARE,
        "Part of the arena that pins may hold, 0 to 1. A pin beyond it keeps fewer blocks.",
    ),
    Setting(
        "nvme", "nvme_dirs", DIRECTORIES,
        "Directories on local disks for the tier below DRAM, one for each disk; none: no such tier. Blocks "
        "there survive a restart. Each belongs to one daemon.",
    ),
    Setting(
        "nvme_size", "nvme_bytes", size(within(16 << 20, 1 << 50, toml_bytes)),
        "What all nvme directories together may take, their database included.",
    ),
    Setting(
        "nvme_segment", "nvme_segment_bytes", size(check_region),
        "Size of the files that the directories are filled with. Those of a directory that exists stay as they are.",
    ),
    Setting(
        "nvme_codec", "nvme_codec", choice("raw", "lz4", "zstd"),
        "How blocks are written to nvme directories, losing nothing: raw as they are, lz4 or zstd made smaller, byte "
        "planes of the namespace's elements apart. It saves bytes moved (bandwidth, wear) and no room, since slots are "
        "as large as blocks; it costs CPU time, so try `tiercache bench codec` first. Blocks that are there already "
        "stay readable whatever this says. zstd needs the extra zstd.",
    ),
    Setting(
        "nvme_key", "nvme_key", OPTIONAL_FILE,
        "File with a key (64 hex digits, readable by its owner alone) that blocks in nvme directories are encrypted "
        "with: AES-256-GCM, about half a millisecond of CPU for 2 MiB. What was stored without it, or with another "
        "one, is forgotten. GPUDirect does not go with it. Needs the extra encryption. "
        "Empty: not encrypted.",
    ),
    Setting(
        "nvme_write_budget", "nvme_write_budget_bytes", BUDGET,
        "Bytes a day that may be written to nvme directories, to spare SSDs: blocks that were asked for twice "
        "come first. 0: no limit.",
    ),
    Setting(
        "nvme_quota", "nvme_quota", QUOTA,
        "How much of all nvme directories together tenants or namespaces may have, written as in quota. Who is at its "
        "limit makes room among its own blocks there; what does not fit is not written, and nobody else loses a block "
        "for it. Empty: no quotas.",
    ),
    Setting(
        "grace", "grace_s", GRACE,
        "On SIGTERM, how long to go on writing blocks that are only in DRAM to the nvme directories.",
    ),
    Setting(
        "what_if", "what_if", SWITCH,
        "Estimate the hit rate that caches of other sizes would have, from a sample of at most 16,384 blocks (about "
        "2.5 MB, and about 1 ms of CPU time a second); shown by `tiercache stats`.",
    ),
    Setting(
        "record", "record", OPTIONAL_FILE,
        "Write what engines ask to this file (packed if it ends in .gz), for `tiercache replay`: times and hashes of "
        "keys with a secret that is kept nowhere, no tokens, names or tenants. An earlier file is kept as FILE.1. "
        "Empty: nothing is recorded.",
    ),
    Setting(
        "record_max", "record_max_bytes", size(within(1 << 20, 1 << 50, toml_bytes)),
        "Size at which the recording ends.",
    ),
    Setting(
        "kv_events", "kv_events", ENDPOINT,
        "Publish which blocks come to DRAM and NVMe and which leave them, in vLLM's format, on a ZeroMQ PUB socket at "
        "this address (tcp://127.0.0.1:5557, or ipc:// and a path), for routers that look for prefixes. Events carry "
        "token ids: whoever can connect can read prompts. Empty: no events.",
    ),
    Setting(
        "kv_events_replay", "kv_events_replay", ENDPOINT,
        "Address of a ROUTER socket where subscribers ask for events that they missed. Empty: no such socket.",
    ),
    Setting("kv_events_topic", "kv_events_topic", TOPIC, "Topic of the events, as their subscribers expect it."),
    Setting(
        "kv_events_buffer", "kv_events_buffer", count(1, 1_000_000),
        "Batches of events that are kept to be sent again, as long as they take no more than 64MiB.",
    ),
    Setting(
        "kv_events_allow_remote", "kv_events_allow_remote", SWITCH,
        "yes: kv_events may be addresses that other hosts reach (tcp://*:5557). There is no password and no "
        "encryption: whoever reaches them reads the tokens of all prompts.",
    ),
    Setting(
        "http", "http", HTTP,
        "Serve health, metrics, statistics and the affinity query over HTTP at this address (127.0.0.1:8181), from a "
        "process of its own that ends with the daemon. Needs the extra http. Empty: no HTTP.",
    ),
    Setting(
        "http_allow_remote", "http_allow_remote", SWITCH,
        "yes: http may be an address that other hosts reach. There is no password: they can read the statistics "
        "(names of models and clients, no tokens, no KV) and ask how much is stored of prompts whose salt they know.",
    ),
    Setting(
        "http_hosts", "http_hosts", HOSTS,
        "Further names that requests over HTTP may be for, with commas between them, such as those of a proxy. Without "
        "any, an address of this host is only asked as localhost, 127.0.0.1, [::1] or itself, so that no web page that "
        "was given its address can read it in somebody's browser.",
    ),
    Setting(
        "log_level", "log_level", choice("debug", "info", "warning", "error"),
        "Least important lines that are logged, to stderr.",
    ),
    Setting(
        "log_format", "log_format", choice("auto", "text", "json"),
        "auto: text; under systemd without the time and with the journal's level. json: one object a line.",
    ),
    Setting(
        "slow_request", "slow_request_s", SLOW,
        "Log requests for which the daemon took longer, with the time at work and in the queue: half of what clients "
        "give a request (500ms) is where they are about to lose patience. 0: none.",
    ),
)  # fmt: skip

SETTINGS: dict[str, Setting] = {setting.key: setting for setting in _TABLE}
"""Key -> how the field of `DaemonConfig` behind it is written, and what it is for."""
