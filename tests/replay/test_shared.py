"""A replay with hosts that share a store: hits by tier, whose they are, and the rules of the store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from replayed_prompts import BLOCK_BYTES, SPEC, ask, conversations, sizes

from tiercache.replay.hosts import ByPrefix, Hosts, RoundRobin
from tiercache.replay.played import Played, engine_for, play
from tiercache.replay.requests import RequestKind, TraceRequest
from tiercache.replay.shared import PaperStore
from tiercache.replay.simulation import Outcome, Simulation, Sizes

LONGEST = 100
"""Blocks of the longest of `conversations`."""
HUGE = 1 << 20


class Prompts:
    """A trace. Requests come so late after one another that no host believes an old look-up."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.specs = {1: SPEC}

    def __iter__(self) -> Iterator[TraceRequest]:
        return conversations(self._seed, 150, pause_s=20)


def shared(blocks: int, dram: int = 30, nvme: int = 0, policy: str = "lru", **more: Any) -> Sizes:
    return sizes(dram, nvme, policy, shared_bytes=blocks * BLOCK_BYTES, **more)


def hosts_over(blocks: int, count: int, dram: int = 20, nvme: int = 0, specs: Any = None) -> list[Simulation]:
    """Hosts over one store of that many blocks."""
    store = PaperStore(blocks * BLOCK_BYTES)
    return [Simulation(sizes(dram, nvme), specs or {1: SPEC}, store=store, host=host) for host in range(count)]


# --- what must hold for every trace ---------------------------------------------------------------


def test_hosts_by_prefix_and_in_turn_find_the_same_in_a_huge_store() -> None:
    def hits(blocks: int, hosts: int, spread: str) -> Played:
        return play(Prompts(4), shared(blocks, LONGEST, hosts=hosts, spread=spread))

    one, in_turn, by_prefix = hits(HUGE, 1, "prefix"), hits(HUGE, 3, "round-robin"), hits(HUGE, 3, "prefix")
    assert one.rate(*one.tiers) == in_turn.rate(*in_turn.tiers) == by_prefix.rate(*by_prefix.tiers)
    assert one.others_share == 0
    assert 1 >= in_turn.others_share > by_prefix.others_share
    alone = hits(0, 3, "round-robin")
    assert "shared" not in alone.tiers
    assert alone.rate(*alone.tiers) < in_turn.rate(*in_turn.tiers)


# --- the daemon's rules ---------------------------------------------------------------------------


def test_a_prompt_of_one_host_is_a_hit_on_the_other_and_then_in_its_dram() -> None:
    engine = engine_for(shared(100, hosts=2), start_s=0.0)
    engine.declare(1, SPEC)
    assert isinstance(engine, Hosts)
    outcomes = [engine.play(ask(100.0 * number, [1, 2, 3, 4])) for number in range(4)]
    assert outcomes == [Outcome(0, 0), Outcome(0, 0, 4, 4, host=1), Outcome(4, 0), Outcome(4, 0, host=1)]
    assert (engine.tallies().shared_written, engine.tallies().shared_fetched) == (4, 4)


@pytest.mark.parametrize("tier", ["", "shared"])
def test_a_flush_of_one_host_is_one_for_all(tier: str) -> None:
    here, there, third = hosts_over(100, 3)
    here.play(ask(0.0, [1, 2, 3]))
    assert there.play(ask(100.0, [1, 2, 3])).shared == 3
    here.play(ask(200.0, [], kind=RequestKind.FORGET, tier=tier))
    assert third.play(ask(300.0, [1, 2, 3], kind=RequestKind.LOOK)) == Outcome(0, 0)
    assert here.play(ask(400.0, [1, 2, 3], kind=RequestKind.LOOK)) == Outcome(3 if tier else 0, 0)


# --- the store, and which host ----------------------------------------------------------------------


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
