"""The DRAM cache against an oracle that knows what a cache may and may not do.

Engines store, look up, pin, flush, hang and die; blocks are promoted from a tier below; time passes. Work that the
daemon does in slices is done a few blocks at a time, and anything may happen in between. After each step:

- a block is there only if somebody stored these bytes, they were not flushed, and all blocks before it are there;
- blocks leave only for a reason, and never while a lease or a pin holds them;
- a frame has one owner, and what is read under a lease is right for as long as the daemon says so;
- accounts keep their quotas, events tell what is there, and all counts agree.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from cache_at_once import CacheAtOnce
from cache_rig import CacheRig, Kept, branch
from cache_world import UNIT_BYTES, Block, Memory, Shelf, Token, tiny_slices, units
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from machines import in_first_ring, in_stress

from tiercache.daemon.cache import CacheLimits
from tiercache.daemon.events.events import Events, NamedBlocks
from tiercache.daemon.ground.slices import AnswerNow
from tiercache.daemon.hints.hints import hint_given_at
from tiercache.daemon.tiers.dram.leases import Owner, ReadLease
from tiercache.daemon.tiers.dram.reads import Found
from tiercache.daemon.tiers.dram.source import FetchOutcome
from tiercache.daemon.tiers.dram.space import Namespace, Space
from tiercache.daemon.tiers.dram.writes import Writes
from tiercache.protocol.messages import KEY_BYTES, BlockState, CommitState, EventRun, Priority
from tiercache.protocol.namespaces import NamespaceSpec

DEPTH = 6
PATHS = [(a, b, *[0] * (DEPTH - 2)) for a in range(2) for b in range(2)]
PROMPTS = [branch(*path) for path in PATHS]
"""Four prompts: two pairs that part after the first block."""


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


PARENT = {key: parent for prompt in PROMPTS for parent, key in zip([b"", *split(prompt)], split(prompt), strict=False)}
KEYS = list(PARENT)
REGIONS, REGION_UNITS = 3, 8
QUARANTINE_UNITS = 8


@dataclass(eq=False)
class Session:
    """A session; those of one engine continue what the other has begun. `lost_by`: its place, once it was lost."""

    engine: str
    mapped: bool = True
    owner: Owner = field(init=False)
    lost_by: int = -1

    def __post_init__(self) -> None:
        self.owner = Owner(self.engine.encode() * 16, mapped=self.mapped, party=self.engine)


@dataclass(eq=False)
class Reserved:
    """A block that a session has a frame for.

    `must_drop`: it was flushed, given up, or hangs below such a block. `may_drop`: it hangs below a block of which this
    model does not know enough, or its region was taken back.
    """

    block: Block
    token: Token
    frame: int
    frame_bytes: int
    mapped: bool
    parent: bytes
    writing: bool = True
    complete: bool = False
    visible: bool = False
    must_drop: bool = False
    may_drop: bool = False

    @property
    def pending(self) -> bool:
        """Whether it may still become visible."""
        return not self.visible and not self.must_drop and (self.writing or self.complete)

    @property
    def units(self) -> range:
        return units(self.frame, self.frame_bytes)


@dataclass(eq=False)
class Store:
    """A lease to store: by the place of the key in the request, what it has frames for.

    `over`: nothing more of it is published. `exited`: its process writes no more.
    """

    session: Session
    namespace: Namespace
    lease_id: int
    blocks: dict[int, Reserved]
    over: bool = False
    exited: bool = False


@dataclass(eq=False)
class Load:
    """A read lease, and what was read under it. `lost`: a block that it held is gone; `doubtful`: maybe."""

    lease: ReadLease
    holders: set[Session]
    keys: list[bytes]
    in_order: bool
    blocks: int
    read: dict[tuple[int, int], Token] = field(default_factory=dict)
    lost: bool = False
    doubtful: bool = False


@dataclass(eq=False)
class Pin:
    """A prefix that a client has pinned; `doubtful` once its time is up, or something of it was flushed."""

    namespaces: list[Namespace]
    keys: bytes
    blocks: int
    until_s: float
    doubtful: bool = False


@dataclass(eq=False)
class UnderWay:
    """A request that is answered in slices. `lost`: blocks have left since it began; `seen`: all that were there."""

    steps: Generator[None, None, Any]
    after_slice: Callable[[], None]
    answered: Callable[[Any], None]
    lost: bool = False
    seen: set[Block] = field(default_factory=set)


SESSION = st.integers(0, 3)
SOME = st.integers(0, 2**16)
PROMPT = st.sampled_from([0, 0, 0, 1, 2, 3])
KEY = st.sampled_from([None, None, *range(DEPTH), *range(len(KEYS))])
"""Of whom or of what, rarely of everything: mostly of the first prompt, so that requests meet."""
LENGTH = st.integers(1, DEPTH)
TTL_S = st.sampled_from([2, 5, 60])
RARELY = st.sampled_from([False] * 7 + [True])
NAMESPACES = st.sampled_from([*[(0,)] * 5, *[(1,)] * 3, (2,), (3,), (0, 1), (0, 2), (1, 3), (0, 1, 2, 3)])
"""Which of the four a request names."""


class DramMachine(RuleBasedStateMachine):
    """See the top of this file."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.now_s = 1000.0
        self.here: dict[Block, tuple[int, Token]] = {}
        self.named: set[Block] = set()
        self.may: dict[Block, set[Token]] = {}
        self.stores: list[Store] = []
        self.reserved: list[Reserved] = []
        self.loads: list[Load] = []
        self.pins: dict[tuple[tuple[int, ...], bytes], Pin] = {}
        self.sends: list[tuple[int, int, Token]] = []
        self.under_way: list[UnderWay] = []
        self.versions = 0
        self.flushed: set[Block] = set()
        self.asked: tuple[Namespace, int, int] | None = None
        self.evicted = self.drained = 0
        self.draining = False
        self.readable: dict[Load, set[Block]] = {}

    @initialize(
        policy=st.sampled_from(["lru", "hazard"]),
        quota=st.booleans(),
        sizes=st.booleans(),
        strict=st.booleans(),
        slow=st.booleans(),
        filled=st.sampled_from([True, True, False]),
    )
    def begin(self, policy: str, quota: bool, sizes: bool, strict: bool, slow: bool, filled: bool) -> None:
        tiny_slices(self.patch)
        self.memory, self.kept = Memory(), Kept()
        self.shelf = Shelf(self.memory, lambda: self.now_s, PARENT.__getitem__)
        limits = CacheLimits(
            policy,
            quota={"t": 6 * UNIT_BYTES} if quota else {},
            quarantine_bytes=QUARANTINE_UNITS * UNIT_BYTES if strict else 1 << 30,
        )
        self.events = Events(self.kept)
        self.cache = CacheAtOnce(lambda: self.now_s, limits, self.shelf, self.events)
        self.shelf.attach(self.cache, self.patch)
        if slow:
            self.cache.writes.pending.publish_ns = 0
        for region_id in range(REGIONS):
            self.cache.space.allocator.add_region(region_id, REGION_UNITS * UNIT_BYTES)
        self.quota, self.sizes, self.strict = quota, sizes, strict
        self.told: set[int] = set()
        self.namespaces = [self.open(0), self.open(1, window_blocks=4), self.open(2, tenant="t")]
        self.namespaces.append(self.open(3, block_bytes=9000) if sizes else self.open(3, window_blocks=1))
        self.sessions = [Session("a"), Session("a"), Session("b"), Session("r", mapped=False)]
        for prompt in (0, 2) if filled else ():
            self._store(self.sessions[0], self.namespaces[:2], prompt, DEPTH)

    def open(self, rank: int, block_bytes: int = UNIT_BYTES, window_blocks: int = 0, tenant: str = "") -> Namespace:
        spec = NamespaceSpec(
            engine="t",
            layout="l",
            dtype="u8",
            block_size=1,
            block_bytes=block_bytes,
            tp_rank=rank,
            tp_size=8,
            window_blocks=window_blocks,
        )
        return self.cache.space.open_namespace(spec.of_tenant(tenant) if tenant else spec)

    # --- the oracle --------------------------------------------------------------------------------------

    def is_here(self, block: Block) -> bool:
        namespace = self.cache.space.namespaces[block[0]]
        return namespace.table.get(block[1]) >= 0 and self.cache.peek([namespace], block[1])[0] == 1

    def below(self, block: Block) -> set[Block]:
        """A block and all that hang below it."""
        number, key = block
        if self.cache.space.namespaces[number].table.windowed:
            return {block}
        found = {key}
        for other in KEYS:  # parents come first
            if PARENT[other] in found:
                found.add(other)
        return {(number, one) for one in found}

    def needed(self, namespace: Namespace, keys: Sequence[bytes], cut: int) -> Iterator[Block]:
        """What a run of that length needs in a namespace."""
        window = namespace.spec.window_blocks
        for key in keys[max(0, cut - window) if window else 0 : cut]:
            yield namespace.number, key

    def longest(self, namespaces: Sequence[Namespace], keys: Sequence[bytes], blocks: Iterable[Block]) -> int:
        """The longest run that all these namespaces have."""
        there = set(blocks)
        for cut in range(len(keys), 0, -1):
            if all(block in there for one in namespaces for block in self.needed(one, keys, cut)):
                return cut
        return 0

    def anywhere(self, namespaces: Sequence[Namespace], keys: Sequence[bytes]) -> int:
        """The longest run in DRAM and on the shelf together; of a chain one of them has all of it."""
        best = 0
        for cut in range(1, len(keys) + 1):
            best = cut if all(self._has_cut(one, keys, cut) for one in namespaces) else best
        return best

    def _has_cut(self, namespace: Namespace, keys: Sequence[bytes], cut: int) -> bool:
        needed = list(self.needed(namespace, keys, cut))
        if namespace.table.windowed:
            return all(block in self.here or block in self.shelf.blocks for block in needed)
        return all(block in self.here for block in needed) or all(block in self.shelf.blocks for block in needed)

    def pending(self, block: Block) -> Reserved | None:
        return next((one for one in self.reserved if one.block == block and one.pending), None)

    def drop(self, block: Block) -> None:
        """A pending block is dropped, with the pending ones that hang below it."""
        for one in self.reserved:
            if one.pending and one.block in self.below(block):
                one.must_drop = True

    def readable_of(self, load: Load) -> set[Block]:
        """What can be read under a lease now."""
        found = set[Block]()
        for namespace in load.lease.namespaces:
            if not load.in_order and not namespace.table.windowed:
                frames = self.cache.reads.frames(load.lease, namespace, 0, len(load.keys))
                found |= {(namespace.number, key) for key in load.keys[: len(frames)]}
                continue
            for number, key in enumerate(load.keys):
                if self.cache.reads.frames(load.lease, namespace, number, 1):
                    found.add((namespace.number, key))
        return found

    def protected(self) -> set[Block]:
        """What no eviction may take now."""
        index, found = self.cache.space.index, set[Block]()
        held = [entry for lease in self.cache.reads.leases.values() for entry in lease.pinned()]
        held += [*self.cache.reads.runs.loose_pins()]
        for entry in held:
            while entry >= 0 and index.key[entry]:
                found.add((index.table[entry], index.key[entry]))
                entry = index.parent[entry]
        for number, key in self.cache.writes.pending.by_key:
            while key := PARENT[key]:
                found.add((number, key))
        return found

    @invariant()
    def all_is_well(self) -> None:
        if not hasattr(self, "cache"):
            return
        self._note_ends()
        left = self.cache.counters.evicted_blocks + self.cache.space.policies.hints.counts["expired_blocks"]
        evicted, self.evicted = left - self.evicted, left
        self._note_drains()
        before, self.here = self.here, {block: self._found(block) for block in self._blocks() if self.is_here(block)}
        gone = {block for block, found in before.items() if self.here.get(block) != found}
        self._check_arrivals({block for block, found in self.here.items() if before.get(block) != found})
        self._check_departures(gone, evicted)
        for namespace in self.namespaces:
            for key in KEYS:
                if (namespace.number, key) in self.here and PARENT[key] and not namespace.table.windowed:
                    assert (namespace.number, PARENT[key]) in self.here, "a block is there without the one before it"
        self._check_limits()
        self._check_events()
        for frame, frame_bytes, token in self.sends:
            assert self.memory.read(frame, frame_bytes) == token, "a frame was reused while it was being sent"
        self.readable = {load: self.readable_of(load) for load in self.loads if not load.lease.over}
        self.flushed, self.asked = set(), None
        assert self.cache.check_integrity() == []

    def _note_drains(self) -> None:
        """While a region is emptied, what is there may be lost, or not be stored."""
        drained, self.drained = self.drained, self.cache.counters.regions_drained
        self.draining |= self.drained > drained
        if self.draining:
            for reserved in self.reserved:
                reserved.may_drop = True
            for load in self.loads:
                load.doubtful = True

    def _note_ends(self) -> None:
        """Leases to store that have expired, or ended with their session."""
        for store in list(self.stores):
            if not store.over and store.lease_id not in self.cache.writes.leases:
                self._give_up(store, finished=store.exited)

    def _blocks(self) -> Iterator[Block]:
        return ((namespace.number, key) for namespace in self.namespaces for key in KEYS)

    def _found(self, block: Block) -> tuple[int, Token]:
        """Where a block is, and its bytes."""
        namespace = self.cache.space.namespaces[block[0]]
        frame = self.cache.space.index.frame[namespace.table.get(block[1])]
        token: Any = self.memory.read(frame, namespace.size_class.frame_bytes)
        assert token[:2] == block, f"{block} has the bytes of {token}"
        return frame, token

    def _check_arrivals(self, new: set[Block]) -> None:
        for block in new:
            token = self.here[block][1]
            assert token in self.may.get(block, ()), f"{block} is there with bytes that nobody stored, or flushed ones"
            self.named.discard(block)
        for reserved in self.reserved:
            if not reserved.visible and reserved.token in self.shelf.published_tokens:
                assert reserved.complete, "a block became visible before its commit"
                assert not reserved.must_drop, "a block became visible that was dropped"
                reserved.visible = True
                if self.here.get(reserved.block) == (reserved.frame, reserved.token):
                    self.named.add(reserved.block)

    def _check_departures(self, gone: set[Block], evicted: int) -> None:
        assert not self.flushed & self.here.keys() - gone, "flushed blocks are still there"
        unexplained = gone - self.flushed
        if not self.draining:
            assert len(unexplained) <= evicted, f"{unexplained} left without an eviction"
        for load, blocks in self.readable.items():
            if blocks & gone:
                held = unexplained & blocks
                assert self.draining or load.doubtful or not held, f"{held} were evicted under a lease"
                load.lost = load.lost or not load.doubtful or load in self.readable
            if gone:
                load.doubtful = load.doubtful or self._touches(load, gone)
        for name, pin in list(self.pins.items()):
            held = {block for one in pin.namespaces for block in self.needed(one, split(pin.keys), pin.blocks)}
            if held & gone:
                assert pin.doubtful or not held & unexplained or (self.quota and self.draining), "a pin did not hold"
                pin.doubtful = True
            if name not in self.cache.reads.pins.leases:
                assert pin.doubtful, "a pin has ended by itself"
                del self.pins[name]
        if self.asked is not None and not self.draining:
            namespace, wanted, free = self.asked
            theirs = {number for number, key in unexplained} - {
                one.number for one in self.namespaces if one.account == namespace.account
            }
            if wanted <= free:
                assert not theirs, "others lost blocks although there was room"
            if not self.quota and not self.sizes and not self.sends:
                assert evicted <= max(0, wanted - free), "more was evicted than was asked for"
        for request in self.under_way:
            request.lost |= bool(gone)
            request.seen |= self.here.keys()

    def _touches(self, load: Load, gone: set[Block]) -> bool:
        """Whether a lease may hold one of these: also blocks of windows that arrived out of order."""
        lease = load.lease
        mine = {
            (one.number, key)
            for one in lease.namespaces
            for key in (split(lease.keys) if one.table.windowed else load.keys[: lease.target])
        }
        return bool(mine & gone)

    def _check_limits(self) -> None:
        space = self.cache.space
        if self.quota:
            assert space.used_bytes("t") <= 6 * UNIT_BYTES, "an account has more than its quota"
        assert self.cache.reads.pins.bytes <= self.cache.reads.pins.limit_bytes
        unfinished: dict[str, int] = {}
        for store in self.stores:
            for one in store.blocks.values():
                if one.writing or (one.pending and not one.may_drop):
                    party = store.session.engine
                    unfinished[party] = unfinished.get(party, 0) + one.frame_bytes
        most = QUARANTINE_UNITS * UNIT_BYTES
        if self.strict and not self.draining:
            assert all(its <= most for its in unfinished.values()), "a client has more unfinished stores than it may"

    def _check_events(self) -> None:
        self.events.flush()
        for batch in self.kept.published:
            for event in batch:
                if event["type"] == "BlockStored":
                    self.told |= set(event["block_hashes"])
                elif event["type"] == "BlockRemoved":
                    self.told -= set(event["block_hashes"])
        self.kept.published.clear()
        there = {self.hash_of(block) for block in self.named & self.here.keys()}
        assert there <= self.told, "events do not tell of a block"
        # What was dropped leaves when it is unlinked.
        assert self.told == there or self.cache.space.index.is_unlinking, "events tell of blocks that have left"

    @staticmethod
    def hash_of(block: Block) -> int:
        return block[0] * len(KEYS) + KEYS.index(block[1])

    def pick(self, some: Sequence[Any], number: int) -> Any:
        return some[number % len(some)]

    def some_namespaces(self, which: Sequence[int]) -> list[Namespace]:
        return [self.namespaces[place] for place in which]

    def run(self, request: UnderWay, at_once: bool) -> None:
        """Begin a request; all of it now, or one slice."""
        request.seen = set(self.here)
        while self._advance(request):
            if not at_once:
                self.under_way.append(request)
                return

    def _advance(self, request: UnderWay, now: bool = False) -> bool:
        """Run a slice; False when it was the last one."""
        try:
            if now:
                request.steps.throw(AnswerNow())
            else:
                next(request.steps)
        except StopIteration as end:
            request.after_slice()
            request.answered(end.value)
            return False
        except AnswerNow:
            return False
        request.after_slice()
        return True

    # --- stores ------------------------------------------------------------------------------------------

    @rule(session=SESSION, which=SOME, prompt=PROMPT, first=st.integers(0, DEPTH - 1), length=LENGTH, ttl_s=TTL_S)
    def reserve(self, session: int, which: int, prompt: int, first: int, length: int, ttl_s: int) -> None:
        self._reserve(self.sessions[session], self.pick(self.namespaces, which), prompt, first, length, ttl_s)

    def _reserve(
        self, session: Session, namespace: Namespace, prompt: int, first: int, length: int, ttl_s: float
    ) -> Store | None:
        number, windowed = namespace.number, namespace.table.windowed
        keys, parent = (
            split(PROMPTS[prompt])[first : first + length],
            split(PROMPTS[prompt])[first - 1] if first else b"",
        )
        blocks = [(number, key) for key in keys]
        present, waiting = [block in self.here for block in blocks], [self.pending(block) for block in blocks]
        evictable = self._evictable(namespace, keys, parent)
        free = self._free_frames(namespace)
        names: list[int | bytes] = [self.hash_of(block) for block in blocks]
        said = NamedBlocks(EventRun(names, None, bytes(4 * len(names))), 1)
        known, broken = self.cache.counters.dedup_blocks, self.cache.counters.broken_chains
        got = self.cache.reserve(session.owner, namespace, parent, b"".join(keys), ttl_s, said)
        assert self.cache.counters.broken_chains == broken, "a chain is said to be broken"
        above = (number, parent)
        if got.parent_missing:
            assert parent
            assert above not in self.here
            waits = self.pending(above)
            assert waits is None or waits.may_drop
            assert not windowed
            return None
        states = got.states
        self._check_states(states, present, waiting, windowed)
        self._drop_former(above, blocks, states)
        count = states.count
        assert self.cache.counters.dedup_blocks - known == count(BlockState.HAVE) + count(BlockState.PENDING)
        if not windowed:
            assert all(self.is_here(block) for block, state in zip(blocks, states, strict=True) if state == "have")
        wanted = sum(state in (BlockState.FRAME, BlockState.NONE) for state in states)
        self.asked = namespace, wanted, free
        refused = blocks[states.index(BlockState.NONE)] if BlockState.NONE in states else None
        orphan = refused in self.cache.writes.pending.by_key  # below a block that was dropped: others wait for its end
        if refused and not orphan and (not parent or above in self.here or self.pending(above)):
            left = {block for block in evictable if self.is_here(block)}
            assert not left, f"refused, although {left} could have been evicted"
        places = [place for place, state in enumerate(states) if state is BlockState.FRAME]
        assert len(places) == len(got.frames) == len(set(got.frames))
        assert bool(got.lease_id) == bool(places)
        if not places:
            return None
        store = Store(session, namespace, got.lease_id, {})
        self._check_frames(namespace, got.frames)
        for place, frame in zip(places, got.frames, strict=True):
            self.versions += 1
            before = keys[place - 1] if place else parent
            reserved = Reserved(
                blocks[place],
                (number, keys[place], self.versions),
                frame,
                namespace.size_class.frame_bytes,
                session.mapped,
                b"" if windowed else before,
            )
            self._hang(reserved)
            store.blocks[place] = reserved
            self.reserved.append(reserved)
        self.stores.append(store)
        return store

    def _check_states(
        self, states: list[BlockState], present: list[bool], waiting: list[Reserved | None], windowed: bool
    ) -> None:
        order = [BlockState.HAVE, BlockState.PENDING, BlockState.FRAME, BlockState.NONE]
        ranks = [order.index(state) for state in states]
        assert windowed or ranks == sorted(ranks), states
        assert BlockState.NONE not in states or set(states[states.index(BlockState.NONE) :]) == {BlockState.NONE}
        for state, was_here, was_pending in zip(states, present, waiting, strict=True):
            if state is BlockState.HAVE:
                assert was_here
            elif state is BlockState.FRAME:
                assert not was_here, "a block that is there is stored again"
                assert was_pending is None or was_pending.may_drop, "a block is stored twice at a time"
            elif state is BlockState.PENDING:
                assert not was_here

    def _drop_former(self, above: Block, blocks: list[Block], states: list[BlockState]) -> None:
        """What is stored or promoted again was dropped before that, maybe unknown to this model."""
        stored = [block for block, state in zip(blocks, states, strict=True) if state is BlockState.FRAME]
        promoted = [block for block in (above, *blocks) if self.pending(block) is not None and self._is_promoted(block)]
        for block in stored + promoted:
            self.drop(block)

    def _hang(self, reserved: Reserved) -> None:
        """What becomes of a new block depends on the one before it."""
        above = reserved.block[0], reserved.parent
        if not reserved.parent or above in self.here:
            return
        pending = self.pending(above)
        dropped = any(one.block == above and one.must_drop and not one.visible for one in self.reserved)
        if pending is None:
            reserved.may_drop = True
            reserved.must_drop = dropped and not self._is_promoted(above)
        else:
            reserved.may_drop = pending.may_drop

    def _is_promoted(self, block: Block) -> bool:
        """Whether the daemon itself stores a block: its bytes are on their way, or wait for those before them."""
        pending = self.cache.writes.pending.by_key.get(block)
        return pending is not None and pending.lease.owner.internal

    def _evictable(self, namespace: Namespace, keys: list[bytes], parent: bytes) -> set[Block]:
        """Blocks that must give way to a store in this namespace; none where other limits may refuse it."""
        if self.strict or self.sizes or self.quota or self.draining or self.cache.space.index.is_unlinking:
            return set()
        kept = self.protected()
        for key in (*keys, parent):
            while key:
                kept.add((namespace.number, key))
                key = PARENT[key]
        return self.here.keys() - kept

    def _free_frames(self, namespace: Namespace) -> int:
        allocator, size_class = self.cache.space.allocator, namespace.size_class
        return size_class.free + sum(region.size_bytes // size_class.frame_bytes for region in allocator.unassigned)

    def _check_frames(self, namespace: Namespace, frames: list[int]) -> None:
        """Frames given to a writer are nobody else's."""
        new = {unit for frame in frames for unit in units(frame, namespace.size_class.frame_bytes)}
        assert len(new) == sum(len(units(frame, namespace.size_class.frame_bytes)) for frame in frames)
        for one in self.reserved:
            if one.writing or (one.pending and not one.may_drop):
                assert not new & set(one.units), "a frame has two writers"
        for fetch in self.shelf.fetching:
            for address in fetch.addresses:
                assert not new & set(units(address, fetch.namespace.size_class.frame_bytes))
        for block, (frame, _) in self.here.items():
            if self.is_here(block):
                size = self.cache.space.namespaces[block[0]].size_class.frame_bytes
                assert not new & set(units(frame, size)), "the frame of a block that is there has a writer"
        for frame, frame_bytes, _ in self.sends:
            assert not new & set(units(frame, frame_bytes)), "a frame that is being sent has a writer"

    @rule(which=SOME, some=st.integers(1, 63), by=st.sampled_from([0, 0, 0, 1, 2]), slices=RARELY, partly=RARELY)
    def commit(self, which: int, some: int, by: int, slices: bool, partly: bool) -> None:
        if not self.stores:
            return
        store = self.pick(self.stores, which)
        places = [place for place in range(DEPTH) if some >> place & 1]
        self._commit(store, places, by, at_once=not slices, partly=partly)

    @rule(session=SESSION, which=NAMESPACES, prompt=PROMPT, length=st.integers(2, DEPTH))
    def store(self, session: int, which: Sequence[int], prompt: int, length: int) -> None:
        """Store a prompt, in all of these namespaces."""
        self._store(self.sessions[session], self.some_namespaces(which), prompt, length)

    def _store(self, session: Session, namespaces: list[Namespace], prompt: int, length: int) -> None:
        for namespace in namespaces:
            store = self._reserve(session, namespace, prompt, 0, length, 60)
            if store is not None:
                self._commit(store, list(store.blocks), 0)
            self.all_is_well()

    @rule(session=SESSION, which=NAMESPACES, prompt=PROMPT)
    def store_prompt(self, session: int, which: Sequence[int], prompt: int) -> None:
        self._store(self.sessions[session], self.some_namespaces(which), prompt, DEPTH)

    def _commit(self, store: Store, places: list[int], by: int = 0, at_once: bool = True, partly: bool = False) -> None:
        """`by`: its own session, another of its engine, or a stranger."""
        session = store.session
        if by:
            others = [
                one for one in self.sessions if (one.engine == session.engine) is (by == 1) and one is not session
            ]
            session = others[0] if others else session
        stranger = session.engine != store.session.engine
        if not stranger:
            self._write(store, places, partly)
        doomed = {place: one.must_drop for place, one in store.blocks.items()}
        known = bool([one for one in store.blocks.values() if one.writing]) and not stranger
        if known:
            for place in places:
                if (one := store.blocks.get(place)) is not None and one.writing:
                    one.writing = False
                    whole = one.mapped or self.memory.holds(one.frame, one.frame_bytes, one.token)
                    one.complete = not one.must_drop and not (partly and not one.mapped) and whole
                    if one.complete:
                        self.may.setdefault(one.block, set()).add(one.token)
                    elif one.pending or not one.must_drop:
                        one.must_drop = True
                        self.drop(one.block)

        def answered(states: list[CommitState]) -> None:
            self._note_drains()
            for place, state in zip(places, states, strict=True):
                one = store.blocks.get(place)
                if one is None or not known:
                    assert state is CommitState.DROPPED
                elif state is CommitState.DROPPED:
                    assert one.must_drop or one.may_drop, f"{one} was dropped for no reason"
                    if not one.must_drop:  # else its key may be another store's by now
                        one.must_drop = True
                        self.drop(one.block)
                elif state is CommitState.HELD:
                    assert one.complete
                elif not one.visible and at_once:
                    assert one.complete
                    assert not doomed[place]
                    assert self.is_here(one.block), "a block is said to be visible and is not"

        if at_once:
            answered(self.cache.writes.commit(session.owner, store.lease_id, places))
        else:
            steps = self.cache.writes.commit_in_slices(session.owner, store.lease_id, places)
            self.run(UnderWay(steps, lambda: None, answered), at_once=False)
        self._forget_stores()

    def _write(self, store: Store, places: Iterable[int], partly: bool = False) -> None:
        """The client writes into the frames that it has; without the mapping, through the daemon."""
        for place in places:
            one = store.blocks.get(place)
            if one is None or not one.writing:
                continue
            if one.mapped:
                self.memory.write(one.frame, one.frame_bytes, one.token)
            elif (block := self.cache.writes.writable_block(store.session.owner, store.lease_id, place)) is not None:
                self.memory.write(one.frame, one.frame_bytes, one.token)
                block.written = store.namespace.spec.block_bytes - partly
            else:
                assert one.must_drop or one.may_drop, "a block that is being stored cannot be written"

    @rule(which=SOME, finished=st.sampled_from([True, False, None]))
    def abort(self, which: int, finished: bool | None) -> None:
        """A client gives up a store, or goes on copying, maybe long after its lease has ended."""
        if not self.stores:
            return
        store = self.pick(self.stores, which)
        self._write(store, store.blocks)
        if finished is None:
            return
        self.cache.writes.abort(store.session.owner, store.lease_id, finished)
        self._give_up(store, finished or store.exited)

    def _give_up(self, store: Store, finished: bool) -> None:
        store.over = True
        for one in store.blocks.values():
            if one.writing:
                if one.pending:
                    self.drop(one.block)
                one.must_drop = True
                one.writing = not (finished or not one.mapped)
        self._forget_stores()

    def _forget_stores(self) -> None:
        """Stores of which nothing is being written any more are unknown to the daemon."""
        self.stores = [
            store for store in self.stores if any(one.writing or one.pending for one in store.blocks.values())
        ]
        self.reserved = [one for one in self.reserved if one.writing or not one.visible]

    # --- reads -------------------------------------------------------------------------------------------

    @rule(
        session=SESSION,
        which=NAMESPACES,
        prompt=PROMPT,
        length=LENGTH,
        ttl_s=st.sampled_from([0, 3, 60, 60]),
        promote=st.booleans(),
        mixed=RARELY,
        slices=RARELY,
    )
    def match(
        self,
        session: int,
        which: Sequence[int],
        prompt: int,
        length: int,
        ttl_s: int,
        promote: bool,
        mixed: bool,
        slices: bool,
    ) -> None:
        namespaces, keys = self.some_namespaces(which), split(PROMPTS[prompt])[:length]
        if mixed:  # no chain: what is found of it must be right all the same
            keys = keys[1:] + keys[:1]
            self.shelf.told_right = False
        self._match(self.sessions[session], namespaces, keys, ttl_s, promote, mixed, not slices)

    @rule(session=SESSION, which=SOME, ttl_s=st.sampled_from([3, 60, 60]), promote=st.booleans(), slices=RARELY)
    def load(self, session: int, which: int, ttl_s: int, promote: bool, slices: bool) -> None:
        """Look up a prompt of which something is there: below, if it is to be promoted."""
        there = sorted(self.shelf.blocks if promote else self.here)
        if there:
            number, key = self.pick(there, which)
            path = [key]
            while PARENT[path[0]]:
                path.insert(0, PARENT[path[0]])
            namespace = self.cache.space.namespaces[number]
            self._match(self.sessions[session], [namespace], path, ttl_s, promote, False, not slices)

    def _match(
        self,
        reader: Session,
        namespaces: list[Namespace],
        keys: list[bytes],
        ttl_s: int,
        promote: bool,
        mixed: bool,
        at_once: bool,
    ) -> None:
        dram, below = self.cache.peek(namespaces, b"".join(keys))
        assert mixed or dram == self.longest(namespaces, keys, self.here)
        assert mixed or dram + below == self.anywhere(namespaces, keys)
        steps = self.cache.reads.match(reader.owner, namespaces, b"".join(keys), ttl_s, promote)

        def answered(found: Found) -> None:
            if not mixed:
                assert found.dram <= self.longest(namespaces, keys, request.seen)
                if not request.lost and at_once:
                    assert found.dram == self.longest(namespaces, keys, self.here)
                    if found.lease is None:
                        assert found.dram + found.below == self.anywhere(namespaces, keys)
            if found.lease is None:
                assert not ttl_s or not (found.dram or (promote and found.below))
                return
            if reader.owner.reads.get(found.lease.lease_id) is None:
                assert not at_once  # its session was lost meanwhile, or a block
                return
            assert not found.lease.over
            load = Load(found.lease, {reader}, keys, not mixed, found.dram)
            self.loads.append(load)
            self._read(load)

        request = UnderWay(steps, lambda: None, answered)
        self.run(request, at_once)

    @rule(which=SOME)
    def read(self, which: int) -> None:
        if not self.loads:
            return
        self._read(self.pick(self.loads, which))

    def _read(self, load: Load) -> None:
        """Read all that can be read under a lease, unless the daemon says that it is over."""
        reader = next(iter(load.holders))
        if self.cache.reads.find(reader.owner, load.lease.lease_id) is None:
            assert load.lost or load.doubtful, "a lease has ended for no reason"
            load.lost = True
            return
        assert not load.lost, "a lease that has lost a block is still good"
        assert load.lease.blocks >= load.blocks or load.doubtful
        broken = self.cache.counters.broken_chains
        for namespace in load.lease.namespaces:
            window = namespace.spec.window_blocks
            blocks = load.lease.blocks
            first = max(0, blocks - window) if window else 0
            frames = self.cache.reads.frames(load.lease, namespace, first, len(load.keys))
            if load.in_order and not load.lease.runs:
                assert len(frames) == blocks - first, "a lease does not hold what it was given for"
            for number, frame in enumerate(frames, first):
                token: Any = self.memory.read(frame, namespace.size_class.frame_bytes)
                assert token[:2] == (namespace.number, load.keys[number]), "bytes of another block"
                known = load.read.setdefault((namespace.number, number), token)
                assert known == token, "bytes changed under a lease"
        assert not load.in_order or self.cache.counters.broken_chains == broken, "a chain is said to be broken"

    @rule(which=SOME)
    def release(self, which: int) -> None:
        if not self.loads:
            return
        load = self.pick(self.loads, which)
        if not load.lease.over:
            self._read(load)
        for reader in list(load.holders):
            good = self.cache.reads.release(reader.owner, load.lease.lease_id)
            assert not (good and load.lost), "what was read under a lease that lost a block is said to be right"
            assert good or load.lost or load.doubtful, "a lease was revoked for no reason"
            assert not self.cache.reads.release(reader.owner, load.lease.lease_id)
        self.loads.remove(load)

    @rule(which=SOME, other=SESSION, ttl_s=TTL_S)
    def share(self, which: int, other: int, ttl_s: int) -> None:
        """Another session wants to hold a lease too: one of its engine may. Then the lease is renewed."""
        if not self.loads:
            return
        load, session = self.pick(self.loads, which), self.sessions[other]
        held = self.cache.reads.hold(session.owner, load.lease.lease_id)
        same = any(one.engine == session.engine for one in load.holders)
        assert not held or (same and not load.lost)
        assert held or not same or load.lost or load.doubtful
        if held:
            load.holders.add(session)
        reader = next(iter(load.holders))
        if (lease := self.cache.reads.find(reader.owner, load.lease.lease_id)) is not None:
            self.cache.reads.renew(lease, ttl_s)

    @rule(which=NAMESPACES, prompt=PROMPT, length=LENGTH, ttl_s=TTL_S, mixed=RARELY, slices=RARELY)
    def pin(self, which: Sequence[int], prompt: int, length: int, ttl_s: int, mixed: bool, slices: bool) -> None:
        namespaces, keys = self.some_namespaces(which), split(PROMPTS[prompt])[:length]
        if mixed:
            keys = keys[1:] + keys[:1]
        packed = b"".join(keys)
        name = tuple(one.number for one in namespaces), keys[-1]
        pins = self.cache.reads.pins
        block_bytes = sum(one.spec.frame_bytes for one in namespaces)

        def end_former() -> None:
            if (former := self.pins.get(name)) is not None:
                former.doubtful = True

        def answered(blocks: int) -> None:
            end_former()
            if not mixed and not slices:
                before = pins.bytes - blocks * block_bytes
                most = min(len(keys), (pins.limit_bytes - before) // block_bytes)
                assert blocks == self.longest(namespaces, keys[:most], self.here)
            if blocks and name in pins.leases:
                self.pins[name] = Pin(namespaces, packed, blocks, self.now_s + ttl_s, doubtful=mixed or slices)

        self.run(UnderWay(pins.pin(namespaces, packed, ttl_s), end_former, answered), at_once=not slices)

    @rule(which=SOME)
    def unpin(self, which: int) -> None:
        if len(self.pins) < 2:
            return
        name = self.pick(list(self.pins), which)
        pin = self.pins.pop(name)
        blocks = self.cache.reads.pins.unpin(pin.namespaces, pin.keys)
        assert blocks == pin.blocks or pin.doubtful

    @rule(session=SESSION, which=NAMESPACES, prompt=PROMPT, slices=RARELY)
    def prefetch(self, session: int, which: Sequence[int], prompt: int, slices: bool) -> None:
        steps = self.cache.reads.prefetch(self.sessions[session].owner, self.some_namespaces(which), PROMPTS[prompt])
        self.run(UnderWay(steps, lambda: None, lambda found: None), at_once=not slices)

    @rule(
        which=NAMESPACES,
        prompt=PROMPT,
        first=st.integers(0, 2),
        done=st.booleans(),
        ttl_s=st.sampled_from([0.0, 0.0, 2.0]),
        priority=st.sampled_from(Priority),
    )
    def hint(self, which: Sequence[int], prompt: int, first: int, done: bool, ttl_s: float, priority: Priority) -> None:
        said = hint_given_at(self.now_s, done, 0.0 if done else 2.0, ttl_s, priority)
        self.cache.hint_now(self.some_namespaces(which), PROMPTS[prompt], first, said)

    # --- the tier below ------------------------------------------------------------------------------------

    @rule(
        session=SESSION,
        which=st.sampled_from([0, 1, 1, 2, 3]),
        prompt=PROMPT,
        length=st.integers(3, DEPTH),
        prefetched=RARELY,
        many=st.integers(0, 3),
        outcome=st.sampled_from([FetchOutcome.OK, FetchOutcome.CORRUPT]),
    )
    def reload(
        self,
        session: int,
        which: int,
        prompt: int,
        length: int,
        prefetched: bool,
        many: int,
        outcome: FetchOutcome,
    ) -> None:
        """DRAM forgets what the tier below has, a client asks for it, and some of it comes."""
        namespace, keys = self.pick(self.namespaces, which), split(PROMPTS[prompt])[:length]
        self.flush([self.namespaces.index(namespace)], None, "dram", False)
        self.all_is_well()
        if prefetched:
            self.cache.prefetch(self.sessions[session].owner, [namespace], b"".join(keys))
        else:
            self._match(self.sessions[session], [namespace], keys, 60, True, False, True)
        if many:
            self.all_is_well()
            self.deliver(0, many, outcome)
            if outcome is FetchOutcome.CORRUPT:
                self.deliver(0, DEPTH, outcome)
                self._settle()

    @rule(which=SOME, many=st.integers(1, 4), outcome=st.sampled_from([FetchOutcome.OK] * 5 + [FetchOutcome.CORRUPT]))
    def deliver(self, which: int, many: int, outcome: FetchOutcome) -> None:
        for _ in range(3):
            self.cache.work()
        if not self.shelf.fetching:
            return
        first = which % len(self.shelf.fetching)
        self.shelf.deliver(self.shelf.fetching[first : first + many], outcome, well=which % 2)
        self.cache.work()

    @rule(which=SOME, key=KEY)
    def shelf_fails(self, which: int, key: int | None) -> None:
        """It has evicted a block, or it hangs."""
        if key is not None:
            self.shelf.forget(self.below((self.pick(self.namespaces, which).number, KEYS[key])))
        else:
            self.shelf.hang()

    @rule(which=SOME)
    def send(self, which: int) -> None:
        """Something reads a frame and cannot be recalled, such as a write to a disk; one after the other."""
        if len(self.sends) == 3 or (self.sends and not self.here):
            self.cache.space.allocator.unhold_many([self.sends.pop(0)[0]])
        elif self.here:
            block = self.pick(sorted(self.here), which)
            frame, token = self.here[block]
            self.cache.space.allocator.hold(frame)
            self.sends.append((frame, self.cache.space.namespaces[block[0]].size_class.frame_bytes, token))

    # --- flushes, ends and time ------------------------------------------------------------------------------

    @rule(
        which=NAMESPACES,
        place=KEY,
        tier=st.sampled_from(["dram", "dram", "all"]),
        slices=RARELY,
    )
    def flush(self, which: Sequence[int], place: int | None, tier: str, slices: bool) -> None:
        namespaces, key = self.some_namespaces(which), b"" if place is None else KEYS[place]
        below: Any = self if tier == "all" else None
        steps, to_do = self.cache.flush(namespaces, key, below), list(namespaces)

        def after_slice() -> None:
            if to_do:
                self._flushed(to_do.pop(0), key, tier)

        self.run(UnderWay(steps, after_slice, lambda answer: None), at_once=not slices)

    @rule(which=SOME, place=st.integers(0, DEPTH - 1), tier=st.sampled_from(["dram", "dram", "all"]))
    def flush_in_use(self, which: int, place: int, tier: str) -> None:
        """Flush what a lease holds or waits for, or what a store hangs below."""
        used = [(load.lease.namespaces[0], load.keys) for load in self.loads]
        used += [(store.namespace, KEYS) for store in self.stores]
        if used:
            namespace, keys = self.pick(used, which)
            key = self.pick(keys, place)
            below: Any = self if tier == "all" else None
            steps = self.cache.flush([namespace], key, below)
            self.run(UnderWay(steps, lambda: self._flushed(namespace, key, tier), lambda answer: None), at_once=True)

    def forget(self, namespaces: Sequence[Namespace]) -> None:
        """Part of a flush of the tier below; what it loses is found in `_flushed`."""

    def _flushed(self, namespace: Namespace, key: bytes, tier: str) -> None:
        number = namespace.number
        blocks = self.below((number, key)) if key else {(number, one) for one in KEYS}
        self.flushed |= blocks
        if tier == "all":
            self.shelf.forget(blocks)
        for block in blocks:
            self.may[block] = {self.shelf.blocks[block]} if block in self.shelf.blocks else set()
            if tier == "dram":
                held = (token for fetch in self.shelf.fetching for token in fetch.held)
                self.may[block] |= {token for token in held if token[:2] == block}
            if self.pending(block) is not None:
                self.drop(block)
        for pin in self.pins.values():
            held = {block for one in pin.namespaces for block in self.needed(one, split(pin.keys), pin.blocks)}
            pin.doubtful |= bool(held & blocks)

    @rule(session=SESSION, exits=st.booleans())
    def session_ends(self, session: int, exits: bool) -> None:
        """A session is lost; maybe its process has exited, maybe it goes on copying."""
        former = self.sessions[session]
        ends = [former]
        if exits:  # with it end the processes of sessions that it lost before
            ends += [one for one in dict.fromkeys(store.session for store in self.stores) if one.lost_by == session]
            for one in ends:
                self.cache.process_gone(one.owner)
        else:
            self.cache.session_lost(former.owner)
        former.lost_by = session
        for store in self.stores:
            if store.session in ends:
                store.exited = exits
                for reserved in store.blocks.values():  # its leases end in slices
                    reserved.may_drop = True
                    reserved.writing = reserved.writing and not (exits and store.over)
        for load in list(self.loads):
            load.holders.discard(former)
            if not load.holders:
                self.loads.remove(load)
        self.sessions[session] = Session(former.engine, former.mapped)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.cache.expire()
        for load in self.loads:
            load.doubtful |= load.lease.deadline_s <= self.now_s
        for pin in self.pins.values():
            pin.doubtful |= pin.until_s <= self.now_s

    @rule(slices=st.sampled_from([1, 2, 5, None]))
    def work(self, slices: int | None) -> None:
        for _ in range(slices or 0):
            self.cache.work()
        if slices is None:
            self._settle()

    def _settle(self) -> None:
        """Do all deferred work; then no complete block waits below a visible one."""
        for _ in range(2000):
            if not self.cache.work():
                break
        else:
            raise AssertionError("deferred work does not end")
        self.all_is_well()
        if not self.shelf.fetching and self.shelf.settled:
            growing = self.cache.reads.growing.leases
            assert not [one for one in self.loads if one.lease.lease_id in growing], "a lease waits for nothing"
        self.draining = False
        for one in self.reserved:
            if one.complete and one.pending and not one.may_drop:
                assert one.parent, "a complete first block is not visible"
                assert (one.block[0], one.parent) not in self.here, "a complete block below a visible one is not"

    @rule()
    def check(self) -> None:
        """Check all books, while others change them."""

        def answered(findings: list[str]) -> None:
            assert findings == []

        self.run(UnderWay(self.cache.check(), lambda: None, answered), at_once=False)

    @rule(which=SOME, how=st.sampled_from(["on", "on", "on", "now", "never"]))
    def go_on(self, which: int, how: str) -> None:
        """A request in slices goes on, may not wait any longer, or its client has gone."""
        if not self.under_way:
            return
        request = self.pick(self.under_way, which)
        if how == "never":
            request.steps.close()
            self.under_way.remove(request)
        elif not self._advance(request, how == "now"):
            self.under_way.remove(request)

    def teardown(self) -> None:
        try:
            if hasattr(self, "cache"):
                self._end()
        finally:
            self.patch.undo()

    def _end(self) -> None:
        """When all have gone and everything was flushed, nothing is left."""
        for request in self.under_way:
            request.steps.close()
        while self.shelf.fetching:
            self.shelf.deliver(self.shelf.fetching[:], FetchOutcome.FAILED)
            self.cache.work()
        for frame, _, _ in self.sends:
            self.cache.space.allocator.unhold(frame)
        for session in self.sessions:
            self.cache.process_gone(session.owner)
        for store in self.stores:
            self.cache.process_gone(store.session.owner)
        self.shelf.forget(list(self.shelf.blocks))
        self.now_s += 1000
        for _ in range(200):
            self.cache.expire()
            self.cache.work()
        self.cache.flush_dram([one.number for one in self.namespaces], b"")
        while self.cache.work() or self.shelf.fetching:
            self.shelf.deliver(self.shelf.fetching[:], FetchOutcome.FAILED)
        assert self.cache.check_integrity() == []
        assert self.cache.space.allocator.used_bytes == 0, "frames are lost"
        assert not self.cache.reads.leases
        assert not self.cache.writes.pending.by_key
        assert not self.cache.writes.quarantined
        assert self.cache.reads.pins.bytes == 0


TestDram = in_first_ring(DramMachine, examples=100, steps=50)
TestDramForLong = in_stress(DramMachine, examples=150, steps=100)


# --- deferred work of many kinds: requests are served between two pieces, and each kind has its turn ---


def rounds(monkeypatch: pytest.MonkeyPatch, work_ns: float) -> tuple[CacheRig, list[str]]:
    """A cache in which two kinds of work record their turns; the first has more to do until its third turn."""
    turns = list[str]()

    def free(space: Space) -> bool:
        turns.append("space")
        return turns.count("space") < 3

    def publish(writes: Writes) -> bool:
        turns.append("writes")
        return False

    monkeypatch.setattr(Space, "work", free)
    monkeypatch.setattr(Writes, "work", publish)
    h = CacheRig()
    h.cache.work_ns = work_ns
    return h, turns


def test_others_are_served_between_two_kinds_where_they_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    h, turns = rounds(monkeypatch, 0)
    most, goes = 0, 0
    while True:
        before, more = len(turns), h.cache.work()
        most, goes = max(most, len(turns) - before), goes + 1
        if not more:
            break
    assert most == 1
    assert goes > 6
    assert turns == ["space", "writes"] * 3, "every kind has a turn, and a kind with more to do has another"


def test_a_kind_that_fails_keeps_no_other_from_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    h, turns = rounds(monkeypatch, 60e9)

    def fail() -> bool:
        raise RuntimeError("a bug")

    h.cache._kinds.insert(0, fail)
    h.cache._round = iter(h.cache._kinds)
    with pytest.raises(RuntimeError):
        h.cache.work()
    h.cache.work()
    assert turns == ["space", "writes"]
