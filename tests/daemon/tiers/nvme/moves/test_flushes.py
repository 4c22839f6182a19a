"""Flushes whose disks are away: which of them are told when they come back, and when a flush is durable."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiercache.daemon.tiers.nvme.moves import flushes as nvme_flushes
from tiercache.daemon.tiers.nvme.moves.flushes import Flushes

A, B = Path("/a"), Path("/b")


class Shelf:
    """What a flush asks of an open directory."""

    def __init__(self, name: str, path: Path = A) -> None:
        self.directory = SimpleNamespace(path=path, superblock=SimpleNamespace(directory_id=name.encode()))
        self.flushed: list[Any] = []
        self.hangs = False
        self.asked: list[Any] = []
        self.loads = 0
        self.catalog = SimpleNamespace(full=False, error="")

    def start_loading(self) -> None:
        self.loads += 1

    def flush(self, namespace: Any, key: bytes, done: Any) -> int:
        self.flushed.append((namespace, key))
        self.asked.append(done)
        if not self.hangs:
            done(True)
        return 1

    def drop_unserved(self, done: Any) -> None:
        done(True)


def opened(flushes: Flushes, path: Path, name: str) -> Shelf:
    shelf = Shelf(name, path)
    told: Any = shelf
    flushes.opened(path, told)
    return shelf


def gone(flushes: Flushes, shelf: Shelf) -> None:
    which: Any = shelf
    flushes.gone(which)


def test_very_many_flushes_kept_for_a_disk_flush_all_of_their_namespaces_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a tenant that flushes again and again while a disk is away would flush the others' blocks there."""
    monkeypatch.setattr(nvme_flushes, "MAX_KEPT", 3)
    every: Any = ["n", "m", "others"]
    flushes = Flushes(lambda: every, lambda: 0.0)
    for name in ("n", "m", "n", "n", "m"):
        flushes.begin([name], b"k", lambda blocks, durable: None, [], lambda: [(A, True)], named=True).end()
    assert opened(flushes, A, "1").flushed == [("n", b""), ("m", b""), ("n", b"k"), ("m", b"k")]
    every = ["n", "m", "others"]
    for which in (["n"], every, ["n"], ["n"]):
        flushes.begin(which, b"k", lambda blocks, durable: None, [], lambda: [(B, True)]).end()
    assert opened(flushes, B, "2").flushed == [(name, b"") for name in every] + [("n", b"k")]


def test_flushes_that_are_put_together_are_answered_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is a line of the log and a message."""
    monkeypatch.setattr(nvme_flushes, "MAX_KEPT", 5)
    monkeypatch.setattr(nvme_flushes, "ANSWERED_AT_ONCE", 2)
    every: Any = ["n"]
    flushes, answers = Flushes(lambda: every, lambda: 0.0), list[bool]()
    for _ in range(6):
        done: Any = lambda _, durable: answers.append(durable)  # noqa: E731
        flushes.begin(every, b"k", done, [], lambda: [(A, False)], named=True).end()
    assert answers == []
    told = [0]
    while flushes.work():
        told.append(len(answers))
    assert answers == [False] * 5
    assert all(after - before <= 2 for before, after in pairwise(told))


def test_flushes_are_put_together_once_however_many_directories_were_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a slice."""
    monkeypatch.setattr(nvme_flushes, "MAX_KEPT", 3)
    put_together, named = list[object](), nvme_flushes._named
    monkeypatch.setattr(nvme_flushes, "_named", lambda flushed: put_together.append(flushed) or named(flushed))
    every: Any = ["n", "m"]
    flushes = Flushes(lambda: every, lambda: 0.0)
    for name in "1234":
        gone(flushes, opened(flushes, A, name))
    for name in ("n", "n", "m", "n"):
        flushes.begin([name], b"k", lambda blocks, durable: None, [], list, named=True).end()
    assert len(put_together) == 1
    assert [opened(flushes, A, name).flushed for name in "13"] == [[("n", b""), ("m", b""), ("n", b"k")]] * 2


def test_a_directory_that_is_back_is_told_what_was_flushed_since_it_was_replaced() -> None:
    every: Any = ["n", "m", "before"]
    flushes = Flushes(lambda: every, lambda: 0.0)
    one = opened(flushes, A, "1")
    shelves: Any = [one]
    flushes.begin(["before"], b"k", lambda blocks, durable: None, shelves, list, named=True).end()
    flush = flushes.begin(["n", "m"], b"k", lambda blocks, durable: None, shelves, list, named=True)
    flush.forget(["n"])
    shelves.clear()
    gone(flushes, one)
    gone(flushes, opened(flushes, A, "2"))
    flush.forget(["m"])
    flush.end()
    flushes.begin(["n"], b"", lambda blocks, durable: None, [], list, named=True).end()
    assert opened(flushes, A, "1").flushed == [("n", b"k"), ("m", b"k"), ("n", b"")]


def test_a_disk_that_was_never_seen_is_told_what_was_flushed_while_another_was_in_its_place() -> None:
    every: Any = ["n", "m"]
    flushes = Flushes(lambda: every, lambda: 0.0)
    stranger = opened(flushes, A, "stranger")
    told: Any = [stranger]
    flushes.begin(["n"], b"k", lambda blocks, durable: None, told, list, named=True).end()
    gone(flushes, stranger)
    flushes.begin(["m"], b"", lambda blocks, durable: None, [], lambda: [(A, True)], named=True).end()
    assert opened(flushes, A, "from an earlier life").flushed == [("n", b"k"), ("m", b"")]
    assert opened(flushes, B, "elsewhere, and never away").flushed == []


def test_a_disk_that_was_never_seen_is_told_also_where_another_took_its_flush() -> None:
    """The mount points were swapped, and the other disk came first."""
    every: Any = ["n"]
    flushes, answers = Flushes(lambda: every, lambda: 0.0), list[bool]()
    other = opened(flushes, B, "other")
    told: Any = [other]
    away: Any = [(A, False)]
    flush = flushes.begin(["n"], b"k", lambda _, durable: answers.append(durable), told, lambda: away, named=True)
    flush.forget(every)
    flush.end()
    gone(flushes, other)
    opened(flushes, A, "other")
    flushes.work()
    assert answers == [False], "that is not the disk for which it was kept"
    assert opened(flushes, B, "never seen").flushed == [("n", b"k")]


def test_a_flush_kept_for_a_disk_is_answered_when_one_that_was_never_seen_is_in_its_place() -> None:
    every: Any = ["n"]
    flushes, answers = Flushes(lambda: every, lambda: 0.0), list[bool]()
    gone(flushes, opened(flushes, B, "other"))
    opened(flushes, A, "other")
    flushes.begin(every, b"", lambda _, durable: answers.append(durable), [], lambda: [(B, False)], named=True).end()
    assert opened(flushes, B, "never seen").flushed == [("n", b"")]
    flushes.work()
    assert answers == [False]


def test_a_directory_whose_catalog_is_full_is_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_flushes, "TOLD_AT_ONCE", 2)
    every: Any = ["n", "m", "o"]
    flushes = Flushes(lambda: every, lambda: 0.0)
    flushes.begin(every, b"k", lambda blocks, durable: None, [], lambda: [(A, True)]).end()
    one = opened(flushes, A, "1")
    one.catalog.full = True
    assert not flushes.work(), "no work is ready: the loop does not spin"
    assert (len(one.flushed), one.loads) == (2, 0)
    one.catalog.full = False
    assert not flushes.work()
    assert (len(one.flushed), one.loads) == (3, 1)


def test_a_flush_takes_memory_until_each_open_disk_has_written_it_or_is_gone() -> None:
    now_s, every, answers = [0.0], ["n", "m"], list[bool]()
    flushes = Flushes(lambda: told, lambda: now_s[0])
    told: Any = every
    one, other = opened(flushes, A, "1"), opened(flushes, B, "2")
    one.hangs = other.hangs = True
    shelves: Any = [one, other]
    flush = flushes.begin(told, b"k", lambda _, durable: answers.append(durable), shelves, list)
    flush.forget(told)
    flush.end()
    now_s[0] = nvme_flushes.FLUSH_S
    flushes.work()
    assert (answers, flush.settled) == ([False], False), "it was answered, and still waits for both"
    one.catalog.error = "no room"
    one.asked[0](False)
    flushes.work()
    one.asked[1](True)  # the first one too: what could not be written is retried before what follows
    assert not flush.settled
    gone(flushes, other)
    assert flush.settled
    other.asked[0](True)  # too late
    assert flush.settled


def test_what_a_disk_could_not_write_at_first_is_written_once_it_works_again() -> None:
    """Its catalog tries by itself and says nothing of that. Else a client could never flush again."""
    told: Any = ["n"]
    flushes, one = Flushes(lambda: told, lambda: 0.0), Shelf("1")
    flushes.opened(A, one)  # type: ignore[arg-type]
    one.hangs, one.catalog.error = True, "no room"
    flush = flushes.begin(told, b"k", lambda _, durable: None, [one], list)  # type: ignore[list-item]
    flush.forget(told)
    flush.end()
    one.asked[0](False)
    flushes.work()
    assert not flush.settled
    one.catalog.error = ""
    flushes.work()
    assert flush.settled


@pytest.mark.parametrize("named", [False, True])
def test_a_flush_of_named_namespaces_is_about_no_others_that_only_a_disk_knows(named: bool) -> None:
    """Else a tenant that comes first would flush what earlier lives have stored for the others."""
    every: Any = ["n"]
    flushes, answers = Flushes(lambda: every, lambda: 0.0), list[bool]()
    done: Any = lambda blocks, durable: answers.append(durable)  # noqa: E731
    flush = flushes.begin(every, b"", done, [], lambda: [(A, False)], named)
    flush.end()
    every = ["n", "others"]
    assert opened(flushes, A, "1").flushed == [("n", b"")] + ([] if named else [("others", b"")])
    assert (answers, flush.unconfirmed) == ([True], ())


def test_a_disk_that_goes_between_two_parts_of_a_flush_is_told_of_all_of_it_when_it_is_back() -> None:
    every: Any = ["n", "m"]
    flushes, answers = Flushes(lambda: every, lambda: 0.0), list[bool]()
    one = opened(flushes, A, "1")
    shelves: Any = [one]
    away: list[tuple[Path, bool]] = []
    flush = flushes.begin(every, b"k", lambda blocks, durable: answers.append(durable), shelves, lambda: away)
    flush.forget(every[:1])
    shelves.clear()
    gone(flushes, one)
    away = [(A, True)]
    flush.forget(every[1:])
    assert one.flushed == [("n", b"k")]
    assert answers == [], "not before the last part"
    flush.end()
    assert (answers, flush.unconfirmed) == ([False], ("nvme",))
    one = opened(flushes, A, "1")
    assert one.flushed == [("n", b"k"), ("m", b"k")]


def test_a_directory_that_was_open_between_two_parts_is_told_again() -> None:
    """Blocks of the later parts may have been written to it while DRAM still had them."""
    every: Any = [str(number) for number in range(3)]
    flushes, answers, closed, shelves = Flushes(lambda: every, lambda: 0.0), list[bool](), [(A, False)], list[Any]()
    flush = flushes.begin(every, b"", lambda blocks, durable: answers.append(durable), shelves, lambda: closed)
    flush.forget(every[:1])
    one = opened(flushes, A, "1")
    shelves.append(one)
    closed.clear()
    flush.forget(every[1:2])
    gone(flushes, one)
    shelves.clear()
    closed.append((A, False))
    flush.forget(every[2:])
    flush.end()
    assert answers == []
    again = opened(flushes, A, "1")
    assert {namespace for namespace, _ in again.flushed} == set(every)
    assert answers == [True]
