"""Hosts that share a store, against what a cache may and may not serve: good or a miss, and nothing that was flushed.

Each host is DRAM over a shared tier, in this process; the store is in memory, and evicts, forgets, is away, is full, is
spoilt, and loses answers. While a job is at the store, and between two slices of a flush, something else may happen.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from chains import chain_of, key_of
from host_rig import BLOCK_BYTES, HostRig, content
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from machines import in_first_ring, in_stress
from memory_store import MemoryStore
from stepped_lines import SteppedLines, SteppedLoop

from tiercache.daemon import cache
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.tiers import promotion
from tiercache.daemon.tiers.dram.space import Namespace, first_of_window
from tiercache.daemon.tiers.shared.lines import LineUse
from tiercache.daemon.tiers.shared.stores.store import StoreError, StoreProblem

T = TypeVar("T")
BLOCKS, FRAMES, SPACES = 6, 24, 3
CHAINS = {name: chain_of(name, BLOCKS) for name in "xyz"}

HOSTS = st.integers(0, 3)
NAMES = st.sampled_from(sorted(CHAINS))
LENGTHS = st.integers(1, BLOCKS)
SOME_SPACES = st.sampled_from([(0,), (1,), (2,), (0, 1), (0, 2), (0, 1, 2)])
TROUBLES = st.sampled_from(["away", "full", "read only", "no answer"])
PROBLEMS = {"full": StoreProblem.FULL, "read only": StoreProblem.READ_ONLY}

Block = tuple[int, str, int]
"""Number of a namespace, name of a chain, number of a block."""


@dataclass(eq=False)
class Copy:
    """One content of a block: `hosts` that may have it, and `stored` if the store may have it under a present name.

    `hidden`: hosts with a flush of it that the store was not told of yet.
    """

    block: Block
    version: int
    hosts: set[int]
    stored: bool = True
    hidden: set[int] = field(default_factory=set)


class Fleet(RuleBasedStateMachine):
    """The hosts, the store, and the copies that may still be found."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="tiercache-fleet-"))
        self.loop = SteppedLoop()
        self.patch = pytest.MonkeyPatch()
        for name in ("FLUSHED_AT_ONCE", "KEYS_FLUSHED_AT_ONCE"):
            self.patch.setattr(cache, name, 1)
        self.patch.setattr(promotion, "LOOK_AGAIN_S", 0.0)
        self.hosts: list[HostRig] = []
        self.copies: list[Copy] = []
        self.loading: set[tuple[int, int, str]] = set()
        self.unanswered: list[tuple[list[bool], int, str, list[Copy]]] = []
        self.version = self.turn = 0
        self.trouble, self.steps = "works", 0
        self.meanwhile: tuple[int, Callable[[], object]] | None = None

    @initialize(
        modes=st.lists(st.sampled_from(["all", "all", "evicted", "reused"]), min_size=2, max_size=3),
        sealed=st.booleans(),
        pack=st.sampled_from([1, 1, 2]),
    )
    def open(self, modes: list[str], sealed: bool, pack: int) -> None:
        self.store_of_all = MemoryStore(pack)
        self.store_of_all.before, self.store_of_all.after = self.before, self.after
        self.secret = bytes(32) if sealed else None
        self.modes = ["all" if pack > 1 else mode for mode in modes]
        self.hosts = [self.host(number) for number in range(len(modes))]

    def host(self, number: int) -> HostRig:
        rig = HostRig(
            self.store_of_all,
            self.folder / str(number),
            secret=self.secret,
            regions=1,
            region_bytes=FRAMES * BLOCK_BYTES,
            clock_s=self.loop.time,
            lines=SteppedLines,
            write=self.modes[number],
        )
        self.loop.act(rig.open)
        for space in range(SPACES):
            self.space(rig, space)
        return rig

    def space(self, rig: HostRig, space: int) -> Namespace:
        return rig.namespace(window_blocks=2) if space == 2 else rig.namespace(tp_rank=space)

    def teardown(self) -> None:
        for rig in self.hosts:
            self.loop.run_until_complete(rig.close(0.0))
        self.patch.undo()
        self.loop.close()
        shutil.rmtree(self.folder)

    # --- the store, and what happens while a job is there ------------------------------------------

    def before(self, call: str) -> None:
        self.point()
        if self.trouble == "away" or (self.trouble in PROBLEMS and call in ("put", "set_note")):
            raise StoreError(PROBLEMS.get(self.trouble, StoreProblem.UNREACHABLE), f"{call} fails")

    def after(self, call: str) -> None:
        self.point()
        if self.trouble == "no answer":
            raise StoreError(StoreProblem.TIMEOUT, f"{call} was done, and nobody hears of it")

    def point(self) -> None:
        """Something else may happen now."""
        if self.meanwhile is not None:
            left, action = self.meanwhile
            self.meanwhile = (left - 1, action) if left else None
            if not left:
                action()

    @rule(
        at=st.integers(0, 9),
        what=st.sampled_from(["flush", "load", "send", "store", "evict", "lose notes", "trouble"]),
        host=HOSTS,
        name=NAMES,
        spaces=SOME_SPACES,
    )
    def plan(self, at: int, what: str, host: int, name: str, spaces: tuple[int, ...]) -> None:
        """What will happen in the midst of one of the next steps."""
        actions: dict[str, Callable[[], object]] = {
            "flush": partial(self._flush, host, spaces, "", 0, "all", 0),
            "load": partial(self._load, host, spaces, name, BLOCKS),
            "send": partial(self._send, host),
            "store": partial(self._store, host, spaces[0], name, BLOCKS),
            "evict": lambda: self.store_of_all.values.clear(),
            "lose notes": lambda: self.store_of_all.notes.clear(),
            "trouble": partial(setattr, self, "trouble", "no answer"),
        }
        self.meanwhile = (at, actions[what])

    @rule(trouble=TROUBLES)
    def fail(self, trouble: str) -> None:
        """During the next step."""
        self.trouble, self.steps = trouble, 0

    @rule(numbers=st.sets(st.integers(0, 40), min_size=1, max_size=10), spoil=st.sampled_from(["lose", "swap", "cut"]))
    def lose_values(self, numbers: set[int], spoil: str) -> None:
        """It evicts some values, or returns others in their place."""
        values = self.store_of_all.values
        names = [name for number, name in enumerate(values) if number in numbers]
        for name, other in zip(names, [*names[1:], *names[:1]], strict=True):
            if spoil == "lose":
                del values[name]
            else:
                values[name] = values[other] if spoil == "swap" else values[name][:-1]

    @rule(notes=st.sampled_from(["all", "one", "empty", "none"]), values=st.booleans())
    def forget(self, notes: str, values: bool) -> None:
        """Others empty it, or it evicts notes."""
        if values:
            self.store_of_all.values.clear()
        if notes == "all":
            self.store_of_all.notes.clear()
        elif notes == "empty":  # as of hosts that ended while they made them
            self.store_of_all.notes.update(dict.fromkeys(self.store_of_all.notes, b""))
        elif notes == "one" and self.store_of_all.notes:
            del self.store_of_all.notes[min(self.store_of_all.notes, key=len)]

    # --- the hosts -----------------------------------------------------------------------------------

    def rig(self, host: int) -> HostRig:
        return self.hosts[host % len(self.hosts)]

    def act(self, call: Callable[[], T]) -> T:
        """On the loop; within a job it runs already."""
        return call() if self.loop.is_running() else self.loop.act(call)

    def lines(self, rig: HostRig) -> SteppedLines:
        lines: Any = rig.shared._lines
        return lines

    def step(self, rig: HostRig, use: LineUse | None = None) -> bool:
        self.turn += 1
        return self.act(lambda: self.lines(rig).step(self.turn, use))

    def drive(self, rig: HostRig, condition: Callable[[], object]) -> None:
        """Do the daemon's work, and what it waits for, until the condition holds."""
        for _ in range(300):
            self.act(rig.cache.work)
            self.act(rig.cache.expire)
            if condition():
                return
            if not self.step(rig):
                self.pass_time(0.25)
        raise AssertionError(f"it hangs: {rig.shared.stats()}")

    def pass_time(self, seconds: float) -> None:
        self.loop.now_s += seconds
        self.act(lambda: None)
        if self.loop.is_running():  # its timers have their turn later, but must not be waited for
            for timer in [one for one in self.loop._scheduled if one.when() <= self.loop.now_s]:  # type: ignore[attr-defined]
                if not timer.cancelled():
                    timer._run()  # rule: of asyncio
                    timer.cancel()

    @rule(seconds=st.sampled_from([0.5, 2.0, 12.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.pass_time(seconds)
        for rig in self.hosts:
            self.act(rig.cache.work)

    @rule(host=HOSTS, space=st.integers(0, SPACES - 1), name=NAMES, blocks=LENGTHS)
    def store(self, host: int, space: int, name: str, blocks: int) -> None:
        self._store(host, space, name, blocks)

    def _store(self, host: int, space: int, name: str, blocks: int) -> None:
        rig, host = self.rig(host), host % len(self.hosts)
        self.version += 1
        rig.version = self.version
        states = self.act(lambda: rig.store(self.space(rig, space), CHAINS[name][: 16 * blocks]))
        for number, state in enumerate(states):
            if state.name == "FRAME":
                loads = {loader for loader, its, chain in self.loading if (its, chain) == (space, name)}
                self.copies.append(Copy((space, name, number), self.version, {host, *loads}))

    @rule(host=HOSTS, jobs=st.integers(0, 3))
    def some_work(self, host: int, jobs: int) -> None:
        """Some blocks may be on their way to the store after this, and wait for a line."""
        rig = self.rig(host)
        self.act(rig.cache.work)
        for _ in range(jobs):
            self.step(rig)

    @rule(host=HOSTS)
    def send(self, host: int) -> None:
        self._send(host)

    def _send(self, host: int) -> None:
        rig = self.rig(host)
        for _ in range(20):
            if not (self.act(rig.cache.work) or self.step(rig)):
                return

    @rule(host=HOSTS, spaces=SOME_SPACES, name=NAMES, blocks=LENGTHS)
    def load(self, host: int, spaces: tuple[int, ...], name: str, blocks: int) -> None:
        self._load(host, spaces, name, blocks)

    def _load(self, host: int, spaces: tuple[int, ...], name: str, blocks: int) -> int:
        """Look up, match, promote, compare, release; returns the good blocks."""
        rig, host = self.rig(host), host % len(self.hosts)
        its, keys = [self.space(rig, space) for space in spaces], CHAINS[name][: 16 * blocks]
        loading = {(host, space, name) for space in spaces} - self.loading
        self.loading |= loading
        self.may_reach(host, spaces, name)
        try:
            went: list[None] = []
            lengths = rig.cache.reads.runs.lengths(its, keys)
            if self.act(lambda: rig.below.wait(its, keys, lengths, lambda: went.append(None))):
                self.drive(rig, lambda: went)
            lease = self.act(lambda: rig.cache.match(rig.owner, its, keys, 600.0, promote=True)).lease
            if lease is None:
                return 0
            self.drive(rig, lambda: lease.over or lease.lease_id not in rig.cache.reads.growing.leases)
            read = [
                (space, number, bytes(rig.view(frame, BLOCK_BYTES)))
                for space, one in zip(spaces, its, strict=True)
                for first in [first_of_window(one, lease.blocks)]
                for number, frame in enumerate(
                    [] if lease.over else rig.cache.reads.frames(lease, one, first, lease.blocks - first), first
                )
            ]
            found = lease.blocks
            if not self.act(lambda: rig.cache.reads.release(rig.owner, lease.lease_id)):
                return 0  # revoked: a miss
            for space, number, got in read:
                self.check_content(host, (space, name, number), self.space(rig, space), got)
            assert len(went) <= 1
            return found
        finally:
            self.loading -= loading
            self.may_reach(host, spaces, name)

    def may_reach(self, host: int, spaces: Iterable[int], name: str) -> None:
        """What this host may find in the store now it may have from now on."""
        for copy in self.copies:
            if copy.block[0] in spaces and copy.block[1] == name and copy.stored and host not in copy.hidden:
                copy.hosts.add(host)

    def check_content(self, host: int, block: Block, namespace: Namespace, got: bytes) -> None:
        version = int.from_bytes(got[:8], "little")
        assert got == content(namespace, key_of(CHAINS[block[1]], block[2]), version), f"other bytes: {block}"
        copies = [copy for copy in self.copies if copy.block == block]
        assert any(copy.version == version and host in copy.hosts for copy in copies), (
            f"host {host} finds version {version} of {block}, which was flushed; there are {copies}"
        )

    # --- flushes ---------------------------------------------------------------------------------------

    @rule(
        host=HOSTS,
        spaces=st.one_of(st.just(()), SOME_SPACES),
        name=st.sampled_from(["", "", *CHAINS]),
        number=st.integers(0, BLOCKS - 1),
        tier=st.sampled_from(["all", "all", "all", "shared"]),
        busy=st.integers(0, 3),
    )
    def flush(self, host: int, spaces: tuple[int, ...], name: str, number: int, tier: str, busy: int) -> None:
        self._flush(host, spaces, name, number, tier, busy)

    @rule(busy=st.integers(0, 3))
    def flush_everywhere(self, busy: int) -> None:
        """To be rid of something for good."""
        self.meanwhile = None
        for host in range(len(self.hosts)):
            self._flush(host, (), "", 0, "all", busy)
        if self.trouble == "works" and not any(rig.shared.flushes.waiting for rig in self.hosts):
            assert not any(copy.hosts or copy.stored for copy in self.copies)

    def _flush(self, host: int, spaces: tuple[int, ...], name: str, number: int, tier: str, busy: int) -> None:
        """`busy`: work of this host between two slices."""
        rig, host = self.rig(host), host % len(self.hosts)
        if not self.loading:
            self.trim()
        wanted = [self.space(rig, space) for space in spaces] or rig.cache.space.all_namespaces()
        key = key_of(CHAINS[name], number) if name else b""
        flushed = [copy for copy in self.copies if self.concerns(copy.block, spaces, name, number)]
        answers = list[bool]()
        below = self.act(
            lambda: rig.below.begin_flush(
                wanted, key, lambda blocks, durable: answers.append(durable), bool(spaces), tier
            )
        )
        steps = rig.cache.flush(wanted, key, below, tier == "all")
        while self.act(lambda: next(steps, rig)) is None:
            self.point()
            for _ in range(busy):
                self.act(rig.cache.work)
                self.step(rig)
        self.act(below.end)
        self.unanswered.append((answers, host, tier, flushed))
        if not self.loop.is_running():  # else it is answered after the job in which this happens
            self.drive(rig, lambda: answers)
        self.told()

    def answered(self, durable: bool, host: int, tier: str, flushed: list[Copy]) -> None:
        for copy in flushed:
            if tier == "all":
                copy.hosts.discard(host)
            if durable:
                copy.stored = bool(copy.hosts)
            elif host not in copy.hosts:
                copy.hidden.add(host)

    def concerns(self, block: Block, spaces: tuple[int, ...], name: str, number: int) -> bool:
        if spaces and block[0] not in spaces:
            return False
        behind = block[2] == number if block[0] == 2 else block[2] >= number
        return not name or (block[1] == name and behind)

    def told(self) -> None:
        """Forget what no host can find any more."""
        for answers, *flush in self.unanswered:
            for durable in answers:
                self.answered(durable, *flush)
        self.unanswered = [one for one in self.unanswered if not one[0]]
        for host, rig in enumerate(self.hosts):
            if not rig.shared.flushes.waiting:
                for copy in self.copies:
                    if host in copy.hidden:
                        copy.hidden.discard(host)
                        copy.stored = bool(copy.hosts)
        self.copies = [copy for copy in self.copies if copy.hosts or copy.stored]

    def trim(self) -> None:
        """Look what hosts have: not all of what they may have reached."""
        for host, rig in enumerate(self.hosts):
            writes, index = rig.shared._writes, rig.cache.space.index
            under_way = {(wanted.namespace.number, wanted.key) for wanted in writes._queue if wanted.evicted}
            under_way |= writes._in_flight
            for copy in self.copies:
                if host not in copy.hosts or not rig.below.settled or self.lines(rig).queued:
                    continue
                space, name, number = copy.block
                namespace, key = self.space(rig, space), key_of(CHAINS[name], number)
                entry = namespace.table.get(key)
                here = b"" if entry == NO_ENTRY else bytes(rig.view(index.frame[entry], 8))
                if here != copy.version.to_bytes(8, "little") and (namespace.number, key) not in under_way:
                    copy.hosts.discard(host)

    # --- the ends ------------------------------------------------------------------------------------

    @rule(host=HOSTS)
    def restart(self, host: int) -> None:
        host %= len(self.hosts)
        self.meanwhile = None
        self.loop.run_until_complete(self.hosts[host].close(0.0))
        self.unanswered = [one for one in self.unanswered if one[1] != host]
        for copy in self.copies:
            copy.hosts.discard(host)
        self.hosts[host] = self.host(host)

    @rule()
    def all_is_well_again(self) -> None:
        """The store works: hosts use it again, flushes reach it, nothing is held, and a new prompt is shared by all."""
        self.trouble, self.meanwhile = "works", None
        self.pass_time(700.0)
        for rig in self.hosts:
            self.drive(rig, lambda rig=rig: self.is_idle(rig))  # type: ignore[misc]
        self.told()
        assert not self.unanswered
        for host, rig in enumerate(self.hosts):
            self._flush(host, (), "", 0, "all", 0)
            rig.check_end()
        assert self.copies == []
        self.pass_time(20.0)  # what could not be fetched is asked for again
        self._store(0, 0, "x", BLOCKS)
        if self.modes[0] == "all":
            self.drive(self.hosts[0], lambda: self.is_idle(self.hosts[0]))
            for host in range(1, len(self.hosts)):
                assert self._load(host, (0,), "x", BLOCKS) == BLOCKS

    def is_idle(self, rig: HostRig) -> bool:
        shared = rig.shared
        idle = shared._writes.idle and not shared._writes.in_flight_bytes and not self.lines(rig).queued
        return idle and rig.below.settled and shared.breaker.may_write and not shared.flushes.waiting

    @rule(
        host=HOSTS,
        other=HOSTS,
        spaces=SOME_SPACES,
        tier=st.sampled_from(["all", "all", "shared"]),
        busy=st.integers(0, 2),
    )
    def reuse(self, host: int, other: int, spaces: tuple[int, ...], tier: str, busy: int) -> None:
        """A prompt's life: stored, maybe sent or evicted, flushed, stored again, and asked for on both hosts."""
        self._store_all(host, spaces, "x")
        for _ in range(busy):
            self.act(self.rig(host).cache.work)
            self.step(self.rig(host))
        if busy == 2:
            self._load(other, spaces, "x", BLOCKS)
        if busy != 1:
            self._store_all(host, (0, 1, 2), "y")
        self._flush(host, (), "", 0, tier, busy)
        self._send(host)
        self.pass_time(15.0)  # what was believed of the store, or could not be fetched, is asked for again
        self._load(other, spaces, "x", BLOCKS)
        self._store_all(host, spaces, "x")
        self._send(host)
        self._load(other, spaces, "x", BLOCKS)

    def _store_all(self, host: int, spaces: tuple[int, ...], name: str) -> None:
        for space in spaces:
            self._store(host, space, name, BLOCKS)

    @invariant()
    def consistent(self) -> None:
        self.steps += 1
        if self.steps == 3 and self.trouble != "works":
            self.trouble = "works"
            for seconds in (60.0, 10.0):
                self.pass_time(seconds)
                for rig in self.hosts:
                    self._send(self.hosts.index(rig))
        for rig in self.hosts:
            rig.check()
        self.told()


TestFleet = in_first_ring(Fleet, examples=60, steps=40)
TestFleetForLong = in_stress(Fleet)
