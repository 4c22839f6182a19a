"""The same decisions as the daemon's cache, for prompts of one namespace, at a tenth of the work.

What is left out is what a single client that waits for each answer never sees: leases, pending blocks, frames and
slots as numbers, sizes other than one. What is not is everything that decides: the `Index` of each tier, its policy,
the write budget; when room is made, and of what. A test plays random traces on this and on `Simulation` and compares
every answer and what is resident afterwards.
"""

from __future__ import annotations

from tiercache.daemon.allocator import NO_FRAME
from tiercache.daemon.index import LIVE, Index, Table
from tiercache.daemon.nvme.budget import WriteBudget
from tiercache.daemon.nvme.promotion import BATCH
from tiercache.daemon.nvme.slots import EVICT_AT_ONCE, FREE_AHEAD_BYTES
from tiercache.daemon.nvme.tier import MATCHED_AT_ONCE
from tiercache.daemon.policies import Policies
from tiercache.daemon.policy import NO_ENTRY, Policy
from tiercache.daemon.space import SLICE
from tiercache.layout import NamespaceSpec
from tiercache.messages import KEY_BYTES, MAX_RESERVE
from tiercache.replay.requests import Kind, Request
from tiercache.replay.simulation import Outcome, Sizes, Tallies


class _Tier:
    """The blocks of one tier: as many as `capacity`."""

    def __init__(self, policies: Policies, capacity: int) -> None:
        self.index = Index(lambda frame: None)
        self.policy: Policy = policies.make(self.index)
        self.table: Table = self.index.add_table(1, self.policy, windowed=False)
        self.capacity = capacity
        self.evicted = 0

    def length(self, keys: bytes, limit: int) -> int:
        """The leading run that is here."""
        return self.index.prefix_length(self.table, keys, limit)

    def entry(self, keys: bytes, end: int) -> int:
        """The last of the first `end` blocks; the root for 0, NO_ENTRY where it is not here."""
        return self.table.get(keys[(end - 1) * KEY_BYTES : end * KEY_BYTES]) if end else self.table.root

    def read(self, keys: bytes, end: int) -> None:
        """The last of the first `end` blocks is read."""
        entry = self.entry(keys, end)
        self.index.touch(entry)
        if not self.index.children[entry]:
            self.index.pin(entry)
            self.index.unpin(entry)

    def make_room(self, count: int) -> int:
        """See `Space._make_room`: evict until `count` are free, or nothing more can be; how many are free."""
        free = self.capacity - self.table.blocks
        while free < count and (victim := self.policy.victim()) != NO_ENTRY:
            gone = self.index.evict_run(victim, count - free)
            self.evicted += gone
            free += gone
        return free


class Swift:
    """One cache for the prompts of one namespace. Single-threaded; no I/O."""

    def __init__(self, sizes: Sizes, start_s: float = 0.0) -> None:
        self._sizes = sizes
        self.now_s = start_s
        self._written = self._promoted = self._refused = 0

    def declare(self, number: int, spec: NamespaceSpec) -> None:
        """The namespace; there can be no other."""
        assert number == 1, "prompts of one namespace: others are for Simulation"
        sizes, self._block_bytes, self._spec_bytes = self._sizes, spec.frame_bytes, spec.block_bytes
        policies = Policies(sizes.policy, lambda: self.now_s)
        self._predictor = policies.predictor
        self._dram = _Tier(policies, sizes.dram_bytes // spec.frame_bytes)
        self._headroom = -(-sizes.headroom_bytes // spec.frame_bytes)
        slots = sizes.nvme_bytes // spec.frame_bytes
        self._nvme = _Tier(policies, slots) if slots else None
        self._ahead = max(1, min(FREE_AHEAD_BYTES // spec.frame_bytes, slots // 8))
        self._budget = WriteBudget(sizes.nvme_write_budget_bytes, lambda: self.now_s)

    def play(self, request: Request) -> Outcome:
        """One prompt: a match, promotion of what NVMe has, and a store of the rest."""
        assert request.kind is Kind.ASK, "prompts only"
        self.now_s = max(self.now_s, request.time_s)
        keys, blocks = request.keys, len(request.keys) // KEY_BYTES
        dram, nvme = self._dram, self._nvme
        found = total = here = dram.length(keys, blocks)
        if nvme is not None and found < blocks:
            total = max(found, nvme.length(keys, blocks))
        self._use(keys, found, total)
        if total > found:
            here = self._promote(keys, found, total)
        elif nvme is not None:
            self._keep_free(dram.entry(keys, found))
        while here < blocks:
            count = min(MAX_RESERVE, blocks - here)
            if dram.entry(keys, here) == NO_ENTRY:
                break  # room was made of what it stored last
            stored = self._insert(keys, here, count)
            self._write_behind(keys, here, here + stored, asked_again=False)
            self._keep_free()
            here += stored
            if stored < count:
                self._refused += blocks - here
                break
        self._keep_free()
        return Outcome(found, total - found)

    # --- DRAM ------------------------------------------------------------------------------------

    def _use(self, keys: bytes, found: int, total: int) -> None:
        """A lease comes and goes: the last block of each tier is touched, and DRAM's is no candidate meanwhile."""
        nvme, behind = self._nvme, found
        if not keys:
            return
        if self._predictor is not None:
            self._predictor.asked(keys, found, total)
        if nvme is not None and (behind := nvme.length(keys, total)):
            nvme.index.touch(nvme.entry(keys, behind))
        if found:
            index, entry = self._dram.index, self._dram.entry(keys, found)
            index.touch(entry)
            index.pin(entry)
            index.unpin(entry)
        if self._predictor is not None:
            self._predictor.answered()
        if behind < found and total == found:
            self._write_behind(keys, behind, min(found, behind + MATCHED_AT_ONCE), asked_again=True)

    def _insert(self, keys: bytes, first: int, count: int) -> int:
        """Reserve and commit `count` blocks from `first` on; how many there was room for."""
        index, table = self._dram.index, self._dram.table
        parent = self._dram.entry(keys, first)
        index.pin(parent)
        given = min(count, self._dram.make_room(count))
        if not given:
            index.unpin(parent)
            return 0
        insert, pins = index.insert, index.pins
        ends = range((first + 1) * KEY_BYTES, (first + given + 1) * KEY_BYTES, KEY_BYTES)
        run = [keys[end - KEY_BYTES : end] for end in ends]
        for key in run[:-1]:
            entry = insert(table, key, parent, NO_FRAME, 1)  # pinned, as long as the next one is pending
            pins[parent] -= 1  # with a child it is no candidate, so this is all that `unpin` does
            parent = entry
        insert(table, run[-1], parent, NO_FRAME)
        pins[parent] -= 1
        return given

    def _keep_free(self, leased: int = NO_ENTRY) -> None:
        """See `Space.keep_free`; `leased` is not evicted for it."""
        dram = self._dram
        if leased != NO_ENTRY:
            dram.index.pin(leased)
        while (short := self._headroom - (dram.capacity - dram.table.blocks)) > 0:
            victim = dram.policy.victim()
            if victim == NO_ENTRY:
                break
            dram.evicted += dram.index.evict_run(victim, min(SLICE, short))
        if leased != NO_ENTRY:
            dram.index.unpin(leased)

    # --- NVMe ------------------------------------------------------------------------------------

    def _promote(self, keys: bytes, found: int, total: int) -> int:
        """Bring up blocks `found ..< total`; how many are in DRAM then. The last one that has come is pinned."""
        dram, nvme = self._dram.index, self._nvme
        assert nvme is not None
        pinned = self._dram.entry(keys, found) if found else NO_ENTRY
        if found:
            dram.touch(pinned)
            dram.touch(pinned)  # by the lease, and when it begins to grow
            dram.pin(pinned)
        here = found
        while here < total:
            count = min(BATCH, total - here)
            for number in range(here, here + count):
                nvme.read(keys, number + 1)
            given = self._insert(keys, here, count)
            here += given
            self._promoted += given
            if given:
                end = self._dram.entry(keys, here)
                dram.touch(end)
                dram.pin(end)
                if pinned != NO_ENTRY:
                    dram.unpin(pinned)
                pinned = end
            if given < count:
                break
        self._keep_free()
        if pinned != NO_ENTRY:
            dram.unpin(pinned)
        return here

    def _write_behind(self, keys: bytes, first: int, end: int, asked_again: bool) -> None:
        """Write blocks `first ..< end`, in DRAM and parents first, unless they are there or may not be."""
        nvme, size_bytes = self._nvme, self._block_bytes
        if nvme is None or first >= end:
            return
        table, index, budget = nvme.table, nvme.index, self._budget
        parent = nvme.entry(keys, first)
        for number in range(first, end):
            key = keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
            if parent == NO_ENTRY:
                return  # the block before it is not there
            entry = table.get(key)
            if entry == NO_ENTRY and budget.admits(size_bytes, asked_again) and self._admits(nvme, key):
                if not self._take_slot(nvme, parent):
                    return  # there is no more room than what is before it has
                budget.charge(size_bytes)
                entry = index.insert(table, key, parent, NO_FRAME)
                self._written += 1
            parent = entry

    def _admits(self, nvme: _Tier, key: bytes) -> bool:
        """See `Slots.admits`."""
        if not self._budget.bytes_per_day or not self._is_short(nvme.capacity - nvme.table.blocks):
            return True
        dram, victim = self._dram, nvme.policy.victim()
        return victim == NO_ENTRY or nvme.policy.worth(victim) <= dram.policy.worth(dram.table.get(key))

    def _is_short(self, free: int) -> bool:
        return free * self._block_bytes < FREE_AHEAD_BYTES and free < self._ahead

    def _take_slot(self, nvme: _Tier, parent: int) -> bool:
        """See `Slots.take`: room for one block and for those kept free ahead. False where there is none."""
        free = nvme.capacity - nvme.table.blocks
        if not free:
            self._make_room(nvme, parent, free)
            free = nvme.capacity - nvme.table.blocks
        if nvme.index.state[parent] != LIVE:
            return False
        free -= 1
        if self._is_short(free):
            self._make_room(nvme, parent, free)
        return True

    def _make_room(self, nvme: _Tier, keep: int, free: int) -> None:
        nvme.index.pin(keep)
        for _ in range(min(self._ahead - free, EVICT_AT_ONCE)):
            victim = nvme.policy.victim()
            if victim == NO_ENTRY:
                break
            nvme.index.evict(victim)
            nvme.evicted += 1
        nvme.index.unpin(keep)
        if not free and nvme.table.blocks == nvme.capacity and nvme.policy.victim() == keep:
            nvme.index.evict(keep)
            nvme.evicted += 1

    # --- what is there ---------------------------------------------------------------------------

    def tallies(self) -> Tallies:
        """See `Simulation.tallies`."""
        written_bytes = self._written * self._spec_bytes
        evicted = 0 if self._nvme is None else self._nvme.evicted
        return Tallies(self._written, self._promoted, self._dram.evicted, evicted, self._refused, written_bytes)

    def resident(self, number: int) -> tuple[set[bytes], set[bytes]]:
        """See `Simulation.resident`."""
        tables = [self._dram.table] if self._nvme is None else [self._dram.table, self._nvme.table]
        here = [{key for shard in table.shards for key in shard} for table in tables]
        return here[0], here[1] if len(here) > 1 else set()

    def check_integrity(self) -> list[str]:
        """See `Index.check_integrity`, of each tier."""
        return [finding for tier in (self._dram, self._nvme) if tier for finding in tier.index.check_integrity()]
