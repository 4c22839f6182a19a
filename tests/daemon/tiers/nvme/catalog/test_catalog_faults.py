"""The durable index while nothing can be written: what is refused, what is kept, what comes back."""

from __future__ import annotations

import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from catalog_bench import ID, WAIT_S, Answers, Bench, row

from tiercache.daemon.tiers.nvme.catalog import catalog as catalog_module
from tiercache.daemon.tiers.nvme.catalog import writer
from tiercache.daemon.tiers.nvme.catalog.catalog import Catalog, SavedNamespace, Tombstone
from tiercache.daemon.tiers.nvme.catalog.catalog_check import read_state
from tiercache.errors import CatalogUnavailable


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
    catalog.insert([1], [row(1)], answers("insert"))
    catalog.add_namespace(1, "aa", b"x", done=answers("namespace"))
    catalog.raise_epoch(1, 4, answers("epoch"))
    catalog.raise_epoch(1, 2, answers("lower epoch"))
    catalog.set_segment(1, 4096, answers("segment"))
    catalog.drop_segment(1, answers("drop"))
    catalog.set_segment(1, 8192, answers("again"))
    catalog.add_tombstone(1, b"k" * 16, 9, answers("tombstone"))
    catalog.delete([2], answers("delete"))
    bench.loop.until(lambda: len(answers.got) == 9)
    assert {ok for _, ok in answers.got} == {False}
    assert catalog.error == "database is locked"
    assert catalog._writer.failures >= 1
    assert catalog.pending == 6  # the segment is in it once
    assert not catalog.sync(WAIT_S)
    lock.release()
    bench.loop.until(lambda: catalog.error == "")
    assert catalog.pending == 0
    catalog.insert([3], [row(3)], answers("later"))
    bench.loop.until(lambda: answers.got[-1] == ("later", True))
    assert len(answers.got) == 10  # each was answered once
    assert catalog.close(WAIT_S)
    state = read_state(bench.directory)
    assert state.namespaces == [SavedNamespace(1, "aa", b"x", 4)]
    assert state.segments == {1: 8192}
    assert state.tombstones == [Tombstone(1, b"k" * 16, 9)]
    assert bench.reopened() == {3: row(3)}


def test_a_tombstone_stays_when_a_row_could_not_be_deleted(bench: Bench) -> None:
    """Else the flush that it stands for would be undone at the next start."""
    bench.filled({1: row(1)})
    catalog, _ = bench.open()
    answers = Answers()
    catalog.add_tombstone(1, b"a" * 16, 2)
    catalog.add_tombstone(1, b"b" * 16, 2)
    catalog.remove_tombstone(1, b"b" * 16, answers("remove b"))
    bench.loop.until(lambda: answers.got == [("remove b", True)])
    lock = Lock(bench.path)
    catalog.delete([1], answers("delete"))
    catalog.remove_tombstone(1, b"a" * 16, answers("remove"))
    bench.loop.until(lambda: len(answers.got) == 3)
    lock.release()
    bench.loop.until(lambda: not catalog.error)
    catalog.remove_tombstone(1, b"a" * 16, answers("again"))
    catalog.delete([2], answers("other"))
    bench.loop.until(lambda: len(answers.got) == 5)
    assert answers.got[1:] == [("delete", False), ("remove", False), ("again", False), ("other", True)]
    assert catalog.close(WAIT_S)
    catalog, state = bench.open()
    assert state.tombstones == [Tombstone(1, b"a" * 16, 2)]
    assert bench.rows(catalog) == {1: row(1)}
    catalog.delete([1])
    catalog.remove_tombstone(1, b"a" * 16)
    assert catalog.close(WAIT_S)
    assert read_state(bench.directory).tombstones == []


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, writing hangs as on a disk that does not answer."""
    answers = threading.Event()
    real_apply = writer.apply

    def apply(db: sqlite3.Connection, batch: Any) -> None:
        assert answers.wait(WAIT_S)
        real_apply(db, batch)

    monkeypatch.setattr(writer, "apply", apply)
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
        catalog.insert([number], [row(number)], answers(number))
    bench.loop.until(lambda: catalog.full)  # one may be on its way from the queue to the thread
    assert not catalog.sync(0.01)
    stuck.set()
    bench.loop.until(lambda: len(answers.got) == 100)
    assert catalog.sync(WAIT_S)
    assert not catalog.full
    assert catalog.close(WAIT_S)


def test_opening_does_not_wait_for_a_dead_disk(tmp_path: Path, stuck: threading.Event) -> None:
    bench = Bench(tmp_path)
    first = Catalog(tmp_path, ID, bench.loop.post)
    with pytest.raises(CatalogUnavailable, match=r"did not open within 0.01 s: check that its disk answers"):
        first.open(timeout_s=0.01)  # rule: nothing answers before the gate opens
    stuck.set()
    first._writer._thread.join(WAIT_S)
    later, state = bench.open()  # another one finds what the first left
    assert state.namespaces == []
    assert later.close(WAIT_S)


@pytest.fixture
def small_disk(mount: Callable[[str], Path]) -> Iterator[Bench]:
    """A bench on a file system of 1 MiB."""
    bench = Bench(mount("1m"))
    yield bench
    bench.close()


def test_a_read_only_directory_loses_nothing(small_disk: Bench) -> None:
    rows = {number: row(number) for number in range(100)}
    small_disk.filled(rows)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk.directory)], check=True, timeout=30)
    with pytest.raises(CatalogUnavailable, match="see to the disk and its permissions"):
        small_disk.open()
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk.directory)], check=True, timeout=30)
    assert small_disk.reopened() == rows
