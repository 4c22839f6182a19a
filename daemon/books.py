"""Whether the books of the DRAM tier agree: everything that `check` looks at, a slice at a time, while they change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tiercache.daemon.allocator import NO_ACCOUNT, NO_FRAME
from tiercache.daemon.index_check import ENTRIES, Holding, check_blocks, check_pins
from tiercache.daemon.leases import PendingBlock, ReadLease
from tiercache.daemon.policy import NO_ENTRY
from tiercache.daemon.slices import Steps

if TYPE_CHECKING:
    from tiercache.daemon.cache import Cache

_TRIES = 3
_PINS = 512
"""Of clients, looked at in one slice."""


def check_books(cache: Cache) -> Steps[list[str]]:
    """Everything in which columns, tables, leases and frames disagree; empty when all is well."""
    space = cache.space
    findings = yield from check_blocks(space.index, space.allocator, cache.writes.owners, ())
    findings += yield from check_pins(space.index, lambda: _holdings(cache))
    findings += yield from _check_accounts(cache)
    findings += yield from _check_pinned_regions(cache)
    writes = cache.writes
    leases = writes.leases, writes.quarantined, writes.waiting
    findings += yield from writes.unfinished.check(lambda: [lease for its in leases for lease in its.values()])
    if cache.events is not None:
        findings += yield from cache.events.check()
    for policy in space.policies.hints.policies:
        findings += policy.check_integrity()
        yield
    if cache.what_if is not None:
        findings += cache.what_if.stack.check_integrity()
        yield
    return findings


def _holdings(cache: Cache) -> Sequence[Holding]:
    """Who pins entries of the index."""
    index = cache.space.index
    single = [
        *cache.space.tails, *cache.reads.loose_pins(), *index.unlinking_entries(),
        *(table.root for table in index.tables.values()),
    ]  # fmt: skip
    return [
        (list(cache.reads.leases.values()), ReadLease.pinned),
        (list(cache.writes.pending.values()), _pinned_by),
        (single, lambda entry: (entry,)),
    ]


def _pinned_by(block: PendingBlock) -> Iterable[int]:
    return () if block.parent_entry == NO_ENTRY else (block.parent_entry,)


def _check_accounts(cache: Cache) -> Steps[list[str]]:
    """Frames that are not their namespace's account's. Namespaces keep theirs, and so do frames in use."""
    space, index = cache.space, cache.space.index
    if not space.quotas.numbers:
        return []
    wrong, account_of = 0, space.allocator.account_of

    def is_wrong(frame: int, number: int) -> bool:
        return account_of(frame) != space.quotas.numbers.get(space.namespaces[number].account, NO_ACCOUNT)

    for first in range(0, len(index.key), ENTRIES):
        for entry in range(first, min(first + ENTRIES, len(index.key))):
            if index.state[entry] and index.frame[entry] != NO_FRAME:
                wrong += is_wrong(index.frame[entry], index.table[entry])
        yield
    for part in cache.writes.owners():
        wrong += sum(is_wrong(frame, block.table.number) for frame, block in part)
        yield
    return [f"{wrong} frames are in an account that is not their namespace's"] if wrong else []


def _check_pinned_regions(cache: Cache) -> Steps[list[str]]:
    """The regions that pins of clients keep; not looked at while pins come and go all the time."""
    reads = cache.reads
    for _ in range(_TRIES):
        changes, pinned = reads.pin_changes, Counter[int]()
        for number, lease in enumerate(list(reads.pins.values()), 1):
            pinned.update(lease.pin_regions)
            if not number % _PINS:
                yield
                if reads.pin_changes != changes:
                    break
        else:
            same = pinned == cache.space.pinned_regions
            return [] if same else ["the regions that pins keep are not those of the pins"]
    return []
