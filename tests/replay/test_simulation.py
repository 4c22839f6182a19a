"""The daemon's own cache on a disk that keeps no bytes: prompts, looks, flushes, and hints over both tiers."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from replayed_prompts import SPEC, ask, conversations, keys_of, sizes

from tiercache.replay.played import LEAST_FRAMES, engine_for, play
from tiercache.replay.requests import RequestKind, Told, TraceRequest
from tiercache.replay.simulation import Outcome, Simulation


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


def test_what_dram_has_lost_comes_up_from_nvme() -> None:
    play = Play(dram=3, nvme=20)
    assert [play.ask(1, 2, 3), play.ask(11, 12, 13)] == [Outcome(0, 0)] * 2
    assert play.ask(1, 2, 3, 4) == Outcome(0, 3)
    assert play.ask(1, 2) == Outcome(2, 0)
    tallies = play.simulation.tallies()
    assert (tallies.nvme_written, tallies.promoted, tallies.refused) == (6, 3, 1)


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


# --- hints -------------------------------------------------------------------------------------------


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
    class Prompts:
        specs = MappingProxyType({1: SPEC})

        def __iter__(self) -> Iterator[TraceRequest]:
            return conversations(1)

    plain, scaled = (play(Prompts(), sizes(30, nvme), scaled=scaled) for scaled in (False, True))
    assert (plain.tiers, plain.tallies.nvme_written_bytes) == (scaled.tiers, scaled.tallies.nvme_written_bytes)
    assert plain.tiers["dram"].blocks > 0
    cache = engine_for(sizes(30, nvme), 0.0, frame_bytes=SPEC.frame_bytes)
    assert isinstance(cache, Simulation) != is_scaled
