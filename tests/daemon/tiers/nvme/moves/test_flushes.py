"""Flushes whose disks are away: which of them are told when they come back, and when a flush is durable."""

from __future__ import annotations

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
        self.catalog = SimpleNamespace(full=False, error="")

    def start_loading(self) -> None:
        """Its rows are not asked for."""

    def flush(self, namespace: Any, key: bytes, done: Any) -> int:
        self.flushed.append((namespace, key))
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
