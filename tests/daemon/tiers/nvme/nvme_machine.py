"""A state machine of the NVMe tier below a DRAM cache, on disks in memory: one loop, one clock, no threads.

Each store writes bytes that tell namespace, key and how often that block was flushed before. So a load can be held to
three promises:

    good or a miss          the bytes are those of this block
    flushed means gone      they are of no time before a flush: in this life, and after the next start if the flush was
                            durable
    nothing is lost         what was on the disks when all was quiet is found, unless a disk has lost it

Between the steps the books are checked, and whether a daemon that starts now would find the disks in order. A
subscriber to the events knows what is in which tier.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain as joined
from pathlib import Path
from typing import Any, TypeVar

import pytest
from cache_rig import Kept
from chains import KEY_BYTES, chain_of, key_of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from memory_disks import MemoryDisk
from played import Clock, ClockLoop
from tier_rig import TierRig

from tiercache.daemon.cache import CacheLimits
from tiercache.daemon.events.events import Block, Events, NamedBlocks
from tiercache.daemon.index.index import Index
from tiercache.daemon.tiers.dram import growing_leases, growing_run, promotion, read_leases, runs
from tiercache.daemon.tiers.dram.below import FlushBelow, Granted
from tiercache.daemon.tiers.dram.leases import Owner, ReadLease
from tiercache.daemon.tiers.dram.space import Namespace, first_of_window
from tiercache.daemon.tiers.forms import codecs
from tiercache.daemon.tiers.nvme.moves import flights, flushes, offers, placement, shelf_source
from tiercache.daemon.tiers.nvme.shelf import recovery, registry, shelf
from tiercache.protocol.checksums import CHECKSUM_LANES, block_checksum, block_seed
from tiercache.protocol.messages import BlockState, ReceivedRun

T = TypeVar("T")
Name = tuple[str, bytes]
"""A block: the fingerprint of its namespace, and its key."""

PAGE = 4096
SEGMENT_BYTES = 8 * PAGE
REGION_BYTES = 16 * PAGE
WINDOW = 3
HEAD = chain_of("a", 2)
BRANCHES = [chain_of(name, 4, after=HEAD) for name in "bef"]
CHAINS = [chain_of("a", 6), *BRANCHES, chain_of("c", 7), chain_of("d", 1)]
KEYS = sorted({key_of(chain, number) for chain in CHAINS for number in range(len(chain) // KEY_BYTES)})
SPACES = [(PAGE, 0, 0), (PAGE, 1, 0), (PAGE, 0, WINDOW), (2 * PAGE, 0, 0)]
"""Block bytes, rank and window of the namespaces."""
MANY_ROUNDS = 3000
FOR_EVER_NS = 1 << 60
FEW_CHANGES = 6
"""Of a catalog, beyond which its owner holds back."""
SLICES: list[tuple[Any, str]] = [
    (growing_run, "PINS"),
    (growing_leases, "PINS"),
    (read_leases, "PINS"),
    (runs, "PINS"),
    (shelf_source, "PINS"),
    (offers, "LOOKED_AT_ONCE"),
    (flushes, "TOLD_AT_ONCE"),
    (flushes, "ANSWERED_AT_ONCE"),
    (recovery, "RELEASED_AT_ONCE"),
    (registry, "BURIED_AT_ONCE"),
    (shelf, "EVICT_AT_ONCE"),
]

chains = st.sampled_from(CHAINS)
lengths = st.integers(1, 7)
keys = st.sampled_from(KEYS)
spaces = st.integers(0, len(SPACES) - 1)
groups = st.sampled_from([(0,), (1,), (2,), (3,), (0, 2), (0, 1), (1, 3)])
disks = st.integers(0, 1)
then = st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans())
"""What follows a step: so much of the daemon's work, blocks that move on each disk, and perhaps commits."""


@lru_cache(maxsize=4096)
def content(name: Name, generation: int, length: int) -> bytes:
    """What is stored of a block after so many flushes of it."""
    seed = hashlib.blake2b(name[0].encode() + name[1] + bytes([generation % 256]), digest_size=64).digest()
    return b"".join(seed + bytes([page]) * 64 for page in range(length // 128))


def behind(space: Namespace, key: bytes) -> set[bytes]:
    """The keys that a flush of this one concerns."""
    if space.table.windowed:
        return {key}
    found = set[bytes]()
    for chain in CHAINS:
        its = [key_of(chain, number) for number in range(len(chain) // KEY_BYTES)]
        found.update(its[its.index(key) :] if key in its else ())
    return found


@dataclass
class Model:
    """What may be found, and what must be."""

    generation: dict[Name, int] = field(default_factory=dict)
    """How often each block was flushed: what is stored now."""
    floor: dict[Name, int] = field(default_factory=dict)
    """The oldest that may be found in this life."""
    durable_floor: dict[Name, int] = field(default_factory=dict)
    """And after the next start."""
    in_dram: set[Name] = field(default_factory=set)
    """Stored in this life, where DRAM has room for everything."""
    promised: set[Name] = field(default_factory=set)
    """On the disks when all was quiet."""

    def flushed(self, names: set[Name]) -> dict[Name, int]:
        """A flush begins; returns the generations that it lets live."""
        for name in names:
            self.generation[name] = self.floor[name] = self.generation.get(name, 0) + 1
        self.in_dram -= names
        self.promised -= names
        return {name: self.floor[name] for name in names}

    def restarted(self) -> None:
        self.floor = dict(self.durable_floor)
        self.in_dram = set()


def hash_of(number: int, key: bytes) -> int:
    """What events call a block of that namespace: the first two are ranks of one model, and share their names."""
    return max(2, number) * len(KEYS) + KEYS.index(key)


def hashes_in(index: Index) -> set[int]:
    return {hash_of(number, key) for number, table in index.tables.items() for shard in table.shards for key in shard}


class Subscriber:
    """What somebody knows who is told each event: the hashes of the blocks in each tier."""

    def __init__(self) -> None:
        self.kept = Kept()
        self.events = Events(self.kept)
        self.here: dict[str, set[int]] = {"CPU": set(), "STORAGE": set()}

    def catch_up(self, knows_all: bool) -> None:
        """Take in all events so far, each of which must be possible. `knows_all`: each block has a name."""
        self.events.flush()
        for event in joined(*self.kept.published):
            if event["type"] == "BlockStored":
                here, before = self.here[event["medium"]], event["parent_block_hash"]
                for one in event["block_hashes"]:
                    assert one not in here, "stored twice"
                    assert before is None or before in here or not knows_all, "stored before the one that it follows"
                    here.add(one)
                    before = one
            elif event["type"] == "BlockRemoved":
                for one in event["block_hashes"]:
                    self.here[event["medium"]].remove(one)
        self.kept.published.clear()


@dataclass
class Grant:
    """Slots that a client writes to by itself, and the bytes for each."""

    owner: Owner
    got: Granted
    disk: MemoryDisk
    data: list[bytes]
    checksums: list[int]

    def write(self) -> None:
        for place, data in zip(self.got.extents, self.data, strict=True):
            self.disk.segments[place.segment][place.offset : place.offset + len(data)] = data


@dataclass
class Held:
    """A lease of the client, and the oldest generations that were allowed when it was given."""

    lease: ReadLease
    spaces: Sequence[Namespace]
    floor: dict[Name, int]


class NvmeMachine(RuleBasedStateMachine):
    """See the module."""

    @initialize(
        directories=st.integers(1, 2),
        roomy=st.booleans(),
        small_slices=st.booleans(),
        quota=st.booleans(),
        codecs=st.sampled_from([["raw"], ["lz4", "raw"]]),
    )
    def begin(self, directories: int, roomy: bool, small_slices: bool, quota: bool, codecs: list[str]) -> None:
        self.clock = Clock()
        self.loop = ClockLoop(self.clock)
        self.errors: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda loop, context: self.errors.append(context))
        self.patch = pytest.MonkeyPatch()
        for module, name in SLICES if small_slices else ():
            self.patch.setattr(module, name, 1)
        for module in (flights, shelf_source) if small_slices else ():  # else no chain is longer than one operation
            self.patch.setattr(module, "most_together", lambda frame_bytes: 2)
        for module, name in ((promotion, "GROW_NS"), (flights, "SETTLE_NS")):
            self.patch.setattr(module, name, 0 if small_slices else FOR_EVER_NS)
        self.patch.setattr(placement, "COPIED_SHARE", 1)  # nearly any head may be copied
        self.roomy = roomy
        segments = 64 if roomy else 2
        self.most_pending = FEW_CHANGES if small_slices else 1 << 30
        self.disks = [self.disk(number, segments) for number in range(directories)]
        self.quota = {"tenant": 5 * PAGE} if quota and not roomy else {}
        self.codecs, self.lives = codecs, 0
        """Of the daemon's lives in turn."""
        self.model = Model()
        self.suspect = False
        """A disk may have other bytes than it was given."""
        self.start()
        for space in self.spaces:  # there are segments now
            self.store(self.spaces.index(space), CHAINS[-1], 1, 0, (2, 3, True))
        self.come_to_rest()

    def disk(self, number: int, segments: int) -> MemoryDisk:
        return MemoryDisk(number, self.clock, segments, SEGMENT_BYTES, self.most_pending)

    def start(self) -> None:
        self.lives += 1
        self.held: list[Held] = []
        self.grants: list[Grant] = []
        self.writers = [Owner(name * 16) for name in (b"b", b"c")]
        self.others = [
            self.disk(10 * self.lives + number, disk.most_segments) for number, disk in enumerate(self.disks)
        ]
        """Disks that may be put in the places of those."""
        self.flushes: list[FlushBelow] = []
        self.answers: list[list[bool]] = []
        """Of the flushes of this life."""
        self.subscriber = Subscriber()
        self.all_are_named = self.lives == 1
        """Events may name each block that there is."""
        self.calm = not any(disk.hung or disk.failing or disk.away for disk in self.disks)
        """There was no trouble in this life."""
        self.rig = TierRig(
            Path("/nowhere"),
            disks=self.disks,
            arena_regions=8 if self.roomy else 2,
            events=self.subscriber.events,
            region_bytes=REGION_BYTES,
            limits=CacheLimits(quarantine_bytes=1 << 30, quota_below=self.quota, pin_share=1.0),
            nvme_codec=self.codecs[self.lives % len(self.codecs)],
        )
        self.rig.memory += self.others
        self.run(self.rig.tier.open(0.001))
        self.spaces = [self.rig.namespace(size, rank, window, tenant="tenant") for size, rank, window in SPACES]

    def run(self, what: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(what)

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        try:
            self.recheck()
            self.run(self.rig.crash())
        finally:
            self.patch.undo()
            self.loop.end()

    @invariant()
    def nothing_is_wrong(self) -> None:
        if hasattr(self, "rig"):
            assert not self.errors, self.errors
            self.rig.check()
            self.subscriber.catch_up(self.all_are_named)
            for disk in self.rig.memory:
                assert disk.check() == []

    # --- what clients do -----------------------------------------------------------------------------

    def name(self, space: Namespace, chain: bytes, number: int) -> Name:
        return space.fingerprint, key_of(chain, number)

    @rule(space=spaces, chain=chains, length=lengths, first=st.integers(0, 4), then=then)
    def store(self, space: int, chain: bytes, length: int, first: int, then: tuple[int, int, bool]) -> None:
        """A chain from its first block on; of a window any part."""
        its, rig = self.spaces[space], self.rig
        chain = chain[: KEY_BYTES * length]
        first = min(first, len(chain) // KEY_BYTES - 1) if its.table.windowed else 0
        parent = key_of(chain, first - 1) if first else b""
        got = rig.cache.reserve(rig.owner, its, parent, chain[KEY_BYTES * first :], 10, self.named(its, chain, first))
        numbers = [number for number, state in enumerate(got.states) if state is BlockState.FRAME]
        for number, frame in zip(numbers, got.frames, strict=True):
            name = self.name(its, chain, first + number)
            rig.view(frame, its.spec.block_bytes)[:] = self.bytes_of(its, name, self.model.generation.get(name, 0))
        rig.cache.writes.commit(rig.owner, got.lease_id, numbers)
        if self.roomy:
            assert BlockState.NONE not in got.states, "there is room for everything"
            self.model.in_dram |= {self.name(its, chain, first + number) for number in range(len(got.states))}
        self.go(then)

    @staticmethod
    def named(space: Namespace, chain: bytes, first: int) -> Callable[[int], Block]:
        """What events are to say of a chain from its block `first` on; a block of a window follows none."""

        def say(place: int) -> Block:
            at = first + place
            follows = hash_of(space.number, key_of(chain, at - 1)) if at and not space.table.windowed else None
            its = hash_of(space.number, key_of(chain, at))
            return NamedBlocks(ReceivedRun([its], follows, bytes(4)), 1)(0)

        return say

    @staticmethod
    def bytes_of(space: Namespace, name: Name, generation: int) -> bytes:
        return content(name, generation, space.spec.block_bytes)

    @rule(group=groups, chain=chains, length=lengths, then=then)
    def match(self, group: Sequence[int], chain: bytes, length: int, then: tuple[int, int, bool]) -> None:
        if len(self.held) < 4:
            its = [self.spaces[number] for number in group]
            lease = self.rig.match(its, chain[: KEY_BYTES * length])
            if lease is not None:
                self.held.append(Held(lease, its, dict(self.model.floor)))
        self.go(then)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 3), looks=st.booleans(), then=then)
    def release(self, which: int, looks: bool, then: tuple[int, int, bool]) -> None:
        self.read(self.held.pop(which % len(self.held)), looks)
        self.go(then)

    def read(self, held: Held, looks: bool = True) -> int:
        """Compare what there is under a lease, then release it; returns how many blocks, 0 for a revoked lease."""
        lease, reads, wrong = held.lease, self.rig.cache.reads, list[str]()
        blocks = lease.blocks
        for space in held.spaces if looks and not lease.over else ():
            first, length = first_of_window(space, blocks), space.spec.block_bytes
            frames = reads.frames(lease, space, first, blocks - first)
            assert len(frames) == blocks - first or lease.over
            for number, frame in enumerate(frames, first):
                name, got = self.name(space, lease.keys, number), bytes(self.rig.view(frame, length))
                allowed = range(held.floor.get(name, 0), self.model.generation.get(name, 0) + 1)
                if not any(got == self.bytes_of(space, name, generation) for generation in allowed):
                    wrong.append(f"block {number} of namespace {space.number}")
        if not reads.release(self.rig.owner, lease.lease_id):
            return 0
        assert not wrong, wrong
        return blocks

    @rule(group=groups, chain=chains, then=then)
    def prefetch(self, group: Sequence[int], chain: bytes, then: tuple[int, int, bool]) -> None:
        self.rig.cache.prefetch(self.rig.owner, [self.spaces[number] for number in group], chain)
        self.go(then)

    @rule(
        key=st.one_of(st.just(b""), keys),
        tier=st.sampled_from(["all", "all", "nvme"]),
        before=st.integers(0, 5),
        then=then,
        looks=st.booleans(),
    )
    def flush(self, key: bytes, tier: str, before: int, then: tuple[int, int, bool], looks: bool = False) -> None:
        """All of it or from a key on, perhaps while its chain moves: asked for now, answered some time later, once."""
        chain = next((one for one in CHAINS if key in one), CHAINS[0])
        if before < 3:
            self.store(before, chain, 7, 0, (2, 0, False))
        elif before == 3:
            self.match((0,), chain, 7, (1, 0, False))
        every = self.rig.cache.space.all_namespaces()
        if tier == "all":
            for _ in self.flush_in_turn(every, [every], key, False):
                pass
        else:
            self.model.promised -= self.concerned(every, key)
            self.begin_flush(every, key, False, {}).forget(every)
            self.flushes[-1].end()
        self.go(then)
        if looks:
            self.look()

    @rule(
        key=st.one_of(st.just(b""), keys),
        named=st.booleans(),
        events=st.lists(st.sampled_from(["away", "away", "replaced", "works"]), min_size=4, max_size=4),
        disk=disks,
        rounds=st.sampled_from([1, 6, 40]),
    )
    def flush_namespaces_in_turn(self, key: bytes, named: bool, events: list[str], disk: int, rounds: int) -> None:
        """One namespace after the other, or three of the four, while directories come and go."""
        self.end_grants()  # nobody writes to slots of a directory that is closed and opened again
        every = self.spaces[:3] if named else self.spaces
        self.come_and_go(events.pop(), disk, rounds)
        for space in range(len(self.spaces)):
            self.store(space, CHAINS[0], 7, 0, (0, 0, False))
        for _ in self.flush_in_turn(every, [[space] for space in every], key, named):
            self.come_and_go(events.pop() if events else "works", disk, rounds)
            self.nothing_is_wrong()

    def come_and_go(self, what: str, disk: int, rounds: int) -> None:
        """A directory disappears or comes back, or another one is at its place, and the daemon sees that."""
        if what == "away":
            self.take_away(disk)
        elif what == "replaced":
            self.replace(disk)
        self.wait(30.0)
        self.go_on(rounds)

    def flush_in_turn(
        self, every: Sequence[Namespace], parts: Sequence[Sequence[Namespace]], key: bytes, named: bool
    ) -> Iterator[None]:
        """Flush these, part by part, in DRAM and below; it goes on after each of them."""
        kept: dict[Name, int] = {}
        flush = self.begin_flush(every, key, named, kept)
        for part in parts:
            self.rig.cache.flush_dram([space.number for space in part], key)
            kept.update(self.model.flushed(self.concerned(part, key)))
            flush.forget(part)
            yield
        flush.end()

    def begin_flush(self, every: Sequence[Namespace], key: bytes, named: bool, kept: dict[Name, int]) -> FlushBelow:
        """A flush of the tier, which is answered some time later, once; `kept`: the generations that it lets live."""
        answers, model = list[bool](), self.model
        self.answers.append(answers)

        def answered(blocks: int, durable: bool) -> None:
            answers.append(durable)
            assert len(answers) == 1
            for name, generation in kept.items() if durable else ():
                model.durable_floor[name] = max(model.durable_floor.get(name, 0), generation)

        flush = self.rig.tier.begin_flush(every, key, answered, named)
        self.flushes.append(flush)
        return flush

    @staticmethod
    def concerned(every: Sequence[Namespace], key: bytes) -> set[Name]:
        """The blocks that a flush is about."""
        return {(space.fingerprint, one) for space in every for one in (behind(space, key) if key else KEYS)}

    @rule()
    def look(self) -> None:
        """Everything that can be had some time later is right."""
        self.go_on(6)
        leases = [(space, self.rig.match([space], keys)) for space, keys in self.ends()]
        self.go_on(6)
        for space, lease in leases:
            if lease is not None:
                self.read(Held(lease, [space], dict(self.model.floor)))

    # --- clients that write to the disk themselves -----------------------------------------------------

    @rule(
        space=st.sampled_from([0, 1, 3]), chain=chains, first=st.integers(0, 4), length=lengths, writer=disks, then=then
    )
    def grant(
        self, space: int, chain: bytes, first: int, length: int, writer: int, then: tuple[int, int, bool]
    ) -> None:
        its, owner = self.spaces[space], self.writers[writer]
        first = min(first, len(chain) // KEY_BYTES - 1)
        parent, keys = key_of(chain, first - 1) if first else b"", chain[KEY_BYTES * first :][: KEY_BYTES * length]
        grants = self.rig.tier.grants
        assert grants is not None
        got = grants.reserve(owner, its, parent, keys, 2.0)
        if got.lease_id:
            self.all_are_named = False
            wanted = [key_of(keys, got.present + number) for number in range(len(got.extents))]
            names = [(its.fingerprint, key) for key in wanted]
            data = [self.bytes_of(its, name, self.model.generation.get(name, 0)) for name in names]
            length_bytes = its.spec.block_bytes
            seeds = [block_seed(key, its.fingerprint, length_bytes, codecs.RAW, CHECKSUM_LANES) for key in wanted]
            sums = [block_checksum(one, seed, CHECKSUM_LANES) for one, seed in zip(data, seeds, strict=True)]
            shelf = next(one for one in self.rig.shelves if str(one.directory.path) == got.directory)
            self.grants.append(Grant(owner, got, shelf.directory.disk, data, sums))  # type: ignore[attr-defined]
        self.go(then)

    @precondition(lambda self: self.grants)
    @rule(which=st.integers(0, 9), how=st.sampled_from(["all", "all", "some", "late", "never"]), then=then)
    def end_grant(self, which: int, how: str, then: tuple[int, int, bool]) -> None:
        """Its blocks are complete, or some of them; or none, and perhaps it goes on writing for a while."""
        grant, grants = self.grants.pop(which % len(self.grants)), self.rig.tier.grants
        assert grants is not None
        grant.write()
        if how in ("all", "some"):
            checksums = grant.checksums if how == "all" else grant.checksums[:1]
            grants.commit(grant.owner, grant.got.lease_id, checksums)
        elif how == "late":
            grants.abort(grant.owner, grant.got.lease_id, False)
            self.go(then)
            grant.write()
        if how in ("late", "never"):
            grants.abort(grant.owner, grant.got.lease_id, True)
        self.go(then)

    def end_grants(self) -> None:
        while self.grants:
            self.end_grant(0, "never", (0, 0, False))

    @rule(writer=disks, process=st.booleans())
    def lose_writer(self, writer: int, process: bool) -> None:
        """Its session ends, and perhaps its process, which then writes no more."""
        owner = self.writers[writer]
        self.rig.cache.session_lost(owner)
        if process:
            self.rig.cache.process_gone(owner)
            self.grants = [grant for grant in self.grants if grant.owner is not owner]
            self.writers[writer] = Owner(owner.instance)

    # --- what the daemon and its disks do ------------------------------------------------------------

    def go(self, then: tuple[int, int, bool]) -> None:
        """What follows a step."""
        rounds, moves, commits = then
        self.run(self.rig.work(rounds))
        for disk in self.rig.memory:
            disk.step(moves, rounds, commits)

    @rule(rounds=st.integers(1, 5))
    def work(self, rounds: int) -> None:
        self.run(self.rig.work(rounds))

    @rule(disk=disks, moves=st.integers(0, 4), at=st.integers(0, 3), commits=st.booleans())
    def move(self, disk: int, moves: int, at: int, commits: bool) -> None:
        self.disks[disk % len(self.disks)].step(moves, at, commits)

    @rule(rounds=st.integers(3, 20))
    def go_on(self, rounds: int) -> None:
        """Daemon and disks, all of it."""
        for _ in range(rounds):
            self.rig.step_disks()
            self.run(self.rig.work())

    @rule(seconds=st.sampled_from([0.2, 1.1, 3.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.run(self.rig.work())

    @rule(then=then)
    def forget_dram(self, then: tuple[int, int, bool]) -> None:
        self.rig.forget_dram()
        self.model.in_dram.clear()
        self.go(then)

    @rule(space=spaces, key=keys, then=then)
    def forget_block(self, space: int, key: bytes, then: tuple[int, int, bool]) -> None:
        its = self.spaces[space]
        self.rig.forget_blocks(its, key)
        self.model.in_dram -= {(its.fingerprint, one) for one in behind(its, key)}
        self.go(then)

    # --- what goes wrong -----------------------------------------------------------------------------

    @rule(disk=disks, call=st.sampled_from(["write", "segment", "commit", "read"]))
    def fail(self, disk: int, call: str) -> None:
        its = self.disks[disk % len(self.disks)]
        its.failing ^= {call}
        self.calm = False
        if call == "read":
            self.model.promised.clear()  # a block that fails twice is dropped

    @rule(disk=disks)
    def hang(self, disk: int) -> None:
        its = self.disks[disk % len(self.disks)]
        its.hung, self.calm = not its.hung, False

    @rule(disk=disks)
    def take_away(self, disk: int) -> None:
        its = self.disks[disk % len(self.disks)]
        its.away = "" if its.away else "the test took it"
        self.calm = self.all_are_named = False

    @rule(disk=disks)
    def replace(self, disk: int) -> None:
        """Another disk is mounted at its place; perhaps the one that was there before."""
        at = disk % len(self.disks)
        self.disks[at], self.others[at] = self.others[at], self.disks[at]
        self.mount()

    @rule()
    def mount_at_each_others_places(self) -> None:
        self.disks.reverse()
        self.mount()

    def mount(self) -> None:
        self.all_are_named = False
        self.rig.at.update(zip(self.rig.dirs, self.disks, strict=True))
        self.calm, self.suspect = False, True
        self.model.promised.clear()

    @rule(disk=disks, which=st.integers(0, 99))
    def damage(self, disk: int, which: int) -> None:
        if self.disks[disk % len(self.disks)].damage(which):
            self.calm, self.suspect = False, True
            self.model.promised.clear()

    # --- lives ---------------------------------------------------------------------------------------

    @rule(
        landed=st.integers(0, 15),
        commits=st.sampled_from([0, 0, 1, 9]),
        pages=st.sampled_from([0, 0, 0, 0x8421]),
        back=st.booleans(),
    )
    def kill(self, landed: int, commits: int, pages: int, back: bool) -> None:
        """With a loss of power if commits or pages are lost. `back`: a disk that was replaced is at its place again."""
        self.run(self.rig.crash(landed))
        if back:
            self.replace(0)
        for disk in self.disks if commits or pages else ():
            self.suspect = True
            disk.lose_power(commits, pages)
            self.model.promised.clear()
        self.model.restarted()
        self.start()

    @rule(
        space=spaces, chain=chains, at=st.integers(0, 3), times=st.integers(1, 3), rounds=st.integers(0, 6), then=then
    )
    def flush_and_kill(
        self, space: int, chain: bytes, at: int, times: int, rounds: int, then: tuple[int, int, bool]
    ) -> None:
        """What is on the disk is flushed, perhaps again and again, and the daemon is killed while it is unlinked."""
        self.store(space, chain, 7, 0, then)
        self.go_on(20)
        for _ in range(times):
            self.flush(key_of(chain, min(at, len(chain) // KEY_BYTES - 1)), "all", 5, (0, 0, False))
            for disk in self.rig.memory:
                disk.step()
        self.go_on(rounds)
        self.kill(0, 0, 0, False)
        self.look()

    @rule(grace_s=st.sampled_from([0.0, 3.0, 3.0]), all_is_dirty=st.booleans())
    def stop(self, grace_s: float, all_is_dirty: bool) -> None:
        well, self.held = self.calm and self.roomy and self.all_are_open(), []
        for disk in self.rig.memory:
            disk.most_pending = 1 << 30  # else its owner holds back until the grace is over
        if all_is_dirty:
            self.flush(b"", "nvme", 5, (2, 3, True))
            while well and self.rig.tier.unlinking:  # such blocks count as being there
                self.go_on(1)
        left = self.run(self.rig.close(grace_s))
        if well and grace_s:
            assert left == 0
            self.model.promised |= self.model.in_dram
        for disk in self.rig.memory:
            disk.crash()
            disk.most_pending = self.most_pending
        self.model.restarted()
        self.start()

    def all_are_open(self) -> bool:
        shelves = self.rig.shelves
        return len(shelves) == len(self.disks) and not any(shelf.loading for shelf in shelves)

    def is_quiet(self) -> bool:
        tier, shelves = self.rig.tier, self.rig.shelves
        return (
            self.all_are_open()
            and all(shelf.works and not shelf.catalog.pending and not shelf.queue.in_flight for shelf in shelves)
            and self.rig.below.settled
            and not tier.unlinking
            and not any(shelf.slots.left for shelf in shelves)
            and not self.rig.cache.reads.growing.leases
            and all(self.answers)
        )

    def come_to_rest(self) -> None:
        """All disks are well again, and everything that was begun ends."""
        for rounds in range(MANY_ROUNDS):
            self.rig.step_disks()
            self.run(self.rig.work())
            if self.is_quiet():
                return
            self.clock.now_s += 0.01 if rounds < 300 else 1.0
        raise AssertionError(f"something never ends: {self.rig.tier.stats()}")

    @rule()
    def recheck(self) -> None:
        """Once all is well again everything comes to an end, and nothing is lost that DRAM or the disks have."""
        while self.held:
            self.read(self.held.pop())
        self.end_grants()
        for disk in self.rig.memory:
            disk.failing, disk.hung, disk.away = set(), False, ""
        self.clock.now_s += 60.0  # the pauses after failures are over
        self.come_to_rest()
        self.nothing_is_wrong()
        assert all(self.answers), "a flush was never answered"
        assert all(flush.settled for flush in self.flushes), "a flush takes memory for ever"
        self.events_tell_what_is_there()
        for one in self.rig.shelves:
            stones = one.directory.disk.database.tombstones  # type: ignore[attr-defined]
            assert one.registry.tombstone_count == sum(key != b"" for _, key in stones)
        for disk in self.disks if self.calm else ():
            assert all(key == b"" for _, key in disk.database.tombstones), "a note of a flush stays for ever"
        if not self.roomy:
            self.found()
            self.come_to_rest()
            for account, limit_bytes in (
                self.quota.items() if self.calm and self.lives == 1 else ()
            ):  # no disk came back
                assert self.rig.tier.fairness.used_bytes(account) <= limit_bytes, "a quota does not hold"
            return
        if self.suspect:  # what is damaged is noticed when it is read, and dropped
            self.rig.forget_dram()
            self.found()
            self.come_to_rest()
            self.suspect = False
        here = self.found()
        self.come_to_rest()
        self.rig.forget_dram()
        self.come_to_rest()
        self.model.in_dram.clear()
        missing = self.whole(self.model.promised | here) - self.found()
        assert not missing, f"lost: {missing}"
        self.model.promised |= here

    def events_tell_what_is_there(self) -> None:
        """At rest; of blocks of earlier lives, and of what clients wrote by themselves, they do not know the names."""
        self.subscriber.catch_up(self.all_are_named)
        dram, disks = [self.rig.cache.space.index], [shelf.index for shelf in self.rig.shelves]
        for medium, indexes in (("CPU", dram), ("STORAGE", disks)):
            here = set[int]().union(*map(hashes_in, indexes))
            known = self.subscriber.here[medium]
            assert known == here if self.all_are_named else known <= here, medium

    def ends(self) -> Iterator[tuple[Namespace, bytes]]:
        """Where a request may end: a chain for a namespace of chains, and each start of it for one of windows."""
        for space in self.spaces:
            for chain in CHAINS:
                length = len(chain) // KEY_BYTES
                for end in range(1 if space.table.windowed else length, length + 1):
                    yield space, chain[: KEY_BYTES * end]

    def names(self, space: Namespace, keys: bytes) -> set[Name]:
        """The blocks that a request for these has: all, or the last ones if they are of a window."""
        blocks = len(keys) // KEY_BYTES
        return {self.name(space, keys, number) for number in range(first_of_window(space, blocks), blocks)}

    def found(self) -> set[Name]:
        """What can be loaded now; what DRAM alone has is offered to the disks once more."""
        found = set[Name]()
        for space, keys in self.ends():
            found |= self.names(space, keys[: KEY_BYTES * self.load(space, keys)])
        return found

    def whole(self, names: set[Name]) -> set[Name]:
        """Those of `names` that can be found: a block of a window only if all others of the window are there."""
        windows = [self.names(space, keys) for space, keys in self.ends() if space.table.windowed]
        alone = {name for window in windows for name in window}
        return (names - alone) | {name for window in windows if window <= names for name in window}

    def load(self, space: Namespace, keys: bytes) -> int:
        lease = self.rig.match([space], keys)
        if lease is None:
            return 0
        self.run(self.rig.until(lambda: lease.over or lease.lease_id not in self.rig.cache.reads.growing.leases))
        return self.read(Held(lease, [space], dict(self.model.floor)))
