"""What each eviction policy is known for, and what all of them owe the index."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from tiercache.daemon.index.index import LIVE, Index, Table
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.policies import POLICIES, Policies
from tiercache.daemon.policies.arc import AGAIN, ARC
from tiercache.daemon.policies.ghosts import Ghosts
from tiercache.daemon.policies.queues import Queues
from tiercache.daemon.policies.requests import Requests
from tiercache.daemon.policies.reusetimes import ReuseTimes, _fitted
from tiercache.daemon.policies.s3fifo import MAIN, S3FIFO, SMALL
from tiercache.daemon.policies.sketch import FIRST_WIDTH, MOST, PERIOD, Sketch
from tiercache.daemon.policies.turnover import Turnover
from tiercache.daemon.policies.workload_aware import WorkloadAware
from tiercache.daemon.policies.wtinylfu import WINDOW, WINDOW_LEAST
from tiercache.protocol.messages import KEY_BYTES
from tiercache.replay.fast_cache import Swift
from tiercache.replay.requests import Request, chain_keys, plain_spec
from tiercache.replay.simulation import Sizes

BLOCK_BYTES = 64 << 20
WITH_GHOSTS = ("arc", "s3fifo")
WITH_QUEUES = ("arc", "s3fifo", "wtinylfu")


class Play:
    """Prompts on a cache of DRAM alone, a second apart."""

    def __init__(self, policy: str, blocks: int) -> None:
        self.swift = Swift(Sizes(blocks * BLOCK_BYTES, policy=policy))
        self.swift.declare(1, plain_spec(16, BLOCK_BYTES))
        self.now_s = 0.0

    def ask(self, *ids: int) -> int:
        """How many blocks of the prompt were here."""
        self.now_s += 1.0
        return self.swift.play(Request(self.now_s, chain_keys(ids), 16 * len(ids))).dram

    def here(self, prompts: Iterable[Sequence[int]]) -> int:
        """How many of these prompts are here to their ends."""
        resident = self.swift.resident(1)[0]
        return sum(chain_keys(ids)[-KEY_BYTES:] in resident for ids in prompts)

    @property
    def policy(self) -> Any:
        """The policy itself, behind the window of what was just stored."""
        window: Any = self.swift._dram.policy
        return window.inner

    @property
    def index(self) -> Index:
        return self.swift._dram.index


def hot_then_scan(policy: str) -> int:
    """Twenty prompts are asked for again and again, then 500 others once: how many of the twenty have stayed."""
    play, hot = Play(policy, 50), [[number, 1000 + number] for number in range(20)]
    for _ in range(4):
        for ids in hot:
            play.ask(*ids)
    for number in range(500):
        play.ask(10_000 + number)
    return play.here(hot)


@pytest.mark.parametrize("policy", ["arc", "s3fifo", "wtinylfu"])
def test_a_scan_does_not_flush_what_is_used_again_and_again(policy: str) -> None:
    assert hot_then_scan("lru") == 0
    lost_draws = WINDOW_LEAST // 2 if policy == "wtinylfu" else 0  # two blocks each, in the window when the scan begins
    assert hot_then_scan(policy) >= 20 - lost_draws


# --- ARC -----------------------------------------------------------------------------------------


def test_arc_moves_the_share_towards_the_queue_whose_ghosts_come_back() -> None:
    play = Play("arc", 10)
    for number in range(5):
        play.ask(number)
        play.ask(number)  # these are used again, and leave five places
    for number in range(100, 108):
        play.ask(number)
    arc: ARC = play.policy
    assert (arc._share, play.here([[100]])) == (0.0, 0)
    assert play.ask(100) == 0
    assert arc._share > 0.0
    entry = play.swift._dram.entry(chain_keys([100]), 1)
    assert arc._queues.of(entry) == AGAIN, "what comes back was used twice"
    while not len(arc._lost[AGAIN]):
        play.ask(random.Random(len(arc._lost[0])).choice([103, 104, 105, 106, 107]))
        play.ask(200 + int(play.now_s))
    share = arc._share
    gone = next(number for number in (0, 1, 2, 3, 4) if not play.here([[number]]))
    play.ask(gone)
    assert arc._share < share


def test_a_match_counts_for_all_blocks_before_its_end() -> None:
    play = Play("arc", 50)
    play.ask(1, 2, 3, 4)
    play.ask(1, 2, 3, 9)
    queues: Queues = play.policy._queues
    queue = [queues.of(play.swift._dram.entry(chain_keys(ids), len(ids))) for ids in ([1], [1, 2, 3], [1, 2, 3, 4])]
    assert queue == [1, 1, 0]
    assert queues.sizes == [2, 3]


# --- S3-FIFO -------------------------------------------------------------------------------------


def test_s3fifo_lets_what_is_used_once_leave_from_the_small_queue() -> None:
    play = Play("s3fifo", 20)
    for number in range(100):
        play.ask(number)
    queues: Queues = play.policy._queues
    assert queues.sizes == [20, 0]
    assert play.here([[99], [80]]) == 2
    assert play.ask(79) == 0, "the first to come is the first to go"
    assert queues.sizes == [19, 1], "it was among the ghosts, so it enters the main queue"


def test_s3fifo_counts_uses_and_moves_only_at_the_end_of_the_queue() -> None:
    play = Play("s3fifo", 200)
    for number in range(200):
        play.ask(number)
    for number in (0, 1, 0):
        play.ask(number)
    queues: Queues = play.policy._queues
    assert queues.sizes == [200, 0]
    for number in range(1000, 1070):
        play.ask(number)
    assert queues.sizes == [199, 1]
    assert (play.here([[0]]), play.here([[1]]), play.here([[150]])) == (1, 0, 1), "one use is not enough"


def test_s3fifo_gives_a_block_of_the_main_queue_a_round_for_each_use() -> None:
    index = Index(lambda frame: None)
    requests = Requests(Turnover(lambda: 0.0))
    policy = S3FIFO(index, requests)
    table = index.add_table(1, policy, windowed=False)
    entries = [index.insert(table, bytes([number]) * KEY_BYTES, table.root, number) for number in range(3)]
    for entry in entries:
        policy._queues.lift(entry, MAIN)
    requests.context = True
    policy.touched(entries[0])
    requests.context = False
    policy.touched(entries[1])  # by the daemon itself
    gone = []
    while (victim := policy.victim()) != NO_ENTRY:
        gone.append(victim)
        index.evict(victim)
    assert gone == [entries[1], entries[2], entries[0]]


# --- W-TinyLFU -----------------------------------------------------------------------------------


def test_tinylfu_refuses_what_is_asked_for_once_and_lets_in_what_is_asked_for_more() -> None:
    play = Play("wtinylfu", 200)
    regular = [[number] for number in range(180)]
    for _ in range(3):
        for ids in regular:
            play.ask(*ids)
    for number in range(1000, 1400):
        play.ask(number)
    kept = play.here(regular)
    assert kept >= 180 - WINDOW_LEAST
    for number in (500, 0) * 6:
        play.ask(number)
    for number in range(2000, 2100):
        play.ask(number)
    assert play.here([[500]]) == 1
    assert kept - 2 <= play.here(regular) < kept, "one of the others made room"
    entry = play.swift._dram.entry(chain_keys([500]), 1)
    assert play.policy._queues.of(entry) > WINDOW


def test_the_answer_of_a_contest_does_not_change_by_asking() -> None:
    play = Play("wtinylfu", 40)
    for number in [*range(60), 3, 59, 58, 59, 58, 59, 58]:
        play.ask(number)
    sizes, victim = list(play.policy._queues.sizes), play.policy.victim()
    assert {play.policy.victim() for _ in range(5)} == {victim}
    assert play.policy._queues.sizes == sizes


def test_the_sketch_counts_no_less_than_what_was_asked_and_forgets_by_half() -> None:
    turnover = Turnover(lambda: 0.0)
    sketch = Sketch(turnover)
    prompts = [chain_keys([number, 100 + number]) for number in range(200)]
    for number, keys in enumerate(prompts):
        for _ in range(number % 20):
            turnover.stored_bytes += 1  # else it would be the same request once more
            sketch.asked(keys, 0, 0)
    counts = [sketch.frequency(keys[KEY_BYTES:]) for keys in prompts]
    assert counts == [min(MOST, number % 20) for number in range(200)]
    sketch.fit(FIRST_WIDTH)  # more than half the width
    assert len(sketch._rows[0]) == 2 * FIRST_WIDTH
    assert [sketch.frequency(keys[KEY_BYTES:]) for keys in prompts] == counts
    sketch._added = PERIOD * FIRST_WIDTH
    sketch.asked(chain_keys([9999]), 0, 0)
    assert [sketch.frequency(keys[KEY_BYTES:]) for keys in prompts] == [count // 2 for count in counts]


# --- workload-aware ------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "mean_s"), [(0.9, 20.0), (0.3, 200.0)])
def test_reuse_times_are_fitted_though_many_still_wait(share: float, mean_s: float) -> None:
    chance = np.random.default_rng(3)
    begun_s = chance.uniform(0, 600, 20_000)
    reuse_s = np.where(chance.random(20_000) < share, chance.exponential(mean_s, 20_000), np.inf)
    seen = begun_s + reuse_s < 600
    by = np.zeros((~seen).sum(), np.int64)
    seen_count, seen_s = np.array([float(seen.sum())]), reuse_s[seen].sum(keepdims=True)
    first = shares, rates = np.array([0.5]), np.array([0.01])
    for _ in range(40):  # each fit goes on from the one before
        shares, rates = _fitted(seen_count, seen_s, 600 - begun_s[~seen], by, *first, shares, rates)
    assert shares[0] == pytest.approx(share, rel=0.1)
    assert 1 / rates[0] == pytest.approx(mean_s, rel=0.15)


def test_workload_aware_keeps_conversations_and_lets_single_prompts_go() -> None:
    """Prompts that nobody asks again come thrice as often as the turns of eight conversations."""
    hits = {}
    for policy in ("lru", "workload-aware"):
        play, fresh, turns = Play(policy, 150), iter(range(10_000, 1 << 30)), 0
        chats = [[number, 100 + number] for number in range(8)]
        for number in range(800):
            if number % 4:
                play.ask(*(next(fresh) for _ in range(6)))
                continue
            chat = chats[number // 4 % 8]
            turns += play.ask(*chat)
            chat += [next(fresh)]
            if len(chat) > 14:
                chats[number // 4 % 8] = [next(fresh), next(fresh)]
        hits[policy] = turns
    assert hits["workload-aware"] > 1.5 * hits["lru"]
    times: ReuseTimes = play.policy._times
    assert times.shares[0] < 0.2 < 0.5 < times.shares[3], "single prompts, and turns of a conversation"


def test_of_two_equally_likely_ones_the_deeper_goes() -> None:
    times = ReuseTimes(Turnover(lambda: 0.0))
    index = Index(lambda frame: None)
    policy = WorkloadAware(index, times)
    table = index.add_table(1, policy, windowed=False)
    key = iter(chain_keys(range(10)))
    keys = [bytes(key.__next__() for _ in range(KEY_BYTES)) for _ in range(4)]
    first = index.insert(table, keys[0], table.root, 0)
    middle = index.insert(table, keys[1], first, 1)
    deep = index.insert(table, keys[2], middle, 2)
    policy.remove(deep)
    policy._category[deep] = 1
    policy.add(deep)
    alone = index.insert(table, keys[3], table.root, 3)
    assert policy.probability(deep) == policy.probability(alone)
    assert policy.victim() == deep


# --- ghosts --------------------------------------------------------------------------------------


def test_ghosts_are_a_queue_as_long_as_its_limit() -> None:
    ghosts, model, chance = Ghosts(), OrderedDict[int, None](), random.Random(7)
    wrong = 0
    for step in range(20_000):
        number = chance.randrange(1500)
        limit = 400 if step < 15_000 else 100
        key = number.to_bytes(KEY_BYTES, "little")
        if chance.random() < 0.4:
            found = ghosts.take(key)
            wrong += found != (number in model)
            model.pop(number, None)
        else:
            ghosts.add(key, limit)
            model.pop(number, None)
            model[number] = None
            while len(model) > limit:
                model.popitem(last=False)
        assert len(ghosts) <= 400
    assert len(ghosts) <= 100
    assert wrong < 100, "a full bucket may lose one of them sooner"


def test_a_ghost_takes_less_than_64_bytes() -> None:
    ghosts, limit = Ghosts(), 20_000
    for number in range(3 * limit):
        ghosts.add(number.to_bytes(KEY_BYTES, "little"), limit)
    assert limit * 0.98 < len(ghosts) <= limit
    assert ghosts.size_bytes < 64 * limit
    lost = sum(not ghosts.take(number.to_bytes(KEY_BYTES, "little")) for number in range(2 * limit, 3 * limit))
    assert lost < 0.02 * limit
    assert len(ghosts) <= lost, "older ones stand in for those"


@pytest.mark.parametrize("policy", WITH_GHOSTS)
def test_there_are_no_more_ghosts_than_blocks(policy: str) -> None:
    play, chance = Play(policy, 40), random.Random(1)
    for _ in range(1000):
        play.ask(*(chance.randrange(12) for _ in range(chance.randint(1, 4))))
        assert play.policy.ghosts <= 40
    assert play.policy.ghosts > 20


# --- what all of them owe ------------------------------------------------------------------------


class Random:
    """An index under a policy, and anything that can happen to it."""

    def __init__(self, policy: str, seed: int) -> None:
        self.now_s = 0.0
        policies = Policies(policy, lambda: self.now_s)
        self.asker = policies.predictor
        self.index = Index(lambda frame: None)
        self.policy: Any = policies.make(self.index)
        self.tables = [self.index.add_table(number, self.policy, windowed=number == 2) for number in (1, 2)]
        self.chance = random.Random(seed)
        self.pinned: list[int] = []
        self.dropped = False

    def chain(self, table: Table) -> tuple[bytes, list[int]]:
        """A prompt, and the entries of its blocks that are here."""
        ids = [self.chance.randrange(3) for _ in range(self.chance.randint(1, 7))]
        keys, entries = chain_keys([table.number, *ids])[KEY_BYTES:], []
        for at in range(0, len(keys), KEY_BYTES):
            entry = table.get(keys[at : at + KEY_BYTES])
            if entry == NO_ENTRY or not self.index.attached(entry):
                break
            entries.append(entry)
        return keys, entries

    def ask(self, table: Table) -> None:
        """A request, and what an engine stores after it."""
        index, (keys, entries) = self.index, self.chain(table)
        if self.asker is not None:
            self.asker.asked(keys, len(entries), len(entries))
        if entries:
            index.touch(entries[-1])
        if self.asker is not None:
            self.asker.answered()
        parent = entries[-1] if entries else table.root
        index.pin(parent)
        for at in range(len(entries) * KEY_BYTES, len(keys), KEY_BYTES):
            key = keys[at : at + KEY_BYTES]
            if table.get(key) != NO_ENTRY:
                break  # it waits to be unlinked, or a windowed table has it already
            above = table.root if table.windowed else parent
            entry = index.insert(table, key, above, at, pins=1)
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


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("policy", POLICIES)
def test_the_index_stays_whole_whatever_happens(policy: str, seed: int) -> None:
    run = Random(policy, seed)
    for step in range(400):
        run.step()
        if step % 20 == 0:
            assert run.index.check_integrity() == []
    while run.pinned:
        run.index.unpin(run.pinned.pop())
    while run.index.unlink_slice(64):
        pass
    while (victim := run.policy.victim()) != NO_ENTRY:
        run.index.evict(victim)
    assert run.index.check_integrity() == []
    assert [table.blocks for table in run.tables] == [0, 0], "whatever is not pinned can be evicted"
    assert run.policy.coldest_stamp() is None


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("policy", WITH_QUEUES)
def test_queues_are_closed_and_counted(policy: str, seed: int) -> None:
    run = Random(policy, seed)
    queues: Queues = run.policy.inner._queues
    for step in range(400):
        run.step()
        if step % 20 and not run.dropped:
            continue
        if run.dropped:
            run.index.unlink_slice(1 << 20)
            run.policy.victim()
            assert sum(queues.sizes) == queues.live == sum(table.blocks for table in run.tables)
            assert min(queues.sizes) >= 0
            continue
        counted = [0] * len(queues.sizes)
        for entry, state in enumerate(run.index.state):
            parent = run.index.parent[entry]
            if state == LIVE and parent != NO_ENTRY:
                counted[queues.of(entry)] += 1
                if run.index.parent[parent] != NO_ENTRY:
                    assert queues.of(parent) >= queues.of(entry)
        assert counted == queues.sizes
        assert queues.live == sum(counted)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_prompts_leave_the_same_blocks(policy: str) -> None:
    left = []
    for _ in range(2):
        play, chance = Play(policy, 30), random.Random(5)
        for _ in range(300):
            play.ask(*(chance.randrange(4) for _ in range(chance.randint(1, 8))))
        assert play.swift.check_integrity() == []
        left.append(play.swift.resident(1))
    assert left[0] == left[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_of_an_earlier_life_go_as_others_do(policy: str) -> None:
    index = Index(lambda frame: None)
    made = Policies(policy, lambda: 0.0).make(index)
    table = index.add_table(1, made, windowed=False)
    root = bytes(KEY_BYTES)
    keys = [bytes([1 + number]) * KEY_BYTES for number in range(40)]
    parents = [root if number % 10 == 0 else keys[number - 1] for number in range(40)]
    entries = index.insert_many(table, keys, parents, list(range(40)), root)
    assert index.check_integrity() == []
    gone = []
    while (victim := made.victim()) != NO_ENTRY:
        gone.append(victim)
        index.evict(victim)
    assert index.check_integrity() == []
    assert sorted(gone) == sorted(entries)
    assert SMALL == 0
    assert policy == "wtinylfu" or gone[0] == entries[9], "the end of the oldest chain"
