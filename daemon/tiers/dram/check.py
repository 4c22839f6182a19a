"""Consistency check of the DRAM tier, in slices while it changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.index.allocator import NO_ACCOUNT, NO_FRAME
from tiercache.daemon.index.check import ENTRIES, Holding, check_blocks, check_pins
from tiercache.daemon.index.policy import NO_ENTRY

from .leases import ReadLease
from .reads import Reads
from .space import Space
from .write_lease import PendingRun
from .writes import Writes

_TRIES = 3
_PINS = 512
"""Pins of clients checked in one slice."""


def check_dram(space: Space, reads: Reads, writes: Writes) -> Steps[list[str]]:
    """Every way in which columns, tables, leases and frames disagree; empty when all is well."""
    findings = yield from check_blocks(space.index, space.allocator, writes.owners, ())
    findings += yield from check_pins(space.index, lambda: _holdings(space, reads, writes))
    findings += yield from _check_accounts(space, writes)
    findings += yield from _check_pinned_regions(space, reads)
    findings += yield from writes.check()
    return findings


def _holdings(space: Space, reads: Reads, writes: Writes) -> Sequence[Holding]:
    """The holders of pins on entries of the index."""
    index = space.index
    single = [
        *space.tails,
        *reads.runs.loose_pins(),
        *index.unlinking_entries(),
        *(table.root for table in index.tables.values()),
    ]
    return [
        (list(reads.leases.values()), ReadLease.pinned),
        (list(dict.fromkeys(writes.pending.by_key.values())), _pinned_by),
        (single, lambda entry: (entry,)),
    ]


def _pinned_by(run: PendingRun) -> Iterable[int]:
    return () if run.parent_entry == NO_ENTRY else (run.parent_entry,)


def _check_accounts(space: Space, writes: Writes) -> Steps[list[str]]:
    """Frames charged to another account than their namespace's. Both keep their accounts while in use."""
    index = space.index
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
    for part in writes.owners():
        wrong += sum(is_wrong(frame, owner.run.table.number) for frame, owner in part)
        yield
    return [f"{wrong} frames are in an account that is not their namespace's"] if wrong else []


def _check_pinned_regions(space: Space, reads: Reads) -> Steps[list[str]]:
    """Check the regions that pins of clients keep; skipped while pins come and go all the time."""
    for _ in range(_TRIES):
        changes, pinned = reads.pins.changes, Counter[int]()
        for number, lease in enumerate(list(reads.pins.leases.values()), 1):
            pinned.update(lease.pin_regions)
            if not number % _PINS:
                yield
                if reads.pins.changes != changes:
                    break
        else:
            same = pinned == space.pinned_regions
            return [] if same else ["the regions that pins keep are not those of the pins"]
    return []
