"""Two daemons as two hosts, over a real Valkey: it is killed, stopped and emptied, and they go on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_rig import BLOCKS, Host, content, flush, keys, started_by
from s3_rig import KEY, SECRET, RcloneServer
from seaweed_rig import SeaweedServer
from valkey_rig import ValkeyServer
from waiting import wait_until


@pytest.fixture
def valkey(full_valkey: ValkeyServer) -> ValkeyServer:
    return full_valkey


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "shared.key"
    path.write_text("5a" * 32)
    path.chmod(0o600)
    return str(path)


@pytest.fixture(autouse=True)
def brief() -> Iterator[None]:
    with started_by("brief_daemon.py"):
        yield


Make = Callable[..., Host]


@pytest.fixture
def make(tmp_path: Path, valkey: ValkeyServer, key_file: str) -> Iterator[Make]:
    hosts: list[Host] = []

    def make(store: str = "", **settings: str) -> Host:
        settings = settings or {"shared_key": key_file}
        hosts.append(Host(tmp_path / f"h{len(hosts)}", store or valkey.url, **settings))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


def test_a_prompt_of_one_host_is_a_hit_on_the_other(make: Make, valkey: ValkeyServer) -> None:
    a, b = make(), make()
    a.store("one")
    wait_until(lambda: a.shared("written_blocks") == BLOCKS)
    found = b.connector.match(keys("one"))
    assert found.blocks == BLOCKS
    b.connector.release(found)
    assert b.load("one") == BLOCKS
    assert b.load("one") == BLOCKS
    assert b.shared("fetched_blocks") == BLOCKS
    # The store goes: what a host has it still serves, and new prompts are stored on this host.
    valkey.kill()
    assert b.load("one") == BLOCKS
    b.store("two")
    assert b.load("two") == BLOCKS
    a.forget_dram()
    assert a.load("one") == 0
    assert a.load("two") == 0
    wait_until(lambda: a.load("one") == 0 and b.stats()["health"]["state"] == "degraded")
    # It comes back, empty.
    valkey.start()
    wait_until(lambda: a.stats()["health"]["state"] == b.stats()["health"]["state"] == "ok")
    a.store("three")
    wait_until(lambda: b.load("three") == BLOCKS)


@pytest.mark.stress
def test_a_store_that_stops_answering_stops_no_host(make: Make, valkey: ValkeyServer) -> None:
    a, b = make(), make()
    a.store("one")
    wait_until(lambda: a.shared("written_blocks") == BLOCKS)
    valkey.stop()
    try:
        for number in range(5):
            assert b.load(f"x{number}") == 0
        b.store("two")
        assert b.load("two") == BLOCKS
        wait_until(lambda: b.load("one") == 0 and b.stats()["health"]["state"] == "degraded")
    finally:
        valkey.go_on()
    wait_until(lambda: b.load("one") == BLOCKS)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["--shared", "valkey://127.0.0.1:1"], "set shared_key"),
        (["--shared", "nonsense"], "is no URL"),
        (["--shared", "nosuch://host", "--shared-plain", "yes"], "no kind of store is called 'nosuch'"),
        (["--shared", "valkey://u:secret-word@h:99999", "--shared-plain", "yes"], "port"),
        (["--shared", "valkey://h", "--shared-key", "/nonexistent/key"], "shared_key /nonexistent/key cannot be read"),
        (["--shared", "valkey://h", "--shared-plain", "yes", "--shared-deployment", "a:b"], "must be 1 to 64 letters"),
    ],
)
def test_a_mistake_is_told_before_the_daemon_serves(tmp_path: Path, settings: list[str], says: str) -> None:
    command = [sys.executable, "-m", "tiercache.daemon", "--run-dir", str(tmp_path / "run"), "--arena", "8MiB"]
    ended = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert ended.returncode == 2
    assert says in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert "secret-word" not in ended.stderr


def test_nvme_has_the_beginning_and_the_store_the_rest(make: Make, tmp_path: Path, key_file: str) -> None:
    half = BLOCKS // 2
    a = make()
    b = make(shared_key=key_file, nvme=str(tmp_path / "nvme"), nvme_size="64MiB", shared_write="evicted")
    b.pool[:] = content("one")
    assert b.connector.store(keys("one")[: 16 * half], list(range(half))).stored == half
    wait_until(lambda: b.stats()["tiers"]["nvme"]["blocks"] == half)
    b.forget_dram()
    a.store("one")
    wait_until(lambda: a.shared("written_blocks") == BLOCKS)
    assert b.load("one") == BLOCKS
    assert b.stats()["tiers"]["nvme"]["promoted_blocks"] == half
    assert b.shared("fetched_blocks") == BLOCKS - half
    # What came from the store is on NVMe then, as what a client stores.
    wait_until(lambda: b.stats()["tiers"]["nvme"]["blocks"] == BLOCKS)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An object store, by rclone."""
    pytest.importorskip("obstore")
    server = RcloneServer(tmp_path / "s3")
    try:
        server.wait()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        yield server.url("kv")
    finally:
        server.end()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    path = tmp_path / "folder"
    path.mkdir()
    return f"file://{path}"


@pytest.fixture
def seaweed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An object store, by SeaweedFS."""
    pytest.importorskip("obstore")
    server = SeaweedServer(tmp_path / "seaweed")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    yield server.url("kv")
    server.end()


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("bucket", BLOCKS // 16 * 16),
        ("folder", BLOCKS),
        pytest.param("seaweed", BLOCKS // 16 * 16, marks=pytest.mark.stress),
    ],
)
def test_hosts_share_other_kinds_of_stores(
    kind: str, found: int, tmp_path: Path, key_file: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(kind)
    hosts = [Host(tmp_path / name, url, shared_key=key_file) for name in "ab"]
    try:
        a, b = hosts
        a.store("one")
        wait_until(lambda: a.shared("written_blocks") == found)
        wait_until(lambda: b.load("one") == found)
        assert b.shared("bad_blocks") == 0
        flush(a, "all")
        b.forget_dram()
        assert b.load("one") == 0
        b.store("one")
        wait_until(lambda: a.load("one") == found)
    finally:
        for one in hosts:
            one.close()
