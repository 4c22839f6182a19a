"""Read leases: growing ones are revoked for what has landed for them, and all that are due are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cache_rig import CacheRig, finish
from chains import chain_of

from tiercache.daemon.tiers.dram.below import TierBelow
from tiercache.daemon.tiers.dram.leases import Deadlines, ReadLease
from tiercache.daemon.tiers.dram.space import Namespace


class Rising(TierBelow):
    """A tier below that has everything, and promotes nothing by itself."""

    tiers = ("fake",)

    def length(self, namespace: Namespace, keys: bytes, limit: int) -> int:
        return limit

    def lookup(self, namespace: Namespace) -> Callable[[bytes], bool] | None:
        return lambda key: True


def growing(window_blocks: int) -> tuple[CacheRig, Namespace, bytes, ReadLease]:
    """A lease on 8 blocks: some were there, and others have been promoted since."""
    h = CacheRig(regions=4, below=Rising())
    namespace, keys = h.space(window_blocks=window_blocks), chain_of(1, 8)
    h.store(namespace, keys[:64])
    lease = h.cache.match(h.owner, [namespace], keys, 10, promote=True).lease
    assert lease is not None
    h.store(namespace, keys[64:96], keys[48:64])
    h.cache.reads.growing.grow(lease)
    assert lease.target == 8
    first = 8 - window_blocks if window_blocks else 0
    assert len(h.cache.reads.frames(lease, namespace, first, 8)) == max(0, 6 - first), "what has landed can be read"
    assert not lease.over
    return h, namespace, keys, lease


@pytest.mark.parametrize(("window_blocks", "flushed"), [(0, 5), (0, 2), (8, 5), (8, 4), (8, 0), (2, 3)])
@pytest.mark.parametrize("complete", [False, True])
def test_a_growing_lease_is_revoked_for_what_has_landed(window_blocks: int, flushed: int, complete: bool) -> None:
    h, namespace, keys, lease = growing(window_blocks)
    h.cache.space.index.drop(namespace.table.get(keys[16 * flushed : 16 * flushed + 16]))
    h.cache.space.index.unlink_slice(100)
    if complete:  # the same keys are stored again, perhaps with other bytes: the lease was given the old ones
        for number in range(8):
            parent = keys[16 * number - 16 : 16 * number] if number else b""
            h.store(namespace, keys[16 * number : 16 * number + 16], parent)
        h.cache.reads.growing.grow(lease)
    assert not h.cache.reads.release(h.owner, lease.lease_id)
    finish(h)


def test_notes_on_renewed_leases_do_not_pile_up_and_all_that_is_due_is_found() -> None:
    leases = {number: ReadLease(number, [], b"", 0, [], 0.0, 0.0) for number in range(2000)}
    deadlines = Deadlines(leases)
    for turn in range(20):
        for number, lease in leases.items():
            lease.deadline_s = 1000.0 * turn + number / 2
            deadlines.add(lease.deadline_s, number)
    assert len(deadlines) <= 4 * len(leases) + 2048
    assert set(deadlines.due(19_049.5)) >= set(range(100))
    assert set(deadlines.due(1e9)) >= set(range(100, 2000))
