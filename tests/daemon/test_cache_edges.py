"""Edge cases of the cache: leases, pins, and the time that the event loop is held."""

from __future__ import annotations

import pytest
from cache_rig import FRAME_BYTES, CacheRig
from chains import chain_of

from tiercache.daemon.tiers.dram import pins
from tiercache.daemon.tiers.dram.leases import Owner
from tiercache.protocol.messages import BlockState, CommitState


def test_pins_set_again_and_again_leave_nothing_behind() -> None:
    h = CacheRig()
    namespace = h.space()
    h.store(namespace, chain_of(1, 2))
    for _ in range(20_000):
        assert h.cache.pin([namespace], chain_of(1, 2), ttl_s=7 * 86400) == 2
    assert len(h.cache.reads._deadlines) < 2000
    h.now_s += 8 * 86400
    h.cache.expire()
    assert h.cache.reads.pins.leases == {}
    h.check()


def test_there_are_so_many_pins_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "MAX_PINS", 2)
    h = CacheRig(pin_share=1.0)
    namespace = h.space()
    for tag in (1, 2, 3):
        h.store(namespace, chain_of(tag, 1))
    assert [h.cache.pin([namespace], chain_of(tag, 1), 10) for tag in (1, 2, 3)] == [1, 1, 0]
    assert h.cache.pin([namespace], chain_of(1, 1), 20) == 1, "setting a pin again adds none"
    h.check()


def test_leases_still_end_in_time_after_a_sweep() -> None:
    h = CacheRig()
    namespace = h.space()
    h.store(namespace, chain_of(1, 1))
    short = h.cache.match(h.owner, [namespace], chain_of(1, 1), 10).lease
    long = h.cache.match(h.owner, [namespace], chain_of(1, 1), 10).lease
    assert short is not None
    assert long is not None
    for _ in range(3000):
        h.cache.reads.renew(long, 100)
    h.now_s = 11
    h.cache.expire()
    assert list(h.cache.reads.leases) == [long.lease_id]
    h.now_s = 101
    h.cache.expire()
    assert h.cache.reads.leases == {}
    h.check()


def test_a_lease_that_was_renewed_outlives_its_first_deadline_and_is_no_strangers() -> None:
    h = CacheRig()
    namespace = h.space()
    h.store(namespace, chain_of(1, 1))
    lease = h.cache.match(h.owner, [namespace], chain_of(1, 1), 10).lease
    assert lease is not None
    assert not h.cache.reads.hold(Owner(b"b" * 16), lease.lease_id)
    assert h.cache.reads.hold(Owner(h.owner.instance), lease.lease_id)
    h.cache.reads.renew(lease, 100)
    h.now_s = 11
    h.cache.expire()
    assert not lease.over
    h.now_s = 101
    h.cache.expire()
    assert lease.over
    h.check()


def test_a_pin_that_is_cut_short_keeps_whole_windows_only() -> None:
    h = CacheRig(pin_share=0.5)
    window, keys = h.space(window_blocks=2), chain_of(1, 6)
    for number in (4, 5):
        h.store(window, keys[16 * number : 16 * number + 16])
    assert h.cache.match(h.owner, [window], keys, 0).dram == 6
    assert h.cache.pin([window], keys, ttl_s=10) == 0
    h.check()
    h.store(window, keys[16:48])
    assert h.cache.pin([window], keys, ttl_s=10) == 3
    h.check()


def test_a_list_that_is_no_chain_pins_nothing() -> None:
    h = CacheRig(pin_share=1.0)
    first, second, keys = h.space(), h.space(rank=1), chain_of(1, 3)
    h.store(first, keys)
    broken = keys[:16] + chain_of(2, 1) + keys[32:]
    h.store(second, broken[:32])
    assert h.cache.match(h.owner, [first, second], broken, 10).lease is None
    assert h.cache.pin([first, second], broken, 10) == 0
    h.check()


def test_a_lease_on_a_window_names_no_frame_that_it_does_not_hold() -> None:
    h = CacheRig()
    window, keys = h.space(window_blocks=2), chain_of(1, 5)
    h.store(window, keys)
    lease = h.cache.match(h.owner, [window], keys, 10).lease
    assert lease is not None
    assert [len(h.cache.reads.frames(lease, window, first, 5)) for first in range(6)] == [0, 0, 0, 2, 1, 0]
    # Room for others is made from frames that the lease does not hold: 8 frames, 2 of them held.
    got = h.cache.reserve(h.owner, window, b"", chain_of(2, 8), 10)
    assert got.states.count(BlockState.FRAME) == 6
    assert h.cache.reads.release(h.owner, lease.lease_id)
    h.check()


def test_a_region_with_blocks_on_their_way_in_is_not_emptied() -> None:
    h = CacheRig(regions=1)
    small, large = h.space(), h.space(rank=1, block_bytes=8 * FRAME_BYTES)
    h.store(small, chain_of(1, 3))
    writing = h.cache.reserve(h.owner, small, b"", chain_of(2, 1), 10)
    assert h.cache.reserve(h.owner, large, b"", chain_of(3, 1), 10).states == [BlockState.NONE]
    h.cache.work()
    assert h.cache.counters.regions_drained == 0
    assert h.cache.writes.commit(h.owner, writing.lease_id, [0]) == [CommitState.VISIBLE]
    h.cache.reserve(h.owner, large, b"", chain_of(3, 1), 10)
    while h.cache.work():
        pass
    assert h.cache.counters.regions_drained == 1
    assert h.cache.reserve(h.owner, large, b"", chain_of(3, 1), 10).states == [BlockState.FRAME]
    h.check()


def test_a_region_in_which_a_pinned_chain_begins_is_not_emptied() -> None:
    """Only the chain's last block is pinned itself, and it is in another region."""
    h = CacheRig(regions=2, pin_share=1.0)
    small, large = h.space(), h.space(rank=1, block_bytes=8 * FRAME_BYTES)
    h.store(small, chain_of(9, 1))  # the coldest one, in the first region
    h.store(small, chain_of(1, 12))
    assert h.cache.pin([small], chain_of(1, 12), ttl_s=60) == 12
    for _ in range(10):
        h.cache.reserve(h.owner, large, b"", chain_of(3, 1), 10)
        h.cache.work()
    assert len(h.cache.reads.pins.leases) == 1
    assert h.cache.match(h.owner, [small], chain_of(1, 12), 0).dram == 12
    h.check()
    h.now_s += 61
    h.cache.expire()
    h.check()
    for _ in range(10):
        h.cache.reserve(h.owner, large, b"", chain_of(3, 1), 10)
        h.cache.work()
    assert h.cache.counters.regions_drained == 1
    h.check()


def test_a_flush_revokes_every_lease_below_it_and_no_other() -> None:
    h = CacheRig(region_bytes=2100 * FRAME_BYTES)
    namespace, keys = h.space(), chain_of(1, 2000)
    for first in range(0, 2000, 500):
        h.store(namespace, keys[16 * first : 16 * (first + 500)], parent=keys[16 * (first - 1) : 16 * first])
    other = chain_of(2, 50)
    h.store(namespace, other)
    leases = [h.cache.match(h.owner, [namespace], keys[: 16 * (1000 + n)], 10).lease for n in range(500)]
    kept = h.cache.match(h.owner, [namespace], other, 10).lease
    assert h.cache.flush_dram([namespace.number], keys[16 * 999 : 16 * 1000])[0] == 1001
    assert kept is not None
    assert h.cache.reads.release(h.owner, kept.lease_id)
    assert all(lease is not None and not h.cache.reads.release(h.owner, lease.lease_id) for lease in leases)
    h.check()


def test_flushes_of_several_namespaces_take_everything_with_them() -> None:
    h = CacheRig(regions=2)
    spaces = [h.space(rank=rank) for rank in range(3)]
    pending = []
    for namespace in spaces:
        h.store(namespace, chain_of(1, 2))
        pending.append(h.cache.reserve(h.owner, namespace, chain_of(1, 2)[-16:], chain_of(2, 1), 10).lease_id)
    assert h.cache.flush_dram([spaces[0].number, spaces[1].number], b"") == (4, False)
    assert [h.cache.match(h.owner, [namespace], chain_of(1, 2), 0).dram for namespace in spaces] == [0, 0, 2]
    states = [h.cache.writes.commit(h.owner, lease, [0]) for lease in pending]
    assert states == [[CommitState.DROPPED], [CommitState.DROPPED], [CommitState.VISIBLE]]
    h.check()


@pytest.mark.parametrize("asked", [True, False])
def test_a_growing_lease_is_revoked_for_what_has_landed_for_it(asked: bool) -> None:
    """The lease pins its newest block and the end of what it began with; either may be flushed alone."""
    h = CacheRig()
    space, keys = h.space(), chain_of(1, 4)
    h.store(space, keys[:32])
    lease = h.cache.match(h.owner, [space], keys, 10).lease
    assert lease is not None
    lease.keys = keys
    for _ in h.cache.reads.growing.rise(lease, 4):
        pass
    h.store(space, keys[32:48], keys[16:32])
    h.cache.reads.growing.grow(lease)
    assert (lease.blocks, lease.target) == (3, 4)
    assert h.cache.check_integrity() == []
    h.cache.space.index.drop(space.table.get(keys[32:48]))
    if asked:  # the lease's end is noticed when it is used, else in the background
        assert h.cache.reads.find(h.owner, lease.lease_id) is None
    while h.cache.work():
        pass
    assert lease.over
    assert not h.cache.reads.release(h.owner, lease.lease_id)
    assert h.cache.check_integrity() == []
    assert h.cache.space.allocator.used_bytes == 2 * space.size_class.frame_bytes
