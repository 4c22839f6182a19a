"""Fixtures that more than one file of these tests needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from catalog_bench import bench
from cluster import Cluster
from disk_rig import ObedientDisk

from tiercache.daemon.tiers.nvme.opening import keeper

__all__ = ["bench"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A daemon with one directory."""
    made = Cluster(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier looks after its directories all the time, and tries again at once."""
    monkeypatch.setattr(keeper, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(keeper, "LAST_PAUSE_S", 0.05)
    monkeypatch.setattr(keeper, "LOOK_S", 0.02)
    monkeypatch.setattr(keeper, "QUIET_POLL_S", 0.005)


@pytest.fixture(params=["aio", "threads"])
def carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test runs with both carriers of blocks: on disks that the test controls, and in daemons that it starts."""
    monkeypatch.setattr(ObedientDisk, "offers_aio", request.param == "aio")
    monkeypatch.setenv("TIERCACHE_NVME_IO", request.param)
    return str(request.param)
