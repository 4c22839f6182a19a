"""Fixtures of these tests; the rigs beside it are for the folders below, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from valkey_rig import ValkeyServer

from tiercache.daemon.tiers.shared import presence


@pytest.fixture
def full_valkey() -> Iterator[ValkeyServer]:
    """A real server that drops what expires first when it is full."""
    with ValkeyServer("--maxmemory", "256mb", "--maxmemory-policy", "volatile-ttl") as server:
        yield server


@pytest.fixture
def nothing_is_missing_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the store lacked a moment ago is asked for again."""
    monkeypatch.setattr(presence, "NO_CLAIM_S", 0.0)
