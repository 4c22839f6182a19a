"""Runs of blocks leave the index as the same blocks would one by one; walks up a chain, while blocks are unlinked."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest
from cache_rig import SmallCache, branch, finish

from tiercache.daemon.ground import slices
from tiercache.daemon.index import walks
from tiercache.daemon.index.allocator import NO_FRAME
from tiercache.daemon.index.check import check_index
from tiercache.daemon.index.entries import Table
from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.policies import POLICIES, Policies


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Both:
    """Two indexes: one is given runs of blocks, the other the same blocks one by one."""

    def __init__(self, policy: str) -> None:
        self.clock = Clock()
        self.released: tuple[list[int], list[int]] = [], []
        self.indexes = Index(self.released[0].append), Index(self.released[1].append)
        self.left: tuple[list[bytes], list[bytes]] = [], []
        for index, left in zip(self.indexes, self.left, strict=True):
            index.on_left = partial(self._left, left)
        self.tables: list[Table] = []
        for index in self.indexes:
            policies = Policies(policy, self.clock)
            self.tables.append(index.add_table(1, policies.make(index), windowed=False))

    def _left(self, left: list[bytes], number: int, key: bytes) -> None:
        left.append(key)

    def insert(self, keys: Sequence[bytes], parent: bytes, frames: Sequence[int]) -> None:
        runs, single = self.indexes
        table, other = self.tables
        runs.insert_run(table, keys, table.get(parent) if parent else table.root, frames)
        above = other.get(parent) if parent else other.root
        for key, frame in zip(keys, frames, strict=True):
            (above,) = single.insert_run(other, [key], above, [frame])

    def evict(self, count: int) -> None:
        """Evict a run from the one index, and as many blocks, one by one, from the other."""
        runs, single = self.indexes
        victim = self.tables[0].policy.victim()
        gone = runs.evict_run(victim, count) if victim != NO_ENTRY else 0
        for _ in range(gone):
            single.evict(self.tables[1].policy.victim())

    def touch(self, key: bytes) -> None:
        for index, table in zip(self.indexes, self.tables, strict=True):
            index.touch(table.get(key))

    def keys(self) -> list[set[bytes]]:
        return [{key for shard in table.shards for key in shard} for table in self.tables]


def history(both: Both, seed: int, steps: int) -> None:
    chance = random.Random(seed)
    for step in range(steps):
        both.clock.now_s += chance.choice((0.0, 0.1, 2.0))
        here = sorted(both.keys()[0])
        if chance.random() < 0.5 or not here:
            length = chance.randint(1, 12)
            keys = [bytes([chance.randrange(256)]) + step.to_bytes(8, "big") + bytes([at] * 7) for at in range(length)]
            parent = chance.choice(here) if here and chance.random() < 0.7 else b""
            both.insert(keys, parent, range(100 * step, 100 * step + length))
        elif chance.random() < 0.4:
            both.touch(chance.choice(here))
        else:
            both.evict(chance.randint(1, 15))
        if step % 10 == 0:
            assert [slices.finish(check_index(index)) for index in both.indexes] == [[], []]
        one, other = both.keys()
        assert one == other, f"step {step}"


@pytest.mark.parametrize("policy", ["lru", "hazard"])
@pytest.mark.parametrize("seed", range(4))
def test_runs_are_as_blocks_one_by_one(policy: str, seed: int) -> None:
    both = Both(policy)
    history(both, seed, 150)
    assert both.released[0] == both.released[1], "frames come back in the same order"
    assert both.released[0]
    assert both.left[0] == both.left[1], "each is told, from the end of a chain on"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_takes_rows_that_were_used_before(policy: str) -> None:
    index = Index(lambda frame: None)
    table = index.add_table(1, Policies(policy, Clock()).make(index), windowed=False)
    for lap in range(30):
        keys = [bytes([lap, at]).ljust(16, b"\0") for at in range(200)]
        entries = index.insert_run(table, keys, table.root, [NO_FRAME] * 200)
        assert [index.key[entry] for entry in entries] == keys
        assert [index.parent[entry] for entry in entries] == [table.root, *entries[:-1]]
        while table.blocks:
            index.evict_run(table.policy.victim(), 150)
        assert slices.finish(check_index(index)) == []
    assert len(index.key) <= 4096, "6,000 blocks in all"


def test_the_last_of_a_run_may_be_pinned_and_no_key_comes_twice() -> None:
    index = Index(lambda frame: None)
    table = index.add_table(1, Policies("lru", Clock()).make(index), windowed=False)
    keys = [bytes([at]) * 16 for at in range(4)]
    entries = index.insert_run(table, keys[:3], table.root, [1, 2, 3], pins=2)
    assert table.policy.victim() == NO_ENTRY
    index.unpin(entries[-1])
    index.unpin(entries[-1])
    assert table.policy.victim() == entries[-1]
    assert slices.finish(check_index(index)) == []
    with pytest.raises(AssertionError, match="published once"):
        index.insert_run(table, [keys[3], keys[0]], entries[-1], [4, 5])


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


def test_of_a_list_that_is_no_chain_only_the_leading_run_has_frames() -> None:
    index = Index(lambda frame: None)
    table = index.add_table(1, Policies("lru", Clock()).make(index), windowed=False)
    a, b, c, other = (bytes([at]) * 16 for at in range(1, 5))
    entries = index.insert_run(table, [a, b, c], table.root, [10, 20, 30])
    index.insert_run(table, [other], entries[0], [40])
    assert index.run_frames(table, a + b + c, 0, 3) == [10, 20, 30]
    assert index.run_frames(table, a + b + c, 1, 2) == [20, 30]
    assert index.run_frames(table, a + c + b, 0, 3) == [10], "both are here, in another order"
    assert index.run_frames(table, a + other + c, 0, 3) == [10, 40]
    assert index.run_frames(table, a + b + other, 1, 2) == [20]
    assert index.run_frames(table, b + c, 0, 2) == [], "the first one is no root's child"
    assert index.run_frames(table, a + bytes(16) + c, 1, 2) == []
