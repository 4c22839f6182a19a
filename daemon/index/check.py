"""Consistency check of an index, and of its pin counts against the holders of pins: in slices, while the index changes.

Each block is compared with its neighbours at one moment. Pins have holders all over the daemon, which are visited one
after another; so the index records meanwhile which entries' pins change, and these are checked again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import islice
from typing import Any

from tiercache.daemon.ground.slices import PINS, Steps

from .allocator import NO_FRAME, Allocator
from .entries import FREE, LIVE
from .frame_check import FrameCheck
from .index import Index
from .policy import NO_ENTRY

ENTRIES = 2 * PINS
"""Entries checked in one slice."""
_SIBLINGS = 8 * PINS
"""Children counted in one slice."""
_TRIES = 3


Owners = Callable[[], Iterable[Sequence[tuple[int, object]]]]
"""Frames being written, each with its writer: parts of the state at the time of the first part."""


def check_blocks(index: Index, allocator: Allocator, owners: Owners, leaving: Container[int]) -> Steps[list[str]]:
    """As `check_index`, and whether each frame in use belongs to one entry or one owner, or is `leaving`."""
    frames = FrameCheck(allocator)
    try:
        yield from frames.begin()
        for part in owners():
            frames.written(frame for frame, _ in part)
            yield
        findings = yield from check_index(index, frames)
        for part in owners() if frames.in_doubt else ():
            frames.written_again(index, part)
            yield
        yield from frames.end(leaving)
    finally:
        frames.stop()
    return findings + frames.findings


def check_index(index: Index, frames: FrameCheck | None = None) -> Steps[list[str]]:
    """Every way in which columns, tables and counts disagree; `frames` is told which entry has which frame."""
    findings: list[str] = []
    roots = {table.root for table in index.tables.values()}
    for first in range(0, len(index.key), ENTRIES):
        many: list[int] = []
        for entry in range(first, min(first + ENTRIES, len(index.key))):
            if index.state[entry] == FREE:
                continue
            findings += _check_entry(index, entry, roots)
            if index.children[entry] > PINS:
                many.append(entry)
            if frames is not None and index.frame[entry] != NO_FRAME:
                frames.entry(index, entry, index.frame[entry])
        yield
        for entry in many:
            findings += yield from _check_children(index, entry)
    for number, table in enumerate(list(index.tables.values()), 1):
        if table.blocks != sum(map(len, table.shards)):
            findings.append(f"namespace {table.number} counts {table.blocks} blocks")
        if not number % PINS:
            yield
    return findings


def _check_entry(index: Index, entry: int, roots: set[int]) -> list[str]:
    """Check an entry that is not free, with its parent, its siblings and its children, if these are not too many."""
    findings, state, parent = [], index.state[entry], index.parent[entry]
    table = index.tables[index.table[entry]]
    if state == LIVE and entry not in roots and entry != table.root and table.get(index.key[entry]) != entry:
        findings.append(f"entry {entry} is live but its key is not in its table")
    if parent != NO_ENTRY:
        if index.state[parent] == FREE:
            findings.append(f"entry {entry} hangs below the free entry {parent}")
        before, after = index.prev_sibling[entry], index.next_sibling[entry]
        listed = index.first_child[parent] if before == NO_ENTRY else index.next_sibling[before]
        if listed != entry or (after != NO_ENTRY and index.prev_sibling[after] != entry):
            findings.append(f"entry {entry} is not among the children of {parent}")
    children = index.children[entry]
    if children <= PINS:
        found = sum(1 for _ in islice(_children(index, entry), PINS + 1))
        if found != children:
            findings.append(f"entry {entry} counts {children} children, has {found}")
    is_candidate = index.columns.next[entry] != 0
    if is_candidate != (state == LIVE and children == 0 and index.pins[entry] == 0):
        findings.append(f"entry {entry} is {'' if is_candidate else 'not '}a candidate, wrongly")
    return findings


def _children(index: Index, entry: int) -> Iterable[int]:
    child = index.first_child[entry]
    while child != NO_ENTRY:
        if index.parent[child] == entry:
            yield child
        child = index.next_sibling[child]


def _check_children(index: Index, entry: int) -> Steps[list[str]]:
    """Count the children of an entry with many; skipped if they never stay the same for long enough."""
    for _ in range(_TRIES):
        first, children, found = index.first_child[entry], index.children[entry], 0
        child = first
        while child != NO_ENTRY and index.parent[child] == entry:
            found += 1
            child = index.next_sibling[child]
            if not found % _SIBLINGS:
                yield
                # A new child comes first, and one that is removed is no longer counted.
                if index.first_child[entry] != first or index.children[entry] != children:
                    break
        else:
            return [] if found == children else [f"entry {entry} counts {children} children, has {found}"]
    return []


Holding = tuple[Sequence[Any], Callable[[Any], Iterable[int]]]
"""Holders of pins, and a function that lists the entries pinned by one of them."""


def check_pins(index: Index, holdings: Callable[[], Sequence[Holding]]) -> Steps[list[str]]:
    """Entries whose pin count differs from the pins held. Entries whose holders change all the time are left out.

    `holdings()` are all holders at that moment; what each one pins may be asked later, since changes are recorded.
    """
    doubtful: Sequence[int] | None = None  # all
    try:
        for _ in range(_TRIES):
            counts = yield from _counted(index, holdings, doubtful)
            wrong, moved = list[str](), list[int]()
            entries = range(len(counts)) if doubtful is None else doubtful
            for first in range(0, len(entries), 4 * ENTRIES):
                for entry in entries[first : first + 4 * ENTRIES]:
                    if index.state[entry] == FREE or index.pins[entry] == counts[entry]:
                        continue
                    if index.moved is None or index.moved[entry]:
                        moved.append(entry)
                    else:
                        wrong.append(f"entry {entry} counts {index.pins[entry]} pins, has {counts[entry]}")
                yield
            if wrong or not moved:
                return wrong
            doubtful = moved
        return []
    finally:
        index.moved = None


def _counted(index: Index, holdings: Callable[[], Sequence[Holding]], doubtful: Sequence[int] | None) -> Steps[Any]:
    """Pins held, by entry; of the `doubtful` entries only, if given. Changes are recorded from here on."""
    size = len(index.key)
    index.moved = bytearray(size)
    counts: Any = array("i", bytes(4 * size)) if doubtful is None else dict.fromkeys(doubtful, 0)
    known = range(size) if doubtful is None else counts
    done = 0
    for holders, held_by in holdings():
        for holder in holders:
            done += 1
            for entry in held_by(holder):
                done += 1
                if entry in known:
                    counts[entry] += 1
            if done >= ENTRIES:
                done = 0
                yield
    return counts
