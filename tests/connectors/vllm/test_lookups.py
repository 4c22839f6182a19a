"""Lookups by themselves, and those of the tier below vLLM's own offloading, with a stand-in for the daemon."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, make_offload_key
from vllm_engines import PATIENCE_S, wait_until

from tiercache.connectors.vllm import tier_lookups
from tiercache.connectors.vllm.lookups import SLOW_LOOKUP_S, MatchLookups
from tiercache.connectors.vllm.tier_lookups import TierLookups
from tiercache.protocol.messages import KEY_BYTES
from tiercache.protocol.namespaces import NamespaceSpec

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
SIZE = 4
CHAIN = bytes(KEY_BYTES), bytes(2 * KEY_BYTES)
SPEC = NamespaceSpec(engine="t", layout="l", dtype="uint8", block_size=SIZE, block_bytes=64)
HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


class Cache:
    """A connector that finds all blocks of everything while `answers` is set."""

    available = True
    client = SimpleNamespace(request_timeout_s=PATIENCE_S)

    def __init__(self) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()
        self.answers.set()
        self.found: list[Any] = []
        self.released: list[Any] = []

    def match(self, keys: bytes, namespaces: Any) -> Any:
        self.asked.set()
        assert self.answers.wait(PATIENCE_S)
        self.found.append(SimpleNamespace(blocks=len(keys) // KEY_BYTES, ticket=lambda: b"ticket"))
        return self.found[-1]

    def release(self, match: Any) -> None:
        self.released.append(match)

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def cache() -> Iterator[Any]:
    cache = Cache()
    yield cache
    cache.answers.set()


@pytest.fixture
def lookups(cache: Any) -> Iterator[MatchLookups]:
    lookups = MatchLookups(cache, [SPEC])
    yield lookups
    cache.answers.set()
    lookups.close()


def test_requests_wait_past_the_deadline_only_while_lookups_are_quick(cache: Any, lookups: MatchLookups) -> None:
    first = lookups.ask(lambda: CHAIN)
    assert lookups.finish(PATIENCE_S)
    assert first.done
    cache.answers.clear()
    cache.asked.clear()
    hanging = lookups.ask(lambda: CHAIN)
    lookups.begin()
    assert cache.asked.wait(PATIENCE_S)
    wait_until(lambda: time.monotonic() - lookups._moved_s > SLOW_LOOKUP_S)
    assert not lookups.overdue(hanging), "its deadline is far away"
    hanging.until_s = 0.0
    assert lookups.overdue(hanging)
    lookups._slow, lookups._moved_s = False, time.monotonic() + PATIENCE_S
    assert not lookups.overdue(hanging), "the lookups before it are quick"
    assert lookups.overdue(hanging, slow=True)


def test_without_a_thread_requests_wait_until_the_deadline(
    cache: Any, lookups: MatchLookups, no_threads: pytest.MonkeyPatch
) -> None:
    lookup = lookups.ask(lambda: CHAIN)
    assert not lookups.overdue(lookup)
    lookup.until_s = 0.0
    wait_until(lambda: lookups.overdue(lookup))
    lookups.drop(lookup)
    no_threads.undo()
    assert lookups.finish(PATIENCE_S)
    assert (lookup.done, cache.found) == (True, []), "a dropped request is not looked up"


def test_what_waits_at_the_end_is_not_looked_up(cache: Any, lookups: MatchLookups) -> None:
    cache.answers.clear()
    first, second = lookups.ask(lambda: CHAIN), lookups.ask(lambda: CHAIN)
    lookups.begin()
    assert cache.asked.wait(PATIENCE_S)
    lookups._closed = True  # as `close`, which waits
    cache.answers.set()
    lookups.close()
    assert (first.done, second.done, len(cache.found)) == (True, True, 1)


class Tier:
    """Lookups of a tier, with requests of two chunks."""

    def __init__(self, cache: Any) -> None:
        names: Any = SimpleNamespace(root=lambda: CHAIN[0], new_epoch=lambda: None)
        self.lookups = TierLookups(cache, [SPEC], names, PATIENCE_S)
        self.contexts: dict[str, Any] = {}

    def add(self, name: str) -> None:
        keys = [make_offload_key(f"{name} {chunk}".encode().ljust(32), 0) for chunk in range(2)]
        known = {key: (chunk + 1) * SIZE for chunk, key in enumerate(keys)}
        self.contexts[name] = SimpleNamespace(req_id=name, _offload_key_positions=known)
        self.lookups.add(name)

    def answers(self, name: str) -> list[LookupResult]:
        context = self.contexts[name]
        return [self.lookups.lookup(key, context) for key in context._offload_key_positions]

    def end_step(self) -> None:
        """All lookups of the step have been made, and the daemon has answered them."""
        assert self.lookups._lookups.finish(PATIENCE_S)
        self.lookups.end_step(())
        self.lookups.check_integrity()


@pytest.fixture
def tier(cache: Any) -> Iterator[Tier]:
    tier = Tier(cache)
    yield tier
    cache.answers.set()
    tier.lookups.close()


def test_an_answer_does_not_change_within_a_step_and_is_given_once(cache: Any, tier: Tier) -> None:
    tier.add("a")
    assert tier.answers("a") == [RETRY, RETRY]
    assert tier.lookups._lookups.finish(PATIENCE_S)
    assert tier.answers("a") == [RETRY, RETRY], "in the same step"
    tier.end_step()
    assert tier.answers("a") == tier.answers("a") == [HIT, HIT]
    lookup = tier.lookups.take("a")
    assert lookup is not None
    assert (lookup.match, lookup.ticket, tier.lookups.take("a")) == (cache.found[0], b"ticket", None)
    tier.end_step()
    assert (tier.answers("a"), cache.released) == ([MISS, MISS], [])
    tier.lookups.drop(lookup)
    tier.end_step()
    assert cache.released == cache.found


def test_a_match_that_is_not_loaded_is_released(cache: Any, tier: Tier) -> None:
    for name in ("not loaded", "gone", "forgotten"):
        tier.add(name)
        assert tier.answers(name) == [RETRY, RETRY]
    tier.end_step()
    assert tier.answers("not loaded") == [HIT, HIT]
    tier.end_step()
    tier.lookups.remove("gone")
    tier.lookups.forget()
    tier.end_step()
    assert cache.released == cache.found
    assert len(cache.found) == 3


def test_requests_beyond_the_limit_are_looked_up_in_later_steps(
    cache: Any, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_lookups, "MAX_LOOKUPS", 3)
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
    assert cache.released == cache.found
    assert len(cache.found) == 7


def test_a_daemon_that_hangs_from_the_first_lookup_on_is_waited_for_until_the_deadline(cache: Any, tier: Tier) -> None:
    cache.answers.clear()
    tier.add("a")
    assert tier.answers("a") == [RETRY, RETRY]
    assert cache.asked.wait(PATIENCE_S)
    wait_until(lambda: time.monotonic() - tier.lookups._lookups._moved_s > SLOW_LOOKUP_S)
    assert tier.answers("a") == [RETRY, RETRY], "the deadline is far away"
    lookup = tier.lookups._requests["a"].lookup
    assert lookup is not None
    lookup.until_s = 0.0
    assert tier.answers("a") == [MISS, MISS]
    cache.answers.set()
    tier.end_step()
    assert cache.released == cache.found
    assert tier.answers("a") == [MISS, MISS]
