"""Replays: the daemon's own cache on a disk that keeps no bytes, hosts over one store, the optimum, and the times."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from tiercache.daemon.policies import POLICIES
from tiercache.plan.model import load_model
from tiercache.protocol.messages import KEY_BYTES
from tiercache.replay.estimate import Costs, Estimate
from tiercache.replay.hosts import ByPrefix, Hosts, RoundRobin
from tiercache.replay.optimum import Accesses
from tiercache.replay.played import LEAST_FRAMES, Played, engine_for, play
from tiercache.replay.requests import RequestKind, Told, TraceRequest, chain_keys, plain_spec
from tiercache.replay.shared import PaperStore
from tiercache.replay.simulation import Outcome, Simulation, Sizes

BLOCK_BYTES = 64 << 20
TOKENS = 16
SPEC = plain_spec(TOKENS, BLOCK_BYTES)


def keys_of(ids: Sequence[int]) -> set[bytes]:
    """The keys of a chain, one by one."""
    keys = chain_keys(ids)
    return {keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)}


def ask(time_s: float, ids: Sequence[int], **more: Any) -> TraceRequest:
    return TraceRequest(time_s, chain_keys(ids), TOKENS * len(ids), **more)


def conversations(seed: int, requests: int = 200, pause_s: float = 0.2) -> Iterator[TraceRequest]:
    """A few conversations that grow turn by turn and share beginnings; now and then one is longer than DRAM."""
    chance, fresh = random.Random(seed), iter(range(1, 1 << 40))
    chats = [[next(fresh) for _ in range(chance.randint(0, 4))] for _ in range(5)]
    for number in range(requests):
        at = chance.randrange(len(chats))
        if chance.random() < 0.1:
            chats[at] = chats[chance.randrange(len(chats))][: chance.randint(0, 6)]
        longer = 60 if chance.random() < 0.02 else chance.randint(0, 5)
        chats[at] = chats[at] + [next(fresh) for _ in range(longer)]
        yield ask(number * pause_s, chats[at])
        if len(chats[at]) > 40:
            chats[at] = chats[at][: chance.randint(0, 10)]


class Prompts(list[TraceRequest]):
    """A trace."""

    specs = MappingProxyType({1: SPEC})


def sizes(dram: int, nvme: int, policy: str = "lru", **more: Any) -> Sizes:
    """Sizes in blocks."""
    return replace(Sizes(dram * BLOCK_BYTES, nvme * BLOCK_BYTES, policy=policy), **more)


class Play:
    """Prompts with pauses between them, and hints about them, on `dram` and `nvme` blocks."""

    def __init__(self, dram: int, nvme: int, policy: str = "lru") -> None:
        self.simulation = Simulation(sizes(dram, nvme, policy), {1: SPEC})
        self.now_s = 0.0

    def ask(self, *ids: int, after_s: float = 2.0, **more: Any) -> Outcome:
        self.now_s += after_s
        found = self.simulation.play(ask(self.now_s, ids, **more))
        assert self.simulation.check_integrity() == []
        return found

    def fill(self, ids: range) -> None:
        """Prompts of one block each, which push others out of DRAM."""
        for number in ids:
            self.ask(number)

    def say(self, *ids: int, **told: Any) -> None:
        self.ask(*ids, after_s=0.0, kind=RequestKind.HINT, told=Told(**told))

    def tick(self, after_s: float) -> None:
        """Time passes, and the daemon does its background work."""
        self.now_s += after_s
        self.simulation.now_s = self.now_s
        self.simulation.cache.expire()
        self.simulation._settle()
        assert self.simulation.check_integrity() == []

    def here(self, *ids: int) -> tuple[int, int]:
        """The blocks of a chain in each tier."""
        dram, nvme = self.simulation.resident(1)
        return len(keys_of(ids) & dram), len(keys_of(ids) & nvme)


def test_looks_keeps_and_flushes_are_played_too() -> None:
    play = Play(dram=10, nvme=40)
    ids = [1, 2, 3, 4]
    assert play.ask(*ids, kind=RequestKind.LOOK) == Outcome(0, 0)
    assert play.here(*ids) == (0, 0)
    play.ask(*ids, kind=RequestKind.KEEP)
    assert play.ask(*ids, kind=RequestKind.LOOK) == Outcome(4, 0)
    play.ask(1, 2, 3, kind=RequestKind.FORGET)
    assert play.here(*ids) == play.here(1, 2) == (2, 2)
    play.ask(kind=RequestKind.FORGET)
    assert play.here(*ids) == (0, 0)


def test_a_look_at_what_another_daemon_had_stores_it() -> None:
    play = Play(dram=10, nvme=0)
    play.ask(1, 2, 3, kind=RequestKind.LOOK, had=(2, 0))
    assert play.here(1, 2, 3) == (2, 0)
    play.ask(5, 6, 7, kind=RequestKind.KEEP, first=2)
    assert play.here(5, 6, 7) == (3, 0)
    play.ask(5, 6, 7, 8, kind=RequestKind.KEEP, first=3)
    assert play.here(5, 6, 7, 8) == (4, 0), "stored below a block that is there"


def test_a_namespace_for_dram_alone_is_not_written_below() -> None:
    spec = msgspec.structs.replace(SPEC, extra={"tiers": "dram"})
    simulation = Simulation(sizes(4, 40), {1: spec})
    for number in range(3):
        simulation.play(ask(10.0 * number, [10 * number + 1, 10 * number + 2]))
    assert [len(found) for found in simulation.resident(1)] == [4, 0]
    assert simulation.tallies().nvme_written == 0


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_a_returning_client_finds_its_blocks_in_dram(policy: str) -> None:
    play = Play(dram=16, nvme=64, policy=policy)
    cache = play.simulation.cache
    play.ask(1, 1, 1)
    play.fill(range(10, 26))
    left = play.here(1, 1, 1)[0]
    assert left < 3, "the block had to go"
    play.say(1, 1, 1, return_in_s=100.0)
    play.tick(80.0)
    assert (play.here(1, 1, 1), cache.ahead.blocks) == ((left, 3), 0)
    play.tick(11.0)  # a tenth of the time before
    assert (play.here(1, 1, 1), cache.ahead.blocks) == ((3, 3), 3 - left)
    asked = cache.counters.match_requests
    play.fill(range(30, 34))
    assert play.here(1, 1, 1) == (3, 3), "kept until it is asked for"
    assert cache.counters.match_requests == asked + 4, "no request has asked for what was brought up"
    assert play.ask(1, 1, 1) == Outcome(3, 0)


@pytest.mark.parametrize(("nvme", "is_scaled"), [(0, True), (LEAST_FRAMES, True), (60, False)])
def test_large_blocks_are_played_as_smaller_ones(nvme: int, is_scaled: bool) -> None:
    prompts = Prompts(conversations(1))
    plain, scaled = (play(prompts, sizes(30, nvme), scaled=scaled) for scaled in (False, True))
    assert (plain.tiers, plain.tallies.nvme_written_bytes) == (scaled.tiers, scaled.tallies.nvme_written_bytes)
    assert plain.tiers["dram"].blocks > 0
    cache = engine_for(sizes(30, nvme), 0.0, frame_bytes=SPEC.frame_bytes)
    assert isinstance(cache, Simulation) != is_scaled


LONGEST = 100
"""Blocks of the longest of `conversations`."""
HUGE = 1 << 20


def shared(blocks: int, dram: int = 30, **more: Any) -> Sizes:
    return sizes(dram, 0, shared_bytes=blocks * BLOCK_BYTES, **more)


def test_hosts_by_prefix_and_in_turn_find_the_same_in_a_huge_store() -> None:
    prompts = Prompts(conversations(4, 150, pause_s=20))  # so late that no host believes an old look-up

    def hits(blocks: int, hosts: int, spread: str) -> Played:
        return play(prompts, shared(blocks, LONGEST, hosts=hosts, spread=spread))

    one, in_turn, by_prefix = hits(HUGE, 1, "prefix"), hits(HUGE, 3, "round-robin"), hits(HUGE, 3, "prefix")
    assert one.rate(*one.tiers) == in_turn.rate(*in_turn.tiers) == by_prefix.rate(*by_prefix.tiers)
    assert one.others_share == 0
    assert 1 >= in_turn.others_share > by_prefix.others_share
    alone = hits(0, 3, "round-robin")
    assert "shared" not in alone.tiers
    assert alone.rate(*alone.tiers) < in_turn.rate(*in_turn.tiers)


def test_a_prompt_of_one_host_is_a_hit_on_the_other_and_then_in_its_dram() -> None:
    engine = engine_for(shared(100, hosts=2), start_s=0.0)
    engine.declare(1, SPEC)
    assert isinstance(engine, Hosts)
    outcomes = [engine.play(ask(100.0 * number, [1, 2, 3, 4])) for number in range(4)]
    assert outcomes == [Outcome(0, 0), Outcome(0, 0, 4, 4, host=1), Outcome(4, 0), Outcome(4, 0, host=1)]
    assert (engine.tallies().shared_written, engine.tallies().shared_fetched) == (4, 4)


@pytest.mark.parametrize("tier", ["", "shared"])
def test_a_flush_of_one_host_is_one_for_all(tier: str) -> None:
    store = PaperStore(100 * BLOCK_BYTES)
    here, there, third = (Simulation(sizes(20, 0), {1: SPEC}, store=store, host=host) for host in range(3))
    here.play(ask(0.0, [1, 2, 3]))
    assert there.play(ask(100.0, [1, 2, 3])).shared == 3
    here.play(ask(200.0, [], kind=RequestKind.FORGET, tier=tier))
    assert third.play(ask(300.0, [1, 2, 3], kind=RequestKind.LOOK)) == Outcome(0, 0)
    assert here.play(ask(400.0, [1, 2, 3], kind=RequestKind.LOOK)) == Outcome(3 if tier else 0, 0)


def test_a_full_store_drops_what_would_expire_first() -> None:
    store = PaperStore(3)
    for name, ttl_s in ((b"a", 30.0), (b"b", 10.0), (b"c", 20.0)):
        assert store.put(name, 1, ttl_s, 0)
    store.renew(b"b", 40.0)
    assert store.put(b"d", 1, 5.0, 0)
    assert [name for name in (b"a", b"b", b"c", b"d") if store.find(name)] == [b"a", b"b", b"d"]
    assert (store.used_bytes, store.evicted) == (3, 1)
    assert not store.put(b"e", 4, 5.0, 0)
    assert store.put(b"a", 2, 50.0, 0)
    assert [name for name in (b"a", b"b", b"d") if store.find(name)] == [b"a", b"b"]
    store.now_s = 41.0
    assert store.find(b"b") is None
    assert store.put(b"f", 1, 1.0, 0)
    assert (store.used_bytes, store.evicted) == (3, 2)  # what had expired was not evicted


def test_hosts_take_their_turns_or_keep_their_conversations() -> None:
    in_turn = RoundRobin(3)
    assert [in_turn.choose(ask(0.0, [1])) for _ in range(4)] == [0, 1, 2, 0]
    spread = ByPrefix(2)
    first, second = [1, *range(10, 20)], [1, *range(30, 40)]  # all prompts begin alike: no reason to send all to one
    assert [spread.choose(ask(0.0, ids)) for ids in (first, second)] == [0, 1]
    for turn in range(5):
        first, second = [*first, 100 + turn], [*second, 200 + turn]
        assert [spread.choose(ask(0.0, ids)) for ids in (second, first)] == [1, 0]
    assert spread.choose(ask(0.0, [])) in (0, 1)


# --- the optimum, against all that a cache could do on tiny traces; and against every policy ---------


def prompts_of(chains: list[list[int]]) -> Prompts:
    return Prompts(ask(float(at), ids) for at, ids in enumerate(chains))


def tiny(seed: int) -> list[list[int]]:
    """Chains in a small tree: a block's id names its way from the root."""
    chance = random.Random(seed)
    chains = []
    for _ in range(chance.randint(2, 7)):
        chain, node = [], 0
        for _ in range(chance.randint(1, 3)):
            node = 3 * node + chance.randint(1, 2)
            chain.append(node)
        chains.append(chain)
    return chains


def best_by_trying(chains: list[list[int]], capacity: int) -> int:
    """The hits of the best choice, by trying every prefix-closed set of at most `capacity` blocks at each request."""
    parent = {block: before for chain in chains for block, before in zip(chain, [0, *chain], strict=False)}

    @cache
    def best(number: int, here: frozenset[int]) -> int:
        if number == len(chains):
            return 0
        run = 0
        for block in chains[number]:
            if block not in here:
                break
            run += 1
        could = sorted(here | set(chains[number]))
        kept = (
            frozenset(some)
            for size in range(min(capacity, len(could)) + 1)
            for some in combinations(could, size)
            if all(parent[block] in (0, *some) for block in some)
        )
        return run + max(best(number + 1, some) for some in kept)

    return best(0, frozenset())


@pytest.mark.parametrize("capacity", [1, 2, 3, 5])
def test_no_choice_of_what_to_keep_has_more_hits(capacity: int) -> None:
    for seed in range(25):
        chains = tiny(seed)
        best = best_by_trying(chains, capacity)
        assert Accesses(prompts_of(chains)).best_hits(capacity) == best, f"seed {seed}: {chains}"


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_has_more(policy: str) -> None:
    chance = random.Random(5)
    chats = [[1000 * chat + at for at in range(30)] for chat in range(20)]
    prompts = prompts_of([chance.choice(chats)[: chance.randint(1, 30)] for _ in range(300)])
    accesses = Accesses(prompts)
    for blocks in (10, 50, 200):
        played = play(prompts, sizes(blocks, 3 * blocks, policy))
        assert 0 < played.tiers["dram"].blocks <= accesses.best_hits(blocks)
        assert sum(tier.blocks for tier in played.tiers.values()) <= accesses.best_hits(4 * blocks)
    assert accesses.asked_blocks == sum(prompt.blocks for prompt in prompts)
    assert accesses.best_hits(600) == accesses.asked_blocks - accesses.unique_blocks


MODEL = load_model("Llama-3.1-8B")
PROMPT = TraceRequest(0.0, chain_keys(range(8)), 8 * 512)
LOAD_BYTES = 2 * 512 * 1e5


def test_work_and_times_of_one_prompt_with_a_cache_and_without() -> None:
    estimate = Estimate(Costs(MODEL, flops_per_s=1e15, dram_bytes_per_s=1e10, nvme_bytes_per_s=1e9))
    for tokens in (1, 600, 4096):
        assert estimate.prefill_flops(tokens) == pytest.approx(MODEL.prefill_flops(tokens))
    estimate.add(PROMPT, 512, 1e5, 1, Outcome(3, 2))
    whole, own, hit = (MODEL.prefill_flops(512 * blocks) for blocks in (8, 1, 5))
    assert (estimate.flops, estimate.saved_flops) == (pytest.approx(whole), pytest.approx(hit))
    assert estimate.without.mean_s == pytest.approx((whole - own) / 1e15)
    loads_s = LOAD_BYTES / 1e10 + LOAD_BYTES / 1e9
    assert estimate.with_cache.mean_s == pytest.approx(loads_s + (whole - hit) / 1e15)
    assert estimate.with_cache.percentile_s(0.5) == pytest.approx(estimate.with_cache.mean_s, rel=0.01)
    saved = estimate.saved_flops
    estimate.add(PROMPT, 512, 1e5, 0, Outcome(8, 0))
    assert estimate.saved_flops < saved + whole, "the last token is computed all the same"


def test_a_shared_store_is_asked_over_a_network() -> None:
    costs = Costs(MODEL, 1e15, 1e10, 1e9, shared_bytes_per_s=1e8, shared_round_trip_s=0.25)
    far = Estimate(costs, shared=True)
    far.add(PROMPT, 512, 1e5, 1, Outcome(3, 2, 2))
    whole, hit = (MODEL.prefill_flops(512 * blocks) for blocks in (8, 7))
    assert far.saved_flops == pytest.approx(hit)
    loads_s = LOAD_BYTES / 1e10 + LOAD_BYTES / 1e9 + LOAD_BYTES / 1e8 + 2 * 0.25
    assert far.with_cache.mean_s == pytest.approx(loads_s + (whole - hit) / 1e15)
