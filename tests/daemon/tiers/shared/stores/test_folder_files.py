"""The store on a folder, in this process: what is written is read, and what others leave there does no harm."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_calls import content, put, read, room, soon, value_of

from tiercache.daemon.tiers.shared.stores.folder import connection as folder_connection
from tiercache.daemon.tiers.shared.stores.folder.connection import FolderConnection
from tiercache.daemon.tiers.shared.stores.folder.store import FolderStore
from tiercache.daemon.tiers.shared.stores.folder.tree import OURS, Tree, as_store_error
from tiercache.daemon.tiers.shared.stores.names import fan_out, file_name
from tiercache.daemon.tiers.shared.stores.store import Fate, Get, Put, StoreError, StoreProblem

NAME = b"tc1:default:5d1e:0a1b:9f"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "kv"
    path.mkdir()
    return path


def connect(folder: Path, query: str = "") -> FolderConnection:
    return FolderStore(f"file://{folder}{query}").connect()


def place(folder: Path, name: bytes = NAME) -> Path:
    """Where a value's file belongs; its folder is made."""
    path = folder / OURS / "values" / fan_out(name) / file_name(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def drafts(folder: Path) -> list[str]:
    return os.listdir(folder / OURS / "tmp")


# --- values --------------------------------------------------------------------------------------


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


STRANGE: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "fifo": os.mkfifo,
    "socket": lambda path: _socket_at(path),
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "dangling link": lambda path: path.symlink_to("/nowhere"),
}


def _socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(path.parent, os.O_PATH)
        try:  # the whole path may be too long for a socket
            listener.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


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


# --- lifetimes, modes, notes ---------------------------------------------------------------------


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


@pytest.mark.parametrize(("query", "calls"), [("", 0), ("?sync=yes", 3)])
def test_values_are_synchronized_before_they_are_visible_where_that_is_wanted(
    folder: Path, query: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    visible: list[bool] = []
    line = connect(folder, query)
    monkeypatch.setattr(os, "fdatasync", lambda fd: visible.append(place(folder).exists()))
    for _ in range(3):
        put(line, {NAME: b"value!"})
        line.delete([NAME], soon())
    assert visible == [False] * calls


def test_who_may_use_the_folder_may_use_its_files(folder: Path) -> None:
    earlier = os.umask(0)
    try:
        folder.chmod(0o2775)
        put(connect(folder), {NAME: b"value!"})
    finally:
        os.umask(earlier)
    assert stat.S_IMODE(place(folder).stat().st_mode) == 0o664
    assert stat.S_IMODE(place(folder).parent.stat().st_mode) == 0o2775


def test_notes_are_replaced_unless_only_a_missing_one_is_wanted(folder: Path) -> None:
    line, other = connect(folder), connect(folder)
    assert line.exists([], [b"n"], soon()).notes == [None]
    assert line.set_note(b"n", b"one", soon(), only_if_missing=True) == b"one"
    assert other.set_note(b"n", b"two", soon(), only_if_missing=True) == b"one"
    assert other.set_note(b"n", b"three", soon()) == b"three"
    assert line.get([], [b"n", b"m"], soon()) == [b"three", None]
    assert line.put([], [b"n"], soon()) == [b"three"]
    assert drafts(folder) == []


def test_of_many_first_notes_at_once_one_stays(folder: Path) -> None:
    answers: list[bytes] = []

    def write(number: int) -> None:
        answers.append(connect(folder).set_note(b"n", b"%d" % number, soon(), only_if_missing=True))

    writers = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert set(answers) == {connect(folder).exists([], [b"n"], soon()).notes[0]}


def test_a_note_that_another_host_writes_just_before_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def link(*them: Any, **more: Any) -> None:
        connect(folder).set_note(b"n", b"theirs", soon())
        real(*them, **more)

    monkeypatch.setattr(os, "link", link)
    assert connect(folder).set_note(b"n", b"mine", soon(), only_if_missing=True) == b"theirs"


def test_notes_work_on_a_file_system_without_hard_links(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    line = connect(folder)
    assert line.set_note(b"n", b"one", soon(), only_if_missing=True) == b"one"
    assert line.set_note(b"n", b"two", soon(), only_if_missing=True) == b"one"


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


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (errno.ENOSPC, StoreProblem.FULL),
        (errno.EDQUOT, StoreProblem.FULL),
        (errno.EROFS, StoreProblem.READ_ONLY),
        (errno.EACCES, StoreProblem.DENIED),
        (errno.EPERM, StoreProblem.DENIED),
        (errno.ESTALE, StoreProblem.UNREACHABLE),
        (errno.ENOTCONN, StoreProblem.UNREACHABLE),
        (errno.EIO, StoreProblem.UNREACHABLE),
        (errno.EMFILE, StoreProblem.BUSY),
    ],
)
def test_errors_of_the_file_system_say_which_file_and_what_to_do(number: int, problem: StoreProblem) -> None:
    error = as_store_error("/mnt/kv", OSError(number, os.strerror(number), "values"))
    assert error.problem is problem
    assert error.text.startswith(f"/mnt/kv/{OURS}: values: {os.strerror(number)}: ")
    assert "\n" not in error.text


@pytest.mark.parametrize("when", ["pwritev", "rename"])
def test_a_failed_put_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    line = connect(folder)
    put(line, {b"before": b"value!"})

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, when, fail)
    with pytest.raises(StoreError) as caught:
        put(line, {NAME: b"value!"})
    assert caught.value.problem is StoreProblem.FULL
    assert drafts(folder) == []
    assert line.exists([NAME, b"before"], [], soon()).there == [False, True]


@pytest.fixture
def files_of_1_mib() -> Iterator[None]:
    earlier = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, earlier[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, earlier)


def test_a_value_that_is_too_long_for_the_file_system_is_refused_alone(folder: Path, files_of_1_mib: None) -> None:
    line = connect(folder)
    assert put(line, {b"big": bytes(2 << 20), b"small": b"value!"}) == [Fate.REFUSED, Fate.DONE]
    assert line.exists([b"big", b"small"], [], soon()).there == [False, True]
    assert drafts(folder) == []


def test_a_full_disk_is_told(mount: Callable[[str], Path]) -> None:
    line = connect(mount("1m"))
    with pytest.raises(StoreError, match="make room") as caught:
        put(line, {b"%d" % number: bytes(300_000) for number in range(5)})
    assert caught.value.problem is StoreProblem.FULL
    assert line.exists([b"0", b"4"], [], soon()).there == [True, False]


@pytest.mark.parametrize(("what", "words"), [("missing", "No such file"), ("file", "Not a directory")])
def test_a_folder_that_is_none_is_told_at_the_first_call(tmp_path: Path, what: str, words: str) -> None:
    if what == "file":
        (tmp_path / "kv").write_bytes(b"")
    with pytest.raises(StoreError, match=words):
        connect(tmp_path / "kv").exists([NAME], [], soon())


def test_a_folder_that_is_not_mounted_any_more_gets_no_values(
    mount: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import subprocess

    place_ = mount("4m")
    line = connect(place_)
    put(line, {NAME: b"value!"})
    subprocess.run(["umount", str(place_)], check=True, timeout=30)
    with pytest.raises(StoreError, match="not mounted any more"):
        put(line, {NAME: b"value!"})
    assert list(place_.iterdir()) == []
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(place_)], check=True, timeout=30)


def test_a_folder_that_was_emptied_is_used_again(folder: Path) -> None:
    import shutil

    line = connect(folder)
    put(line, {NAME: b"value!"})
    shutil.rmtree(folder / OURS)
    assert line.exists([NAME], [], soon()).there == [False]
    assert put(line, {NAME: b"value!"}) == [Fate.DONE]


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
