"""Fixtures of the tests of stores."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiercache.daemon.tiers.shared.stores.folder.connection import shared_folder
from tiercache.daemon.tiers.shared.stores.helper import supervisor
from tiercache.daemon.tiers.shared.stores.helper.connection import HelperConnection, HelperStore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty one, to be shared."""
    path = tmp_path / "kv"
    path.mkdir()
    return path


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., HelperStore]]:
    """Makes stores whose processes end with the test. Those that obey may be told to hang or die."""
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_S", 0.1)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*sys.path, str(Path(__file__).parent)]))
    made: list[HelperStore] = []
    connected: list[HelperConnection] = []
    real = HelperStore.connect

    def connect(store: HelperStore) -> HelperConnection:
        connected.append(real(store))
        return connected[-1]

    monkeypatch.setattr(HelperStore, "connect", connect)

    def make(url: str = f"obedient://{tmp_path}") -> HelperStore:
        if url.startswith("file:"):
            made.append(shared_folder(url))
        else:
            made.append(HelperStore("obedient_store:ObedientStore", url, url, 2))
        return made[-1]

    yield make
    (tmp_path / "gate").touch()
    for line in connected:
        line.close()
    for one in made:
        one.close()
