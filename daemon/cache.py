"""Puts the parts of the cache together, and does what concerns more than one of them.

    Space    where blocks live in DRAM: namespaces, size classes, eviction
    Reads    match, resolve, hold, release, pin
    Writes   reserve, commit, abort, quarantine
    below    the tiers below: NVMe, a shared store, both, or none
    Ahead    prefetches for clients that said when they return
    Cache    hints, flush, deferred work, expiry, lost sessions, checks

It is not a door to the parts. Each class that answers requests, and each move between the tiers, is given those that it
uses; statistics and inspection read them. There are no sockets, threads or real time here: the clock is a parameter, so
tests use a fake one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tiercache.daemon.events.events import Events
from tiercache.daemon.ground.counters import Counters
from tiercache.daemon.ground.slices import CpuLimit, Slices, Steps, noted
from tiercache.daemon.hints.hints import GivenHint
from tiercache.daemon.index.ages import Ages
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.observe.observers import Observers
from tiercache.daemon.observe.reuse import WhatIf
from tiercache.daemon.tiers.dram.below import FlushBelow, TierBelow
from tiercache.daemon.tiers.dram.check import check_dram
from tiercache.daemon.tiers.dram.leases import Owner
from tiercache.daemon.tiers.dram.quotas import Quotas
from tiercache.daemon.tiers.dram.reads import Reads
from tiercache.daemon.tiers.dram.space import Namespace, Space
from tiercache.daemon.tiers.dram.store_leases import process_gone, session_lost
from tiercache.daemon.tiers.dram.unfinished import Unfinished
from tiercache.daemon.tiers.dram.writes import Writes
from tiercache.protocol.messages import KEY_BYTES

from .policies import Maker, Policies
from .prefetch import Ahead

_FLUSH_AT_ONCE = 1024
"""Entries unlinked before a flush is answered; the rest follows in the background."""
FLUSHED_AT_ONCE = 64
"""Namespaces flushed whole together, their disks told of it: about a millisecond."""
KEYS_FLUSHED_AT_ONCE = 2
"""Namespaces of which one key is flushed together: rows to write for each disk, and much may hang below."""
FLUSH_NS = 2_000_000
"""CPU time of a flush after which others are served."""
_HINTED_AT_ONCE = 32
"""Namespaces that a hint covers in one slice: each may take a walk over its chain."""


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Limits of the cache beside the size of its arena; for the last two see `Unfinished`."""

    policy: str | Maker = "lru"
    headroom_bytes: int = 0
    pin_share: float = 0.5
    quota: Mapping[str, int] = field(default_factory=dict)
    quota_below: Mapping[str, int] = field(default_factory=dict)
    quarantine_bytes: int = 1 << 30
    floor_share: float = 0.0
    secret: int = 0
    """Selects the policies' samples: the daemon's own secret, so that no client can aim at them."""


class Cache:
    """The parts, and what concerns more than one of them. Event loop only; never blocks."""

    def __init__(
        self,
        clock_s: Callable[[], float],
        limits: CacheLimits | None = None,
        below: TierBelow | None = None,
        events: Events | None = None,
        what_if: WhatIf | None = None,
    ) -> None:
        limits = limits or CacheLimits()
        self.below = below or TierBelow()
        self.clock_s = clock_s
        self.counters = Counters()
        self.observers = Observers(what_if)
        policies, quotas = Policies(limits.policy, clock_s, limits.secret), Quotas(limits.quota)
        self.space = Space(policies, self.counters, quotas, limits.headroom_bytes, Quotas(limits.quota_below))
        self.reads = Reads(self.space, self.below, clock_s, limits.pin_share)
        self.slices = Slices()
        """Requests and other work that take more than one go of the loop."""
        self.ahead = Ahead(self.reads, clock_s, self.slices, self._look_up)
        unfinished = Unfinished(limits.quarantine_bytes, limits.floor_share, lambda: self.space.allocator.arena_bytes)
        self.writes = Writes(self.space, self.below.published, clock_s, unfinished, events)
        self.space.on_taken_back = self.writes.pending.take_back
        self.events = events
        self.ages = Ages()
        if events is not None:
            self.space.index.on_left = partial(events.left, events.dram)
        self.work_ns = math.inf
        """CPU time of this thread after which `work` stops between two slices."""
        self._kinds: list[Callable[[], bool]] = [self.slices.work, self.space.work, self._end_cut, self.writes.work]
        self._kinds += [one.work for one in (what_if, events) if one is not None]
        self._kinds += self.below.kinds
        self._round = iter(self._kinds)
        self._more = False  # left over from kinds of work that had their turn in this round

    def hint(self, namespaces: Sequence[Namespace], keys: bytes, first: int, said: GivenHint) -> Steps[int]:
        """Apply a client's hint to blocks `first..` of `keys`; returns how many of `keys` are here."""
        hints, index, blocks = self.space.policies.hints, self.space.index, 0
        hints.count(said)
        for number, namespace in enumerate(namespaces, 1):
            places = [(index, namespace.table), *self.below.local.holders(namespace, keys)]
            window = namespace.spec.window_blocks
            blocks = max(blocks, hints.say(places, keys, first, said, window, len(namespaces)))
            if not number % _HINTED_AT_ONCE:
                yield
        if blocks and self.below.tiers:
            self.ahead.say(namespaces, keys[: blocks * KEY_BYTES], said)
        return blocks

    def _look_up(self, namespaces: Sequence[Namespace], keys: bytes, go: Callable[[], None]) -> bool:
        """Have `go` called when it is known what a shared store has of a prompt; False where nothing is to be known."""
        if not self.below.may_extend:
            return False
        return self.below.wait(namespaces, keys, self.reads.runs.lengths(namespaces, keys), go)

    def flush(
        self, namespaces: Sequence[Namespace], key: bytes, below: FlushBelow | None, dram: bool = True
    ) -> Steps[tuple[int, bool]]:
        """Flush everything in these namespaces, or one block and what follows it: in DRAM, and `below`.

        A namespace is flushed from both at once, or one tier would bring back what the other has dropped; of many
        namespaces, some in each slice. Frames come back later (`work`). Reads under way are revoked, and what is being
        written is dropped at its commit. Returns the blocks dropped from DRAM, and whether frames are still coming
        back.
        """
        gone, tables, at_once = 0, self.space.index.tables, KEYS_FLUSHED_AT_ONCE if key else FLUSHED_AT_ONCE
        limit = CpuLimit(FLUSH_NS)
        for first in range(0, len(namespaces), at_once):
            if first and limit.over:
                yield
                limit = CpuLimit(FLUSH_NS)
            part = namespaces[first : first + at_once]
            if dram:
                gone += self._forget_now([namespace.number for namespace in part], key)
            if below is not None:
                below.forget(part)
        return gone, dram and any(tables[namespace.number].unlinking for namespace in namespaces)

    def _forget_now(self, numbers: Sequence[int], key: bytes) -> int:
        """Drop all blocks, or one key, of a few namespaces from DRAM; returns how many blocks."""
        index = self.space.index
        tables = [index.tables[number] for number in numbers]
        before = sum(table.blocks for table in tables)
        if self.observers.what_if is not None and not key:
            self.observers.what_if.forget([self.space.namespaces[number] for number in numbers])
        if key:
            for table in tables:
                self.writes.pending.drop_key(table.number, key)
                if (entry := table.get(key)) != NO_ENTRY:
                    index.drop(entry)
            self.writes.pending.drop_some()
        else:
            self.writes.pending.drop_namespaces(set(numbers))
            for table in tables:
                if not index.is_untouched(table):
                    index.drop_table(table)
        index.unlink_slice(_FLUSH_AT_ONCE)
        self._end_cut()
        gone = before - sum(table.blocks for table in tables) if key else before
        self.counters.flushed_blocks += gone
        return gone

    def work(self) -> bool:
        """Run deferred work, a slice of each kind in turn; True while there is more.

        Each slice is a millisecond or two, or 4 for what commits publish. After `work_ns` the loop serves others first
        and the kinds that had no turn come next: many kinds together never take much longer than one.
        """
        limit = CpuLimit(self.work_ns)
        for kind in self._round:
            self._more = kind() or self._more
            if limit.over:
                return True
        more, self._more, self._round = self._more, False, iter(self._kinds)
        # Not while anything waits to be written: it would be evicted before that.
        return more or (self.below.settled and self.space.keep_free())

    def _end_cut(self) -> bool:
        """End a slice of the leases that have lost blocks; True while there is more."""
        index = self.space.index
        if index.has_cut:
            index.has_cut = False
            self.reads.suspect_all()
            self.space.tails.let_go_detached()
        return self.reads.work()

    def expire(self) -> None:
        """End what has expired."""
        self.ages.note(self.space.index.columns.clock, self.clock_s())
        self.space.tails.lapse()
        self.reads.expire()
        self.space.policies.hints.expire(self.space.index, self.space.tails)
        self.ahead.work()
        self.writes.expire()
        self.below.local.expire()

    def session_lost(self, owner: Owner) -> None:
        """A session has ended, maybe not its process. Its leases end in slices, nearly always in one."""
        self._writer_gone(owner)
        self.slices.begin(self._give_up(owner))

    def process_gone(self, owner: Owner) -> None:
        """The session's process has exited, so it no longer writes to any frame."""
        self._writer_gone(owner)
        steps = self._forget(owner)
        if owner.reads or owner.writes:
            self.slices.add(steps)  # what the session has left is a slice of its own
        else:
            self.slices.begin(steps)

    def _writer_gone(self, owner: Owner) -> None:
        self.space.tails.writer_gone(owner.instance)
        self.below.local.writer_gone(owner.instance)

    def _give_up(self, owner: Owner) -> Steps[None]:
        for steps in (self.reads.session_lost(owner), session_lost(owner)):
            if (yield from noted(steps))[1]:
                yield

    def _forget(self, owner: Owner) -> Steps[None]:
        yield from self._give_up(owner)
        yield from process_gone(owner)

    def has_quarantine(self, owner: Owner) -> bool:
        """True if places are quarantined until this session's process exits, or may be soon."""
        return bool(owner.writes or owner.quarantined)

    def check(self) -> Steps[list[str]]:
        """Every inconsistency between its parts, except in the tier below, which has a check of its own."""
        findings = yield from check_dram(self.space, self.reads, self.writes)
        if self.events is not None:
            findings += yield from self.events.check()
        for policy in self.space.policies.hints.policies:
            findings += policy.check_integrity()
            yield
        if self.observers.what_if is not None:
            findings += self.observers.what_if.stack.check_integrity()
            yield
        return findings
