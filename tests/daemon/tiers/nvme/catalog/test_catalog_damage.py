"""The durable index, damaged: no row that was never written, no exception, and unreadable databases set aside."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from catalog_bench import WAIT_S, Answers, Bench, row

from tiercache.daemon.tiers.nvme.catalog import database
from tiercache.daemon.tiers.nvme.catalog import rows as loading
from tiercache.daemon.tiers.nvme.catalog.catalog import CatalogState
from tiercache.daemon.tiers.nvme.catalog.catalog_check import check_rows
from tiercache.daemon.tiers.nvme.catalog.rows import RECORD_BYTES, Row, pack_row, place_of
from tiercache.errors import ConfigError


def test_a_row_with_any_flipped_bit_is_refused_and_deleted(bench: Bench) -> None:
    good = {number: row(number) for number in range(0, 8 * RECORD_BYTES * 2, 2)}
    bench.filled(good)
    db = sqlite3.connect(bench.path)
    with db:
        for bit in range(8 * RECORD_BYTES):
            record = bytearray(pack_row(2 * bit + 1, row(bit)))
            record[bit // 8] ^= 1 << bit % 8
            db.execute("INSERT INTO blocks VALUES(?, ?)", (2 * bit + 1, bytes(record)))
    db.close()
    catalog, _ = bench.open()
    assert bench.rows(catalog) == good
    assert catalog._loading is not None
    assert catalog._loading.damaged == 8 * RECORD_BYTES
    assert catalog.close(WAIT_S)
    assert dict(check_rows(bench.directory)) == good


def test_a_newer_schema_stops_the_start_and_is_not_touched(bench: Bench) -> None:
    bench.filled({1: row(1)})
    bench.change("UPDATE meta SET value = 2 WHERE key = 'schema'")
    before = bench.path.read_bytes()
    with pytest.raises(ConfigError, match="of schema 2, this tiercache knows up to 1: upgrade tiercache"):
        bench.open()
    assert bench.path.read_bytes() == before
    assert bench.set_aside() == []


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE meta SET value = 0 WHERE key = 'schema'",
        "UPDATE meta SET value = 'x' WHERE key = 'schema'",
        "DELETE FROM meta",
        "UPDATE meta SET value = x'00' WHERE key = 'directory_id'",
        "UPDATE meta SET value = NULL WHERE key = 'sequence'",
        "DROP TABLE meta",
        "DROP TABLE blocks",
        "ALTER TABLE blocks ADD COLUMN more",
        "CREATE TABLE more(x)",
        "UPDATE segments SET slot_bytes = slot_bytes + 1",
        "UPDATE namespaces SET epoch = epoch - 1",
        "UPDATE namespaces SET spec = CAST(spec AS TEXT)",
        "UPDATE namespaces SET fingerprint = x'ff'",
        "UPDATE tombstones SET key = NULL",
    ],
)
def test_what_cannot_be_believed_is_set_aside(bench: Bench, statement: str) -> None:
    catalog, _ = bench.open()
    catalog.add_namespace(1, "aa", b"spec", epoch=3)
    catalog.set_segment(1, 4096)
    catalog.add_tombstone(1, b"k" * 16, 2)
    catalog.insert([1], [row(1)])
    assert catalog.close(WAIT_S)
    bench.change(statement)
    before = bench.path.read_bytes()
    catalog, state = bench.open()
    assert state == CatalogState(True, [], {}, [], 1)
    assert [path.read_bytes() for path in bench.set_aside()] == [before]
    catalog.insert([2], [row(2)])
    assert catalog.close(WAIT_S)
    assert bench.reopened() == {2: row(2)}


def test_killed_while_setting_aside(bench: Bench) -> None:
    """Killed after the log is renamed and before the database is: the rest looks whole and lacks its last changes."""
    catalog, _ = bench.open()
    catalog.insert([1], [row(1)])
    assert catalog.sync(WAIT_S)
    left = bench.path.read_bytes()
    assert catalog.close(WAIT_S)
    bench.path.write_bytes(left)
    database.marker_of(bench.path).touch()
    assert bench.open()[1].fresh
    assert [path.read_bytes() for path in bench.set_aside()] == [left]
    assert not database.marker_of(bench.path).exists()


def survives(bench: Bench, written: dict[int, Row]) -> tuple[CatalogState, dict[int, Row]]:
    """Open what is there, load it, write to it, twice: never an exception, never a row that was not written."""
    catalog, first = bench.open()
    found = bench.rows(catalog)
    assert found.items() <= written.items()
    answers = Answers()
    catalog.insert([place_of(1000, 0)], [row(99)], answers(0))
    bench.loop.until(lambda: answers.got)
    catalog.close(WAIT_S)
    assert bench.reopened().items() <= {**written, place_of(1000, 0): row(99)}.items()
    return first, found


def flipped(whole: bytes, seed: int) -> Iterator[bytes]:
    """Some bits are: anywhere, or in the header."""
    rng = random.Random(seed)
    for number in range(40):
        spoiled = bytearray(whole)
        for _ in range(rng.choice((1, 5, 50))):
            spoiled[rng.randrange(100 if number % 2 else len(whole))] ^= 1 << rng.randrange(8)
        yield bytes(spoiled)


def cut(whole: bytes, filler: bytes) -> Iterator[bytes]:
    """Without its end, or with zeros there."""
    for length in [0, 1, 99, 100, 511, *range(1024, len(whole), 4096 + 512)]:
        yield whole[:length] + filler * (len(whole) - length)


@pytest.mark.parametrize(
    "spoil",
    [partial(flipped, seed=0), partial(flipped, seed=1), partial(cut, filler=b""), partial(cut, filler=b"\0")],
    ids=["flipped", "flipped again", "cut", "zeros"],
)
def test_a_damaged_database(bench: Bench, spoil: Callable[[bytes], Iterator[bytes]]) -> None:
    rows = {place_of(number % 5, number): row(number) for number in range(600)}
    bench.filled(rows)
    for spoiled in spoil(bench.path.read_bytes()):
        bench.path.write_bytes(spoiled)
        survives(bench, rows)
        bench.clear()


def test_a_row_that_a_damaged_database_gives_twice_is_loaded_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot would get two owners."""
    written = {number: row(number) for number in range(120)}
    bench.filled(written)
    read_page = loading.read_page

    def again(db: sqlite3.Connection, after: int, limit: int) -> list[tuple[int, bytes]]:
        page = read_page(db, after, limit)
        return [*page[:7], *page[3:9], *page[9:], *read_page(db, after - 20, 10), *page[-1:]][:limit] if page else page

    monkeypatch.setattr(loading, "read_page", again)
    catalog, _ = bench.open()
    assert bench.rows(catalog) == written
    catalog.close(WAIT_S)


def test_a_damaged_log(bench: Bench) -> None:
    """A log that is cut, filled with zeros, or garbled: the changes in its good part hold."""
    rows = {number: row(number) for number in range(400)}
    catalog, _ = bench.open()
    for number, its in rows.items():
        catalog.insert([number], [its])
        if number % 40 == 0:
            assert catalog.sync(WAIT_S)
    assert catalog.sync(WAIT_S)
    database, journal = bench.path.read_bytes(), Path(f"{bench.path}-wal").read_bytes()
    assert catalog.close(WAIT_S)
    assert len(journal) > 40_000
    rng = random.Random(1)
    for length in [0, 1, 31, 32, *range(4096, len(journal), 8000), len(journal)]:
        for tail in (b"", bytes(len(journal) - length), rng.randbytes(len(journal) - length)):
            bench.path.write_bytes(database)
            Path(f"{bench.path}-wal").write_bytes(journal[:length] + tail)
            found = survives(bench, rows)[1]
            assert list(found) == list(range(len(found)))  # an earlier state, and no mixture
            assert found == rows if length == len(journal) else len(found) < 400
            bench.clear()


def leaves(path: Path) -> list[int]:
    """Page numbers of the leaves of the table of rows: interior and other pages have another first byte."""
    whole = path.read_bytes()
    return [
        at
        for at in range(4096, len(whole), 4096)
        if whole[at] == 13 and int.from_bytes(whole[at + 3 : at + 5], "big") > 20
    ]


def test_a_place_with_a_flipped_bit_hides_no_other(bench: Bench) -> None:
    """A scan that trusts such a place ends there, or starts over for ever."""
    rows = {place_of(3, slot): row(slot) for slot in range(40, 300)}
    bench.filled(rows)
    whole = bench.path.read_bytes()
    leaf = leaves(bench.path)[2]
    tried = 0
    for cell in (0, 7, 20):
        at = leaf + int.from_bytes(whole[leaf + 8 + 2 * cell : leaf + 10 + 2 * cell], "big")
        assert whole[at] < 128  # the payload's length is one byte; the place follows as a varint
        # of four bytes with 7 bits each; the top bits only say that it goes on.
        for bit in (bit for bit in range(8, 40) if bit % 8 != 7):
            flipped = bytearray(whole)
            flipped[at + bit // 8] ^= 1 << bit % 8
            bench.path.write_bytes(flipped)
            catalog, state = bench.open()
            assert not state.fresh
            found = bench.rows(catalog)
            assert found.items() < rows.items()
            assert len(found) == len(rows) - 1, (cell, bit)
            tried += 1
            catalog.close(WAIT_S)
            bench.clear()
    assert tried == 84
