"""Directories that are unusable or disappear: only their own blocks are lost, and they come back by themselves."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chains import chain_of, key_of
from disk_rig import segment_path
from keeper_rig import CHAINS, filled, found, states, take_away
from memory_disks import MemoryDisk
from played import Clock, on_clock, played
from tier_rig import TierRig

from tiercache.daemon.tiers.nvme import tier as nvme_tier
from tiercache.daemon.tiers.nvme.opening.keeper import PATIENCE_S, Keepers
from tiercache.daemon.tiers.nvme.shelf.registry import Registry

MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("soon")


# --- at the start ------------------------------------------------------------------------------------


@played
async def test_a_directory_that_cannot_be_opened_costs_itself_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = await filled(tmp_path)
    bad = rig.dirs[0]
    mine = {chain for chain in CHAINS if rig.shelves[0].has(rig.namespace(), key_of(chain, 0))}
    await rig.close()
    (bad / "lock").unlink()
    (bad / "lock").mkdir()
    again = await TierRig(tmp_path, disks=2).open()
    assert states(again) == ["away", "ok"]
    assert await found(again) == [0 if chain in mine else 8 for chain in CHAINS]
    [reason] = again.tier.reasons()
    assert reason.startswith(f"nvme directory {bad} cannot be used: lock: Is a directory: ")
    new = chain_of("new", 4)
    again.store(again.namespace(), new)
    await again.settled()
    assert again.shelves[0].has(again.namespace(), key_of(new, 3)), "new blocks go to the directory that works"
    await again.until(lambda: again.tier.stats()["directories"][0]["open_failures"] >= 3)
    assert sum("goes on without it" in record.message for record in caplog.records) == 1, "it is said only once"
    (bad / "lock").rmdir()
    await again.until(lambda: states(again) == ["ok", "ok"])
    assert again.tier.reasons() == []
    again.forget_dram()
    assert await found(again) == [8] * len(CHAINS)
    again.check()
    await again.close()


@on_clock
async def test_a_bug_in_taking_a_directory_into_use_costs_that_directory_and_is_reported(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def registry(path: str, *parts: Any) -> Registry:
        assert not path.endswith("0"), "the bug"
        return Registry(path, *parts)

    monkeypatch.setattr(nvme_tier, "Registry", registry)
    rig = await TierRig(Path("/nowhere"), disks=[MemoryDisk(number, clock) for number in range(2)]).open()
    assert states(rig) == ["away", "ok"]
    [reason] = rig.tier.reasons()
    assert reason.endswith("cannot be used until the daemon restarts; the log says why")
    rig.store(rig.namespace(4096), CHAINS[0])
    await rig.settled()
    assert rig.tier.stats()["blocks"] == 8, "nothing waits for it"
    await rig.close()


# --- while it runs ------------------------------------------------------------------------------------


@played
async def test_a_directory_that_is_replaced_is_given_up_and_both_are_right(tmp_path: Path) -> None:
    """Nothing more is written to a directory that has left its path; the daemon does not touch the new one there."""
    rig = await filled(tmp_path)
    first = rig.dirs[0]
    mine = [chain for chain in CHAINS if rig.shelves[0].has(rig.namespace(), key_of(chain, 0))]
    elsewhere = tmp_path / "elsewhere"
    writes = rig.tier.stats()["directories"][0]["writes"]
    await take_away(rig, elsewhere)
    [reason] = rig.tier.reasons()
    assert "lock is gone: the directory was removed or unmounted" in reason
    assert await found(rig) == [0 if chain in mine else 8 for chain in CHAINS]
    await rig.until(lambda: rig.tier.stats()["directories"][0]["open_failures"] >= 2)
    assert not first.exists(), "it is not made anew where its disk may be missing"
    rig.check()
    first.mkdir()
    await rig.until(lambda: states(rig) == ["ok", "ok"])
    for chain in mine:
        rig.store(rig.namespace(), chain)
    await rig.settled()
    rig.forget_dram()
    assert await found(rig) == [8] * len(CHAINS)
    log = first / "index.db-wal"
    assert log.exists()
    assert rig.tier.stats()["directories"][0]["writes"] == writes + rig.shelves[0].stats()["writes"] > writes
    # And back: the new one is put away while it is open, the old one has its place again.
    with (elsewhere / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # it is not opened before it was looked at
        first.rename(tmp_path / "new")
        elsewhere.rename(first)
        before = {path: path.read_bytes() for path in first.glob("index.db*")}
        await rig.until(lambda: len(rig.shelves) == 1)
        assert {path: path.read_bytes() for path in before} == before, "a directory that leaves touches no other"
    await rig.until(lambda: states(rig) == ["ok", "ok"])
    rig.forget_dram()
    assert await found(rig) == [8] * len(CHAINS)
    rig.check()
    await rig.close()


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: os.truncate(path, MIB // 2)], ids=["deleted", "truncated"])
@played
async def test_segments_that_are_deleted_or_truncated_in_use_are_noticed(
    tmp_path: Path, harm: Callable[[Path], Any]
) -> None:
    """What is written to a deleted file is lost with the daemon, and its room is not free until then."""
    rig = await filled(tmp_path, disks=1)
    [shelf] = rig.shelves
    first, *others = [segment_path(shelf.directory, number) for number in shelf.directory.segments]
    harm(first)
    await rig.until(lambda: rig.shelves != [shelf] and states(rig) == ["ok"])
    assert rig.shelves[0].directory.segments == [int(path.stem) for path in others]
    assert set(await found(rig)) <= {*range(9)}
    rig.check()
    await rig.close()


@played
async def test_a_directory_is_seen_to_while_its_writes_fail(tmp_path: Path) -> None:
    """An error of a look is one of the disk: it is given up, so that its file system can be mended."""
    rig = await filled(tmp_path, disks=1)
    shelf = rig.shelves[0]

    def broken() -> str:
        raise OSError(errno.EIO, "Input/output error")

    shelf.directory.look = broken  # type: ignore[method-assign]
    await rig.until(lambda: rig.shelves != [shelf] and states(rig) == ["ok"])
    [now] = rig.tier.stats()["directories"]
    assert now["errors"][str(errno.EIO)] == 1
    assert await found(rig) == [8] * len(CHAINS)
    await rig.close()


# --- at the end ---------------------------------------------------------------------------------------


@on_clock
async def test_a_directory_stays_locked_while_its_last_transaction_hangs(clock: Clock) -> None:
    """Another daemon that had it would meet with what the disk may still write."""
    disks = [MemoryDisk(number, clock) for number in range(2)]
    rig = await TierRig(Path("/nowhere"), disks=disks).open()
    for shelf in rig.shelves:
        shelf.table(rig.namespace(4096))  # its catalog has something to write
    disks[0].hung = True
    await rig.close()
    assert [disk.is_open for disk in disks] == [True, False]


@played
async def test_nothing_of_a_directory_that_has_gone_is_kept(tmp_path: Path) -> None:
    """Its index is as large as the directory: with each return there would be one more."""
    rig = await filled(tmp_path, disks=1)
    await found(rig)
    assert rig.tier.scan(-1, 0, lambda: True, lambda findings, blocks: None)
    await rig.work(5)
    former = weakref.ref(rig.shelves[0])
    await take_away(rig, tmp_path / "elsewhere")
    await rig.until(lambda: gc.collect() >= 0 and former() is None)
    await rig.close()


class Slow:
    """Opens its directory when the test says so."""

    refusal = shelf = None
    strict = True

    def __init__(self) -> None:
        self.tried = asyncio.Event()

    async def keep(self) -> None:
        await self.tried.wait()


@on_clock
async def test_nothing_is_written_before_all_directories_were_tried_or_for_too_long(clock: Clock) -> None:
    """A chain in a directory that is not open yet would begin again in another one."""
    quick, slow = Slow(), Slow()
    keepers: list[Any] = [quick, slow]
    keeping = Keepers(keepers, lambda: clock.now_s)
    quick.tried.set()
    await keeping.open(0.0)
    assert not keeping.may_write
    clock.now_s += PATIENCE_S
    assert keeping.may_write
    clock.now_s -= PATIENCE_S
    slow.tried.set()
    assert keeping.may_write
    keeping.stop()
