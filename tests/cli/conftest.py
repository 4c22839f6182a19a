"""Commands of these tests wait longer for a daemon that is only slow."""

from __future__ import annotations

import pytest

from tiercache.cli import connection


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of this process; two seconds, the default, are short on a busy machine."""
    monkeypatch.setattr(connection, "REQUEST_S", 20.0)
