"""Fixtures of these tests; the rigs beside it are for the folders below, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from s3_rig import KEY, SECRET, RcloneServer
from stored import Stored, StoredInBucket, StoredInFolder, StoredInValkey
from valkey_rig import ValkeyServer

from tiercache.daemon.tiers.shared import presence


@pytest.fixture
def full_valkey() -> Iterator[ValkeyServer]:
    """A real server that drops what expires first when it is full."""
    with ValkeyServer("--maxmemory", "256mb", "--maxmemory-policy", "volatile-ttl") as server:
        yield server


@pytest.fixture
def nothing_is_missing_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the store lacked a moment ago is asked for again."""
    monkeypatch.setattr(presence, "NO_CLAIM_S", 0.0)


@pytest.fixture(scope="module")
def one_valkey() -> Iterator[ValkeyServer]:
    """A real server for the tests of a file."""
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="module")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RcloneServer]:
    """A real server of S3 for the tests of a file."""
    pytest.importorskip("obstore", reason="needs Python 3.11 or later")
    server = RcloneServer(tmp_path_factory.mktemp("s3"))
    try:
        server.wait()
        yield server
    finally:
        server.end()


@pytest.fixture
def bucket(rclone: RcloneServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., StoredInBucket]:
    """Makes a store of objects, with so many blocks in each."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return lambda pack=1: StoredInBucket(rclone, tmp_path.name, pack)


@pytest.fixture(params=["valkey", "folder", "bucket"])
def stored_in(request: pytest.FixtureRequest, tmp_path: Path) -> Stored:
    """Each kind of real store that needs little to start, empty."""
    if request.param == "folder":
        (tmp_path / "kv").mkdir()
        return StoredInFolder(tmp_path / "kv")
    if request.param == "bucket":
        made: StoredInBucket = request.getfixturevalue("bucket")()
        return made
    in_valkey = StoredInValkey(request.getfixturevalue("one_valkey"))
    in_valkey.empty()
    return in_valkey
