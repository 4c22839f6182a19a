"""Nothing that a client can ask for takes more than a bounded number of steps in one go: counted, not timed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest
import zmq
from cache_at_once import CacheAtOnce
from cache_rig import FRAME_BYTES, CacheRig, counted, fill, finish
from chains import chain_of

from tiercache.daemon.cache import CacheLimits
from tiercache.daemon.index.index import Index
from tiercache.daemon.policies.fresh_stores import FreshStores
from tiercache.daemon.requests import router, service
from tiercache.daemon.requests.unsent import Unsent
from tiercache.daemon.tiers.dram.leases import Deadlines, ReadLease
from tiercache.daemon.tiers.dram.reads import Reads
from tiercache.daemon.tiers.dram.space import ROOM_STEPS, SLICE, Space
from tiercache.errors import RequestRefused
from tiercache.protocol.messages import BlockState

BLOCKS = 6000


def test_a_store_unlinks_a_part_of_what_others_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    h = CacheRig(regions=2, region_bytes=BLOCKS // 2 * FRAME_BYTES)
    small, large = h.space(), h.space(rank=1, block_bytes=2 * FRAME_BYTES)
    fill(h, small, 1, BLOCKS)
    unlinked = counted(monkeypatch, Index, "_unlink")
    h.cache.flush_dram([small.number], b"")
    unlinked()
    assert h.cache.reserve(h.owner, large, b"", chain_of(2, 1), 10).states == [BlockState.NONE]
    assert 0 < unlinked() <= ROOM_STEPS
    assert small.table.unlinking
    finish(h)
    assert h.cache.reserve(h.owner, large, b"", chain_of(2, 1), 10).states == [BlockState.FRAME]


def test_a_store_into_what_was_flushed_finds_room_at_once() -> None:
    h = CacheRig(region_bytes=BLOCKS * FRAME_BYTES)
    namespace = h.space()
    fill(h, namespace, 1, BLOCKS)
    h.cache.flush_dram([namespace.number], b"")
    h.store(namespace, chain_of(2, 500))
    finish(h)


def test_a_store_under_a_quota_evicts_a_part_of_many_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    h = CacheRig(region_bytes=BLOCKS * FRAME_BYTES, regions=2, quota={"t": BLOCKS * FRAME_BYTES})
    small, large = h.space(tenant="t"), h.space(rank=1, tenant="t", block_bytes=BLOCKS * FRAME_BYTES)
    fill(h, small, 1, BLOCKS)
    evicted = 0
    for _ in range(20):
        states = h.cache.reserve(h.owner, large, b"", chain_of(2, 1), 10).states
        gone = h.cache.counters.evicted_blocks - evicted
        evicted += gone
        assert gone <= ROOM_STEPS
        if states == [BlockState.FRAME]:
            break
    assert states == [BlockState.FRAME]
    assert evicted == BLOCKS
    finish(h)


def test_a_flush_looks_at_a_part_of_the_leases_and_revokes_all_that_lost_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h = CacheRig(region_bytes=4000 * FRAME_BYTES)
    namespace = h.space()
    keys, other = fill(h, namespace, 1, 3000), fill(h, namespace, 2, 10)
    lost = [h.cache.match(h.owner, [namespace], keys[: 16 * (n + 1)], 10).lease for n in range(1500)]
    kept = [h.cache.match(h.owner, [namespace], other, 10).lease for _ in range(1500)]
    attached = counted(monkeypatch, Index, "attached")
    h.cache.flush_dram([namespace.number], keys[:16])
    assert attached() <= SLICE
    assert all(lease is not None and not h.cache.reads.release(h.owner, lease.lease_id) for lease in lost[:50])
    assert all(lease is not None and h.cache.reads.release(h.owner, lease.lease_id) for lease in kept[:50])
    ended = counted(monkeypatch, Reads, "end")
    while h.cache.work():
        assert ended() <= SLICE
    h.check()
    assert set(h.cache.reads.leases) == {lease.lease_id for lease in kept[50:] if lease is not None}


def test_what_hangs_below_a_dropped_block_is_out_of_sight_while_it_is_being_unlinked() -> None:
    h = CacheRig(region_bytes=BLOCKS * FRAME_BYTES)
    namespace = h.space()
    keys = fill(h, namespace, 1, 5000)
    lease = h.cache.match(h.owner, [namespace], keys, 10).lease
    assert lease is not None
    h.cache.flush_dram([namespace.number], keys[16 * 100 : 16 * 101])
    assert namespace.table.unlinking
    for asked, found in ((5000, 100), (101, 100), (100, 100), (50, 50)):
        assert h.cache.match(h.owner, [namespace], keys[: 16 * asked], 0).dram == found
        assert h.cache.peek([namespace], keys[: 16 * asked])[0] == found
    assert h.cache.reads.find(h.owner, lease.lease_id) is None
    finish(h)
    assert not h.cache.reads.leases


def test_a_region_of_very_many_frames_is_looked_at_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region is checked before it is emptied for frames of another size."""
    monkeypatch.setattr("tiercache.daemon.tiers.dram.space.LOOK_AT_ONCE", 512)
    h = CacheRig(region_bytes=BLOCKS * FRAME_BYTES)
    small, large = h.space(), h.space(rank=1, block_bytes=2 * FRAME_BYTES)
    fill(h, small, 1, BLOCKS)
    h.cache.space.tails.give_up()
    looked = counted(monkeypatch, Space, "_look_slice")
    assert h.cache.reserve(h.owner, large, b"", chain_of(2, 1), 10).states == [BlockState.NONE]
    assert looked() == 1, "a part of the work, within the store"
    assert h.cache.counters.regions_drained == 0
    finish(h)
    assert looked() >= BLOCKS // 512 - 1
    assert h.cache.counters.regions_drained == 1
    assert h.cache.reserve(h.owner, large, b"", chain_of(2, 1), 10).states == [BlockState.FRAME]


def test_notes_on_deadlines_are_swept_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    leases = {number: ReadLease(number, [], b"", 0, [], 0.0, 0.0) for number in range(5000)}
    deadlines = Deadlines(leases)
    popped = 0

    class Counted(list[tuple[float, int]]):
        def pop(self, *at: Any) -> tuple[float, int]:
            nonlocal popped
            popped += 1
            return super().pop(*at)

    for turn in range(20):
        for number, lease in leases.items():
            lease.deadline_s = 1000.0 * turn + number
            if deadlines._old and type(deadlines._old) is list:
                deadlines._old = Counted(deadlines._old)
            before = popped
            deadlines.add(lease.deadline_s, number)
            assert popped - before <= 8
    assert popped > 0
    assert len(deadlines) <= 4 * len(leases) + 2048
    assert set(deadlines.due(19_099.0)) >= set(range(100))
    assert set(deadlines.due(1e9)) >= set(range(100, 5000))


def test_what_is_due_is_found_while_notes_are_swept() -> None:
    leases = {number: ReadLease(number, [], b"", 0, [], 0.0, float(number)) for number in range(100)}
    deadlines = Deadlines(leases)
    for turn in range(12):
        for number, lease in leases.items():
            deadlines.add(lease.deadline_s if turn % 2 else 1e9, number)
    assert set(deadlines.due(49.5)) == set(range(50))
    assert set(deadlines.due(99.5)) == set(range(50, 100))


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_large_blocks_do_not_push_all_small_ones_out_of_the_window_at_once(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setattr("tiercache.daemon.policies.fresh_stores.LET_OUT", 16)
    cache = CacheAtOnce(lambda: 0.0, CacheLimits(policy=policy))
    for region_id in range(2):
        cache.space.allocator.add_region(region_id, BLOCKS * FRAME_BYTES)
    h = CacheRig()
    h.cache = cache
    small, large = h.space(), h.space(rank=1, block_bytes=512 * FRAME_BYTES)
    for number in range(BLOCKS // 10):
        h.store(small, number.to_bytes(16, "big"))
    cache.space.tails.give_up()
    let_out = counted(monkeypatch, FreshStores, "_let_out")
    for number in range(4):
        h.store(large, bytes([9]) * 15 + bytes([number]))
        assert let_out() <= 2 * 16, "for small ones, and for large ones"
    left = []
    for number in range(100):
        h.store(small, bytes([8]) + number.to_bytes(15, "big"))
        left.append(let_out())
    assert max(left) <= 16
    assert sum(left) > 400, "blocks leave the window as others are stored"
    finish(h)


def test_many_requests_at_once_are_served_a_few_milliseconds_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon still handles a session's last requests when the session ends, up to a batch."""
    now_ns, served = 0, 0
    monkeypatch.setattr(router, "time", SimpleNamespace(perf_counter_ns=lambda: now_ns))

    def handle(identity: bytes, header: bytes, parts: object) -> None:
        nonlocal now_ns, served
        now_ns, served = now_ns + router.BATCH_NS // 4, served + 1

    async def flood() -> list[int]:
        nonlocal served
        endpoint = f"ipc://{tmp_path}/control"
        ours = router.Router(endpoint, handle, lambda session, why: None, Unsent(), 10)
        sender = zmq.Context.instance().socket(zmq.DEALER)
        sender.setsockopt(zmq.SNDHWM, 0)  # this thread receives too, so it must never wait until it can send
        sender.connect(endpoint)
        while served < 1:  # the handshake is complete
            sender.send(b"hello")
            time.sleep(0.01)
            ours.drain(1)
        while not ours.drain(router.DRAIN_REQUESTS):
            pass
        counts = []
        for limit in (router.BATCH, 3):
            empty = True
            while empty:  # the requests arrived more slowly than they were served
                for _ in range(100):
                    sender.send(b"again")
                served = 0
                empty = ours.drain(limit)
            counts.append(served)
        ours.close()
        sender.close(0)
        return counts

    assert asyncio.run(flood()) == [4, 3]


@pytest.mark.parametrize("start", [b"\x96", b"\xdc\0\x06", b"\xdd\0\0\0\x06"], ids=["fix", "16", "32"])
def test_a_spec_of_megabytes_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    """Building its names would hold the loop for a tenth of a second."""
    monkeypatch.setattr(service, "_decode", lambda header: pytest.fail("it was built"))
    header = start + msgpack.packb("register_namespace") + bytes(service.MAX_REGISTER_BYTES)
    with pytest.raises(RequestRefused, match="the spec is longer than 8192 bytes"):
        service.Service._decode(cast(service.Service, None), header)
