"""The URL of a shared folder: `file:///mnt/shared/kv?size=10TiB&ttl=7d`."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from tiercache.daemon.tiers.shared.stores.queries import read_query, whole_number, yes_or_no
from tiercache.errors import ConfigError
from tiercache.ground.units import parse_bytes, parse_duration_s

DEFAULT_TTL_S = 7 * 86400.0
CONNECTIONS = 4
_EXAMPLE = "write for example file:///mnt/shared/kv?size=10TiB&ttl=7d"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSettings:
    """What the URL says.

    Attributes:
        path: the folder, absolute.
        size_bytes: the janitor keeps the values below this; 0 means no limit.
        ttl_s: the janitor removes values that are older.
        direct: use O_DIRECT where it works.
        sync: have each value on the disk before it is visible. Without it, a host or server that crashes may leave
            files with other bytes, or with none: the tier's checks find them, and they are misses.
        connections: how many transfers run side by side.
    """

    path: str
    size_bytes: int = 0
    ttl_s: float = DEFAULT_TTL_S
    direct: bool = True
    sync: bool = False
    connections: int = CONNECTIONS


def parse_folder_url(url: str) -> FolderSettings:
    """Raises ConfigError. Touches no file system: one that hangs must not hang the daemon's start."""
    scheme, host, path, query, fragment = urlsplit(url)
    path = unquote(path)
    if scheme != "file" or host not in ("", "localhost"):
        raise ConfigError(f"{url}: has no absolute path of a folder behind file://: {_EXAMPLE}")
    if fragment or "\0" in path or ".." in path.split("/"):
        raise ConfigError(f"{url}: is not a plain path of a folder: {_EXAMPLE}")
    if not path.startswith("/") or not path.strip("/"):
        raise ConfigError(f"{url}: names no folder: {_EXAMPLE}")
    path = "/" + path.strip("/")
    known = {
        "size": _size,
        "ttl": _ttl_s,
        "direct": yes_or_no,
        "sync": yes_or_no,
        "connections": whole_number(1, 64),
    }
    found = read_query(f"file://{path}", query, known)
    return FolderSettings(
        path=path,
        size_bytes=found.get("size", 0),
        ttl_s=found.get("ttl", DEFAULT_TTL_S),
        direct=found.get("direct", True),
        sync=found.get("sync", False),
        connections=found.get("connections", CONNECTIONS),
    )


def _size(text: str) -> int:
    size_bytes = parse_bytes(text)
    if size_bytes < 1 << 20:
        raise ValueError("must be 1MiB or more: leave it out for no limit")
    return size_bytes


def _ttl_s(text: str) -> float:
    ttl_s = parse_duration_s(text)
    if not 60 <= ttl_s <= 10 * 365 * 86400:
        raise ValueError("must be 1min to 3650d")
    return ttl_s
