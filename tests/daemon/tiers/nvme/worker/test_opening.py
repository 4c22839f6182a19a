"""Directories that are opened: caps and segments, files that are not what they should be, and who is refused."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from chains import chain_of
from keeper_rig import filled, found, states
from played import play, played
from tier_rig import TierRig

from tiercache.daemon.tiers.nvme.disk.superblock import FORMAT_VERSION, Superblock
from tiercache.daemon.tiers.nvme.worker.opening import fitted_segment_bytes

MIB = 1 << 20


def used_bytes(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("cap_bytes", [16 * MIB, 16 * MIB + 12345, 64 * MIB + 1, 1 << 40])
def test_segments_fit_under_the_cap(cap_bytes: int) -> None:
    fitted = fitted_segment_bytes(cap_bytes, 1 << 30)
    assert fitted % 4096 == 0
    assert fitted <= min(1 << 30, cap_bytes - cap_bytes // 64)
    assert fitted_segment_bytes(cap_bytes, 2 * MIB) == 2 * MIB


@pytest.mark.parametrize("may_shrink", [True, False])
@played
async def test_a_smaller_cap_takes_segments_away_when_that_is_allowed(
    tmp_path: Path, may_shrink: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rig = await TierRig(tmp_path, nvme_bytes=64 * MIB).open()
    chains = [chain_of(str(number), 20) for number in range(20)]
    for chain in chains:
        rig.store(rig.namespace(), chain)
        await rig.settled()
    await rig.close()
    again = await TierRig(tmp_path, nvme_bytes=16 * MIB, nvme_shrink=may_shrink).open()
    assert (used_bytes(again.dirs[0]) <= 16 * MIB) is may_shrink
    loaded = sum([await again.load(again.namespace(), chain) for chain in chains])
    assert 0 < loaded < 400 if may_shrink else loaded == 400
    [directory] = again.tier.stats()["directories"]
    assert (directory["kept_bytes"] == 0) is may_shrink
    told = "with 176 blocks: they are kept. To delete them: --nvme-shrink yes" in caplog.text
    assert told is not may_shrink
    again.store(again.namespace(), chain_of("more", 20))
    await again.settled()
    again.check()
    await again.close()


# --- files that are not what they should be ---------------------------------------------------------


def _link(path: Path) -> None:
    target = path.with_name("precious")
    target.write_bytes(b"precious" * 1000)
    path.symlink_to(target)


KINDS: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: None,
    "folder": Path.mkdir,
    "link": _link,
    "pipe": os.mkfifo,
    "empty": Path.touch,
}
FILES = (
    "lock",
    "superblock",
    "superblock.new",
    "segments",
    "segments/00000001.seg",
    "index.db",
    "index.db-wal",
    "index.db-shm",
    "index.db.suspect",
    "index.db.damaged-20200101T000000Z",
    "damaged-20200101T000000Z",
    "spare",
    "probe",
)


@pytest.fixture(scope="module")
def lived_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of an earlier life, to be copied."""
    root = tmp_path_factory.mktemp("earlier")

    async def scenario() -> None:
        rig = await filled(root, disks=1)
        await rig.crash()

    play(scenario)
    return root / "nvme0"


@pytest.mark.stress
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", FILES)
def test_whatever_stands_for_a_file_costs_blocks_and_nothing_else(
    tmp_path: Path, lived_in: Path, file: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is used, with fewer blocks or none; or it is not, and the reason names the file until that is gone."""
    directory = tmp_path / "nvme0"
    shutil.copytree(lived_in, directory)
    place = directory / file
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    KINDS[kind](place)

    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        strange = kind in ("folder", "link", "pipe") if file == "lock" else kind == "folder" and file == "probe"
        assert bool(rig.shelves) is not strange
        if rig.shelves:
            await rig.loaded()
        else:
            [reason] = rig.tier.reasons()
            assert f": {Path(file).name}: " in reason
            if kind == "folder":
                place.rmdir()
            else:
                place.unlink()
            await rig.until(lambda: states(rig) == ["ok"])
        assert set(await found(rig)) <= {0, 8}
        await rig.store_below([rig.namespace()], chain_of("new", 4))
        assert await rig.load(rig.namespace(), chain_of("new", 4)) == 4
        rig.check()
        await rig.close()

    play(scenario)
    if kind == "link":
        precious = place.with_name("precious")
        assert not precious.exists() or precious.read_bytes() == b"precious" * 1000
    assert "Traceback" not in caplog.text


# --- daemons that are refused -----------------------------------------------------------------------


def newer_superblock() -> bytes:
    """A superblock of a later version."""
    data = bytearray(Superblock.new(1 << 20).encode())
    data[8:12] = struct.pack("<I", FORMAT_VERSION + 1)
    data[-8:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(data[:-8]))
    return bytes(data)


@pytest.mark.parametrize("place", ["below a file", "open to all users", "newer", "in use"])
def test_a_directory_that_cannot_be_used_is_one_line_and_stays_as_it_is(tmp_path: Path, place: str) -> None:
    path, rig = tmp_path / "nvme0", TierRig(tmp_path)
    if place == "below a file":
        path.write_text("")
        path = path / "below"
    elif place == "open to all users":
        path.mkdir()
        path.chmod(0o1777)
    elif place == "newer":
        path.mkdir()
        (path / "superblock").write_bytes(newer_superblock())
        (path / "index.db").write_bytes(b"of a later version")

    async def scenario() -> None:
        if place == "in use":
            await rig.open()
        before = {one: one.read_bytes() for one in path.glob("*")} if place == "newer" else {}
        command = [sys.executable, "-m", "tiercache.daemon", "--run-dir", str(tmp_path / "run"), "--arena", "4MiB"]
        command += ["--nvme", str(path), "--nvme-size", "64MiB"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        said = (done.stdout + done.stderr).splitlines()
        (line,) = [line for line in said if "tiercache daemon: " in line or "Traceback" in line]
        assert str(path) in line
        assert (f"another daemon (pid {os.getpid()}) uses nvme directory" in line) is (place == "in use")
        assert all(one.read_bytes() == data for one, data in before.items()), "nothing was changed"
        await rig.close()

    play(scenario)
