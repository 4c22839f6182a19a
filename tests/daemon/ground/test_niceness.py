"""Scheduling: the loop gets a higher priority where the system allows it, and nothing that it starts does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

import tiercache
from tiercache.daemon.ground.niceness import NICENESS


@pytest.fixture
def privileged() -> None:
    """Only where niceness may be lowered."""
    command = [sys.executable, "-c", f"import os; os.setpriority(os.PRIO_PROCESS, 0, {NICENESS})"]
    usual = os.getpriority(os.PRIO_PROCESS, 0) == 0
    if not usual or subprocess.run(command, capture_output=True, check=False, timeout=30).returncode != 0:
        pytest.skip("may not lower its niceness here")


@pytest.mark.stress
@pytest.mark.usefixtures("privileged")
def test_of_a_daemon_only_the_loop_goes_first(tmp_path: Path) -> None:
    with tiercache.launch("16MiB", region="8MiB", nvme=str(tmp_path / "nvme"), nvme_size="64MiB") as daemon:
        with tiercache.Client.connect(daemon.address, map_arena=False, request_timeout_s=30.0) as client:
            wait_until(lambda: client.stats()["tiers"]["nvme"]["directories"][0]["state"] == "ok")
        threads = map(int, os.listdir(f"/proc/{daemon.pid}/task"))
        niceness = {thread: os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
        assert niceness.pop(daemon.pid) == NICENESS
        assert len(niceness) > 8, "the threads of the directory among them"
        assert min(niceness.values()) == 0
