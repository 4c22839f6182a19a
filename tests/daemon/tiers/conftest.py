"""Fixtures for the tests of all tiers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


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
