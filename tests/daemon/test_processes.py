"""Threads of a daemon and its children: as many as it asks for before it serves, at most."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from raw_client import Client, daemon
from waiting import wait_until

from tiercache.config.daemon_config import load_config
from tiercache.copies.arena import Beside
from tiercache.daemon.processes import beside_arena, threads_needed
from tiercache.daemon.tiers.shared.stores.folder.settings import CONNECTIONS

FIRST_AND_LOG = 2


def threads_of(pid: int) -> int:
    """Of a process and its children."""
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    children: set[int] = set()
    for task in tasks:
        with suppress(FileNotFoundError):  # it has just ended
            children |= {int(child) for child in (task / "children").read_text().split()}
    return len(tasks) + sum(threads_of(child) for child in children)


@pytest.mark.parametrize(("workers", "io"), [("on", "auto"), ("off", "threads")])
def test_no_daemon_has_more_threads_than_it_asks_for(tmp_path: Path, workers: str, io: str) -> None:
    flags = {
        "arena": "4MiB",
        "nvme": f"{tmp_path}/a:64MiB,{tmp_path}/b:64MiB",
        "nvme_workers": workers,
        "nvme_io": io,
        "shared": f"file://{tmp_path}/shared",
        "shared_plain": "yes",
        "http": "127.0.0.1:0",
        "record": f"{tmp_path}/recording",
        "kv_events": f"ipc://{tmp_path}/events",
    }
    (tmp_path / "shared").mkdir()
    needed = threads_needed(load_config(env={}, flags=flags), CONNECTIONS) + FIRST_AND_LOG
    words = [word for key, value in flags.items() for word in (f"--{key.replace('_', '-')}", value)]
    with daemon(tmp_path / "run", *words) as running, Client(tmp_path / "run") as client:
        client.await_arena()
        wait_until(lambda: client.stats()["health"]["state"] == "ok", "all parts")
        assert needed // 3 < threads_of(running.process.pid) <= needed


def test_what_needs_memory_beside_the_arena_follows_from_the_settings() -> None:
    def beside(**flags: str) -> Beside:
        return beside_arena(load_config(env={}, flags=flags))

    assert beside() == Beside()
    assert beside(http="127.0.0.1:1", shared="valkey://h", shared_plain="yes") == Beside(http=True)
    assert beside(nvme="/a,/b", nvme_workers="on", shared="file:///s", shared_plain="yes") == Beside(
        workers=2, folder_connections=4
    )
    assert beside(shared="file:///s?connections=64", shared_plain="yes") == Beside(folder_connections=64)
    wrong = beside(shared="file:///s?connections=none", shared_plain="yes")
    assert wrong == Beside(folder_connections=4), "the store itself says what is wrong"
