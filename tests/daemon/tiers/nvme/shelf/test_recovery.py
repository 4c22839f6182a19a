"""Rows of an earlier life: how they come in and go, and which of them are refused."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from chains import chain_of, key_of
from memory_disks import MemoryDisk
from played import Clock, on_clock, play
from tier_rig import TierRig

from tiercache.daemon.tiers.forms.cipher import load_cipher
from tiercache.daemon.tiers.nvme.catalog import writer
from tiercache.daemon.tiers.nvme.catalog.rows import Row
from tiercache.daemon.tiers.nvme.shelf import recovery

PAGE = 4096
NOWHERE = Path("/nowhere")
BLOCKS = 4 * recovery.RELEASED_AT_ONCE


def row_of(disk: MemoryDisk, key: bytes) -> tuple[int, Row]:
    return next((place, Row._make(row)) for place, row in disk.database.rows.items() if row[0] == key)


async def lived_in(clock: Clock, *chains: bytes, window_blocks: int = 0) -> MemoryDisk:
    """A disk with these chains, whose rows lie in any order."""
    disk = MemoryDisk(0, clock, segment_bytes=8 << 20)
    rig = await TierRig(NOWHERE, disks=[disk]).open()
    space = rig.namespace(PAGE, window_blocks=window_blocks)
    for chain in chains:
        rig.store(space, chain)
        await rig.settled()
    await rig.close()
    return disk


@pytest.mark.parametrize("form", ["chain", "star"])
@on_clock
async def test_rows_that_wait_for_one_parent_are_taken_in_by_slices(clock: Clock, form: str) -> None:
    """A root whose row is loaded last must not hold the loop while all blocks below it follow."""
    chain = chain_of("a", BLOCKS)
    below_one = [chain[:16] + key_of(chain, number) for number in range(1, BLOCKS)]
    disk = await lived_in(clock, *([chain] if form == "chain" else below_one))
    rig = TierRig(NOWHERE, disks=[disk])
    await rig.tier.open()
    [shelf] = rig.shelves
    assert shelf.recovery is not None
    shelf.recovery.rows.left.reverse()  # type: ignore[attr-defined]
    before = 0
    while shelf.loading:
        shelf.work()
        assert shelf.recovery.loaded_rows - before <= recovery.RELEASED_AT_ONCE
        before = shelf.recovery.loaded_rows
    assert before == BLOCKS
    rig.check()
    last = chain if form == "chain" else below_one[-1]
    assert await rig.load(rig.namespace(PAGE), last) == len(last) // 16
    await rig.close()


@pytest.mark.parametrize("lost", ["a row", "a row that is replaced"])
@on_clock
async def test_rows_that_are_refused_go_from_the_ends_of_chains(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Wherever their slots are: a kill in between leaves no row without the one before it."""
    monkeypatch.setattr(recovery, "ROWS_AT_ONCE", 3)
    chain = chain_of("a", 40)
    disk = await lived_in(clock, chain)
    place, row = row_of(disk, key_of(chain, 4))
    if lost == "a row":
        del disk.database.rows[place]
    else:  # flushed and stored again: the rows behind it are older
        disk.database.rows[place] = row._replace(epoch=1)  # rule: a method of NamedTuple
    rig = TierRig(NOWHERE, disks=[disk])
    await rig.tier.open()
    assert disk.catalog is not None
    deleted, delete = list[bytes](), disk.catalog.delete
    keys = {place: row[0] for place, row in disk.database.rows.items()}

    def note(places: Sequence[int], done: object = None) -> None:
        deleted.extend(keys[place] for place in places)
        delete(places, done)  # type: ignore[arg-type]

    monkeypatch.setattr(disk.catalog, "delete", note)
    random.Random(1).shuffle(rig.shelves[0].recovery.rows.left)  # type: ignore[union-attr]
    while rig.shelves[0].loading:
        await rig.work()
    assert deleted == [key_of(chain, number) for number in range(39, 4, -1)]
    left = 4 if lost == "a row" else 5
    assert rig.shelves[0].allocator.used_bytes > left * PAGE, "slots are free when their rows are deleted"
    await rig.until(lambda: rig.shelves[0].allocator.used_bytes == left * PAGE)
    rig.check()
    assert await rig.load(rig.namespace(PAGE), chain) == left
    await rig.close()


@on_clock
async def test_a_row_that_makes_a_chain_of_a_window_is_no_row(clock: Clock) -> None:
    chain = chain_of("a", 5)
    disk = await lived_in(clock, chain, window_blocks=3)
    place, row = row_of(disk, key_of(chain, 2))
    disk.database.rows[place] = row._replace(parent=key_of(chain, 1))  # rule: a method of NamedTuple
    rig = await TierRig(NOWHERE, disks=[disk]).open()
    assert rig.tier.stats()["blocks"] == 4
    assert await rig.load(rig.namespace(PAGE, window_blocks=3), chain) == 2
    rig.check()
    await rig.close()


# --- keys ---------------------------------------------------------------------------------------------


def key_file(path: Path, digits: str) -> Path:
    path.write_text(digits * 64 + "\n")
    path.chmod(0o600)
    return path


def test_a_flush_of_blocks_of_another_key_is_durable_only_when_it_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rows are refused, but not deleted yet: with their own key they would come back."""
    pytest.importorskip("cryptography")
    write, full = writer.apply, True

    def apply(*its: Any) -> None:
        if full:
            raise sqlite3.OperationalError("database or disk is full")
        write(*its)

    async def scenario() -> None:
        nonlocal full
        chain, key, answers = chain_of("a", 8), key_file(tmp_path / "1", "a"), list[bool]()
        await one_life(tmp_path, key, chain, 0, 0)
        monkeypatch.setattr(writer, "apply", apply)
        rig = await TierRig(tmp_path).open()
        rig.tier.flush([rig.namespace(block_bytes=60 << 10)], b"", lambda blocks, durable: answers.append(durable))
        await rig.work()
        assert True not in answers
        full = False
        await rig.until(lambda: not rig.shelves[0].catalog.pending)
        await rig.crash()
        await one_life(tmp_path, key, chain, 0, 0)

    play(scenario)


async def one_life(root: Path, key: Path | None, chain: bytes, wanted: int, dropped: int) -> None:
    """How many blocks of earlier lives a new life finds; then it stores `chain`."""
    rig = await TierRig(root, nvme_key=key).open()
    space = rig.namespace(block_bytes=60 << 10)  # with room for the tag: slots are of one size with and without
    [directory] = rig.tier.stats()["directories"]
    assert directory["other_key_rows"] == dropped
    assert await rig.load(space, chain) == wanted
    assert (rig.tier.stats()["bad_blocks"], rig.tier.stats()["failed_reads"]) == (0, 0)
    rig.store(space, chain)
    await rig.settled()
    [directory] = rig.tier.stats()["directories"]
    assert directory["checksum_failures"] == directory["other_key_blocks"] == 0
    assert directory["blocks"] == len(chain) // 16
    rig.check()
    await rig.close()


def test_what_another_key_has_written_is_dropped_and_counts_as_no_fault_of_the_disk(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")

    async def scenario() -> None:
        chain, first, second = chain_of("a", 8), key_file(tmp_path / "1", "a"), key_file(tmp_path / "2", "b")
        for key, wanted, dropped in ((first, 0, 0), (first, 8, 0), (second, 0, 8), (None, 0, 8), (first, 0, 8)):
            await one_life(tmp_path, key, chain, wanted, dropped)
        with closing(sqlite3.connect(tmp_path / "nvme0" / "index.db", isolation_level=None)) as db:
            db.execute("DELETE FROM meta WHERE key LIKE 'key_%'")  # it is not known which key they are of
        await one_life(tmp_path, first, chain, 0, 8)
        with closing(sqlite3.connect(tmp_path / "nvme0" / "index.db", isolation_level=None)) as db:
            db.execute("UPDATE meta SET value = ? WHERE key = 'key_id'", (load_cipher(second).key_id,))
            # A wrong note: the blocks are of the first key.
        rig = await TierRig(tmp_path, nvme_key=second).open()
        assert await rig.load(rig.namespace(block_bytes=60 << 10), chain) == 0
        stats = rig.tier.stats()
        assert (stats["bad_blocks"], stats["failed_reads"]) == (0, 0)
        [directory] = stats["directories"]
        assert directory["checksum_failures"] == 0 < directory["other_key_blocks"]
        rig.check()
        await rig.close()

    play(scenario)
