"""What `import tiercache` offers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tiercache

ROOT = Path(__file__).parents[1]

NAMES = [
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


def test_the_public_names_are_these() -> None:
    assert tiercache.__all__ == NAMES
    assert dir(tiercache) == NAMES
    assert all(getattr(tiercache, name) is not None for name in NAMES)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = tiercache.nonsense  # type: ignore[attr-defined]


def test_a_hung_daemon_costs_what_the_page_says() -> None:
    """In a fresh process: other tests have more patience."""
    code = (
        "import inspect, tiercache\n"
        "for made in (tiercache.connect, tiercache.Client, tiercache.Client.connect):\n"
        "    print(inspect.signature(made).parameters['request_timeout_s'].default)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert said.stdout.split() == ["0.5"] * 3
    assert "| `request_timeout_s` | 0.5 |" in (ROOT / "connectors" / "README.md").read_text()


def test_every_name_works_in_a_fresh_process_and_importing_alone_loads_nothing() -> None:
    code = (
        "import sys, tiercache\n"
        "assert not {'zmq', 'numpy', 'torch', 'msgspec'} & set(sys.modules)\n"
        "from tiercache import *\n"
        "assert launch.__module__ == 'tiercache.client.launcher' and callable(connect)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
