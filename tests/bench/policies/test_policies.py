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
from policies import ALL, COMPARED
from policies.ghosts import Ghosts
from policies.reusetimes import _fitted
from policies.sketch import FIRST_WIDTH, MOST, PERIOD, Sketch
from policies.wtinylfu import WINDOW_LEAST
from policy_rules import Play, first_to_go_of_an_earlier_life, keeps_the_index_whole, leaves_the_same_blocks
from replayed_prompts import decides_as_the_daemon, spends_a_write_budget_as_the_daemon

from tiercache.daemon.policies.turnover import Turnover
from tiercache.protocol.messages import KEY_BYTES
from tiercache.replay.requests import chain_keys

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "tests" / "replay" / "sample.jsonl.gz"


@pytest.mark.parametrize("policy", COMPARED)
def test_what_all_policies_owe(policy: str) -> None:
    keeps_the_index_whole(COMPARED[policy], seed=1)
    leaves_the_same_blocks(policy, COMPARED)
    first = first_to_go_of_an_earlier_life(COMPARED[policy])
    assert policy == "wtinylfu" or first == 9, "the last block of the oldest chain"


@pytest.mark.stress
@pytest.mark.parametrize("policy", COMPARED)
def test_the_fast_replay_decides_as_the_daemon_would(policy: str) -> None:
    decides_as_the_daemon(policy, 30, 60, COMPARED)
    spends_a_write_budget_as_the_daemon(policy, COMPARED)


@pytest.mark.parametrize(
    ("policy", "least"), [("lru", 0), ("arc", 20), ("s3fifo", 20), ("wtinylfu", 20 - WINDOW_LEAST // 2)]
)
def test_a_scan_does_not_flush_what_is_used_again_and_again(policy: str, least: int) -> None:
    """Twenty prompts again and again, then 500 others once. In W-TinyLFU's window some are when the scan begins."""
    play, hot = Play(policy, 50, ALL), [[number, 1000 + number] for number in range(20)]
    for _ in range(4):
        for ids in hot:
            play.ask(*ids)
    for number in range(500):
        play.ask(10_000 + number)
    assert least <= play.here(hot) <= (20 if least else 0)


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


def test_workload_aware_keeps_conversations_and_gives_up_single_prompts() -> None:
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
    sketch.fit(FIRST_WIDTH)
    assert [sketch.frequency(keys[KEY_BYTES:]) for keys in prompts] == counts
    sketch._added = PERIOD * FIRST_WIDTH
    sketch.asked(chain_keys([9999]), 0, 0)
    assert [sketch.frequency(keys[KEY_BYTES:]) for keys in prompts] == [count // 2 for count in counts]


def test_ghosts_are_a_queue_as_long_as_its_limit() -> None:
    ghosts, model, chance, wrong = Ghosts(), OrderedDict[int, None](), random.Random(7), 0
    for step in range(20_000):
        number, limit = chance.randrange(1500), 400 if step < 15_000 else 100
        key = number.to_bytes(KEY_BYTES, "little")
        if chance.random() < 0.4:
            wrong += ghosts.take(key) != (number in model)
            model.pop(number, None)
        else:
            ghosts.add(key, limit)
            model.pop(number, None)
            model[number] = None
            while len(model) > limit:
                model.popitem(last=False)
    assert len(ghosts) <= 100
    assert wrong < 100, "a full bucket may lose one of them sooner"


def test_the_benchmark_compares_all_policies(tmp_path: Path) -> None:
    """The benchmark finds the compared policies by their names, also in its worker processes."""
    script = ROOT / "bench" / "bench_policies.py"
    command = [sys.executable, script, "--percent", "2", "--policy", "arc", "--policy", "lru"]
    with gzip.open(SAMPLE, "rt") as lines:
        (tmp_path / "sample.jsonl").write_text("".join(itertools.islice(lines, 100)))
    environment = {**os.environ, "TIERCACHE_TRACES": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    tree = json.loads(done.stdout.splitlines()[-1])
    assert [(cell["policy"], cell["percent"]) for cell in tree["cells"]] == [("arc", 2.0), ("lru", 2.0)]
    assert all(0 < cell["total"] <= cell["min_total"] for cell in tree["cells"])
