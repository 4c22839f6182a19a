"""The store on a folder, in this process: what is written is read, and what others leave there does no harm."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest
from folder_rig import NAME, STRANGE, connect, drafts, place
from store_calls import content, put, read, soon, value_of

from tiercache.daemon.tiers.shared.stores.folder.tree import OURS, Tree
from tiercache.daemon.tiers.shared.stores.names import fan_out, file_name
from tiercache.daemon.tiers.shared.stores.store import Fate, Get, Put, StoreError, StoreProblem


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
def test_a_folder_of_values_that_cannot_be_opened_stays(
    folder: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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
