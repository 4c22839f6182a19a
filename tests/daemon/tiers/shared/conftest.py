"""Fixtures of these tests; the rigs beside it are for the folders below, too."""

from __future__ import annotations

import pytest

from tiercache.daemon.tiers.shared import presence


@pytest.fixture
def nothing_is_missing_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the store lacked a moment ago is asked for again."""
    monkeypatch.setattr(presence, "NO_CLAIM_S", 0.0)
