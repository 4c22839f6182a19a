"""What is dropped takes all that hangs below it along: in slices, but out of sight at once."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from cache_at_once import CacheAtOnce
from cache_rig import FRAME_BYTES, CacheRig, fill, finish
from chains import chain_of

from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.tiers.dram.leases import ReadLease
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.lower_tier import NoTierBelow
from tiercache.protocol.messages import BlockState, CommitState


def deep() -> tuple[CacheRig, Namespace, bytes]:
    """A chain that takes several slices to unlink."""
    h = CacheRig(region_bytes=6000 * FRAME_BYTES)
    namespace = h.space()
    return h, namespace, fill(h, namespace, 1, 5000)


@pytest.mark.parametrize("slices", [0, 2, 100])
def test_nothing_is_published_below_what_is_being_unlinked(slices: int) -> None:
    h, namespace, keys = deep()
    writing = h.cache.reserve(h.owner, namespace, keys[-16:], chain_of(2, 3), 10)
    assert writing.states == [BlockState.FRAME] * 3
    h.cache.flush_dram([namespace.number], keys[:16])
    for _ in range(slices):
        h.cache.work()
    assert bool(namespace.table.unlinking) is (slices < 100)
    assert h.cache.writes.commit(h.owner, writing.lease_id, [0, 1, 2]) == [CommitState.DROPPED] * 3
    assert h.cache.match(h.owner, [namespace], keys + chain_of(2, 3), 10).dram == 0
    assert all(namespace.table.get(chain_of(2, 3)[16 * n : 16 * n + 16]) < 0 for n in range(3))
    finish(h)
    assert h.cache.space.allocator.used_bytes == 0


def test_nothing_is_stored_below_what_is_being_unlinked() -> None:
    h, namespace, keys = deep()
    h.cache.flush_dram([namespace.number], keys[:16])
    assert namespace.table.get(keys[-16:]) >= 0
    got = h.cache.reserve(h.owner, namespace, keys[-16:], chain_of(2, 3), 10)
    assert h.cache.writes.commit(h.owner, got.lease_id, [0, 1, 2]) == [CommitState.DROPPED] * 3
    finish(h)


class Rising(NoTierBelow):
    """A tier below that has everything, and promotes nothing by itself."""

    tiers = ("fake",)

    def length(self, namespace: Namespace, keys: bytes, limit: int) -> int:
        return limit

    def lookup(self, namespace: Namespace) -> Callable[[bytes], bool] | None:
        return lambda key: True


def growing(window_blocks: int) -> tuple[CacheRig, Namespace, bytes, ReadLease]:
    """A lease on 8 blocks: some were there, and others have been promoted since."""
    h = CacheRig(regions=4)
    h.cache = CacheAtOnce(lambda: h.now_s, below=Rising())
    for region_id in range(4):
        h.cache.space.allocator.add_region(region_id, 8 * FRAME_BYTES)
    namespace, keys = h.space(window_blocks=window_blocks), chain_of(1, 8)
    h.store(namespace, keys[:64])
    lease = h.cache.match(h.owner, [namespace], keys, 10, promote=True).lease
    assert lease is not None
    h.store(namespace, keys[64:96], keys[48:64])
    h.cache.reads.growing.grow(lease)
    assert lease.target == 8
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


def test_a_growing_lease_stays_when_others_are_flushed() -> None:
    h, namespace, _, lease = growing(8)
    h.store(namespace, chain_of(2, 4))
    h.cache.flush_dram([namespace.number], chain_of(2, 1))
    assert h.cache.reads.release(h.owner, lease.lease_id)
    finish(h)


@pytest.mark.parametrize("whole_namespace", [True, False])
def test_a_lease_that_was_whole_a_moment_ago_is_not_believed_after_a_drop(whole_namespace: bool) -> None:
    h, namespace, keys = deep()
    other = fill(h, namespace, 2, 100)
    lease = h.cache.match(h.owner, [namespace], other, 10).lease
    assert lease is not None
    h.cache.space.index.drop(namespace.table.get(keys[:16]))  # from here on some blocks are being unlinked
    assert h.cache.reads.find(h.owner, lease.lease_id) is lease
    if whole_namespace:
        h.cache.space.index.drop_table(namespace.table)
    else:
        h.cache.space.index.drop(namespace.table.get(other[:16]))
    assert h.cache.match(h.owner, [namespace], other, 0).dram == 0
    assert h.cache.reads.find(h.owner, lease.lease_id) is None
    finish(h)


@pytest.fixture(params=["alone", "in a run"])
def evict(request: pytest.FixtureRequest) -> Callable[[Index, int], None]:
    """Either way to evict a block."""

    def one(index: Index, entry: int) -> None:
        if request.param == "alone":
            index.evict(entry)
        else:
            assert index.evict_run(entry, 1) == 1

    return one


def test_the_row_of_a_dropped_block_may_be_anothers_at_once(evict: Callable[[Index, int], None]) -> None:
    h, namespace, keys = deep()
    index = h.cache.space.index
    h.cache.space.tails.give_up()
    index.drop(namespace.table.get(keys[:16]))
    leaf = namespace.table.get(keys[-16:])
    assert not index.attached(leaf)
    evict(index, leaf)
    h.store(namespace, chain_of(2, 1))
    assert namespace.table.get(chain_of(2, 1)) == leaf
    assert h.cache.match(h.owner, [namespace], chain_of(2, 1), 0).dram == 1
    finish(h)


def test_an_evicted_entry_is_no_longer_known_as_attached(evict: Callable[[Index, int], None]) -> None:
    """Its entry may be reused for a block below what is unlinked next."""
    h, namespace, keys = deep()
    index = h.cache.space.index
    other = fill(h, namespace, 2, 3)
    h.cache.space.tails.give_up()
    index.drop(namespace.table.get(keys[:16]))
    evicted, doomed = namespace.table.get(other[-16:]), namespace.table.get(keys[-16:])
    assert index.attached(evicted)
    frame = index.frame[evicted]
    evict(index, evicted)
    assert index.insert(namespace.table, chain_of(3, 1), doomed, frame) == evicted
    assert not index.attached(evicted)


def test_no_other_session_holds_a_lease_that_has_lost_a_block() -> None:
    h = CacheRig()
    namespace = h.space()
    h.store(namespace, chain_of(1, 3))
    lease = h.cache.match(h.owner, [namespace], chain_of(1, 3), 10).lease
    assert lease is not None
    worker = type(h.owner)(h.owner.instance)
    assert h.cache.reads.hold(worker, lease.lease_id)
    h.cache.reads.release(worker, lease.lease_id)
    h.cache.space.index.drop(namespace.table.get(chain_of(1, 1)))
    assert not h.cache.reads.hold(worker, lease.lease_id)
    assert h.cache.reads.find(h.owner, lease.lease_id) is None
    finish(h)


@pytest.mark.parametrize("seed", range(6))
def test_whether_many_are_attached_is_what_each_of_them_says(seed: int) -> None:
    chance = random.Random(seed)
    h = CacheRig(region_bytes=3000 * FRAME_BYTES)
    spaces = [h.space(), h.space(rank=1), h.space(rank=2, window_blocks=400), h.space(rank=3, window_blocks=400)]
    index, pinned = h.cache.space.index, list[int]()
    for tag, namespace in enumerate(spaces):
        keys = fill(h, namespace, tag, 500)
        places = chance.sample(range(0, len(keys), 16), 20 if namespace.table.windowed else 2)
        pinned += [namespace.table.get(keys[at : at + 16]) for at in places]
    for entry in pinned:
        index.pin(entry)
    answers = set()
    for _ in range(12):
        some = chance.sample(pinned, chance.randrange(1, 12))
        answers.add(index.all_attached(some))
        assert index.all_attached(some) == all(map(index.attached, some))
        tag = chance.randrange(len(spaces))
        entry = spaces[tag].table.get(chain_of(tag, 500)[16 * chance.randrange(500) :][:16])
        if chance.random() < 0.1:
            index.drop_table(spaces[tag].table)
        elif entry != NO_ENTRY:
            index.drop(entry)
        index.unlink_slice(chance.choice((0, 3, 100)))
    assert answers == {False, True}
    for entry in pinned:
        index.unpin(entry)
    finish(h)
