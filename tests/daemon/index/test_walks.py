"""Long chains beside what is being unlinked: the walk up to their root is taken in slices, and right in between."""

from __future__ import annotations

import pytest
from cache_rig import FRAME_BYTES, CacheRig, fill, finish

from tiercache.daemon.index import walks
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.protocol.messages import KEY_BYTES

BLOCKS = 3000


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> tuple[CacheRig, Namespace, bytes]:
    """A long chain beside another one that is being unlinked."""
    monkeypatch.setattr(walks, "WALKED_AT_ONCE", 100)
    h = CacheRig(region_bytes=3 * BLOCKS * FRAME_BYTES)
    namespace = h.space()
    keys, other = fill(h, namespace, 1, BLOCKS), fill(h, namespace, 2, BLOCKS)
    h.cache.flush_dram([namespace.number], other[:KEY_BYTES])
    assert namespace.table.unlinking
    return h, namespace, keys


@pytest.mark.parametrize("missing", [0, 1, 700])
def test_the_walk_up_a_long_chain_takes_slices(beside: tuple[CacheRig, Namespace, bytes], missing: int) -> None:
    h, namespace, keys = beside
    steps, slices = h.cache.reads.runs.peek([namespace], keys + bytes(range(16)) * missing), 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found = end.value
            break
        slices += 1
        h.check()
    assert found == (BLOCKS, 0, 0)
    assert slices >= BLOCKS // 100
    finish(h)


@pytest.mark.parametrize("what", ["all", "first", "middle", "last", "store", "unlinked"])
@pytest.mark.parametrize("after", [1, 5, 20])
def test_what_happens_between_two_slices_counts(
    beside: tuple[CacheRig, Namespace, bytes], what: str, after: int
) -> None:
    h, namespace, keys = beside
    steps = h.cache.reads.runs.peek([namespace], keys)
    for _ in range(after):
        next(steps)
    places = {"first": 0, "middle": BLOCKS // 2, "last": BLOCKS - 1}
    if what == "unlinked":
        while h.cache.work():
            pass
    elif what == "store":
        h.store(namespace, bytes(range(16)))
    else:
        place = places.get(what)
        key = b"" if place is None else keys[KEY_BYTES * place : KEY_BYTES * (place + 1)]
        h.cache.flush_dram([namespace.number], key)
    h.check()
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found = end.value[0]
            break
    h.check()
    assert found == {"all": 0, **places}.get(what, BLOCKS)
    assert h.cache.match(h.owner, [namespace], keys, 0).dram == found
    finish(h)
    assert not h.cache.space.index.walked_from


def test_a_walk_that_is_given_up_leaves_no_pin(beside: tuple[CacheRig, Namespace, bytes]) -> None:
    h, namespace, keys = beside
    steps = h.cache.reads.runs.peek([namespace], keys)
    next(steps)
    assert h.cache.space.index.walked_from
    steps.close()
    assert not h.cache.space.index.walked_from
    finish(h)
