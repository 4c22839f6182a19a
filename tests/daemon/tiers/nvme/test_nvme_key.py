"""A changed nvme_key: blocks stored under another key are dropped at the start, and count as no fault of the disk."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from chains import chain_of
from played import play
from tier_rig import TierRig

pytest.importorskip("cryptography")


def key_file(path: Path, digits: str) -> Path:
    path.write_text(digits * 64 + "\n")
    path.chmod(0o600)
    return path


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


def test_what_another_key_has_written_is_dropped_at_the_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        chain, first, second = chain_of("a", 20), key_file(tmp_path / "1", "a"), key_file(tmp_path / "2", "b")
        await one_life(tmp_path, first, chain, 0, 0)
        await one_life(tmp_path, first, chain, 20, 0)
        await one_life(tmp_path, second, chain, 0, 20)
        await one_life(tmp_path, second, chain, 20, 0)
        await one_life(tmp_path, None, chain, 0, 20)
        await one_life(tmp_path, None, chain, 20, 0)
        await one_life(tmp_path, second, chain, 0, 20)
        await one_life(tmp_path, second, chain, 20, 0)

    play(scenario)


def test_a_directory_that_did_not_note_its_key_is_tried_and_its_blocks_are_counted_apart(tmp_path: Path) -> None:
    async def scenario() -> None:
        chain, first, second = chain_of("a", 8), key_file(tmp_path / "1", "a"), key_file(tmp_path / "2", "b")
        await one_life(tmp_path, first, chain, 0, 0)
        with closing(sqlite3.connect(tmp_path / "nvme0" / "index.db", isolation_level=None)) as db:
            db.execute("DELETE FROM meta WHERE key LIKE 'key_%'")
        await one_life(tmp_path, first, chain, 8, 0)
        with closing(sqlite3.connect(tmp_path / "nvme0" / "index.db", isolation_level=None)) as db:
            db.execute("DELETE FROM meta WHERE key LIKE 'key_%'")
        rig = await TierRig(tmp_path, nvme_key=second).open()
        space = rig.namespace(block_bytes=60 << 10)
        answers: list[list[str]] = []
        assert rig.tier.scan(-1, 0, lambda: True, lambda findings, blocks: answers.append(findings))
        await rig.until(lambda: bool(answers))
        assert answers == [[]], "no fault of the disk"
        [directory] = rig.tier.stats()["directories"]
        # A block that goes takes those behind it in its chain along, also before they have been read.
        assert 1 <= directory["other_key_blocks"] <= 8
        assert directory["checksum_failures"] == 0
        await rig.until(lambda: rig.tier.stats()["blocks"] == 0)
        assert await rig.load(space, chain) == 0
        rig.check()
        await rig.close()

    play(scenario)


def test_a_block_of_another_key_that_is_asked_for_is_a_miss(tmp_path: Path) -> None:
    async def scenario() -> None:
        chain, first, second = chain_of("a", 8), key_file(tmp_path / "1", "a"), key_file(tmp_path / "2", "b")
        await one_life(tmp_path, first, chain, 0, 0)
        with closing(sqlite3.connect(tmp_path / "nvme0" / "index.db", isolation_level=None)) as db:
            db.execute("DELETE FROM meta WHERE key LIKE 'key_%'")
        rig = await TierRig(tmp_path, nvme_key=second).open()
        space = rig.namespace(block_bytes=60 << 10)
        assert await rig.load(space, chain) == 0
        stats = rig.tier.stats()
        assert (stats["bad_blocks"], stats["failed_reads"]) == (0, 0)
        assert stats["directories"][0]["other_key_blocks"] > 0
        rig.check()
        await rig.close()

    play(scenario)
