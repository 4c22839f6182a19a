"""How large an arena may be on this host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tiercache.config.daemon_config import DaemonConfig
from tiercache.copies import arena
from tiercache.daemon.ground.regions import check_fits
from tiercache.errors import ArenaError, ConfigError

GIB = 1 << 30


def have(monkeypatch: pytest.MonkeyPatch, total: int, available: int = 0, cgroups: tuple[int, ...] = ()) -> None:
    """The host has this memory, and each cgroup so much."""
    monkeypatch.setattr(arena, "_meminfo_bytes", {"MemTotal:": total, "MemAvailable:": available}.__getitem__)
    monkeypatch.setattr(arena, "_cgroup_limits", lambda: iter([(Path("/"), limit, "") for limit in cgroups]))


@pytest.mark.parametrize("arena_gib", [1, 8, 32, 500])
@pytest.mark.parametrize("workers", [0, 4])
def test_the_sum_in_the_operators_guide_is_enough_for_a_container(
    monkeypatch: pytest.MonkeyPatch, arena_gib: int, workers: int
) -> None:
    """The limit of a container holds for the daemon alone; the Helm chart gives 192 MiB more than this sum."""
    arena_bytes = arena_gib * GIB
    limit = arena_bytes + (64 << 20) + workers * arena.worker_bytes(arena_bytes)
    have(monkeypatch, 1024 * GIB, 1024 * GIB, (limit, 900 * GIB))
    check_fits(arena_bytes, workers)
    with pytest.raises(ConfigError):
        check_fits(arena_bytes + (4 << 20), workers)


def test_more_than_the_host_has_is_refused_with_what_would_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'arena = "32TiB": this host, or the cgroup, has .*: write arena = "\d+MiB"'):
        check_fits(32 << 40)
    check_fits(arena.largest_arena_bytes())
    command = [sys.executable, "-m", "tiercache.daemon", "--run-dir", str(tmp_path / "run"), "--arena", "32TiB"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "write arena = " in ended.stderr
    assert not (tmp_path / "run").exists(), "nothing was begun"
    DaemonConfig(arena_bytes=32 << 40)  # a configuration for a larger host can be checked here


def test_the_tightest_cgroup_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits = [(tmp_path, 8 * GIB, "used"), (tmp_path, 4 * GIB, "used")]
    (tmp_path / "used").write_text(str(3 * GIB))
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\n")
    monkeypatch.setattr(arena, "_cgroup_limits", lambda: iter(limits))
    monkeypatch.setattr(arena, "_meminfo_bytes", {"MemTotal:": 64 * GIB, "MemAvailable:": 32 * GIB}.__getitem__)
    assert arena.capacity_bytes() == 4 * GIB
    assert arena.available_bytes() == 2 * GIB


def test_a_region_is_only_made_where_some_memory_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 64 * GIB, GIB + (2 << 20) - 1)
    with pytest.raises(ArenaError, match=r"1\.0 GiB of it kept free; make the arena smaller"):
        arena.create_region(2 << 20)
