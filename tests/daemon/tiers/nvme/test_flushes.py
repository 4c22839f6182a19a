"""Flushes whose disks are away: which of them are told when they come back, and when a flush is durable."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiercache.daemon.tiers.nvme import flushes as nvme_flushes
from tiercache.daemon.tiers.nvme.flushes import Flushes

A, B = Path("/a"), Path("/b")


class Shelf:
    """What a flush asks of an open directory."""

    def __init__(self, name: str, path: Path = A) -> None:
        self.directory = SimpleNamespace(path=path, superblock=SimpleNamespace(directory_id=name.encode()))
        self.flushed: list[Any] = []
        self.hangs = False
        self.asked: list[Any] = []
        self.loads = 0
        self.catalog = SimpleNamespace(full=False)

    def start_loading(self) -> None:
        self.loads += 1

    def flush(self, namespace: Any, key: bytes, done: Any) -> int:
        self.flushed.append((namespace, key))
        self.asked.append(done)
        if not self.hangs:
            done(True)
        return 1


def flush(flushes: Flushes, shelves: list[Shelf], *away: Path) -> bool:
    """Flush one namespace of two; whether that is durable."""
    answers: list[bool] = []
    told: Any = shelves
    which: Any = ["n"]
    closed = [(path, True) for path in away]
    flush = flushes.begin(which, b"k", lambda blocks, durable: answers.append(durable), told, lambda: closed)
    flush.forget(which)
    flush.end()
    return answers == [True]


def opened(flushes: Flushes, path: Path, name: str) -> Shelf:
    shelf = Shelf(name, path)
    told: Any = shelf
    flushes.opened(path, told)
    return shelf


def kept_for_a() -> tuple[list[str], Flushes, list[bool]]:
    """Two keys of six namespaces, flushed while a directory was not open; the answers as they come."""
    every: Any = [str(number) for number in range(6)]
    flushes, answers = Flushes(lambda: every, lambda: 0.0), list[bool]()
    for key in (b"a", b"b"):
        flushes.begin(every, key, lambda blocks, durable: answers.append(durable), [], lambda: [(A, False)]).end()
    return every, flushes, answers


def gone(flushes: Flushes, shelf: Shelf) -> None:
    which: Any = shelf
    flushes.gone(which)


def test_disks_that_come_back_at_each_others_places_are_told() -> None:
    every: Any = ["n", "m"]
    flushes = Flushes(lambda: every, lambda: 0.0)
    one, two = opened(flushes, A, "1"), opened(flushes, B, "2")
    assert flush(flushes, [one, two])
    assert not flush(flushes, [one], B)
    two, one = opened(flushes, A, "2"), opened(flushes, B, "1")
    assert two.flushed == [("n", b"k")], "before any block of it is served"
    assert flush(flushes, [one, two]), "both directories are open"


def test_a_flush_is_not_durable_while_a_replaced_disk_is_away() -> None:
    every: Any = ["n", "m"]
    flushes = Flushes(lambda: every, lambda: 0.0)
    opened(flushes, A, "1")
    two = opened(flushes, A, "2")
    assert not flush(flushes, [two])
    one = opened(flushes, A, "1")
    assert one.flushed == [("n", b"k")]


@pytest.mark.parametrize("said", [None, False])
@pytest.mark.parametrize("there", [A, B])
def test_what_a_disk_has_not_confirmed_is_flushed_when_it_is_back(said: bool | None, there: Path) -> None:
    every: Any = ["n", "m"]
    flushes = Flushes(lambda: every, lambda: 0.0)
    one = opened(flushes, A, "1")
    one.hangs = True
    assert not flush(flushes, [one])
    if said is False:
        one.asked[0](False)
    gone(flushes, one)
    again = opened(flushes, there, "1")
    assert again.flushed == [("n", b"k")]
    gone(flushes, again)
    assert opened(flushes, there, "1").flushed == [], "the directory has confirmed the flush"


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


@pytest.mark.parametrize("named", [False, True])
def test_a_flush_of_named_namespaces_is_about_no_others_that_only_a_disk_knows(named: bool) -> None:
    """Else a tenant that comes first would flush what earlier lives have stored for the others."""
    every: Any = ["n"]
    flushes, answers = Flushes(lambda: every, lambda: 0.0), list[bool]()
    flushes.begin(every, b"", lambda blocks, durable: answers.append(durable), [], lambda: [(A, False)], named).end()
    every = ["n", "others"]
    assert opened(flushes, A, "1").flushed == [("n", b"")] + ([] if named else [("others", b"")])
    assert answers == [True]


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
    assert answers == [False]
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


def test_what_was_kept_is_told_in_slices_and_rows_are_loaded_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_flushes, "TOLD_AT_ONCE", 4)
    every, flushes, answers = kept_for_a()
    one = opened(flushes, A, "1")
    told = [len(one.flushed)]
    while flushes.work():
        told.append(len(one.flushed))
        assert one.loads == 0
    assert told == [4, 8]
    assert one.flushed == [(name, key) for key in (b"a", b"b") for name in every]
    assert answers == [True, True]
    assert one.loads == 1
    assert not flushes.work()
    assert one.loads == 1


def test_at_the_end_a_directory_is_told_the_rest_and_its_rows_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_flushes, "TOLD_AT_ONCE", 2)
    every: Any = [str(number) for number in range(7)]
    flushes, answers = Flushes(lambda: every, lambda: 0.0), list[bool]()
    flushes.begin(every, b"k", lambda blocks, durable: answers.append(durable), [], lambda: [(A, False)]).end()
    one = opened(flushes, A, "1")
    flushes.close()
    assert one.flushed == [(name, b"k") for name in every]
    assert answers == [True]
    assert not flushes.work()
    assert one.loads == 0
