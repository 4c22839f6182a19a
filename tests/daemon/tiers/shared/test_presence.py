"""What this host believes to be in the store, for a short time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chains import chain_of, key_of
from host_rig import host
from memory_store import MemoryStore
from played import played

from tiercache.daemon.tiers.dram.below import Claim
from tiercache.daemon.tiers.shared import presence

pytestmark = pytest.mark.usefixtures("nothing_is_missing_for_long")


def test_blocks_that_cannot_be_fetched_cost_one_pass_over_a_long_prompt() -> None:
    class Keys(bytes):
        slices = 0

        def __getitem__(self, at: Any) -> Any:
            Keys.slices += 1
            return super().__getitem__(at)

    now = [0.0]
    known = presence.Presence(lambda: now[0])
    spaces: list[Any] = [SimpleNamespace(number=number) for number in range(32)]
    keys = Keys(chain_of("x", 500))
    known.could_not_fetch(spaces[7], key_of(keys, 400), 0)
    known.could_not_fetch(spaces[7], key_of(chain_of("y", 2), 1), 0)
    found = Claim(500, dict.fromkeys(range(32), 3), {})
    known.claimed(spaces, keys, found)
    claim = known.claim(spaces, keys)
    assert claim is not None
    assert claim.end == 400
    assert Keys.slices < 10
    bad = known.unfetchable(spaces)
    known.could_not_fetch(spaces[8], key_of(keys, 450), 0)
    known.claimed(spaces, keys, found, bad)
    claim = known.claim(spaces, keys)
    assert claim is not None
    assert claim.end == 450, "what could not be fetched before, the look-up has left out"
    now[0] += presence.UNFETCHABLE_S
    known.claimed(spaces, keys, found)
    claim = known.claim(spaces, keys)
    assert claim is not None
    assert claim.end == 500
    assert not known._unfetchable


def test_a_block_that_could_not_be_fetched_leaves_what_is_claimed_for_others() -> None:
    known = presence.Presence(lambda: 0.0)
    mine, others = SimpleNamespace(number=1), SimpleNamespace(number=2)
    prompts: list[tuple[list[Any], bytes]] = [([mine], chain_of("a", 9)), ([others], chain_of("b", 9))]
    for spaces, keys in prompts:
        known.claimed(spaces, keys, Claim(9, {0: 3}, {}))
    known.could_not_fetch(prompts[0][0][0], key_of(prompts[0][1], 5), 0)
    assert [known.claim(*prompt) is None for prompt in prompts] == [True, False]


@played
async def test_what_expired_in_the_store_is_sent_again_from_dram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, chain = MemoryStore(), chain_of("popular", 10)
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    monkeypatch.setattr(presence, "KNOWN_S", 0.0)  # so long after the last look
    a.store(a.namespace(), chain)
    await a.sent()
    for gone in (range(10), range(6, 10), range(9, 10)):
        names = sorted(store.values, key=lambda name: -store.ttls[name])  # deeper blocks live shorter
        for number in gone:
            del store.values[names[number]]
        assert await a.load([a.namespace()], chain) == 10
        await a.until(lambda: len(store.values) == 10)
        await a.sent()
    assert a.shared.source.tally.blocks == 0, "all from its DRAM"
    assert await b.load([b.namespace()], chain) == 10
    for one in (a, b):
        one.check()
        await one.close()
