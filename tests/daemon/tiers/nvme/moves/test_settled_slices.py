"""A chain whose first block is written last: the others become visible in slices, with consistent books between."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from chains import chain_of
from played import play
from tier_rig import TierRig

from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.nvme.disk.queue import MAX_RUN_OPS
from tiercache.daemon.tiers.nvme.moves.flights import SETTLED_AT_ONCE

BLOCKS = 400
CHAIN = chain_of("late", BLOCKS)


def parked_blocks(rig: TierRig) -> int:
    return sum(len(run) for runs in rig.tier._writes._parked.values() for run in runs)


class Late:
    """A tier in which all of a chain is written but its first run of blocks, which the disk has yet to write."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fails = False
        self.go = threading.Event()
        self._offset = -1  # of the first write
        self._lock = threading.Lock()

    def hook(self, name: str, size: int) -> int | None:
        offset = self.disk.call.offset if name == "pwritev" else -1
        with self._lock:
            if offset >= 0 and self._offset < 0:
                self._offset = offset
        if offset >= 0 and offset == self._offset:
            assert self.go.wait(60.0)
            if self.fails:
                raise OSError(errno.EIO, "a bad disk")
        return None

    async def open(self) -> tuple[TierRig, Namespace]:
        rig = await TierRig(self.root).open()
        self.disk = rig.disks[rig.dirs[0]]
        self.disk.hook = self.hook
        space = rig.namespace(block_bytes=4096)
        rig.store(space, CHAIN)
        await rig.until(lambda: parked_blocks(rig) >= BLOCKS - MAX_RUN_OPS)
        assert not rig.shelves[0].table(space).blocks
        return rig, space

    async def written(self, rig: TierRig, space: Namespace) -> int:
        """Let the disk write them, and make a slice visible; returns how many blocks that are."""
        table = rig.shelves[0].table(space)
        self.go.set()
        while rig.shelves[0].queue.in_flight:
            await asyncio.sleep(0)
        assert not table.blocks, "a run becomes visible together, after the last of it was written"
        rig.tier._writes.settle()
        assert 0 < table.blocks < BLOCKS
        rig.check()
        return table.blocks


def late(scenario: Callable[[Late], Awaitable[None]], root: Path) -> None:
    async def run() -> None:
        one = Late(root)
        try:
            await scenario(one)
        finally:
            one.go.set()

    play(run)


def test_what_waited_for_the_first_block_becomes_visible_in_slices(tmp_path: Path) -> None:
    async def scenario(one: Late) -> None:
        rig, space = await one.open()
        assert await one.written(rig, space) <= SETTLED_AT_ONCE
        table = rig.shelves[0].table(space)
        while table.blocks < BLOCKS:
            before, more = table.blocks, rig.tier.work()
            assert more or table.blocks == BLOCKS
            assert table.blocks - before <= SETTLED_AT_ONCE
            rig.check()
        await rig.settled()
        rig.forget_dram()
        assert await rig.load(space, CHAIN) == BLOCKS
        rig.check()
        await rig.close()

    late(scenario, tmp_path)


def test_what_is_written_when_the_daemon_stops_is_kept(tmp_path: Path) -> None:
    async def scenario(one: Late) -> None:
        rig, space = await one.open()
        await one.written(rig, space)
        await rig.close()
        rig = await TierRig(tmp_path).open()
        assert await rig.load(rig.namespace(block_bytes=4096), CHAIN) == BLOCKS
        rig.check()
        await rig.close()

    late(scenario, tmp_path)


@pytest.mark.parametrize("key", [b"", CHAIN[:16]])
def test_what_is_flushed_between_two_slices_stays_away(tmp_path: Path, key: bytes) -> None:
    async def scenario(one: Late) -> None:
        rig, space = await one.open()
        await one.written(rig, space)
        assert await rig.flush(key)
        await rig.settled()
        assert not rig.shelves[0].table(space).blocks
        rig.check()
        await rig.close()
        rig = await TierRig(tmp_path).open()
        assert await rig.load(rig.namespace(block_bytes=4096), CHAIN) == 0
        await rig.close()

    late(scenario, tmp_path)


def test_what_waited_for_a_block_that_failed_is_lost_in_slices(tmp_path: Path) -> None:
    async def scenario(one: Late) -> None:
        rig, space = await one.open()
        writes, one.fails = rig.tier._writes, True
        one.go.set()
        while rig.shelves[0].queue.in_flight:
            before = len(writes._flying)
            await asyncio.sleep(0)
            assert before - len(writes._flying) <= MAX_RUN_OPS
        while not writes.idle:
            before, _ = len(writes._flying), rig.tier.work()
            assert before - len(writes._flying) <= SETTLED_AT_ONCE
            rig.check()
        assert not rig.shelves[0].table(space).blocks
        await rig.close()

    late(scenario, tmp_path)
