"""Who owns a directory, what stays of it from life to life, and disks that are full or unusual."""

from __future__ import annotations

import errno
import logging
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
from disk_rig import ObedientDisk, segment_path

from tiercache.daemon.tiers.nvme.disk.directory import DATABASE_NAME, Directory, Home
from tiercache.daemon.tiers.nvme.disk.health import WriteHealth
from tiercache.daemon.tiers.nvme.disk.superblock import (
    SIZE_BYTES,
    DamagedSuperblock,
    Superblock,
)
from tiercache.errors import DirectoryUnavailable

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "nvme"


def opened(path: Path, segment_bytes: int = MIB, cap_bytes: int = 8 * MIB, **more: object) -> Directory:
    directory = Directory(path, cap_bytes, segment_bytes, **more)  # type: ignore[arg-type]
    directory.open()
    return directory


def lived_in(path: Path) -> bytes:
    """A directory with two segments and a database, closed; returns its id."""
    directory = opened(path)
    directory.create_segment(1)
    directory.create_segment(7)
    (path / DATABASE_NAME).write_bytes(b"rows")
    directory.close()
    return directory.superblock.directory_id


def asides(path: Path) -> list[Path]:
    return sorted(path.glob("damaged-*"))


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Fail a test in which the log has an unexpected line."""
    yield caplog
    assert [record.message for record in caplog.records if record.levelno > logging.WARNING] == []


# --- superblock ----------------------------------------------------------------------------------


def test_every_flipped_bit_of_a_superblock_is_found() -> None:
    data = Superblock(bytes(range(16)), 1 << 30, 1_700_000_000).encode()
    assert len(data) == SIZE_BYTES
    for bit in [*range(400), *range(400, 8 * SIZE_BYTES, 97), 8 * SIZE_BYTES - 1]:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedSuperblock):
            Superblock.decode(bytes(damaged))


@pytest.mark.parametrize(
    ("version", "alignment", "segment_bytes"),
    [(0, 4096, 1 << 30), (1, 512, 1 << 30), (1, 4096, 0), (1, 4096, 4097), (1, 4096, (64 << 30) + 4096)],
)
def test_a_superblock_of_another_geometry_is_damaged(version: int, alignment: int, segment_bytes: int) -> None:
    """With a good checksum: another program may have written it."""
    fields = version, alignment, bytes(16), segment_bytes, 0
    whole = Superblock(bytes(16), 1 << 30, 0).encode()
    body = (whole[:8] + struct.pack("<II16sQQ", *fields)).ljust(SIZE_BYTES - 8, b"\0")
    with pytest.raises(DamagedSuperblock, match="its geometry makes no sense"):
        Superblock.decode(body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body)))


# --- opening -------------------------------------------------------------------------------------


def test_a_new_directory_and_the_same_again(path: Path, quiet: pytest.LogCaptureFixture) -> None:
    directory = opened(path)
    assert (directory.is_new, directory.segments, directory.direct) == (True, [], True)
    assert sorted(file.name for file in path.iterdir()) == ["lock", "segments", "spare", "superblock"]
    assert path.stat().st_mode & 0o777 == 0o700
    directory.close()
    directory_id = lived_in(path)
    assert directory_id == directory.superblock.directory_id
    again = opened(path)
    assert (again.is_new, again.segments) == (False, [1, 7])
    assert again.superblock.directory_id == directory_id
    assert os.fstat(again.fd(7)).st_size == MIB
    assert quiet.records == []
    again.close()
    again.close()


def test_a_directory_that_cannot_be_begun_is_tried_again_and_left_as_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch, quiet: pytest.LogCaptureFixture
) -> None:
    """Its lock is free again, whatever fails, and nothing is put aside at each try."""

    def refuse(fd: int) -> None:
        raise failure

    monkeypatch.setattr(os, "fsync", refuse)
    for failure in (PermissionError(errno.EPERM, "Operation not permitted"), AssertionError("a defect")):
        with pytest.raises(DirectoryUnavailable if isinstance(failure, OSError) else AssertionError):
            opened(path)
        assert [file.name for file in path.iterdir() if file.name != "superblock.new"] == ["lock"]
    monkeypatch.undo()
    (path / "superblock.new").unlink()
    opened(path).close()


@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "gone"])
def test_without_a_good_superblock_all_is_put_aside_once(
    path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first_id = lived_in(path)
    (path / "damaged-20200101T000000Z").mkdir()
    block = path / "superblock"
    data = block.read_bytes()
    if damage == "gone":
        block.unlink()
    else:
        new = {"flipped": data[:40] + bytes([data[40] ^ 0xFF]) + data[41:], "short": data[:100], "empty": b""}
        block.write_bytes(new[damage])
    directory = opened(path)
    assert (directory.is_new, directory.segments) == (True, [])
    assert directory.superblock.directory_id != first_id
    (aside,) = asides(path)
    expected = {DATABASE_NAME, "segments"} | ({"superblock"} if damage != "gone" else set())
    assert {file.name for file in aside.iterdir()} == expected
    assert (aside / "segments" / "00000007.seg").stat().st_size == MIB
    assert "superblock not usable" in caplog.text
    directory.close()
    assert opened(path).is_new is False


def test_segments_of_the_wrong_size_are_dropped(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lived_in(path)
    segments = path / "segments"
    os.truncate(segments / "00000007.seg", MIB - 4096)
    (segments / "00000008.seg").touch()
    for name in ("notes.txt", "00000000.seg", "99999999.seg", "1.seg"):
        (segments / name).touch()
    directory = opened(path)
    assert directory.segments == [1]
    assert sorted(file.name for file in segments.iterdir()) == [
        "00000000.seg",
        "00000001.seg",
        "1.seg",
        "99999999.seg",
        "notes.txt",
    ]
    assert "00000007.seg has 1044480 bytes, not 1048576: dropped" in caplog.text
    directory.close()


@pytest.mark.parametrize("refuse_at", ["open", "preadv", "pwritev"])
def test_a_file_system_without_direct_io_is_used_through_the_cache(
    path: Path, refuse_at: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk = ObedientDisk(direct=refuse_at != "open")

    def hook(name: str, size: int) -> None:
        if name == refuse_at:
            raise OSError(errno.EINVAL, "Invalid argument")

    disk.hook = hook
    directory = opened(path, disk=disk)
    assert not directory.direct
    assert directory.direct_reason == "this file system refuses O_DIRECT (Invalid argument)"
    assert directory.direct_reason in caplog.text
    directory.create_segment(1)
    flags = int(Path(f"/proc/self/fdinfo/{directory.fd(1)}").read_text().split("flags:")[1].split()[0], 8)
    assert flags & os.O_DIRECT == 0
    assert not (path / "probe").exists()
    directory.close()


# --- segments ------------------------------------------------------------------------------------


def test_segments_come_and_go(path: Path) -> None:
    directory = opened(path)
    for segment_id in (2, 1, 32767):
        directory.create_segment(segment_id)
    assert directory.segments == [1, 2, 32767]
    stat = segment_path(directory, 2).stat()
    assert (stat.st_size, stat.st_mode & 0o777) == (MIB, 0o600)
    assert stat.st_blocks * 512 >= MIB  # all its room is there
    fd = directory.fd(2)
    directory.remove_segment(2)
    assert directory.segments == [1, 32767]
    assert not segment_path(directory, 2).exists()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    for call, number in [
        (lambda: directory.fd(2), errno.ENOENT),
        (lambda: directory.remove_segment(2), errno.ENOENT),
        (lambda: directory.create_segment(1), errno.EEXIST),
        (lambda: directory.create_segment(0), errno.EINVAL),
        (lambda: directory.create_segment(32768), errno.EINVAL),
    ]:
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == number
    assert directory.free_bytes() > 0
    directory.close()


def test_a_look_sees_segments_that_others_have_touched(path: Path) -> None:
    directory = opened(path, cap_bytes=100 * MIB)
    for number in range(1, 81):  # more than one look takes care of
        directory.create_segment(number)
    assert [directory.look() for _ in range(3)] == ["", "", ""]
    directory.remove_segment(80)
    segment_path(directory, 79).unlink()
    said = [directory.look(), directory.look()]
    assert "segments/00000079.seg was deleted while the daemon used it" in said
    directory.remove_segment(78)
    os.truncate(segment_path(directory, 3), 5)
    assert any("segments/00000003.seg was truncated" in directory.look() for _ in range(3))
    directory.close()


def test_the_cap_holds(path: Path) -> None:
    directory = opened(path, cap_bytes=3 * MIB, db_reserve_bytes=MIB // 2)
    assert directory.max_segments == 2
    directory.create_segment(1)
    directory.create_segment(2)
    with pytest.raises(OSError, match=r"cap of 3\.0 MiB") as caught:
        directory.create_segment(3)
    assert caught.value.errno == errno.ENOSPC
    directory.remove_segment(1)
    directory.create_segment(3)
    directory.close()
    smaller = opened(path, cap_bytes=MIB)  # a lower cap keeps what is there; the owner removes segments
    assert (smaller.segments, smaller.max_segments) == ([2, 3], 1)
    smaller.close()


@pytest.mark.parametrize("fail_at", ["open", "fallocate"])
def test_a_segment_that_cannot_be_made_leaves_nothing(path: Path, fail_at: str) -> None:
    disk = ObedientDisk()
    directory = opened(path, disk=disk)
    open_files = len(os.listdir("/proc/self/fd"))

    def hook(name: str, size: int) -> None:
        if name == fail_at:
            raise OSError(errno.ENOSPC, "full")

    disk.hook = hook
    disk.direct = fail_at != "open"
    with pytest.raises(OSError, match=r"full|Invalid"):
        directory.create_segment(1)
    assert directory.segments == []
    assert list((path / "segments").iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == open_files
    disk.hook, disk.direct = lambda name, size: None, True
    directory.create_segment(1)
    assert directory.segments == [1]
    directory.close()


def test_the_folder_below_a_mount_that_has_gone_is_not_taken_for_the_directory(
    tmp_path: Path, mount: Callable[[str], Path]
) -> None:
    disk = mount("40m")
    disk.chmod(0o700)
    directory = Directory(disk, 32 * MIB, MIB)
    directory.open()
    home = directory.home
    assert home is not None
    assert home.device_below == tmp_path.stat().st_dev
    directory.close()
    again = Directory(disk, 32 * MIB, MIB, before=home)
    again.open()
    again.close()
    folder = tmp_path / "folder"
    folder.mkdir()
    below = Home(home.directory_id, folder.stat().st_dev)
    with pytest.raises(DirectoryUnavailable, match="its file system is not mounted any more: mount it"):
        Directory(folder, 32 * MIB, MIB, before=below).open()
    assert list(folder.iterdir()) == []


def test_writing_pauses_longer_after_each_failure() -> None:
    now = [0.0]
    health = WriteHealth("a disk", lambda: now[0])
    for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
        assert health.may_write
        health.failed("EIO")
        health.failed("EIO")  # was already under way: it counts, and changes nothing
        health.worked()
        assert not health.may_write
        now[0] += pause_s - 0.5
        assert not health.may_write
        now[0] += 0.5
    assert health.failures == 16
    health.worked()
    assert health.reason == ""
    health.failed("EIO")
    now[0] += 1
    assert health.may_write
