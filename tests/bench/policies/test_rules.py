"""The rules of each of the policies compared one by one, on an index of a few blocks."""

from __future__ import annotations

from typing import Any

import pytest
from policies import ghosts as ghosts_module
from policies.arc import AGAIN, ARC, ONCE
from policies.ghosts import _SLACK, Ghosts
from policies.queues import Queues
from policies.requests import COUNTED, Requests
from policies.reusetimes import ReuseTimes
from policies.s3fifo import MAIN, S3FIFO, SMALL
from policies.sketch import Sketch
from policies.workload_aware import LIFETIME_EVICTIONS, LIFETIME_MOST, WorkloadAware
from policies.wtinylfu import PROBATION, PROTECTED, PROTECTED_SHARE, WINDOW, WTinyLFU

from tiercache.daemon.index.entries import Table
from tiercache.daemon.index.index import Index
from tiercache.daemon.index.policy import USED
from tiercache.daemon.policies.turnover import Turnover
from tiercache.protocol.messages import KEY_BYTES
from tiercache.replay.requests import chain_keys

STILL = Turnover(lambda: 0.0)


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "little")


class Small:
    """An index under a policy, and its one table."""

    def __init__(self, policy: str) -> None:
        self.gone: list[int] = []
        self.index = Index(self.gone.append)
        self.sketch = Sketch(STILL)
        made: dict[str, Any] = {"arc": ARC, "s3fifo": S3FIFO, "wtinylfu": lambda index: WTinyLFU(index, self.sketch)}
        self.policy: Any = made[policy](self.index)
        self.table: Table = self.index.add_table(1, self.policy, windowed=False)

    @property
    def queues(self) -> Queues:
        queues: Queues = self.policy._queues
        return queues

    def insert(self, number: int, parent: int | None = None) -> int:
        return self.index.insert(self.table, key(number), self.table.root if parent is None else parent, number)

    def use(self, entry: int) -> None:
        """Touch the blocks as a request does."""
        self.index.touch(entry, COUNTED)


# --- S3-FIFO -------------------------------------------------------------------------------------


def test_s3fifo_remembers_what_the_small_queue_has_lost_alone() -> None:
    small = Small("s3fifo")
    entries = [small.insert(number) for number in range(20)]
    small.queues.lift(entries[1], MAIN)
    for number in (0, 1):
        small.index.evict(entries[number])
        again = small.insert(number)
        assert small.queues.of(again) == (MAIN if number == 0 else SMALL)


def test_s3fifo_counts_uses_anew_in_the_main_queue_and_for_a_new_block() -> None:
    small = Small("s3fifo")
    entries = [small.insert(number) for number in range(3)]
    for _ in range(5):
        small.use(entries[0])
    assert small.policy._uses[entries[0]] == 3, "uses above the cap are not counted"
    assert small.policy.victim() == entries[1]
    assert (small.queues.of(entries[0]), small.policy._uses[entries[0]]) == (MAIN, 0)
    small.use(entries[1])
    small.index.evict(entries[1])
    while small.index.unlink_slice(64):
        pass
    for number in range(10, 13):
        assert small.policy._uses[small.insert(number)] == 0


@pytest.mark.parametrize("uses", [0, 1])
def test_s3fifo_ends_a_run_where_a_block_of_the_main_queue_has_a_round_left(uses: int) -> None:
    small = Small("s3fifo")
    parent = small.insert(0)
    child = small.insert(1, parent)
    small.queues.lift(child, MAIN)
    small.policy._uses[parent] = uses
    assert small.index.evict_run(small.policy.victim(), 5) == 2 - uses


def test_s3fifo_hands_the_uses_of_a_chain_on_to_the_block_before() -> None:
    small = Small("s3fifo")
    parent = small.insert(0)
    only, other = small.insert(1, parent), small.insert(2, parent)
    small.use(only)
    small.index.evict(only)
    assert small.policy._uses[parent] == 1, "it has another child"
    small.use(other)
    small.index.evict(other)
    assert small.policy._uses[parent] == 2


# --- ARC -----------------------------------------------------------------------------------------


def test_arc_keeps_blocks_used_once_and_their_ghosts_within_the_room() -> None:
    small, most, ghosts = Small("arc"), 40, list[int]()
    again = [small.insert(number) for number in range(20)]
    for entry in again:
        small.use(entry)
    for number in range(20, 300):
        while number - len(small.gone) >= most:
            small.index.evict(small.policy.victim())
        small.insert(number)
        ghosts.append(len(small.policy._lost[ONCE]))
        assert ghosts[-1] + small.queues.sizes[ONCE] <= most + 1, "room is made before the block is known"
    assert ghosts[-1] >= 19


def test_arc_shares_the_room_and_no_more() -> None:
    small = Small("arc")
    once, again = [small.insert(number) for number in range(2)], [small.insert(number) for number in (2, 3)]
    for entry in again:
        small.use(entry)
    for entry in (once[0], again[0]):
        small.index.evict(entry)
    small.policy._share = 3.5
    small.insert(0)
    assert small.policy._share == small.queues.capacity < 4
    small.policy._share = 0.5
    small.insert(2)
    assert small.policy._share == 0


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_arc_ends_a_run_where_the_other_queue_has_its_turn(share: float) -> None:
    small = Small("arc")
    small.use(small.insert(0))
    end = small.insert(2, small.insert(1))
    small.policy._share = share
    assert small.policy.victim() == end
    assert small.index.evict_run(end, 5) == 2 - share


def test_arc_takes_what_the_daemon_moves_for_no_use() -> None:
    small = Small("arc")
    entries = [small.insert(number) for number in range(3)]
    small.index.touch(entries[0])
    assert small.queues.of(entries[0]) == ONCE
    assert small.policy.victim() == entries[1], "the moved block is the youngest of its queue"
    small.use(entries[1])
    assert small.queues.of(entries[1]) == AGAIN


# --- W-TinyLFU -----------------------------------------------------------------------------------


def test_tinylfu_lets_no_block_in_for_one_that_is_asked_for_as_often() -> None:
    small = Small("wtinylfu")
    entries = [small.insert(number) for number in range(200)]
    small.index.evict(small.policy.victim())
    newest, oldest = small.queues.first(WINDOW), small.queues.first(PROBATION)
    while not small.policy._over(200):
        small.insert(1000 + len(small.index.key))
    assert small.policy.victim() == newest
    small.sketch.asked(key(entries.index(newest)), 0, 0)
    assert small.policy.victim() == oldest, "the block that was asked for more often wins"


def test_tinylfu_protects_a_part_only() -> None:
    small = Small("wtinylfu")
    entries = [small.insert(number) for number in range(200)]
    for entry in entries:
        if small.queues.of(entry) != WINDOW:
            small.use(entry)
    main = small.queues.sizes[PROBATION] + small.queues.sizes[PROTECTED]
    assert small.queues.sizes[PROTECTED] == int(PROTECTED_SHARE * main)


def test_tinylfu_moves_no_winner_that_is_no_candidate_any_more() -> None:
    small = Small("wtinylfu")
    for number in range(200):
        small.insert(number)
    small.policy._contest = loser, winner = small.queues.first(PROBATION), small.queues.first(WINDOW)
    small.index.pin(winner)
    small.index.evict(loser)
    assert small.queues.of(winner) == WINDOW


def test_the_sketch_counts_a_request_that_is_made_again_once() -> None:
    turnover = Turnover(lambda: 0.0)
    sketch, keys = Sketch(turnover), chain_keys([1, 2])
    for _ in range(3):
        sketch.asked(keys, 0, 0)
    assert sketch.frequency(keys[:KEY_BYTES]) == 1
    turnover.stored_bytes += 1
    sketch.asked(keys, 0, 0)
    assert sketch.frequency(keys[:KEY_BYTES]) == 2


# --- requests, ghosts, queues --------------------------------------------------------------------


def test_a_request_counts_once() -> None:
    turnover = Turnover(lambda: 0.0)
    requests = Requests(turnover)
    seen = []
    for keys in (key(1), key(1), key(2), key(1)):
        seen.append(requests.asked(keys, 0, 0))
    assert seen == [COUNTED, USED, COUNTED, COUNTED]


def test_a_full_bucket_of_ghosts_loses_its_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghosts_module, "_digest", lambda key: int.from_bytes(key, "little") << 32 | 1 << 63)
    ghosts = Ghosts()
    for number in range(20):
        ghosts.add(key(number), 100)
    assert [ghosts.take(key(number)) for number in range(20)] == [False] * 4 + [True] * 16


def test_ghosts_that_come_back_leave_no_queue_behind() -> None:
    ghosts = Ghosts()
    for number in range(5000):
        ghosts.add(key(number), 10)
        assert ghosts.take(key(number))
    assert ghosts._next - ghosts._oldest <= 2 * 10 + _SLACK + 1


def test_queues_go_down_as_far_as_no_other_chain_needs_them() -> None:
    small = Small("arc")
    first = small.insert(0)
    shared = small.insert(1, first)
    left, right = small.insert(2, shared), small.insert(3, shared)
    for entry in (left, right):
        small.queues.lift(entry, 1)
    small.queues.lower(left, 0)
    assert [small.queues.of(entry) for entry in (first, shared, left, right)] == [1, 1, 0, 1]
    assert small.queues.sizes == [1, 3]


def test_a_block_of_another_queue_is_as_old_as_its_last_child() -> None:
    small = Small("arc")
    parent = small.insert(0)
    small.queues.lift(parent, AGAIN)
    child = small.insert(1, parent)
    stamp = small.index.columns.stamp[child]
    assert small.index.columns.stamp[parent] < stamp
    small.index.evict(child)
    assert small.index.columns.stamp[parent] == stamp


def test_the_capacity_falls_slowly_where_there_is_room_for_fewer() -> None:
    small = Small("arc")
    entries = [small.insert(number) for number in range(100)]
    small.index.evict(entries[0])
    assert small.queues.capacity == 100
    for entry in entries[1:41]:
        small.index.evict(entry)
    assert 97 < small.queues.capacity < 99, "in a cache that is filled and emptied, the capacity is the room"


# --- workload-aware ------------------------------------------------------------------------------


def test_lifetimes_are_measured_over_so_many_evictions() -> None:
    index, turnover = Index(lambda frame: None), Turnover(lambda: 0.0)
    turnover.room_bytes = lambda: 1000
    policy = WorkloadAware(index, ReuseTimes(turnover))
    policy._live = 2 * LIFETIME_EVICTIONS
    turnover.comes(500, stored=False)
    for _ in range(LIFETIME_EVICTIONS):
        assert policy.lifetime == LIFETIME_MOST
        policy._gone()
    assert policy.lifetime == pytest.approx(0.5)
    assert policy._evictions == 0


def test_what_the_daemon_moves_was_not_used() -> None:
    index, turnover = Index(lambda frame: None), Turnover(lambda: 0.0)
    turnover.room_bytes = lambda: 1000
    policy = WorkloadAware(index, ReuseTimes(turnover))
    table = index.add_table(1, policy, windowed=False)
    entry = index.insert(table, key(1), table.root, 1)
    turnover.comes(3000, stored=False)
    index.touch(entry)
    assert policy._used_at[entry] == 0.0
