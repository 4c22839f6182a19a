"""A directory in which something else stands for a file: it costs blocks, and nothing but these."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chains import chain_of
from keeper_rig import CHAINS, filled, found, states
from played import play, played
from tier_rig import TierRig

pytestmark = pytest.mark.usefixtures("soon")


def _missing(path: Path) -> None:
    return


def _link(path: Path) -> None:
    target = path.with_name("precious")
    target.write_bytes(b"precious" * 1000)
    path.symlink_to(target)


KINDS: dict[str, Callable[[Path], Any]] = {
    "missing": _missing,
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
            assert file in ("lock", "probe"), reason
            if kind == "folder":
                place.rmdir()
            else:
                place.unlink()
            await rig.until(lambda: states(rig) == ["ok"])
        assert set(await found(rig)) <= {0, 8}
        space, new = rig.namespace(), chain_of("new", 4)
        rig.store(space, new)
        await rig.settled()
        rig.forget_dram()
        assert await rig.load(space, new) == 4
        rig.check()
        await rig.close()

    play(scenario)
    if kind == "link":
        precious = place.with_name("precious")
        assert not precious.exists() or precious.read_bytes() == b"precious" * 1000
    assert "Traceback" not in caplog.text


@played
async def test_an_immutable_directory_is_away_until_it_is_not(tmp_path: Path, lived_in: Path) -> None:
    directory = tmp_path / "nvme0"
    shutil.copytree(lived_in, directory)
    paths = [str(directory), str(directory / "lock")]
    if subprocess.run(["chattr", "+i", *paths], capture_output=True, check=False).returncode:
        pytest.skip("this file system knows no immutable files")

    rig = await TierRig(tmp_path).open()
    try:
        [reason] = rig.tier.reasons()
        assert "see whether it is immutable (lsattr)" in reason
    finally:
        subprocess.run(["chattr", "-i", *paths], check=True)
    await rig.until(lambda: states(rig) == ["ok"])
    assert await found(rig) == [8] * len(CHAINS)
    await rig.close()
