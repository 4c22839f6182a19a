"""What keeping a block is worth: the index, what is learnt from requests, and who goes first for it."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

import numpy as np
import pytest
from test_cache_model import Harness
from test_cache_model import chain as cached_chain

from tiercache.daemon.index import Index
from tiercache.daemon.policies import predictor as predicting
from tiercache.daemon.policies.hazard import LeastWorth
from tiercache.daemon.policies.predictor import AGES, FIRST_AGE_S, Predictor, age_bucket, chain_class
from tiercache.daemon.policy import NO_ENTRY
from tiercache.messages import KEY_BYTES
from tiercache.replay.requests import Request, plain_spec
from tiercache.replay.simulation import Simulation, Sizes
from tiercache.replay.swift import Swift

BLOCK_BYTES = 4096
TOKENS = 16
SPEC = plain_spec(TOKENS, BLOCK_BYTES)


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def chain(name: object, blocks: int) -> bytes:
    """Keys of a chain of its own."""
    return b"".join(hashlib.blake2b(f"{name} {at}".encode(), digest_size=KEY_BYTES).digest() for at in range(blocks))


def ask(time_s: float, keys: bytes) -> Request:
    return Request(time_s, keys, TOKENS * len(keys) // KEY_BYTES)


def sizes(dram: int, nvme: int, **others: object) -> Sizes:
    return replace(Sizes(dram * BLOCK_BYTES, nvme * BLOCK_BYTES, policy="hazard"), **others)  # type: ignore[arg-type]


def test_the_index_is_the_best_rate_of_any_stay() -> None:
    chance = np.random.default_rng(1)
    hazards = chance.random((5, AGES)) * chance.random((5, 1))
    widths = np.diff(np.concatenate([[0.0], FIRST_AGE_S * 2.0 ** (np.arange(AGES) / 2)]))
    found = predicting._worth(hazards)
    for row in range(5):
        for age in range(AGES):
            best, alive, hits, stay_s = 0.0, 1.0, 0.0, 0.0
            for bucket in range(age, AGES):
                hazard = hazards[row, bucket]
                stay_s += alive * widths[bucket] * (1 - hazard / 2)
                hits += alive * hazard
                alive *= 1 - hazard
                best = max(best, hits / stay_s)
            assert found[row, age] == pytest.approx(best)


def test_ages_fall_into_buckets() -> None:
    assert [age_bucket(age_s) for age_s in (0.0, 0.2, 0.25, 0.36, 0.5, 1e9)] == [0, 0, 1, 2, 3, AGES - 1]


def test_before_anything_is_known_the_longest_unused_is_worth_least() -> None:
    worth = Predictor(Clock()).worth
    assert (np.diff(worth[:, 1:], axis=1) <= 0).all()
    assert (worth[:, 0] > worth[:, -1]).all()


def test_what_comes_back_after_a_while_is_worth_more_then_than_at_once() -> None:
    clock = Clock()
    predictor = Predictor(clock)
    for lap in range(6):
        for document in range(20):
            predictor.asked(chain(document, 8), 0, 8 if lap else 0)
            predictor.answered()
            clock.now_s += 5.0
    predictor.asked(chain(0, 8), 8, 8)
    context = predictor.context
    assert context is not None
    worth = predictor.worth[context.block_class]
    assert worth[age_bucket(60.0)] > 1.5 * worth[0], "each comes back after 100 s"
    assert worth[age_bucket(300.0)] < worth[age_bucket(60.0)], "what has not come by then has ended"


def test_what_goes_on_is_told_from_what_does_not() -> None:
    """Chats come back, one-off prompts of the same length do not: their classes know."""
    clock = Clock()
    predictor = Predictor(clock)
    chats = dict.fromkeys(range(30), 4)
    for lap in range(8):
        for number in chats:
            predictor.asked(chain(f"chat {number}", chats[number]), 0, 0)
            predictor.answered()
            predictor.asked(chain(f"once {lap} {number}", 40), 0, 0)
            predictor.answered()
            chats[number] += 1
            clock.now_s += 1.0
    later, once = chain_class(4, 1, 11), chain_class(0, 40, 40)
    assert predictor.worth[later, 0] > 5 * predictor.worth[once, 0]


def test_the_same_request_twice_at_once_is_one() -> None:
    clock = Clock()
    predictor = Predictor(clock)
    for _ in range(4):  # each worker of an engine asks
        predictor.asked(chain("a", 5), 0, 0)
        predictor.answered()
    assert predictor._used.sum() == 0


def test_the_sample_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicting, "MAX_SAMPLES", 500)
    clock = Clock()
    predictor = Predictor(clock)
    for number in range(400):
        predictor.asked(chain(number, 20), 0, 0)
        predictor.answered()
        clock.now_s += 1.0
        assert predictor.sampled[0] <= 500
    blocks, share = predictor.sampled
    assert blocks > 100
    assert share == pytest.approx(blocks / 8000, rel=0.5)
    assert len(predictor._expected) <= 500


def loop(documents: int, blocks: int, laps: int) -> list[Request]:
    return [
        ask(5.0 * (lap * documents + number), chain(number, blocks))
        for lap in range(laps)
        for number in range(documents)
    ]


def test_a_loop_larger_than_the_cache_has_hits() -> None:
    """Least recently used has none at all: what it throws out is what comes next."""
    hits = {}
    for policy in ("lru", "hazard"):
        engine = Swift(sizes(120, 0, policy=policy, headroom_bytes=20 * BLOCK_BYTES))
        engine.declare(1, SPEC)
        hits[policy] = sum(engine.play(request).dram for request in loop(50, 10, 20))
        assert engine.check_integrity() == []
    assert hits["lru"] == 0
    assert hits["hazard"] > 0.6 * 100 * 19, "100 of 500 blocks can be kept for 19 laps"


@pytest.mark.parametrize(("dram", "nvme", "headroom"), [(60, 0, 40), (50, 20, 30), (50, 60, 10)])
def test_headroom_is_kept_free_and_decided_alike(dram: int, nvme: int, headroom: int) -> None:
    for policy in ("lru", "hazard"):
        its = sizes(dram, nvme, policy=policy, headroom_bytes=headroom * BLOCK_BYTES)
        swift, exact = Swift(its), Simulation(its, {1: SPEC})
        swift.declare(1, SPEC)
        chance, length = random.Random(dram), [4] * 8
        for number in range(150):
            chat = chance.randrange(8)
            length[chat] = min(28, length[chat] + chance.randint(0, 3))
            request = ask(number, chain(chat, length[chat]))
            assert swift.play(request) == exact.play(request)
            assert swift.resident(1) == exact.resident(1)
            assert len(exact.resident(1)[0]) <= dram - headroom
        assert exact.check_integrity() == swift.check_integrity() == []


def test_what_is_used_in_dram_stays_on_nvme() -> None:
    """A hit in DRAM is a use of the copy below: it is still there when DRAM has lost its own."""
    for policy in ("lru", "hazard"):
        exact = Simulation(sizes(30, 60, policy=policy), {1: SPEC})
        wanted = chain("wanted", 10)
        for number in range(40):
            exact.play(ask(2.0 * number, wanted))
            exact.play(ask(2.0 * number + 1, chain(f"other {number}", 10)))
        _, nvme = exact.resident(1)
        assert all(wanted[at : at + KEY_BYTES] in nvme for at in range(0, len(wanted), KEY_BYTES))


def test_random_histories_leave_candidates_and_cells_in_order() -> None:
    clock, chance = Clock(), random.Random(7)
    index = Index(lambda frame: None)
    policy = LeastWorth(index, Predictor(clock))
    table = index.add_table(1, policy, windowed=False)
    entries: list[int] = []
    for step in range(4000):
        clock.now_s += chance.random()
        if chance.random() < 0.55 or not table.blocks:
            parent = chance.choice([table.root, *entries[-5:]]) if entries else table.root
            key = hashlib.blake2b(str(step).encode(), digest_size=KEY_BYTES).digest()
            entries.append(index.insert(table, key, parent, step))
        elif chance.random() < 0.5:
            index.touch(chance.choice(entries))
        else:
            victim = policy.victim()
            assert victim != NO_ENTRY
            assert policy.worth(victim) >= 0
            index.evict_run(victim, chance.randint(1, 4))
        entries = [entry for entry in entries if index.state[entry] == 1]
        if step % 100 == 0:
            assert index.check_integrity() == []


@pytest.mark.parametrize(
    ("asked", "step_s"),
    [
        *((asked, step_s) for asked in ("never", "before", "after", "both") for step_s in (0.001, 0.01, 0.03)),
        # Later it may go, if nobody ever came back, or if chains were first asked for long after they were stored.
        *((asked, step_s) for asked in ("never", "both") for step_s in (0.06, 0.1, 0.2, 1.0, 30.0)),
    ],
)
@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_what_was_just_stored_is_there_however_fast_the_cache_turns_over(
    policy: str, asked: str, step_s: float
) -> None:
    """A cache of eight chains: the one before last is there, whoever asks for it, and when."""
    h = Harness(frames=32, policy=policy)
    ns = h.space()
    chains = [cached_chain(number % 250, number // 250, 1, 1) for number in range(400)]
    for number, keys in enumerate(chains):
        h.clock.now += step_s
        if asked in ("before", "both"):
            h.length(ns, keys)
        h.store(ns, keys)
        if number >= 2:
            before = chains[number - 2]
            here = h.length(ns, before) if asked in ("after", "both") else h.cache.peek([ns], before)[0]
            assert here == 4, f"{number}"
