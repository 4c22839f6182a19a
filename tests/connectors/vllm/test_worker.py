"""The worker's half: copies that end too late, and weights whose changes are known later than they happen."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_vllm import SIZE, Cell, TinyCache, TinyRank

from tiercache.connectors.vllm import worker
from tiercache.connectors.vllm.orders import BlockRun, Load, Orders, Store, WorkerReport
from tiercache.connectors.vllm.weights import Look, Weights
from tiercache.connectors.vllm.worker import RankWorker
from tiercache.protocol.messages import KEY_BYTES

pytestmark = pytest.mark.engine
BLOCKS = 8


def cells() -> list[list[Cell]]:
    return [[Cell((block,), 0, 0)] * SIZE for block in range(BLOCKS)]


class Rig:
    """A worker of two tiny ranks of blocks, with real weights. Results of looks are known when `known` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tensor, self.known = torch.zeros(8), True
        monkeypatch.setattr(Look, "known", lambda look: self.known)
        self.weights = Weights(lambda: [("tensor", self.tensor)])
        self.caches = [TinyCache(), TinyCache()]
        self.ranks = [TinyRank(cache, cells()) for cache in self.caches]
        groups: list[Any] = self.ranks
        self.worker = RankWorker(groups, [True, True], weights=self.weights, rank=3)
        self.keys = b"".join(bytes([number]) * KEY_BYTES for number in range(4))
        self.runs = (BlockRun(0, [0, 1, 2, 3]), BlockRun(0, [4, 5, 6, 7]))

    def store(self, job: int) -> Store:
        return Store(job, self.keys, self.runs)

    def load(self, name: str = "r") -> Load:
        """A load of what both have. Their matches have one number."""
        tickets = {cache.match(self.keys, None).ticket() for cache in self.caches}
        return Load(name, tickets.pop(), self.runs)

    def copy(self) -> None:
        for rank in self.ranks:
            for copy in rank.copies:
                while not copy.over:
                    copy.work()

    def stored(self) -> list[int]:
        return [len(cache.blocks) for cache in self.caches]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    return Rig(monkeypatch)


def test_a_store_is_complete_when_it_is_in_all_groups(rig: Rig) -> None:
    rig.caches[1].full = True
    rig.worker.begin(Orders(ready=[rig.store(1)]))
    rig.ranks[0].copies[0].work()
    assert rig.worker.report() is None
    rig.copy()
    assert rig.worker.report() == WorkerReport({1: 1}, {1})
    rig.caches[1].full = False
    rig.worker.begin(Orders(ready=[rig.store(2)]))
    rig.copy()
    assert rig.worker.report() == WorkerReport({2: 1}, set())
    rig.worker.begin(Orders(loads=[rig.load()]))
    rig.copy()
    assert rig.worker.ended_loads(False) == ({"r"}, set())
    lost = rig.load("lost")
    rig.caches[1].matches[-1].contents[3] = []
    rig.worker.begin(Orders(loads=[lost]))
    rig.copy()
    assert rig.worker.ended_loads(False) == ({"lost"}, {"lost"}), "with several groups a load is good or it is not"
    assert rig.worker.take_bad_blocks() == set()


def test_a_store_is_committed_only_once_the_weights_are_known_to_be_the_same(rig: Rig) -> None:
    """On a GPU: when the blocks are copied the answer may still be on its way."""
    rig.known = False
    rig.worker.begin(Orders(fresh=[rig.store(1)]))
    rig.tensor.data += 1
    rig.worker.begin(Orders())
    rig.copy()
    report = rig.worker.report()
    assert report is not None
    assert (report.incomplete, rig.stored()) == ({1}, [0, 0])
    rig.known = True
    rig.worker.begin(Orders(ready=[rig.store(2)]))
    rig.copy()
    report = rig.worker.report()
    assert report is not None
    assert (report.incomplete, report.moves) == ({2}, {3: 1}), "the scheduler does not know it yet"
    rig.worker.begin(Orders(moves={3: 1}, renamed=True, fresh=[rig.store(3)], ready=[rig.store(4)]))
    rig.worker.begin(Orders(moves={3: 1}))
    rig.copy()
    report = rig.worker.report()
    assert report is not None
    assert (report.incomplete, rig.stored()) == ({4}, [4, 4]), "the last was computed before all was named anew"


def test_nothing_is_stored_of_a_step_that_began_with_other_weights(rig: Rig) -> None:
    """They are back before the store, and on a GPU the answer of the first look may come after that."""
    rig.known = False
    before = rig.tensor.clone()
    rig.tensor.data += 1
    rig.worker.begin(Orders(begins=True, fresh=[rig.store(1)]))
    rig.tensor.data.copy_(before)
    rig.worker.begin(Orders())
    rig.copy()
    report = rig.worker.report()
    assert report is not None
    assert (report.incomplete, rig.stored()) == ({1}, [0, 0])


def test_a_load_is_good_only_once_the_weights_are_known_to_be_the_same(rig: Rig) -> None:
    rig.worker.begin(Orders(ready=[rig.store(1)]))
    rig.copy()
    rig.known = False
    rig.worker.begin(Orders(loads=[rig.load()]))
    rig.copy()
    assert rig.worker.ended_loads(False) == (set(), set())
    rig.known = True
    assert rig.worker.ended_loads(False) == ({"r"}, set())
    rig.worker.begin(Orders(loads=[rig.load()]))
    rig.tensor.data += 1
    rig.worker.begin(Orders())
    rig.copy()
    assert rig.worker.ended_loads(True) == ({"r"}, {"r"})


def test_without_loads_and_stores_nothing_is_looked_at(rig: Rig) -> None:
    rig.weights.look = None  # type: ignore[assignment, method-assign]
    rig.worker.begin(Orders())
    assert rig.worker.report() is None


def test_copies_end_before_vllm_takes_its_memory_away(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does when it goes to sleep."""
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: 100.0))
    rig.worker.begin(Orders(ready=[rig.store(1)]))
    rig.copy()
    rig.worker.begin(Orders(fresh=[rig.store(2)], loads=[rig.load()]))
    for rank in rig.ranks:
        rank.copies[-1].hurry = True
    rig.worker.end_copies()
    stored, loaded = (copy.limits_s for copy in rig.ranks[0].copies)
    assert stored == [worker.SLEEP_TIMEOUT_S, *loaded]
    assert loaded == [worker.SLEEP_TIMEOUT_S + worker.COPY_GIVE_UP_S]
    report = rig.worker.report()
    assert report is not None
    assert (report.ended, report.incomplete) == ({1: 1, 2: 1}, {2}), "the second had not begun"
    assert rig.worker.ended_loads(False) == ({"r"}, {"r"})


def test_one_rank_alone_keeps_what_has_come_of_a_load_and_writes_only_its_share() -> None:
    cache = TinyCache()
    rank: Any = TinyRank(cache, cells())
    keys = bytes(KEY_BYTES) + bytes([1]) * KEY_BYTES
    reader = RankWorker([rank], [False])
    reader.begin(Orders(ready=[Store(1, keys, (BlockRun(0, [0, 1]),))]))
    assert (reader.report(), rank.copies) == (WorkerReport({1: 1}, set()), []), "another rank stores it"
    worker = RankWorker([rank], [True])
    worker.begin(Orders(ready=[Store(1, keys, (BlockRun(0, [0, 1]),))]))
    while not rank.copies[0].over:
        rank.copies[0].work()
    match = cache.match(keys, None)
    match.contents[1] = []
    worker.begin(Orders(loads=[Load("r", match.ticket(), (BlockRun(0, [4, 5]),))]))
    while not rank.copies[1].over:
        rank.copies[1].work()
    assert worker.ended_loads(False) == ({"r"}, set())
    assert worker.take_bad_blocks() == {5}
    assert worker.take_bad_blocks() == set()
    rank.counters.update(loaded_blocks=1, stored_blocks=2, other=9)
    assert worker.counters() == {"loaded_blocks": 1, "stored_blocks": 2}
    assert worker.counters() == {}
