"""Work in slices: ends of sessions, regions that are emptied, events. Between slices everything is consistent."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from cache_at_once import CacheAtOnce
from cache_rig import FRAME_BYTES, CacheRig, Kept, fill, finish
from chains import chain_of

from tiercache.daemon.events import events as events_module
from tiercache.daemon.events.events import Events, NamedBlocks
from tiercache.daemon.ground.slices import PINS
from tiercache.daemon.tiers.dram import pending_blocks
from tiercache.daemon.tiers.dram.growing_run import GrowingRun
from tiercache.daemon.tiers.dram.leases import Owner
from tiercache.daemon.tiers.dram.read_leases import ENDED_AT_ONCE
from tiercache.protocol.messages import KEY_BYTES, EventRun

MANY = 5 * ENDED_AT_ONCE


def test_many_read_leases_of_a_session_end_in_slices() -> None:
    h = CacheRig()
    namespace, keys = h.space(), chain_of(1, 1)
    h.store(namespace, keys)
    for _ in range(MANY):
        assert h.cache.match(h.owner, [namespace], keys, 10).lease is not None
    h.cache.session_lost(h.owner)
    slices = [len(h.owner.reads)]
    assert slices[0] >= MANY - ENDED_AT_ONCE
    while h.cache.work():
        slices.append(len(h.owner.reads))
        h.check()
    assert max(before - after for before, after in pairwise(slices)) <= ENDED_AT_ONCE
    finish(h)
    assert h.cache.reads.leases == {}
    assert h.cache.space.index.pins[namespace.table.get(keys)] == 0


def test_a_lease_that_another_session_holds_outlives_the_slices() -> None:
    h = CacheRig()
    namespace, keys, same = h.space(), chain_of(1, 1), Owner(h.owner.instance)
    h.store(namespace, keys)
    leases = [h.cache.match(h.owner, [namespace], keys, 10).lease for _ in range(MANY)]
    h.cache.session_lost(h.owner)
    held = [lease for lease in leases if lease is not None and h.cache.reads.hold(same, lease.lease_id)]
    assert 0 < len(held) < MANY, "leases that have ended hold nothing"
    while h.cache.work():
        pass
    assert h.cache.reads.leases.keys() == {lease.lease_id for lease in held}
    assert all(h.cache.reads.release(same, lease.lease_id) for lease in held)
    finish(h)


def test_the_exit_of_a_process_waits_for_what_its_session_has_left() -> None:
    h = CacheRig(region_bytes=2 * MANY * FRAME_BYTES)
    namespace = h.space()
    for tag in range(40):
        h.cache.reserve(h.owner, namespace, b"", chain_of(tag % 250, 1 + tag // 250), 10)
    h.cache.session_lost(h.owner)
    h.cache.process_gone(h.owner)
    while h.cache.work():
        h.check()
    finish(h)
    assert not h.cache.has_quarantine(h.owner)
    assert h.cache.space.allocator.used_bytes == 0


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_published_in_a_region_that_is_emptied_in_slices(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Clients commit, abort and go on storing between two slices."""
    monkeypatch.setattr(pending_blocks, "LOOKED_AT_ONCE", 3)
    h, dice = CacheRig(regions=3, region_bytes=40 * FRAME_BYTES), random.Random(seed)
    namespace = h.space()
    remote, mapped = Owner(b"r" * 16, mapped=False), h.owner
    open_leases = []
    for tag in range(1, 13):
        owner = dice.choice((remote, mapped))
        keys, got = chain_of(tag, 6), None
        got = h.cache.reserve(owner, namespace, b"", keys, 100)
        for block in h.cache.writes.leases[got.lease_id].blocks.values():
            block.written = FRAME_BYTES
        open_leases.append((owner, got.lease_id, keys))
        if dice.random() < 0.5:  # a part of the chain waits for blocks before it
            h.cache.writes.commit(owner, got.lease_id, dice.sample(range(1, 6), 3))
    h.cache.space._empty_region(0)
    h.cache.writes.take_back(0)
    while True:
        if open_leases and dice.random() < 0.7:
            owner, lease, keys = open_leases.pop(dice.randrange(len(open_leases)))
            if dice.random() < 0.3:
                h.cache.writes.abort(owner, lease, finished=True)
            else:
                h.cache.writes.commit(owner, lease, range(6))
            found = h.cache.match(owner, [namespace], keys, 0).dram
            entries = [namespace.table.get(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]) for at in range(found)]
            regions = {h.cache.space.index.frame[entry] >> 48 for entry in entries}
            assert owner.mapped or 0 not in regions
            h.check()
        if not h.cache.work() and not open_leases:
            break
    for owner, lease, _ in open_leases:
        h.cache.writes.abort(owner, lease, finished=True)
    finish(h)


# --- leases that grow ---------------------------------------------------------------------------------


def test_a_wide_window_is_looked_through_in_slices() -> None:
    window = 3 * PINS
    h = CacheRig(region_bytes=2 * window * FRAME_BYTES)
    namespace = h.space(window_blocks=window)
    keys = fill(h, namespace, 1, window)
    run, slices = GrowingRun(h.cache.space.index, namespace, keys, window), 0
    while run.look():
        slices += 1
        assert len(run.pins) <= (slices + 1) * PINS
    assert (slices, run.complete, len(run.pins)) == (2, True, window)
    first, touched = run.touch(0), 1
    while first < window:
        first, touched = run.touch(first), touched + 1
    assert touched == 3
    for entry in run.pins:
        h.cache.space.index.unpin(entry)
    finish(h)


def test_blocks_of_a_wide_window_may_come_in_any_order() -> None:
    window = 2 * PINS
    h = CacheRig(region_bytes=2 * window * FRAME_BYTES)
    namespace = h.space(window_blocks=window)
    keys = random.Random(1).randbytes(16 * window)
    run, order = GrowingRun(h.cache.space.index, namespace, keys, window), list(range(window))
    random.Random(2).shuffle(order)
    stored = set[int]()
    for first in range(0, window, 64):
        for number in order[first : first + 64]:
            h.store(namespace, run.key(number))
            stored.add(number)
        run.begin_pass()
        while run.look():
            pass
        assert len(run.pins) == len(stored)
        assert run.end == next((number for number in range(window) if number not in stored), window)
    assert run.complete
    for entry in run.pins:
        h.cache.space.index.unpin(entry)
    finish(h)


# --- events -------------------------------------------------------------------------------------------


def tell_many(events: Events, blocks: int, tokens: int) -> None:
    hashes: list[int | bytes] = list(range(1, blocks + 1))
    named = NamedBlocks(EventRun(hashes, None, bytes(4 * tokens * blocks)), tokens)
    for place in range(blocks):
        events.arrived(events.dram, 1, place.to_bytes(16, "big"), named(place))


def test_batches_of_events_are_published_in_slices_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "PUBLISH_NS", 0)
    kept = Kept()
    events = Events(kept)
    tell_many(events, 200, 4096)  # four to a batch
    assert len(kept.published) == 0
    goes = 0
    while events.work():
        goes += 1
        assert len(kept.published) <= goes
    events.flush()
    told = [event for batch in kept.published for event in batch]
    assert told[0]["type"] == "AllBlocksCleared"
    assert [name for event in told[1:] for name in event["block_hashes"]] == list(range(1, 201))


def test_batches_that_wait_for_the_loop_do_not_pile_up() -> None:
    kept = Kept()
    events = Events(kept)
    tell_many(events, 2000, 4096)
    assert len(events._full) <= events_module.MAX_FULL
    assert len(kept.published) >= 2000 // 4 - events_module.MAX_FULL


def test_what_was_cleared_is_freed_in_slices_and_told_of_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "FREED_AT_ONCE", 50)
    events = Events(Kept())
    tell_many(events, 200, 16)
    events.cleared()
    assert (events.known_bytes, events.check_integrity()) == (0, [])
    goes = 1
    while events.work():
        goes += 1
    assert goes >= 8, "each block is remembered by key and by hash"
    events.left(events.dram, 1, bytes(16))
    assert events.check_integrity() == []


def test_the_cache_publishes_what_waits() -> None:
    kept = Kept()
    cache = CacheAtOnce(lambda: 0.0, events=Events(kept))
    assert cache.events is not None
    tell_many(cache.events, 100, 4096)
    while cache.work():
        pass
    assert sum(map(len, kept.published)) > 20
