"""Core dumps of real daemons: none where there is a key, and never one that contains the arena."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

import tiercache

LEAVE_NONE = """
import logging, resource, sys
from pathlib import Path
from tiercache.daemon.ground import core_dumps
logging.basicConfig()
core_dumps.CORE_PATTERN = Path(sys.argv[2])
def refuse(*limits):
    raise ValueError("not allowed to raise maximum limit")
if sys.argv[1] == "none":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit = refuse  # as for all but root
core_dumps.leave_none()
print(*resource.getrlimit(resource.RLIMIT_CORE))
"""


def core_limits(pid: int | str) -> list[str]:
    """Soft and hard limit, as the kernel writes them."""
    (line,) = [one for one in Path(f"/proc/{pid}/limits").read_text().splitlines() if one.startswith("Max core file")]
    return line.split()[4:6]


def flags_of_regions(pid: int | str) -> list[list[str]]:
    """VmFlags of each mapping of the arena."""
    mappings = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text())
    return [one.rpartition("VmFlags:")[2].split() for one in mappings if "/memfd:tiercache-" in one]


def children_of(pid: int) -> list[str]:
    return [child for one in Path(f"/proc/{pid}/task").iterdir() for child in (one / "children").read_text().split()]


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_daemon_with_a_key_leaves_none_and_neither_do_its_processes(tmp_path: Path, encrypted: bool) -> None:
    key, nvme = tmp_path / "key", tmp_path / "nvme"
    key.touch(mode=0o600)
    key.write_text("ab" * 32)
    nvme.mkdir(mode=0o700)
    settings = {"nvme_key": str(key)} if encrypted else {}
    with tiercache.launch(
        "8MiB", region="2MiB", nvme=str(nvme), nvme_size="64MiB", nvme_segment="2MiB", nvme_workers="on", **settings
    ) as daemon:
        (worker,) = wait_until(lambda: children_of(daemon.pid), "the worker process")
        for pid in (str(daemon.pid), worker):
            wait_until(lambda pid=pid: len(flags_of_regions(pid)) == 4, f"the arena in process {pid}")
            assert all("dd" in flags for flags in flags_of_regions(pid)), "dd: do not include in core dumps"
        limits = core_limits(daemon.pid), core_limits(worker)
    assert limits == (["1", "1"], ["1", "1"]) if encrypted else limits[0] == core_limits("self")


@pytest.mark.parametrize(
    ("before", "pattern", "after", "warned"),
    [
        ("any", "|/usr/lib/handler", "1 1", False),
        ("none", "|/usr/lib/handler", "0 0", True),
        ("none", "core", "0 0", False),
        ("none", "", "0 0", True),
    ],
)
def test_a_limit_that_cannot_be_raised_is_told_where_it_matters(
    tmp_path: Path, before: str, pattern: str, after: str, warned: bool
) -> None:
    if before == "any" and resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        pytest.skip("a limit of 0 bytes already")
    if pattern:  # else a sandbox hides it
        (tmp_path / "pattern").write_text(pattern)
    command = [sys.executable, "-c", LEAVE_NONE, before, str(tmp_path / "pattern")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == after
    assert ("kernel.core_pattern" in done.stderr) == warned
