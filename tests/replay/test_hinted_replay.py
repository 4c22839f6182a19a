"""Hints over both tiers, on the daemon's own cache with a disk that keeps no bytes; and hints of recordings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiercache
from tiercache.daemon.ground.slices import finish
from tiercache.daemon.hints.hints import hint_given_at
from tiercache.daemon.hints.switched_policy import SwitchedPolicy
from tiercache.protocol.messages import KEY_BYTES, Hint, Priority
from tiercache.replay.formats.lines import BadTrace
from tiercache.replay.formats.recorded import Recorded
from tiercache.replay.formats.trace import Trace
from tiercache.replay.requests import RequestKind, Told, TraceRequest, chain_keys, plain_spec
from tiercache.replay.simulation import Outcome, Simulation, Sizes

BLOCK_BYTES = 64 << 20


class Play:
    """Prompts with pauses between them, and hints about them, on `dram` and `nvme` blocks."""

    def __init__(self, dram: int, nvme: int, policy: str = "lru") -> None:
        self.simulation = Simulation(
            Sizes(dram * BLOCK_BYTES, nvme * BLOCK_BYTES, policy=policy), {1: plain_spec(16, BLOCK_BYTES)}
        )
        self.now_s = 0.0

    def ask(self, *ids: int, after_s: float = 2.0) -> Outcome:
        self.now_s += after_s
        keys = chain_keys(ids)
        found = self.simulation.play(TraceRequest(self.now_s, keys, 16 * len(ids)))
        assert self.simulation.check_integrity() == []
        return found

    def say(self, *ids: int, **told: Any) -> None:
        keys = chain_keys(ids)
        self.simulation.play(TraceRequest(self.now_s, keys, 0, kind=RequestKind.HINT, told=Told(**told)))
        assert self.simulation.check_integrity() == []

    def tick(self, after_s: float) -> None:
        """Time passes, and the daemon does its background work."""
        self.now_s += after_s
        self.simulation.now_s = self.now_s
        self.simulation.cache.expire()
        self.simulation._settle()
        assert self.simulation.check_integrity() == []

    def here(self, *ids: int) -> tuple[int, int]:
        """How many blocks of a chain are in each tier."""
        keys, (dram, nvme) = chain_keys(ids), self.simulation.resident(1)
        chain = {keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)}
        return len(chain & dram), len(chain & nvme)


def test_a_session_that_is_done_leaves_both_tiers_first() -> None:
    play = Play(dram=8, nvme=16)
    play.ask(1, 1, 1, 1)
    play.ask(2, 2, 2, 2)
    play.say(2, 2, 2, 2, done=True)
    for number in range(10, 15):
        play.ask(number, number)
    assert play.here(2, 2, 2, 2) == (0, 1), "18 blocks in 16 places, of which one is kept free"
    assert play.here(1, 1, 1, 1)[1] == 4, "though the chain is older"


def test_what_is_of_no_use_any_more_leaves_both_tiers() -> None:
    play = Play(dram=8, nvme=16)
    play.ask(1, 1, 1)
    play.say(1, 1, 1, ttl_s=30.0)
    play.ask(2, 2, 2)
    assert play.here(1, 1, 1) == (3, 3)
    play.tick(40.0)
    assert (play.here(1, 1, 1), play.here(2, 2, 2)) == ((0, 0), (3, 3))
    assert play.ask(1, 1, 1) == Outcome(0, 0)


def test_what_was_said_is_known_where_a_block_comes_later() -> None:
    """The write to NVMe is only done when the hint has come."""
    play = Play(dram=8, nvme=16)
    simulation, keys = play.simulation, chain_keys([1, 1])
    namespace = simulation._namespaces[1]
    got = simulation.cache.writes.reserve(simulation._owner, namespace, b"", keys, 10.0)
    simulation.cache.writes.commit(simulation._owner, got.lease_id, [0, 1])
    hint = hint_given_at(0.0, False, 0.0, 0.0, Priority.LOW)
    finish(simulation.cache.hint([namespace], keys, 0, hint))
    assert play.here(1, 1) == (2, 0)
    simulation._settle()
    assert play.here(1, 1) == (2, 2)
    assert simulation._shelf is not None
    table = simulation._shelf.table(namespace)
    policy = table.policy
    assert isinstance(policy, SwitchedPolicy)
    mark = policy.hinted.mark_of(table.get(keys[KEY_BYTES:]))
    assert mark is not None
    assert mark.priority is Priority.LOW


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_a_returning_client_finds_its_blocks_in_dram(policy: str) -> None:
    play = Play(dram=16, nvme=64, policy=policy)
    play.ask(1, 1, 1)
    for number in range(10, 26):
        play.ask(number)
    left = play.here(1, 1, 1)[0]
    assert left < 3, "the block had to go"
    play.say(1, 1, 1, return_in_s=100.0)
    play.tick(80.0)
    assert (play.here(1, 1, 1), play.simulation.cache.ahead.blocks) == ((left, 3), 0)
    play.tick(11.0)  # a tenth of the time before
    assert (play.here(1, 1, 1), play.simulation.cache.ahead.blocks) == ((3, 3), 3 - left)
    asked = play.simulation.cache.counters.match_requests
    for number in range(30, 38):
        play.ask(number, after_s=1.0)
    assert play.here(1, 1, 1) == (3, 3), "kept until it is asked for"
    assert play.simulation.cache.counters.match_requests == asked + 8, "no request has asked for what was brought up"
    assert play.ask(1, 1, 1) == Outcome(3, 0)


def test_nothing_is_brought_up_that_would_not_be_kept() -> None:
    play = Play(dram=16, nvme=64)
    chains = [[number] * 3 for number in range(1, 9)]
    for ids in chains:
        play.ask(*ids)
    for number in range(10, 26):
        play.ask(number)
    for ids in chains:
        play.say(*ids, return_in_s=100.0)
    play.tick(95.0)
    assert play.simulation.cache.ahead.blocks == 3, "a quarter of DRAM is four blocks"
    assert play.simulation.cache.ahead.plans == 0
    play.say(1, 1, 1, return_in_s=50.0)
    play.say(1, 1, 1, done=True)
    assert play.simulation.cache.ahead.plans == 0, "and none for a client that does not return"


def test_a_return_that_is_put_off_has_its_own_time() -> None:
    play = Play(dram=16, nvme=64)
    play.ask(1, 1, 1)
    for number in range(10, 26):
        play.ask(number)
    play.say(1, 1, 1, return_in_s=20.0)
    play.say(1, 1, 1, return_in_s=1000.0)
    play.tick(30.0)
    assert play.here(1, 1, 1) == (0, 3)
    play.tick(900.0)
    assert play.here(1, 1, 1) == (3, 3)


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiercache.daemon import prefetch as ahead

    monkeypatch.setattr(ahead, "MAX_PLANS", 4)
    play = Play(dram=16, nvme=64)
    for number in range(20):
        play.ask(number)
        play.say(number, return_in_s=1000.0)
        play.say(number, return_in_s=2000.0)
    made = play.simulation.cache.ahead
    assert made.plans == 4
    assert len(made._due) <= 2 * 4 + 4
    monkeypatch.setattr(ahead, "MAX_PLAN_BYTES", 3 * KEY_BYTES)
    play.say(3, return_in_s=50.0)
    assert made.plans == 3
    assert made._bytes == 3 * KEY_BYTES


def test_figures() -> None:
    play = Play(dram=16, nvme=64)
    play.ask(1, 1)
    play.say(1, 1, return_in_s=50.0)
    play.ask(2, 2)
    play.say(2, 2, priority=int(Priority.HIGH))
    play.tick(2.0)
    play.ask(3)
    stats = play.simulation.cache.space.policies.hints.stats()
    assert stats == {
        "hints": 2,
        "done": 0,
        "returning": 1,
        "ttl": 0,
        "priority": 1,
        "expired_blocks": 0,
        "marks": 4,
        "awaited_blocks": 4,
        "high_blocks": 4,
    }


# --- recordings ------------------------------------------------------------------------------------


def test_hints_are_recorded_and_played(tmp_path: Path) -> None:
    path, pool = tmp_path / "trace.jsonl", __import__("numpy").zeros((8, 4096), "u1")
    spec = tiercache.NamespaceSpec(engine="t", layout="x", dtype="uint8", block_size=4, block_bytes=4096)
    chain = tiercache.KeyChain(tiercache.root_key("m"), 4, range(16)).packed()
    with (
        tiercache.launch("16MiB", region="8MiB", record=str(path)) as daemon,
        tiercache.connect(daemon.address, namespace=spec, pool=tiercache.Pool.from_blocks(pool), required=True) as one,
    ):
        one.store(chain[:48], [0, 1, 2], hint=tiercache.Hint(priority=Priority.LOW))
        one.hint(chain, tiercache.Hint(return_in_s=1.5, ttl_s=60), first=1)
        one.hint(chain, tiercache.Hint(done=True))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    hints = [line for line in lines[1:] if line["o"] == "h"]
    said = [{name: line[name] for name in line.keys() - {*"toncbk", "at"}} for line in hints]
    assert said == [{"priority": 1}, {"first": 1, "return_ms": 1500, "ttl_ms": 60_000}, {"done": True}]
    requests = [one for one in Trace(path, [Recorded()], lambda tokens: 4096) if one.kind is RequestKind.HINT]
    assert [one.told for one in requests] == [Told(priority=1), Told(return_in_s=1.5, ttl_s=60.0), Told(done=True)]
    assert [(one.first, one.blocks) for one in requests] == [(0, 3), (1, 4), (0, 4)]


@pytest.mark.parametrize("wrong", [{"return_ms": -1}, {"priority": 7}, {"done": True, "return_ms": 5}, {"first": 9}])
def test_a_recording_with_a_hint_that_is_none_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = tmp_path / "trace.jsonl"
    lines: list[dict[str, Any]] = [
        {"tiercache_trace": 1},
        {"t": 0, "o": "ns", "number": 1, "block_tokens": 16, "block_bytes": 4096},
        {"t": 1, "o": "h", "n": [1], "b": 0, "c": 0, "at": 0, "k": "AAAAAAAAAAAAAAAA", **wrong},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(BadTrace, match="line 3"):
        list(Trace(path, [Recorded()], lambda tokens: 4096))


def test_the_message_says_nothing_by_default() -> None:
    hint = Hint(1, b"", 1, 1, [1], b"k" * 16)
    assert (hint.first, hint.done, hint.return_in_ms, hint.ttl_ms, hint.priority) == (0, False, 0, 0, 0)
