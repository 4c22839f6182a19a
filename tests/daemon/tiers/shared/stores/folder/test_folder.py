"""The store on a folder, in this process: what is written is read, and nothing that fails or lies there does harm."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from store_calls import content, put, read, room, soon, value_of

from tiercache.daemon.tiers.shared.stores.folder.connection import FolderConnection, FolderStore
from tiercache.daemon.tiers.shared.stores.folder.tree import OURS, Tree, as_store_error
from tiercache.daemon.tiers.shared.stores.names import fan_out, file_name
from tiercache.daemon.tiers.shared.stores.store import Fate, Get, Put, StoreError, StoreProblem

NAME = b"tc1:default:5d1e:0a1b:9f"


def connect(folder: Path, query: str = "") -> FolderConnection:
    return FolderStore(f"file://{folder}{query}").connect()


def place(folder: Path, name: bytes = NAME) -> Path:
    """Where a value's file belongs; its folder is made."""
    path = folder / OURS / "values" / fan_out(name) / file_name(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def drafts(folder: Path) -> list[str]:
    return os.listdir(folder / OURS / "tmp")


def _socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(path.parent, os.O_PATH)
        try:  # the whole path may be too long for a socket
            listener.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


STRANGE: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "fifo": os.mkfifo,
    "socket": _socket_at,
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "dangling link": lambda path: path.symlink_to("/nowhere"),
}


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


@pytest.mark.parametrize("kind", STRANGE)
def test_something_else_in_the_place_of_a_file_does_no_harm(folder: Path, kind: str) -> None:
    """Nothing hangs (a FIFO waits for its writer), no link is followed, and the rest of the batch goes on."""
    line = connect(folder)
    put(line, {b"good": content(6, 50)})
    STRANGE[kind](place(folder))
    assert read(line, [NAME, b"good"], 5, 100) == [Fate.MISFIT, content(6, 50)]
    assert read(line, [NAME], 0, 1 << 20) == [Fate.MISFIT], "nor where its size would fit"
    assert line.exists([NAME, b"good"], [], soon()).there == [False, True]
    assert put(line, {NAME: content(7, 50), b"other": content(7, 50)}) == [Fate.DONE, Fate.DONE]
    assert read(line, [NAME], 5, 100) == [content(7, 50)], "the place is a value's again"
    if kind == "folder":
        (aside,) = (folder / OURS / "aside").iterdir()
        assert aside.is_dir()
        assert aside.name.startswith(file_name(NAME))
    assert Path("/etc/passwd").read_bytes() != content(7, 50)
    line.delete([NAME], soon())


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_strange_fan_out_folder_is_put_aside_by_the_next_put(folder: Path, tmp_path: Path, kind: str) -> None:
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
    assert put(line, {NAME: content(9, 50), b"other": content(9, 50)}) == [Fate.DONE, Fate.DONE]
    assert read(line, [NAME], 5, 100) == [content(9, 50)]
    assert [path.read_bytes() for path in elsewhere.iterdir()] == ([content(8, 50)] if kind == "link" else [])
    (aside,) = (folder / OURS / "aside").iterdir()
    assert aside.is_symlink() == (kind == "link")


@pytest.mark.parametrize(
    ("kind", "number"),
    [("file", errno.EPERM), ("folder", errno.EACCES), ("folder", errno.EBUSY), ("folder", errno.EXDEV)],
)
def test_what_cannot_be_replaced_or_moved_is_refused_alone(
    folder: Path, kind: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `chattr +i`, with a folder of another user, or with one that is mounted: the store is not away for it."""
    line = connect(folder)
    place(folder).mkdir() if kind == "folder" else place(folder).write_bytes(content(6, 50))
    real = os.rename

    def rename(source: str, target: str, **folders: int) -> None:
        if (source if kind == "folder" else target) == file_name(NAME):
            raise OSError(number, os.strerror(number), source)
        real(source, target, **folders)

    monkeypatch.setattr(os, "rename", rename)
    assert put(line, {NAME: content(7, 50), b"other": content(7, 50)}) == [Fate.REFUSED, Fate.DONE]
    assert drafts(folder) == []
    if kind == "file":
        place(folder).unlink()
        with pytest.raises(StoreError, match="a file: Operation not permitted"):
            put(line, {NAME: content(7, 50)})


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ESTALE, errno.EIO])
def test_a_folder_that_cannot_be_opened_stays(folder: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in one value's place cannot be moved then; the other values of that folder must not go with it."""
    line = connect(folder)
    put(line, {b"good": content(6, 50)})
    real, fan = os.open, fan_out(b"good")

    def fail(path: object, flags: int, *rest: object, **more: object) -> int:
        if path == fan:
            raise OSError(number, os.strerror(number))
        return real(path, flags, *rest, **more)  # type: ignore[arg-type]

    with Tree(str(folder)) as tree, monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        with pytest.raises(OSError, match=os.strerror(number)):
            tree.put_aside(b"good")
    assert read(line, [b"good"], 5, 100) == [content(6, 50)]


def test_a_link_in_the_place_of_our_own_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / OURS).symlink_to(tmp_path)
    with pytest.raises(StoreError, match="something else stands") as caught:
        put(connect(folder), {NAME: b"value"})
    assert caught.value.problem is StoreProblem.PROTOCOL


# --- notes, lifetimes of values ----------------------------------------------------------------------


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


def test_a_note_is_deleted_once_that_survives_a_power_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


# --- a folder that fails: full, forbidden, not mounted, gone -----------------------------------------


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


@contextmanager
def files_of_1_mib() -> Iterator[None]:
    """For as short as possible: a tool that watches the tests has files in this process too."""
    earlier = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, earlier[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, earlier)


def test_a_value_that_is_too_long_for_the_file_system_is_refused_alone(folder: Path) -> None:
    line = connect(folder)
    with files_of_1_mib():
        fates = put(line, {b"big": bytes(2 << 20), b"small": b"value!"})
    assert fates == [Fate.REFUSED, Fate.DONE]
    assert line.exists([b"big", b"small"], [], soon()).there == [False, True]
    assert drafts(folder) == []


def test_a_folder_that_is_not_mounted_any_more_gets_no_values(
    mount: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    place_ = mount("4m")
    line = connect(place_)
    put(line, {NAME: b"value!"})
    subprocess.run(["umount", str(place_)], check=True, timeout=30)
    with pytest.raises(StoreError, match="not mounted any more"):
        put(line, {NAME: b"value!"})
    assert list(place_.iterdir()) == []
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(place_)], check=True, timeout=30)
