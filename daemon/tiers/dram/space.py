"""Space for blocks: namespaces, their size classes, and eviction to make room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from tiercache.daemon.ground.counters import Counters
from tiercache.daemon.index.allocator import NO_ACCOUNT, Allocator, SizeClass
from tiercache.daemon.index.chain_ends import ChainEnds, PromptEnds
from tiercache.daemon.index.entries import LIVE, Table
from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import NO_ENTRY, Policy, coldest_of
from tiercache.daemon.policies import Policies
from tiercache.protocol.messages import REGION_SHIFT
from tiercache.protocol.namespaces import NamespaceSpec

from .quotas import UNLIMITED, Quotas

MAX_NAMESPACES = 4096
MAX_TENANT_NAMESPACES = 256
"""Per tenant: room for a few models on many ranks, without taking all places from the others."""
SLICE = 512
"""Entries unlinked, or frames emptied, in one go: about a millisecond of the event loop."""
ROOM_STEPS = 4 * SLICE
"""Unlinked at most for one request before it evicts: the rest comes back in the background."""
EVICT_AT_ONCE = 4 * SLICE
"""Evicted at most for one request. Only large blocks under a quota can need more, in place of small ones."""

LOOK_AT_ONCE = 16 * SLICE
"""Frames of a region checked in one go before it is emptied: about a millisecond too."""
_EMPTYING_REST = 256
_TURN = 16


class Shares:
    """Event loop only. Each call costs a step per region and per account."""

    def __init__(self, allocator: Allocator, quotas: Quotas) -> None:
        self._allocator = allocator
        self._quotas = quotas

    def _entitled(self) -> dict[int, int]:
        """What accounts may take: at least one region, and everything where a quota was removed."""
        region_bytes = max((size_bytes for _, size_bytes, _, _ in self._allocator.shares()), default=0)
        entitled = {}
        for name, number in self._quotas.numbers.items():
            limit_bytes = self._quotas.limit_bytes(name)
            entitled[number] = self._allocator.arena_bytes if limit_bytes is None else max(limit_bytes, region_bytes)
        return entitled

    def at_limit(self, account: int) -> bool:
        """True if one more region would be more than an account may take from others."""
        if account == NO_ACCOUNT:
            return False
        entitled = self._entitled()[account]
        region_bytes = max((size_bytes for _, size_bytes, _, _ in self._allocator.shares()), default=0)
        return self._allocator.taken_bytes()[account] + region_bytes > entitled

    def to_give_back(self, size_class: SizeClass, account: int) -> int | None:
        """A region to take back for frames of that size and an account within its share: the one with the least in it.

        None where no account takes too much, or has such a region for itself.
        """
        if not self._quotas.numbers:
            return None
        taken, entitled = self._allocator.taken_bytes(), self._entitled()
        over = {number for number, taken_bytes in taken.items() if taken_bytes > entitled[number]}
        if not over or account in over:
            return None
        usable = [
            (self._allocator.bytes_in_use(region_id), region_id)
            for region_id, size_bytes, owned, counts in self._allocator.shares()
            if size_bytes >= size_class.frame_bytes and region_id not in size_class.regions
            if counts.keys() <= over and sum(counts.values()) == owned > 0
            if self._allocator.entries_of(region_id, emptying=False) is not None
        ]
        return min(usable)[1] if usable else None


@dataclass(slots=True)
class Use:
    """Look-ups and stores of a namespace, in blocks, in this life of the daemon.

    `used_s`: when it was last looked up or stored, on the lease clock; None before the first time.
    """

    asked_blocks: int = 0
    hit_blocks: int = 0
    below_blocks: int = 0
    shared_blocks: int = 0
    stored_blocks: int = 0
    refused_blocks: int = 0
    used_s: float | None = None
    pending_blocks: int = 0
    """Being stored now."""
    pending_below_blocks: int = 0
    """Being written to the tier below."""


@dataclass(slots=True, eq=False)
class Namespace:
    """A registered spec and where its blocks live. Compared by identity.

    `direct`: a client wants to read its blocks on NVMe itself, so they are stored for that. `account`, `account_below`:
    the quota account of its blocks in DRAM and in the tier below (see `Quotas`).
    """

    number: int
    spec: NamespaceSpec
    fingerprint: str
    table: Table
    size_class: SizeClass
    direct: bool = False
    account: str = UNLIMITED
    account_below: str = UNLIMITED
    use: Use = field(default_factory=Use)


def first_of_window(namespace: Namespace, cut: int) -> int:
    """The first block that a cut needs; a chain needs all before it."""
    return max(0, cut - namespace.spec.window_blocks) if namespace.table.windowed else 0


class NoRoom(Exception):
    """There is no place for another namespace."""


class Space:
    """The namespaces and frames of the DRAM tier. Event loop only; never blocks."""

    def __init__(
        self,
        policies: Policies,
        counters: Counters,
        quotas: Quotas | None = None,
        headroom_bytes: int = 0,
        quotas_below: Quotas | None = None,
    ) -> None:
        self.allocator = Allocator()
        self.index = Index(self.allocator.give_back)
        self.counters = counters
        self.namespaces: dict[int, Namespace] = {}
        self._by_fingerprint: dict[str, Namespace] = {}
        self._namespaces_of: Counter[str] = Counter()  # number of namespaces, by tenant
        self.policies = policies
        self.prompts = PromptEnds()
        self.tails = ChainEnds(self.index, self.prompts, policies.clock_s, policies.stored_bytes, policies.window_bytes)
        self._policies: dict[int, dict[str, Policy]] = {}  # by frame size, by account
        self.quotas = quotas or Quotas({})
        self.quotas_below = quotas_below or Quotas({})
        self.shares = Shares(self.allocator, self.quotas)
        self.on_taken_back: Callable[[int], None] = lambda region_id: None
        """Called with a region that is emptied no matter what keeps it."""
        self.populating = False
        """True if regions of the arena are still to come."""
        self._headroom_bytes = headroom_bytes
        policies.turnover.room_bytes = lambda: self.allocator.arena_bytes - headroom_bytes
        self._emptying: tuple[int, int] | None = None  # region id, next frame to look at
        self._looking: tuple[int, int, int] | None = None  # a region that may be emptied, next frame, blocks so far
        self._emptying_skips = 0  # times to skip before emptying a region is considered again
        self._emptying_turn = 0
        self.pinned_regions: Counter[int] = Counter()  # regions that are not emptied, with the pins on each

    def open_namespace(self, spec: NamespaceSpec, fingerprint: str = "") -> Namespace:
        """The namespace of a spec that has no `problem()`; created if new. Raises NoRoom.

        `fingerprint`: that of the spec, where it is known.
        """
        fingerprint = fingerprint or spec.fingerprint()
        known = self._by_fingerprint.get(fingerprint)
        if known is not None:
            return known
        if len(self.namespaces) >= MAX_NAMESPACES:
            raise NoRoom(f"{MAX_NAMESPACES} namespaces are registered: restart the daemon to forget the empty ones")
        known_of_tenant = self._namespaces_of[spec.tenant]
        if spec.tenant and known_of_tenant >= MAX_TENANT_NAMESPACES:
            raise NoRoom(f"tenant {spec.tenant} has registered {known_of_tenant} namespaces: there can be no more")
        self._namespaces_of[spec.tenant] += 1
        number = len(self.namespaces) + 1
        size_class = self.allocator.size_class(spec.frame_bytes)
        by_account = self._policies.setdefault(spec.frame_bytes, {})
        account = self.quotas.enter(number, spec.tenant, fingerprint)
        below = self.quotas_below.enter(number, spec.tenant, fingerprint)
        policy = by_account.get(account)
        if policy is None:
            policy = by_account[account] = self.policies.hinted(self.index)
        table = self.index.add_table(number, policy, windowed=spec.window_blocks > 0)
        namespace = Namespace(number, spec, fingerprint, table, size_class, account=account, account_below=below)
        self.namespaces[number] = self._by_fingerprint[fingerprint] = namespace
        return namespace

    def all_namespaces(self) -> list[Namespace]:
        """Every registered namespace."""
        return list(self.namespaces.values())

    def numbers(self, fingerprints: Iterable[str]) -> dict[str, int]:
        """The numbers of those namespaces that are registered."""
        known = self._by_fingerprint
        return {name: known[name].number for name in fingerprints if name in known}

    def windows(self, fingerprints: Iterable[str]) -> dict[str, int]:
        """The windows, in blocks, of those of these registered namespaces that have one."""
        known = self._by_fingerprint
        return {name: known[name].spec.window_blocks for name in fingerprints if known[name].spec.window_blocks}

    def save(self, namespace: Namespace) -> bytes:
        """A namespace's spec, encoded for the disk."""
        return msgspec.msgpack.encode(namespace.spec)

    def take_frames(self, namespace: Namespace, count: int) -> list[int]:
        """Take frames for `count` blocks, evicting leaves of the same size class if need be; maybe fewer.

        The caller must have pinned what has to survive this (the new blocks' ancestors).
        """
        allocator, size_class = self.allocator, namespace.size_class
        account = self.quotas.numbers.get(namespace.account, NO_ACCOUNT)
        self.tails.lapse()
        limit_bytes = self.quotas.limit_bytes(namespace.account)
        if limit_bytes is not None:
            count = self._within_quota(namespace, count, limit_bytes)
        frames: list[int] = []
        steps = room = ROOM_STEPS
        may_take_back = self._emptying is None and len(self._policies) > 1
        while len(frames) < count:
            if more := allocator.take_many(size_class, count - len(frames), account):
                frames += more
            elif steps > 0 and (done := self.index.unlink_slice(min(SLICE, steps))):
                steps -= done
            elif may_take_back:
                may_take_back = False  # one region, even if it is not free at once
                self._take_back(size_class, account)
            elif room > 0 and (gone := self._make_room(namespace, count - len(frames))):
                room -= gone
            elif not self.tails.give_up():
                break
        return frames

    def used_bytes(self, account: str) -> int:
        """What an account with a quota has of the arena."""
        return self.allocator.account_bytes[self.quotas.numbers.get(account, NO_ACCOUNT)]

    def _within_quota(self, namespace: Namespace, count: int, limit_bytes: int) -> int:
        """How many of `count` frames the account may have, after evicting blocks of its own for them.

        Blocks that are still being read or sent count until they are free: others are evicted for them.
        """
        account, frame_bytes = namespace.account, namespace.size_class.frame_bytes
        steps, room_bytes = ROOM_STEPS, limit_bytes - count * frame_bytes
        while steps > 0 and self.used_bytes(account) > room_bytes:
            if not (done := self.index.unlink_slice(min(SLICE, steps))):
                break
            steps -= done
        accounts = [by_account[account] for by_account in self._policies.values() if account in by_account]
        most = EVICT_AT_ONCE
        while most > 0 and (over := self.used_bytes(account) - room_bytes) > 0:
            policy = coldest_of(accounts)
            if policy is None:
                if self.tails.give_up():
                    continue
                break
            victim = policy.victim()
            size = self.namespaces[self.index.table[victim]].size_class.frame_bytes
            evicted = self.index.evict_run(victim, min(most, -(-over // size)))
            self.counters.evicted_blocks += evicted
            most -= evicted
        room = max(0, limit_bytes - self.used_bytes(account)) // frame_bytes
        if room >= count:
            return count
        refused = count - room
        self.counters.refused_by_quota_blocks += refused
        self.quotas.refused[account] += refused
        return room

    def _make_room(self, namespace: Namespace, count: int) -> int:
        """Evict `count` blocks, or all there are; returns how many.

        All of them before the first frame is taken: a chain is evicted from its end, and the last frame freed is taken
        first, so the frames come out in the order in which they were once filled.
        """
        accounts = list(self._policies[namespace.size_class.frame_bytes].values())
        self._consider_emptying(namespace, accounts)
        evicted = self.index.evict_coldest(accounts, count, _TURN)
        self.counters.evicted_blocks += evicted
        return evicted

    def work(self) -> bool:
        """Run a slice of unlinking and emptying; True while there is more."""
        self._look_slice()
        self._empty_slice()
        busy = self._emptying is not None or self._looking is not None
        return self.index.unlink_slice(SLICE) == SLICE or busy

    def keep_free(self) -> bool:
        """Evict ahead of need, a slice; True while there is less than the headroom.

        Blocks that came last are considered too, so they stay only if they are worth more than what was here before.
        """
        short_bytes = self._headroom_bytes - (self.allocator.arena_bytes - self.allocator.used_bytes)
        if short_bytes <= 0:
            return False
        policy = coldest_of([one for by_account in self._policies.values() for one in by_account.values()])
        if policy is None:
            return False
        victim = policy.victim()
        size_bytes = self.namespaces[self.index.table[victim]].size_class.frame_bytes
        self.counters.evicted_blocks += self.index.evict_run(victim, min(SLICE, -(-short_bytes // size_bytes)))
        return True

    # A class that is out of frames gets a region of another class whose coldest block is colder than its own. The
    # region is emptied in slices and cannot be used before its last frame is back.

    def _take_back(self, size_class: SizeClass, account: int) -> None:
        """Make an account that takes too many regions give one back.

        Nothing protects it: leases and pins of that account are revoked, and what is written there is dropped.
        """
        region_id = self.shares.to_give_back(size_class, account)
        if region_id is not None:
            self._empty_region(region_id)
            self.on_taken_back(region_id)

    def _empty_region(self, region_id: int) -> None:
        self.allocator.empty_region(region_id)
        self._emptying = region_id, 0
        self.counters.regions_drained += 1
        self._empty_slice()

    def _consider_emptying(self, namespace: Namespace, own_accounts: list[Policy]) -> None:
        if self._emptying is not None or self._looking is not None or len(self._policies) < 2:
            return
        if self._emptying_skips:
            self._emptying_skips -= 1
            return
        policy, size_class = coldest_of(own_accounts), namespace.size_class
        own = None if policy is None else policy.coldest_stamp()
        # An account at its limit of whole regions has one of its own emptied, or none.
        alone = self.shares.at_limit(self.quotas.numbers.get(namespace.account, NO_ACCOUNT))
        coldest: tuple[int, Policy] | None = None
        for frame_bytes, accounts in self._policies.items():
            policies = [one for account, one in accounts.items() if not alone or account == namespace.account]
            other = None if frame_bytes == size_class.frame_bytes or not policies else coldest_of(policies)
            stamp = None if other is None else other.coldest_stamp()
            if other is not None and stamp is not None and (coldest is None or stamp < coldest[0]):
                coldest = stamp, other
        if coldest is None or (own is not None and own <= coldest[0]):
            return
        region_id = self.index.frame[coldest[1].victim()] >> REGION_SHIFT
        if self._emptying_turn:  # the coldest one could not be emptied last time: try the others in turn
            regions = self.allocator.regions_like(region_id)
            region_id = regions[self._emptying_turn % len(regions)]
        self._emptying_turn += 1
        self._looking = region_id, 0, 0
        self._look_slice()

    def _look_slice(self) -> None:
        """Check a part of a region; once it turns out that none of its blocks is pinned, it is emptied at once.

        Leases with such a block before their last one are revoked; blocks that clients pinned stay.
        """
        if self._looking is None:
            return
        region_id, first, blocks = self._looking
        self._looking = None
        pins, entries = self.index.pins, self.allocator.entries_of(region_id, emptying=False)
        if self.pinned_regions[region_id] or entries is None:
            return
        part = entries[first : first + LOOK_AT_ONCE]
        blocks += len(part) - part.count(0)
        pinned = any(entry and pins[entry - 1] for entry in part)
        if not pinned and first + LOOK_AT_ONCE < len(entries):
            self._looking = region_id, first + LOOK_AT_ONCE, blocks
        # A frame in use without a block is being written, or still read.
        elif not pinned and blocks == self.allocator.owned_frames(region_id):
            self._emptying_turn = 0
            self._empty_region(region_id)
        else:  # the answer would be the same for every block of a reserve
            self._emptying_skips = len(entries) // _EMPTYING_REST

    def _empty_slice(self) -> None:
        if self._emptying is None:
            return
        region_id, first = self._emptying
        entries = self.allocator.entries_of(region_id, emptying=True)
        if entries is None:  # the last frame came back meanwhile
            self._emptying = None
            return
        for frame in range(first, min(first + SLICE, len(entries))):
            entry = entries[frame] - 1
            if entry != NO_ENTRY and self.index.state[entry] == LIVE:
                self.index.drop(entry)
                self.counters.evicted_blocks += 1
        done = first + SLICE >= len(entries)
        self._emptying = None if done else (region_id, first + SLICE)
