"""Write-behind, DRAM to the store: new blocks are sent later, parents first; nothing waits for them.

    published ─ all ──┐
    matched ─ reused ─┼─► queue ─► frames held, a job of a few values ─► a line: what is missing? put
    evicted ─ evicted ┘     └ full: dropped and counted

A block is in the queue by its name only: what DRAM evicts before its turn is not sent. An evicted block keeps its frame
until it is sent, so there may be only a few of those.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from tiercache.copies.arena import Region
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.tiers.dram.space import Namespace, Space
from tiercache.daemon.tiers.shared.stores.store import Fate
from tiercache.protocol.messages import KEY_BYTES, OFFSET_MASK, REGION_SHIFT

from .access import StoreAccess
from .ancestry import Ancestry
from .byte_rate import ByteRate
from .lines import LineUse
from .naming import lifetime_s
from .write_job import SharedWrite, ValueWrite, WriteJob

MAX_QUEUED = 65_536
"""Blocks that wait. A tenant has at most as many as there is room left for others."""
MOST_PUT_OFF = 1024
"""With more blocks in the queue, those that wait for a flush are dropped: all others would wait behind them."""
MAX_IN_FLIGHT_BYTES = 64 << 20
"""Frames on their way."""
MAX_EVICTED_BYTES = 32 << 20
"""Frames of evicted blocks that wait to be sent, or are on their way."""
MAX_EVICTED = 512
"""Blocks that wait once they are evicted: a request that makes room gets no frame of these, and finds their places."""
HELD_SHARE = 1 / 8
"""Either, as a part of the arena, and of a quota: a store that does not answer must not keep DRAM from making room."""
BLOCKS_EACH = 16
BYTES_EACH = 8 << 20
"""Blocks of one job, and their bytes, unless one value is larger."""
CONSIDERED_AT_ONCE = 64
PUMP_NS = 1_000_000
"""Blocks of the queue considered in one slice, and its time: to find the place of one may take milliseconds."""
MATCHED_AT_ONCE = 256
"""Blocks of a chain that are offered again after one match."""


class _Queued(NamedTuple):
    namespace: Namespace
    key: bytes
    evicted: tuple[int, int] | None  # the frame of an evicted block, held, and its bytes


class SharedWrites:
    """Event loop only. `budget`: of the bytes that are sent."""

    def __init__(
        self, access: StoreAccess, space: Space, regions: dict[int, Region], ancestry: Ancestry, budget: ByteRate
    ) -> None:
        self.when = access.settings.write
        self.written_blocks = self.written_bytes = 0
        self.there_blocks = 0
        """Blocks that the store had already."""
        self.failed_blocks = 0
        self.skipped_queue_full = self.skipped_evicted = self.skipped_unplaced = 0
        self._space, self._regions = space, regions
        self._access, self._breaker = access, access.breaker
        self._presence, self._ancestry = access.presence, ancestry
        self._queue: deque[_Queued] = deque()
        self._queued: set[tuple[int, bytes]] = set()
        self._queued_of: Counter[str] = Counter()  # by tenant
        self._chains: deque[tuple[Namespace, bytes, int]] = deque()  # keys of matched runs, and the next to offer
        self._in_flight: set[tuple[int, bytes]] = set()
        self._evicted_bytes = 0
        self.in_flight_bytes = 0
        self._held_bytes = Counter[str]()  # both, by account
        self._budget = budget
        self._closing = False

    # --- what is to be sent ----------------------------------------------------------------------

    def published(self, namespace: Namespace, key: bytes, before: bytes) -> None:
        """A block has become visible in DRAM."""
        if not namespace.table.windowed:
            index = self._space.index
            entry = namespace.table.get(key)
            before = b"" if entry == NO_ENTRY else index.key[index.parent[entry]]
        self._ancestry.note(namespace, key, before)
        if self.when == "all":
            self._add(namespace, key)

    def matched(self, namespaces: Sequence[Namespace], keys: bytes, dram_blocks: int) -> None:
        """A client asked for these: blocks in DRAM that the store lacks are worth sending (again)."""
        if self.when == "evicted" or not dram_blocks or not self._breaker.may_write:
            return
        run = keys[: dram_blocks * KEY_BYTES]
        for namespace in namespaces[:CONSIDERED_AT_ONCE]:
            pack = self._access.pack_of(namespace)
            end = dram_blocks // pack * pack * KEY_BYTES
            last = run[end - KEY_BYTES : end]  # of what can be in the store
            if namespace.spec.dram_only or not last or self._presence.has(namespace, last):
                continue
            end_key = run[-KEY_BYTES:]
            if any(one is namespace and keys[-KEY_BYTES:] == end_key for one, keys, _ in self._chains):
                continue  # it was asked for a moment ago
            if len(self._chains) < CONSIDERED_AT_ONCE:
                self._chains.append((namespace, run, 0))
                self._access.soon()

    def evicted(self, entry: int) -> None:
        """DRAM is about to evict a block; its frame may be held until it is sent."""
        index = self._space.index
        namespace = self._space.namespaces[index.table[entry]]
        key, frame, size = index.key[entry], index.frame[entry], namespace.size_class.frame_bytes
        if not index.attached(entry):
            return  # it was flushed, and waits to be unlinked
        if namespace.spec.dram_only or self._presence.has(namespace, key) or not self._breaker.may_write:
            return
        if not self._may_hold(namespace.account, size):
            self.skipped_queue_full += 1
        elif self._ancestry.place(namespace, key) is None or self._access.pack_of(namespace) > 1:
            self.skipped_unplaced += 1
        elif (namespace.number, key) not in self._queued:
            self._evicted_bytes += size
            self._hold(namespace, frame)
            self._put(_Queued(namespace, key, (frame, size)))

    def _at_most(self, size_bytes: int) -> int:
        """In a small arena less: what is evicted to make room must make room."""
        return min(size_bytes, int(self._space.allocator.arena_bytes * HELD_SHARE))

    def _may_hold(self, account: str, size_bytes: int) -> bool:
        """True if a block of that size may be evicted and held: the frames count for a quota until they are sent."""
        held_bytes = self._evicted_bytes + self.in_flight_bytes
        if len(self._queue) >= MAX_EVICTED or held_bytes + size_bytes > self._at_most(MAX_EVICTED_BYTES):
            return False
        limit_bytes = self._space.quotas.limit_bytes(account)
        return limit_bytes is None or self._held_bytes[account] + size_bytes <= limit_bytes * HELD_SHARE

    def _hold(self, namespace: Namespace, frame: int) -> None:
        self._space.allocator.hold(frame)
        self._held_bytes[namespace.account] += namespace.size_class.frame_bytes

    def _unhold(self, namespace: Namespace, frame: int) -> None:
        self._space.allocator.unhold(frame)
        self._held_bytes[namespace.account] -= namespace.size_class.frame_bytes

    def _add(self, namespace: Namespace, key: bytes) -> None:
        name = namespace.number, key
        if namespace.spec.dram_only or name in self._queued or name in self._in_flight:
            return
        if self._presence.has(namespace, key):
            return
        tenant, room = namespace.spec.tenant, MAX_QUEUED - len(self._queue)
        if room <= 0 or (tenant and self._queued_of[tenant] >= room):
            self.skipped_queue_full += 1
            return
        self._put(_Queued(namespace, key, None))

    def _put(self, wanted: _Queued) -> None:
        self._queued.add((wanted.namespace.number, wanted.key))
        self._queued_of[wanted.namespace.spec.tenant] += 1
        self._queue.append(wanted)
        self._access.soon()

    def _left_queue(self, wanted: _Queued) -> None:
        self._queued.discard((wanted.namespace.number, wanted.key))
        self._queued_of[wanted.namespace.spec.tenant] -= 1

    @property
    def queued(self) -> int:
        """Blocks that wait."""
        return len(self._queue)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is under way."""
        return not (self._queue or self._in_flight or self._chains)

    # --- sending ---------------------------------------------------------------------------------

    def pump(self) -> bool:
        """Give jobs to the lines, as many as there is room for; True when it stopped to let others run."""
        self._offer_chains()
        considered, put_off, values, size_bytes = 0, 0, list[ValueWrite](), 0
        may_write, most_bytes = self._breaker.may_write, self._at_most(MAX_IN_FLIGHT_BYTES) * self._breaker.share
        if not may_write:
            self._let_evicted_go()  # they must not keep their frames for a store that takes nothing
        until_ns = time.perf_counter_ns() + PUMP_NS
        most = min(CONSIDERED_AT_ONCE, len(self._queue)) if may_write else 0
        while considered < most:
            if self.in_flight_bytes >= most_bytes or not (self._closing or self._budget.has_room()):
                break
            considered += 1
            if time.perf_counter_ns() >= until_ns:
                considered = CONSIDERED_AT_ONCE  # this one is the last
            wanted = self._queue.popleft()
            if self._is_put_off(wanted):
                put_off += 1
                self._queue.append(wanted)
                continue
            value = self._take(wanted)
            if value is None:
                continue
            value_bytes = sum(block.namespace.size_class.frame_bytes for block in value.blocks)
            if values and (len(values) >= BLOCKS_EACH or size_bytes + value_bytes > BYTES_EACH):
                self._begin(values)
                values, size_bytes = [], 0
            values.append(value)
            size_bytes += value_bytes
            self.in_flight_bytes += value_bytes
            self._budget.charge(value_bytes)
        if values:
            self._begin(values)
        return (considered == CONSIDERED_AT_ONCE and put_off < most) or bool(self._chains)

    def _begin(self, values: list[ValueWrite]) -> None:
        generations = [self._presence.generation(value.blocks[0].namespace) for value in values]
        form, epochs = self._access.settings.form, self._access.epochs
        self._access.submit(WriteJob(self, form, epochs, values, generations), LineUse.WRITE)

    def _is_put_off(self, wanted: _Queued) -> bool:
        """True if a block has no name yet, since a flush waits, and can wait too: it holds no frame."""
        pending = self._access.epochs.pending
        if not pending or wanted.evicted is not None or self._closing or len(self._queue) >= MOST_PUT_OFF:
            return False
        place = self._ancestry.place(wanted.namespace, wanted.key)
        if place is None:
            return False
        scope = self._access.scope_of(wanted.namespace, place.root)
        return not pending.isdisjoint(self._access.epochs.naming.notes(scope))

    def _take(self, wanted: _Queued) -> ValueWrite | None:
        """The value that a queued block completes, its frames held; None if there is none to send."""
        namespace, key = wanted.namespace, wanted.key
        self._left_queue(wanted)
        if wanted.evicted is not None:
            frame, size = wanted.evicted
            self._evicted_bytes -= size
            blocks: list[SharedWrite] | None = [self._block(namespace, key, frame)]
        else:
            blocks = self._blocks(namespace, key)
        place = self._ancestry.place(namespace, key)
        if blocks is None or place is None:
            self.skipped_unplaced += place is None
            for block in blocks or ():
                self._unhold(namespace, block.frame)
            return None
        self._in_flight.update((namespace.number, block.key) for block in blocks)
        overwrite = any(map(self._is_to_replace, blocks))
        ttl_s = lifetime_s(self._access.settings.ttl_s, place.number)
        return ValueWrite(self._access.scope_of(namespace, place.root), blocks, ttl_s, overwrite)

    def _blocks(self, namespace: Namespace, key: bytes) -> list[SharedWrite] | None:
        """The blocks of a value that ends with this one, held; None where it ends none, or not all are in DRAM."""
        index, pack, found = self._space.index, self._access.pack_of(namespace), list[tuple[bytes, int]]()
        place = self._ancestry.place(namespace, key) if pack > 1 else None
        if pack > 1 and (place is None or (place.number + 1) % pack):
            return None
        entry = namespace.table.get(key)
        while len(found) < pack:
            if entry in (NO_ENTRY, namespace.table.root) or not index.attached(entry):
                self.skipped_evicted += 1
                return None
            found.append((index.key[entry], index.frame[entry]))
            entry = index.parent[entry]
        for _, frame in found:
            self._hold(namespace, frame)
        return [self._block(namespace, link, frame) for link, frame in reversed(found)]

    def _is_to_replace(self, block: SharedWrite) -> bool:
        return self._presence.is_to_replace(block.namespace, block.key)

    def _block(self, namespace: Namespace, key: bytes, frame: int) -> SharedWrite:
        address = self._regions[frame >> REGION_SHIFT].address + (frame & OFFSET_MASK)
        return SharedWrite(namespace, key, frame, address)

    def job_ended(self, job: WriteJob) -> None:
        """See `JobOwner`."""
        told = zip(job.values, job.fates, job.sent_bytes, job.generations, job.outdated, strict=True)
        for value, fate, sent, generation, outdated in told:
            # What was there turned out meanwhile to be another value: it does not count as there.
            bad = fate is Fate.DONE and not sent and any(map(self._is_to_replace, value.blocks))
            for block in value.blocks:
                self._unhold(block.namespace, block.frame)
                self._in_flight.discard((block.namespace.number, block.key))
                self.in_flight_bytes -= block.namespace.size_class.frame_bytes
                if fate is Fate.DONE and not bad:
                    self._presence.note(block.namespace, block.key, generation)
            count = len(value.blocks)
            if outdated or bad:
                self._add(value.blocks[-1].namespace, value.blocks[-1].key)  # sent if it is still in DRAM
            elif fate is not Fate.DONE:
                self.failed_blocks += count
            elif sent:
                self.written_blocks += count
                self.written_bytes += sent
            else:
                self.there_blocks += count
        self._access.took_in(job)
        if self._queue:
            self._access.soon()

    def _offer_chains(self) -> None:
        """Offer a slice of what was matched in DRAM and is not known to be in the store."""
        if not self._chains or not self._breaker.may_write:
            self._chains.clear()
            return
        namespace, keys, first = self._chains.popleft()
        end = min(first + MATCHED_AT_ONCE, len(keys) // KEY_BYTES)
        before = keys[(first - 1) * KEY_BYTES : first * KEY_BYTES] if first else b""
        for number in range(first, end):
            key = keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
            self._ancestry.note(namespace, key, before)
            if namespace.table.get(key) != NO_ENTRY:
                self._add(namespace, key)
            before = key
        if end < len(keys) // KEY_BYTES:
            self._chains.append((namespace, keys, end))

    def flushed(self, notes: Set[bytes]) -> None:
        """DRAM has forgotten what is below these notes: evicted blocks that wait are forgotten too."""

        def concerned(wanted: _Queued) -> bool:
            place = self._ancestry.place(wanted.namespace, wanted.key)
            if place is None:
                return True
            scope = self._access.scope_of(wanted.namespace, place.root)
            return not notes.isdisjoint(self._access.epochs.naming.notes(scope))

        self._let_evicted_go(concerned)

    def _let_evicted_go(self, concerned: Callable[[_Queued], bool] = lambda wanted: True) -> None:
        """Drop evicted blocks that wait, and free their frames."""
        if not self._evicted_bytes:
            return
        kept = deque[_Queued]()
        for wanted in self._queue:
            if wanted.evicted is None or not concerned(wanted):
                kept.append(wanted)
                continue
            frame, size = wanted.evicted
            self._evicted_bytes -= size
            self._left_queue(wanted)
            self._unhold(wanted.namespace, frame)
            self.skipped_evicted += 1
        self._queue = kept

    def check_integrity(self) -> list[str]:
        """Every way in which the queue and its counts disagree."""
        names = [(wanted.namespace.number, wanted.key) for wanted in self._queue]
        evicted_bytes = sum(wanted.evicted[1] for wanted in self._queue if wanted.evicted is not None)
        findings = []
        if len(names) != len(self._queued) or set(names) != self._queued or len(names) != self._queued_of.total():
            findings.append(f"shared writes: {len(names)} blocks wait, and {len(self._queued)} count as waiting")
        if evicted_bytes != self._evicted_bytes:
            findings.append(f"shared writes: {evicted_bytes} bytes of evicted blocks wait, not {self._evicted_bytes}")
        if self._held_bytes.total() != self._evicted_bytes + self.in_flight_bytes:
            findings.append(f"shared writes: {dict(self._held_bytes)} bytes are held, by account, which is another sum")
        if self.in_flight_bytes < 0 or (self._in_flight and not self.in_flight_bytes):
            findings.append(f"shared writes: {self.in_flight_bytes} bytes of {len(self._in_flight)} blocks in flight")
        return findings

    def close(self) -> None:
        """The daemon ends: send what waits, whatever the budget says."""
        self._closing = True
