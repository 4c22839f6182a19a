"""Fixtures that more than one file of these tests needs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from catalog_bench import bench

from tiercache.daemon.tiers import promotion
from tiercache.daemon.tiers.dram import growing_leases, growing_run, read_leases, runs
from tiercache.daemon.tiers.nvme import keeper, tier
from tiercache.daemon.tiers.nvme.moves import offers

__all__ = ["bench"]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes a file system of so many bytes ("1m") in memory; gone after the test."""
    mounted: list[Path] = []

    def make(size: str) -> Path:
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        if subprocess.run(command, capture_output=True, check=False, timeout=30).returncode != 0:
            pytest.skip("may not mount a file system here")
        mounted.append(place)
        return place

    yield make
    for place in mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=30)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier looks after its directories all the time, and tries again at once."""
    monkeypatch.setattr(keeper, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(keeper, "LAST_PAUSE_S", 0.05)
    monkeypatch.setattr(keeper, "LOOK_S", 0.02)
    monkeypatch.setattr(keeper, "QUIET_POLL_S", 0.005)


@pytest.fixture(params=["at once", "in slices"])
def slices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs with the usual and with the smallest slices."""
    if request.param == "in slices":
        for module, name in (
            (growing_run, "PINS"),
            (growing_leases, "PINS"),
            (read_leases, "PINS"),
            (runs, "PINS"),
            (tier, "PINS"),
            (promotion, "GROW_NS"),
            (offers, "LOOKED_AT_ONCE"),
        ):
            monkeypatch.setattr(module, name, 1)
