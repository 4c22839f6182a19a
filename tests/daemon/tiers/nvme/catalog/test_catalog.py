"""The durable index: changes are kept in their order, confirmed on the loop, and loaded at the next start."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from catalog_bench import WAIT_S, Answers, Bench, row

from tiercache.daemon.tiers.nvme.catalog import database, writer
from tiercache.daemon.tiers.nvme.catalog.catalog import (
    CatalogState,
    SavedNamespace,
    Tombstone,
)
from tiercache.daemon.tiers.nvme.catalog.catalog_check import check_rows, read_state
from tiercache.daemon.tiers.nvme.catalog.changes import Change
from tiercache.daemon.tiers.nvme.catalog.rows import WAITING_BATCHES, Row, place_of


def test_small_tables_come_back(bench: Bench) -> None:
    catalog, _ = bench.open()
    catalog.add_namespace(1, "aa", b"\x81\x00")
    catalog.add_namespace(2, "bb", b"", epoch=7)
    for namespace in (1, 2):
        catalog.add_tombstone(namespace, b"o" * 16, 5)
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
    catalog.insert([5], [row(41)])
    assert catalog.close(WAIT_S)
    wanted = CatalogState(
        fresh=False,
        namespaces=[SavedNamespace(1, "aa", b"\x82", 5), SavedNamespace(2, "bb", b"", 7)],
        segments={3: 2 << 20},
        tombstones=[Tombstone(2, b"o" * 16, 5), Tombstone(2, b"k" * 16, 10)],
        next_sequence=42,
    )
    assert read_state(bench.directory) == wanted
    assert bench.open()[1] == wanted


def test_no_file_is_mapped_for_which_the_disk_may_have_no_room(bench: Bench) -> None:
    """A page of index.db-shm that a full disk has no room for would end the daemon with SIGBUS."""
    catalog, _ = bench.open()
    catalog.insert([1], [row(1)])
    assert catalog.sync(WAIT_S)
    assert [row.key for row in bench.rows(catalog).values()] == []  # those of `open`
    mapped = Path("/proc/self/maps").read_text()
    assert str(bench.directory) not in mapped
    assert not (bench.directory / "index.db-shm").exists()
    assert catalog.close(WAIT_S)


def test_the_last_change_of_a_place_counts(bench: Bench) -> None:
    catalog, _ = bench.open()
    for place in range(300):  # more than one statement holds
        catalog.insert([place], [row(1000 + place)])
        catalog.delete([place])
        if place % 2:
            catalog.insert([place], [row(2000 + place)])
    catalog.insert([1], [row(9)])
    catalog.delete([3])
    assert catalog.close(WAIT_S)
    assert bench.reopened() == {1: row(9)} | {place: row(2000 + place) for place in range(5, 300, 2)}


def test_dropping_a_segment_takes_its_rows_and_no_others(bench: Bench) -> None:
    catalog, _ = bench.open()
    places = [place_of(segment, slot) for segment in (1, 2, 3) for slot in (0, 1, 2**24 - 1)]
    for place in places:
        catalog.insert([place], [row(place)])
    catalog.set_segment(2, 4096)
    catalog.drop_segment(2)
    catalog.insert([place_of(2, 5)], [row(5)])
    assert catalog.close(WAIT_S)
    assert list(bench.reopened()) == [*places[:3], place_of(2, 5), *places[6:]]


def test_answers_come_on_the_loop_in_order(bench: Bench) -> None:
    catalog, _ = bench.open()
    answers = Answers()
    for number in range(3000):
        change = number % 3
        if change == 0:
            catalog.insert([number], [row(number)], answers(number))
        elif change == 1:
            catalog.delete([number - 1], answers(number))
        else:
            catalog.set_segment(number % 5, 4096, answers(number))
    assert catalog.sync(WAIT_S)
    assert answers.got == []  # nothing ran beside the loop
    bench.loop.until(lambda: len(answers.got) == 3000)
    assert answers.got == [(number, True) for number in range(3000)]
    assert catalog.pending == 0
    assert catalog._writer.commits <= 10  # and not one commit for each


def test_a_batch_of_rows_counts_for_its_rows_and_is_answered_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BATCH_OPS", 8)
    catalog, _ = bench.open()
    answers, places = Answers(), list(range(20, 0, -1))
    catalog.insert([50], [row(1)], answers("one"))
    catalog.insert(places, [row(100 + place) for place in reversed(places)], answers("all"))
    catalog.delete([20, 3, 50], answers("three"))
    catalog.insert([3], [row(200)], answers("again"))
    bench.loop.until(lambda: len(answers.got) == 4)
    assert answers.got == [("one", True), ("all", True), ("three", True), ("again", True)]
    assert catalog.pending == 0
    assert catalog.close(WAIT_S)
    wanted = {place: row(121 - place) for place in range(1, 20)} | {3: row(200)}
    assert bench.open()[1].next_sequence == 201
    assert dict(check_rows(bench.directory)) == wanted


def test_a_log_that_grew_is_given_back_when_idle(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "IDLE_S", 0.02)
    for module in (writer, database):
        monkeypatch.setattr(module, "TRUNCATE_WAL_BYTES", 1 << 20)
    journal = Path(f"{bench.path}-wal")
    catalog, _ = bench.open()
    reader = sqlite3.connect(bench.path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM blocks").fetchone()  # from here on nothing can leave the log
    for number in range(20_000):
        catalog.insert([number], [row(number)])
    assert catalog.sync(WAIT_S)
    assert catalog.bytes_on_disk() > journal.stat().st_size > 1 << 20
    reader.close()
    bench.loop.until(lambda: journal.stat().st_size == 0)
    bench.loop.until(lambda: catalog.bytes_on_disk() < 3 << 20)
    assert catalog.error == ""


# --- loading ----------------------------------------------------------------------------------------


def test_loading_waits_for_the_loop(bench: Bench) -> None:
    rows = {place_of(number % 3, number): row(number) for number in range(1000)}
    bench.filled(rows)
    catalog, _ = bench.open()
    catalog.insert([place_of(4, 0)], [row(5000)])  # is not shown, as it came after the opening
    assert catalog.sync(WAIT_S)
    loading = catalog.load(lambda: None, batch_rows=10)
    taken: list[tuple[int, Row]] = []
    while not loading.finished:
        bench.loop.until(lambda: loading._ready or loading.finished)
        # One more may be on its way in when one was taken.
        assert loading.rows - len(taken) <= 10 * (WAITING_BATCHES + 1)
        taken += loading.next_batch() or []
    assert taken == sorted(rows.items()), "in order of place"
    assert loading.next_batch() is None
    assert loading.error == ""


def test_a_flush_is_confirmed_once_it_would_outlive_a_power_cut_and_rows_are_not_held_up_for_that(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels, apply = list[int](), writer.apply

    def applied(db: sqlite3.Connection, batch: Sequence[Change]) -> None:
        levels.append(db.execute("PRAGMA synchronous").fetchone()[0])
        apply(db, batch)

    catalog, _ = bench.open()
    answers = Answers()
    monkeypatch.setattr(writer, "apply", applied)
    posts: list[Callable[[], None]] = [
        lambda: catalog.add_namespace(1, "aa", b"", done=answers("a name")),
        lambda: catalog.insert([1], [row(1)], answers("rows")),
        lambda: catalog.raise_epoch(1, 5, answers("flush")),
        lambda: catalog.add_tombstone(1, b"k" * 16, 6, answers("flush of a key")),
        lambda: catalog.insert([2], [row(2)], answers("rows")),
    ]
    for number, post in enumerate(posts, 1):
        post()
        bench.loop.until(lambda number=number: len(answers.got) == number)  # type: ignore[misc]
    normal, full = 1, 2
    assert levels == [normal, normal, full, full, normal]
