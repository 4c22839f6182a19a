"""What `store.py` promises, on every kind of store: in memory, in Valkey, in a folder, in a bucket, behind a helper."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from memory_store import MemoryStore
from s3_rig import KEY, SECRET, FakeServer, RcloneServer
from store_calls import content, put, read, room, soon, value_of
from valkey_rig import ValkeyServer, valkey_cluster

from tiercache.daemon.tiers.shared.stores import open_store
from tiercache.daemon.tiers.shared.stores.folder.connection import FolderStore
from tiercache.daemon.tiers.shared.stores.helper.connection import HelperStore
from tiercache.daemon.tiers.shared.stores.store import (
    MAX_NOTE_BYTES,
    Connection,
    Fate,
    Get,
    Put,
    SharedStore,
    StoreError,
    StoreProblem,
)

Open = Callable[[], SharedStore]
Make = Callable[..., HelperStore]
Connect = Callable[[], Connection]


@contextlib.contextmanager
def stores_of(kind: str, folder: Path, make: Make) -> Iterator[Open]:
    """Opens a store of this kind again and again, as hosts do."""
    folder.mkdir()
    if kind == "memory":
        one = MemoryStore()
        yield lambda: one
    elif kind == "folder":
        yield lambda: FolderStore(f"file://{folder}")
    elif kind == "helper":
        yield lambda: make(f"file://{folder}")
    elif kind == "cluster":
        with valkey_cluster() as nodes:
            yield lambda: open_store(f"valkey+cluster://127.0.0.1:1,127.0.0.1:{nodes[1].port}")
    elif kind.startswith("valkey"):
        with ValkeyServer() as valkey:
            url = {
                "valkey": valkey.url,
                "valkey by name": f"valkey://localhost:{valkey.port}/3",
                "valkey by socket": valkey.unix_url,
            }
            yield lambda: open_store(url[kind])
    else:
        pytest.importorskip("obstore", reason="needs Python 3.11 or later")
        server = FakeServer() if kind == "bucket" else RcloneServer(folder)
        if isinstance(server, RcloneServer):
            server.wait()
        url_of = server.url() if isinstance(server, FakeServer) else server.url("kv")
        try:
            yield lambda: open_store(url_of)
        finally:
            server.end()


IN_STRESS = [pytest.param(one, marks=pytest.mark.stress) for one in ("cluster", "rclone")]
KINDS = ["memory", "valkey", "valkey by name", "valkey by socket", "folder", "helper", "bucket", *IN_STRESS]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def connect(
    kind: str, tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Connection]]:
    """Connections of different hosts to one empty store."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    opened: list[tuple[SharedStore, Connection]] = []

    def connect() -> Connection:
        store = open_one()
        opened.append((store, store.connect()))
        return opened[-1][1]

    with stores_of(kind, tmp_path / "store", make) as open_one:
        yield connect
        for store, line in opened:
            line.close()
            store.close()


def test_values_of_all_sizes_come_back_on_another_host(connect: Connect) -> None:
    here, there = connect(), connect()
    sizes = (5, 6, 4095, 4096, 4097, 8192, 70_000, 131_077, 2 << 20, *range(3000, 3040))
    values = {b"tc1:d:%d" % number: content(number, size) for number, size in enumerate(sizes)}
    values |= {b"a/b c": content(90, 50), b"..": content(91, 50), b"x" * 1000: content(92, 50)}
    assert set(put(here, values)) == {Fate.DONE}
    assert read(there, [*values, b"never"], 5, 2 << 20) == [*values.values(), Fate.MISSING]
    assert put(there, {b"..": content(93, 70)}) == [Fate.DONE]
    assert read(here, [b".."]) == [content(93, 70)], "replaced"


def test_what_does_not_fit_is_a_misfit_and_costs_no_other_value(connect: Connect) -> None:
    line = connect()
    put(line, {b"%d" % size: content(size, size) for size in (5, 999, 1000, 1001, 100_000)})
    wanted = [Fate.MISFIT, content(999, 999), content(1000, 1000), Fate.MISFIT, Fate.MISFIT, content(1000, 1000)]
    assert read(line, [b"5", b"999", b"1000", b"1001", b"100000", b"1000"], 100, 900) == wanted


@pytest.mark.parametrize("kind", ["memory", "folder", "helper", "bucket", *IN_STRESS[1:]])
def test_a_part_of_a_value_is_read(connect: Connect) -> None:
    """Valkey keeps single blocks: nothing reads a part of them."""
    line, value = connect(), content(4, 10_000)
    put(line, {b"pack": value})
    for offset in (1, 4095, 4096, 9_990):
        assert read(line, [b"pack"], 4, 996, offset) == [value[offset : offset + 1000]]
        assert read(line, [b"pack"], 4, 20_000, offset) == [value[offset:]]
    assert read(line, [b"pack", b"never"], 5, 10, 9_996) == [Fate.MISFIT, Fate.MISSING]
    assert read(line, [b"pack"], 0, 1000, 20_000) == [Fate.MISFIT]
    whole, part = room(b"pack", 4, 996), room(b"pack", 4, 996)
    part.ranged = True
    line.get([whole, part], [], soon())
    assert (whole.fate, value_of(part)) == (Fate.MISFIT, value[:1000])


def test_many_names_keep_their_order(connect: Connect, kind: str) -> None:
    """More than fit into a message of the helper process, or may be under way at once."""
    line = connect()
    names = [b"%06d" % number + b"x" * 200 for number in range(60 if kind in ("bucket", "rclone") else 1000)]
    put(line, dict.fromkeys(names[::7], b"value!"))
    there = line.exists([*names, names[0]], [b"note"], soon())
    assert there == ([*(number % 7 == 0 for number in range(len(names))), True], [None])
    found = read(line, names[:50])
    assert found == [b"value!" if number % 7 == 0 else Fate.MISSING for number in range(50)]
    line.delete([*names[::7], b"never"], soon())
    assert not any(line.exists(names, [], soon()).there)


def test_notes(connect: Connect) -> None:
    here, there = connect(), connect()
    assert here.exists([], [b"n"], soon()).notes == [None]
    assert here.set_note(b"n", b"1", soon(), only_if_missing=True) == b"1"
    assert there.set_note(b"n", b"2", soon(), only_if_missing=True) == b"1"
    assert there.set_note(b"n", b"3", soon()) == b"3"
    assert [here.replicated_note(name, soon()) for name in (b"n", b"none")] == [b"3", None]
    here.set_note(b"empty", b"", soon())
    here.set_note(b"long", b"x" * MAX_NOTE_BYTES, soon())
    names, notes = [b"n", b"none", b"empty", b"long"], [b"3", None, b"", b"x" * MAX_NOTE_BYTES]
    for line in (here, there):
        assert line.exists([b"value"], names, soon()) == ([False], notes)
        assert line.get([], names, soon()) == line.put([], names, soon()) == notes
        assert line.get([room(b"value", 1, 9)], names, soon()) == notes
    there.delete([b"n"], soon())
    assert here.exists([], [b"n"], soon()).notes == [None]


def test_notes_are_told_before_the_values(connect: Connect) -> None:
    line, told = connect(), list[object]()
    line.set_note(b"n", b"7", soon())
    put(line, {b"v": b"value!"})
    gets = [room(b"v", 1, 9) for _ in range(20)]
    assert line.get(gets, [b"n"], soon(), lambda get: told.append(value_of(get)), told.extend) == [b"7"]
    assert told == [b"7"] + [b"value!"] * 20


def test_of_many_first_notes_at_once_one_stays(connect: Connect, kind: str) -> None:
    if kind == "rclone":
        pytest.skip("it knows no conditions")
    lines, answers = [connect() for _ in range(4)], list[bytes]()

    def write(number: int) -> None:
        answers.append(lines[number].set_note(b"n", b"%d" % number, soon(), only_if_missing=True))

    side_by_side(*[lambda number=number: write(number) for number in range(4)])  # type: ignore[misc]
    assert len(answers) == 4
    assert set(answers) == set(lines[0].exists([], [b"n"], soon()).notes)


def test_of_two_values_at_once_readers_find_one_of_both(connect: Connect) -> None:
    values, lines = [content(number, 300_000) for number in (1, 2)], [connect(), connect()]
    reader, found = connect(), list[object]()
    put(lines[0], {b"same": values[0]})
    writers = [lambda n=n: [put(lines[n], {b"same": values[n]}) for _ in range(8)] for n in (0, 1)]
    side_by_side(*writers, lambda: [found.extend(read(reader, [b"same"])) for _ in range(20)])
    assert len(found) == 20
    assert all(one in values for one in found)


def side_by_side(*calls: Callable[[], object]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_value_lives_on_when_it_is_read(connect: Connect) -> None:
    """How long exactly is the store's affair: those that cannot renew it keep it as long."""
    line = connect()
    assert put(line, {b"v": b"value!"}, ttl_s=86_400) == [Fate.DONE]
    get = room(b"v", 1, 9)
    get.ttl_s = 86_400
    line.get([get], [], soon())
    assert value_of(get) == b"value!"
    assert line.exists([b"v"], [], soon()).there == [True]


def test_a_call_whose_time_is_over_fails_and_the_next_one_works(connect: Connect, kind: str) -> None:
    if kind == "memory":
        pytest.skip("it has no clock")
    line, over = connect(), time.monotonic() - 1
    put(line, {b"v": b"value!"})
    calls: list[Callable[[], object]] = [
        lambda: line.exists([b"v"], [], over),
        lambda: line.get([room(b"v", 1, 9)], [], over),
        lambda: line.put([Put(b"other", [b"later!"])], [], over),
        lambda: line.delete([b"other"], over),
        lambda: line.set_note(b"n", b"1", over),
    ]
    for call in calls:
        with pytest.raises(StoreError) as caught:
            call()
        assert caught.value.problem is StoreProblem.TIMEOUT
    assert read(line, [b"v"]) == [b"value!"]


def test_an_error_of_the_caller_reaches_no_later_call(connect: Connect) -> None:
    line = connect()
    put(line, {b"%d" % number: content(number, 5000) for number in range(20)})

    def fail(get: Get) -> None:
        raise KeyError("of the caller")

    with pytest.raises(KeyError):
        line.get([room(b"%d" % number, 5, 9000) for number in range(20)], [], soon(), fail)
    assert read(line, [b"7"]) == [content(7, 5000)]
