"""Walks up long chains, in slices.

While part of a namespace is being unlinked, a block counts only if all before it are live (`Index.attached`). Asking
for the end of a chain of 65536 blocks would walk up all of it at once; a walk beforehand leaves marks on the way.
"""

from __future__ import annotations

from tiercache.daemon.ground.slices import LOOKUPS, Steps
from tiercache.protocol.messages import KEY_BYTES, MAX_KEYS

from .entries import LIVE, Table
from .index import Index
from .lookups import REMEMBERED
from .policy import NO_ENTRY

WALKED_AT_ONCE = 8192
"""Entries looked at in one slice on the way to a root: about a millisecond."""


def walk(index: Index, table: Table, keys: bytes, limit: int) -> Steps[None]:
    """Call before `prefix_length` of a table that is `unlinking`: does the walk up that it would do, in slices.

    If anything is dropped meanwhile, `prefix_length` repeats the walk itself.
    """
    entry = _deepest(table, keys, limit)
    if entry == NO_ENTRY:
        return
    known, lost, path, above, steps = index.known_attached, index.known_detached, [entry], entry, 0
    # A pin on the last one keeps the entries before it from being freed and reused, while it is live.
    index.pin(entry)
    index.walked_from.append(entry)
    try:
        while above != NO_ENTRY and above not in known:
            if index.state[above] != LIVE or above in lost:
                lost.update(path)
                return
            steps += 1
            if not steps % REMEMBERED:
                path.append(above)
            above = index.parent[above]
            if not steps % WALKED_AT_ONCE:
                drops = index.drops
                yield
                if index.drops != drops or index.state[entry] != LIVE or not table.unlinking:
                    return
        known.update(path)
    finally:
        index.walked_from.remove(entry)
        index.unpin(entry)


def _deepest(table: Table, keys: bytes, limit: int) -> int:
    """The entry of the last of the first `limit` keys that is here, if they form a leading run; else of some key."""
    low, high, deepest = 0, limit, NO_ENTRY
    while low < high:
        middle = limit - 1 if high == limit and deepest == NO_ENTRY else (low + high) // 2
        entry = table.get(keys[middle * KEY_BYTES : (middle + 1) * KEY_BYTES])
        if entry == NO_ENTRY:
            high = middle
        else:
            low, deepest = middle + 1, entry
    return deepest


def path_to(index: Index, table: Table | None, key: bytes) -> Steps[list[bytes]]:
    """Keys from the root of a table down to a block of it; empty where the block is not here, or has no chain.

    A key stands for all before it, so results of earlier slices stay right as long as the last key is here.
    """
    if table is None or table.windowed:
        return []
    entry, keys, parent, path = table.get(key), index.key, index.parent, list[bytes]()
    while entry not in (NO_ENTRY, table.root) and len(path) < MAX_KEYS:
        path.append(keys[entry])
        if not len(path) % LOOKUPS:
            yield
            if table.get(path[-1]) != entry:
                return []  # it was evicted or flushed meanwhile
        entry = parent[entry]
    # A path that does not end at the root is being unlinked, or is longer than a request may name.
    return path[::-1] if entry == table.root else []
