"""tiercache: a KV cache offloading service for LLM serving.

    daemon = tiercache.launch(arena="1GiB")
    connector = tiercache.connect(daemon.address, namespace=spec, pool=pool)

`tiercache.connector` shows the whole way of a block. Names are imported when they are first used,
so `import tiercache` costs nothing.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercache.client import Client
    from tiercache.connector import Connector, connect
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
    from tiercache.hints import Hint
    from tiercache.jobs import Transfer
    from tiercache.keys import KeyChain, fingerprint_files, root_key
    from tiercache.launch import LaunchedDaemon, launch
    from tiercache.layout import NamespaceSpec
    from tiercache.loading import Match
    from tiercache.messages import Priority
    from tiercache.storing import StoreResult
    from tiercache.transfer import Pool

_HOMES = {
    "Client": "client",
    "Connector": "connector",
    "connect": "connector",
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
    "Hint": "hints",
    "Transfer": "jobs",
    "KeyChain": "keys",
    "fingerprint_files": "keys",
    "root_key": "keys",
    "LaunchedDaemon": "launch",
    "launch": "launch",
    "NamespaceSpec": "layout",
    "Match": "loading",
    "Priority": "messages",
    "StoreResult": "storing",
    "Pool": "transfer",
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


class _Package(ModuleType):
    """Keeps `tiercache.launch` the function: importing the module of that name would replace it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "launch" and isinstance(value, ModuleType):
            value = value.launch
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted(__all__)
