"""Clusters whose connector reads blocks directly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from direct_case import DirectCluster


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., DirectCluster]]:
    made: list[DirectCluster] = []

    def start(*arguments: Any, **settings: Any) -> DirectCluster:
        made.append(DirectCluster(tmp_path, *arguments, **settings))
        return made[-1]

    yield start
    for cluster in made:
        cluster.backend.resume()
        cluster.stop()
