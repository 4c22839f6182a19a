"""Directories on file systems that are not mounted, or that others are mounted over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tiercache.daemon.ground import mounts
from tiercache.daemon.tiers.nvme.disk.disk import DiskIO
from tiercache.daemon.tiers.nvme.worker.opening import Plan, open_directory
from tiercache.errors import DirectoryUnavailable

MIB = 1 << 20


def plan(path: Path, **more: Any) -> Plan:
    return Plan(path, 32 * MIB, 4 * MIB, **more)


def test_a_mount_point_of_fstab_without_its_mount_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "my disk"
    place.mkdir()
    fstab = tmp_path / "fstab"
    fstab.write_text(f"# disks\n/dev/x {str(place).replace(' ', chr(92) + '040')} xfs defaults 0 0\nshort\n")
    monkeypatch.setattr(mounts, "FSTAB", fstab)
    with pytest.raises(DirectoryUnavailable, match=f"nothing is mounted at {place}, as /etc/fstab says: mount it"):
        open_directory(plan(place / "kv"), DiskIO(), lambda *args: None)
    assert list(place.iterdir()) == []
    monkeypatch.setattr(mounts, "_mounted", lambda path: path == place)
    mounts.check_mounted(place / "kv", needed=False)
    mounts.check_mounted(tmp_path / "other", needed=False)


def test_a_disk_of_its_own_can_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "mount_point_of", lambda path: Path("/"))
    with pytest.raises(DirectoryUnavailable, match="it is on the file system of /, and nvme_require_mount is set"):
        open_directory(plan(tmp_path / "kv", require_mount=True), DiskIO(), lambda *args: None)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(mounts, "mount_point_of", lambda path: Path("/mnt"))
    mounts.check_mounted(tmp_path / "kv", needed=True)
