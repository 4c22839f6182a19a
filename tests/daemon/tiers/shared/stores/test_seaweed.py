"""Object stores on SeaweedFS: what rclone's server of S3 does differently, or does not do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from s3_rig import KEY, SECRET
from seaweed_rig import SeaweedServer
from store_calls import content, put, read, room, soon
from waiting import wait_until

from tiercache.daemon.tiers.shared.stores.objects.store import ObjectsStore
from tiercache.daemon.tiers.shared.stores.store import Connection, Fate, StoreError, StoreProblem

pytestmark = pytest.mark.stress
pytest.importorskip("obstore", reason="needs Python 3.11 or later")

Connect = Callable[[str], Connection]


@pytest.fixture(scope="module")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    server = SeaweedServer(tmp_path_factory.mktemp("seaweed") / "s3")
    yield server
    server.end()


@pytest.fixture
def connect(seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    made: list[ObjectsStore] = []

    def connect(prefix: str) -> Connection:
        made.append(ObjectsStore(seaweed.url(prefix)))
        return made[-1].connect()

    yield connect
    for one in made:
        one.close()
    wait_until(lambda: "object store" not in {thread.name for thread in threading.enumerate()}, "the thread to end")


def test_values_and_notes_go_there_and_back(connect: Connect) -> None:
    here, there = connect("both"), connect("both")
    values = {b"tc1:x:1": content(1, 2 << 20), b"small": content(2, 6), b"a/b c": content(3, 70_000), b"..": b"9" * 9}
    assert put(here, values) == [Fate.DONE] * 4
    assert read(there, [*values, b"never"], 5, 2 << 20) == [*values.values(), Fate.MISSING]
    assert read(there, [b"small", b"tc1:x:1"], 5, 100) == [values[b"small"], Fate.MISFIT]
    assert there.exists([b"never", *values], [b"epoch"], soon()) == ([False] + [True] * 4, [None])
    assert put(there, {b"small": b"replaced"}) == [Fate.DONE]
    assert read(here, [b"small"]) == [b"replaced"]
    assert here.get([room(b"small", 1, 9)], [b"epoch", b"other"], soon()) == [None, None]
    here.delete([*values, b"never"], soon())
    assert there.exists([*values], [], soon()).there == [False] * 4


def test_a_note_that_many_make_at_once_is_one(connect: Connect) -> None:
    """It answers If-None-Match, as Amazon's S3 does and rclone's server does not."""
    lines = [connect("notes") for _ in range(4)]
    got: list[bytes] = []
    threads = [
        threading.Thread(target=lambda n=n, line=line: got.append(line.set_note(b"n", b"%d" % n, soon(), True)))  # type: ignore[misc]
        for n, line in enumerate(lines)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 4
    assert len(set(got)) == 1
    assert {line.exists([], [b"n"], soon()).notes[0] for line in lines} == set(got)
    assert lines[0].set_note(b"n", b"new", soon()) == b"new"
    assert lines[1].set_note(b"n", b"late", soon(), only_if_missing=True) == b"new"


def test_a_part_of_a_pack_is_read(connect: Connect) -> None:
    line = connect("ranges")
    pack = content(5, 300_000)
    put(line, {b"pack": pack})
    for offset in (1, 4096, 299_990):
        assert read(line, [b"pack"], 4, 100, offset) == [pack[offset : offset + 104]]
    assert read(line, [b"pack", b"never"], 4, 100, 300_001) == [Fate.MISFIT, Fate.MISSING]


@pytest.mark.parametrize(("name", "text"), [("AWS_SECRET_ACCESS_KEY", "rotated"), ("AWS_ACCESS_KEY_ID", "nobody")])
def test_wrong_credentials_are_told(connect: Connect, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(name, text)
    line = connect("denied")
    calls: list[Callable[[], Any]] = [
        lambda: read(line, [b"x"]),
        lambda: put(line, {b"x": b"value!"}),
        lambda: line.exists([b"x"], [], soon()),
        lambda: line.set_note(b"n", b"1", soon()),
    ]
    for call in calls:
        with pytest.raises(StoreError) as caught:
            call()
        assert caught.value.problem is StoreProblem.DENIED
        assert "AWS_SECRET_ACCESS_KEY" in caught.value.text
        assert SECRET not in caught.value.text
