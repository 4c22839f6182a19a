"""Flushes amid everything else: no host finds what was flushed; and flushes that the store did not take."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chains import chain_of
from fleet import Hosts
from host_rig import HostRig
from host_rig import host as open_host
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from machines import in_first_ring, in_stress
from memory_store import MemoryStore
from played import played

from tiercache.daemon.tiers.shared import flushes, presence, writes
from tiercache.daemon.tiers.shared.access import StoreAccess
from tiercache.daemon.tiers.shared.breaker import FAILURES, BreakerState
from tiercache.daemon.tiers.shared.epochs import EpochReader, Epochs
from tiercache.daemon.tiers.shared.flushes import FlushJob, SharedFlushes
from tiercache.daemon.tiers.shared.lines import LineUse
from tiercache.daemon.tiers.shared.naming import BUCKETS, Naming, Scope
from tiercache.daemon.tiers.shared.settings import SharedSettings, state_name
from tiercache.daemon.tiers.shared.stores.store import NotReplicated, StoreError, StoreProblem
from tiercache.daemon.tiers.shared.value import ValueForm
from tiercache.errors import ConfigError
from tiercache.protocol.messages import KEY_BYTES

NAME, LENGTH = "x", 2
SPACES = list[tuple[int, ...]]([(), (), (0,), (0, 1)])
Action = tuple[str, int, int, int]
"""What, on which host, about which namespace, and how."""

WHAT = ["store", "store", "fill", "work", "busy", "busy", "job", "load", "load", "flush", "flush", "slice", "end"]
ACTION = st.tuples(st.sampled_from(WHAT), st.sampled_from([0, 0, 1]), st.sampled_from([0, 0, 1]), st.integers(0, 3))
PROGRAM = st.lists(ACTION, min_size=3, max_size=12)
MEANWHILE = st.lists(st.tuples(st.integers(0, 5), ACTION), max_size=5)


class Flushes(Hosts):
    """Two hosts with room for a few blocks, over a store that works.

    Each example plays some programs. Every slice of a flush, every job and every piece of work is an action of its own.
    Other actions happen meanwhile: before or after a call of the store, so many of them after the one before.
    """

    frames = 8

    def __init__(self) -> None:
        super().__init__()
        self.patch.setattr(writes, "HELD_SHARE", 0.5)
        self.patch.setattr(presence, "NO_CLAIM_S", 0.0)
        self.patch.setattr(presence, "UNFETCHABLE_S", 0.0)
        self.meanwhiles = deque[tuple[int, Action]]()
        self.flushes: list[Iterator[bool]] = []
        self.working: list[HostRig] = []
        self.fills = 0

    @initialize(modes=st.lists(st.sampled_from(["all", "all", "evicted", "evicted", "reused"]), min_size=2, max_size=2))
    def open_two(self, modes: list[str]) -> None:
        self.open(modes, False, 1)

    @rule(program=PROGRAM, meanwhile=MEANWHILE, clean=st.sampled_from([(), (0, 1), (1, 0)]))
    def play(self, program: list[Action], meanwhile: list[tuple[int, Action]], clean: tuple[int, ...]) -> None:
        self.meanwhiles = deque(meanwhile)
        for action in program:
            self.do(*action)
        self.end_flushes()
        self.all_is_idle()
        self.meanwhiles.clear()
        self.end_flushes()
        self.all_is_idle()
        assert not self.unanswered, "a flush is not answered, though the store was told"
        for host in range(2):
            for space in range(2):
                self.host_loads(host, (space,), NAME, LENGTH)
        if clean:
            self.new_blocks_are_shared(*clean)

    def new_blocks_are_shared(self, one: int, other: int) -> None:
        """Both forget everything; what is stored then is found by the other host at once."""
        self.host_flushes(one, (), "", 0, "all", 0)
        self.host_flushes(other, (), "", 0, "all", 0)
        assert not self.copies
        for host, looker in ((one, other), (other, one)):
            self.host_stores(host, host, NAME, LENGTH)
            self.all_is_idle()
            if self.modes[host] == "all":
                assert self.host_loads(looker, (host,), NAME, LENGTH) == LENGTH

    def all_is_idle(self) -> None:
        for rig in self.hosts:
            self.drive(rig, lambda rig=rig: self.is_idle(rig))  # type: ignore[misc]
        self.told()

    def is_idle(self, rig: HostRig) -> bool:
        """While a flush goes on, which may have begun meanwhile, what is stored waits for it."""
        if not self.flushes:
            return super().is_idle(rig)
        shared = rig.shared
        busy = shared._writes.in_flight_bytes or self.lines(rig).queued or shared.flushes.waiting
        return not busy and rig.below.settled and shared.access.breaker.may_write

    def end_flushes(self) -> None:
        while self.flushes:
            list(self.flushes.pop(0))

    def point(self) -> None:
        """Another action may happen now."""
        if self.meanwhiles:
            left, action = self.meanwhiles.popleft()
            if left:
                self.meanwhiles.appendleft((left - 1, action))
            else:
                self.do(*action)

    def do(self, what: str, host: int, space: int, how: int) -> None:
        rig = self.hosts[host]
        if what == "store":
            self.host_stores(host, space, NAME, 1 + how % LENGTH)
            if how > 1:
                self.host_sends(host)
        elif what == "fill":
            self.fills += 1
            self.act(lambda: rig.store(self.space(rig, 0), chain_of(f"fill {self.fills}", self.frames)))
        elif what == "work":
            self.act(rig.cache.work)
        elif what == "job":
            self.step(rig, list(LineUse)[how % 3])
        elif what == "busy":
            for _ in range(1 + how):
                self.step(rig)
                self.act(rig.cache.work)
        elif what == "load":
            self.host_loads(host, (space,), NAME, LENGTH)
            if how > 1:
                self.act(rig.forget_dram)
        elif what == "flush":
            self.flushes.append(self.flush_in_slices(host, SPACES[how]))
        elif what == "slice":
            for slices in self.flushes[:1]:
                next(slices, None)
        else:
            self.end_flushes()

    def step(self, rig: HostRig, use: LineUse | None = None) -> bool:
        self.working.append(rig)
        try:
            return super().step(rig, use)
        finally:
            self.working.pop()

    def before(self, call: str) -> None:
        if call == "put":
            epochs = self.working[-1].shared.access.epochs
            assert epochs.naming.deployment_note not in epochs.pending, "it sends what is being flushed"
        super().before(call)


TestFlushes = in_first_ring(Flushes, examples=40, steps=12)
TestFlushesForLong = in_stress(Flushes, examples=100, steps=40)


def access_to(state: Path, jobs: list[FlushJob] | None = None, naming: Naming | None = None) -> StoreAccess:
    """Access to a store that gets its jobs when the test says so; without `jobs` it is away."""
    settings = SharedSettings(MemoryStore(), naming or Naming("d", b""), ValueForm(None), state)
    collected: Any = SimpleNamespace(submit=lambda job, use: [] if jobs is None else jobs.append(job))
    access = StoreAccess(settings, lambda: None, time.monotonic, lambda store, uses, call: collected)
    access.open()
    if jobs is None:
        access.breaker.state = BreakerState.OPEN
    return access


def kept(state: Path) -> list[bytes]:
    """What the file has that keeps flushes."""
    return flushes._StateFile(state).read()


@played
async def test_a_store_that_refuses_is_told_later_and_later(tmp_path: Path) -> None:
    jobs, pauses = list[FlushJob](), list[tuple[float, float]]()

    def uniform(low: float, high: float) -> float:
        pauses.append((low, high))
        return 0.0  # at once

    its = SharedFlushes(access_to(tmp_path / "state", jobs), uniform)
    its.begin([b"note"], lambda durable: None)
    seen = []
    for number in range(1, 10):
        seen.append(its._pause_s)
        jobs[-1].problem = StoreError(StoreProblem.READ_ONLY, "no")
        jobs[-1].ended()
        while len(jobs) == number:
            await asyncio.sleep(0)
    assert seen == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert pauses == [(0.5, 1.5)] * 9, "hosts do not try at the same time"
    jobs[-1].learned = {b"note": b"new"}
    jobs[-1].problem = None
    jobs[-1].ended()
    assert (its.waiting, its._pause_s) == (False, 0.5)
    its.store_is_back()
    assert len(jobs) == 10, "there is nothing to tell"
    while its._saving is not None:
        await asyncio.sleep(0.001)


@played
async def test_a_late_write_of_the_file_does_not_undo_the_one_at_the_end(tmp_path: Path) -> None:
    loop, threads, busy = asyncio.get_running_loop(), ThreadPoolExecutor(1), threading.Event()
    state = tmp_path / "state"
    its = SharedFlushes(access_to(state))
    its._threads = threads
    blocked = loop.run_in_executor(threads, busy.wait, 60)
    its._save()  # all was told, so the file goes
    its.begin([b"note"], lambda durable: None)
    its.close()
    assert kept(state) == [b"note"]
    busy.set()
    await blocked
    assert its._saving is not None
    await its._saving
    assert kept(state) == [b"note"]


@played
async def test_what_changes_while_the_file_is_written_is_written_after_it(tmp_path: Path) -> None:
    """What is in the file then is answered, however many flushes follow."""
    loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor(1)
    busy, state, answers = [threading.Event(), threading.Event()], tmp_path / "state", list[bool]()
    its = SharedFlushes(access_to(state))
    its._threads = threads
    for name, one in zip((b"one", b"two"), busy, strict=True):
        loop.run_in_executor(threads, one.wait, 60)
        its._time_is_up(its.begin([name], answers.append))
    busy[0].set()
    while not answers:
        await asyncio.sleep(0.001)
    assert answers == [False], "the second is not in the file yet"
    busy[1].set()
    while its._saving is not None:
        await asyncio.sleep(0.001)
    assert kept(state) == [b"one", b"two"]
    assert answers == [False] * 2


class Flusher:
    """The flushes of one host over a store, whose jobs run when the test says so."""

    def __init__(self, store: MemoryStore, state: Path) -> None:
        self.jobs = list[FlushJob]()
        self.answers = list[bool]()
        access = access_to(state, self.jobs)
        self.epochs = access.epochs
        self.flushes = SharedFlushes(access, lambda low, high: 0.0)  # without a pause the next job comes at once
        self._store = store

    def flush(self, *names: bytes) -> None:
        self.flushes.end(self.flushes.begin(names, self.answers.append))

    async def try_it(self) -> FlushJob:
        """Run the next job, and let the loop begin another one, if that is due."""
        job = self.jobs.pop(0)
        try:
            job.run(self._store.connect())
        except StoreError as error:
            job.problem = error
        job.ended()
        while self.flushes._saving is not None or (self.flushes.waiting and not self.jobs):
            await asyncio.sleep(0)
        return job


@played
async def test_an_answer_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    one = Flusher(MemoryStore(), tmp_path / "state")
    one.flush(b"first")
    one.flushes.begin([b"second"], lambda durable: 1 // 0)  # type: ignore[arg-type, return-value]
    one.flush(b"third")
    await one.try_it()
    with pytest.raises(ZeroDivisionError):
        await one.try_it()
    await asyncio.sleep(0)
    assert one.answers == [True, True]


def not_replicated(*numbers: int) -> Callable[[str], None]:
    """As `MemoryStore.after`: these calls of `set_note` reach no replica."""
    counts = itertools.count()

    def after(call: str) -> None:
        if call == "set_note" and next(counts) in numbers:
            raise NotReplicated(StoreProblem.BUSY, "1 of 1 replicas")

    return after


@played
async def test_a_flush_that_is_tried_again_flushes_the_fleet_once_and_undoes_no_other(tmp_path: Path) -> None:
    store = MemoryStore()
    one, other = Flusher(store, tmp_path / "one"), Flusher(store, tmp_path / "other")
    store.after = not_replicated(0)
    one.flush(b"n")
    assert isinstance((await one.try_it()).problem, NotReplicated)
    value = store.notes[b"n"]
    assert (await one.try_it()).problem is None
    assert (store.notes[b"n"], store.calls.count("set_note")) == (value, 1)
    assert (one.answers, one.flushes.waiting, one.epochs.pending) == ([True], False, set())
    store.after = not_replicated(0)
    one.flush(b"n")
    await one.try_it()
    first = store.notes[b"n"]
    assert first != value, "another flush"
    other.flush(b"n")
    await other.try_it()
    await one.try_it()
    assert store.notes[b"n"] != first, "what was stored under it was flushed"
    assert (one.answers, other.answers) == ([True, True], [True])


@played
async def test_a_note_that_a_replica_lacks_does_not_keep_the_others(tmp_path: Path) -> None:
    store = MemoryStore()
    one = Flusher(store, tmp_path / "state")
    store.after = not_replicated(0)
    one.flush(b"a", b"b", b"c")
    job = await one.try_it()
    assert isinstance(job.problem, NotReplicated)
    assert len(job.replaced) == 2
    assert len(one.flushes) == 1
    store.work()
    await one.try_it()
    assert one.answers == [True]


@played
async def test_flushes_that_take_several_jobs_are_no_failures(tmp_path: Path) -> None:
    """Each has time for one note."""
    store, chain, counts = MemoryStore(), chain_of("x", 2), itertools.count()
    one = open_host(store, tmp_path, "a")
    for rank in range(2 * FAILURES):
        one.store(one.namespace(tp_rank=rank), chain)
    await one.sent()

    def before(call: str) -> None:
        if call == "set_note" and next(counts) % 2:
            raise StoreError(StoreProblem.TIMEOUT, "no time left")

    store.before = before
    assert await one.flush(chain[:KEY_BYTES])
    assert (one.shared.access.breaker.opened, one.shared.flushes.tries) == (0, 2 * FAILURES)
    await one.close()


@played
async def test_what_a_flush_took_with_it_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the flush of a bucket waited, another flush made it one of its namespace."""
    one = open_host(MemoryStore(), tmp_path, "a")
    space, second, chain = one.namespace(), one.namespace(tp_rank=1), chain_of("x", 2)
    naming = one.shared.access.epochs.naming
    root = naming.bucket(chain[:KEY_BYTES])
    other = next(keys for n in range(99) if naming.bucket((keys := chain_of(f"other {n}", 2))[:KEY_BYTES]) != root)
    one.store(space, chain)
    one.store(second, other)
    await one.sent()
    monkeypatch.setattr(one.shared.flushes, "_tell", lambda: None)
    waiting = asyncio.ensure_future(one.flush(chain[:KEY_BYTES]))
    await one.until(lambda: one.shared.flushes.waiting)
    one.store(space, other)
    await one.until(lambda: one.shared.access.presence.has(space, other[:KEY_BYTES]))
    monkeypatch.setattr(flushes, "MANY_NOTES", 0)
    monkeypatch.setattr(flushes, "MAX_BUCKETS", 0)
    numbers = len(one.shared.flushes)
    one.shared.begin_flush([second], other[:KEY_BYTES], lambda durable: None)()
    assert len(one.shared.flushes) == numbers
    monkeypatch.delattr(one.shared.flushes, "_tell")
    one.shared.flushes.store_is_back()
    assert await waiting
    assert not one.shared.access.presence.has(space, other[:KEY_BYTES])
    assert await one.flush()
    await one.close()


@played
async def test_what_is_stored_while_a_flush_waits_is_sent_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no name until then. The store may well take it: a replica that lags holds up the flush alone."""
    store = MemoryStore()
    one = open_host(store, tmp_path, "a")
    space, second = one.namespace(), one.namespace(tp_rank=1)
    monkeypatch.setattr(one.shared.flushes, "_tell", lambda: None)
    one.shared.begin_flush([space], b"", lambda durable: None, named=True)()
    one.store(space, chain_of("x", 2))
    one.store(second, chain_of("y", 3))
    await one.until(lambda: len(store.values) == 3)
    assert not one.shared.work(), "it is tried now and then, not all the time"
    assert one.shared.stats()["write_queue_blocks"] == 2
    one.check()
    monkeypatch.setattr(writes, "MOST_PUT_OFF", 6)
    one.store(second, chain_of("z", 4))  # it would wait behind the others
    await one.until(lambda: len(store.values) == 7)
    one.store(space, chain_of("dropped", 6))
    await one.until(lambda: one.shared.stats()["write_failed_blocks"] > 0)
    left = one.shared.stats()["write_queue_blocks"]
    assert 0 < left < 8
    monkeypatch.delattr(one.shared.flushes, "_tell")
    one.shared.flushes.store_is_back()
    await one.sent()
    assert (len(store.values), one.shared.stats()["write_failed_blocks"]) == (7 + left, 8 - left)
    await one.close()


def test_an_answer_that_comes_while_its_names_are_flushed_says_nothing() -> None:
    epochs, scope = Epochs(Naming("d", b"")), Scope("f", 7)
    names = epochs.naming.notes(scope)
    epochs.learn(dict.fromkeys(names, b"a note"))
    reader = EpochReader(epochs, [scope])
    assert reader.check([b"a note"] * len(names))
    epochs.await_replacement(names[:1])
    assert not reader.check([b"a note"] * len(names)), "the store has yet to be told"


@played
async def test_notes_are_put_together_when_they_have_doubled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flushes, "MANY_NOTES", 10)
    monkeypatch.setattr(flushes, "VERY_MANY_NOTES", 80)
    naming, looked_at = Naming("d", b""), list[bytes]()
    note_above = naming.note_above

    def counted(note: bytes) -> bytes:
        looked_at.append(note)
        return note_above(note)

    monkeypatch.setattr(naming, "note_above", counted)
    access = access_to(tmp_path / "state", naming=naming)
    its, epochs = SharedFlushes(access), access.epochs
    for number in range(400):
        its.end(its.begin([naming.bucket_note(Scope(str(number % 200), number // 200))], lambda durable: None))
    assert len(looked_at) < 2 * 400
    assert epochs.pending == set(its._notes)
    assert len(its) < 400, "from some number on, a namespace has one note"


@played
async def test_very_many_notes_become_those_of_namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that flushes every prompt of all its namespaces costs nobody else a block."""
    monkeypatch.setattr(flushes, "MANY_NOTES", 40)
    naming = Naming("d", b"")
    access = access_to(tmp_path / "state", naming=naming)
    its, epochs = SharedFlushes(access), access.epochs
    quiet = {naming.bucket_note(Scope("quiet", 5)), naming.bucket_note(Scope("quiet", 6))}
    its.end(its.begin(quiet, lambda durable: None))
    mine = [f"mine {number}" for number in range(4)]
    for bucket in range(BUCKETS):
        its.end(its.begin([naming.bucket_note(Scope(name, bucket)) for name in mine], lambda durable: None))
    assert quiet < epochs.pending
    assert {naming.fingerprint_of(note) for note in epochs.pending} == {"quiet", *mine}
    assert all(epochs.of(Scope(name, bucket)) is None for name in mine for bucket in range(BUCKETS))
    assert len(epochs.pending) <= 40 + len(mine)
    monkeypatch.setattr(flushes, "MAX_KEPT", 50)
    its.end(its.begin([naming.namespace_note(str(number)) for number in range(50)], lambda durable: None))
    assert epochs.pending == {naming.deployment_note}, "as the last resort"


@pytest.mark.parametrize("how", ["refuses", "hangs"])
@played
async def test_a_flush_that_cannot_be_kept_is_answered_and_its_loss_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(flushes, "TOLD_S", 0.01)
    monkeypatch.setattr(flushes, "SAVED_S", 0.01 if how == "hangs" else 60.0)
    state = tmp_path / "state"
    if how == "hangs":
        os.mkfifo(tmp_path / "state.new")
    else:
        state.mkdir()
    its = SharedFlushes(access_to(state))
    answers = list[bool]()
    its.end(its.begin([b"note"], answers.append))
    while not answers:
        await asyncio.sleep(0.001)
    assert answers == [False]
    assert "flushes of the shared store cannot be kept in" in its.trouble
    its.close()  # which does not wait for the disk
    if how == "hangs":
        os.close(os.open(tmp_path / "state.new", os.O_RDONLY | os.O_NONBLOCK))  # the threads go on


@played
async def test_two_daemons_do_not_keep_their_flushes_in_one_file(tmp_path: Path) -> None:
    """The first of them that reaches the store would remove what the other one keeps."""
    state = tmp_path / "state"
    one, other = SharedFlushes(access_to(state)), SharedFlushes(access_to(state))
    one.lock()
    with pytest.raises(ConfigError, match="give each its own shared_state"):
        other.lock()
    one.begin([b"note"], lambda durable: None)
    one.close()
    other.lock()
    other.open()
    assert list(other._notes) == [b"note"]
    other.close()


@played
async def test_a_flush_that_a_store_was_not_told_of_waits_while_another_store_is_used(tmp_path: Path) -> None:
    """That one is told too, once: it may be the same store at another address."""
    first, second = (tmp_path / state_name("d", address) for address in ("valkey://a", "valkey://b"))
    (tmp_path / state_name("d-0", "valkey://a")).write_text("another deployment's")

    async def live(state: Path, away: bool = False) -> list[bytes]:
        """A life of the daemon; what it tells the store."""
        jobs, told = list[FlushJob](), set[bytes]()
        its = SharedFlushes(access_to(state, None if away else jobs))
        its.open()
        for job in jobs:  # each may lead to another one
            job.run(MemoryStore().connect())
            job.ended()
            told.update(job.learned)
        if away and state is first:
            its.begin([b"note"], lambda durable: None)
        while its._saving is not None:
            await asyncio.sleep(0.001)
        its.close()
        return sorted(told)

    assert await live(first, away=True) == []
    assert await live(second, away=True) == []
    assert (first.exists(), second.exists()) == (True, True)
    assert await live(second) == [b"note"]
    assert await live(second) == [], "it was told"
    assert (first.exists(), second.exists()) == (True, False)
    assert await live(first) == [b"note"]
    assert not first.exists()
    assert await live(first) == await live(second) == []


@pytest.mark.parametrize("damage", ["a digit", "no checksum", "empty"])
@played
async def test_a_file_that_is_damaged_flushes_everything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    state = tmp_path / "state"
    one = SharedFlushes(access_to(state))
    one.open()
    one.begin([b"note"], lambda durable: None)
    one.close()
    text = state.read_text()
    state.write_text({"a digit": text.replace("6e", "6f", 1), "no checksum": text.split()[0], "empty": ""}[damage])
    again = SharedFlushes(access_to(state))
    again.open()
    assert list(again._notes) == [b"tc1:d:notes"]
    assert "is damaged: the whole shared tier is flushed instead" in caplog.text
    again.close()
