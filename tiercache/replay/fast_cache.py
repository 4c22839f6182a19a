"""Fast simulation: the daemon's decisions for prompts of one namespace, at a tenth of the work.

It leaves out what a single client that waits for each answer never sees: leases, pending blocks, numbers of frames and
slots, more than one block size. It keeps everything that decides: each tier's `Index`, policy and write budget, and
when and what it evicts. A test plays random traces on this and on `Simulation`, and compares every answer and the
resident blocks afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping

from tiercache.daemon.index.allocator import NO_FRAME
from tiercache.daemon.index.chain_ends import ChainEnds, PromptEnds
from tiercache.daemon.index.entries import LIVE, Table
from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import NO_ENTRY, USED, Policy
from tiercache.daemon.policies import POLICIES, Maker, Policies
from tiercache.daemon.policies.fresh_stores import are_below
from tiercache.daemon.tiers.dram.promotion import BATCH
from tiercache.daemon.tiers.dram.space import SLICE
from tiercache.daemon.tiers.nvme.moves.budget import WriteBudget
from tiercache.daemon.tiers.nvme.moves.offers import MATCHED_AT_ONCE
from tiercache.daemon.tiers.nvme.shelf.slots import EVICT_AT_ONCE, FREE_AHEAD_BYTES
from tiercache.protocol.messages import KEY_BYTES, MAX_RESERVE
from tiercache.protocol.namespaces import NamespaceSpec
from tiercache.replay.requests import RequestKind, TraceRequest
from tiercache.replay.simulation import Outcome, Sizes, Tallies

WRITER = b"client"


class _Tier:
    """The blocks of one tier: at most `capacity`."""

    def __init__(self, policies: Policies, capacity: int, below: bool = False) -> None:
        self.index = Index(lambda frame: None)
        self.policy: Policy = policies.make(self.index, below)
        self.table: Table = self.index.add_table(1, self.policy, windowed=False)
        self.capacity = capacity
        self.evicted = 0

    def length(self, keys: bytes, limit: int) -> int:
        """Length of the leading run that the tier has."""
        return self.index.prefix_length(self.table, keys, limit)

    def entry(self, keys: bytes, end: int) -> int:
        """The entry of the last of the first `end` blocks; the root for 0, NO_ENTRY if the tier lacks the block."""
        return self.table.get(keys[(end - 1) * KEY_BYTES : end * KEY_BYTES]) if end else self.table.root

    def read(self, keys: bytes, end: int) -> None:
        """Mark the last of the first `end` blocks as read."""
        entry = self.entry(keys, end)
        self.index.touch(entry)
        if not self.index.children[entry]:
            self.index.pin(entry)
            self.index.unpin(entry)

    def make_room(self, count: int) -> int:
        """See `Space._make_room`: evict until `count` are free or no candidate is left; returns how many are free."""
        free = self.capacity - self.table.blocks
        while free < count and (victim := self.policy.victim()) != NO_ENTRY:
            gone = self.index.evict_run(victim, count - free)
            self.evicted += gone
            free += gone
        return free


class FastCache:
    """One cache for the prompts of one namespace. Single-threaded; no I/O."""

    def __init__(self, sizes: Sizes, start_s: float = 0.0, policies: Mapping[str, Maker] = POLICIES) -> None:
        self._sizes = sizes
        self._maker = policies[sizes.policy]
        self.now_s = start_s
        self._written = self._promoted = self._refused = 0

    def declare(self, number: int, spec: NamespaceSpec) -> None:
        """Add the namespace; there can be no other."""
        assert number == 1, "prompts of one namespace: others are for Simulation"
        sizes, self._block_bytes, self._spec_bytes = self._sizes, spec.frame_bytes, spec.block_bytes
        policies = Policies(self._maker, lambda: self.now_s)
        self._alike_in_runs = policies.alike_in_runs
        self._predictor, self._turnover = policies.predictor, policies.turnover
        self._dram = _Tier(policies, sizes.dram_bytes // spec.frame_bytes)
        self._prompts = PromptEnds()
        self._tails = ChainEnds(
            self._dram.index, self._prompts, lambda: self.now_s, policies.stored_bytes, policies.window_bytes
        )
        self._headroom = -(-sizes.headroom_bytes // spec.frame_bytes)
        room_bytes = sizes.dram_bytes - sizes.headroom_bytes
        policies.turnover.room_bytes = lambda: room_bytes
        slots = sizes.nvme_bytes // spec.frame_bytes
        self._nvme = _Tier(policies, slots, below=True) if slots else None
        self._ahead = max(1, min(FREE_AHEAD_BYTES // spec.frame_bytes, slots // 8))
        self._budget = WriteBudget(sizes.nvme_write_budget_bytes, lambda: self.now_s)

    def play(self, request: TraceRequest) -> Outcome:
        """Play one prompt: a match, promotion of what NVMe has, and a store of the rest."""
        assert request.kind is RequestKind.ASK, "prompts only"
        self.now_s = max(self.now_s, request.time_s)
        self._tails.lapse()
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
                break  # making room evicted the block it stored last
            stored = self._insert(keys, here, count, stored=True)
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
        """Take and release a lease: touches the last block of each tier; DRAM's is not a candidate meanwhile."""
        nvme, behind = self._nvme, found
        if not keys:
            return
        self._prompts.asked(keys)
        how = USED if self._predictor is None else self._predictor.asked(keys, found, total)
        if nvme is not None and (behind := nvme.length(keys, total)):
            nvme.index.touch(nvme.entry(keys, behind), how)
        if found:
            index, entry = self._dram.index, self._dram.entry(keys, found)
            index.touch(entry, how)
            index.pin(entry)
            index.unpin(entry)
        if behind < found and total == found:
            self._write_behind(keys, behind, min(found, behind + MATCHED_AT_ONCE), asked_again=True)

    def _insert(self, keys: bytes, first: int, count: int, stored: bool = False) -> int:
        """Reserve and commit `count` blocks from `first` on; returns how many found room. `stored`: by the client."""
        index, table, tails = self._dram.index, self._dram.table, self._tails
        parent = self._dram.entry(keys, first)
        index.pin(parent)
        tails.lapse()
        given = min(count, self._dram.make_room(count))
        if given < count and tails.give_up():
            given = min(count, self._dram.make_room(count))
        if not given:
            index.unpin(parent)
            return 0
        tails.went_on(WRITER if stored else b"", parent)
        self._turnover.comes(given * self._block_bytes, stored)
        new = _split(keys, first, first + given)
        entries = index.insert_run(table, new, parent, [NO_FRAME] * given, stored=stored)
        index.unpin(parent)
        if stored:
            tails.stored(WRITER, entries[-1])
        return given

    def _keep_free(self, leased: int = NO_ENTRY) -> None:
        """See `Space.keep_free`; `leased` is not evicted for it."""
        dram = self._dram
        if leased != NO_ENTRY:
            dram.index.pin(leased)
        while (short := self._headroom - (dram.capacity - dram.table.blocks)) > 0:
            self._tails.lapse()
            victim = dram.policy.victim()
            if victim == NO_ENTRY:
                break
            dram.evicted += dram.index.evict_run(victim, min(SLICE, short))
        if leased != NO_ENTRY:
            dram.index.unpin(leased)

    # --- NVMe ------------------------------------------------------------------------------------

    def _promote(self, keys: bytes, found: int, total: int) -> int:
        """Promote blocks `found ..< total`; returns how many are in DRAM then. Pins the last block that arrived."""
        dram, nvme = self._dram.index, self._nvme
        assert nvme is not None
        pinned = self._dram.entry(keys, found) if found else NO_ENTRY
        if found:
            dram.touch(pinned)  # when the lease begins to grow; its end is touched when it is complete
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
                if here == total:
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
        """Write blocks `first ..< end` from DRAM to NVMe, parents first, unless NVMe has them or may not take them."""
        nvme, size_bytes = self._nvme, self._block_bytes
        if nvme is None or first >= end:
            return
        table, index, budget = nvme.table, nvme.index, self._budget
        while first < end and nvme.entry(keys, first + 1) != NO_ENTRY:
            first += 1
        parent = nvme.entry(keys, first)
        if first == end or parent == NO_ENTRY:
            return  # NVMe has all of them, or lacks the block before them
        at_once = not budget.bytes_per_day and self._alike_in_runs
        if at_once and self._write_run(nvme, keys, first, end, parent):
            return
        for number in range(first, end):
            key = keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
            if parent == NO_ENTRY:
                return  # NVMe lacks the block before it
            entry = table.get(key)
            if entry == NO_ENTRY and budget.admits(size_bytes, asked_again) and self._admits(nvme, key):
                if not self._take_slot(nvme, parent):
                    return  # only the blocks before it found room
                budget.charge(size_bytes)
                entry = index.insert(table, key, parent, NO_FRAME)
                self._is_below(keys, number, number + 1)
                self._written += 1
            parent = entry

    def _write_run(self, nvme: _Tier, keys: bytes, first: int, end: int, parent: int) -> bool:
        """The same with one call for all of the blocks; False if there may not be room for all of them."""
        count, free = end - first, nvme.capacity - nvme.table.blocks
        ahead, others = max(0, self._ahead - free + 1), nvme.table.blocks - first
        more = max(0, self._ahead - free + count) - ahead
        if not free or ahead + more > others:
            return False
        # The first block that wants a slot sees the state before, later blocks see the changes that the first made.
        self._evict(nvme, parent, ahead)
        entries = nvme.index.insert_run(nvme.table, _split(keys, first, end), parent, [NO_FRAME] * count)
        self._is_below(keys, first, end)
        self._evict(nvme, entries[-1], more)
        self._written += count
        return True

    def _is_below(self, keys: bytes, first: int, end: int) -> None:
        are_below(self._dram.index, [self._dram.entry(keys, number + 1) for number in range(first, end)])

    def _evict(self, nvme: _Tier, keep: int, count: int) -> None:
        nvme.index.pin(keep)
        while count > 0:
            gone = nvme.index.evict_run(nvme.policy.victim(), count)
            count -= gone
            nvme.evicted += gone
        nvme.index.unpin(keep)

    def _admits(self, nvme: _Tier, key: bytes) -> bool:
        """See `Slots.admits`."""
        if not self._budget.bytes_per_day or not self._is_short(nvme.capacity - nvme.table.blocks):
            return True
        dram, victim = self._dram, nvme.policy.victim()
        return victim == NO_ENTRY or nvme.policy.worth(victim) <= dram.policy.worth(dram.table.get(key))

    def _is_short(self, free: int) -> bool:
        return free * self._block_bytes < FREE_AHEAD_BYTES and free < self._ahead

    def _take_slot(self, nvme: _Tier, parent: int) -> bool:
        """See `Slots.take`: make room for one block and for the blocks kept free ahead. False if there is none."""
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

    # --- resident blocks --------------------------------------------------------------------------

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


def _split(keys: bytes, first: int, end: int) -> list[bytes]:
    """The keys `first ..< end` of a packed list."""
    return [keys[at : at + KEY_BYTES] for at in range(first * KEY_BYTES, end * KEY_BYTES, KEY_BYTES)]
