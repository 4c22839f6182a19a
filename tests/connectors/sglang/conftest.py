"""SGLang's own cache over a real daemon. Only collected where SGLang is installed: see `make test-sglang`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiercache

# This folder, as a package without __init__, has that name too, but no origin.
found = importlib.util.find_spec("sglang")
collect_ignore_glob = [] if found is not None and found.origin else ["test_*.py"]

if not collect_ignore_glob:
    import sglang_cpu

    sglang_cpu.stand_in()

    import sglang_rig

    @pytest.fixture(scope="session")
    def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return sglang_rig.save_model(tmp_path_factory.mktemp("model"))

    @pytest.fixture(scope="session")
    def shared_daemon() -> Iterator[tiercache.LaunchedDaemon]:
        with tiercache.launch("256MiB", region="32MiB", quota="team=1MiB") as daemon:
            yield daemon

    @pytest.fixture
    def daemon(shared_daemon: tiercache.LaunchedDaemon) -> tiercache.LaunchedDaemon:
        """A daemon that has forgotten everything."""
        with tiercache.Client.connect(shared_daemon.address, map_arena=False) as client:
            client.flush()
        return shared_daemon

    @pytest.fixture
    def rig(model: Path, daemon: tiercache.LaunchedDaemon) -> Iterator[sglang_rig.Rig]:
        with sglang_rig.Rig(model, daemon.address) as rig:
            yield rig
