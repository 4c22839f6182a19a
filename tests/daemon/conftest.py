"""A real daemon and a client that shares no line with tiercache, for the tests of the wire protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from raw_client import Client, daemon


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("wire") / "run"
    with daemon(path, "--arena", "80MiB", "--region", "2MiB"):
        yield path


@pytest.fixture
def client(run_dir: Path) -> Iterator[Client]:
    with Client(run_dir) as connected:
        connected.await_arena()
        yield connected
