"""tiercache: a KV cache offloading service for LLM serving.

    daemon = tiercache.launch(arena="1GiB")
    connector = tiercache.connect(daemon.address, namespace=spec, pool=pool)

`tiercache.connector.connector` shows the whole way of a block. Names are imported when they are first used,
so `import tiercache` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercache.client.client import Client
    from tiercache.client.launcher import LaunchedDaemon, launch
    from tiercache.connector.connector import Connector, connect
    from tiercache.connector.jobs import Transfer
    from tiercache.connector.loads import Match
    from tiercache.connector.stores import StoreResult
    from tiercache.copies.pool import Pool
    from tiercache.errors import (
        ArenaError,
        ConfigError,
        DaemonUnavailable,
        DeadlineExceeded,
        LayoutError,
        ModelRefused,
        ProtocolError,
        RequestRefused,
        TierCacheError,
        VersionError,
    )
    from tiercache.protocol.hints import Hint
    from tiercache.protocol.keys import KeyChain, fingerprint_files, root_key
    from tiercache.protocol.messages import ModelCard, Priority
    from tiercache.protocol.namespaces import NamespaceSpec

_HOMES = {
    "Client": "client.client",
    "Connector": "connector.connector",
    "connect": "connector.connector",
    "ArenaError": "errors",
    "ConfigError": "errors",
    "DaemonUnavailable": "errors",
    "DeadlineExceeded": "errors",
    "LayoutError": "errors",
    "ModelRefused": "errors",
    "ProtocolError": "errors",
    "RequestRefused": "errors",
    "TierCacheError": "errors",
    "VersionError": "errors",
    "Hint": "protocol.hints",
    "Transfer": "connector.jobs",
    "KeyChain": "protocol.keys",
    "fingerprint_files": "protocol.keys",
    "root_key": "protocol.keys",
    "LaunchedDaemon": "client.launcher",
    "launch": "client.launcher",
    "NamespaceSpec": "protocol.namespaces",
    "Match": "connector.loads",
    "ModelCard": "protocol.messages",
    "Priority": "protocol.messages",
    "StoreResult": "connector.stores",
    "Pool": "copies.pool",
}

__version__ = "0.2.0"
__all__ = [
    "ArenaError",
    "Client",
    "ConfigError",
    "Connector",
    "DaemonUnavailable",
    "DeadlineExceeded",
    "Hint",
    "KeyChain",
    "LaunchedDaemon",
    "LayoutError",
    "Match",
    "ModelCard",
    "ModelRefused",
    "NamespaceSpec",
    "Pool",
    "Priority",
    "ProtocolError",
    "RequestRefused",
    "StoreResult",
    "TierCacheError",
    "Transfer",
    "VersionError",
    "__version__",
    "connect",
    "fingerprint_files",
    "launch",
    "root_key",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tiercache' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tiercache.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
