"""Every setting of the daemon: its field and default, its key, how it is written, and what it is for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tiercache.config.setting_kinds import (
    ARENA,
    BUDGET,
    DEPLOYMENT,
    DIRECTORIES,
    DIRECTORY,
    ENDPOINT,
    GRACE,
    GROUP,
    HOSTS,
    HTTP,
    LIFETIME,
    LISTEN,
    LOOKUP,
    MAX_NVME_BYTES,
    MAX_REGIONS,
    MIN_NVME_BYTES,
    OPTIONAL_DIRECTORY,
    OPTIONAL_FILE,
    QUARANTINE,
    QUOTA,
    SHARE,
    SLOW,
    STORE,
    SWITCH,
    TOPIC,
    TTL,
    NvmeDirectory,
    Setting,
    SettingKind,
    StoreUrl,
    check_region,
    check_segment,
    choice,
    count,
    parse_directory,
    size,
    toml_bytes,
    within,
)

ENV_PREFIX = "TIERCACHE_"


def default_run_dir(env: Mapping[str, str] = os.environ) -> Path:
    """The default place where daemon and clients meet: both compute the same path.

    $TIERCACHE_RUN_DIR, else $XDG_RUNTIME_DIR/tiercache, else /run/tiercache for root, else
    /tmp/tiercache-<uid>.
    """
    if env.get(ENV_PREFIX + "RUN_DIR"):
        return parse_directory(env[ENV_PREFIX + "RUN_DIR"])
    if env.get("XDG_RUNTIME_DIR"):
        return Path(env["XDG_RUNTIME_DIR"], "tiercache").absolute()
    if os.geteuid() == 0 and os.access("/run", os.W_OK):
        return Path("/run/tiercache")
    return Path(f"/tmp/tiercache-{os.geteuid()}")


def _setting(key: str, kind: SettingKind, default: Any, doc: str) -> Any:
    """A field. Its setting is called `key` in files, environment and on the command line."""
    about = {"key": key, "kind": kind, "doc": doc}
    made: dict[str, Any] = {"default_factory" if callable(default) else "default": default}
    return field(**made, metadata=about)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of all settings, as they are in use."""

    run_dir: Path = _setting(
        "run_dir",
        DIRECTORY,
        default_run_dir,
        "Directory of the daemon's sockets. Its path is the daemon's address; clients that are given no address look "
        "in the same default place.",
    )
    arena_bytes: int = _setting(
        "arena",
        ARENA,
        4 << 30,
        "Memory for KV blocks in DRAM, page-locked and shared with the engines that map it. Taken when the daemon "
        "starts, in whole 2MiB pages; it does not grow. Refused where "
        "the host or its cgroup has not so much and a sixteenth (8GiB at most) besides.",
    )
    region_bytes: int = _setting(
        "region",
        size(check_region),
        256 << 20,
        "Size of the pieces that the arena is made of. Memory is populated, registered with CUDA and divided among "
        "block sizes by the piece. A multiple of 2MiB; the daemon raises it so that "
        f"{MAX_REGIONS} pieces are enough, and keeps it within the arena.",
    )
    lock_memory: str = _setting(
        "lock_memory",
        choice("auto", "off", "require"),
        "auto",
        "Lock the arena in memory, so that it is never swapped. auto: try, and show in `tiercache stats` how much is "
        "locked if the limit (ulimit -l) is too low. require: do not start unless all of it can be locked. off: do "
        "not try.",
    )
    policy: str = _setting(
        "policy",
        choice("lru", "hazard"),
        "hazard",
        "Which blocks go first when a tier is full. lru: the end of the prefix that was used longest ago. "
        "hazard: what is least likely to be used soon for the room that it takes, learnt from what is asked for.",
    )
    headroom_bytes: int = _setting(
        "headroom",
        QUARANTINE,
        0,
        "Memory that is kept free in the arena by evicting blocks ahead of need. Stores and loads then find room at "
        "once. 0: blocks are evicted when room is needed.",
    )
    max_sessions: int = _setting(
        "max_sessions",
        count(1, 4096),
        256,
        "Maximum number of clients connected at the same time. Another one is refused, with the reason.",
    )
    max_leases_per_session: int = _setting(
        "max_leases_per_session",
        count(1, 1 << 20),
        1024,
        "Maximum number of loads and stores that one client may have under way at the same time.",
    )
    lease_ttl_max_s: float = _setting(
        "lease_ttl_max",
        TTL,
        60.0,
        "Longest time a load or store may take without a sign of life from the client. It bounds how long a client "
        "that hangs can hold up memory.",
    )
    quarantine_per_client_bytes: int = _setting(
        "quarantine_per_client",
        QUARANTINE,
        0,
        "Frames of one client's unfinished stores that wait for proof that no process writes to them any more; as much "
        "again of places on NVMe that it writes itself. "
        "Beyond it the client's stores are refused; its loads go on. 0: a quarter of the arena, at least 64MiB. Never "
        "more than half of the arena for a client (a process, or a tenant of other hosts), and three quarters for all.",
    )
    group: str = _setting(
        "group",
        GROUP,
        "",
        "Group, by name or number, whose members may connect in addition to the daemon's own user. The run directory "
        "then has mode 0750 and its sockets 0660 instead of 0700 and 0600. Members can read and write the whole "
        "arena. Empty: the daemon's user alone.",
    )
    quota: tuple[tuple[str, int], ...] = _setting(
        "quota",
        QUOTA,
        (),
        "Maximum memory for each tenant in the arena, such as team-a=16GiB,team-b=4GiB,*=1GiB; * stands for "
        "every other tenant. A tenant at its limit evicts its own blocks and never those of others. A client on this "
        "host names its tenant itself, a client on another host by its key; clients without a tenant have no limit. "
        "ns:5d1e0b3a=4GiB limits a namespace, named by the start of its fingerprint (tiercache ls), which then does "
        "not count for its tenant. Empty: no quotas.",
    )
    listen: str = _setting(
        "listen",
        LISTEN,
        "",
        "TCP address at which clients on other hosts may connect, such as tcp://0.0.0.0:7411 or tcp://[::]:7411. "
        "Connections are encrypted and need a key from curve_keys; each client sees the blocks of its own tenant only. "
        "Empty: clients on this host only.",
    )
    curve_keys: Path | None = _setting(
        "curve_keys",
        OPTIONAL_DIRECTORY,
        None,
        "Directory with the daemon's own key and the keys of clients that may connect to the listen address. Make it "
        "with `tiercache keygen DIR`.",
    )
    pin_share: float = _setting(
        "pin_share",
        SHARE,
        0.5,
        "Largest part of the arena, 0 to 1, that `tiercache pin` may keep from eviction. A pin beyond it keeps fewer "
        "blocks.",
    )
    nvme_dirs: tuple[NvmeDirectory, ...] = _setting(
        "nvme",
        DIRECTORIES,
        (),
        "Directories on local disks for the tier below DRAM, one for each disk; none: no such tier. Blocks "
        "there survive a restart. Each belongs to one daemon. A size may follow, for example "
        "/mnt/nvme0/kv:2TiB,/mnt/nvme1/kv:1TiB; without one a directory has an equal part of nvme_size. While one "
        "cannot be used the daemon goes on without it, and tries again.",
    )
    nvme_bytes: int = _setting(
        "nvme_size",
        size(within(MIN_NVME_BYTES, MAX_NVME_BYTES, toml_bytes)),
        64 << 30,
        "What all nvme directories without a size of their own may take together, their databases included.",
    )
    nvme_shrink: bool = _setting(
        "nvme_shrink",
        SWITCH,
        False,
        "Whether an nvme directory whose part has become smaller loses the blocks beyond it when the daemon starts. "
        "Otherwise they are kept, and the log says how many there are.",
    )
    nvme_require_mount: bool = _setting(
        "nvme_require_mount",
        SWITCH,
        False,
        "Use an nvme directory only on another file system than that of /, so that / does not fill up while a disk is "
        "not mounted. A mount point that /etc/fstab names is waited for in any case.",
    )
    nvme_segment_bytes: int = _setting(
        "nvme_segment",
        size(check_segment),
        1 << 30,
        "Size of the files that an nvme directory is filled with. Directories that exist already keep the size of "
        "their files.",
    )
    nvme_workers: str = _setting(
        "nvme_workers",
        choice("auto", "on", "off"),
        "auto",
        "Whether each nvme directory has a process of its own, which does its I/O, checksums, compression, encryption "
        "and index, so that several disks share no interpreter. auto: from two directories and four cores on.",
    )
    nvme_codec: str = _setting(
        "nvme_codec",
        choice("raw", "lz4", "zstd"),
        "raw",
        "Lossless compression of blocks on NVMe. raw: none. lz4, zstd: compressed, which saves disk bandwidth and "
        "wear for CPU time, but no disk space, because every block keeps a slot of full size. Try `tiercache bench "
        "codec` first. Blocks written with another codec stay readable. zstd needs the extra zstd.",
    )
    nvme_io: str = _setting(
        "nvme_io",
        choice("auto", "aio", "threads"),
        "auto",
        "What reads and writes blocks on NVMe. aio: Linux AIO, by one thread for each directory, where a test at the "
        "start shows that it works; it takes less CPU time for small blocks that come alone. threads: eight threads "
        "for each directory. auto: threads, which get on better beside a busy event loop.",
    )
    nvme_key: Path | None = _setting(
        "nvme_key",
        OPTIONAL_FILE,
        None,
        "File with the key that encrypts blocks on NVMe (AES-256-GCM): 64 hex digits, readable by its owner only. "
        "Costs about half a millisecond of CPU time for 2MiB. Blocks written without a key or with another one cannot "
        "be used any more. Rules out GPUDirect. Needs the extra encryption. Empty: blocks are not encrypted.",
    )
    nvme_write_budget_bytes: int = _setting(
        "nvme_write_budget",
        BUDGET,
        0,
        "Maximum bytes written to all nvme directories in a day, to spare SSDs. When it runs short, only "
        "blocks that were asked for twice are written. 0: no limit.",
    )
    nvme_quota: tuple[tuple[str, int], ...] = _setting(
        "nvme_quota",
        QUOTA,
        (),
        "Maximum bytes for each tenant or namespace in all nvme directories together, written as in quota. A "
        "tenant at its limit evicts its own blocks there; what does not fit is not written. Empty: no quotas.",
    )
    shared: StoreUrl = _setting(
        "shared",
        STORE,
        StoreUrl,
        "URL of a store that several hosts use as a tier below NVMe, such as valkey://kv.example:6379: what one host "
        "stores, the others find. Needs shared_key, or shared_plain. A password in it belongs in the file or in "
        "TIERCACHE_SHARED, not on the command line, where every user of the host reads it. Empty: no shared tier.",
    )
    shared_key: Path | None = _setting(
        "shared_key",
        OPTIONAL_FILE,
        None,
        "File with the key that all hosts of a deployment have: 64 hex digits, readable by its owner only. It encrypts "
        "and proves every block in the store (AES-256-GCM), and hides which prompts there are. With another key a host "
        "finds nothing. Needs the extra encryption.",
    )
    shared_plain: bool = _setting(
        "shared_plain",
        SWITCH,
        False,
        "yes: blocks in the shared store are not encrypted. Checksums find damage, but a stranger who can write to the "
        "store can give false KV to every host, and a stranger who can read it reads the KV. Only for a store that "
        "strangers cannot reach.",
    )
    shared_deployment: str = _setting(
        "shared_deployment",
        DEPLOYMENT,
        "default",
        "Name that is part of all names in the store. Hosts share blocks if it is the same; a flush of one deployment "
        "does not touch the others.",
    )
    shared_write: str = _setting(
        "shared_write",
        choice("all", "reused", "evicted"),
        "all",
        "Which blocks are sent to the shared store, in the background. all: each new block. reused: those that were "
        "asked for again. evicted: those that leave DRAM, the last of a prompt first; an object store then needs "
        "?pack=1 in its URL.",
    )
    shared_write_budget_bytes_per_s: int = _setting(
        "shared_write_budget",
        BUDGET,
        0,
        "Maximum bytes that this host sends to the shared store in a second. Blocks that DRAM evicts while they wait "
        "are not sent. 0: no limit.",
    )
    shared_lookup_timeout_s: float = _setting(
        "shared_lookup_timeout",
        LOOKUP,
        0.02,
        "How long a request may wait for a look-up in the shared store before it is answered from this host alone.",
    )
    shared_ttl_s: float = _setting(
        "shared_ttl",
        LIFETIME,
        86_400.0,
        "How long the first block of a prompt stays in a shared store that has lifetimes, from when it was last stored "
        "or fetched. Deeper blocks have less, so that a full store (volatile-ttl) drops the ends of prompts first.",
    )
    shared_codec: str = _setting(
        "shared_codec",
        choice("raw", "lz4", "zstd"),
        "raw",
        "Lossless compression of blocks in the shared store: saves its room and the network for CPU time. Hosts with "
        "different codecs read each other's blocks. zstd needs the extra zstd.",
    )
    shared_state: Path | None = _setting(
        "shared_state",
        OPTIONAL_DIRECTORY,
        None,
        "Directory for a note of flushes that the shared store could not be told of. Empty: run_dir; choose one that "
        "survives a restart of the host.",
    )
    grace_s: float = _setting(
        "grace",
        GRACE,
        20.0,
        "After SIGTERM, how long the daemon may go on writing blocks that are only in DRAM to NVMe and to the shared "
        "store before it ends.",
    )
    what_if: bool = _setting(
        "what_if",
        SWITCH,
        True,
        "Estimate the hit rate that the cache would have with more or less memory; `tiercache stats` shows it. Takes "
        "about 2.5MB of memory and 1ms of CPU time a second.",
    )
    record: Path | None = _setting(
        "record",
        OPTIONAL_FILE,
        None,
        "File to record lookups and stores in, for `tiercache replay`; compressed if the name ends in .gz. It holds "
        "times and hashes that cannot be traced back to prompts: no tokens, names or tenants. An earlier file is kept "
        "as FILE.1. Empty: nothing is recorded.",
    )
    record_max_bytes: int = _setting(
        "record_max",
        size(within(1 << 20, 1 << 50, toml_bytes)),
        1 << 30,
        "Size of the recording at which it ends.",
    )
    kv_events: str = _setting(
        "kv_events",
        ENDPOINT,
        "",
        "Address at which to publish which blocks enter and leave DRAM and NVMe, in vLLM's format over ZeroMQ PUB, "
        "for routers that are aware of prefixes: tcp://127.0.0.1:5557, or ipc:// and a path. Events contain token "
        "ids, so any process that can connect can read prompts. Empty: no events.",
    )
    kv_events_replay: str = _setting(
        "kv_events_replay",
        ENDPOINT,
        "",
        "Address of a ZeroMQ ROUTER socket at which subscribers ask for events that they missed. Empty: none.",
    )
    kv_events_topic: str = _setting(
        "kv_events_topic",
        TOPIC,
        "",
        "Topic that KV events are published under; use what the subscribers expect.",
    )
    kv_events_buffer: int = _setting(
        "kv_events_buffer",
        count(1, 1_000_000),
        10_000,
        "Maximum number of batches of KV events kept for subscribers that missed some; at most 64MiB of them.",
    )
    kv_events_allow_remote: bool = _setting(
        "kv_events_allow_remote",
        SWITCH,
        False,
        "yes: kv_events may be an address that other hosts can reach, such as tcp://*:5557. There is no password and "
        "no encryption: any host that reaches it reads the tokens of all prompts.",
    )
    kv_events_connect: bool = _setting(
        "kv_events_connect",
        SWITCH,
        False,
        "yes: the subscriber listens at kv_events, such as a router at tcp://epp.llm-d:5557, and the daemon connects "
        "to it; what it publishes while that is away is lost. no: subscribers connect to the daemon.",
    )
    http: str = _setting(
        "http",
        HTTP,
        "",
        "Address at which to serve health checks, metrics, statistics, the dashboard and the affinity query over "
        "HTTP, such as 127.0.0.1:8181. A process of its own does it and ends with the daemon. Needs the extra http. "
        "Empty: no HTTP.",
    )
    http_allow_remote: bool = _setting(
        "http_allow_remote",
        SWITCH,
        False,
        "yes: http may be an address that other hosts can reach. There is no password: they can read statistics "
        "(names of models and clients, but no tokens and no KV), and ask how much is stored of prompts whose salt "
        "they know.",
    )
    http_hosts: str = _setting(
        "http_hosts",
        HOSTS,
        "",
        "Further host names, separated by commas, that HTTP requests may be addressed to, such as that of a proxy. "
        "Without any, an address of this host answers only to localhost, 127.0.0.1, [::1] and itself, so that no web "
        "page can read it through a browser.",
    )
    log_level: str = _setting(
        "log_level",
        choice("debug", "info", "warning", "error"),
        "info",
        "Least severe messages that are logged, to stderr.",
    )
    log_format: str = _setting(
        "log_format",
        choice("auto", "text", "json"),
        "auto",
        "How log messages are written. text: one line for people. json: one JSON object a line, with the time in RFC "
        "3339. auto: text, and under systemd without the time and with the journal's levels.",
    )
    slow_request_s: float = _setting(
        "slow_request",
        SLOW,
        0.25,
        "Log each request that takes the daemon longer than this, with its time in the queue and at work. Clients "
        "give up after 500ms unless told otherwise. 0: none.",
    )


SETTINGS: dict[str, Setting] = {
    one.metadata["key"]: Setting(one.metadata["key"], one.name, one.metadata["kind"], one.metadata["doc"])
    for one in fields(Settings)
}
"""Key -> the field of `Settings` behind it, how it is written, and what it is for."""
