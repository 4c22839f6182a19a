"""Deferred work of many kinds: requests are served between two pieces of it, and each kind has its turn."""

from __future__ import annotations

import pytest
from cache_rig import CacheRig

from tiercache.daemon.tiers.dram.space import Space
from tiercache.daemon.tiers.dram.writes import Writes


def rounds(monkeypatch: pytest.MonkeyPatch, work_ns: float) -> tuple[CacheRig, list[str]]:
    """A cache in which two kinds of work record their turns; the first has more to do until its third turn."""
    turns = list[str]()

    def free(space: Space) -> bool:
        turns.append("space")
        return turns.count("space") < 3

    def publish(writes: Writes) -> bool:
        turns.append("writes")
        return False

    monkeypatch.setattr(Space, "work", free)
    monkeypatch.setattr(Writes, "work", publish)
    h = CacheRig()
    h.cache.work_ns = work_ns
    return h, turns


def test_others_are_served_between_two_kinds_where_they_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    h, turns = rounds(monkeypatch, 0)
    most, goes = 0, 0
    while True:
        before, more = len(turns), h.cache.work()
        most, goes = max(most, len(turns) - before), goes + 1
        if not more:
            break
    assert most == 1
    assert goes > 6
    assert turns == ["space", "writes"] * 3, "every kind has a turn, and a kind with more to do has another"


def test_a_kind_that_fails_keeps_no_other_from_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    h, turns = rounds(monkeypatch, 60e9)

    def fail() -> bool:
        raise RuntimeError("a bug")

    h.cache._kinds.insert(0, fail)
    h.cache._round = iter(h.cache._kinds)
    with pytest.raises(RuntimeError):
        h.cache.work()
    h.cache.work()
    assert turns == ["space", "writes"]
