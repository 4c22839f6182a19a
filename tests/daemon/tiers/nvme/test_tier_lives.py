"""The NVMe tier in this process: restarts, after any kind of end."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from chains import chain_of, key_of
from lives import live
from played import played
from tier_rig import TierRig

from tiercache.daemon.tiers.nvme import recovery
from tiercache.daemon.tiers.nvme.catalog.rows import RowBatch


async def live_with_chains(root: Path, seed: int, lives: int, steps: int) -> int:
    return await live(root, seed, lives, steps, lambda rig: [rig.namespace()], arena_regions=2, nvme_bytes=32 << 20)


@played
async def test_lives_that_end_anyhow(tmp_path: Path) -> None:
    back = [await live_with_chains(tmp_path / str(seed), seed, lives=5, steps=60) for seed in range(6)]
    assert sum(back) > 0, "no block ever came back: the test has checked nothing"


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(6))
@played
async def test_many_lives_that_end_anyhow(tmp_path: Path, seed: int) -> None:
    for number in range(10):
        await live_with_chains(tmp_path / str(number), 1000 * seed + number, lives=8, steps=150)


@played
async def test_a_flush_while_rows_load_is_later_than_all_of_them(tmp_path: Path) -> None:
    """Also when the flushes that raised the epoch before are already forgotten."""
    rig = await TierRig(tmp_path).open()
    space, chain = rig.namespace(), chain_of("a", 12)
    for number in range(6):
        rig.store(space, chain_of("other", 6))
        await rig.settled()
        assert await rig.flush(key_of(chain_of("other", 6), number % 3))
    rig.store(space, chain)
    await rig.settled()
    await rig.until(lambda: not rig.shelves[0].registry.tombstones)
    await rig.close()
    for by_key in (True, False):
        rig = TierRig(tmp_path)
        await rig.tier.open()
        assert rig.shelves[0].loading
        assert await rig.flush(key_of(chain, 6) if by_key else b"")
        await rig.loaded()
        assert await rig.load(rig.namespace(), chain) == (6 if by_key else 0)
        rig.check()
        await rig.crash()
    rig = await TierRig(tmp_path).open()
    assert rig.tier.stats()["blocks"] == 0
    await rig.close()


@played
async def test_a_directory_that_turns_read_only_is_still_read(tmp_path: Path) -> None:
    # There is room for all: where there is none, each try of a write makes some, at the chain's expense.
    rig = await TierRig(tmp_path, segment_bytes=8 << 20).open()
    disk, space, chain = rig.disks[rig.dirs[0]], rig.namespace(), chain_of("a", 20)
    rig.store(space, chain)
    await rig.settled()
    one = rig.shelves[0]

    def read_only(name: str, size: int) -> int | None:
        if name != "preadv":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return None

    commit = one.catalog._writer._commit
    disk.hook = read_only
    one.catalog._writer._commit = lambda db, batch: "attempt to write a readonly database"  # type: ignore[method-assign]
    for number in range(3):
        rig.store(space, chain_of(str(number), 10))
        for _ in range(50):
            rig.cache.work()
            await asyncio.sleep(0.001)
    rig.forget_dram()
    assert await rig.load(space, chain) == 20
    assert rig.tier.reasons()
    assert not await rig.flush(), "a flush that no disk has recorded is not durable"
    assert await rig.load(space, chain) == 0, "in this life it holds all the same"
    disk.hook = lambda name, size: None
    one.catalog._writer._commit = commit  # type: ignore[method-assign]
    one.health.off_until_s = 0.0
    await rig.until(lambda: not one.catalog.error)
    rig.store(space, chain)
    await rig.settled()
    assert rig.tier.reasons() == []
    rig.check()
    await rig.crash()
    rig = await TierRig(tmp_path).open()
    assert await rig.load(rig.namespace(), chain) == 20
    await rig.close()


@pytest.mark.parametrize("form", ["chain", "star"])
@played
async def test_rows_that_wait_for_one_parent_are_taken_in_by_slices(tmp_path: Path, form: str) -> None:
    """A root whose row is loaded last must not hold the loop while all blocks below it follow."""
    blocks = 4 * recovery.ROWS_AT_ONCE
    sizes: dict[str, int] = {"arena_regions": 8, "segment_bytes": 16 << 20}
    rig = await TierRig(tmp_path, **sizes).open()
    space, chain = rig.namespace(4096), chain_of("a", blocks)
    if form == "star":
        for number in range(1, blocks):
            rig.store(space, chain[:16] + key_of(chain, number))
    else:
        for first in range(0, blocks, 512):
            rig.store(space, chain[: 16 * (first + 512)], first=first)
    await rig.settled()
    await rig.close()
    rig = TierRig(tmp_path, **sizes)
    await rig.tier.open()
    one = rig.shelves[0]
    assert one.recovery is not None
    loading = one.recovery.rows
    rows: list[Any] = []
    while not loading.finished:
        rows += loading.next_batch() or ()
        await asyncio.sleep(0.001)

    def backwards() -> RowBatch | None:
        return RowBatch.of([rows.pop() for _ in range(min(len(rows), 512))]) if rows else None

    loading.next_batch = backwards  # type: ignore[method-assign]
    before = 0
    while one.loading:
        one.work()
        assert one.recovery.loaded_rows - before <= 2 * recovery.ROWS_AT_ONCE
        before = one.recovery.loaded_rows
    assert before == blocks
    rig.check()
    tail = chain if form == "chain" else chain[:16] + chain[-16:]
    assert await rig.load(rig.namespace(4096), tail) == len(tail) // 16
    await rig.close()


@played
async def test_a_chain_that_was_flushed_and_stored_again_keeps_no_old_tail(tmp_path: Path) -> None:
    """Rows of the old tail may outlive a kill, and their parent is there again: they stay away."""
    rig = await TierRig(tmp_path).open()
    space, chain = rig.namespace(), chain_of("a", 300)
    rig.store(space, chain)
    await rig.settled()
    flushed = await rig.flush(key_of(chain, 5))
    assert flushed
    rig.store(space, chain[: 16 * 10])
    for _ in range(3):
        rig.cache.work()
        await asyncio.sleep(0.002)
    await rig.crash()
    rig = await TierRig(tmp_path).open()
    assert await rig.load(rig.namespace(), chain) <= 10
    rig.check()
    await rig.close()


@played
async def test_write_amplification_counts_blocks_and_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await TierRig(tmp_path).open()
    assert rig.tier.stats()["write_amplification"] is None, "an idle daemon has none"
    monkeypatch.setattr("tiercache.daemon.tiers.nvme.inspection.LEAST_AMPLIFIED_BYTES", 1)
    assert rig.tier.stats()["write_amplification"] is None
    rig.store(rig.namespace(), chain_of("a", 40))
    await rig.settled()
    stats = rig.tier.stats()
    [directory] = stats["directories"]
    assert directory["written_bytes"] >= stats["written_bytes"] > 0
    assert directory["database_written_bytes"] > 40 * 76, "every row has been written at least once"
    disk_bytes = directory["written_bytes"] + directory["database_written_bytes"]
    assert stats["write_amplification"] == pytest.approx(disk_bytes / stats["written_bytes"], abs=1e-4)
    await rig.close()
