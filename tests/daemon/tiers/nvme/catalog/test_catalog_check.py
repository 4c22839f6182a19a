"""The durable index of a closed directory: reading it changes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

from catalog_bench import WAIT_S, Bench, row

from tiercache.daemon.tiers.nvme.catalog.catalog_check import check_database, check_rows, read_state


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
