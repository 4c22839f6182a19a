"""Flushes whose disks are away: which of them are told when they come back, and when a flush is durable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    def __init__(self, name: str, path: Path) -> None:
        self.directory = SimpleNamespace(path=path, superblock=SimpleNamespace(directory_id=name.encode()))
        self.flushed: list[tuple[str, bytes]] = []
        self.hangs = False
        self.asked: list[Callable[[bool], None]] = []
        self.loads = self.drops = 0
        self.catalog = SimpleNamespace(full=False, error="")

    def start_loading(self) -> None:
        self.loads += 1

    def flush(self, namespace: str, key: bytes, done: Callable[[bool], None]) -> int:
        self.flushed.append((namespace, key))
        self.asked.append(done)
        if not self.hangs:
            done(True)
        return 1

    def drop_unserved(self, done: Callable[[bool], None]) -> None:
        self.drops += 1
        self.asked.append(done)
        if not self.hangs:
            done(True)


class Disks:
    """Directories that come and go. `closed`: paths where none is open, and whether that may last."""

    def __init__(self, *every: str) -> None:
        self.now_s = 0.0
        self.every = list(every)
        self.shelves: list[Any] = []
        self.closed: list[tuple[Path, bool]] = []
        self.answers: list[bool] = []
        known: Any = self.every
        self.flushes = Flushes(lambda: known, lambda: self.now_s)

    def open(self, path: Path, name: str, full: bool = False) -> Shelf:
        self.closed = [one for one in self.closed if one[0] != path]
        shelf: Any = Shelf(name, path)
        shelf.catalog.full = full
        self.shelves.append(shelf)
        self.flushes.opened(path, shelf)
        return shelf

    def gone(self, shelf: Any, lasting: bool = True) -> None:
        self.shelves.remove(shelf)
        self.closed.append((shelf.directory.path, lasting))
        self.flushes.gone(shelf)

    def begin(self, names: Sequence[str], key: bytes = b"", named: bool = True) -> Any:
        told: Any = names
        done = lambda _, durable: self.answers.append(durable)  # noqa: E731
        return self.flushes.begin(told, key, done, self.shelves, lambda: self.closed, named)

    def flush(self, names: Sequence[str], key: bytes = b"", named: bool = True) -> Any:
        flush = self.begin(names, key, named)
        flush.forget(names)
        flush.end()
        self.work()
        return flush

    def work(self) -> None:
        while self.flushes.work():
            pass


def whole(*names: str) -> list[tuple[str, bytes]]:
    return [(name, b"") for name in names]


def test_a_directory_that_is_back_drops_what_was_flushed_while_it_was_away() -> None:
    disks = Disks("n", "m", "before", "never")
    one = disks.open(A, "1")
    disks.flush(["before"], b"k")
    disks.flush(["before"])
    assert disks.answers == [True] * 2
    disks.gone(one)
    other = disks.open(A, "2")
    disks.flush(["m"], b"k")
    disks.flush(["n"])
    assert disks.answers[2:] == [False] * 2, "the first may come back after a restart"
    disks.gone(other)
    assert disks.open(A, "1").flushed == [*whole("n"), ("m", b"k")]
    disks.flush(["n"])
    assert disks.answers[-1] is False, "the second is away now"


def test_very_many_flushes_of_blocks_become_flushes_of_their_namespaces_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a tenant that flushes again and again while a disk is away would flush the others' blocks there."""
    monkeypatch.setattr(nvme_flushes, "MAX_KEYS", 1)
    disks = Disks("n", "m", "others")
    disks.closed = [(A, True)]
    for name, key in (("n", b"1"), ("n", b"2"), ("m", b"3"), ("m", b"4")):
        disks.flush([name], key)
    assert disks.open(A, "1").flushed == [*whole("n", "m"), ("m", b"4")]


@pytest.mark.parametrize("is_all", [False, True])
def test_a_disk_that_was_never_seen_drops_all_that_was_flushed_in_this_life(is_all: bool) -> None:
    """An earlier life may have filled it. So it is also where the mount points were swapped meanwhile."""
    disks = Disks("n", "m", "never")
    stranger = disks.open(A, "stranger")
    disks.flush(["n"], b"k")
    disks.flush(disks.every if is_all else ["m"], named=not is_all)
    disks.gone(stranger)
    disks.open(B, "stranger")
    one = disks.open(A, "from an earlier life")
    assert one.flushed == (whole(*disks.every) if is_all else [*whole("m"), ("n", b"k")])
    assert (one.drops, one.loads) == (int(is_all), 1)


@pytest.mark.parametrize("named", [False, True])
def test_a_flush_of_named_namespaces_is_about_no_others_that_only_a_disk_knows(named: bool) -> None:
    """Else a tenant that comes first would flush what earlier lives have stored for the others."""
    disks = Disks("n")
    disks.closed = [(A, False)]
    flush = disks.flush(["n"], named=named)
    disks.every.append("others")
    assert disks.open(A, "1").flushed == whole("n", *([] if named else ["others"]))
    disks.work()
    assert (disks.answers, flush.unconfirmed) == ([True], ())


def test_flushes_that_wait_for_a_directory_to_open_are_answered_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is a line of the log and a message."""
    monkeypatch.setattr(nvme_flushes, "ANSWERED_AT_ONCE", 2)
    disks = Disks("n")
    disks.closed = [(A, False)]
    for _ in range(5):
        disks.flush(["n"])
    assert disks.answers == []
    assert disks.open(A, "1").flushed == whole("n"), "once for all of them"
    told = [0]
    while disks.flushes.work():
        told.append(len(disks.answers))
    assert disks.answers == [True] * 5
    assert all(after - before <= 2 for before, after in pairwise(told))


def test_a_directory_that_closes_before_it_was_told_all_is_told_again() -> None:
    disks = Disks("n")
    disks.closed = [(A, False)]
    disks.flush(["n"])
    one = disks.open(A, "1", full=True)
    assert (one.flushed, one.loads) == ([], 0), "what it is told would wait in memory"
    disks.gone(one)
    disks.work()
    assert disks.answers == [False]
    one = disks.open(A, "1")
    assert (one.flushed, one.loads) == (whole("n"), 1)


def test_a_directory_whose_catalog_is_full_is_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_flushes, "TOLD_AT_ONCE", 2)
    disks = Disks("n", "m", "o")
    disks.closed = [(A, True)]
    disks.flush(disks.every, named=False)
    one = disks.open(A, "1")
    one.catalog.full = True
    assert not disks.flushes.work(), "no work is ready: the loop does not spin"
    assert (len(one.flushed), one.loads) == (2, 0)
    one.catalog.full = False
    assert not disks.flushes.work()
    assert (len(one.flushed), one.loads) == (3, 1)


def test_a_flush_takes_memory_until_each_open_disk_has_written_it_or_is_gone() -> None:
    disks = Disks("n", "m")
    one, other = disks.open(A, "1"), disks.open(B, "2")
    one.hangs = other.hangs = True
    flush = disks.flush(["n", "m"], b"k")
    disks.now_s = nvme_flushes.FLUSH_S
    disks.work()
    assert (disks.answers, flush.settled) == ([False], False), "it was answered, and still waits for both"
    one.catalog.error = "no room"
    one.asked[0](False)
    disks.work()
    one.asked[1](True)  # the first one too: what could not be written is retried before what follows
    assert not flush.settled
    disks.gone(other)
    assert flush.settled
    other.asked[0](True)  # too late
    assert flush.settled
    assert disks.open(B, "2").flushed == [("n", b"k"), ("m", b"k")]


def test_what_a_disk_could_not_write_at_first_is_written_once_it_works_again() -> None:
    """Its catalog tries by itself and says nothing of that. Else a client could never flush again."""
    disks = Disks("n", "m")
    one = disks.open(A, "1")
    one.hangs, one.catalog.error = True, "no room"
    flush = disks.flush(["n"], b"k")
    one.asked[0](False)
    disks.work()
    assert (disks.answers, flush.settled) == ([False], False)
    one.catalog.error = ""
    disks.work()
    assert flush.settled
    disks.gone(one)
    one = disks.open(A, "1")
    assert one.flushed == [("n", b"k")], "it has not said so"
    disks.gone(one)
    assert disks.open(A, "1").flushed == []


def test_a_disk_that_has_nothing_of_a_namespace_has_not_recorded_what_it_was_told_before() -> None:
    disks = Disks("n", "unknown there")
    one = disks.open(A, "1")
    one.hangs = True
    disks.flush(["n"])
    one.hangs = False
    disks.flush(["unknown there"])
    disks.gone(one)
    assert disks.open(A, "1").flushed == whole("n", "unknown there")


def test_a_disk_that_goes_between_two_parts_of_a_flush_drops_all_of_it_when_it_is_back() -> None:
    disks = Disks("n", "m")
    one = disks.open(A, "1")
    flush = disks.begin(disks.every, b"k", named=False)
    flush.forget(disks.every[:1])
    disks.gone(one)
    flush.forget(disks.every[1:])
    assert one.flushed == [("n", b"k")]
    assert disks.answers == [], "not before the last part"
    flush.end()
    assert (disks.answers, flush.unconfirmed) == ([False], ("nvme",))
    assert disks.open(A, "1").flushed == [("n", b"k"), ("m", b"k")]


def test_a_flush_is_not_durable_where_another_disk_takes_the_place_of_one_that_was_told() -> None:
    """The new one has not recorded it when the last of the others has."""
    disks = Disks("n")
    slow, one = disks.open(A, "slow"), disks.open(B, "1")
    slow.hangs = True
    disks.flush(["n"])
    disks.gone(one)
    disks.open(B, "2").hangs = True
    slow.asked[0](True)
    assert disks.answers == [False]


def test_what_is_dropped_unserved_is_written_too_before_a_flush_takes_no_memory() -> None:
    disks = Disks("n")
    one = disks.open(A, "1")
    one.hangs = True
    flush = disks.flush(["n"], named=False)
    one.asked[0](True)
    assert (disks.answers, flush.settled) == ([], False)
    one.asked[1](True)
    assert (disks.answers, flush.settled) == ([True], True)


def test_a_directory_that_was_open_between_two_parts_is_told_again() -> None:
    """Blocks of the later parts may have been written to it while DRAM still had them."""
    disks = Disks("0", "1", "2")
    disks.closed = [(A, False)]
    flush = disks.begin(disks.every, named=False)
    flush.forget(disks.every[:1])
    one = disks.open(A, "1")
    assert one.flushed == whole("0", "1", "2")
    flush.forget(disks.every[1:2])
    assert one.flushed[3:] == whole("1")
    disks.gone(one)
    flush.forget(disks.every[2:])
    flush.end()
    disks.work()
    assert disks.answers == [False], "it is away"
    assert disks.open(A, "1").flushed == whole("0", "1", "2")
