"""Walks up a chain in slices, while blocks of the namespace are being unlinked."""

from __future__ import annotations

import pytest
from cache_rig import SmallCache, branch, finish

from tiercache.daemon.index import walks


def test_a_walk_within_which_a_block_is_dropped_remembers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "WALKED_AT_ONCE", 2)
    h = SmallCache(frames=20)
    namespace, keys, others = h.space(), branch(1, 1, 1, 1, 1, 1), branch(2, 2, 2)
    h.store(namespace, keys)
    h.store(namespace, others)
    index, table = h.cache.space.index, namespace.table
    index.drop(table.get(others[:16]))
    steps = walks.walk(index, table, keys, 6)
    next(steps)
    index.drop(table.get(keys[64:80]))  # the blocks that were walked over hang below it, and are still to be unlinked
    assert list(steps) == []
    assert index.prefix_length(table, keys, 6) == 4
    finish(h)
