"""The durable index: what was acknowledged is there after any death, what is damaged is a miss, nothing raises."""

from __future__ import annotations

import asyncio
import os
import queue
import random
import select
import shutil
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tiercache.daemon.nvme import catalog as catalog_module
from tiercache.daemon.nvme.catalog import (
    NAME,
    Catalog,
    CatalogState,
    CatalogUnavailable,
    SavedNamespace,
    Tombstone,
    check_database,
    check_rows,
    read_state,
)
from tiercache.daemon.nvme.rows import RECORD_BYTES, WAITING_BATCHES, Row, pack_row, place_of, unpack_row
from tiercache.errors import ConfigError

ID = b"directory number"
WAIT_S = 20.0
CHILD = Path(__file__).with_name("catalog_child.py")


def row(number: int, **changes: Any) -> Row:
    """A row that is like no other."""
    fields = {
        "key": number.to_bytes(16, "big"), "parent": bytes(16), "namespace": 1, "epoch": 1, "length": 4096,
        "stored_length": 4096, "codec": 0, "kind": 0, "checksum": number * 0x9E3779B97F4A7C15 % 2**64,
        "sequence": number,
    }  # fmt: skip
    return Row(**{**fields, **changes})


class Loop:
    """Takes the loop's place: what is posted runs when the test says."""

    def __init__(self) -> None:
        self._posted: queue.SimpleQueue[tuple[Callable[..., None], tuple[object, ...]]] = queue.SimpleQueue()

    def post(self, callback: Callable[..., None], *args: object) -> None:
        self._posted.put((callback, args))

    def until(self, condition: Callable[[], object]) -> None:
        """Run what is posted until the condition holds."""
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, "nothing happens any more"
            try:
                callback, args = self._posted.get(timeout=0.01)
            except queue.Empty:
                continue
            callback(*args)


class Bench:
    """Makes catalogs in one directory and closes them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / NAME
        self.loop = Loop()
        self._open: list[Catalog] = []

    def open(self) -> tuple[Catalog, CatalogState]:
        catalog = Catalog(self.directory, ID, self.loop.post)
        self._open.append(catalog)
        return catalog, catalog.open()

    def filled(self, rows: dict[int, Row]) -> None:
        """A closed database with these rows in it."""
        catalog, _ = self.open()
        for place, its in rows.items():
            catalog.insert(place, its)
        assert catalog.close(WAIT_S)

    def rows(self, catalog: Catalog) -> dict[int, Row]:
        """All that a catalog loads."""
        loading = catalog.load(lambda: None, batch_rows=50)
        found: dict[int, Row] = {}

        def take() -> bool:
            batch = loading.next_batch()
            found.update(batch or [])
            return loading.finished

        self.loop.until(take)
        assert loading.rows == len(found)
        return found

    def reopened(self) -> dict[int, Row]:
        """The rows of a closed database."""
        catalog, _ = self.open()
        found = self.rows(catalog)
        catalog.close(WAIT_S)
        return found

    def change(self, statement: str, *values: object) -> None:
        """Somebody else's hand in the closed database."""
        db = sqlite3.connect(self.path)
        with db:
            db.execute(statement, values)
        db.close()

    def set_aside(self) -> list[Path]:
        """Databases that were renamed, without their logs."""
        return [path for path in self.directory.glob(f"{NAME}.damaged-*") if not path.name.endswith(("-wal", "-shm"))]

    def close(self) -> None:
        for catalog in self._open:
            catalog.close(WAIT_S)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


class Answers:
    """Remembers what came back, in order."""

    def __init__(self) -> None:
        self.got: list[tuple[object, bool]] = []

    def __call__(self, name: object) -> Callable[[bool], None]:
        return lambda ok: self.got.append((name, ok))


# --- what is kept -----------------------------------------------------------------------------------


def test_a_new_database_is_empty_and_a_second_start_finds_it(bench: Bench) -> None:
    catalog, state = bench.open()
    assert state == CatalogState(True, [], {}, [], 1)
    assert catalog.error == ""
    assert catalog.close(WAIT_S)
    assert bench.open()[1] == CatalogState(False, [], {}, [], 1)


def test_small_tables_come_back(bench: Bench) -> None:
    catalog, _ = bench.open()
    catalog.add_namespace(1, "aa", b"\x81\x00")
    catalog.add_namespace(2, "bb", b"", epoch=7)
    catalog.raise_epoch(1, 5)
    catalog.raise_epoch(1, 3)
    catalog.add_namespace(1, "aa", b"\x82", epoch=4)
    catalog.set_segment(3, 4096)
    catalog.set_segment(4, 8192)
    catalog.set_segment(3, 2 << 20)
    catalog.drop_segment(4)
    catalog.add_tombstone(2, b"k" * 16, 9)
    catalog.add_tombstone(2, b"k" * 16, 10)
    catalog.add_tombstone(1, b"k" * 16, 9)
    catalog.remove_tombstone(1, b"k" * 16)
    catalog.insert(5, row(41))
    assert catalog.close(WAIT_S)
    wanted = CatalogState(
        fresh=False,
        namespaces=[SavedNamespace(1, "aa", b"\x82", 5), SavedNamespace(2, "bb", b"", 7)],
        segments={3: 2 << 20},
        tombstones=[Tombstone(2, b"k" * 16, 10)],
        next_sequence=42,
    )
    assert read_state(bench.directory) == wanted
    assert bench.open()[1] == wanted


def test_a_fingerprint_has_one_number(bench: Bench) -> None:
    catalog, _ = bench.open()
    catalog.add_namespace(1, "aa", b"x")
    catalog.add_namespace(2, "aa", b"x")
    assert catalog.close(WAIT_S)
    assert bench.open()[1].namespaces == [SavedNamespace(2, "aa", b"x", 0)]


def test_rows_come_back_in_order_of_place(bench: Bench) -> None:
    rows = {place_of(number % 3, number): row(number) for number in range(1, 400)}
    bench.filled(rows)
    found = bench.reopened()
    assert list(found.items()) == sorted(rows.items())


def test_the_last_change_of_a_place_counts(bench: Bench) -> None:
    catalog, _ = bench.open()
    for place in range(300):  # more than one statement holds
        catalog.insert(place, row(1000 + place))
        catalog.delete(place)
        if place % 2:
            catalog.insert(place, row(2000 + place))
    catalog.insert(1, row(9))
    catalog.delete(3)
    assert catalog.close(WAIT_S)
    assert bench.reopened() == {1: row(9)} | {place: row(2000 + place) for place in range(5, 300, 2)}


def test_dropping_a_segment_takes_its_rows_and_no_others(bench: Bench) -> None:
    catalog, _ = bench.open()
    places = [place_of(segment, slot) for segment in (1, 2, 3) for slot in (0, 1, 2**24 - 1)]
    for place in places:
        catalog.insert(place, row(place))
    catalog.set_segment(2, 4096)
    catalog.drop_segment(2)
    catalog.insert(place_of(2, 5), row(5))
    assert catalog.close(WAIT_S)
    assert list(bench.reopened()) == [*places[:3], place_of(2, 5), *places[6:]]


def test_answers_come_on_the_loop_in_order(bench: Bench) -> None:
    catalog, _ = bench.open()
    answers = Answers()
    for number in range(3000):
        change = number % 3
        if change == 0:
            catalog.insert(number, row(number), answers(number))
        elif change == 1:
            catalog.delete(number - 1, answers(number))
        else:
            catalog.set_segment(number % 5, 4096, answers(number))
    assert catalog.sync(WAIT_S)
    assert answers.got == []  # nothing ran beside the loop
    bench.loop.until(lambda: len(answers.got) == 3000)
    assert answers.got == [(number, True) for number in range(3000)]
    assert catalog.pending == 0
    assert catalog.commits <= 10  # and not one each


def test_an_answer_that_raises_stops_no_other(bench: Bench) -> None:
    catalog, _ = bench.open()
    answers = Answers()

    def bad(ok: bool) -> None:
        raise ValueError

    catalog.delete(1, bad)
    catalog.delete(2, answers(2))
    with pytest.raises(ValueError):
        bench.loop.until(lambda: answers.got)
    bench.loop.until(lambda: answers.got == [(2, True)])


def test_on_a_real_loop(bench: Bench) -> None:
    async def run() -> list[bool]:
        loop = asyncio.get_running_loop()
        catalog = Catalog(bench.directory, ID, loop.call_soon_threadsafe)
        catalog.open()
        answered: asyncio.Future[bool] = loop.create_future()
        catalog.insert(1, row(1), answered.set_result)
        first = await asyncio.wait_for(answered, WAIT_S)
        catalog.delete(1)
        closed = await loop.run_in_executor(None, catalog.close, WAIT_S)
        return [first, closed]

    assert asyncio.run(run()) == [True, True]
    assert bench.reopened() == {}


def test_a_closed_loop_is_not_told(bench: Bench) -> None:
    def post(callback: Callable[..., None], *args: object) -> None:
        raise RuntimeError("Event loop is closed")

    catalog = Catalog(bench.directory, ID, post)
    catalog.open()
    catalog.insert(1, row(1), lambda ok: None)
    assert catalog.close(WAIT_S)
    assert catalog.close(WAIT_S)
    assert bench.reopened() == {1: row(1)}


def test_a_sync_reaches_the_database_while_it_is_open(bench: Bench) -> None:
    catalog, _ = bench.open()
    catalog.insert(1, row(1))
    assert catalog.sync(WAIT_S)
    assert list(check_rows(bench.directory)) == [(1, row(1))]
    sizes = sum(path.stat().st_size for path in bench.directory.iterdir())
    assert catalog.bytes_on_disk() == sizes > 0


def test_closing_gives_the_log_back(bench: Bench) -> None:
    bench.filled({number: row(number) for number in range(5000)})
    assert [path.name for path in bench.directory.iterdir()] == [NAME]


def test_a_log_that_grew_is_given_back_when_idle(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "IDLE_S", 0.02)
    monkeypatch.setattr(catalog_module, "TRUNCATE_WAL_BYTES", 1 << 20)
    journal = Path(f"{bench.path}-wal")
    catalog, _ = bench.open()
    reader = sqlite3.connect(bench.path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM blocks").fetchone()  # from here on nothing can leave the log
    for number in range(20_000):
        catalog.insert(number, row(number))
    assert catalog.sync(WAIT_S)
    assert catalog.bytes_on_disk() > journal.stat().st_size > 1 << 20
    reader.close()
    bench.loop.until(lambda: journal.stat().st_size == 0)
    bench.loop.until(lambda: catalog.bytes_on_disk() < 3 << 20)
    assert catalog.error == ""


# --- loading ----------------------------------------------------------------------------------------


def test_loading_waits_for_the_loop(bench: Bench) -> None:
    rows = {number: row(number) for number in range(1000)}
    bench.filled(rows)
    catalog, _ = bench.open()
    loading = catalog.load(lambda: None, batch_rows=10)
    taken: list[tuple[int, Row]] = []
    while not loading.finished:
        bench.loop.until(lambda: loading._ready or loading.finished)
        # One more may be on its way in when one was taken.
        assert loading.rows - len(taken) <= 10 * (WAITING_BATCHES + 1)
        taken += loading.next_batch() or []
    assert taken == list(rows.items())
    assert loading.next_batch() is None
    assert loading.error == ""


def test_what_is_inserted_meanwhile_is_not_shown(bench: Bench) -> None:
    bench.filled({place_of(1, slot): row(slot) for slot in range(100)})
    catalog, _ = bench.open()
    catalog.insert(place_of(2, 0), row(500))
    assert catalog.sync(WAIT_S)
    assert list(bench.rows(catalog)) == [place_of(1, slot) for slot in range(100)]


def test_nothing_to_load(bench: Bench) -> None:
    catalog, _ = bench.open()
    assert bench.rows(catalog) == {}


def test_loading_can_be_cancelled_by_close(bench: Bench) -> None:
    bench.filled({number: row(number) for number in range(1000)})
    catalog, _ = bench.open()
    loading = catalog.load(lambda: None, batch_rows=10)
    bench.loop.until(lambda: loading._ready)
    assert catalog.close(WAIT_S)
    assert loading.finished
    assert loading.next_batch() is None


def test_the_log_does_not_grow_while_rows_load(bench: Bench) -> None:
    bench.filled({number: row(number) for number in range(2000)})
    catalog, _ = bench.open()
    loading = catalog.load(lambda: None, batch_rows=10)
    for start in range(0, 60_000, 2000):
        for number in range(start, start + 2000):
            catalog.insert(place_of(9, number), row(number))
        assert catalog.sync(WAIT_S)
        loading.next_batch()
    assert not loading.finished  # it was at it all the time
    assert Path(f"{bench.path}-wal").stat().st_size < 10 << 20  # 60,000 rows are twice as much at least


# --- damage -----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("record", [None, 5, "text", b"", b"short", bytes(RECORD_BYTES), 1.5])
def test_what_is_no_record_is_deleted(bench: Bench, record: object) -> None:
    bench.filled({1: row(1), 3: row(3)})
    bench.change("INSERT INTO blocks VALUES(2, ?)", record)
    assert bench.reopened() == {1: row(1), 3: row(3)}
    assert [place for place, _ in check_rows(bench.directory)] == [1, 3]


def test_a_row_at_another_place_is_refused(bench: Bench) -> None:
    bench.filled({1: row(1), 2: row(2)})
    bench.change("INSERT OR REPLACE INTO blocks SELECT 2, record FROM blocks WHERE place = 1")
    assert list(check_rows(bench.directory)) == [(1, row(1)), (2, None)]
    assert bench.reopened() == {1: row(1)}


def test_a_damaged_row_that_was_replaced_meanwhile_stays_replaced(bench: Bench) -> None:
    bench.filled({1: row(1)})
    bench.change("UPDATE blocks SET record = ? WHERE place = 1", bytes(RECORD_BYTES))
    catalog, _ = bench.open()
    catalog.insert(1, row(7))
    assert catalog.sync(WAIT_S)
    catalog._scrub(1, bytes(RECORD_BYTES))
    assert catalog.close(WAIT_S)
    assert bench.reopened() == {1: row(7)}


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
    catalog.insert(1, row(1))
    assert catalog.close(WAIT_S)
    bench.change(statement)
    before = bench.path.read_bytes()
    catalog, state = bench.open()
    assert state == CatalogState(True, [], {}, [], 1)
    assert [path.read_bytes() for path in bench.set_aside()] == [before]
    catalog.insert(2, row(2))
    assert catalog.close(WAIT_S)
    assert bench.reopened() == {2: row(2)}


def test_one_database_at_most_is_kept_aside(bench: Bench) -> None:
    for content in (b"first", b"second"):
        bench.path.write_bytes(content * 1000)
        Path(f"{bench.path}-wal").write_bytes(b"log")  # not played into the new one
        catalog, state = bench.open()
        assert state.fresh
        assert catalog.close(WAIT_S)
        assert [path.read_bytes() for path in bench.set_aside()] == [content * 1000]
    assert len(list(bench.directory.iterdir())) == 3  # the new one, the second, its log


def test_killed_while_setting_aside(bench: Bench) -> None:
    """The log is renamed, the database not yet: what is left looks whole and lacks its last changes."""
    catalog, _ = bench.open()
    catalog.insert(1, row(1))
    assert catalog.sync(WAIT_S)
    left = bench.path.read_bytes()
    assert catalog.close(WAIT_S)
    bench.path.write_bytes(left)
    catalog_module._marker(bench.path).touch()
    assert bench.open()[1].fresh
    assert [path.read_bytes() for path in bench.set_aside()] == [left]
    assert not catalog_module._marker(bench.path).exists()


@pytest.mark.parametrize("content", [b"", b"\0" * 8192, b"garbage" * 3000, b"SQLite format 3\0"])
def test_a_file_that_is_no_database(bench: Bench, content: bytes) -> None:
    bench.path.write_bytes(content)
    assert bench.open()[1].fresh
    assert len(bench.set_aside()) == (1 if content else 0)


def survives(bench: Bench, written: dict[int, Row]) -> tuple[CatalogState, dict[int, Row]]:
    """Open what is there, load it, write to it, twice: never an exception, never a row that was not written."""
    catalog, first = bench.open()
    found = bench.rows(catalog)
    assert found.items() <= written.items()
    answers = Answers()
    catalog.insert(place_of(1000, 0), row(99), answers(0))
    bench.loop.until(lambda: answers.got)
    catalog.close(WAIT_S)
    assert bench.reopened().items() <= {**written, place_of(1000, 0): row(99)}.items()
    return first, found


@pytest.mark.parametrize(
    "every_bit", [lambda bits: range(0, bits, 7), pytest.param(range, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_every_bit_of_the_header(bench: Bench, every_bit: Callable[[int], range]) -> None:
    rows = {number: row(number) for number in range(50)}
    bench.filled(rows)
    whole = bench.path.read_bytes()
    lost = 0
    for bit in every_bit(800):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        bench.path.write_bytes(flipped)
        catalog, state = bench.open()
        assert bench.rows(catalog) == ({} if state.fresh else rows), bit
        lost += state.fresh
        catalog.close(WAIT_S)
        bench.path.unlink()
    assert 0 < lost < 800


def test_a_truncated_database(bench: Bench) -> None:
    rows = {number: row(number) for number in range(500)}
    bench.filled(rows)
    whole = bench.path.read_bytes()
    for length in [1, 99, 100, 511, *range(1024, len(whole), 4096 + 512)]:
        bench.path.write_bytes(whole[:length])
        survives(bench, rows)
        bench.path.unlink()


def test_a_tail_of_zeros(bench: Bench) -> None:
    rows = {number: row(number) for number in range(500)}
    bench.filled(rows)
    whole = bench.path.read_bytes()
    for length in range(0, len(whole), 4096):
        bench.path.write_bytes(whole[:length].ljust(len(whole), b"\0"))
        survives(bench, rows)
        bench.path.unlink()
    bench.path.write_bytes(whole + bytes(16384))
    assert survives(bench, rows)[1] == rows


@pytest.mark.parametrize("seed", range(4))
def test_bits_flipped_anywhere(bench: Bench, seed: int) -> None:
    rows = {place_of(number % 5, number): row(number) for number in range(600)}
    bench.filled(rows)
    whole = bench.path.read_bytes()
    rng = random.Random(seed)
    for _ in range(25):
        flipped = bytearray(whole)
        for _ in range(rng.choice((1, 5, 50))):
            flipped[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        bench.path.write_bytes(flipped)
        survives(bench, rows)
        for path in bench.directory.iterdir():
            path.unlink()


def test_a_damaged_log(bench: Bench) -> None:
    """Cut, filled with zeros, or garbled: what its good part says holds."""
    rows = {number: row(number) for number in range(400)}
    catalog, _ = bench.open()
    for number, its in rows.items():
        catalog.insert(number, its)
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
            for path in bench.directory.iterdir():
                path.unlink()


def leaves(path: Path) -> list[int]:
    """Page numbers of the leaves of the table of rows: interior and other pages have another first byte."""
    whole = path.read_bytes()
    return [
        at for at in range(4096, len(whole), 4096)
        if whole[at] == 13 and int.from_bytes(whole[at + 3 : at + 5], "big") > 20
    ]  # fmt: skip


def test_a_torn_page_hides_its_own_rows_only(bench: Bench) -> None:
    rows = {place_of(segment, slot): row(segment * 100 + slot) for segment in range(8) for slot in range(90)}
    bench.filled(rows)
    torn = leaves(bench.path)[3]
    with bench.path.open("r+b") as file:
        file.seek(torn)
        file.write(b"\xff" * 4096)
    catalog, state = bench.open()
    assert not state.fresh
    found = bench.rows(catalog)
    assert found.items() < rows.items()
    assert len(found) >= len(rows) - 60  # the page's 45 rows are the last of a segment and the first of the next
    assert catalog._loading is not None
    assert catalog._loading.error
    catalog.close(WAIT_S)
    assert check_database(bench.directory)
    assert bench.open()[1].fresh  # the next start does not go on with it
    assert len(bench.set_aside()) == 1


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
            for path in bench.directory.iterdir():
                path.unlink()
    assert tried == 84


def test_damage_found_while_writing(bench: Bench) -> None:
    bench.filled({number: row(number) for number in range(2000)})
    with bench.path.open("r+b") as file:
        for leaf in leaves(bench.path)[:-1]:
            file.seek(leaf)
            file.write(b"\xff" * 4096)
    catalog, state = bench.open()
    assert not state.fresh
    answers = Answers()
    catalog.delete(5, answers(5))
    bench.loop.until(lambda: answers.got)
    assert answers.got == [(5, False)]
    assert "malformed" in catalog.error
    catalog.close(WAIT_S)
    assert bench.open()[1].fresh


# --- nothing can be written -------------------------------------------------------------------------


class Lock:
    """Another program that holds the database."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("BEGIN IMMEDIATE")

    def release(self) -> None:
        self._db.execute("ROLLBACK")
        self._db.close()


def test_rows_are_refused_and_the_rest_is_kept(bench: Bench) -> None:
    catalog, _ = bench.open()
    answers = Answers()
    lock = Lock(bench.path)
    catalog.insert(1, row(1), answers("insert"))
    catalog.add_namespace(1, "aa", b"x", done=answers("namespace"))
    catalog.raise_epoch(1, 4, answers("epoch"))
    catalog.raise_epoch(1, 2, answers("lower epoch"))
    catalog.set_segment(1, 4096, answers("segment"))
    catalog.drop_segment(1, answers("drop"))
    catalog.set_segment(1, 8192, answers("again"))
    catalog.add_tombstone(1, b"k" * 16, 9, answers("tombstone"))
    catalog.delete(2, answers("delete"))
    bench.loop.until(lambda: len(answers.got) == 9)
    assert {ok for _, ok in answers.got} == {False}
    assert catalog.error == "database is locked"
    assert catalog.failures >= 1
    assert catalog.pending == 6  # the segment is in it once
    assert not catalog.sync(WAIT_S)
    lock.release()
    bench.loop.until(lambda: catalog.error == "")
    assert catalog.pending == 0
    catalog.insert(3, row(3), answers("later"))
    bench.loop.until(lambda: answers.got[-1] == ("later", True))
    assert len(answers.got) == 10  # each was answered once
    assert catalog.close(WAIT_S)
    state = read_state(bench.directory)
    assert state.namespaces == [SavedNamespace(1, "aa", b"x", 4)]
    assert state.segments == {1: 8192}
    assert state.tombstones == [Tombstone(1, b"k" * 16, 9)]
    assert bench.reopened() == {3: row(3)}


def test_a_tombstone_stays_when_a_row_could_not_be_deleted(bench: Bench) -> None:
    """The flush it stands for would be undone at the next start."""
    bench.filled({1: row(1)})
    catalog, _ = bench.open()
    answers = Answers()
    catalog.add_tombstone(1, b"a" * 16, 2)
    catalog.add_tombstone(1, b"b" * 16, 2)
    catalog.remove_tombstone(1, b"b" * 16, answers("remove b"))
    bench.loop.until(lambda: answers.got == [("remove b", True)])
    lock = Lock(bench.path)
    catalog.delete(1, answers("delete"))
    catalog.remove_tombstone(1, b"a" * 16, answers("remove"))
    bench.loop.until(lambda: len(answers.got) == 3)
    lock.release()
    bench.loop.until(lambda: not catalog.error)
    catalog.remove_tombstone(1, b"a" * 16, answers("again"))
    catalog.delete(2, answers("other"))
    bench.loop.until(lambda: len(answers.got) == 5)
    assert answers.got[1:] == [("delete", False), ("remove", False), ("again", False), ("other", True)]
    assert catalog.close(WAIT_S)
    catalog, state = bench.open()
    assert state.tombstones == [Tombstone(1, b"a" * 16, 2)]
    assert bench.rows(catalog) == {1: row(1)}
    catalog.delete(1)
    catalog.remove_tombstone(1, b"a" * 16)
    assert catalog.close(WAIT_S)
    assert read_state(bench.directory).tombstones == []


def test_closing_says_what_was_not_written(bench: Bench) -> None:
    catalog, _ = bench.open()
    lock = Lock(bench.path)
    catalog.set_segment(1, 4096)
    assert not catalog.close(WAIT_S)
    lock.release()
    assert bench.open()[1].segments == {}


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, writing hangs as on a disk that does not answer."""
    answers = threading.Event()
    real_apply = catalog_module._apply

    def apply(db: sqlite3.Connection, batch: Any) -> None:
        assert answers.wait(WAIT_S)
        real_apply(db, batch)

    monkeypatch.setattr(catalog_module, "_apply", apply)
    yield answers
    answers.set()


def test_full_while_the_disk_does_not_answer(
    tmp_path: Path, stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_module, "MAX_PENDING", 100)
    stuck.set()
    bench, answers = Bench(tmp_path), Answers()
    catalog, _ = bench.open()
    stuck.clear()
    for number in range(100):
        assert not catalog.full
        catalog.insert(number, row(number), answers(number))
    bench.loop.until(lambda: catalog.full)  # one may be on its way from the queue to the thread
    assert not catalog.sync(0.01)
    stuck.set()
    bench.loop.until(lambda: len(answers.got) == 100)
    assert catalog.sync(WAIT_S)
    assert not catalog.full
    assert catalog.close(WAIT_S)


def test_closing_does_not_wait_for_a_dead_disk(tmp_path: Path, stuck: threading.Event) -> None:
    stuck.set()
    bench = Bench(tmp_path)
    catalog, _ = bench.open()
    stuck.clear()
    catalog.insert(1, row(1))
    assert not catalog.close(0.01)
    stuck.set()
    catalog._thread.join(WAIT_S)
    assert not catalog._thread.is_alive()


def test_opening_does_not_wait_for_a_dead_disk(tmp_path: Path, stuck: threading.Event) -> None:
    bench = Bench(tmp_path)
    with pytest.raises(CatalogUnavailable, match=r"did not open within 0.01 s: check that its disk answers"):
        Catalog(tmp_path, ID, bench.loop.post).open(timeout_s=0.01)
    stuck.set()
    later, state = bench.open()  # another one finds what the first left
    assert state.namespaces == []
    assert later.close(WAIT_S)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Bench]:
    """A bench on a file system of 1 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], capture_output=True, check=False, timeout=30
    )
    if done.returncode != 0:
        pytest.skip("may not mount a file system here")
    bench = Bench(mount)
    try:
        yield bench
    finally:
        bench.close()
        subprocess.run(["umount", str(mount)], check=True, timeout=30)


def fill(directory: Path) -> Path:
    """Take all room that is left."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file:

        def write() -> None:
            while True:
                file.write(bytes(4096))

        with pytest.raises(OSError, match="No space"):
            write()
    return filler


def test_a_full_disk_and_room_again(small_disk: Bench) -> None:
    catalog, _ = small_disk.open()
    answers = Answers()
    catalog.insert(1, row(1), answers(1))
    small_disk.loop.until(lambda: answers.got == [(1, True)])
    filler = fill(small_disk.directory)
    number = 1
    while answers.got[-1] == (number, True):  # the log has some room of its own
        number += 1
        catalog.insert(number, row(number), answers(number))
        small_disk.loop.until(lambda: len(answers.got) == number)  # noqa: B023
    assert catalog.error
    assert dict(check_rows(small_disk.directory)) == {place: row(place) for place in range(1, number)}
    catalog.add_namespace(1, "aa", b"x", done=answers("namespace"))
    catalog.delete(1, answers("delete"))
    small_disk.loop.until(lambda: len(answers.got) == number + 2)
    assert answers.got[-2:] == [("namespace", False), ("delete", False)]
    filler.unlink()
    small_disk.loop.until(lambda: not catalog.error)
    catalog.delete(1, answers("again"))
    small_disk.loop.until(lambda: answers.got[-1] == ("again", True))
    assert catalog.close(WAIT_S)
    assert read_state(small_disk.directory).namespaces == [SavedNamespace(1, "aa", b"x", 0)]
    assert small_disk.reopened() == {place: row(place) for place in range(2, number)}


def test_starting_on_a_full_disk_loses_nothing(small_disk: Bench) -> None:
    rows = {number: row(number) for number in range(100)}
    small_disk.filled(rows)
    filler = fill(small_disk.directory)
    with pytest.raises(CatalogUnavailable, match=r"cannot be opened: .*; see to the disk"):
        small_disk.open()
    filler.unlink()
    assert small_disk.set_aside() == []
    assert small_disk.reopened() == rows


def test_a_read_only_directory_loses_nothing(small_disk: Bench) -> None:
    rows = {number: row(number) for number in range(100)}
    small_disk.filled(rows)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk.directory)], check=True, timeout=30)
    with pytest.raises(CatalogUnavailable, match="see to the disk and its permissions"):
        small_disk.open()
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk.directory)], check=True, timeout=30)
    assert small_disk.reopened() == rows


def test_no_directory(bench: Bench) -> None:
    with pytest.raises(CatalogUnavailable, match="unable to open"):
        Catalog(bench.directory / "none", ID, bench.loop.post).open()


# --- power and kill ---------------------------------------------------------------------------------


FLUSHES = """
import os, sys, threading
from pathlib import Path
from tiercache.daemon.nvme.catalog import Catalog
from tiercache.daemon.nvme.rows import Row

catalog = Catalog(Path(sys.argv[1]), b"directory number", lambda callback, *args: callback(*args))
catalog.open()
catalog.add_namespace(1, "aa", b"x")
catalog.insert(9, Row(b"k" * 16, b"p" * 16, 1, 1, 1, 1, 0, 0, 0, 1))
catalog.sync(20)

def acknowledged(post):
    done = threading.Event()
    post(lambda ok: done.set() if ok else None)
    assert done.wait(20)

for name, post in {
    "insert": lambda done: catalog.insert(8, Row(b"k" * 16, b"p" * 16, 1, 1, 1, 1, 0, 0, 0, 1), done),
    "delete": lambda done: catalog.delete(8, done),
    "epoch": lambda done: catalog.raise_epoch(1, 1, done),
    "tombstone": lambda done: catalog.add_tombstone(1, b"k" * 16, 1, done),
    "sync": lambda done: done(catalog.sync(20)),
}.items():
    os.write(1, f"step {name}\\n".encode())
    acknowledged(post)
os.write(1, b"step end\\n")
catalog.close(20)
"""


def test_a_flush_is_on_the_disk_before_it_is_acknowledged(tmp_path: Path) -> None:
    """And what need not wait for the disk does not. Seen by the system calls of a process of its own."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    done = subprocess.run(
        ["strace", "-f", "-e", "trace=write,fsync,fdatasync", sys.executable, "-c", FLUSHES, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if "ptrace" in done.stderr and done.returncode != 0:
        pytest.skip("may not trace system calls here")
    assert done.returncode == 0, done.stderr
    steps = done.stderr.split('"step ')[1:]
    synced = {step.split("\\n")[0]: "sync(" in step for step in steps[:-1]}
    assert synced == {"insert": False, "delete": False, "epoch": True, "tombstone": True, "sync": True}


def run_and_kill(directory: Path, seed: int, rng: random.Random) -> int:
    """One life of the child; returns how many changes were acknowledged."""
    command = [sys.executable, str(CHILD), str(directory), str(seed)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        try:
            acknowledged = 0
            enough = rng.choice((0, 1, rng.randrange(100), rng.randrange(20_000)))
            if enough == 0:
                select.select([child.stdout], [], [], 0.3 * rng.random())  # somewhere in its start
            while acknowledged < 4 * enough:
                got = os.read(child.stdout.fileno(), 4 * rng.randrange(1, 5000))
                assert got, "the child died by itself"
                acknowledged += len(got)
        finally:
            child.kill()
        return (acknowledged + len(child.stdout.read())) // 4


def kill_rounds(directory: Path, rounds: int, seed: int) -> int:
    """Let a child work and kill it, over and over; returns how many changes were acknowledged in all."""
    from catalog_child import Model  # the child's own file, so that both agree on the schedule

    rng = random.Random(seed)
    start: dict[int, Row] = {}
    acknowledged_in_all = 0
    for number in range(rounds):
        acknowledged = run_and_kill(directory, seed + number, rng)
        acknowledged_in_all += acknowledged

        bench = Bench(directory)
        catalog, state = bench.open()
        assert not state.fresh or (acknowledged == 0 and not start)
        found = bench.rows(catalog)
        assert catalog.close(WAIT_S)
        model = Model(seed + number, start)
        for _ in range(acknowledged):
            model.step()
        # Some that were not acknowledged may have been written, in order and without a gap.
        for _ in range(100_000):
            if len(model.rows) == len(found) and model.rows == found:
                break
            model.step()
        else:
            pytest.fail(f"round {number}: after {acknowledged} acknowledged changes the rows are those of no moment")
        assert state.next_sequence > max((its.sequence for its in found.values()), default=0)
        start = found
    assert bench.set_aside() == []
    return acknowledged_in_all


@pytest.fixture
def child_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CHILD.parent))


@pytest.mark.faults
@pytest.mark.usefixtures("child_path")
def test_killed_at_any_moment(tmp_path: Path) -> None:
    assert kill_rounds(tmp_path, rounds=20, seed=1) > 0


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("child_path")
def test_killed_at_any_moment_for_long(tmp_path: Path) -> None:
    assert kill_rounds(tmp_path, rounds=300, seed=1000) > 10_000


# --- off-line ---------------------------------------------------------------------------------------


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
