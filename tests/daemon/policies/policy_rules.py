"""What all eviction policies owe the index."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tiercache.daemon.ground.slices import finish
from tiercache.daemon.index.check import check_index
from tiercache.daemon.index.entries import Table
from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import NO_ENTRY, USED
from tiercache.daemon.policies import POLICIES, Maker, Policies
from tiercache.protocol.messages import KEY_BYTES
from tiercache.replay.requests import TraceRequest, chain_keys, plain_spec
from tiercache.replay.simulation import Simulation, Sizes

BLOCK_BYTES = 64 << 20


class Play:
    """Prompts on a cache of DRAM alone, a second apart."""

    def __init__(self, policy: str, blocks: int, policies: Mapping[str, Maker] = POLICIES) -> None:
        self.cache = Simulation(
            Sizes(blocks * BLOCK_BYTES, policy=policy), {1: plain_spec(16, BLOCK_BYTES)}, policies=policies
        )
        self.now_s = 0.0

    def ask(self, *ids: int) -> int:
        """Ask for the prompt; how many of its blocks were here."""
        self.now_s += 1.0
        return self.cache.play(TraceRequest(self.now_s, chain_keys(ids), 16 * len(ids))).dram

    def here(self, prompts: Iterable[Sequence[int]]) -> int:
        """How many of these prompts are here completely."""
        resident = self.cache.resident(1)[0]
        return sum(chain_keys(ids)[-KEY_BYTES:] in resident for ids in prompts)

    @property
    def policy(self) -> Any:
        """The policy itself, without the window in front of it."""
        (namespace,) = self.cache.cache.space.namespaces.values()
        window: Any = namespace.table.policy
        return window.inner

    @property
    def index(self) -> Index:
        return self.cache.cache.space.index


class Random:
    """An index with a policy, and a method for each thing that can happen to it."""

    def __init__(self, maker: Maker, seed: int) -> None:
        self.now_s = 0.0
        policies = Policies(maker, lambda: self.now_s)
        self.asker = policies.predictor
        self.index = Index(lambda frame: None)
        self.policy: Any = policies.make(self.index)
        self.tables = [self.index.add_table(number, self.policy, windowed=number == 2) for number in (1, 2)]
        self.chance = random.Random(seed)
        self.pinned: list[int] = []
        self.dropped = False

    def chain(self, table: Table) -> tuple[bytes, list[int]]:
        """A random prompt, and the entries of those of its blocks that are here."""
        ids = [self.chance.randrange(3) for _ in range(self.chance.randint(1, 7))]
        keys, entries = chain_keys([table.number, *ids])[KEY_BYTES:], []
        for at in range(0, len(keys), KEY_BYTES):
            entry = table.get(keys[at : at + KEY_BYTES])
            if entry == NO_ENTRY or not self.index.attached(entry):
                break
            entries.append(entry)
        return keys, entries

    def ask(self, table: Table) -> None:
        """A request, and the store that an engine makes after it."""
        index, (keys, entries) = self.index, self.chain(table)
        how = USED if self.asker is None else self.asker.asked(keys, len(entries), len(entries))
        if entries:
            index.touch(entries[-1], how)
        parent = entries[-1] if entries else table.root
        index.pin(parent)
        for at in range(len(entries) * KEY_BYTES, len(keys), KEY_BYTES):
            key = keys[at : at + KEY_BYTES]
            if table.get(key) != NO_ENTRY:
                break  # it waits to be unlinked, or a windowed table has it already
            above = table.root if table.windowed else parent
            (entry,) = index.insert_run(table, [key], above, [at], pins=1)
            index.unpin(parent)
            parent = entry
        index.unpin(parent)

    def evict(self) -> None:
        victim = self.policy.victim()
        if victim == NO_ENTRY:
            return
        assert self.policy.coldest_stamp() == self.index.columns.stamp[victim]
        assert self.policy.worth(victim) >= 0.0
        if self.chance.random() < 0.5:
            self.index.evict(victim)
        else:
            most = self.chance.randint(1, 5)
            assert 1 <= self.index.evict_run(victim, most) <= most

    def step(self) -> None:
        chance, index, table = self.chance, self.index, self.chance.choice(self.tables)
        self.now_s += chance.choice((0.1, 1.0, 3.0))
        action = chance.randrange(14)
        if action <= 4:
            self.ask(table)
        elif action <= 8:
            self.evict()
        elif action <= 10:
            _, entries = self.chain(table)
            if entries and len(self.pinned) < 6:
                self.pinned.append(chance.choice(entries))
                index.pin(self.pinned[-1])
                index.touch(self.pinned[-1])
        elif action <= 12:
            if self.pinned:
                index.unpin(self.pinned.pop(chance.randrange(len(self.pinned))))
        elif chance.random() < 0.2:
            _, entries = self.chain(table)
            if chance.random() < 0.2:
                self.dropped = True
                index.drop_table(table)
            elif entries:
                self.dropped = True
                index.drop(chance.choice(entries))
        else:
            index.unlink_slice(3)


def keeps_the_index_whole(maker: Maker, seed: int) -> None:
    """The index stays consistent, whatever happens."""
    run = Random(maker, seed)
    for step in range(400):
        run.step()
        if step % 20 == 0:
            assert finish(check_index(run.index)) == []
    while run.pinned:
        run.index.unpin(run.pinned.pop())
    while run.index.unlink_slice(64):
        pass
    while (victim := run.policy.victim()) != NO_ENTRY:
        run.index.evict(victim)
    assert finish(check_index(run.index)) == []
    assert [table.blocks for table in run.tables] == [0, 0], "whatever is not pinned can be evicted"
    assert run.policy.coldest_stamp() is None


def leaves_the_same_blocks(policy: str, policies: Mapping[str, Maker]) -> None:
    """The same prompts leave the same blocks each time."""
    left = []
    for _ in range(2):
        play, chance = Play(policy, 30, policies), random.Random(5)
        for _ in range(300):
            play.ask(*(chance.randrange(4) for _ in range(chance.randint(1, 8))))
        assert play.cache.check_integrity() == []
        left.append(play.cache.resident(1))
    assert left[0] == left[1]


def first_to_go_of_an_earlier_life(maker: Maker) -> int:
    """Which of forty blocks of an earlier life, in chains of ten, is evicted first; all of them can be evicted."""
    index = Index(lambda frame: None)
    made = Policies(maker, lambda: 0.0).make(index)
    table = index.add_table(1, made, windowed=False)
    root = bytes(KEY_BYTES)
    keys = [bytes([1 + number]) * KEY_BYTES for number in range(40)]
    parents = [root if number % 10 == 0 else keys[number - 1] for number in range(40)]
    entries = index.insert_many(table, keys, parents, list(range(40)), root)
    assert finish(check_index(index)) == []
    gone = []
    while (victim := made.victim()) != NO_ENTRY:
        gone.append(victim)
        index.evict(victim)
    assert finish(check_index(index)) == []
    assert sorted(gone) == sorted(entries)
    return entries.index(gone[0])
