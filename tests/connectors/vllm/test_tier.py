"""Lookups of the tier below vLLM's own offloading: what vLLM is told of each chunk, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_vllm import GARBAGE, SIZE, SPEC, TinyCache, looked_up_by_hand

from tiercache.connectors.vllm import tier as tier_parts
from tiercache.connectors.vllm.groups import GroupPart
from tiercache.connectors.vllm.names import keys_of
from tiercache.connectors.vllm.tier import (
    ChunkPlace,
    ChunkPlaces,
    JobResult,
    LookupResult,
    TierLookups,
    make_offload_key,
)
from tiercache.protocol.messages import KEY_BYTES

ROOT = bytes(KEY_BYTES)
HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


class Tier:
    """The lookups of a tier, with requests of two chunks that the cache has."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.cache: Any = TinyCache()
        names: Any = SimpleNamespace(root=lambda: ROOT, new_epoch=lambda: None)
        self.lookups = TierLookups(self.cache, [SPEC], names, 60.0)
        self.queue: Any = self.lookups._lookups._queue
        self.contexts: dict[str, Any] = {}

    def add(self, name: str) -> None:
        hashes = [f"{name} {chunk}".encode().ljust(32) for chunk in range(2)]
        known = {make_offload_key(each, 0): (chunk + 1) * SIZE for chunk, each in enumerate(hashes)}
        keys = keys_of(ROOT, hashes, 1, 0, 2)
        self.cache.blocks.update({keys[:KEY_BYTES]: [GARBAGE], keys[KEY_BYTES:]: [GARBAGE]})
        self.contexts[name] = SimpleNamespace(req_id=name, _offload_key_positions=known)
        self.lookups.add(name)

    def answers(self, name: str) -> list[LookupResult]:
        context = self.contexts[name]
        return [self.lookups.lookup(key, context) for key in context._offload_key_positions]

    def end_step(self, preempted: tuple[str, ...] = ()) -> None:
        """All lookups of the step have been made, and the daemon has answered them."""
        self.queue.finish()
        self.lookups.end_step(preempted)
        self.lookups.check_integrity()
        self.queue.finish()

    def released(self) -> bool:
        return all(match.released == 1 for match in self.cache.matches)


@pytest.fixture
def tier() -> Iterator[Tier]:
    tier: Tier
    with looked_up_by_hand(lambda: tier.now_s):
        tier = Tier()
        yield tier
    tier.lookups.close()


def test_an_answer_does_not_change_within_a_step_and_is_given_once(tier: Tier) -> None:
    tier.add("a")
    assert tier.answers("a") == [RETRY, RETRY]
    tier.queue.finish()
    assert tier.answers("a") == [RETRY, RETRY], "in the same step"
    tier.end_step()
    assert tier.answers("a") == tier.answers("a") == [HIT, HIT]
    lookup = tier.lookups.take("a")
    assert lookup is not None
    assert (lookup.match, lookup.ticket, tier.lookups.take("a")) == (tier.cache.matches[0], bytes(8), None)
    tier.end_step()
    assert tier.answers("a") == [MISS, MISS]
    assert not tier.released()
    tier.lookups.drop(lookup)
    tier.end_step()
    assert tier.released()
    keys, chain = list(tier.contexts["a"]._offload_key_positions), tier.lookups.chain(tier.contexts["a"])
    assert chain is not None
    assert [chain.vllm_key(ChunkPlace(0, position), GroupPart(0, SIZE)) for position in range(2)] == keys
    tier.lookups.ask_again("a", keys[:1])
    assert tier.answers("a") == [RETRY, MISS]
    tier.end_step(preempted=("a",))
    assert tier.answers("a") == [HIT, HIT], "a preempted request may ask for all once more"


def test_a_match_that_is_not_loaded_is_released(tier: Tier) -> None:
    for name in ("not loaded", "gone", "forgotten"):
        tier.add(name)
        assert tier.answers(name) == [RETRY, RETRY]
    tier.end_step()
    assert tier.answers("not loaded") == [HIT, HIT]
    tier.end_step()
    tier.lookups.remove("gone")
    assert tier.lookups.chain(tier.contexts["gone"]) is None
    tier.lookups.forget()
    tier.end_step()
    assert len(tier.cache.matches) == 3
    assert tier.released()


def test_requests_beyond_the_limit_are_looked_up_in_later_steps(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_parts, "MAX_LOOKUPS", 3)
    names = [f"{number}" for number in range(7)]
    for name in names:
        tier.add(name)
    found: set[str] = set()
    for answered in (0, 3, 6, 7):
        answers = {name: tier.answers(name) for name in names if name not in found}
        found.update(name for name, answer in answers.items() if answer == [HIT, HIT])
        assert len(found) == answered
        assert all(answer == [RETRY, RETRY] for name, answer in answers.items() if name not in found)
        tier.end_step()
    tier.end_step()
    assert len(tier.cache.matches) == 7
    assert tier.released()


def test_chunks_of_vllm_have_their_place() -> None:
    """Chunks of 64 tokens in the first and the last group, of 32 in the second, of which a window needs one."""
    parts = [GroupPart(0, 64, window=2), GroupPart(1, 32, 0, 2), GroupPart(1, 32, 1, 2), GroupPart(2, 64, window=1)]

    def place(group: int, end: int, parts: list[GroupPart] = parts) -> ChunkPlace | None:
        key = make_offload_key(b"h" * 32, group)
        return ChunkPlaces(parts, 64).of(key, SimpleNamespace(_offload_key_positions={key: end}))

    assert [place(1, end) for end in (32, 64, 96)] == [ChunkPlace(1, 0), ChunkPlace(2, 0), ChunkPlace(1, 1)]
    assert (place(0, 128), place(2, 128)) == (ChunkPlace(0, 1), ChunkPlace(3, 1))
    assert place(1, 40) is None  # the end of a prompt within a block
    assert place(1, 32, [GroupPart(0, 64), GroupPart(1, 32, 1, 2, window=1)]) is None  # no match needs it
    split = [ChunkPlaces(parts, 64).is_split(make_offload_key(b"h" * 32, group)) for group in range(3)]
    assert split == [False, True, False]


class Ended:
    """A transfer that took from one moment to another."""

    def __init__(self, began_s: float, ended_s: float, result: Any) -> None:
        self.began_s, self.ended_s = began_s, ended_s
        self._result = result

    def result(self, timeout_s: float) -> Any:
        return self._result

    def done(self) -> bool:
        return True


def test_vllm_is_told_which_chunks_came_and_how_long_a_job_took() -> None:
    lookup: Any = None
    load, store = tier_parts.LoadJob("a", lookup, 5), tier_parts.StoreJob()
    assert not tier_parts.has_ended(load)
    load.parts = [
        (SimpleNamespace(keys=[b"a", b"b"]), Ended(10.0, 12.0, 2)),
        (SimpleNamespace(keys=[b"c", b"d", b"e"]), Ended(11.0, 15.0, 1)),
    ]
    load.begun = True
    assert tier_parts.has_ended(load)
    assert load.result(70) == JobResult(70, False, [b"a", b"b", b"c"], 5.0)
    load.parts[1] = load.parts[1][0], Ended(11.0, 0.0, 3)
    assert load.result(70) == JobResult(70, True, None, 2.0), "all came; one of them was not timed"
    assert store.result(80) == JobResult(80, False, None, 0.0), "nothing of it was kept"
    for dropped, kept in ((0, True), (1, False)):
        store.parts = [(None, Ended(1.0, 2.5, SimpleNamespace(dropped=dropped)))]
        assert store.result(80) == JobResult(80, kept, None, 1.5)
