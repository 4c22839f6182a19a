"""Flushes whose disks are away: which of them are told when they come back, and when a flush is durable."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tiercache.daemon.nvme.flushes import Flushes

A, B = Path("/a"), Path("/b")


class Shelf:
    """What a flush asks of an open directory."""

    def __init__(self, name: str) -> None:
        self.directory = SimpleNamespace(superblock=SimpleNamespace(directory_id=name.encode()))
        self.flushed: list[Any] = []

    def flush(self, namespace: Any, key: bytes, done: Any) -> int:
        self.flushed.append((namespace, key))
        done(True)
        return 1


def flush(flushes: Flushes, shelves: list[Shelf], *away: Path) -> bool:
    """Flush one namespace of two; whether that is durable."""
    answers: list[bool] = []
    told: Any = shelves
    which: Any = ["n"]
    flushes.begin(which, b"k", lambda blocks, durable: answers.append(durable), told, [(path, True) for path in away])
    return answers == [True]


def opened(flushes: Flushes, path: Path, name: str) -> Shelf:
    shelf = Shelf(name)
    told: Any = shelf
    flushes.opened(path, told)
    return shelf


def test_disks_that_come_back_at_each_others_places_are_told() -> None:
    every: Any = ["n", "m"]
    flushes = Flushes(lambda: every)
    one, two = opened(flushes, A, "1"), opened(flushes, B, "2")
    assert flush(flushes, [one, two])
    assert not flush(flushes, [one], B)
    two, one = opened(flushes, A, "2"), opened(flushes, B, "1")
    assert two.flushed == [("n", b"k")], "before anything of it is served"
    assert flush(flushes, [one, two]), "both are here"


def test_a_flush_is_not_durable_while_a_disk_whose_place_another_one_has_is_away() -> None:
    every: Any = ["n", "m"]
    flushes = Flushes(lambda: every)
    opened(flushes, A, "1")
    two = opened(flushes, A, "2")
    assert not flush(flushes, [two])
    one = opened(flushes, A, "1")
    assert one.flushed == [("n", b"k")]
