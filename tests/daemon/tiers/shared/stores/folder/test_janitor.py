"""The janitor of a shared folder: what it removes, in which order, and that one host at a time does it."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from store_calls import content, put, soon

from tiercache.daemon.tiers.shared.stores.folder import janitor
from tiercache.daemon.tiers.shared.stores.folder.connection import FolderStore
from tiercache.daemon.tiers.shared.stores.folder.janitor import SLICE_PAUSE_S, TRY_S, Janitor, JanitorLease
from tiercache.daemon.tiers.shared.stores.folder.tree import OURS, Tree
from tiercache.daemon.tiers.shared.stores.names import fan_out, file_name
from tiercache.daemon.tiers.shared.stores.store import StoreError

HOUR_S = 3600


def store(folder: Path, query: str = "") -> FolderStore:
    return FolderStore(f"file://{folder}{query}")


def place(folder: Path, name: bytes) -> Path:
    return folder / OURS / "values" / fan_out(name) / file_name(name)


def age(path: Path, seconds: float) -> None:
    """Have a file look that old."""
    then = time.time() - seconds
    os.utime(path, (then, then), follow_symlinks=False)


def one_pass(its: Janitor) -> int:
    """Steps until a pass is over; how many there were."""
    steps = 1
    while its.step() == SLICE_PAUSE_S:
        steps += 1
    return steps


def holder(folder: Path, query: str = "") -> Janitor:
    """A janitor that has the lease."""
    its = Janitor(store(folder, query).settings)
    assert its.step() == TRY_S, "the lease counts from the second look on"
    return its


def left(folder: Path, names: list[bytes]) -> list[bytes]:
    return [name for name in names if place(folder, name).exists()]


def test_values_whose_time_is_over_are_removed(folder: Path) -> None:
    line = store(folder, "?ttl=10h").connect()
    put(line, {b"new": b"value!", b"old": b"value!", b"ancient": b"value!"})
    put(line, {b"short": b"value!"}, ttl_s=HOUR_S)  # looks nine hours old
    age(place(folder, b"old"), 9.9 * HOUR_S)
    age(place(folder, b"ancient"), 10.1 * HOUR_S)
    written = place(folder, b"short").stat().st_mtime
    os.utime(place(folder, b"short"), (written - 1.1 * HOUR_S, written - 1.1 * HOUR_S))
    line.set_note(b"note", b"kept", soon())
    age(folder / OURS / "notes" / "note", 100 * HOUR_S)
    its = holder(folder, "?ttl=10h")
    one_pass(its)
    assert left(folder, [b"new", b"old", b"ancient", b"short"]) == [b"new", b"old"]
    assert line.exists([], [b"note"], soon()).notes == [b"kept"]


@pytest.mark.parametrize("slice_files", [1, 256])
def test_the_oldest_go_until_the_rest_has_room(folder: Path, slice_files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor, "SLICE_FILES", slice_files)
    names = [b"%d" % number for number in range(30)]  # the first are the oldest
    line = store(folder).connect()
    put(line, {name: content(1, 100_000) for name in names})
    for number, name in enumerate(names):
        age(place(folder, name), (30 - number) * HOUR_S)
    its = holder(folder, "?size=2MiB")  # 20 values have room, 19 below the mark
    one_pass(its)
    kept = left(folder, names)
    assert kept == names[-19:]
    one_pass(its)
    assert left(folder, names) == kept, "what has room stays"


def test_unfinished_files_are_removed_once_their_writer_must_be_gone(folder: Path) -> None:
    put(store(folder).connect(), {b"a": b"value!"})
    tmp = folder / OURS / "tmp"
    (tmp / "host-1-a").write_bytes(b"new")
    (tmp / "host-1-b").write_bytes(b"old")
    age(tmp / "host-1-b", 1.1 * HOUR_S)
    one_pass(holder(folder))
    assert os.listdir(tmp) == ["host-1-a"]


def test_nothing_else_is_touched(folder: Path, tmp_path: Path) -> None:
    """Not through links, not what is not a plain file, not folders that are none of ours, not beside our folder."""
    put(store(folder).connect(), {b"a": b"value!"})
    outside = tmp_path / "outside"
    (outside / "abc").mkdir(parents=True)
    values = folder / OURS / "values"
    others = [outside / "file", folder / "tmp-of-others", values / "strange", values / "zzz" / "file"]
    (values / "zzz").mkdir()
    for path in others:
        path.write_bytes(b"theirs")
        age(path, 1000 * HOUR_S)
    free = next(name for name in ("000", "001") if not (values / name).exists())
    (values / free).symlink_to(outside)
    os.mkfifo(place(folder, b"a").with_name("fifo"))
    age(place(folder, b"a").with_name("fifo"), 1000 * HOUR_S)
    one_pass(holder(folder, "?ttl=1h"))
    assert all(path.exists() for path in [*others, place(folder, b"a"), place(folder, b"a").with_name("fifo")])


def holds(folder: Path, its: JanitorLease) -> bool:
    with Tree(str(folder)) as tree:
        return its.hold(tree)


def the_lease(folder: Path) -> Path:
    return folder / OURS / janitor.NAME


def test_the_time_is_asked_of_a_new_file_whatever_a_kill_has_left(folder: Path) -> None:
    left_over = folder / OURS / "tmp" / "clock-draft"
    with Tree(str(folder)) as tree:
        before = janitor.file_system_time_ns(tree, "draft")
        assert not left_over.exists()
        left_over.touch()
        age(left_over, HOUR_S)
        assert janitor.file_system_time_ns(tree, "draft") >= before


def test_a_file_system_without_hard_links_is_cleaned_up_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", refuse)
    first, second = JanitorLease(), JanitorLease()
    assert [holds(folder, one) for one in (first, second, first, second)] == [False, False, True, False]


def test_an_old_lease_is_taken_over_by_one_and_its_holder_knows(folder: Path) -> None:
    first, second, third = JanitorLease(), JanitorLease(), JanitorLease()
    holds(folder, first)
    assert holds(folder, first)
    age(the_lease(folder), janitor.OLD_S + 1)
    assert not holds(folder, second)
    assert [holds(folder, one) for one in (first, second, third, second)] == [False, True, False, True]


@pytest.mark.parametrize("skew_s", [0.0, -1200.0, 1200.0])
def test_one_of_two_hosts_has_the_lease_and_keeps_it(
    folder: Path, skew_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only times that the file system gives are compared: a host's own may be 20 minutes off."""
    first, other = JanitorLease(), JanitorLease()
    assert not holds(folder, first)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + skew_s)
    assert [holds(folder, one) for one in (other, first, other, first)] == [False, True, False, True]


def test_a_janitor_that_has_lost_the_lease_stops(folder: Path) -> None:
    put(store(folder).connect(), {b"%d" % number: b"value!" for number in range(9)})
    its = holder(folder)
    assert its.step() == SLICE_PAUSE_S
    age(the_lease(folder), janitor.OLD_S + 1)
    other = JanitorLease()
    holds(folder, other)
    assert its.step() == TRY_S


def test_a_file_that_cannot_be_removed_stays_and_others_go_instead(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named until it is gone, also by passes that remove nothing; a pass in vain is followed by a pause."""
    names = [b"%d" % number for number in range(30)]
    put(store(folder).connect(), {name: content(1, 100_000) for name in names})
    for number, name in enumerate(names):
        age(place(folder, name), (30 - number) * HOUR_S)
    real, stuck = os.unlink, {file_name(names[0]), file_name(names[3])}

    def unlink(name: str, *, dir_fd: int | None = None) -> None:
        if name in stuck:
            raise PermissionError(errno.EPERM, "Operation not permitted", name)
        real(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink)
    its = holder(folder, "?size=2MiB")
    for _ in range(3):
        one_pass(its)
        assert left(folder, names) == [names[0], names[3], *names[-17:]]
        assert its.stuck.startswith("files of the shared folder cannot be removed, such as ")
        assert min(place(folder, names[0]), place(folder, names[3])).as_posix() in its.stuck
    stuck |= {file_name(name) for name in names}
    put(store(folder).connect(), {b"more%d" % number: content(1, 100_000) for number in range(20)})
    stuck |= {file_name(b"more%d" % number) for number in range(20)}
    its.step()
    while (pause_s := its.step()) == SLICE_PAUSE_S:
        pass
    assert pause_s == janitor.PASS_PAUSE_S
    stuck.clear()
    one_pass(its)
    one_pass(its)
    assert its.stuck == ""


@pytest.mark.parametrize(
    ("kind", "call"), [*product(["value", "draft", "all"], ["stat", "unlink"]), ("folder", "open")]
)
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_damaged_file_or_folder_does_not_end_a_pass_but_a_damaged_file_system_does(
    folder: Path, kind: str, call: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [b"%d" % number for number in range(30)]
    put(store(folder).connect(), dict.fromkeys(names, b"value!"))
    draft = folder / OURS / "tmp" / "host-1-a"
    draft.write_bytes(b"left")
    for path in [draft, *(place(folder, name) for name in names)]:
        age(path, 2 * HOUR_S)
    files = [file_name(name) for name in names]
    bad = {"value": files[:1], "draft": [draft.name], "folder": [fan_out(names[0])], "all": files}[kind]
    its = holder(folder, "?ttl=1h")
    real = getattr(os, call)

    def fail(path: object, *rest: object, **more: object) -> object:
        if path in bad:
            raise OSError(number, os.strerror(number), path)
        return real(path, *rest, **more)

    monkeypatch.setattr(os, call, fail)
    if kind == "all":
        with pytest.raises(OSError, match=os.strerror(number)):
            one_pass(its)
        return
    one_pass(its)
    gone = [name for name in names if kind == "draft" or fan_out(name) != fan_out(names[0])]
    assert left(folder, gone) == []
    assert its.stuck.startswith("files of the shared folder cannot be removed, such as ")
    assert os.strerror(number) in its.stuck


@pytest.mark.parametrize("new_host", [False, True])
@pytest.mark.parametrize(("options", "lacks"), [("1m,nr_inodes=40", "no inodes left"), ("300k", "make room")])
def test_a_full_disk_is_cleaned_up(mount: Callable[[str], Path], options: str, lacks: str, new_host: bool) -> None:
    """Also by a host that has to take over the lease first, as after a restart."""
    folder = mount(options)
    its = holder(folder, "?ttl=1h")
    names = [b"%d" % number for number in range(100)]
    with pytest.raises(StoreError, match=lacks):
        put(store(folder).connect(), dict.fromkeys(names, content(1, 5000)))
    for name in left(folder, names):
        age(place(folder, name), 2 * HOUR_S)
    if new_host:
        with pytest.raises(OSError, match="No space left"):
            (folder / "theirs").write_bytes(bytes(1 << 20))
        age(the_lease(folder), janitor.OLD_S + 1)
        its = holder(folder, "?ttl=1h")
    one_pass(its)
    assert left(folder, names) == []


@pytest.mark.parametrize("kind", ["link", "hard link", "shorter"])
def test_where_no_room_is_left_only_an_old_lease_is_written_over(
    folder: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else stands in its place may be somebody's file."""
    put(store(folder).connect(), {b"a": b"value!"})
    theirs = tmp_path / "theirs"
    theirs.write_bytes(content(1, 256 if kind != "shorter" else 100))
    if kind == "link":
        the_lease(folder).symlink_to(theirs)
    else:
        os.link(theirs, the_lease(folder))
    before = theirs.read_bytes()
    if kind == "shorter":
        theirs.unlink()
    age(the_lease(folder), janitor.OLD_S + 1)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(OSError, match="No space left"):
        holds(folder, JanitorLease())
    assert the_lease(folder).read_bytes() == before
    assert os.listdir(folder / OURS / "tmp") == []


def test_what_is_not_well_is_told_until_it_is_taken_and_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The way to the daemon may be full for a moment."""

    class Over(Exception):
        pass

    told: list[str] = []
    slept = 0
    folder = tmp_path / "kv"

    def sleep(_: float) -> None:
        nonlocal slept
        slept += 1
        if slept == 4:
            folder.mkdir()
        if slept == 8:
            raise Over

    def tell(text: str) -> bool:
        told.append(text)
        return len(told) % 2 == 0

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(Over):
        Janitor(store(folder).settings).run(tell)
    assert [text[:39] for text in told] == ["the shared folder is not cleaned up at "] * 2 + [""] * 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
