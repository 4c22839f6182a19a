"""How long requests wait for lookups, on a fake clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tiny_vllm import SPEC, TinyCache, looked_up_by_hand

from tiercache.connectors.vllm.lookups import LONGEST_WAIT, SLOW_LOOKUP_S, MatchLookups
from tiercache.protocol.messages import KEY_BYTES

CHAIN = bytes(KEY_BYTES), bytes(2 * KEY_BYTES)
PATIENCE_S = TinyCache.client.request_timeout_s


class Rig:
    """Lookups that are done by hand, each of which takes `takes_s`."""

    def __init__(self) -> None:
        self.now_s, self.takes_s = 100.0, 0.0
        self.cache: Any = TinyCache()
        self.lookups = MatchLookups(self.cache, [SPEC])
        self.queue: Any = self.lookups._queue
        match = self.cache.match

        def timed(*arguments: Any, **options: Any) -> Any:
            self.now_s += self.takes_s
            return match(*arguments, **options)

        self.cache.match = timed


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig: Rig
    with looked_up_by_hand(lambda: rig.now_s):
        rig = Rig()
        yield rig


def test_a_request_waits_past_the_deadline_while_the_lookups_before_it_are_quick(rig: Rig) -> None:
    for _ in range(3):
        rig.lookups.ask(lambda: CHAIN)
    last = rig.lookups.ask(lambda: CHAIN)
    rig.now_s += PATIENCE_S + 1
    assert not rig.lookups.overdue(last), "vLLM has only now begun its first step"
    for _ in range(3):
        rig.now_s += SLOW_LOOKUP_S / 2
        rig.queue.work()
        rig.now_s += SLOW_LOOKUP_S / 2
        assert not rig.lookups.overdue(last)
        assert rig.lookups.overdue(last, slow=True), "this one's are known to be slow"
    rig.now_s += SLOW_LOOKUP_S
    assert rig.lookups.overdue(last), "nothing moves any more"
    rig.queue.work()
    assert (last.done, last.root) == (True, CHAIN[0])


def test_a_request_behind_very_many_quick_lookups_goes_without_the_cache_at_last(rig: Rig) -> None:
    rig.takes_s = SLOW_LOOKUP_S / 2
    last = rig.lookups.prepare()
    waited = 0
    while not rig.lookups.overdue(last):
        rig.lookups.ask(lambda: CHAIN)
        rig.lookups.begin()
        rig.queue.work()
        waited += 1
    assert waited * rig.takes_s == pytest.approx(LONGEST_WAIT * PATIENCE_S, abs=2 * rig.takes_s)


@pytest.mark.parametrize("takes_s", [SLOW_LOOKUP_S * 0.9, SLOW_LOOKUP_S * 1.1])
def test_a_request_behind_slow_lookups_waits_for_one_answer(rig: Rig, takes_s: float) -> None:
    rig.takes_s = takes_s
    rig.lookups.ask(lambda: CHAIN)
    last = rig.lookups.ask(lambda: CHAIN)
    rig.lookups.begin()
    rig.queue.work()
    assert not rig.lookups.overdue(last), "its deadline is far away"
    last.until_s = rig.now_s - 0.01
    assert rig.lookups.overdue(last) == (takes_s > SLOW_LOOKUP_S)


def test_what_is_dropped_or_waits_at_the_end_is_not_looked_up(rig: Rig) -> None:
    dropped, waiting = rig.lookups.ask(lambda: CHAIN), rig.lookups.ask(lambda: CHAIN)
    rig.lookups.drop(dropped)
    rig.queue.work()
    rig.lookups.begin()
    rig.queue.work()
    rig.lookups.close()
    rig.queue.finish()
    assert (dropped.done, waiting.done, rig.cache.matches) == (True, True, [])
