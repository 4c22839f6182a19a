"""Faults of a shared store that need whole daemons: hanging names and file systems, kills, restarts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_rig import BLOCKS, Host, flush, started_by
from relay import Relay
from s3_rig import KEY, SECRET
from valkey_rig import ValkeyServer
from waiting import wait_until

import tiercache

BRIEF = "brief_daemon.py"


@pytest.fixture
def relay(one_valkey: ValkeyServer) -> Iterator[Relay]:
    assert one_valkey.ask("FLUSHALL") == b"+OK"
    with Relay(one_valkey.port) as one:
        yield one


@pytest.fixture
def own_namespaces() -> tuple[str, ...]:
    """Before a command: it has a network and mounts of its own, and may change them."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rnm", "true"], capture_output=True).returncode:
        pytest.skip("may not make namespaces here")
    return (unshare, "-rnm")


def serves_and_ends(host: Host, trouble: str) -> None:
    """It stores and loads, says what is wrong, and ends when it is told to."""
    host.store("one")
    assert host.load("one") == BLOCKS
    for number in range(4):
        assert host.load(f"x{number}") == 0
    wait_until(lambda: host.load("x") == 0 and host.stats()["health"]["state"] == "degraded", "the trouble is told")
    assert trouble in str(host.stats()["health"]), host.stats()["health"]
    host.connector.close()
    os.kill(host.daemon.pid, signal.SIGTERM)
    wait_until(lambda: host.daemon.poll() is not None, "the end of the daemon")
    assert host.daemon.poll() == 0


@pytest.mark.parametrize("url", ["valkey://store.test", "s3://bucket/kv?endpoint=http://store.test:80"])
def test_names_that_do_not_resolve(
    url: str, tmp_path: Path, own_namespaces: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name servers take every question, and answer none."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    if url.startswith("s3"):
        pytest.importorskip("obstore", reason="needs Python 3.11 or later")
    with started_by("troubled_daemon.py", "names", before=own_namespaces):
        host = Host(tmp_path / "run", url, shared_plain="yes")
    try:
        serves_and_ends(host, "in time" if url.startswith("s3") else "store.test")
    finally:
        host.close()


def test_a_file_system_that_hangs(tmp_path: Path, own_namespaces: tuple[str, ...]) -> None:
    """Whoever looks there is in the kernel's state D: neither a deadline nor SIGKILL ends it."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("no /dev/fuse")
    (tmp_path / "kv").mkdir()
    with started_by("troubled_daemon.py", "folder", str(tmp_path / "kv"), before=own_namespaces):
        host = Host(tmp_path / "run", f"file://{tmp_path}/kv", shared_plain="yes")
    try:
        serves_and_ends(host, "in time")
    finally:
        host.close()


def test_a_flush_of_a_store_that_is_away_outlives_kill_9(
    relay: Relay, one_valkey: ValkeyServer, tmp_path: Path
) -> None:
    """It is told by the next life of the daemon, which uses nothing of the store before."""
    settings = {"shared_plain": "yes", "shared_state": str(tmp_path / "state")}
    with started_by(BRIEF):
        a, b = Host(tmp_path / "a", relay.url, **settings), Host(tmp_path / "b", one_valkey.url, shared_plain="yes")
        try:
            a.store("one")
            wait_until(lambda: a.shared("written_blocks") == BLOCKS)
            relay.refuse()
            with pytest.raises(tiercache.RequestRefused, match="the flush is kept, across restarts too"):
                flush(a, "all")
            a.daemon.kill()
            a.close()
            assert b.load("one") == BLOCKS, "the store was told of it: there is nothing to test"
            a = Host(tmp_path / "a", relay.url, **settings)
            assert a.shared("flushes_waiting") == 1
            relay.accept()
            wait_until(lambda: a.shared("flushes_waiting") == 0, "the store is told")
            assert a.load("one") == 0
            b.forget_dram()
            assert b.load("one") == 0
        finally:
            a.close()
            b.close()


def test_a_daemon_that_is_killed_within_a_put(relay: Relay, one_valkey: ValkeyServer, tmp_path: Path) -> None:
    """What it had sent whole is good, and the value that it had not is none."""
    with started_by(BRIEF):
        a, b = (
            Host(tmp_path / name, url, shared_plain="yes") for name, url in (("a", relay.url), ("b", one_valkey.url))
        )
        try:
            a.store("first")
            wait_until(lambda: a.shared("written_blocks") == BLOCKS)
            relay.hold_requests(200_000)
            a.store("one")
            wait_until(lambda: relay.waiting > 0, "a value that is under way")
            a.daemon.kill()
            relay.refuse()
            assert b.load("one") < BLOCKS
            assert b.shared("bad_blocks") == 0
            assert b.load("first") == BLOCKS
        finally:
            a.close()
            b.close()
