"""The store on a folder, in this process: what is written is read, and what others leave there does no harm."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from pathlib import Path

import pytest
from folder_rig import NAME, STRANGE, connect, drafts, place
from store_calls import content, put, read, room, soon, value_of

from tiercache.daemon.tiers.shared.stores.folder import connection as folder_connection
from tiercache.daemon.tiers.shared.stores.folder.tree import OURS, Tree
from tiercache.daemon.tiers.shared.stores.names import fan_out, file_name
from tiercache.daemon.tiers.shared.stores.store import Fate, Get, Put, StoreError, StoreProblem


@pytest.mark.parametrize("length", [0, 1, 5, 6, 4095, 4096, 4097, 3 * 4096, 300_000])
def test_a_value_of_any_length_is_read_as_it_was_written(folder: Path, length: int) -> None:
    mine, other = connect(folder), connect(folder)
    value = content(1, length)
    head = min(5, length)
    assert put(mine, {NAME: value}, head) == [Fate.DONE]
    assert read(other, [NAME], head) == [value]
    assert place(folder).read_bytes() == value
    assert drafts(folder) == []


@pytest.mark.parametrize("length", [4096, 4097, 8191, 8192, 300_000])
def test_direct_io_moves_the_same_bytes(folder: Path, length: int) -> None:
    """With memory that begins at a page, as the helper process has it."""
    line = connect(folder)
    area = memoryview(mmap.mmap(-1, 1 << 20))
    value = content(2, length)
    area[:length] = value
    one = Put(NAME, [area[:length]])
    line.put([one], [], soon())
    assert one.fate is Fate.DONE
    assert place(folder).read_bytes() == value
    area[:] = b"?" * len(area)
    for spare in (0, 1, 4096, 5000):
        get = Get(NAME, memoryview(bytearray()), area[: length + spare])
        line.get([get], [], soon())
        assert value_of(get) == value
        area[:] = b"?" * len(area)
    part = Get(NAME, memoryview(bytearray()), area[:4096], offset=4096, ranged=True)
    line.get([part], [], soon())
    assert value_of(part) == value[4096:8192]


def test_direct_io_is_left_where_the_file_system_refuses_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: object, flags: int, *rest: object, **more: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    line = connect(folder)
    area = memoryview(mmap.mmap(-1, 8192))
    area[:] = content(3, 8192)
    one = Put(NAME, [area[:5000]])
    line.put([one], [], soon())
    assert one.fate is Fate.DONE
    assert not line._files.direct
    assert read(line, [NAME]) == [content(3, 5000)]


@pytest.mark.parametrize("offset", [1, 4095, 4096, 9_990])
def test_a_range_may_end_before_the_value_does(folder: Path, offset: int) -> None:
    line = connect(folder)
    value = content(4, 10_000)
    put(line, {NAME: value})
    assert read(line, [NAME], 4, 3, offset) == [value[offset : offset + 7]]
    assert read(line, [NAME], 4, 20_000, offset) == [value[offset:]]


def test_a_range_behind_the_end_does_not_fit(folder: Path) -> None:
    line = connect(folder)
    put(line, {NAME: content(4, 100)})
    assert read(line, [NAME], 5, 10, 96) == [Fate.MISFIT]
    assert read(line, [NAME], 0, 10, 200) == [Fate.MISFIT]


def test_a_truncated_or_longer_file_is_a_misfit_of_its_own_and_the_others_are_read(folder: Path) -> None:
    line = connect(folder)
    names = [b"short", b"long", b"good", b"missing"]
    put(line, {name: content(5, 1000) for name in names[:3]})
    os.truncate(place(folder, b"short"), 4)
    os.truncate(place(folder, b"long"), 1001)
    assert read(line, names, 5, 995) == [Fate.MISFIT, Fate.MISFIT, content(5, 1000), Fate.MISSING]


@pytest.mark.parametrize("kind", STRANGE)
def test_something_else_in_the_place_of_a_file_does_no_harm(folder: Path, kind: str) -> None:
    """Nothing hangs (a FIFO waits for its writer), no link is followed, and the rest of the batch goes on."""
    line = connect(folder)
    put(line, {b"good": content(6, 50)})
    STRANGE[kind](place(folder))
    assert read(line, [NAME, b"good"], 5, 100) == [Fate.MISFIT, content(6, 50)]
    assert read(line, [NAME], 0, 1 << 20) == [Fate.MISFIT], "nor where its size would fit"
    assert line.exists([NAME, b"good"], [], soon()).there == [False, True]
    wanted = Fate.REFUSED if kind == "folder" else Fate.DONE
    assert put(line, {NAME: content(7, 50), b"other": content(7, 50)}) == [wanted, Fate.DONE]
    assert Path("/etc/passwd").read_bytes() != content(7, 50)
    line.delete([NAME], soon())


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_strange_fan_out_folder_costs_its_own_values_only(folder: Path, tmp_path: Path, kind: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    line = connect(folder)
    put(line, {b"good": content(8, 50)})
    assert fan_out(b"good") != fan_out(NAME)
    fan = folder / OURS / "values" / fan_out(NAME)
    if kind == "link":
        fan.symlink_to(elsewhere)
        (elsewhere / file_name(NAME)).write_bytes(content(8, 50))
    else:
        fan.write_bytes(b"")
    assert read(line, [NAME, b"good"], 5, 100) == [Fate.MISSING, content(8, 50)]
    assert line.exists([NAME, b"good"], [], soon()).there == [False, True]
    line.delete([NAME], soon())
    assert put(line, {NAME: content(9, 50), b"other": content(9, 50)}) == [Fate.REFUSED, Fate.DONE]
    assert [path.read_bytes() for path in elsewhere.iterdir()] == ([content(8, 50)] if kind == "link" else [])


def test_a_link_in_the_place_of_our_own_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / OURS).symlink_to(tmp_path)
    with pytest.raises(StoreError, match="something else stands") as caught:
        put(connect(folder), {NAME: b"value"})
    assert caught.value.problem is StoreProblem.PROTOCOL


def test_two_connections_put_one_name_at_once_and_readers_find_one_of_both(folder: Path) -> None:
    values = [content(number, 20_000) for number in (1, 2)]
    lines = [connect(folder), connect(folder)]
    put(lines[0], {NAME: values[0]})
    stop = threading.Event()

    def write(number: int) -> None:
        while not stop.is_set():
            put(lines[number], {NAME: values[number]})

    writers = [threading.Thread(target=write, args=(number,)) for number in (0, 1)]
    for writer in writers:
        writer.start()
    try:
        reader = connect(folder)
        found = [read(reader, [NAME])[0] for _ in range(200)]
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert set(found) <= set(values)
    assert drafts(folder) == []


def test_names_are_looked_up_side_by_side_where_each_takes_long(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = connect(folder)
    put(line, {b"%d" % number: b"value!" for number in range(0, 40, 3)})
    real, together = folder_connection._is_there, threading.Barrier(folder_connection.LOOKERS)

    def slow(tree: Tree, name: bytes) -> bool:
        if int(name) >= 8:
            together.wait(30)  # passes only when all look at once
        return real(tree, name)

    monkeypatch.setattr(folder_connection, "_is_there", slow)
    monkeypatch.setattr(folder_connection, "SLOW_S", -1.0)
    there = line.exists([b"%d" % number for number in range(40)], [], soon()).there
    assert there == [number % 3 == 0 for number in range(40)]


def test_a_call_whose_time_is_over_begins_nothing_more(folder: Path) -> None:
    with pytest.raises(StoreError) as caught:
        connect(folder).exists([NAME], [], time.monotonic() - 1)
    assert caught.value.problem is StoreProblem.TIMEOUT


def test_deleted_values_are_gone_and_missing_ones_are_no_error(folder: Path) -> None:
    line = connect(folder)
    put(line, {b"a": b"value!", b"b": b"value!"})
    line.set_note(b"a", b"note", soon())
    line.delete([b"a", b"never"], soon())
    assert line.exists([b"a", b"b", b"b"], [b"a"], soon()) == ([False, True, True], [None])


def test_room_is_not_needed_for_a_value_that_is_missing(folder: Path) -> None:
    get = room(NAME, 0, 0)
    connect(folder).get([get], [], soon())
    assert get.fate is Fate.MISSING


def test_a_range_may_begin_at_the_start(folder: Path) -> None:
    line = connect(folder)
    line.put([Put(NAME, [content(1, 5000)])], [], soon())
    whole = Get(NAME, memoryview(bytearray(4)), memoryview(bytearray(96)))
    part = Get(NAME, memoryview(bytearray(4)), memoryview(bytearray(96)), ranged=True)
    line.get([whole, part], [], soon())
    assert whole.fate is Fate.MISFIT
    assert value_of(part) == content(1, 5000)[:100]
