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
from cache_rig import FRAME_BYTES, CacheRig, counted, fill, finish
from chains import chain_of

from tiercache.daemon.index.index import Index
from tiercache.daemon.requests import router, service
from tiercache.daemon.requests.unsent import Unsent
from tiercache.daemon.tiers.dram.leases import Deadlines, ReadLease
from tiercache.daemon.tiers.dram.space import ROOM_STEPS
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
