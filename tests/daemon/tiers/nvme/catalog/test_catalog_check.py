"""The durable index of a closed directory: reading it changes nothing."""

from __future__ import annotations

import shutil
import sqlite3
import struct
from pathlib import Path

import pytest
from catalog_bench import WAIT_S, Bench, row

from tiercache.daemon.tiers.nvme.catalog.catalog_check import check_database, check_rows, read_state
from tiercache.daemon.tiers.nvme.catalog.rows import unpack_row
from tiercache.errors import CatalogUnavailable


def test_reading_off_line_changes_nothing(bench: Bench) -> None:
    rows = {number: row(number) for number in range(1000)}
    bench.filled(rows)
    before = bench.path.read_bytes()
    assert dict(check_rows(bench.directory, page_rows=7)) == rows
    assert check_database(bench.directory) == []
    assert read_state(bench.directory).next_sequence == 1000
    assert bench.path.read_bytes() == before


def test_reading_off_line_after_a_kill_sees_the_log(bench: Bench, tmp_path: Path) -> None:
    catalog, _ = bench.open()
    catalog.insert(1, row(1))
    assert catalog.sync(WAIT_S)
    other = tmp_path / "other"
    other.mkdir()
    for end in ("", "-wal"):
        shutil.copy(f"{bench.path}{end}", other)
    assert list(check_rows(other)) == [(1, row(1))]


@pytest.mark.parametrize("content", [None, b"garbage" * 1000])
def test_off_line_without_a_database(bench: Bench, content: bytes | None) -> None:
    if content is not None:
        bench.path.write_bytes(content)
    with pytest.raises(CatalogUnavailable, match="cannot be read"):
        read_state(bench.directory)
    with pytest.raises(CatalogUnavailable, match="cannot be read"):
        list(check_rows(bench.directory))
    assert len(check_database(bench.directory)) == 1


def test_records_are_what_the_file_holds(bench: Bench) -> None:
    bench.filled({7: row(7)})
    db = sqlite3.connect(bench.path)
    ((place, record),) = db.execute("SELECT place, record FROM blocks").fetchall()
    db.close()
    assert unpack_row(place, record) == row(7)
    assert struct.unpack_from("<Q", record, 60) == (7,)
