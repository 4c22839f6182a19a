"""Mooncake's store on its real master: calls, and what becomes of them when processes die."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chains import chain_of
from host_rig import Hosts
from mooncake_rig import MooncakeMaster, own_network
from played import play
from store_calls import content, put, read, room, soon
from waiting import wait_until

from tiercache.daemon.tiers.shared.stores import open_store
from tiercache.daemon.tiers.shared.stores.helper import supervisor
from tiercache.daemon.tiers.shared.stores.helper.connection import HelperConnection
from tiercache.daemon.tiers.shared.stores.helper.store import HelperStore
from tiercache.daemon.tiers.shared.stores.store import Connection, Fate, StoreError, StoreProblem

pytestmark = pytest.mark.stress

AWAY = (StoreProblem.UNREACHABLE, StoreProblem.BUSY, StoreProblem.TIMEOUT)
NO_ROOM_YET = StoreProblem.FULL
MIB = 1 << 20


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    with own_network():
        one = MooncakeMaster(tmp_path)
        try:
            one.start()
            yield one
        finally:
            one.kill()


@pytest.fixture
def make(master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., HelperStore]]:
    """Makes stores: each is a host."""
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    made: list[HelperStore] = []
    lines: list[HelperConnection] = []
    real = HelperStore.connect

    def connect(store: HelperStore) -> HelperConnection:
        lines.append(real(store))
        return lines[-1]

    monkeypatch.setattr(HelperStore, "connect", connect)

    def make(url: str = "") -> HelperStore:
        store = open_store(url or master.url())
        assert isinstance(store, HelperStore)
        made.append(store)
        return store

    yield make
    for line in lines:
        line.close()
    for one in made:
        one.close()


def patiently(call: Callable[[], object], what: str = "a call that succeeds") -> None:
    """Call until the store is there again."""

    wait_until(lambda: not _is_away(call), what)


def _is_away(call: Callable[[], object]) -> bool:
    try:
        call()
    except StoreError as error:
        if error.problem not in (*AWAY, NO_ROOM_YET):
            raise
        return True
    return False


def ready(store: HelperStore) -> Connection:
    line = store.connect()
    patiently(lambda: line.exists([b"x"], [], soon()))
    return line


def kill(store: HelperStore) -> None:
    pid = store.stats()["pid"]
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: store.stats()["pid"] != pid, "the end of the process")


def test_hosts_share_values_and_notes(make: Callable[..., HelperStore]) -> None:
    here, there = ready(make()), ready(make())
    values = {b"tc1:%d" % number: content(number, length) for number, length in enumerate((1, 9, 70_000, 2 * MIB))}
    values |= {b"many:%d" % number: content(number, 5000 + number) for number in range(40)}
    assert set(put(here, values, head_bytes=0)) == {Fate.DONE}
    assert read(there, list(values), 0, 2 * MIB) == list(values.values())
    assert read(there, [b"tc1:2"], 7, 20, offset=4096) == [values[b"tc1:2"][4096 : 4096 + 27]]
    assert read(there, [b"tc1:0", b"never", b"tc1:2"], 5, 100) == [Fate.MISFIT, Fate.MISSING, Fate.MISFIT]
    assert there.exists([*values, b"never"], [], soon()).there == [True] * len(values) + [False]
    # What is there stays, and counts as written.
    assert put(there, {b"tc1:1": b"other"}) == [Fate.DONE]
    assert read(here, [b"tc1:1"]) == [values[b"tc1:1"]]
    assert here.set_note(b"epoch", b"7", soon(), only_if_missing=True) == b"7"
    assert there.set_note(b"epoch", b"8", soon(), only_if_missing=True) == b"7"
    notes = [b"epoch", *(b"%d" % number for number in range(40))]
    for note in (b"9", b"longer than before", b"n" * 4096, b"8"):
        assert there.set_note(b"epoch", note, soon()) == note
        wanted = [note, *[None] * 40]
        assert here.exists([], notes, soon()).notes == here.get([], notes, soon()) == here.put([], notes, soon())
        assert here.get([room(b"tc1:1", 1, 9)], notes, soon()) == wanted
    told: list[object] = []
    gets = [room(b"tc1:1", 1, 9) for _ in range(20)]
    assert there.get(gets, [b"epoch"], soon(), lambda _: told.append(b"value"), told.extend) == [b"8"]
    assert told == [b"8"] + [b"value"] * 20
    there.delete([*values, b"epoch", b"never"], soon())
    assert not any(here.exists(list(values), [], soon()).there)
    assert here.exists([], [b"epoch"], soon()).notes == [None]


def test_a_note_that_is_replaced_again_and_again_is_never_read_in_part(make: Callable[..., HelperStore]) -> None:
    """Mooncake replaces it where it is: others read the same memory meanwhile."""
    here, there = ready(make()), ready(make())
    notes = [bytes([number]) * 4000 for number in range(1, 100)]
    here.set_note(b"note", notes[0], soon())
    for note in notes:
        assert here.set_note(b"note", note, soon()) == note
        assert there.exists([], [b"note"], soon()).notes == [note]
    both = [here, there]
    for number, note in enumerate(notes):
        assert both[number % 2].set_note(b"note", note, soon()) == note
        assert both[(number + 1) % 2].exists([], [b"note"], soon()).notes == [note]


def test_a_pool_that_is_full_says_so(make: Callable[..., HelperStore]) -> None:
    line = ready(make())
    values = {b"%d" % number: content(number, 4 * MIB) for number in range(20)}
    with pytest.raises(StoreError) as caught:
        put(line, values)
    assert caught.value.problem is StoreProblem.FULL
    assert "segment" in caught.value.text
    # The master makes room then, by evicting what was not read of late.
    wait_until(lambda: _is_written(line, b"more", values[b"0"]), "room")
    assert read(line, [b"more"], 0, 4 * MIB) == [values[b"0"]]
    found = read(line, list(values), 0, 4 * MIB)
    assert all(one in (value, Fate.MISSING) for one, value in zip(found, values.values(), strict=True))


def test_a_process_that_is_killed_costs_what_it_held(make: Callable[..., HelperStore]) -> None:
    """And the memory that its host gave to the pool; what others hold is still there."""
    store, others = make(), make()
    line = ready(store)
    for number in range(8):
        put(line, {b"a%d" % number: content(number, MIB)})
    other = ready(others)
    line.set_note(b"note", b"on two hosts", soon())
    kill(store)
    wanted = [b"a%d" % number for number in range(8)]
    found = read(other, wanted, 0, MIB)
    assert all(value in (content(number, MIB), Fate.MISSING) for number, value in enumerate(found))
    # Once the master knows, they are gone, and what is written again goes to those that are there.
    wait_until(lambda: not any(other.exists(wanted, [], soon()).there), "the master to miss it")
    patiently(lambda: line.exists([], [], soon()), "another process")
    wait_until(lambda: _is_written(line, b"a0", content(0, MIB)), "room for values")
    wait_until(lambda: read(other, [b"a0"], 0, MIB) == [content(0, MIB)], "the value")
    patiently(lambda: other.exists([], [b"note"], soon()))
    assert other.exists([], [b"note"], soon()).notes[0] in (b"on two hosts", None)
    assert other.set_note(b"note", b"new", soon()) == b"new"
    assert line.exists([], [b"note"], soon()).notes == [b"new"]


@pytest.mark.parametrize("end", ["dies", "hangs"])
def test_a_host_whose_memory_holds_the_blocks_goes_away(
    make: Callable[..., HelperStore], tmp_path: Path, end: str
) -> None:
    """Between the look-up and the fetch of another host: that has a miss in time, and not a wrong byte."""

    async def scenario() -> None:
        chain = chain_of("x", 12)
        async with Hosts(make, tmp_path) as hosts:
            owner = make()
            ready(owner)
            a = hosts.open(owner)
            a.store(a.namespace(), chain)  # the pool is the memory of this host alone
            await a.sent()
            other = make()
            ready(other)
            b = hosts.open(other)
            assert await b.look_up([b.namespace()], chain) == 12
            pid = owner.stats()["pid"]
            assert isinstance(pid, int)
            os.kill(pid, signal.SIGSTOP)
            if end == "dies":
                os.kill(pid, signal.SIGKILL)
            assert await b.load([b.namespace()], chain) == 0
            assert b.shared.source.tally.bad_blocks == 0
            other_chain = chain_of("y", 12)
            b.store(b.namespace(), other_chain)
            assert await b.load([b.namespace()], other_chain) == 12, "DRAM serves"
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    play(scenario)


def test_a_master_that_restarts_knows_nothing_and_serves(
    make: Callable[..., HelperStore], master: MooncakeMaster
) -> None:
    stores = make(), make()
    here, there = map(ready, stores)
    put(here, {b"a": content(1, MIB)})
    here.set_note(b"note", b"1", soon())
    before = [store.stats()["pid"] for store in stores]
    master.kill()
    for _ in range(3):
        with pytest.raises(StoreError) as caught:
            read(there, [b"a"], 0, MIB)
        assert caught.value.problem in AWAY
    master.start()
    patiently(lambda: there.exists([b"a"], [], soon()))
    assert read(there, [b"a"], 0, MIB) == [Fate.MISSING]
    # The hosts' memory is in the pool again a moment later: until then there is no room, not even for a note.
    patiently(lambda: there.set_note(b"note", b"2", soon(), only_if_missing=True))
    wait_until(lambda: _is_written(here, b"b", content(2, MIB)), "room for values")
    patiently(lambda: here.exists([], [], soon()))
    assert read(there, [b"b"], 0, MIB) == [content(2, MIB)]
    assert here.exists([], [b"note"], soon()).notes == [b"2"]
    assert [store.stats()["pid"] for store in stores] == before, "the same processes go on"


def _is_written(line: Connection, name: bytes, value: bytes) -> bool:
    try:
        return put(line, {name: value}) == [Fate.DONE]
    except StoreError as error:
        if error.problem not in (*AWAY, NO_ROOM_YET):
            raise
        return False


def test_a_master_that_stops_ends_calls_at_their_deadline(
    make: Callable[..., HelperStore], master: MooncakeMaster
) -> None:
    line = ready(make())
    put(line, {b"a": b"value"})
    with master.stopped():
        for _ in range(3):
            with pytest.raises(StoreError) as caught:
                line.exists([b"a"], [], soon())
            assert caught.value.problem in AWAY
    patiently(lambda: line.exists([b"a"], [], soon()))
    wait_until(lambda: read(line, [b"a"]) == [b"value"])


def test_a_master_that_comes_later_is_found(make: Callable[..., HelperStore], master: MooncakeMaster) -> None:
    master.kill()
    line = make().connect()

    def problem() -> str:
        with pytest.raises(StoreError) as caught:
            line.exists([b"a"], [], soon())
        assert caught.value.problem in AWAY
        return caught.value.text

    wait_until(lambda: "no master at 127.0.0.1" in problem(), "what is wrong")
    master.start()
    patiently(lambda: put(line, {b"a": b"value"}))
    assert read(line, [b"a"]) == [b"value"]
