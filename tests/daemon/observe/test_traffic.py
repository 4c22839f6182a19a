"""Tokens that clients asked for, by the tier that had them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tiercache.daemon.observe.traffic import MAX_NOTED, PROBE_ENGINE, Traffic
from tiercache.daemon.tiers.dram.reads import Found
from tiercache.protocol.messages import KEY_BYTES


def namespace(engine: str = "test") -> Any:
    return SimpleNamespace(spec=SimpleNamespace(engine=engine, block_size=16), fingerprint="f", number=1)


@pytest.mark.parametrize("matches", [1, MAX_NOTED + 1])
def test_tokens_are_counted_by_tier_once_for_all_ranks(matches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = Traffic()
    hot: list[int] = []
    monkeypatch.setattr(traffic._hot_paths, "matched", lambda first, keys, hit: hot.append(hit))
    for _ in range(matches):
        traffic.matched([namespace(), namespace()], bytes(8 * KEY_BYTES), 8, Found(2, 3, None, 1))
        traffic.matched([namespace()], bytes(4 * KEY_BYTES), 4, Found(0, 0, None))
        traffic.matched([namespace(PROBE_ENGINE)], bytes(KEY_BYTES), 1, Found(1, 0, None))
    traffic.read(namespace(), 100)
    traffic.read(namespace(PROBE_ENGINE), 1000)
    for _ in range(2):  # asking counts nothing
        assert traffic.stats() == {
            "asked_tokens": matches * 12 * 16,
            "dram_hit_tokens": matches * 2 * 16,
            "below_hit_tokens": matches * 3 * 16,
            "shared_hit_tokens": matches * 16,
            "read_bytes": 100,
        }
    assert traffic.hit_tokens.count == 2 * matches
    assert traffic.hit_tokens.sum == matches * 5 * 16
    assert hot == [5] * matches, "misses have no place in the ranking"
