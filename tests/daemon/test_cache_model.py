"""The cache against a model that knows only what a cache may and may not do."""

from __future__ import annotations

import random

import pytest
from cache_rig import SmallCache, branch, key

from tiercache.daemon.policies import POLICIES
from tiercache.daemon.tiers.dram.leases import Owner
from tiercache.protocol.messages import BlockState, CommitState


def test_a_chain_is_found_as_far_as_it_goes() -> None:
    h = SmallCache()
    ns = h.space()
    h.store(ns, branch(1, 2, 3))
    assert h.length(ns, branch(1, 2, 3, 4)) == 3
    assert h.length(ns, branch(1, 2, 9)) == 2
    assert h.length(ns, branch(5)) == 0
    assert h.length(h.space(rank=1), branch(1, 2, 3)) == 0


def test_leaves_go_first_and_the_recently_used_last() -> None:
    h = SmallCache(frames=7)
    ns = h.space()
    h.store(ns, branch(1, 1, 1))
    h.store(ns, branch(2, 2, 2))
    h.store(ns, branch(4))
    h.length(ns, branch(1, 1, 1))
    h.store(ns, branch(3, 3))
    assert (h.length(ns, branch(1, 1, 1)), h.length(ns, branch(2, 2, 2))) == (3, 1)


def test_room_for_a_child_is_never_made_of_its_ancestors() -> None:
    h = SmallCache(frames=3)
    ns = h.space()
    h.store(ns, branch(1, 2, 3))
    states = h.store(ns, key(1, 2, 3, 4), parent=key(1, 2, 3))
    assert states == [BlockState.NONE]
    assert h.length(ns, branch(1, 2, 3)) == 3


def test_children_wait_for_their_parents() -> None:
    h = SmallCache()
    ns = h.space()
    first = h.cache.reserve(h.owner, ns, b"", branch(1), 10)
    second = h.cache.reserve(h.owner, ns, key(1), key(1, 2), 10)
    assert h.cache.writes.commit(h.owner, second.lease_id, [0]) == [CommitState.HELD]
    assert h.length(ns, branch(1, 2)) == 0
    assert h.cache.writes.commit(h.owner, first.lease_id, [0]) == [CommitState.VISIBLE]
    assert h.length(ns, branch(1, 2)) == 2
    h.check()


def test_children_are_dropped_with_an_aborted_parent() -> None:
    h = SmallCache()
    ns = h.space()
    first = h.cache.reserve(h.owner, ns, b"", branch(1), 10)
    second = h.cache.reserve(h.owner, ns, key(1), key(1, 2) + key(1, 2, 3), 10)
    assert h.cache.writes.commit(h.owner, second.lease_id, [0]) == [CommitState.HELD]
    h.cache.writes.abort(h.owner, first.lease_id, finished=True)
    h.check()
    assert h.cache.writes.commit(h.owner, second.lease_id, [1]) == [CommitState.DROPPED]
    h.check()
    assert h.cache.space.allocator.used_bytes == 0


def test_an_expired_writer_keeps_its_frames_in_quarantine_until_it_says_so_or_is_gone() -> None:
    h = SmallCache(frames=2)
    ns = h.space()
    got = h.cache.reserve(h.owner, ns, b"", branch(1, 2), 10)
    h.now_s += 11
    h.cache.expire()
    h.check()
    assert h.cache.writes.unfinished.quarantined_bytes == 8192
    other = Owner(b"b" * 16)
    assert h.cache.reserve(other, ns, b"", branch(7), 10).states == [BlockState.NONE]
    assert h.cache.writes.commit(h.owner, got.lease_id, [0]) == [CommitState.DROPPED]
    assert h.cache.reserve(other, ns, b"", branch(7), 10).states == [BlockState.FRAME]
    h.cache.process_gone(h.owner)
    h.check()
    assert h.cache.writes.unfinished.quarantined_bytes == 0
    assert h.length(ns, branch(1)) == 0


def test_a_lease_holds_its_whole_prefix() -> None:
    h = SmallCache(frames=3)
    ns = h.space()
    h.store(ns, branch(1, 2, 3))
    found = h.cache.match(h.owner, [ns], branch(1, 2, 3), 10)
    assert found.lease is not None
    frames = h.cache.reads.frames(found.lease, ns, 0, 3)
    assert len(set(frames)) == 3
    assert h.store(ns, branch(9)) == [BlockState.NONE]
    assert h.cache.reads.release(h.owner, found.lease.lease_id)
    assert h.store(ns, branch(9)) == [BlockState.FRAME]
    assert not h.cache.reads.release(h.owner, found.lease.lease_id)


def test_a_permuted_list_is_shortened_not_believed() -> None:
    h = SmallCache()
    ns = h.space()
    h.store(ns, branch(1, 2, 3))
    permuted = key(1) + key(1, 2, 3) + key(1, 2)
    found = h.cache.match(h.owner, [ns], permuted, 10)
    assert found.lease is not None
    assert len(h.cache.reads.frames(found.lease, ns, 0, 3)) == 1
    assert h.cache.space.index.invariant_failures > 0


def test_a_flush_revokes_reads_and_drops_writes() -> None:
    h = SmallCache()
    ns = h.space()
    h.store(ns, branch(1, 2, 3))
    found = h.cache.match(h.owner, [ns], branch(1, 2, 3), 10)
    writing = h.cache.reserve(h.owner, ns, key(1, 2, 3), key(1, 2, 3, 4), 10)
    assert h.cache.flush_dram([ns.number], b"")[0] == 3
    assert h.length(ns, branch(1, 2, 3)) == 0
    assert found.lease is not None
    assert not h.cache.reads.release(h.owner, found.lease.lease_id)
    assert h.cache.writes.commit(h.owner, writing.lease_id, [0]) == [CommitState.DROPPED]
    while h.cache.work():
        pass
    h.check()
    assert h.cache.space.allocator.used_bytes == 0


def test_a_flush_by_prefix_takes_descendants_only() -> None:
    h = SmallCache()
    ns = h.space()
    h.store(ns, branch(1, 2, 3))
    h.store(ns, branch(1, 7))
    assert h.cache.flush_dram([ns.number], key(1, 2)) == (2, False)
    assert h.length(ns, branch(1, 2, 3)) == 1
    assert h.length(ns, branch(1, 7)) == 2
    h.check()


def test_windows_need_only_the_blocks_before_the_cut() -> None:
    h = SmallCache(frames=16)
    full, window = h.space(), h.space(window_blocks=2, rank=1)
    keys = branch(1, 2, 3, 4, 5)
    h.store(full, keys)
    for number in (2, 3):
        h.store(window, keys[16 * number : 16 * number + 16], parent=b"x" * 16)
    assert h.cache.match(h.owner, [full, window], keys, 0).dram == 4
    assert h.cache.match(h.owner, [full, window], keys[:48], 0).dram == 0
    assert h.cache.match(h.owner, [full], keys, 0).dram == 5
    found = h.cache.match(h.owner, [full, window], keys, 10)
    assert found.lease is not None
    assert len(h.cache.reads.frames(found.lease, window, 2, 2)) == 2
    assert h.cache.reads.frames(found.lease, window, 0, 2) == []
    h.check()


def test_a_first_tiny_block_does_not_fix_the_frame_size() -> None:
    h = SmallCache(frames=16, regions=2)
    small, large = h.space(block_bytes=100), h.space(block_bytes=40_000, rank=1)
    for number in range(40):
        h.store(small, branch(number))
    for number in range(20):
        h.store(large, branch(number))
        while h.cache.work():
            pass
        h.check()
    assert h.length(large, branch(19)) == 1
    assert h.cache.counters.regions_drained >= 1


def test_a_pinned_region_does_not_starve_a_new_size_class() -> None:
    """The region of the coldest block cannot be emptied, so another region is."""
    h = SmallCache(frames=16, regions=3)
    small, large = h.space(), h.space(block_bytes=40_000, rank=1)
    for number in range(48):
        h.store(small, branch(number))
    assert h.cache.pin([small], branch(5), 1000) == 1  # in the region of the coldest blocks
    for number in range(200):
        if h.store(large, branch(number % 200)) == [BlockState.FRAME]:
            break
        while h.cache.work():
            pass
    assert h.length(large, branch(number)) == 1
    assert h.length(small, branch(5)) == 1


def test_pins_keep_blocks_until_their_time_is_up() -> None:
    h = SmallCache(frames=4)
    ns = h.space()
    h.store(ns, branch(1, 2))
    assert h.cache.pin([ns], branch(1, 2), ttl_s=60) == 2
    assert h.store(ns, branch(5, 6, 7)) == [BlockState.FRAME, BlockState.FRAME, BlockState.NONE]
    h.now_s += 61
    h.cache.expire()
    assert h.cache.reads.pins.bytes == 0
    assert h.store(ns, branch(8, 8, 8)) == [BlockState.FRAME] * 3
    h.check()


HISTORIES = [(policy, seed) for policy in POLICIES for seed in range(12 if policy == "lru" else 3)]


@pytest.mark.parametrize(("policy", "seed"), HISTORIES)
def test_random_histories_stay_consistent(policy: str, seed: int) -> None:
    """Everything at random; after each step the recounts agree, and no frame has two owners."""
    rng = random.Random(seed)
    h = SmallCache(frames=10, regions=3, policy=policy)
    spaces = [h.space(), h.space(block_bytes=9000, rank=1), h.space(window_blocks=2, rank=2)]
    owners = [Owner(bytes([n]) * 16) for n in range(3)]
    reads: list[tuple[Owner, int]] = []
    writes: list[tuple[Owner, int, list[BlockState]]] = []
    for _ in range(400):
        owner, ns = rng.choice(owners), rng.choice(spaces)
        path = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        keys = branch(*path)
        action = rng.randrange(12)
        if action <= 3:
            skip = rng.randrange(len(path))
            parent = keys[16 * (skip - 1) : 16 * skip] if skip else b""
            got = h.cache.reserve(owner, ns, parent, keys[16 * skip :], rng.randrange(1, 20))
            if got.lease_id:
                writes.append((owner, got.lease_id, got.states))
        elif action <= 6 and writes:
            owner, lease, states = writes[rng.randrange(len(writes))]
            numbers = [n for n in range(len(states)) if rng.random() < 0.7]
            h.cache.writes.commit(owner, lease, numbers)
        elif action == 7:
            found = h.cache.match(owner, [ns], keys, rng.randrange(0, 10))
            if found.lease:
                assert len(h.cache.reads.frames(found.lease, ns, found.dram - 1, 1)) == 1
                reads.append((owner, found.lease.lease_id))
        elif action == 8 and reads:
            h.cache.reads.release(*reads.pop(rng.randrange(len(reads))))
        elif action == 9 and writes:
            owner, lease, _ = writes.pop(rng.randrange(len(writes)))
            h.cache.writes.abort(owner, lease, finished=rng.random() < 0.5)
        elif action == 10:
            h.now_s += rng.randrange(4)
            h.cache.expire()
            if rng.random() < 0.3:
                h.cache.process_gone(owner)
            if rng.random() < 0.2:
                h.cache.pin([ns], keys, 5)
        elif action == 11:
            h.cache.flush_dram([ns.number], rng.choice([b"", keys[-16:]]))
            if rng.random() < 0.5:
                h.cache.work()
        h.check()
    for owner in owners:
        h.cache.process_gone(owner)
    h.cache.flush_dram([ns.number for ns in spaces], b"")
    h.now_s += 100
    h.cache.expire()
    while h.cache.work():
        pass
    h.check()
    assert h.cache.space.allocator.used_bytes == 0
