"""Kinds of settings: how their values are read, checked and written as TOML."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from tiercache.ground.units import (
    BYTES_PATTERN,
    DURATION_PATTERN,
    HUGE_PAGE_BYTES,
    parse_bytes,
    parse_duration_s,
    round_up,
)

MAX_REGIONS = 256
MIN_NVME_BYTES, MAX_NVME_BYTES = 16 << 20, 1 << 50
TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Valid names of tenants: the name is that of a key file, and appears in settings, logs and metrics."""
_QUOTA_NAME = re.compile(rf"\*|{TENANT_NAME.pattern}|ns:[0-9a-f]{{8,32}}")
MAX_SOCKET_PATH_BYTES = 107
"""sun_path of a unix socket address is 108 bytes with its final NUL (unix(7))."""


class SettingKind(NamedTuple):
    """How values of one kind are read, checked and written."""

    metavar: str
    parse: Callable[[Any], Any]
    """Converts text or a TOML value to the field's value. Raises ValueError with the remedy."""
    check: Callable[[Any], str | None]
    """Says what is wrong with a value and what to do; None if it is valid."""
    render: Callable[[Any], str]
    """The value as TOML; `parse` reads it back."""
    schema: Mapping[str, Any] = {"type": "string"}
    """The values allowed in YAML or TOML, as JSON Schema."""
    takes_bool: bool = False
    """True if `parse` also takes true and false."""
    secret: bool = False
    """True if a value may hold a password: `launch` keeps it off the command line, which every user can read."""


class Setting(NamedTuple):
    """One line of the table of settings."""

    key: str
    field: str
    kind: SettingKind
    doc: str


def _toml_string(value: object) -> str:
    """A TOML basic string; its escapes are a superset of what JSON writes for ASCII."""
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_bytes(value: int) -> str:
    """A size as TOML, in the largest unit that it is a whole number of."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value and value % (1 << shift) == 0:
            return f'"{value >> shift}{unit}"'
    return str(value)


def within(low: float, high: float, show: Callable[[Any], str] = str) -> Callable[[Any], str | None]:
    """A check that a number is within bounds; `show` formats them for the message."""
    return lambda value: None if low <= value <= high else f"must be {show(low)} to {show(high)}"


def size(check: Callable[[Any], str | None]) -> SettingKind:
    """Sizes in bytes."""
    return SettingKind(
        "SIZE", parse_bytes, check, toml_bytes, {"type": ["string", "integer"], "pattern": BYTES_PATTERN}
    )


def duration(low_s: float, high_s: float) -> SettingKind:
    """Durations in seconds."""
    schema = {"type": ["string", "number"], "pattern": DURATION_PATTERN}
    return SettingKind(
        "DURATION", parse_duration_s, within(low_s, high_s, _seconds), lambda s: f'"{_seconds(s)}"', schema
    )


def count(low: int, high: int) -> SettingKind:
    """Whole numbers."""

    def parse(value: object) -> int:
        try:
            return int(str(value))
        except ValueError:
            raise ValueError(f"is not a whole number: write for example {low + 15}") from None

    schema = {"type": ["integer", "string"], "minimum": low, "maximum": high, "pattern": "^[0-9]+$"}
    return SettingKind("N", parse, within(low, high), str, schema)


def choice(*choices: str) -> SettingKind:
    """One of several words. Where `off` is allowed, false means the same: YAML reads `off` as false."""
    has_off = "off" in choices

    def parse(value: object) -> str:
        return "off" if has_off and str(value).lower() in ("false", "no") else str(value)

    def check(value: str) -> str | None:
        return None if value in choices else f"must be one of: {', '.join(choices)}"

    schema = {"enum": [*choices, False] if has_off else list(choices)}
    return SettingKind("|".join(choices), parse, check, _toml_string, schema, takes_bool=has_off)


_SWITCH_WORDS = {
    "yes": True,
    "true": True,
    "on": True,
    "1": True,
    "no": False,
    "false": False,
    "off": False,
    "0": False,
}


def _parse_switch(value: object) -> bool:
    try:
        return _SWITCH_WORDS[str(value).strip().lower()]
    except KeyError:
        raise ValueError("must be yes or no") from None


def _parse_share(value: str | float) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError("is not a number: write for example 0.5") from None


def is_utf8(text: str) -> bool:
    """False for text with bytes that are not: paths are named in messages, and ZeroMQ takes no others."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_directory(value: object) -> Path:
    """A path, made absolute; `~` is the home directory."""
    if not str(value):
        raise ValueError("is empty: write the path of a directory, or leave the setting out")
    return Path(str(value)).expanduser().absolute()


class NvmeDirectory(NamedTuple):
    """A directory of the NVMe tier. `size_bytes` 0: a share of `nvme_size`."""

    path: Path
    size_bytes: int = 0


def _parse_directories(value: object) -> tuple[NvmeDirectory, ...]:
    """`/mnt/a,/mnt/b` or, with a size for some, `/mnt/a:2TiB,/mnt/b:1TiB`."""
    return tuple(_parse_nvme_directory(part.strip()) for part in str(value).split(",") if part.strip())


def _parse_nvme_directory(text: str) -> NvmeDirectory:
    path, colon, size = text.rpartition(":")
    if not colon or "/" in size:
        return NvmeDirectory(parse_directory(text))
    try:
        size_bytes = parse_bytes(size)
    except ValueError:
        raise ValueError(f"{text!r} has no size behind its colon: write for example /mnt/nvme0/kv:2TiB") from None
    if size_bytes == 0:
        raise ValueError(f"{text!r} has a size of 0: leave out the directory, or the size")
    return NvmeDirectory(parse_directory(path), size_bytes)


def _render_directories(value: tuple[NvmeDirectory, ...]) -> str:
    sizes = [f":{toml_bytes(one.size_bytes).strip(chr(34))}" if one.size_bytes else "" for one in value]
    return _toml_string(",".join(f"{one.path}{size}" for one, size in zip(value, sizes, strict=True)))


def _parse_quota(value: object) -> tuple[tuple[str, int], ...]:
    """A table of TOML or `team-a=16GiB,ns:5d1e0b3a=4GiB,*=1GiB`."""
    if isinstance(value, Mapping):
        pairs = [(str(tenant), size) for tenant, size in value.items()]
    else:
        parts = [part.strip() for part in str(value).split(",") if part.strip()]
        pairs = [(tenant.strip(), size) for tenant, _, size in (part.partition("=") for part in parts)]
    if any(not tenant or size == "" for tenant, size in pairs):
        raise ValueError("is not a list of quotas: write for example team-a=16GiB,*=1GiB")
    if len({tenant for tenant, _ in pairs}) != len(pairs):
        raise ValueError("names a tenant twice: write each once")
    for name, _ in pairs:
        if not _QUOTA_NAME.fullmatch(name):
            known = "a tenant (letters, digits, . _ -), ns: and the first 8 or more digits of a fingerprint, or *"
            raise ValueError(f"names {name!r}: write {known}")
    return tuple((tenant, parse_bytes(size)) for tenant, size in pairs)


def _check_directories(value: tuple[NvmeDirectory, ...]) -> str | None:
    if len({one.path for one in value}) != len(value):
        return "names a directory twice: write each once"
    least, most = MIN_NVME_BYTES, MAX_NVME_BYTES
    if any(one.size_bytes and not least <= one.size_bytes <= most for one in value):
        return f"the size of a directory must be {toml_bytes(least)} to {toml_bytes(most)}"
    return None


def split_http(value: str) -> tuple[str, int]:
    """`127.0.0.1:8181` or `[::1]:8181` as host and port. Raises ValueError with the remedy."""
    host, _, port = value.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not bare or (":" in bare) != (host != bare) or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ValueError("is not a host and port: write for example 127.0.0.1:8181")
    return bare, int(port)


def is_loopback(host: str) -> bool:
    """True if only this host can reach that address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def hosts_problem(value: str) -> str | None:
    """What is wrong with host names that requests may be for, and what to do; None if they are valid."""
    for name in value.split(","):
        if value and not re.fullmatch(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]", name.strip()):
            return f"{name.strip()!r} is not a host: write names without port, and commas between them"
    return None


def http_problem(value: str, allow_remote: bool) -> str | None:
    """What is wrong with an address to serve HTTP at, and what to do; None if it is valid."""
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
    return "is not an address to serve at: write for example tcp://0.0.0.0:7411 or tcp://10.0.0.5:7411"


_HOST_NAME = re.compile(r"(?=.*[A-Za-z])[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.?")


def events_problem(value: str, allow_remote: bool, connects: bool = False) -> str | None:
    """What is wrong with an address to publish KV events at, and what to do; None if it is valid.

    `connects`: it is that of a subscriber, which may have a name.
    """
    scheme, _, rest = value.partition("://")
    if scheme == "ipc" and rest.startswith("/") and len(os.fsencode(rest)) <= MAX_SOCKET_PATH_BYTES:
        return None
    try:
        host, port = split_http(rest)
        known = scheme == "tcp" and port > 0
        named = connects and _HOST_NAME.fullmatch(host) is not None
        here = host == "localhost" if named else host != "*" and ip_address(host).is_loopback
        known = known and not (connects and (host == "*" or (not named and ip_address(host).is_unspecified)))
    except ValueError:
        known = here = False
    if not known and connects:
        return "is not an address to connect to: write for example tcp://epp.llm-d:5557, or ipc:// and a path"
    if not known:
        return "is not an address to bind: write for example tcp://127.0.0.1:5557, or ipc:// and the path of a socket"
    if here or allow_remote:
        return None
    return (
        "other hosts could read the tokens of all prompts there: use 127.0.0.1 or ipc://, or allow it with "
        "--kv-events-allow-remote yes"
    )


def _endpoint_problem(value: str) -> str | None:
    """What is wrong with an address that is neither one to bind nor one to connect to."""
    return events_problem(value, True) if events_problem(value, True, connects=True) else None


_CREDENTIALS = re.compile(r"://(?:([^/@:]*):)?.*@", re.DOTALL)
HIDDEN = "***"


def without_secrets(value: object) -> str:
    """A value as text, without the password of a URL: all up to its last @, since a password may have others."""
    return _CREDENTIALS.sub(lambda found: f"://{found[1] + ':' if found[1] is not None else ''}{HIDDEN}@", str(value))


class StoreUrl:
    """The URL of a store. As text it has no password; `full` has."""

    __slots__ = ("full",)

    def __init__(self, full: str = "") -> None:
        self.full = full

    def __str__(self) -> str:
        return without_secrets(self.full)

    def __repr__(self) -> str:
        return f"StoreUrl({str(self)!r})"

    def __bool__(self) -> bool:
        return bool(self.full)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoreUrl) and other.full == self.full

    def __hash__(self) -> int:
        return hash(self.full)


def _store_problem(value: StoreUrl) -> str | None:
    if not value:
        return None
    if f"{HIDDEN}@" in value.full:
        return (
            "was printed without its password: write the password, or set TIERCACHE_SHARED where no other user reads it"
        )
    scheme, separator, rest = value.full.partition("://")
    if not separator or not scheme or not rest:
        return "is not a URL: write for example valkey://host:6379"
    return None


def check_region(value: int) -> str | None:
    """What is wrong with a region size; None if it is valid."""
    if value >= HUGE_PAGE_BYTES and value % HUGE_PAGE_BYTES == 0:
        return None
    nearest = toml_bytes(max(round_up(value, HUGE_PAGE_BYTES), HUGE_PAGE_BYTES))
    return f"must be a multiple of 2MiB (a huge page): write {nearest}"


MAX_SEGMENT_BYTES = 64 << 30
"""Segments of an nvme directory: their pages of 4 KiB are numbered with 24 bits."""


def check_segment(value: int) -> str | None:
    """What is wrong with the size of a segment; None if it is valid."""
    return "must be at most 64GiB" if value > MAX_SEGMENT_BYTES else check_region(value)


def _plain_bytes(value: int) -> str:
    """As `toml_bytes`, without the quotes: the result goes into a quoted text."""
    return toml_bytes(value).strip('"')


ENDPOINT = SettingKind("ENDPOINT", str, lambda value: _endpoint_problem(value) if value else None, _toml_string)
HTTP = SettingKind("HOST:PORT", str, lambda value: http_problem(value, True) if value else None, _toml_string)
HOSTS = SettingKind("HOST,...", str, hosts_problem, _toml_string)
TOPIC = SettingKind(
    "TEXT", str, lambda value: None if len(value) <= 256 else "is longer than 256 letters", _toml_string
)
DIRECTORY = SettingKind("DIR", parse_directory, lambda value: None, _toml_string)
OPTIONAL_DIRECTORY = SettingKind(
    "DIR",
    lambda value: parse_directory(value) if value else None,
    lambda value: None,
    lambda value: _toml_string("" if value is None else value),
)
OPTIONAL_FILE = OPTIONAL_DIRECTORY._replace(metavar="FILE")
GROUP = SettingKind("NAME", lambda value: str(value), lambda value: None, _toml_string)
QUOTA = SettingKind(
    "WHO=SIZE[,..]",
    _parse_quota,
    lambda value: None,
    lambda value: _toml_string(",".join(f"{tenant}={_plain_bytes(size)}" for tenant, size in value)),
)
LISTEN = SettingKind("ENDPOINT", str, lambda value: _listen_problem(value) if value else None, _toml_string)
STORE = SettingKind("URL", lambda value: StoreUrl(str(value)), _store_problem, _toml_string, secret=True)
DIRECTORIES = SettingKind("DIR[:SIZE][,..]", _parse_directories, _check_directories, _render_directories)
BUDGET = size(lambda value: None if value >= 0 else "must be 0 (no limit) or more")
ARENA = size(within(HUGE_PAGE_BYTES, 64 << 40, toml_bytes))
QUARANTINE = size(lambda value: None if value >= 0 else "must be 0 or more")


def _seconds(value: float) -> str:
    return repr(value).removesuffix(".0") + "s"


GRACE = duration(0, 3600)
LOOKUP = duration(0, 1)
LIFETIME = duration(60, 366 * 86_400)
DEPLOYMENT = SettingKind(
    "NAME",
    str,
    lambda value: (
        None if TENANT_NAME.fullmatch(value) else "must be 1 to 64 letters, digits, and . _ - (not the first)"
    ),
    _toml_string,
)
TTL = duration(0.1, 600)
SLOW = duration(0, 60)
SHARE = SettingKind(
    "SHARE",
    _parse_share,
    within(0, 1),
    lambda value: repr(float(value)),
    {"type": ["number", "string"], "minimum": 0, "maximum": 1, "pattern": r"^[01](\.[0-9]*)?$|^\.[0-9]+$"},
)
SWITCH = SettingKind(
    "yes|no",
    _parse_switch,
    lambda value: None if isinstance(value, bool) else "must be yes or no",
    lambda value: "true" if value else "false",
    {"enum": [True, False, "yes", "no", "true", "false"]},
    takes_bool=True,
)
