"""Databases that are put aside."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from catalog_bench import Bench

from tiercache.daemon.tiers.nvme.catalog.database import rename_aside


def test_the_log_goes_aside_before_its_database(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that a crash leaves without its database is not replayed; deleted in the other order it might be."""
    path = bench.path
    for end in ("", "-wal", "-shm"):
        Path(f"{path}{end}").write_bytes(b"x")
    moved: list[str] = []
    rename = os.rename

    def noted(source: Any, target: Any) -> None:
        assert path.with_name("index.db.suspect").exists(), "the marker stands meanwhile"
        moved.append(Path(source).name)
        rename(source, target)

    monkeypatch.setattr(os, "rename", noted)
    rename_aside(path)
    assert moved[-1] == "index.db"
    assert sorted(moved) == ["index.db", "index.db-shm", "index.db-wal"]
    assert not path.with_name("index.db.suspect").exists()
