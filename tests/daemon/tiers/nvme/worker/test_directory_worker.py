"""Directories with real processes, which are killed: blocks are good or missing, and nothing durable is lost."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from chains import chain_of
from played import played
from tier_rig import TierRig
from waiting import state_of

from tiercache.daemon.tiers.nvme.worker.directory_worker import DirectoryWorker
from tiercache.errors import ConfigError


class WorkerRig(TierRig):
    """`TierRig`, with a process for each directory."""

    def __init__(self, root: Path, **settings: Any) -> None:
        super().__init__(root, nvme_workers="on", **settings)

    def pid(self, number: int = 0) -> int:
        """Of the process of a directory; 0 while there is none."""
        pid = self.shelves[number].directory.worker_pid  # type: ignore[attr-defined]
        assert isinstance(pid, int)
        return pid

    def signal(self, what: signal.Signals) -> int:
        """Send a signal to the process; returns its pid."""
        pid = self.pid()
        os.kill(pid, what)
        return pid

    async def replaced(self, pid: int) -> None:
        """Another process serves the directory."""
        await self.until(lambda: self.pid() not in (0, pid))


def worker_of(rig: WorkerRig) -> DirectoryWorker:
    its = rig.shelves[0].directory._end.__self__  # type: ignore[attr-defined]
    assert isinstance(its, DirectoryWorker)
    return its


@pytest.mark.parametrize("settings", [{}, {"nvme_codec": "lz4", "disks": 2}], ids=["raw", "lz4, two directories"])
@played
async def test_blocks_come_back_from_a_process_and_after_a_restart(tmp_path: Path, settings: dict[str, Any]) -> None:
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("ab" * 32)
    rig = await WorkerRig(tmp_path, nvme_key=key, **settings).open()
    space, chains = rig.namespace(), [chain_of(str(number), 20) for number in range(4)]
    for chain in chains:
        await rig.store_below([space], chain)
    rig.check()
    pids = [rig.pid(number) for number in range(len(rig.shelves))]
    assert os.getpid() not in pids
    await rig.replaced(rig.signal(signal.SIGKILL))
    for chain in chains:
        assert await rig.load(space, chain) == 20
    await rig.close()
    assert [pid for pid in pids if state_of(pid)] == []
    rig = await WorkerRig(tmp_path, nvme_key=key, **settings).open()
    for chain in chains:
        assert await rig.load(rig.namespace(), chain) == 20
    rig.check()
    await rig.close()


@played
async def test_a_directory_that_was_replaced_meanwhile_is_opened_again(tmp_path: Path, soon: None) -> None:
    rig = await WorkerRig(tmp_path).open()
    space, chain = rig.namespace(), chain_of("a", 20)
    await rig.store_below([space], chain)
    before, pid = rig.shelves[0], rig.signal(signal.SIGSTOP)
    shutil.move(rig.dirs[0], tmp_path / "moved")
    (tmp_path / "other").mkdir(mode=0o700)
    os.rename(tmp_path / "other", rig.dirs[0])
    os.kill(pid, signal.SIGKILL)
    await rig.until(lambda: bool(rig.shelves) and rig.shelves[0] is not before)
    await rig.loaded()
    assert await rig.load(space, chain) == 0
    await rig.store_below([space], chain)
    assert await rig.load(space, chain) == 20
    rig.check()
    await rig.close()


@pytest.mark.parametrize("line", ["rows", "blocks", "files"])
@played
async def test_a_thread_that_fails_ends_the_process(
    tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = await WorkerRig(tmp_path).open()
    space, chain = rig.namespace(), chain_of("a", 20)
    await rig.store_below([space], chain)
    pid, life = rig.pid(), worker_of(rig)._life
    assert life is not None
    getattr(life, line).send(b"\0nonsense that no daemon sends")
    await rig.replaced(pid)
    assert f"thread {line} of a worker process fails, which ends the process" in caplog.text
    assert await rig.load(space, chain) == 20
    await rig.close()


@played
async def test_a_directory_that_is_named_by_two_paths_is_refused_as_the_daemon_starts(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir(mode=0o700)
    (tmp_path / "other").symlink_to("one")
    rig = WorkerRig(tmp_path, dirs=[tmp_path / "one", tmp_path / "other"])
    with pytest.raises(ConfigError, match="is another path of one that is named already: name each once"):
        await rig.tier.open()
    await rig.close()
