"""A folder that hosts share: notes, lifetimes of values, and modes of files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from folder_rig import NAME, STRANGE, connect, place
from store_calls import put, read, room, soon, value_of

from tiercache.daemon.tiers.shared.stores.folder.tree import OURS
from tiercache.daemon.tiers.shared.stores.names import file_name
from tiercache.daemon.tiers.shared.stores.store import StoreError


def test_a_value_with_a_shorter_lifetime_looks_older(folder: Path) -> None:
    line = connect(folder, "?ttl=10h")
    put(line, {b"always": b"value!", b"whole": b"value!"})
    put(line, {b"whole": b"value!"}, ttl_s=36_000)
    put(line, {b"short": b"value!"}, ttl_s=3600)
    times = {name: place(folder, name).stat().st_mtime for name in (b"always", b"whole", b"short")}
    assert abs(times[b"always"] - times[b"whole"]) < 1000
    assert 8.5 * 3600 < times[b"always"] - times[b"short"] < 9.5 * 3600


@pytest.mark.parametrize(("left_h", "renewed"), [(2.9, False), (1.9, True), (0.0, True)])
def test_a_value_that_is_read_lives_on(folder: Path, left_h: float, renewed: bool) -> None:
    """Once half of its four hours is over; values without a lifetime are left as they are."""
    line = connect(folder, "?ttl=10h")
    put(line, {NAME: b"value!"}, ttl_s=4 * 3600)
    full, found = place(folder).stat().st_mtime, place(folder).stat()
    then = full - (4 - left_h) * 3600
    os.utime(place(folder), (found.st_atime, then))
    read(line, [NAME])
    assert place(folder).stat().st_mtime == then
    get = room(NAME, 1, 9)
    get.ttl_s = 4 * 3600
    line.get([get], [], soon())
    assert value_of(get) == b"value!"
    now = place(folder).stat().st_mtime
    assert abs(now - (full if renewed else then)) < 600


def test_notes_work_on_a_file_system_without_hard_links(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    line = connect(folder)
    assert line.set_note(b"n", b"one", soon(), only_if_missing=True) == b"one"
    assert line.set_note(b"n", b"two", soon(), only_if_missing=True) == b"one"


def test_a_note_and_its_end_survive_a_power_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is synced after its bytes: else the note before it, and what was flushed, would be back."""
    line, real, synced = connect(folder), os.fsync, list[tuple[str, list[str]]]()

    def sync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        synced.append((path.name, sorted(os.listdir(path))))
        real(fd)

    monkeypatch.setattr(os, "fsync", sync)
    line.set_note(b"a", b"one", soon())
    line.set_note(b"b", b"one", soon(), only_if_missing=True)
    line.set_note(b"b", b"two", soon(), only_if_missing=True)
    line.delete([b"a"], soon())
    assert line.replicated_note(b"b", soon()) == b"one"  # perhaps of a process that was stopped before it synced
    a, b = file_name(b"a"), file_name(b"b")
    assert synced == [("notes", [a]), *[("notes", [a, b])] * 2, *[("notes", [b])] * 2]


def test_a_note_that_is_gone_is_deleted_once_that_survives_a_power_cut(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The try that removed it may have failed before its folder was synced."""

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    line = connect(folder)
    line.set_note(b"a", b"one", soon())
    monkeypatch.setattr(os, "fsync", broken)
    for _ in range(2):
        with pytest.raises(StoreError, match=os.strerror(errno.EIO)):
            line.delete([b"a"], soon())
        assert line.exists([], [b"a"], soon()).notes == [None]


@pytest.mark.parametrize("kind", [*STRANGE, "too long"])
def test_a_strange_note_is_missing(folder: Path, kind: str) -> None:
    line = connect(folder)
    line.set_note(b"other", b"note", soon())
    path = folder / OURS / "notes" / "n"
    if kind == "too long":
        path.write_bytes(b"x" * 4097)
    else:
        STRANGE[kind](path)
    assert line.exists([], [b"n", b"other"], soon()).notes == [None, b"note"]
    if kind == "folder":
        with pytest.raises(StoreError, match="something else stands"):
            line.set_note(b"n", b"new", soon())
    else:
        assert line.set_note(b"n", b"new", soon(), only_if_missing=True) == b"new"
