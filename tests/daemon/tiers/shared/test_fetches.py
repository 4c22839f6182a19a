"""What a host finds in the store: what others stored for it to read, as far as it has room."""

from __future__ import annotations

from pathlib import Path

import pytest
from chains import chain_of
from host_rig import host
from memory_store import MemoryStore
from played import played

pytestmark = pytest.mark.usefixtures("nothing_is_missing_for_long")


@played
async def test_what_a_host_may_not_read_it_cannot_name(tmp_path: Path) -> None:
    store = MemoryStore()
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    other_key = host(store, tmp_path, "c", secret=bytes(32))
    other_deployment = host(store, tmp_path, "d", deployment="staging")
    plain = host(store, tmp_path, "e", secret=None)
    chain = chain_of("x", 8)
    a.store(a.namespace(), chain)
    await a.sent()
    for changed in (
        {"tp_rank": 1},
        {"dtype": "bfloat16"},
        {"layout": "m"},
        {"extra": {"tenant": "other"}},
        {"quantization": "fp8"},
    ):
        assert await b.load([b.namespace(**changed)], chain) == 0, changed
    for stranger in (other_key, other_deployment, plain):
        assert await stranger.load([stranger.namespace()], chain) == 0
    assert b.shared.source.tally.bad_blocks == 0, "they were not even read"
    assert await b.load([b.namespace()], chain) == 8
    for one in (a, b, other_key, other_deployment, plain):
        await one.close()


@played
async def test_a_prompt_larger_than_dram(tmp_path: Path) -> None:
    """What has room arrives; the rest is a miss, and nothing hangs."""
    store = MemoryStore()
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b", regions=1)
    chain = chain_of("x", 700)
    a.store(a.namespace(), chain)
    await a.sent()
    space = b.namespace()
    assert 0 < await b.load([space], chain) <= 512
    # All of DRAM is being read by another client: there is no room at all.
    held = b.cache.match(b.owner, [space], chain[: 512 * 16], 60.0, promote=True).lease
    assert held is not None
    other = chain_of("y", 20)
    a.store(a.namespace(), other)
    await a.sent()
    assert await b.load([space], other) <= 512 - held.blocks
    b.cache.reads.release(b.owner, held.lease_id)
    await b.until(lambda: b.below.settled)
    for one in (a, b):
        one.check()
        await one.close()
