"""What each of the policies compared is known for, and what all policies owe the index."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from fast_and_exact import decides_as_the_daemon, spends_a_write_budget_as_the_daemon
from policies import ALL, COMPARED
from policies.arc import AGAIN, ARC
from policies.ghosts import Ghosts
from policies.queues import Queues
from policies.requests import COUNTED
from policies.reusetimes import ReuseTimes, _fitted
from policies.s3fifo import MAIN, S3FIFO
from policies.sketch import FIRST_WIDTH, MOST, PERIOD, Sketch
from policies.workload_aware import WorkloadAware
from policies.wtinylfu import WINDOW, WINDOW_LEAST
from policy_rules import Play, Random, first_to_go_of_an_earlier_life, keeps_the_index_whole, leaves_the_same_blocks

from tiercache.daemon.index.entries import LIVE
from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import MOVED, NO_ENTRY
from tiercache.daemon.policies.turnover import Turnover
from tiercache.protocol.messages import KEY_BYTES
from tiercache.replay.requests import chain_keys

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"
SAMPLE = ROOT / "tests" / "replay" / "sample.jsonl.gz"
WITH_GHOSTS = ("arc", "s3fifo")
WITH_QUEUES = ("arc", "s3fifo", "wtinylfu")


def hot_then_scan(policy: str) -> int:
    """Ask for twenty prompts again and again, then for 500 others once; returns how many of the twenty have stayed."""
    play, hot = Play(policy, 50, ALL), [[number, 1000 + number] for number in range(20)]
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
    play = Play("arc", 10, ALL)
    for number in range(5):
        play.ask(number)
        play.ask(number)  # these are used again, and leave five places
    for number in range(100, 108):
        play.ask(number)
    arc: ARC = play.policy
    assert (arc._share, play.here([[100]])) == (0.0, 0)
    assert play.ask(100) == 0
    assert arc._share > 0.0
    entry = play.cache._dram.entry(chain_keys([100]), 1)
    assert arc._queues.of(entry) == AGAIN, "a block that comes back counts as used twice"
    while not len(arc._lost[AGAIN]):
        play.ask(random.Random(len(arc._lost[0])).choice([103, 104, 105, 106, 107]))
        play.ask(200 + int(play.now_s))
    share = arc._share
    gone = next(number for number in (0, 1, 2, 3, 4) if not play.here([[number]]))
    play.ask(gone)
    assert arc._share < share


def test_a_match_counts_for_all_blocks_before_its_end() -> None:
    play = Play("arc", 50, ALL)
    play.ask(1, 2, 3, 4)
    play.ask(1, 2, 3, 9)
    queues: Queues = play.policy._queues
    queue = [queues.of(play.cache._dram.entry(chain_keys(ids), len(ids))) for ids in ([1], [1, 2, 3], [1, 2, 3, 4])]
    assert queue == [1, 1, 0]
    assert queues.sizes == [2, 3]


# --- S3-FIFO -------------------------------------------------------------------------------------


def test_s3fifo_lets_what_is_used_once_leave_from_the_small_queue() -> None:
    play = Play("s3fifo", 20, ALL)
    for number in range(100):
        play.ask(number)
    queues: Queues = play.policy._queues
    assert queues.sizes == [20, 0]
    assert play.here([[99], [80]]) == 2
    assert play.ask(79) == 0, "first in, first out"
    assert queues.sizes == [19, 1], "it was among the ghosts, so it enters the main queue"


def test_s3fifo_counts_uses_and_moves_only_at_the_end_of_the_queue() -> None:
    play = Play("s3fifo", 200, ALL)
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
    policy = S3FIFO(index)
    table = index.add_table(1, policy, windowed=False)
    entries = [index.insert(table, bytes([number]) * KEY_BYTES, table.root, number) for number in range(3)]
    for entry in entries:
        policy._queues.lift(entry, MAIN)
    policy.touched(entries[0], COUNTED)
    policy.touched(entries[1], MOVED)
    gone = []
    while (victim := policy.victim()) != NO_ENTRY:
        gone.append(victim)
        index.evict(victim)
    assert gone == [entries[1], entries[2], entries[0]]


# --- W-TinyLFU -----------------------------------------------------------------------------------


def test_tinylfu_refuses_what_is_asked_for_once_and_lets_in_what_is_asked_for_more() -> None:
    play = Play("wtinylfu", 200, ALL)
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
    assert kept - 2 <= play.here(regular) < kept, "another block made room"
    entry = play.cache._dram.entry(chain_keys([500]), 1)
    assert play.policy._queues.of(entry) > WINDOW


def test_the_answer_of_a_contest_does_not_change_by_asking() -> None:
    play = Play("wtinylfu", 40, ALL)
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
    """Prompts that no client repeats come three times as often as the turns of eight conversations."""
    hits = {}
    for policy in ("lru", "workload-aware"):
        play, fresh, turns = Play(policy, 150, ALL), iter(range(10_000, 1 << 30)), 0
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
    assert len(ghosts) <= lost, "older ghosts are kept instead"


@pytest.mark.parametrize("policy", WITH_GHOSTS)
def test_there_are_no_more_ghosts_than_blocks(policy: str) -> None:
    play, chance = Play(policy, 40, ALL), random.Random(1)
    for _ in range(1000):
        play.ask(*(chance.randrange(12) for _ in range(chance.randint(1, 4))))
        assert play.policy.ghosts <= 40
    assert play.policy.ghosts > 20


# --- what all of them owe ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("policy", COMPARED)
def test_the_index_stays_whole_whatever_happens(policy: str, seed: int) -> None:
    keeps_the_index_whole(COMPARED[policy], seed)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("policy", WITH_QUEUES)
def test_queues_are_closed_and_counted(policy: str, seed: int) -> None:
    run = Random(COMPARED[policy], seed)
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


@pytest.mark.parametrize("policy", COMPARED)
def test_the_same_prompts_leave_the_same_blocks(policy: str) -> None:
    leaves_the_same_blocks(policy, COMPARED)


@pytest.mark.parametrize("policy", COMPARED)
def test_blocks_of_an_earlier_life_go_as_others_do(policy: str) -> None:
    first = first_to_go_of_an_earlier_life(COMPARED[policy])
    assert policy == "wtinylfu" or first == 9, "the last block of the oldest chain"


@pytest.mark.parametrize("policy", COMPARED)
def test_the_fast_replay_decides_as_the_daemon_would(policy: str) -> None:
    decides_as_the_daemon(policy, 30, 60, COMPARED)
    spends_a_write_budget_as_the_daemon(policy, COMPARED)


def test_the_benchmark_compares_all_policies(tmp_path: Path) -> None:
    """The benchmark finds the compared policies by their names, also in its worker processes."""
    command = [sys.executable, BENCH / "bench_policies.py", "--percent", "2", "--policy", "arc", "--policy", "lru"]
    sample = tmp_path / "sample.jsonl"
    with gzip.open(SAMPLE, "rt") as lines:
        sample.write_text("".join(itertools.islice(lines, 100)))
    environment = {**os.environ, "TIERCACHE_TRACES": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    tree = json.loads(done.stdout.splitlines()[-1])
    assert [(cell["policy"], cell["percent"]) for cell in tree["cells"]] == [("arc", 2.0), ("lru", 2.0)]
    assert all(0 < cell["total"] <= cell["min_total"] for cell in tree["cells"])
