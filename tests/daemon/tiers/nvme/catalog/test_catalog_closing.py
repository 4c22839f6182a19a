"""A catalog that closes where its path leads to another one by now."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tiercache.daemon.tiers.nvme.catalog.catalog import Catalog


def catalog_in(folder: Path) -> Catalog:
    return Catalog(folder, b"i" * 16, lambda call, *args: call(*args))


def hot_catalog(folder: Path) -> Catalog:
    """A directory with a row that is only in its database's log."""
    folder.mkdir()
    catalog = catalog_in(folder)
    catalog.open()
    catalog.set_segment(7, 4096)
    assert catalog.sync(30)
    return catalog


def test_a_database_that_leaves_touches_nothing_at_its_path(tmp_path: Path) -> None:
    """SQLite removes the log by its name when it closes, but not where another file has come instead of its own."""
    home = tmp_path / "nvme"
    catalog = hot_catalog(home)
    home.rename(tmp_path / "elsewhere")
    home.mkdir()
    for name in ("index.db", "index.db-wal", "index.db-shm"):
        (home / name).write_bytes(b"of another one")
    catalog.close(30)
    assert {path.name: path.read_bytes() for path in home.iterdir()} == dict.fromkeys(
        ("index.db", "index.db-wal", "index.db-shm"), b"of another one"
    )


def test_the_log_of_a_new_disk_outlives_the_database_of_the_old_one(mount: Callable[[str], Path]) -> None:
    """Two file systems that were made alike have the same inode numbers, which is all that SQLite compares."""
    place = mount("8m")
    old = hot_catalog(place / "kv")
    number = (place / "kv/index.db").stat().st_ino
    subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=30)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], check=True, timeout=30)
    child = "from test_catalog_closing import Path, hot_catalog, os; hot_catalog(Path('kv')); os._exit(0)"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    subprocess.run([sys.executable, "-c", child], cwd=place, env={**os.environ, "PYTHONPATH": path}, check=True)
    assert (place / "kv/index.db").stat().st_ino == number
    old.close(30)
    again = catalog_in(place / "kv")
    assert again.open().segments == {7: 4096}
    again.close(30)
