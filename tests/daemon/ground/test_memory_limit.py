"""How large an arena may be on this host."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tiercache.config.daemon_config import DaemonConfig
from tiercache.copies import arena
from tiercache.copies.arena import Beside
from tiercache.daemon.ground.regions import check_fits
from tiercache.errors import ArenaError, ConfigError
from tiercache.ground.units import parse_bytes

GIB = 1 << 30


def have(monkeypatch: pytest.MonkeyPatch, total: int, available: int = 0, cgroups: tuple[int, ...] = ()) -> None:
    """The host has this memory, and each cgroup so much."""
    monkeypatch.setattr(arena, "_meminfo_bytes", {"MemTotal:": total, "MemAvailable:": available}.__getitem__)
    monkeypatch.setattr(arena, "_cgroup_limits", lambda: iter([(Path("/"), limit, "") for limit in cgroups]))


@pytest.mark.parametrize("arena_gib", [1, 8, 32, 500])
@pytest.mark.parametrize("beside", [Beside(), Beside(workers=4), Beside(workers=2, http=True, folder_connections=4)])
def test_the_sum_in_the_operators_guide_is_enough_for_a_container(
    monkeypatch: pytest.MonkeyPatch, arena_gib: int, beside: Beside
) -> None:
    """The limit of a container holds for the daemon alone; the Helm chart gives 256 MiB beside worker processes."""
    arena_bytes = arena_gib * GIB
    others = (64 << 20) + beside.http * (64 << 20) + (beside.folder_connections > 0) * (96 << 20)
    assert others <= 256 << 20
    limit = arena_bytes + others + beside.workers * arena.worker_bytes(arena_bytes)
    have(monkeypatch, 1024 * GIB, 1024 * GIB, (limit, 900 * GIB))
    check_fits(arena_bytes, beside)
    with pytest.raises(ConfigError):
        check_fits(arena_bytes + (4 << 20), beside)


ALL = Beside(workers=2, http=True, folder_connections=4)
PARTS = "beside the arena need some of it the daemon 64.0 MiB, http 64.0 MiB, the helper of the shared folder 96.0 MiB"


@pytest.mark.parametrize(
    ("cgroups", "beside", "text"),
    [
        ((GIB,), Beside(http=True), 'write arena = "896MiB" or less, or raise that limit to 2176MiB'),
        ((GIB,), ALL, f"the cgroup / has 1.0 GiB, and {PARTS}, 2 worker processes 72.0 MiB: write arena = "),
        ((GIB,), Beside(folder_connections=64), "the helper of the shared folder 1.0 GiB: raise that limit to 3168MiB"),
        ((100 << 20,), Beside(workers=2), "2 worker processes 72.0 MiB: raise that limit to 2184MiB"),
        (
            (),
            Beside(),
            'this host has 2.0 GiB, 128.0 MiB of it for engines and the system, .*: write arena = "1856MiB"',
        ),
    ],
)
def test_a_refusal_says_which_limit_binds_and_what_would_fit(
    monkeypatch: pytest.MonkeyPatch, cgroups: tuple[int, ...], beside: Beside, text: str
) -> None:
    have(monkeypatch, 2 * GIB if not cgroups else 64 * GIB, 0, cgroups)
    with pytest.raises(ConfigError, match=rf'^arena = "2GiB": .*{text}') as told:
        check_fits(2 * GIB, beside)
    if advised := re.search(r'write arena = "(\d+MiB)"', str(told.value)):
        check_fits(parse_bytes(advised[1]), beside)
    if enough := re.search(r"raise that limit to (\w+)", str(told.value)):
        have(monkeypatch, 64 * GIB, 0, (parse_bytes(enough[1]),))
        check_fits(2 * GIB, beside)


def test_a_host_that_has_room_for_no_arena_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 128 << 20)
    with pytest.raises(ConfigError, match=r"this host has no room for one$"):
        check_fits(2 * GIB, Beside())


def test_more_than_the_host_has_is_refused_with_what_would_fit(tmp_path: Path) -> None:
    check_fits(arena.capacity().largest_arena_bytes(Beside()), Beside())
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
    assert arena.capacity() == (f"the cgroup {tmp_path}", 4 * GIB, 0)
    assert arena.available_bytes() == 2 * GIB


def test_a_region_is_only_made_where_some_memory_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 64 * GIB, GIB + (2 << 20) - 1)
    with pytest.raises(ArenaError, match=r"1\.0 GiB of it kept free; make the arena smaller"):
        arena.create_region(2 << 20)
