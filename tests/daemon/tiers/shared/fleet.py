"""Hosts that share a store, against what a cache may and may not serve: good or a miss, and nothing that was flushed.

Each host is DRAM over a shared tier, in this process; the store is in memory, and evicts, forgets, is away, is full, is
spoilt, and loses answers. While a job is at the store, and between two slices of a flush, something else may happen.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from chains import chain_of, key_of
from host_rig import BLOCK_BYTES, HostRig, content
from hypothesis.stateful import RuleBasedStateMachine, invariant
from memory_store import MemoryStore

from tiercache.daemon import cache
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.tiers.dram import promotion
from tiercache.daemon.tiers.dram.space import Namespace, first_of_window
from tiercache.daemon.tiers.shared.fetches import FetchJob
from tiercache.daemon.tiers.shared.lines import LineUse, SharedJob
from tiercache.daemon.tiers.shared.stores.store import SharedStore, StoreError, StoreProblem

T = TypeVar("T")


class SteppedLines:
    """In the place of `Lines`: a job runs when `step` is called, in the caller's thread."""

    def __init__(self, store: SharedStore, uses: list[tuple[LineUse, ...]], call_soon_threadsafe: object) -> None:
        self._store = store
        self._queues: dict[LineUse, deque[SharedJob]] = {use: deque() for use in LineUse}
        self._posted: deque[Callable[[], None]] = deque()
        self.running: list[SharedJob] = []
        """More than one where a test runs the next one within a call of the store."""

    @property
    def waiting(self) -> int:
        return len(self._posted)

    @property
    def queued(self) -> int:
        return sum(map(len, self._queues.values()))

    def submit(self, job: SharedJob, use: LineUse) -> None:
        job.post = self._posted.append
        self._queues[use].append(job)

    def step(self, which: int = 0, use: LineUse | None = None) -> bool:
        """Run the next job of a use, by number among those that have one, and tell the loop; False if there is none."""
        queues = [queue for its, queue in self._queues.items() if queue and use in (None, its)]
        if not queues:
            return False
        job, connection = queues[which % len(queues)].popleft(), self._store.connect()
        self.running.append(job)
        try:
            job.run(connection)
        except StoreError as error:
            job.problem = error
        self.running.pop()
        self._posted.append(job.ended)
        self.deliver()
        return True

    def deliver(self) -> None:
        while self._posted:
            self._posted.popleft()()

    def stop(self, deadline_s: float) -> bool:
        for queue in self._queues.values():
            queue.clear()
        return True


class SteppedLoop(asyncio.SelectorEventLoop):
    """Its time is `now_s`; what it would give to a thread is done at once."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        super().__init__()
        self._errors: list[dict[str, Any]] = []
        self.set_exception_handler(lambda loop, context: self._errors.append(context))

    def time(self) -> float:
        return self.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except OSError as error:
            future.set_exception(error)
        return future

    def act(self, call: Callable[[], T]) -> T:
        """Call it on the loop, and then what that leads to."""

        async def acting() -> T:
            result = call()
            for _ in range(4):
                await asyncio.sleep(0)
            return result

        result = self.run_until_complete(acting())
        assert not self._errors, self._errors
        return result


BLOCKS, FRAMES, SPACES = 6, 24, 3
CHAINS = {name: chain_of(name, BLOCKS) for name in "xyz"}

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


class Hosts(RuleBasedStateMachine):
    """The hosts, the store, and the copies that may still be found."""

    frames = FRAMES
    """Of each host's DRAM."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="tiercache-fleet-"))
        self.loop = SteppedLoop()
        self.patch = pytest.MonkeyPatch()
        for name in ("FLUSHED_AT_ONCE", "KEYS_FLUSHED_AT_ONCE"):
            self.patch.setattr(cache, name, 1)
        self.patch.setattr(cache, "FLUSH_NS", 0)
        self.patch.setattr(promotion, "LOOK_AGAIN_S", 0.0)
        self.hosts: list[HostRig] = []
        self.copies: list[Copy] = []
        self.loading: set[tuple[int, int, str]] = set()
        self.unanswered: list[tuple[list[bool], int, str, list[Copy]]] = []
        self.version = self.turn = 0
        self.trouble, self.steps = "works", 0
        self.meanwhile: tuple[int, Callable[[], object]] | None = None

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
            region_bytes=self.frames * BLOCK_BYTES,
            clock_s=self.loop.time,
            lines=SteppedLines,
            write=self.modes[number],
        )
        begin = rig.shared.flushes.begin
        rig.shared.flushes.begin = lambda names, done: begin(names, self.told_truly(rig, list(names), done))  # type: ignore[method-assign]
        self.loop.act(rig.open)
        for space in range(SPACES):
            self.space(rig, space)
        return rig

    def told_truly(self, rig: HostRig, names: list[bytes], done: Callable[[bool], None]) -> Callable[[bool], None]:
        """Look whether it is true what the tier answers to a flush that replaces these notes."""
        notes = self.store_of_all.notes
        before = [notes.get(name) for name in names]

        def answered(durable: bool) -> None:
            if durable:
                kept = [name for name, was in zip(names, before, strict=True) if was and notes.get(name) == was]
                assert not kept, "it is said to be durable, and the store was not told"
            else:
                assert rig.shared.flushes.waiting, "it is said to be kept, and nothing waits to be told"
                assert "has not been told of a flush yet" in rig.shared.reasons()[-1]
            done(durable)

        return answered

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

    # --- the hosts -----------------------------------------------------------------------------------

    def rig(self, host: int) -> HostRig:
        return self.hosts[host % len(self.hosts)]

    def act(self, call: Callable[[], T]) -> T:
        """On the loop; within a job it runs already."""
        return call() if self.loop.is_running() else self.loop.act(call)

    def lines(self, rig: HostRig) -> SteppedLines:
        lines: Any = rig.shared.access._lines
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

    def host_stores(self, host: int, space: int, name: str, blocks: int) -> None:
        rig, host = self.rig(host), host % len(self.hosts)
        self.version += 1
        rig.version = self.version
        states = self.act(lambda: rig.store(self.space(rig, space), CHAINS[name][: 16 * blocks]))
        for number, state in enumerate(states):
            if state.name == "FRAME":
                loads = {loader for loader, its, chain in self.loading if (its, chain) == (space, name)}
                self.copies.append(Copy((space, name, number), self.version, {host, *loads}))

    def host_sends(self, host: int) -> None:
        rig = self.rig(host)
        for _ in range(20):
            if not (self.act(rig.cache.work) or self.step(rig)):
                return

    def host_loads(self, host: int, spaces: tuple[int, ...], name: str, blocks: int) -> int:
        """Look up, match, promote, compare, release; returns the good blocks."""
        rig, host = self.rig(host), host % len(self.hosts)
        if any(isinstance(job, FetchJob) for job in self.lines(rig).running):
            return 0  # it would wait for blocks of that job, which waits for this
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

    def host_flushes(self, host: int, spaces: tuple[int, ...], name: str, number: int, tier: str, busy: int) -> None:
        """`busy`: work of this host between two slices."""
        rig = self.rig(host)
        answers = list[bool]()
        slices = self.flush_in_slices(host, spaces, name, number, tier, answers.append)
        while next(slices, None) is not None:
            self.point()
            for _ in range(busy):
                self.act(rig.cache.work)
                self.step(rig)
        if not self.loop.is_running():  # else it is answered after the job in which this happens
            self.drive(rig, lambda: answers)
        self.told()

    def flush_in_slices(
        self,
        host: int,
        spaces: tuple[int, ...],
        name: str = "",
        number: int = 0,
        tier: str = "all",
        told: Callable[[bool], None] = lambda durable: None,
    ) -> Iterator[bool]:
        """Begin a flush. Returns its slices; `told` when it is answered."""
        rig, host = self.rig(host), host % len(self.hosts)
        self.told()
        if not self.loading and not self.unanswered:  # else the store may have been told, and a host may send since
            self.trim()
        wanted = [self.space(rig, space) for space in spaces] or rig.cache.space.all_namespaces()
        key = key_of(CHAINS[name], number) if name else b""
        flushed = [copy for copy in self.copies if self.concerns(copy.block, spaces, name, number)]
        answers = list[bool]()

        def done(blocks: int, durable: bool) -> None:
            answers.append(durable)
            told(durable)

        below = self.act(lambda: rig.below.begin_flush(wanted, key, done, bool(spaces), tier))
        self.unanswered.append((answers, host, tier, flushed))
        steps = rig.cache.flush(wanted, key, below, tier == "all")

        def slices() -> Iterator[bool]:
            while self.act(lambda: next(steps, rig)) is None:
                yield True
            self.act(below.end)

        return slices()

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

    def is_idle(self, rig: HostRig) -> bool:
        shared = rig.shared
        idle = shared._writes.idle and not shared._writes.in_flight_bytes and not self.lines(rig).queued
        return idle and rig.below.settled and shared.access.breaker.may_write and not shared.flushes.waiting

    def host_stores_all(self, host: int, spaces: tuple[int, ...], name: str) -> None:
        for space in spaces:
            self.host_stores(host, space, name, BLOCKS)

    @invariant()
    def consistent(self) -> None:
        self.steps += 1
        if self.steps == 3 and self.trouble != "works":
            self.trouble = "works"
            for seconds in (60.0, 10.0):
                self.pass_time(seconds)
                for rig in self.hosts:
                    self.host_sends(self.hosts.index(rig))
        for rig in self.hosts:
            rig.check()
        self.told()
