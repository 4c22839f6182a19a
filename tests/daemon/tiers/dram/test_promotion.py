"""Promotions from one source and from two: who is asked for what, and when a lease stops to wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from cache_rig import FRAME_BYTES, CacheRig, finish
from chains import chain_of

from tiercache.daemon.ground.slices import Steps
from tiercache.daemon.tiers.dram import growing_leases, growing_run, promotion
from tiercache.daemon.tiers.dram.below import TierBelow
from tiercache.daemon.tiers.dram.leases import ReadLease
from tiercache.daemon.tiers.dram.promotion import Promotion
from tiercache.daemon.tiers.dram.source import Fetch, FetchOutcome, FetchTally, SourcePart, TierParts
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.protocol.messages import KEY_BYTES, REGION_SHIFT


class Source:
    """A source of blocks `first ..< end` of every chain. Fetches end when a test says so; it records what it is told.

    It refuses fetches beyond `room`.
    """

    def __init__(self, first: int, end: int) -> None:
        self.numbers = range(first, end)
        self.room, self.together = 1 << 20, 1
        self.offline = self.retired = False
        self.trusted = True
        self.tally = FetchTally()
        self.fetching: list[Fetch] = []
        self.asked: list[int] = []
        self.words: list[bool] = []
        self.let_go_of = self.cancels = 0

    def most_together(self, namespace: Namespace) -> int:
        return self.together

    def hold(self, namespace: Namespace, keys: bytes, numbers: Sequence[int]) -> Sequence[int]:
        return [number for number in numbers if number in self.numbers]

    def fetch(self, fetches: Sequence[Fetch]) -> bool:
        taken, refused = fetches[: self.room], fetches[self.room :]
        self.room -= len(taken)
        self.fetching += taken
        self.asked += [number for fetch in taken for number in fetch.held]
        for fetch in refused:
            fetch.end([FetchOutcome.CANCELLED] * len(fetch.keys), [0] * len(fetch.keys))
        return not refused

    def deliver(self, count: int, outcome: FetchOutcome = FetchOutcome.OK) -> None:
        """The oldest of its fetches end together."""
        ended, self.fetching = self.fetching[:count], self.fetching[count:]
        for fetch in ended:
            fetch.end([outcome] * len(fetch.keys), [10] * len(fetch.keys))

    def let_go(self, fetches: Sequence[Fetch]) -> None:
        self.let_go_of += sum(len(fetch.keys) for fetch in fetches)

    def failed(self, fetch: Fetch, place: int) -> bool:
        return fetch.outcomes[place] is FetchOutcome.MISSING

    def kept_word(self, kept: bool) -> None:
        self.words.append(kept)

    def cancel(self) -> None:
        self.cancels += 1


class Tier(TierBelow):
    """A tier with one source."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def parts(self, namespace: Namespace, keys: bytes, wanted: Sequence[int]) -> Steps[TierParts]:
        numbers = [number for number in wanted if number in self.source.numbers]
        yield
        rest = [number for number in wanted if number not in numbers]
        return TierParts([SourcePart(self.source, numbers)] if numbers else [], rest)


class Rig(CacheRig, TierBelow):
    """A cache of 64 frames above these sources, the nearest first; a lease on a chain that it promotes."""

    tiers = ("below",)

    def __init__(self, *sources: Source) -> None:
        super().__init__(regions=8, below=self)
        self.landed = self.soon = 0
        self.lost = set[bytes]()
        self.sources = sources
        regions: Any = {number: SimpleNamespace(address=number << REGION_SHIFT) for number in range(8)}
        growing, writes, tiers = self.cache.reads.growing, self.cache.writes, list(map(Tier, sources))
        self.promotion = Promotion(growing, writes, None, regions, tiers, self._landed, self._soon, lambda: self.now_s)
        self.namespace = self.space()

    def _landed(self) -> None:
        self.landed += 1

    def _soon(self) -> None:
        self.soon += 1

    @property
    def kinds(self) -> Sequence[Callable[[], bool]]:
        return [lambda: self.promotion.look(), lambda: self.promotion.begin(), lambda: self.promotion.land()]

    def length(self, namespace: Namespace, keys: bytes, limit: int) -> int:
        return min(limit, max(source.numbers.stop for source in self.sources))

    def lookup(self, namespace: Namespace) -> Callable[[bytes], bool]:
        return lambda key: key not in self.lost

    def promote(self, lease: ReadLease) -> None:
        self.promotion.start(lease)

    def ask(self, blocks: int, tag: int = 1, namespace: Namespace | None = None) -> ReadLease:
        """A match of a prompt, which the sources are asked for as far as it is not in DRAM."""
        namespaces = [namespace or self.namespace]
        found = self.cache.match(self.owner, namespaces, chain_of(tag, blocks), 1000.0, promote=True)
        assert found.lease is not None
        finish(self)
        return found.lease

    def waits(self, lease: ReadLease) -> bool:
        """Do all work; True if more may arrive for a lease."""
        finish(self)
        return lease.lease_id in self.cache.reads.growing.leases


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "BATCH", 2)


@pytest.mark.parametrize(
    ("arrived", "together"), [([], []), ([2, 3, 4], [2, 3, 4]), ([2, 4, 5], [2]), ([2, 3, 5, 6], [2, 3]), ([7], [7])]
)
def test_blocks_are_stored_together_up_to_a_gap(arrived: list[int], together: list[int]) -> None:
    """Of a block behind it another one comes before: that is told of each store."""
    assert list(promotion._leading_run(arrived)) == together


def test_a_lease_grows_with_each_batch_until_all_has_arrived() -> None:
    source = Source(0, 5)
    h = Rig(source)
    lease = h.ask(5)
    assert source.asked == [0, 1, 2, 3, 4]
    assert h.promotion.in_flight_bytes(source.tally) == 5 * FRAME_BYTES
    source.deliver(2)
    assert h.soon, "the loop is asked to take them in"
    assert h.waits(lease)
    assert lease.blocks == 2
    assert h.landed > 0
    source.deliver(3)
    assert not h.waits(lease)
    assert lease.blocks == lease.target == 5
    assert source.let_go_of == source.tally.blocks == 5
    assert source.tally.stored_bytes == 50
    assert set(source.words) == {True}
    assert h.promotion.in_flight_bytes(source.tally) == 0
    assert h.promotion.idle


def test_what_has_arrived_for_a_lease_makes_no_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lease asks for its next batch in turn. Together they fill the cache, in place of what was stored before."""
    monkeypatch.setattr(promotion, "MAX_IN_FLIGHT", 2)
    monkeypatch.setattr(promotion, "GROW_NS", 0)
    source = Source(0, 8)
    h = Rig(source)
    before = h.space(rank=1)
    for tag in range(16):
        h.store(before, chain_of(f"before {tag}", 4))
    h.cache.space.tails.writer_gone(h.owner.instance)
    leases = [h.cache.match(h.owner, [h.namespace], chain_of(tag, 8), 1000.0, promote=True).lease for tag in range(8)]
    while h.cache.work() or source.fetching:
        source.deliver(1)
    assert [lease and lease.blocks for lease in leases] == [8] * 8


def test_what_has_arrived_is_taken_in_until_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "GROW_NS", 0)
    source = Source(0, 6)
    h = Rig(source)
    lease = h.ask(6)
    source.deliver(6)
    h.promotion.take_in()
    assert source.let_go_of == 2, "one batch"
    assert not h.waits(lease)
    assert lease.blocks == 6


def test_of_a_chain_in_two_tiers_the_near_one_is_asked_first_and_both_fetch_side_by_side() -> None:
    near, far = Source(0, 4), Source(4, 6)
    h = Rig(near, far)
    lease = h.ask(6)
    assert (near.asked, far.asked) == ([0, 1, 2, 3], [4, 5])
    far.deliver(2)
    assert h.waits(lease)
    assert lease.blocks == 0, "they hang below blocks that have not arrived"
    near.deliver(4)
    assert not h.waits(lease)
    assert lease.blocks == 6


def test_the_far_tier_waits_until_the_near_one_has_asked_for_all_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "MAX_IN_FLIGHT", 2)
    near, far = Source(0, 4), Source(4, 6)
    h = Rig(near, far)
    lease = h.ask(6)
    assert (near.asked, far.asked) == ([0, 1], [])
    near.deliver(2)
    assert h.waits(lease)
    assert (near.asked, far.asked) == ([0, 1, 2, 3], [4, 5])


def test_an_offline_source_is_not_asked_and_others_do_not_wait_for_it() -> None:
    near, far = Source(0, 2), Source(2, 4)
    near.offline = True
    h = Rig(near, far)
    lease = h.ask(4)
    assert (near.asked, far.asked) == ([], [2, 3]) or not h.waits(lease)
    while far.fetching:
        far.deliver(1)
    assert not h.waits(lease)
    assert lease.blocks == 0


def test_a_source_that_refuses_fetches_is_asked_for_no_more_of_that_lease() -> None:
    source = Source(0, 6)
    source.room = 3
    h = Rig(source)
    lease = h.ask(6)
    assert source.asked == [0, 1, 2]
    source.deliver(3)
    assert not h.waits(lease)
    assert lease.blocks == 3
    assert source.asked == [0, 1, 2]
    assert h.cache.space.allocator.used_bytes == 3 * FRAME_BYTES, "frames of what was refused are back"


def test_a_block_that_is_gone_ends_the_promotion_of_what_follows() -> None:
    source = Source(0, 6)
    h = Rig(source)
    lease = h.ask(6)
    source.deliver(1)
    source.deliver(1, FetchOutcome.MISSING)
    source.deliver(1, FetchOutcome.CORRUPT)
    source.deliver(1, FetchOutcome.OTHER_VERSION)
    source.deliver(1, FetchOutcome.FAILED)
    assert h.waits(lease), "what was asked for is under way"
    source.deliver(1)
    assert not h.waits(lease)
    assert lease.blocks == 1
    tally = source.tally
    assert (tally.bad_blocks, tally.other_version, tally.failed) == (1, 1, 1)
    assert h.cache.space.allocator.used_bytes == FRAME_BYTES


def test_a_source_that_has_nothing_of_what_it_is_said_to_have_has_not_kept_its_word() -> None:
    source = Source(0, 4)
    h = Rig(source)
    lease = h.ask(4)
    source.deliver(4, FetchOutcome.MISSING)
    assert not h.waits(lease)
    assert source.words == [False]
    failing = Source(0, 4)
    h = Rig(failing)
    lease = h.ask(4)
    failing.deliver(4, FetchOutcome.FAILED)
    assert not h.waits(lease)
    assert failing.words == [], "that the disk fails says nothing about what is there"


def test_of_a_source_that_is_not_trusted_one_batch_is_under_way() -> None:
    source = Source(0, 6)
    source.trusted = False
    h = Rig(source)
    lease = h.ask(6)
    assert source.asked == [0, 1]
    source.trusted = True
    source.deliver(2)
    assert h.waits(lease)
    assert source.asked == [0, 1, 2, 3, 4, 5]


def test_a_source_that_hangs_is_not_waited_for_and_its_frames_stay_its_own() -> None:
    source = Source(0, 4)
    h = Rig(source)
    lease = h.ask(4)
    source.deliver(1)
    finish(h)
    h.promotion.give_up(source)
    assert source.cancels == 1
    assert not h.waits(lease)
    assert lease.blocks == 1
    assert h.cache.space.allocator.used_bytes == 4 * FRAME_BYTES, "it may still write to three frames"
    source.deliver(3, FetchOutcome.FAILED)
    finish(h)
    assert h.cache.space.allocator.used_bytes == FRAME_BYTES


def test_of_a_source_that_is_gone_nothing_is_kept_once_its_fetches_have_ended() -> None:
    source, stays = Source(0, 2), Source(2, 4)
    h = Rig(source, stays)
    h.ask(4)
    source.retired = True
    source.deliver(1)
    assert source in h.promotion._fetches
    source.deliver(1)
    stays.deliver(2)
    assert source not in h.promotion._fetches
    assert source not in h.promotion._fetch_bytes
    assert stays in h.promotion._fetches


def test_two_leases_share_what_is_on_its_way() -> None:
    source = Source(0, 4)
    h = Rig(source)
    first, second = h.ask(4), h.ask(4)
    assert source.asked == [0, 1, 2, 3]
    assert h.waits(second)
    source.deliver(4)
    assert not h.waits(first)
    assert not h.waits(second)
    assert second.blocks == 4


def test_a_lease_that_waits_for_another_ones_block_ends_when_that_does_not_come() -> None:
    source = Source(0, 4)
    h = Rig(source)
    first, second = h.ask(4), h.ask(4)
    source.deliver(1)
    source.deliver(3, FetchOutcome.FAILED)
    h.waits(second)
    h.now_s += 1
    assert not h.waits(first)
    assert not h.waits(second)
    assert (first.blocks, second.blocks) == (1, 1)


def test_what_ends_while_the_daemon_stops_is_taken_in_and_begins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "MAX_IN_FLIGHT", 2)
    source = Source(0, 4)
    h = Rig(source)
    lease, landed = h.ask(4), h.landed
    h.promotion.closed = True
    source.deliver(1)
    source.deliver(1, FetchOutcome.ABANDONED)
    assert not h.promotion.begin()
    assert not h.promotion.land()
    assert not h.promotion.look()
    assert h.landed == landed, "nobody is told"
    assert source.asked == [0, 1]
    assert source.let_go_of == 1, "something may still read for what was abandoned"
    assert h.cache.peek([h.namespace], lease.keys)[0] == 1
    assert h.cache.space.allocator.used_bytes == 2 * FRAME_BYTES


def test_a_source_that_hangs_while_it_is_found_out_who_has_what_is_not_asked() -> None:
    source, stays = Source(0, 4), Source(4, 6)
    h = Rig(source, stays)
    found = h.cache.match(h.owner, [h.namespace], chain_of(1, 6), 1000.0, promote=True)  # the first tier was asked
    assert found.lease is not None
    h.promotion.pump()
    source.offline = True
    h.promotion.give_up(source)
    assert not h.waits(found.lease) or stays.fetching
    assert source.asked == []


@pytest.mark.parametrize("window_blocks", [0, 6], ids=["chain", "window"])
def test_nothing_is_asked_for_behind_a_block_that_did_not_come(
    monkeypatch: pytest.MonkeyPatch, window_blocks: int
) -> None:
    monkeypatch.setattr(promotion, "MAX_IN_FLIGHT", 2)
    source = Source(0, 6)
    h = Rig(source)
    lease = h.ask(6, namespace=h.space(rank=1, window_blocks=window_blocks))
    source.deliver(2, FetchOutcome.FAILED)
    assert h.waits(lease), "the next batch was asked for before this was taken in"
    source.deliver(2)
    assert not h.waits(lease)
    assert source.asked == [0, 1, 2, 3]


def test_a_lease_ends_at_once_where_no_source_has_its_blocks_any_more() -> None:
    source = Source(0, 4)
    h = Rig(source)
    source.numbers, end = range(0), source.numbers.stop
    h.length = lambda namespace, keys, limit: min(limit, end)  # type: ignore[method-assign]
    lease = h.ask(4)
    assert not h.waits(lease)
    assert lease.blocks == lease.target == 0


def test_a_lease_that_has_ended_before_its_sources_were_looked_up_is_not_promoted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Source(0, 4)
    h = Rig(source)
    found = h.cache.match(h.owner, [h.namespace], chain_of(1, 4), 1000.0, promote=True)
    assert found.lease is not None
    h.cache.reads.release(h.owner, found.lease.lease_id)
    finish(h)
    assert source.asked == []
    assert h.promotion.idle


def test_it_is_idle_once_nothing_is_planned_or_fetched_or_waits_to_be_taken_in() -> None:
    source = Source(0, 2)
    h = Rig(source)
    assert h.promotion.idle
    h.cache.match(h.owner, [h.namespace], chain_of(1, 2), 1000.0, promote=True)
    assert not h.promotion.idle, "it has yet to find out who has them"
    finish(h)
    assert not h.promotion.idle
    h.cache.process_gone(h.owner)
    source.deliver(2)
    assert not h.promotion.idle, "they are to be taken in"
    finish(h)
    assert h.promotion.idle


# --- windows: any of their blocks may be missing -----------------------------------------------------


def test_of_a_window_every_source_is_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "MAX_IN_FLIGHT", 1)
    near, far = Source(4, 6), Source(2, 4)
    h = Rig(near, far)
    window = h.space(rank=1, window_blocks=4)
    lease = h.ask(6, namespace=window)
    assert (near.asked, far.asked) == ([4, 5], [2, 3]), "neither waits for the other"
    far.deliver(2)
    assert h.waits(lease)
    assert lease.blocks == 0
    near.deliver(2)
    assert not h.waits(lease)
    assert lease.blocks == 6


@pytest.mark.parametrize("looked_at_once", [512, 1])
def test_a_window_waits_for_what_another_request_promotes_of_it(
    monkeypatch: pytest.MonkeyPatch, looked_at_once: int
) -> None:
    monkeypatch.setattr(promotion, "BATCH", 8)
    monkeypatch.setattr(growing_run, "PINS", looked_at_once)
    monkeypatch.setattr(growing_leases, "PINS", looked_at_once)
    source = Source(0, 8)
    h = Rig(source)
    window = h.space(rank=1, window_blocks=4)
    first, second = h.ask(6, namespace=window), h.ask(7, namespace=window)
    assert source.asked == [2, 3, 4, 5, 6]
    source.fetching = [source.fetching[number] for number in (4, 1, 2, 3, 0)]
    source.deliver(2)
    assert h.waits(second), "the first request has yet to bring what lies between"
    source.deliver(2)
    assert h.waits(first)
    for _ in range(10):
        h.now_s += 1
        finish(h)
    assert not h.waits(second)
    assert second.blocks == 7
    source.deliver(1)
    for _ in range(10):
        h.now_s += 1
        finish(h)
    assert not h.waits(first)
    assert first.blocks == 6


def test_a_prefetch_comes_after_what_clients_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "MAX_IN_FLIGHT", 2)
    source = Source(0, 4)
    h = Rig(source)
    h.ask(2, tag=1)
    h.cache.prefetch(h.owner, [h.namespace], chain_of(2, 2))
    finish(h)
    h.ask(2, tag=3)
    source.deliver(2)
    finish(h)
    assert source.fetching[0].keys[0] == chain_of(3, 2)[:KEY_BYTES]
    assert [fetch.urgent for fetch in source.fetching] == [True, True]
