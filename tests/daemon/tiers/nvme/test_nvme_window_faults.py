"""Windowed namespaces in the NVMe tier: disks that fail, blocks that are bad, flushes at any moment."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import msgspec
import pytest
from chains import chain_of, key_of
from disk_troubles import fail
from played import play
from tier_rig import BLOCK_BYTES, TierRig
from window_rig import WINDOW, check_closed, spaces_of, spread

from tiercache.daemon.tiers.nvme.catalog.rows import ROOT_KEY, pack_row, unpack_row
from tiercache.daemon.tiers.nvme.check.directory_check import ALL, check_directory
from tiercache.protocol.namespaces import NamespaceSpec

# --- every error path -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pwritev", "fallocate"])
def test_the_nth_write_of_windows_fails(tmp_path: Path, name: str) -> None:
    async def scenario() -> None:
        found = []
        for number in range(6):
            rig = await TierRig(tmp_path / str(number), arena_regions=16).open()
            disk, spaces, chain = rig.disks[rig.dirs[0]], spaces_of(rig), chain_of("a", 20)
            disk.hook = fail(name, number)
            for first in range(0, 20, 5):
                for space in spaces:
                    rig.store(space, chain[: 16 * (first + 5)], first=first)
                rig.shelves[0].health.off_until_s = 0.0
                await rig.settled()
            rig.check()
            disk.hook = lambda name, size: None
            rig.shelves[0].health.off_until_s = 0.0
            rig.forget_dram()
            found.append(await rig.load_all(spaces, chain))
            rig.check()
            await rig.close()
            check_closed(rig)
        assert 20 in found, "a failed block far behind does no harm"

    play(scenario)


def test_the_nth_read_of_windows_fails(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, disks=2).open()
        spaces, chain = spaces_of(rig), chain_of("a", 20)
        await spread(rig, spaces[1], chain)
        rig.store(spaces[0], chain)
        await rig.settled()
        for disk in rig.disks.values():
            rig.forget_dram()
            disk.calls.clear()
            assert await rig.load_all(spaces, chain) == 20
            reads = sum(name == "preadv" for name, _, _ in disk.calls)
            assert reads > 0
            for number in range(reads + 1):
                rig.forget_dram()
                disk.hook = fail("preadv", number)
                assert await rig.load_all(spaces, chain) in (0, 20)
                rig.check()
                disk.hook = lambda name, size: None
                assert await rig.load_all(spaces, chain) == 20, "a block that failed once may be good the next time"
                rig.check()
        await rig.close()

    play(scenario)


def test_a_bad_block_of_a_window_costs_itself_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        window, chain = rig.namespace(window_blocks=WINDOW), chain_of("a", 12)
        rig.store(window, chain)
        await rig.settled()
        stored = rig.shelves[0].find(window, key_of(chain, 7))
        assert stored is not None
        await rig.close()
        with _segment(rig).open("r+b") as file:
            file.seek(stored.slot & (1 << 48) - 1)
            file.write(b"rubbish")
        (finding,) = check_directory(rig.dirs[0], sample=ALL, rate=0).findings
        assert "fail their checksum" in finding
        rig = await TierRig(tmp_path).open()
        window = rig.namespace(window_blocks=WINDOW)
        assert await rig.load(window, chain[: 16 * 9]) == 0
        assert rig.tier.stats()["bad_blocks"] == 1
        assert caplog.text.count(f"block {key_of(chain, 7).hex()} fails its checksum and is dropped") == 1
        assert rig.tier.stats()["blocks"] == 11, "nothing hangs below it"
        assert await rig.load(window, chain[: 16 * 9]) == 7, "the longest cut without it"
        assert await rig.load(window, chain) == 12
        rig.store(window, key_of(chain, 7))
        await rig.settled()
        rig.forget_dram()
        assert await rig.load(window, chain[: 16 * 9]) == 9
        rig.check()
        await rig.close()
        check_closed(rig)

    play(scenario)


def _segment(rig: TierRig) -> Path:
    return rig.dirs[0] / "segments" / "00000001.seg"


def test_repair_takes_single_blocks_out_of_windows(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        spaces, chain = spaces_of(rig), chain_of("a", 10)
        rig.store(spaces[1], chain)
        await rig.settled()
        await rig.close()
        segment = bytearray(_segment(rig).read_bytes())
        segment[4 * BLOCK_BYTES + 5] ^= 1
        _segment(rig).write_bytes(segment)
        report = check_directory(rig.dirs[0], sample=ALL, rate=0, repair=True)
        assert (len(report.findings), report.deleted_rows) == (1, 1)
        check_closed(rig)
        rig = await TierRig(tmp_path).open()
        assert rig.tier.stats()["blocks"] == 9
        await rig.close()

    play(scenario)


def test_a_row_that_makes_a_chain_of_a_window_is_no_row(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        chain = chain_of("a", 5)
        rig.store(rig.namespace(window_blocks=WINDOW), chain)
        await rig.settled()
        await rig.close()
        with sqlite3.connect(rig.dirs[0] / "index.db") as db:
            for place, record in db.execute("SELECT place, record FROM blocks").fetchall():
                row = unpack_row(place, record)
                assert row is not None
                assert row.parent == ROOT_KEY
                if row.key == key_of(chain, 2):
                    linked = pack_row(place, row._replace(parent=key_of(chain, 1)))
                    db.execute("UPDATE blocks SET record = ? WHERE place = ?", (linked, place))
        db.close()
        (finding,) = check_directory(rig.dirs[0], sample=0).findings
        assert "a block of a windowed namespace names a block before it" in finding
        rig = await TierRig(tmp_path).open()
        assert rig.tier.stats()["blocks"] == 4
        assert await rig.load(rig.namespace(window_blocks=WINDOW), chain) == 2
        rig.check()
        await rig.close()
        check_closed(rig)

    play(scenario)


# --- flushes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("moment", ["writing", "promoting", "waiting", "loading"])
def test_nothing_flushed_of_a_window_comes_back(tmp_path: Path, moment: str, by_key: bool) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        window, chain = rig.namespace(window_blocks=40), chain_of("a", 60)
        # Block 50 alone, so that the longest cut is at 50; or all.
        key, most = (key_of(chain, 50), 50) if by_key else (b"", 0)
        disk = rig.disks[rig.dirs[0]]
        rig.store(window, chain_of("other", 3))
        await rig.settled()
        rig.store(window, chain)
        lease = None
        if moment == "writing":
            disk.gate.clear()
            rig.tier._writes.pump()
            assert rig.tier._writes.in_flight_bytes
        else:
            await rig.settled()
        if moment in ("promoting", "waiting"):
            rig.forget_dram()
            disk.gate.clear()
            if moment == "waiting":  # nothing of it has been asked for when the flush comes
                rig.tier.promotion._has_room = lambda shelf: False  # type: ignore[method-assign]
            lease = rig.match([window], chain)
            assert lease is not None
        if moment == "loading":
            await rig.close()
            rig = TierRig(tmp_path)
            await rig.tier.open()
            assert rig.shelves[0].loading
            window = rig.namespace(window_blocks=40)
        flushed = asyncio.ensure_future(rig.flush(key))
        await asyncio.sleep(0)
        if moment == "waiting":
            del rig.tier.promotion._has_room  # type: ignore[method-assign]
        disk.gate.set()
        assert await flushed
        if lease is not None:
            await rig.until(lambda: not rig.cache.reads.growing.leases)
            assert rig.read(lease, window) == 0, "this cut needs what was flushed"
        await rig.settled()
        await rig.loaded()
        assert await rig.load(window, chain) <= most
        rig.check()
        await rig.crash()
        check_closed(rig)
        again = await TierRig(tmp_path).open()
        assert await again.load(again.namespace(window_blocks=40), chain) <= most
        again.check()
        await again.close()

    play(scenario)


def test_what_is_being_unlinked_is_not_read(tmp_path: Path) -> None:
    """A flush unlinks many blocks in slices. Until then their keys are found, and reads do not wait for it."""

    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        window, chain = rig.cache.space.open_namespace(_large_window(rig)), chain_of("a", 500)
        rig.store(window, chain)
        await rig.settled()
        rig.forget_dram()
        rig.tier.promotion._has_room = lambda shelf: False  # type: ignore[method-assign]
        lease = rig.match([window], chain)
        assert lease is not None
        rig.tier.flush([window], b"", lambda blocks, durable: None)
        assert rig.shelves[0].index.tables[window.number].unlinking
        del rig.tier.promotion._has_room  # type: ignore[method-assign]
        await rig.until(lambda: not rig.cache.reads.growing.leases)
        rig.cache.reads.release(rig.owner, lease.lease_id)
        assert await rig.load(window, chain) == 0
        assert rig.tier.stats()["promoted_blocks"] == 0
        await rig.settled()
        rig.check()
        await rig.close()

    play(scenario)


def _large_window(rig: TierRig) -> NamespaceSpec:
    return msgspec.structs.replace(rig.namespace(4096).spec, window_blocks=500)


def test_a_flushed_block_of_a_window_can_be_stored_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        window, chain = rig.namespace(window_blocks=WINDOW), chain_of("a", 6)
        for number in range(12):
            rig.store(window, chain)
            await rig.settled()
            assert await rig.flush(key_of(chain, number % 6))
            assert await rig.load(window, chain) == (number % 6 if number % 6 > 2 else 6 if number % 6 < 3 else 0)
        await rig.until(lambda: not rig.shelves[0].registry.tombstones)
        rig.store(window, chain)
        await rig.settled()
        rig.check()
        await rig.crash()
        rig = await TierRig(tmp_path).open()
        assert await rig.load(rig.namespace(window_blocks=WINDOW), chain) == 6
        await rig.close()

    play(scenario)
