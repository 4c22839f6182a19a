"""Where a block stands in its chain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chains import chain_of, key_of
from host_rig import host
from memory_store import MemoryStore
from played import played

from tiercache.daemon.tiers.shared import ancestry

pytestmark = pytest.mark.usefixtures("nothing_is_missing_for_long")


@played
async def test_the_place_of_a_block_far_below_the_root_is_not_sought_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Places(dict[Any, Any]):
        gets = 0

        def get(self, *args: Any) -> Any:
            self.gets += 1
            return super().get(*args)

    monkeypatch.setattr(ancestry, "MAX_WALK", 150)
    a = host(MemoryStore(), tmp_path, "a")
    space, chain = a.namespace(), chain_of("x", 400)
    a.store(space, chain)
    await a.sent()
    places = a.shared._ancestry._places = Places()
    for number in range(399, 199, -1):  # as they are evicted
        assert a.shared._ancestry.place(space, key_of(chain, number)) is None
    assert places.gets < 200 * (ancestry.NOTED_EVERY + 2)
    place = a.shared._ancestry.place(space, key_of(chain, 40))
    assert place is not None
    assert place.number == 40
    places.gets = 0
    for number in range(40, -1, -1):
        assert a.shared._ancestry.place(space, key_of(chain, number)) == (key_of(chain, 0), number)
    assert places.gets < 41 * (ancestry.NOTED_EVERY + 2)
    for number in range(41, 400):
        assert a.shared._ancestry.note(space, key_of(chain, number), key_of(chain, number - 1)) is not None
    a.check()
    await a.close()


@played
async def test_a_flush_of_a_prefix_does_not_believe_what_a_client_said_of_a_window(tmp_path: Path) -> None:
    """A client may name any block as the one before a window's. The bucket of a flush is that of the chain."""
    store, chain, root = MemoryStore(), chain_of("x", 4), chain_of("another", 1)
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    a.store(a.namespace(window_blocks=1), root + key_of(chain, 0))
    await a.sent()
    b.store(b.namespace(), chain)
    await b.sent()
    assert await a.load([a.namespace()], chain) == 4
    assert await a.flush(key_of(chain, 0))
    b.forget_dram()
    assert [await one.load([one.namespace()], chain) for one in (a, b)] == [0, 0]
    for one in (a, b):
        one.check()
        await one.close()


@played
async def test_a_root_is_sought_for_a_limited_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ancestry, "MAX_WALK", 30)
    a = host(MemoryStore(), tmp_path, "a")
    spaces, chain = [a.namespace(), a.namespace(tp_rank=1)], chain_of("x", 31)
    for space in spaces:
        a.store(space, chain)
    root_of = a.shared._ancestry.root_of
    assert root_of(spaces, key_of(chain, 14)) == root_of(spaces[:1], key_of(chain, 29)) == key_of(chain, 0)
    assert root_of(spaces, key_of(chain, 15)) is None
    assert root_of(spaces, key_of(chain, 30)) is None
    assert root_of([a.namespace(window_blocks=1)], key_of(chain, 0)) is None
    other = a.namespace(tp_rank=2)
    a.store(other, chain_of("another", 1) + key_of(chain, 0))
    assert root_of([*spaces, other], key_of(chain, 0)) is None, "somebody has made up a chain"
    await a.close()
