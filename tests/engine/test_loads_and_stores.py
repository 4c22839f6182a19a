"""How the engine treats each answer of a cache: its records of loads and stores, without a model."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tiercache.connector.stores import StoreResult
from tiercache.engine.cache import GuardedCache
from tiercache.engine.cost import LoadChoice
from tiercache.engine.loads import CacheHit, LoadOrder, Loads
from tiercache.engine.settings import EngineSettings
from tiercache.engine.stores import Stores
from tiercache.errors import DaemonUnavailable

pytestmark = pytest.mark.engine
BLOCK = 16


class Transfer:
    """Copies that end when the test says so."""

    def __init__(self) -> None:
        self.began_s = self.ended_s = time.monotonic()
        self.answer: Any = None
        self.is_done = self.cancelled = False

    def end(self, answer: Any) -> None:
        self.answer, self.is_done = answer, True

    def done(self) -> bool:
        return self.is_done

    def result(self, timeout_s: float = 0.0) -> Any:
        return self.answer

    def cancel(self) -> None:
        self.cancelled = True


class Cache:
    """Records its requests, and returns the matches that the test sets."""

    available = True
    wants_events = False

    def __init__(self) -> None:
        self.matches: list[SimpleNamespace] = []
        self.asked: list[bytes] = []
        self.released: list[Any] = []
        self.transfers: list[Transfer] = []
        self.timeouts_s: list[float] = []
        self.refuses = False

    def match(self, keys: bytes) -> Any:
        self.asked.append(keys)
        return self.matches.pop(0)

    def release(self, match: Any) -> None:
        self.released.append(match)

    def load_async(self, match: Any, keys: bytes, parts: Any, *, timeout_s: float) -> Transfer:
        self.timeouts_s.append(timeout_s)
        return self._begin()

    def store_async(self, group: int, keys: bytes, block_ids: Any, **options: Any) -> Transfer:
        return self._begin()

    def _begin(self) -> Transfer:
        if self.refuses:
            raise DaemonUnavailable("as the test wants it")
        self.transfers.append(Transfer())
        return self.transfers[-1]


class Blocks:
    """A block manager's references, and what is clean."""

    num_blocks = 100

    def __init__(self) -> None:
        self.held: Counter[int] = Counter()
        self.stored: list[int] = []
        self.lost: list[tuple[Any, int, int]] = []
        self.clean_count = 0
        self.dirty: list[list[int]] = []

    def hold(self, block_ids: list[int]) -> None:
        self.held.update(block_ids)

    def release(self, block_ids: list[int]) -> None:
        self.held -= Counter(block_ids)

    def find(self, chain: Any, numbers: list[int], group: int) -> list[int]:
        return []

    def mark_stored(self, block_ids: list[int]) -> None:
        self.stored += block_ids

    def mark_lost(self, chain: Any, first: int, group: int) -> None:
        self.lost.append((chain, first, group))

    def dirty_blocks(self, count: int) -> list[tuple[tuple[Any, int, int], list[int]]]:
        return [((Chain(), 0, 0), ids) for ids in self.dirty]


class Chain:
    def packed(self, blocks: int) -> bytes:
        return bytes(blocks * BLOCK)

    def __len__(self) -> int:
        return 100


class Cost:
    """Chooses as the test sets, and records what it is told."""

    def __init__(self) -> None:
        self.choice = LoadChoice(0)
        self.queues_s: list[float] = []
        self.told: list[str] = []

    def patience_s(self, choice: LoadChoice) -> float:
        return 10.0**6

    def choose(self, kept: int, reaches: Any, queue_s: float) -> LoadChoice:
        self.queues_s.append(queue_s)
        return self.choice

    def note_load(self, *_: Any) -> None:
        self.told.append("load")

    def note_miss(self, *_: Any) -> None:
        self.told.append("miss")

    def note_given_up(self, *_: Any) -> None:
        self.told.append("given up")


class Bench:
    """Loads and stores over the fakes."""

    def __init__(self, **settings: Any) -> None:
        self.cache, self.blocks, self.cost = Cache(), Blocks(), Cost()
        self.guarded: Any = GuardedCache(self.cache)
        chosen = EngineSettings(**{"block_size": 4, "chunk_size": 8, **settings})
        self.loads = Loads(self.blocks, self.guarded, self.cost, chosen)  # type: ignore[arg-type]
        self.stores = Stores(self.blocks, self.guarded, chosen)  # type: ignore[arg-type]

    def sequence(self, *, windowed: bool = False, blocks: int = 4) -> Any:
        window = SimpleNamespace(needed=lambda end: list(range(end)))
        table = SimpleNamespace(window=window, ids=list(range(10, 10 + blocks)))
        table.held_runs = lambda first, end: [(first, table.ids[first:end])]
        return SimpleNamespace(
            chain=Chain(),
            tables=[table],
            windowed=windowed,
            has_sinks=False,
            stored_blocks=0,
            store_retried=False,
            rank=SimpleNamespace(priority=0),
            usable_hit_blocks=lambda end: end,
            keyed_full_blocks=lambda: blocks,
        )

    def order(self, blocks: int = 4, load_s: float = 0.0) -> LoadOrder:
        hit = CacheHit(found(blocks), blocks)
        return LoadOrder(self.sequence(), hit, LoadChoice(blocks, blocks, load_s=load_s), [list(range(blocks))])


def found(blocks: int, below: int = 0, shared: int = 0) -> SimpleNamespace:
    return SimpleNamespace(blocks=blocks, below_blocks=below, shared_blocks=shared)


# --- loads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "good"), [(9, 4), (4, 4), (2, 2), (0, 0)])
def test_no_more_blocks_are_good_than_were_asked_for(answer: int, good: int) -> None:
    bench = Bench()
    assert bench.loads.start(bench.order())
    bench.cache.transfers[0].end([answer])
    [result] = bench.loads.poll()
    assert result.good_blocks == [good]
    counters = bench.guarded.counters
    assert (counters.loaded, counters.load_misses) == (good, 4 - good)
    assert bench.cost.told == ["load" if good == 4 else "miss"]
    assert not bench.blocks.held


def test_a_load_that_is_late_is_cancelled_once_and_holds_its_blocks_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(load_timeout_s=5.0)
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    assert bench.loads.start(bench.order())
    assert bench.cache.timeouts_s == [5.0], "however long the model would wait"
    [transfer] = bench.cache.transfers
    now_s += 4.9
    assert bench.loads.poll() == []
    assert not transfer.cancelled
    now_s += 0.1
    [result] = bench.loads.poll()
    assert (result.good_blocks, result.ended, transfer.cancelled) == ([0], False, True)
    assert bench.loads.poll() == []
    assert sum(bench.blocks.held.values()) == 4
    transfer.end([4])
    assert bench.loads.poll() == [], "the late load has already counted as a miss"
    assert not bench.blocks.held
    assert bench.guarded.counters.loads_given_up_count == 1


def test_a_load_that_is_no_longer_wanted_is_cancelled_and_says_nothing() -> None:
    bench = Bench()
    first, second = bench.order(), bench.order()
    assert bench.loads.start(first)
    assert bench.loads.start(second)
    bench.loads.abandon(first.sequence)
    assert [transfer.cancelled for transfer in bench.cache.transfers] == [True, False]
    for transfer in bench.cache.transfers:
        transfer.end([4])
    assert [result.order for result in bench.loads.poll()] == [second]
    assert not bench.blocks.held


def test_a_load_that_is_refused_gives_its_match_back() -> None:
    bench = Bench()
    bench.cache.refuses, order = True, bench.order()
    assert not bench.loads.start(order)
    assert bench.cache.released == [order.hit.match]
    assert not bench.blocks.held


def test_a_load_waits_for_those_before_it() -> None:
    bench = Bench()
    for load_s in (0.5, 0.25):
        assert bench.loads.start(bench.order(load_s=load_s))
    bench.loads.choose(bench.sequence(), CacheHit(found(4), 4), 0)
    assert bench.cost.queues_s == [0.75]


@pytest.mark.parametrize(
    ("again", "nvme", "end"),
    [
        (found(2), 0, 2),
        (found(3), 0, 2),
        (found(1), 0, 0),
        (found(2, below=1), 0, 0),
        (found(2, below=1), 1, 2),
        (found(2, below=1, shared=1), 1, 0),
        (found(0), 0, 0),
    ],
    ids=["as before", "more", "shorter", "partly below", "on NVMe as before", "partly shared", "gone"],
)
def test_a_shorter_cut_is_matched_anew_and_loaded_only_if_all_of_it_is_there(again: Any, nvme: int, end: int) -> None:
    bench, hit = Bench(), CacheHit(found(4, below=2), 4)
    bench.cost.choice = LoadChoice(2, 2 - nvme, nvme)
    bench.cache.matches = [again]
    new_hit, choice = bench.loads.choose(bench.sequence(windowed=True), hit, 0)
    assert bench.cache.released == [hit.match]
    assert bench.cache.asked == [bytes(2 * BLOCK)]
    assert choice.end == end
    assert new_hit == CacheHit(again, again.blocks)
    assert bool(choice.blocks) == (end > 0)


# --- stores ---------------------------------------------------------------------------------------


def test_what_the_cache_did_not_keep_is_offered_again_with_write_through_only() -> None:
    for write, kept in (("through", 3), ("back", 4)):
        bench = Bench(write=write)
        if write == "through":
            bench.stores.store_full_blocks(bench.sequence())
        else:
            bench.blocks.dirty = [[10, 11, 12, 13]]
            bench.stores.clean(all_blocks=True)
        bench.cache.transfers[0].end(StoreResult(stored=2, present=1, dropped=1))
        bench.stores.poll()
        assert bench.blocks.stored == [10, 11, 12, 13][:kept], write
        counters = bench.guarded.counters
        assert (counters.stored, counters.present, counters.not_stored) == (2, 1, 1)
        assert not bench.blocks.held


def test_a_store_that_is_refused_holds_nothing_and_is_not_tried_for_ever() -> None:
    bench = Bench()
    bench.cache.refuses = True
    bench.stores.store_full_blocks(bench.sequence())
    assert bench.blocks.stored == [10, 11, 12, 13]
    assert not bench.blocks.held


def test_no_more_stores_are_under_way_than_may_be() -> None:
    bench = Bench(max_stores=2)
    waiting = [bench.sequence() for _ in range(3)]
    for sequence in waiting:
        bench.stores.store_full_blocks(sequence)
    assert len(bench.cache.transfers) == 2
    assert [sequence.stored_blocks for sequence in waiting] == [4, 4, 0], "the third waits for a later step"
    bench.cache.transfers[0].end(StoreResult(4))
    bench.stores.poll()
    bench.stores.store_full_blocks(waiting[2])
    assert waiting[2].stored_blocks == 4

    bench = Bench(write="back", max_stores=2)
    bench.blocks.dirty = [[1], [2], [3]]
    bench.stores.clean(all_blocks=True)
    assert len(bench.cache.transfers) == 2


def test_what_is_being_cleaned_counts_as_clean() -> None:
    bench = Bench(write="back", clean_blocks=2)
    bench.blocks.dirty = [[1, 2]]
    bench.stores.clean()
    bench.stores.clean()
    assert len(bench.cache.transfers) == 1
    bench.stores.ask_for(3)
    bench.stores.ask_for(1)
    bench.stores.clean()
    assert len(bench.cache.transfers) == 2, "the most that was asked for counts"
    bench.stores.clean()
    assert len(bench.cache.transfers) == 2, "and only once"


def test_a_chain_whose_beginning_the_cache_lost_is_offered_once_more() -> None:
    bench = Bench()
    sequence = bench.sequence()
    for stored_blocks in (0, 4):
        sequence.stored_blocks = 0
        bench.stores.store_full_blocks(sequence)
        bench.cache.transfers[-1].end(StoreResult(dropped=4, parent_missing=True))
        bench.stores.poll()
        assert sequence.stored_blocks == stored_blocks
        assert bench.blocks.lost == [(sequence.chain, 0, 0)]
    other = bench.sequence()
    bench.stores.store_full_blocks(other)
    other.chain = Chain()  # the sequence has begun anew meanwhile
    bench.cache.transfers[-1].end(StoreResult(dropped=4, parent_missing=True))
    bench.stores.poll()
    assert len(bench.blocks.lost) == 1
    assert not other.store_retried
