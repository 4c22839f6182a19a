"""The daemon's settings: one frozen object, and where its values come from.

    TOML file  <  TIERCACHE_* environment  <  command-line flags

Every setting has one key. `arena` in the file is `TIERCACHE_ARENA` in the environment and
`--arena` on the command line. Sizes are written as `16GiB`, durations as `60s`.

The same module knows where a daemon is found: an *address* is the path of its run directory,
which holds the session socket and the control socket.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tiercache.errors import ConfigError
from tiercache.units import parse_bytes, parse_duration_s, round_up

if TYPE_CHECKING:
    import argparse

ENV_PREFIX = "TIERCACHE_"
HUGE_PAGE_BYTES = 2 << 20
MAX_REGIONS = 256
QUARANTINE_FLOOR_BYTES = 64 << 20
MAX_SOCKET_PATH_BYTES = 107
"""sun_path of a unix socket address is 108 bytes with its final NUL (unix(7))."""

DEFAULT = "default"
"""Source of a setting that nobody set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """Every setting of the daemon, checked; `SETTINGS` says what each is for.

    Values are the effective ones: `region_bytes` is fitted to the arena, and a
    `quarantine_per_client_bytes` of 0 becomes a quarter of it, at least 64 MiB. Raises ConfigError for values that
    cannot work.
    """

    run_dir: Path = field(default_factory=lambda: default_run_dir())
    arena_bytes: int = 4 << 30
    region_bytes: int = 256 << 20
    lock_memory: str = "auto"
    policy: str = "lru"
    headroom_bytes: int = 0
    group: str = ""
    quota: tuple[tuple[str, int], ...] = ()
    listen: str = ""
    curve_keys: Path | None = None
    max_sessions: int = 256
    max_leases_per_session: int = 1024
    lease_ttl_max_s: float = 60.0
    quarantine_per_client_bytes: int = 0
    pin_share: float = 0.5
    nvme_dirs: tuple[Path, ...] = ()
    nvme_bytes: int = 64 << 30
    nvme_segment_bytes: int = 1 << 30
    nvme_codec: str = "raw"
    nvme_key: Path | None = None
    nvme_write_budget_bytes: int = 0
    grace_s: float = 20.0
    what_if: str = "yes"
    record: Path | None = None
    record_max_bytes: int = 1 << 30
    kv_events: str = ""
    kv_events_replay: str = ""
    kv_events_topic: str = ""
    kv_events_buffer: int = 10_000
    kv_events_allow_remote: str = "no"
    http: str = ""
    http_allow_remote: str = "no"
    http_hosts: str = ""
    log_level: str = "info"
    log_format: str = "auto"
    slow_request_s: float = 0.25

    def __post_init__(self) -> None:
        for setting in SETTINGS.values():
            value = getattr(self, setting.field)
            if problem := setting.kind.check(value):
                raise ConfigError(f"{setting.key} = {value}: {problem}")
        for key, value in (("kv_events", self.kv_events), ("kv_events_replay", self.kv_events_replay)):
            if value and (problem := events_problem(value, self.kv_events_allow_remote == "yes")):
                raise ConfigError(f"{key} = {value}: {problem}")
        if self.kv_events_replay and self.kv_events_replay == self.kv_events:
            raise ConfigError(f"kv_events_replay = {self.kv_events_replay}: is that of kv_events: choose another one")
        if not self.kv_events and (self.kv_events_replay or self.kv_events_topic):
            raise ConfigError("kv_events_replay and kv_events_topic mean nothing without kv_events: set that too")
        if bool(self.listen) != (self.curve_keys is not None):
            text = "TCP is served with keys only: set both, and make the keys with `tiercache keygen DIR`"
            raise ConfigError(f"listen = {self.listen}, curve_keys = {self.curve_keys or ''}: {text}")
        if self.http and (problem := http_problem(self.http, self.http_allow_remote == "yes")):
            raise ConfigError(f"http = {self.http}: {problem}")
        set_field = object.__setattr__  # the one place where a frozen object may be written
        set_field(self, "arena_bytes", self.arena_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
        if self.headroom_bytes > self.arena_bytes // 2:
            text = f"more than half of arena = {_toml_bytes(self.arena_bytes)}: leave room for what is kept"
            raise ConfigError(f"headroom = {_toml_bytes(self.headroom_bytes)}: {text}")
        least = round_up(-(-self.arena_bytes // MAX_REGIONS), HUGE_PAGE_BYTES)
        set_field(self, "region_bytes", min(max(self.region_bytes, least), self.arena_bytes))
        if self.quarantine_per_client_bytes == 0:
            set_field(self, "quarantine_per_client_bytes", max(self.arena_bytes // 4, QUARANTINE_FLOOR_BYTES))

    def region_sizes(self) -> list[int]:
        """Sizes of the arena's regions in bytes: all `region_bytes`, the last one perhaps less."""
        whole, rest = divmod(self.arena_bytes, self.region_bytes)
        return [self.region_bytes] * whole + ([rest] if rest else [])


class _Kind(NamedTuple):
    """How values of one kind are read, checked and written."""

    metavar: str
    parse: Callable[[Any], Any]
    """Text or TOML value to the field's value. Raises ValueError with the remedy."""
    check: Callable[[Any], str | None]
    """What is wrong with a value, and what to do; or None."""
    render: Callable[[Any], str]
    """The value as TOML; `parse` reads it back."""


class _Setting(NamedTuple):
    """One line of the table of settings."""

    key: str
    field: str
    kind: _Kind
    doc: str


def _toml_string(value: object) -> str:
    """A TOML basic string; its escapes are a superset of what JSON writes for ASCII."""
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_bytes(value: int) -> str:
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value and value % (1 << shift) == 0:
            return f'"{value >> shift}{unit}"'
    return str(value)


def _within(low: float, high: float, show: Callable[[Any], str] = str) -> Callable[[Any], str | None]:
    return lambda value: None if low <= value <= high else f"must be {show(low)} to {show(high)}"


def _size(check: Callable[[Any], str | None]) -> _Kind:
    return _Kind("SIZE", parse_bytes, check, _toml_bytes)


def _count(low: int, high: int) -> _Kind:
    def parse(value: object) -> int:
        try:
            return int(str(value))
        except ValueError:
            raise ValueError(f"is no whole number: write for example {low + 15}") from None

    return _Kind("N", parse, _within(low, high), str)


def _choice(*choices: str) -> _Kind:
    def check(value: str) -> str | None:
        return None if value in choices else f"must be one of: {', '.join(choices)}"

    return _Kind("|".join(choices), str, check, _toml_string)


def _parse_share(value: str | float) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError("is no number: write for example 0.5") from None


def _parse_directory(value: object) -> Path:
    if not str(value):
        raise ValueError("is empty: write the path of a directory, or leave the setting out")
    return Path(str(value)).expanduser().absolute()


def _parse_directories(value: object) -> tuple[Path, ...]:
    parts = [str(part) for part in value] if isinstance(value, list | tuple) else str(value).split(",")
    return tuple(_parse_directory(part.strip()) for part in parts if part.strip())


def _parse_quota(value: object) -> tuple[tuple[str, int], ...]:
    """A table of TOML or `team-a=16GiB,*=1GiB`."""
    if isinstance(value, Mapping):
        pairs = [(str(tenant), size) for tenant, size in value.items()]
    else:
        parts = [part.strip() for part in str(value).split(",") if part.strip()]
        pairs = [(tenant.strip(), size) for tenant, _, size in (part.partition("=") for part in parts)]
    if any(not tenant or size == "" for tenant, size in pairs):
        raise ValueError("is no list of quotas: write for example team-a=16GiB,*=1GiB")
    if len({tenant for tenant, _ in pairs}) != len(pairs):
        raise ValueError("names a tenant twice: write each once")
    return tuple((tenant, parse_bytes(size)) for tenant, size in pairs)


def _check_directories(value: tuple[Path, ...]) -> str | None:
    return "names a directory twice: write each once" if len(set(value)) != len(value) else None


def split_http(value: str) -> tuple[str, int]:
    """`127.0.0.1:8181` or `[::1]:8181` as host and port. Raises ValueError with the remedy."""
    host, _, port = value.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not bare or (":" in bare) != (host != bare) or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ValueError("is no host and port: write for example 127.0.0.1:8181")
    return bare, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this host reaches it."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def hosts_problem(value: str) -> str | None:
    """What is wrong with names that requests may be for, and what to do; or None."""
    for name in value.split(","):
        if value and not re.fullmatch(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]", name.strip()):
            return f"{name.strip()!r} is no host: write names without port, and commas between them"
    return None


def http_problem(value: str, allow_remote: bool) -> str | None:
    """What is wrong with an address to serve HTTP at, and what to do; or None."""
    try:
        host, _ = split_http(value)
    except ValueError as error:
        return str(error)
    if is_loopback(host) or allow_remote:
        return None
    return (
        "other hosts could read the statistics there, and ask how much is stored of prompts whose salt they know "
        "(never tokens or KV): use 127.0.0.1, or allow it with --http-allow-remote yes"
    )


def _listen_problem(value: str) -> str | None:
    scheme, _, rest = value.partition("://")
    try:
        _, port = split_http(rest)
    except ValueError:
        port = 0
    if scheme == "tcp" and port > 0:
        return None
    return "is no address to serve at: write for example tcp://0.0.0.0:7411, or tcp://10.0.0.5:7411 for one interface"


def events_problem(value: str, allow_remote: bool) -> str | None:
    """What is wrong with an address to publish KV events at, and what to do; or None."""
    scheme, _, rest = value.partition("://")
    if scheme == "ipc" and rest.startswith("/") and len(os.fsencode(rest)) <= MAX_SOCKET_PATH_BYTES:
        return None
    try:
        host, port = split_http(rest)
        known = scheme == "tcp" and port > 0
        here = host != "*" and ip_address(host).is_loopback
    except ValueError:
        known = here = False
    if not known:
        return "is no address to bind: write for example tcp://127.0.0.1:5557, or ipc:// and the path of a socket"
    if here or allow_remote:
        return None
    return (
        "other hosts could read the tokens of all prompts there: use 127.0.0.1 or ipc://, or allow it with "
        "--kv-events-allow-remote yes"
    )


def _check_region(value: int) -> str | None:
    if value >= HUGE_PAGE_BYTES and value % HUGE_PAGE_BYTES == 0:
        return None
    nearest = _toml_bytes(max(round_up(value, HUGE_PAGE_BYTES), HUGE_PAGE_BYTES))
    return f"must be a multiple of 2MiB (a huge page): write {nearest}"


_ENDPOINT = _Kind("ENDPOINT", str, lambda value: events_problem(value, True) if value else None, _toml_string)
_HTTP = _Kind("HOST:PORT", str, lambda value: http_problem(value, True) if value else None, _toml_string)
_HOSTS = _Kind("HOST,...", str, hosts_problem, _toml_string)
_TOPIC = _Kind("TEXT", str, lambda value: None if len(value) <= 256 else "is longer than 256 letters", _toml_string)
_DIRECTORY = _Kind("DIR", _parse_directory, lambda value: None, _toml_string)
_OPTIONAL_DIRECTORY = _Kind(
    "DIR", lambda value: _parse_directory(value) if value else None, lambda value: None,
    lambda value: _toml_string("" if value is None else value),
)  # fmt: skip
_OPTIONAL_FILE = _OPTIONAL_DIRECTORY._replace(metavar="FILE")
_GROUP = _Kind("NAME", lambda value: str(value), lambda value: None, _toml_string)
_QUOTA = _Kind(
    "TENANT=SIZE[,..]", _parse_quota, lambda value: None,
    lambda value: _toml_string(",".join(f"{tenant}={_toml_bytes(size)}" for tenant, size in value)),
)  # fmt: skip
_LISTEN = _Kind("ENDPOINT", str, lambda value: _listen_problem(value) if value else None, _toml_string)
_DIRECTORIES = _Kind(
    "DIR[,DIR]", _parse_directories, _check_directories, lambda value: _toml_string(",".join(map(str, value)))
)
_BUDGET = _size(lambda value: None if value >= 0 else "must be 0 (no limit) or more")
_ARENA = _size(_within(HUGE_PAGE_BYTES, 64 << 40, _toml_bytes))
_QUARANTINE = _size(lambda value: None if value >= 0 else "must be 0 or more")


def _seconds(value: float) -> str:
    return repr(value).removesuffix(".0") + "s"


_GRACE = _Kind("DURATION", parse_duration_s, _within(0, 3600, _seconds), lambda value: f'"{_seconds(value)}"')
_TTL = _Kind("DURATION", parse_duration_s, _within(0.1, 600, _seconds), lambda value: f'"{_seconds(value)}"')
_SLOW = _Kind("DURATION", parse_duration_s, _within(0, 60, _seconds), lambda value: f'"{_seconds(value)}"')
_SHARE = _Kind("SHARE", _parse_share, _within(0, 1), lambda value: repr(float(value)))

_TABLE = (
    _Setting(
        "run_dir", "run_dir", _DIRECTORY,
        "Directory of the daemon's sockets. Its path is the daemon's address: clients that are given none "
        "look in the same place.",
    ),
    _Setting(
        "arena", "arena_bytes", _ARENA,
        "Page-locked host memory for KV blocks, shared with the clients that map it. Taken when the daemon "
        "starts, in whole 2MiB pages, and never grown.",
    ),
    _Setting(
        "region", "region_bytes", _size(_check_region),
        "The arena is made of regions of this size, one memfd each: the unit in which memory is populated, "
        "registered with CUDA and re-split between block sizes. A multiple of 2MiB; raised by itself so that "
        f"{MAX_REGIONS} are enough, and never larger than the arena.",
    ),
    _Setting(
        "lock_memory", "lock_memory", _choice("auto", "off", "require"),
        "Lock the arena in RAM (mlock). auto: try, and say in `tiercache stats` when the limit (ulimit -l) "
        "is too low. require: do not start without it. off: do not try.",
    ),
    _Setting(
        "policy", "policy", _choice("lru", "hazard", "arc", "s3fifo", "wtinylfu", "workload-aware"),
        "Which blocks go first when a tier is full. lru: the end of the prefix that was used longest ago. "
        "hazard: what is least likely to be used soon for the room that it takes, learnt from what is asked for. "
        "arc: of those used once or those used again, in shares that adapt. "
        "s3fifo: in the order in which they came, but those used meanwhile stay. "
        "wtinylfu: what was asked for less often than what comes. "
        "workload-aware: what is least likely to be used again while it would last, by kind of request.",
    ),
    _Setting(
        "headroom", "headroom_bytes", _QUARANTINE,
        "Kept free in the arena, by evicting ahead of need when nothing waits to be written: stores and loads then "
        "find room at once, and new blocks stay only if the policy prefers them to what was there. 0: room is made "
        "when it is asked for.",
    ),
    _Setting(
        "max_sessions", "max_sessions", _count(1, 4096),
        "Clients connected at once. One more is refused with a line that says so.",
    ),
    _Setting(
        "max_leases_per_session", "max_leases_per_session", _count(1, 1 << 20),
        "Leases of one client at once: its loads and stores under way.",
    ),
    _Setting(
        "lease_ttl_max", "lease_ttl_max_s", _TTL,
        "Longest time that a lease lasts without being renewed: what a client that hangs can hold up.",
    ),
    _Setting(
        "quarantine_per_client", "quarantine_per_client_bytes", _QUARANTINE,
        "Frames of one client's unfinished stores that wait for proof that nobody writes to them any more; as much "
        "again of places on NVMe that it writes itself. "
        "Beyond it the client's stores are refused; its loads go on. 0: a quarter of the arena, at least 64MiB.",
    ),
    _Setting(
        "group", "group", _GROUP,
        "Group whose members may connect too, by name or number: the run directory is 0750 then and its sockets 0660, "
        "not 0700 and 0600. Whoever connects can read and write the whole arena. Empty: the daemon's user alone.",
    ),
    _Setting(
        "quota", "quota", _QUOTA,
        "How much of the arena tenants may have: team-a=16GiB,team-b=4GiB,*=1GiB, * for each other one. A tenant at "
        "its limit makes room among its own blocks, and nobody else loses one for it. Clients on this host say their "
        "tenant, for others their key does; those of none have no limit. Empty: no quotas.",
    ),
    _Setting(
        "listen", "listen", _LISTEN,
        "Serve clients on other hosts at this address (tcp://0.0.0.0:7411), encrypted, and with the keys of curve_keys "
        "only. Their blocks go through messages, and each sees its own tenant's alone. Empty: this host only.",
    ),
    _Setting(
        "curve_keys", "curve_keys", _OPTIONAL_DIRECTORY,
        "Directory with the daemon's keys and those of the clients that may connect to listen; `tiercache keygen DIR` "
        "makes it.",
    ),
    _Setting(
        "pin_share", "pin_share", _SHARE,
        "Part of the arena that pins may hold, 0 to 1. A pin beyond it keeps fewer blocks.",
    ),
    _Setting(
        "nvme", "nvme_dirs", _DIRECTORIES,
        "Directories on local disks for the tier below DRAM, one for each disk; none: no such tier. Blocks "
        "there survive a restart. Each belongs to one daemon.",
    ),
    _Setting(
        "nvme_size", "nvme_bytes", _size(_within(16 << 20, 1 << 50, _toml_bytes)),
        "What all nvme directories together may take, their database included.",
    ),
    _Setting(
        "nvme_segment", "nvme_segment_bytes", _size(_check_region),
        "Size of the files that the directories are filled with. Those of a directory that exists stay as they are.",
    ),
    _Setting(
        "nvme_codec", "nvme_codec", _choice("raw", "lz4", "zstd"),
        "How blocks are written to nvme directories, losing nothing: raw as they are, lz4 or zstd made smaller, byte "
        "planes of the namespace's elements apart. It saves bytes moved (bandwidth, wear) and no room, since slots are "
        "as large as blocks; it costs CPU time, so try `tiercache bench codec` first. Blocks that are there already "
        "stay readable whatever this says. zstd needs the extra: pip install 'tiercache[zstd]'.",
    ),
    _Setting(
        "nvme_key", "nvme_key", _OPTIONAL_FILE,
        "File with a key (64 hex digits, readable by its owner alone) that blocks in nvme directories are encrypted "
        "with: AES-256-GCM, about half a millisecond of CPU for 2 MiB. What was stored without it, or with another "
        "one, is forgotten. GPUDirect does not go with it. Needs the extra: pip install 'tiercache[encryption]'. "
        "Empty: not encrypted.",
    ),
    _Setting(
        "nvme_write_budget", "nvme_write_budget_bytes", _BUDGET,
        "Bytes a day that may be written to nvme directories, to spare SSDs: blocks that were asked for twice "
        "come first. 0: no limit.",
    ),
    _Setting(
        "grace", "grace_s", _GRACE,
        "On SIGTERM, how long to go on writing blocks that are only in DRAM to the nvme directories.",
    ),
    _Setting(
        "what_if", "what_if", _choice("yes", "no"),
        "Estimate the hit rate that caches of other sizes would have, from a sample of at most 16,384 blocks (about "
        "2.5 MB, and about 1 ms of CPU time a second); shown by `tiercache stats`.",
    ),
    _Setting(
        "record", "record", _OPTIONAL_FILE,
        "Write what engines ask to this file (packed if it ends in .gz), for `tiercache replay`: times and hashes of "
        "keys with a secret that is kept nowhere, no tokens, names or tenants. An earlier file is kept as FILE.1. "
        "Empty: nothing is recorded.",
    ),
    _Setting(
        "record_max", "record_max_bytes", _size(_within(1 << 20, 1 << 50, _toml_bytes)),
        "Size at which the recording ends.",
    ),
    _Setting(
        "kv_events", "kv_events", _ENDPOINT,
        "Publish which blocks come to DRAM and NVMe and which leave them, in vLLM's format, on a ZeroMQ PUB socket at "
        "this address (tcp://127.0.0.1:5557, or ipc:// and a path), for routers that look for prefixes. Events carry "
        "token ids: whoever can connect can read prompts. Empty: no events.",
    ),
    _Setting(
        "kv_events_replay", "kv_events_replay", _ENDPOINT,
        "Address of a ROUTER socket where subscribers ask for events that they missed. Empty: no such socket.",
    ),
    _Setting("kv_events_topic", "kv_events_topic", _TOPIC, "Topic of the events, as their subscribers expect it."),
    _Setting(
        "kv_events_buffer", "kv_events_buffer", _count(1, 1_000_000),
        "Batches of events that are kept to be sent again, as long as they take no more than 64MiB.",
    ),
    _Setting(
        "kv_events_allow_remote", "kv_events_allow_remote", _choice("no", "yes"),
        "yes: kv_events may be addresses that other hosts reach (tcp://*:5557). There is no password and no "
        "encryption: whoever reaches them reads the tokens of all prompts.",
    ),
    _Setting(
        "http", "http", _HTTP,
        "Serve health, metrics, statistics and the affinity query over HTTP at this address (127.0.0.1:8181), from a "
        "process of its own that ends with the daemon. Needs the extra: pip install 'tiercache[http]'. Empty: no HTTP.",
    ),
    _Setting(
        "http_allow_remote", "http_allow_remote", _choice("no", "yes"),
        "yes: http may be an address that other hosts reach. There is no password: they can read the statistics "
        "(names of models and clients, no tokens, no KV) and ask how much is stored of prompts whose salt they know.",
    ),
    _Setting(
        "http_hosts", "http_hosts", _HOSTS,
        "Further names that requests over HTTP may be for, with commas between them, such as those of a proxy. Without "
        "any, an address of this host is only asked as localhost, 127.0.0.1, [::1] or itself, so that no web page that "
        "was given its address can read it in somebody's browser.",
    ),
    _Setting(
        "log_level", "log_level", _choice("debug", "info", "warning", "error"),
        "Least important lines that are logged, to stderr.",
    ),
    _Setting(
        "log_format", "log_format", _choice("auto", "text", "json"),
        "auto: text; under systemd without the time and with the journal's level. json: one object a line.",
    ),
    _Setting(
        "slow_request", "slow_request_s", _SLOW,
        "Log requests for which the daemon took longer, with the time at work and in the queue: half of what clients "
        "give a request (500ms) is where they are about to lose patience. 0: none.",
    ),
)  # fmt: skip

SETTINGS: dict[str, _Setting] = {setting.key: setting for setting in _TABLE}
"""Key -> how the field of `DaemonConfig` behind it is written, and what it is for."""


def default_run_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Where daemon and clients meet when nobody says: both come to the same answer.

    $TIERCACHE_RUN_DIR, else $XDG_RUNTIME_DIR/tiercache, else /run/tiercache for root, else
    /tmp/tiercache-<uid>.
    """
    if env.get(ENV_PREFIX + "RUN_DIR"):
        return _parse_directory(env[ENV_PREFIX + "RUN_DIR"])
    if env.get("XDG_RUNTIME_DIR"):
        return Path(env["XDG_RUNTIME_DIR"], "tiercache").absolute()
    if os.geteuid() == 0 and os.access("/run", os.W_OK):
        return Path("/run/tiercache")
    return Path(f"/tmp/tiercache-{os.geteuid()}")


class Resolved(NamedTuple):
    """A configuration and, for each key, where its value came from (`DEFAULT` if nowhere)."""

    config: DaemonConfig
    sources: dict[str, str]


def load_config(
    path: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> DaemonConfig:
    """The daemon's settings from a TOML file, the environment and flags, later ones winning.

    Args:
        path: the file; None means $TIERCACHE_CONFIG, and without that no file.
        env: the environment, `os.environ` by default.
        flags: key -> value, as text or already a number; None values are flags not given.

    Raises ConfigError, which names key, value, source and remedy. Reads one small file.
    """
    return resolve_config(path, env, flags).config


def resolve_config(
    path: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Resolved:
    """`load_config`, with the source of each value beside it."""
    env = os.environ if env is None else env
    path = path or env.get(ENV_PREFIX + "CONFIG") or None
    layers: list[dict[str, tuple[Any, str]]] = [
        {} if path is None else _from_file(Path(path)),
        _from_environment(env),
        _from_flags(flags or {}),
    ]
    values: dict[str, Any] = {"run_dir": default_run_dir(env)}
    sources = dict.fromkeys(SETTINGS, DEFAULT)
    for layer in layers:
        for key, (value, source) in layer.items():
            values[SETTINGS[key].field] = _checked(key, value, source)
            sources[key] = source
    return Resolved(DaemonConfig(**values), sources)


def _checked(key: str, value: Any, source: str) -> Any:
    setting = SETTINGS[key]
    where = f"{key} = {value} (from {source})"
    if isinstance(value, bool) or not isinstance(value, (str, int, float, os.PathLike)):
        raise ConfigError(f"{where}: must be a text or a number, not a {type(value).__name__}")
    try:
        parsed = setting.kind.parse(value)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    except OverflowError:
        raise ConfigError(f"{where}: is larger than any machine") from None
    if problem := setting.kind.check(parsed):
        raise ConfigError(f"{where}: {problem}")
    return parsed


def _from_file(path: Path) -> dict[str, tuple[Any, str]]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f"config file {path}: {error.strerror}: give --config or TIERCACHE_CONFIG a file that can be read"
        ) from None
    except ValueError as error:  # of TOML or of UTF-8
        raise ConfigError(f"config file {path} is not TOML: {error}: `tiercache config` prints one") from None
    for key in table:
        if key not in SETTINGS:
            raise ConfigError(f"{key} = {table[key]} (from {path}): no such setting{_nearest(key)}")
    return {key: (value, str(path)) for key, value in table.items()}


def _from_environment(env: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    # A name that is no setting is only refused when it looks like a slip of the pen: Kubernetes
    # gives pods TIERCACHE_PORT and TIERCACHE_SERVICE_HOST when a Service is called tiercache.
    found: dict[str, tuple[Any, str]] = {}
    for name, value in env.items():
        if not name.startswith(ENV_PREFIX) or value == "":
            continue
        key = name[len(ENV_PREFIX) :].lower()
        if key in SETTINGS:
            found[key] = (value, name)
        elif near := _nearest(key, env=True):
            raise ConfigError(f"{name} = {value} (from the environment): no such setting{near}")
    return found


def _from_flags(flags: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    for key, value in flags.items():
        if key not in SETTINGS:
            raise ConfigError(f"{key} = {value} (from flags): no such setting{_nearest(key)}")
        if value is not None:
            found[key] = (value, flag_name(key))
    return found


def _nearest(key: str, *, env: bool = False) -> str:
    from difflib import get_close_matches

    near = get_close_matches(key.lower(), SETTINGS, n=1, cutoff=0.8 if env else 0.5)
    if env:
        return f": did you mean {ENV_PREFIX}{near[0].upper()}?" if near else ""
    return f": did you mean {near[0]}?" if near else f": there are {', '.join(SETTINGS)}"


def flag_name(key: str) -> str:
    """`lease_ttl_max` -> `--lease-ttl-max`."""
    return "--" + key.replace("_", "-")


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--config` and a flag for every setting; `flags_from_args` picks them up again."""
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings (default: $TIERCACHE_CONFIG)")
    group = parser.add_argument_group(
        "settings",
        "Each may also stand in the file (arena = \"16GiB\") or in the environment (TIERCACHE_ARENA=16GiB). "
        "Flags win over the environment, and the environment over the file.",
    )
    defaults = DaemonConfig(run_dir=default_run_dir())
    for setting in SETTINGS.values():
        default = setting.kind.render(getattr(defaults, setting.field)).strip('"')
        shown = f" (default: {default})" if setting.key != "quarantine_per_client" else ""
        text = (setting.doc + shown).replace("%", "%%")
        group.add_argument(flag_name(setting.key), dest=setting.key, metavar=setting.kind.metavar, help=text)


def flags_from_args(args: argparse.Namespace) -> dict[str, str]:
    """The settings given on the command line: `load_config(args.config, flags=flags_from_args(args))`."""
    return {key: getattr(args, key) for key in SETTINGS if getattr(args, key, None) is not None}


def render_toml(
    config: DaemonConfig, comments: bool = True, sources: Mapping[str, str] | None = None
) -> str:
    """The settings as TOML, which `load_config` reads back to an equal object.

    With `comments` each setting is explained, and those at their default are commented out: the
    file says what was chosen and teaches what there is. `sources` adds where a value came from.
    """
    from textwrap import TextWrapper

    wrap = TextWrapper(98, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False).wrap
    defaults = DaemonConfig()
    fitted = DaemonConfig(arena_bytes=config.arena_bytes)  # defaults that follow from the arena
    lines = [*_TOML_HEAD, ""] if comments else []
    for setting in SETTINGS.values():
        value = getattr(config, setting.field)
        line = f"{setting.key} = {setting.kind.render(value)}"
        if not comments:
            lines.append(line)
            continue
        default = getattr(defaults if setting.key == "arena" else fitted, setting.field)
        source = (sources or {}).get(setting.key, DEFAULT)
        if source != DEFAULT:
            line += f"  # from {source}"
        elif value == default:
            line = f"#{line}"
        lines += [*wrap(setting.doc), line, ""]
    return "\n".join(lines).rstrip() + "\n"


_TOML_HEAD = (
    "# Settings of the tiercache daemon. A line with # and no space after it is a default.",
    "# TIERCACHE_ARENA=16GiB in the environment and --arena 16GiB on the command line win over this file.",
)


def default_address() -> str:
    """The address of the daemon that nobody named: its run directory."""
    return str(default_run_dir())


def session_socket_path(run_dir: str | Path) -> Path:
    """Where clients say hello and receive the arena. Raises ConfigError when too long for a socket."""
    return _socket_path(Path(run_dir) / "session.sock")


def control_endpoint(run_dir: str | Path) -> str:
    """ZeroMQ endpoint of the control socket. Raises ConfigError when too long for a socket."""
    return f"ipc://{_socket_path(Path(run_dir) / 'control.sock')}"


def _socket_path(path: Path) -> Path:
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"run_dir = {path.parent}: {path.name} in it makes a path of {size} bytes, and a unix socket's "
            f"may have {MAX_SOCKET_PATH_BYTES}: choose a shorter directory, for example /run/tiercache"
        )
    return path


__all__ = [
    "DaemonConfig",
    "Resolved",
    "add_config_flags",
    "control_endpoint",
    "default_address",
    "default_run_dir",
    "flag_name",
    "flags_from_args",
    "load_config",
    "render_toml",
    "resolve_config",
    "session_socket_path",
]
