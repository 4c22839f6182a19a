"""Faults that serve wrong bytes: equal keys, reused frames, late answers, values that look like nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from chains import chain_of, key_of
from fault_blocks import content, spec_of
from fault_engine import Engine
from fault_peer import Peer
from fault_processes import Child, Daemon
from waiting import wait_until

from tiercache.protocol import messages as m

FRAMES = 16 << 20 >> 12


def healthy(daemon: Daemon) -> None:
    """Check that the daemon's books are right and that no request failed in it."""
    stats = daemon.stats()
    assert stats["health"]["state"] == "ok", stats["health"]
    assert stats["counters"]["invariant_failures"] == 0
    assert stats["counters"]["requests_failed"] == 0, daemon.log()


def test_1_equal_keys_of_two_ranks_never_meet(daemon: Daemon, engine_of: Callable[..., Engine]) -> None:
    keys = chain_of("same tokens", 12)
    ranks = [engine_of(daemon, spec_of(rank=rank)) for rank in range(3)]
    assert ranks[0].store(keys).stored == 12
    assert ranks[1].load(keys) == 0, "what rank 0 stored is no hit for rank 1"
    assert ranks[1].store(keys).stored == 12
    assert [engine.load(keys) for engine in ranks] == [12, 12, 0]
    assert ranks[0].connector.flush() == 12
    assert [engine.load(keys) for engine in ranks] == [0, 12, 0]


def test_1_a_match_over_ranks_is_what_all_of_them_have(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    peer, keys = connect(daemon), chain_of("tp", 8)
    specs = [spec_of(rank=0), spec_of(rank=1)]
    peer.store(specs[0], keys)
    peer.store(specs[1], keys[: 5 * 16])
    numbers = [peer.register(spec) for spec in specs]
    matched = peer.ask(m.Match, namespaces=numbers, keys=keys, ttl_ms=10_000, resolve=8)
    assert matched.dram_blocks == 5
    for spec, packed in zip(specs, matched.frames, strict=True):
        frames = m.unpack_frames(packed)
        assert [peer.read(frame, 4096) for frame in frames] == [content(key_of(keys, n), spec) for n in range(5)]


def test_3_a_chain_longer_than_the_arena_is_a_right_prefix(daemon: Daemon, engine_of: Callable[..., Engine]) -> None:
    spec = spec_of(64 << 10)
    capacity = (16 << 20) // (64 << 10)
    engine = engine_of(daemon, spec, blocks=2 * capacity)
    keys = chain_of("too long", 2 * capacity)
    result = engine.store(keys)
    assert (result.stored, result.dropped) == (capacity, capacity)
    assert engine.load(keys) == capacity
    other = chain_of("another", capacity)
    assert engine.store(other).stored == capacity, "leaves of the old chain make room"
    assert engine.load(other) == capacity
    assert engine.load(keys) == 0
    healthy(daemon)


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "payload"])
def test_3_10_loads_under_hard_eviction_are_right_or_misses(
    daemon: Daemon, start_child: Callable[..., Child], mapped: bool
) -> None:
    """Two processes that together store several arenas a second, each reading what the other writes."""
    settings = {"block_bytes": 256 << 10, "blocks": 48, "map_arena": mapped}
    children = [start_child("engine", daemon, **settings) for _ in range(2)]
    for seed, child in enumerate(children):
        child.tell("churn", seed=seed, seconds=1.8, chains=6, longest=30, flush=True)
    totals = [child.hear(30) for child in children]
    assert all(total["good"] > 0 and total["stored"] > 0 for total in totals), totals
    stats = daemon.stats()
    assert stats["counters"]["evicted_blocks"] > 64
    healthy(daemon)


def test_10_frames_under_a_lease_are_not_given_away(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    spec = spec_of(64 << 10)
    reader, writer = connect(daemon), connect(daemon)
    keys = chain_of("read", 20)
    writer.store(spec, keys)
    matched = reader.match(spec, keys, ttl_ms=30_000, resolve=20)
    held = list(m.unpack_frames(matched.frames[0]))
    given: set[int] = set()
    for number in range(6):
        given.update(writer.store(spec, chain_of(f"pressure {number}", 200)))
    assert len(given) == 256 - 20, "every other frame was reused"
    assert not given & set(held)
    assert [reader.read(frame, 64 << 10) for frame in held] == [content(key_of(keys, n), spec) for n in range(20)]
    assert reader.ask(m.Release, lease=matched.lease).good


def test_10_a_lease_that_lost_a_block_is_not_good(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    spec = spec_of()
    reader, other = connect(daemon), connect(daemon)
    keys = chain_of("flushed", 6)
    other.store(spec, keys)
    lease = reader.match(spec, keys, ttl_ms=30_000).lease
    other.ask(m.Flush, tier="all", namespaces=[], key=key_of(keys, 3))
    assert not reader.ask(m.Release, lease=lease).good
    assert reader.length(spec, keys) == 3


def test_40_payload_under_way_outlives_its_frame(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    """Replies that wait in ZeroMQ are read by it long after the lease is over and the block evicted."""
    spec = spec_of(1 << 20)
    writer = connect(daemon)
    reader = connect(daemon, map_arena=False, receive_hwm=1)
    keys = chain_of("payload", 15)
    writer.store(spec, keys)
    number = reader.register(spec)
    lease = reader.match(spec, keys, ttl_ms=30_000).lease
    posted = [
        (index, reader.post(m.Read, lease=lease, namespace=number, index=index, offset=0, length=1 << 20))
        for index in range(15)
    ]
    wait_until(lambda: writer.stats()["counters"]["payload_bytes_read"] == 15 << 20, "all reads are under way")
    writer.ask(m.Flush, tier="all", namespaces=[], key=b"")
    given = []
    for turn in range(3):  # new owners of every frame that is free
        given += writer.store(spec, chain_of(f"new owner {turn}", 16))
    assert given
    for index, request_id in posted:
        reply, parts = reader.answer_to(request_id)
        assert isinstance(reply, m.Payload)
        assert parts[0] == content(key_of(keys, index), spec), f"block {index} became a new owner's"
    assert not reader.ask(m.Release, lease=lease).good
    # Frames that were still being read come back once they are not.
    wait_until(lambda: len(writer.store(spec, chain_of(time.monotonic(), 16))) == 16, "all frames are back")


def test_14_zeros_are_values(daemon: Daemon, engine_of: Callable[..., Engine], connect: Callable[..., Peer]) -> None:
    """Frame 0, block 0, index 0, offset 0 and a key of zeros are as good as others."""
    peer, spec = connect(daemon), spec_of()
    zero = bytes(16)
    reserved = peer.reserve(spec, zero)
    assert list(m.unpack_frames(reserved.frames)) == [0], "the first frame is number 0"
    peer.fill(spec, zero, reserved)
    assert peer.commit(reserved.lease, [0]) == [m.CommitState.VISIBLE]
    assert list(peer.reserve(spec, zero).states) == [m.BlockState.HAVE]
    assert peer.load(spec, zero) == 1
    engine = engine_of(daemon, spec, map_arena=False)
    assert engine.load(zero) == 1
    assert engine.store(zero) == (0, 1, 0, False)
    assert engine.connector.pin(zero, ttl_s=60) == 1
    peer.store(spec, chain_of("pressure", 512))
    for number in range(2 * FRAMES // 512):
        peer.store(spec, chain_of(number, 512))
    assert engine.load(zero) == 1, "a pin on frame 0 is a pin"
    assert engine.connector.unpin(zero) == 1
    assert engine.connector.flush(key=zero) == 1
    assert engine.load(zero) == 0


def test_14_a_block_of_zeros_is_stored_as_such(daemon: Daemon, engine_of: Callable[..., Engine]) -> None:
    engine, keys = engine_of(daemon, spec_of()), chain_of("zeros", 3)
    engine.pool[:3] = 0
    assert engine.connector.store(keys, [0, 1, 2]).stored == 3
    engine.pool[:] = 7
    assert engine.connector.load(engine.connector.match(keys), [5, 0, 9]) == 3
    assert not engine.pool[[5, 0, 9]].any()
    assert np.all(engine.pool[1:5] == 7)


def test_26_committed_is_visible_to_all_clients(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    writer, reader, spec = connect(daemon), connect(daemon), spec_of()
    reader.register(spec)
    for number in range(300):
        keys = chain_of(f"visible {number}", 3)
        reserved = writer.reserve(spec, keys)
        indices = writer.fill(spec, keys, reserved)
        assert reader.length(spec, keys) == 0, "nothing is visible before its commit"
        assert writer.commit(reserved.lease, indices) == [m.CommitState.VISIBLE] * 3
        assert reader.load(spec, keys) == 3


def test_44_the_second_half_is_committed_first(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    spec, keys = spec_of(), chain_of("halves", 6)
    first, second, reader = connect(daemon), connect(daemon), connect(daemon)
    head = first.reserve(spec, keys[: 3 * 16])
    tail = second.reserve(spec, keys, first=3)
    assert list(tail.states) == [m.BlockState.FRAME] * 3
    indices = second.fill(spec, keys, tail, first=3)
    assert second.commit(tail.lease, indices) == [m.CommitState.HELD] * 3
    assert reader.length(spec, keys) == 0, "nothing may be found behind a block that is not written"
    assert list(second.reserve(spec, keys).states) == [m.BlockState.PENDING] * 6
    first.commit(head.lease, first.fill(spec, keys[: 3 * 16], head))
    assert reader.load(spec, keys) == 6
    healthy(daemon)


@pytest.mark.parametrize("order", ["abort first", "commit first", "the parent's writer dies"])
def test_44_a_parent_that_is_given_up_takes_its_child_along(
    daemon: Daemon, connect: Callable[..., Peer], start_child: Callable[..., Child], order: str
) -> None:
    spec, keys = spec_of(), chain_of("orphans", 6)
    second = connect(daemon)
    parent = start_child("peer", daemon)
    parent.do("reserve", seed="orphans", blocks=3)
    parent.do("fill", first=0, count=2)
    tail = second.reserve(spec, keys, first=3)
    indices = second.fill(spec, keys, tail, first=3)
    if order == "abort first":
        parent.do("abort", finished=True)
        assert second.commit(tail.lease, indices) == [m.CommitState.DROPPED] * 3
    else:
        assert second.commit(tail.lease, indices) == [m.CommitState.HELD] * 3
        if order == "commit first":
            parent.do("abort", finished=True)
        else:
            parent.kill()
    wait_until(lambda: second.stats()["arena"]["used_bytes"] == 0, "all frames are back")
    assert second.length(spec, keys) == 0
    second.store(spec, keys)
    assert second.load(spec, keys) == 6, "the keys can be stored again, and are right then"
    healthy(daemon)


def test_44_a_child_whose_parent_was_flushed_while_it_was_written(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    """The keys are a chain, and still the pending child is not below the new parent: neither client is to blame."""
    spec, keys = spec_of(), chain_of("flushed parent", 3)
    first, second = connect(daemon), connect(daemon)
    first.store(spec, keys[:16])
    tail = first.reserve(spec, keys, first=1)
    indices = first.fill(spec, keys, tail, first=1)
    second.ask(m.Flush, tier="all", namespaces=[], key=key_of(keys, 0))
    again = second.reserve(spec, keys)
    assert again.states[0] == m.BlockState.FRAME
    healthy(daemon)
    assert first.commit(tail.lease, indices) == [m.CommitState.DROPPED] * 2
    second.commit(again.lease, second.fill(spec, keys, again))
    second.store(spec, keys)
    assert second.load(spec, keys) == 3
    healthy(daemon)


def test_44_room_for_a_child_is_not_made_of_its_parents(
    start_daemon: Callable[..., Daemon], connect: Callable[..., Peer]
) -> None:
    daemon = start_daemon("--arena", "2MiB", "--region", "2MiB")
    spec = spec_of(256 << 10)
    peer = connect(daemon)
    keys = chain_of("ancestors", 12)
    peer.store(spec, keys[: 8 * 16])
    more = peer.reserve(spec, keys, first=8)
    assert list(more.states) == [m.BlockState.NONE] * 4
    assert peer.load(spec, keys) == 8
    branch = keys[: 5 * 16] + chain_of("branch", 4, after=keys[: 5 * 16])[5 * 16 :]
    reserved = peer.reserve(spec, branch)
    assert list(reserved.states)[:5] == [m.BlockState.HAVE] * 5
    assert list(reserved.states)[5:8] == [m.BlockState.FRAME] * 3, "the other branch makes room"
    assert reserved.states[8] == m.BlockState.NONE
    peer.commit(reserved.lease, peer.fill(spec, branch, reserved))
    assert peer.load(spec, branch) == 8
    assert peer.load(spec, keys) == 5
    healthy(daemon)


def test_44_permuted_keys_are_never_answered_with_other_blocks(
    daemon: Daemon, engine_of: Callable[..., Engine]
) -> None:
    engine, keys = engine_of(daemon, spec_of()), chain_of("order", 16)
    engine.store(keys)
    lists = [
        [0, 2, 1, 3],
        [3, 2, 1, 0],
        [1, 1, 1, 1],
        [0, 0, 1, 2],
        [*range(1, 16)],
        [0, *range(2, 16)],
        [5],
        [0, 1, 2, 9, 4],
        [*range(15, -1, -1)],
    ]
    for order in lists:
        wrong = b"".join(key_of(keys, number) for number in order)
        leading = next((n for n, number in enumerate(order) if n != number), len(order))
        assert engine.load(wrong) <= leading
        assert engine.store(wrong).stored == 0
    assert engine.load(keys) == 16
    assert daemon.stats()["counters"]["requests_failed"] == 0, daemon.log()


def test_25_a_full_arena_keeps_what_is_stored_as_fast_as_it_comes(
    daemon: Daemon, engine_of: Callable[..., Engine]
) -> None:
    spec = spec_of(64 << 10)
    engine = engine_of(daemon, spec, blocks=64)
    stored = sum(engine.store(chain_of(f"rate {number}", 64)).stored for number in range(80))
    assert stored == 80 * 64, "twenty arenas' worth, and nothing was dropped"
    assert engine.load(chain_of("rate 79", 64)) == 64
    healthy(daemon)


def test_19_the_first_block_fixes_nothing(daemon: Daemon, engine_of: Callable[..., Engine]) -> None:
    sizes = [100, 1 << 20, 4096, 5000, 300 << 10]
    engines = [engine_of(daemon, spec_of(size), blocks=8) for size in sizes]
    # Until every region is one of tiny blocks.
    tiny = [chain_of(f"tiny {number}", 8) for number in range(FRAMES // 8)]
    assert sum(engines[0].store(keys).stored for keys in tiny) == FRAMES
    for engine in engines[1:]:
        keys = chain_of(f"size {engine.spec.block_bytes}", 3)
        wait_until(lambda e=engine, k=keys: e.store(k) and e.load(k) == 3, "a region went over to this size")
    assert engines[0].load(tiny[-1]) in (0, 8)
    healthy(daemon)
