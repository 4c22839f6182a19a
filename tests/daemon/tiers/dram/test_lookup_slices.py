"""Look-ups that take several slices: bounded, one consistent answer, and nothing left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, ItemsView
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cache_rig import FRAME_BYTES, CacheRig, counted, fill, finish, in_slices
from chains import chain_of
from raw_client import Client, block_of, new_chain

from tiercache.daemon import inspection
from tiercache.daemon.ground.slices import LOOKUPS, PINS, AnswerNow, Slices, Steps
from tiercache.daemon.index.index import Index
from tiercache.daemon.inspection import pins_of
from tiercache.daemon.requests.admin import AdminRequests
from tiercache.daemon.tiers.dram.read_leases import PINS_LISTED
from tiercache.daemon.tiers.dram.runs import MAX_TOGETHER
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.protocol import messages as m
from tiercache.protocol.messages import KEY_BYTES

WINDOW = 3000


def windowed(h: CacheRig, blocks: int = WINDOW, rank: int = 0) -> tuple[Namespace, bytes]:
    """A namespace with one whole window."""
    namespace = h.space(rank=rank, window_blocks=WINDOW)
    return namespace, fill(h, namespace, 1, blocks)


def counted_lookups(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many blocks of windows were looked up since the last call."""
    looked, lookup = 0, Index.lookup

    def counting(self: Index, table: Any) -> Callable[[bytes], bool] | None:
        here = lookup(self, table)

        def one(key: bytes) -> bool:
            nonlocal looked
            looked += 1
            assert here is not None
            return here(key)

        return None if here is None else one

    def since() -> int:
        nonlocal looked
        asked, looked = looked, 0
        return asked

    monkeypatch.setattr(Index, "lookup", counting)
    return since


@pytest.mark.parametrize("window", [1, 7])
def test_a_long_list_of_which_nothing_is_here_takes_slices(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    h = CacheRig()
    spaces = [h.space(rank=rank, window_blocks=window) for rank in range(3)]
    for rank, namespace in enumerate(spaces):
        h.store(namespace, chain_of(10 + rank, 1))
    looked = counted_lookups(monkeypatch)
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, looked())

    found, slices = in_slices(h.cache.reads.match(h.owner, spaces, chain_of(1, 20_000), 10), look)
    assert (found.dram, found.lease) == (0, None)
    assert slices > 20_000 // window // LOOKUPS
    assert most <= LOOKUPS
    h.check()


def test_an_empty_window_beside_a_full_one_is_found_out_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    h = CacheRig(region_bytes=1000 * FRAME_BYTES)
    full, empty = h.space(window_blocks=900), h.space(rank=1, window_blocks=1)
    keys = fill(h, full, 1, 900)
    h.store(empty, chain_of(2, 1))
    looked = counted_lookups(monkeypatch)
    assert h.cache.match(h.owner, [full, empty], keys, 0).dram == 0
    assert looked() <= 2 * 900


@pytest.mark.parametrize("ttl_s", [0, 10])
def test_a_wide_window_is_pinned_touched_and_let_go_in_slices(monkeypatch: pytest.MonkeyPatch, ttl_s: int) -> None:
    h = CacheRig(region_bytes=(WINDOW + 100) * FRAME_BYTES)
    namespace, keys = windowed(h)
    counts = [counted(monkeypatch, Index, name) for name in ("pin", "touch", "unpin")]
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, *(count() for count in counts))
        h.check()

    found, _ = in_slices(h.cache.reads.match(h.owner, [namespace], keys, ttl_s), look)
    assert found.dram == WINDOW
    if ttl_s:
        assert h.cache.reads.release(h.owner, found.lease.lease_id)
        look()
    while h.cache.work():
        look()
    assert 0 < most <= PINS
    h.check()
    assert not any(h.cache.space.index.pins[namespace.table.get(keys[at : at + 16])] for at in range(0, len(keys), 16))


@pytest.mark.parametrize("after", range(8))
@pytest.mark.parametrize("what", ["all", "first", "last", "evicted"])
def test_what_is_lost_between_two_slices_is_not_held(after: int, what: str) -> None:
    h = CacheRig(region_bytes=(WINDOW + 100) * FRAME_BYTES)
    namespace, keys = windowed(h)
    wanted, slices = keys, 0

    def lose() -> None:
        nonlocal slices
        slices += 1
        if slices != after + 1:
            return
        if what == "evicted":
            entry = namespace.table.get(keys[-KEY_BYTES:])
            if h.cache.space.index.pins[entry] == 0:
                h.cache.space.index.evict(entry)
        else:
            h.cache.flush_dram([namespace.number], {"all": b"", "first": keys[:16], "last": keys[-16:]}[what])

    found, _ = in_slices(h.cache.reads.match(h.owner, [namespace], wanted, 10), lose)
    whole = found.lease is not None and all(
        namespace.table.get(keys[16 * number : 16 * number + 16]) >= 0 for number in range(found.lease.blocks)
    )
    if found.lease is not None:
        assert h.cache.reads.release(h.owner, found.lease.lease_id) is whole
    assert h.cache.space.index.invariant_failures == 0
    finish(h)
    assert not list(h.cache.reads.runs.loose_pins())


@pytest.mark.parametrize("lost", [False, True])
def test_a_match_of_very_many_chains_searches_before_it_uses_them(lost: bool) -> None:
    h, keys = CacheRig(regions=40), chain_of(1, 4)
    namespaces = [h.space(layers=number) for number in range(1, MAX_TOGETHER + 2)]
    for namespace in namespaces:
        h.store(namespace, keys)
    steps = h.cache.reads.match(h.owner, namespaces, keys, 10)
    next(steps)
    assert not h.owner.reads
    if lost:
        h.cache.flush_dram([namespaces[-1].number], keys[32:48])
    found, _ = in_slices(steps, h.check)
    assert found.dram == (2 if lost else 4)
    assert h.cache.space.index.invariant_failures == 0
    assert h.cache.reads.release(h.owner, found.lease.lease_id)
    finish(h)


def test_a_match_of_very_many_chains_that_may_not_wait_is_answered_at_once() -> None:
    h, keys = CacheRig(regions=40), chain_of(1, 4)
    namespaces = [h.space(layers=number) for number in range(1, MAX_TOGETHER + 2)]
    for namespace in namespaces:
        h.store(namespace, keys)
    steps = h.cache.reads.match(h.owner, namespaces, keys, 10)
    next(steps)
    with pytest.raises(StopIteration) as end:
        steps.throw(AnswerNow())
    assert end.value.value.dram == 4
    assert h.cache.reads.release(h.owner, end.value.value.lease.lease_id)
    finish(h)


@pytest.mark.parametrize("after", range(6))
def test_a_lookup_that_is_given_up_leaves_no_pin(after: int) -> None:
    h = CacheRig(region_bytes=(WINDOW + 100) * FRAME_BYTES)
    namespace, keys = windowed(h)
    steps = h.cache.reads.match(h.owner, [namespace], keys, 10)
    for _ in range(after):
        next(steps)
    steps.close()
    finish(h)
    assert not h.cache.reads.leases
    assert not list(h.cache.reads.runs.loose_pins())
    h.store(namespace, chain_of(2, 200))  # room is made from blocks that no lease holds


def test_a_pin_of_a_long_chain_looks_at_it_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    h = CacheRig(region_bytes=10_000 * FRAME_BYTES, pin_share=1.0)
    namespace = h.space()
    keys = fill(h, namespace, 1, 9000)
    frames = Index.run_frames
    most = 0

    def counting(self: Index, table: Any, keys: bytes, first: int, count: int) -> list[int]:
        nonlocal most
        most = max(most, count)
        return frames(self, table, keys, first, count)

    monkeypatch.setattr(Index, "run_frames", counting)
    blocks, slices = in_slices(h.cache.reads.pins.pin([namespace], keys, 10), h.check)
    assert (blocks, slices) == (9000, -(-9000 // LOOKUPS))
    assert most <= LOOKUPS
    assert h.cache.space.pinned_regions == {0: 1}
    assert h.cache.reads.pins.blocks[namespace.number] == 9000
    assert h.cache.reads.pins.unpin([namespace], keys) == 9000
    assert not +h.cache.space.pinned_regions
    assert not +h.cache.reads.pins.blocks
    h.check()


@pytest.mark.parametrize("after", [0, 1])
def test_a_pin_that_ends_while_it_is_made_keeps_no_region(after: int) -> None:
    h = CacheRig(region_bytes=10_000 * FRAME_BYTES, pin_share=1.0)
    namespace = h.space()
    keys = fill(h, namespace, 1, 9000)
    steps = h.cache.reads.pins.pin([namespace], keys, 10)
    for _ in range(after + 1):
        next(steps)
    assert h.cache.pin([namespace], keys, 20) == 9000  # instead of the first one
    in_slices(steps, h.check)
    assert len(h.cache.reads.pins.leases) == 1
    assert h.cache.reads.pins.bytes == 9000 * FRAME_BYTES
    assert h.cache.reads.pins.unpin([namespace], keys) == 9000
    assert (len(h.cache.reads.leases), h.cache.reads.pins.bytes) == (0, 0)
    h.check()


@pytest.mark.parametrize("lost", ["nothing", "the root", "the end", "all, stored again"])
def test_the_chain_of_a_block_is_walked_in_slices(lost: str) -> None:
    h = CacheRig(region_bytes=10_000 * FRAME_BYTES)
    namespace = h.space()
    keys = fill(h, namespace, 1, 2 * LOOKUPS + 10)
    seen = 0

    def lose() -> None:
        nonlocal seen
        seen += 1
        if seen != 3 or lost == "nothing":
            return
        if lost == "the end":
            h.cache.flush_dram([namespace.number], keys[-KEY_BYTES:])
            return
        h.cache.flush_dram([namespace.number], keys[:KEY_BYTES])
        if lost == "all, stored again":
            finish(h)
            fill(h, namespace, 2, 5000)  # its entries belong to other blocks now

    found, slices = in_slices(inspection.chain_of(h.cache, [namespace], keys[-KEY_BYTES:]), lose)
    whole = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
    assert found == (whole if lost in ("nothing", "the end") else [])
    assert slices > 2
    finish(h)


@pytest.mark.parametrize("same", [True, False], ids=["the same", "another"])
def test_what_others_pin_between_two_slices_counts(same: bool) -> None:
    """Two pins of the same blocks are one, and two pins that exceed the limit together are not both set."""
    h = CacheRig(region_bytes=2 * WINDOW * FRAME_BYTES, pin_share=0.75)  # one window and a half
    spaces = [h.space(rank=rank, window_blocks=WINDOW) for rank in range(2)]
    for namespace in spaces:
        fill(h, namespace, 1, WINDOW)
    keys, other = chain_of(1, WINDOW), spaces[0] if same else spaces[1]
    steps = h.cache.reads.pins.pin([spaces[0]], keys, 10)
    next(steps)
    assert h.cache.pin([other], keys, 20) == WINDOW
    assert in_slices(steps, h.check)[0] == (WINDOW if same else 0)
    assert len(h.cache.reads.pins.leases) == len(h.cache.reads.leases) == 1
    assert h.cache.reads.pins.bytes == WINDOW * FRAME_BYTES
    finish(h)
    assert not list(h.cache.reads.runs.loose_pins())
    assert h.cache.reads.pins.unpin([other], keys) == WINDOW
    assert h.cache.reads.pins.bytes == 0


def test_pins_are_listed_in_slices_without_those_that_end_meanwhile() -> None:
    h = CacheRig(region_bytes=2000 * FRAME_BYTES)
    namespace = h.space()
    for number in range(600):
        key = chain_of(1, number + 1)[-KEY_BYTES:]
        h.store(namespace, key)
        assert h.cache.pin([namespace], key, ttl_s=1000 - number) == 1
    ended = chain_of(1, 11)[-KEY_BYTES:]

    def end() -> None:
        h.cache.reads.pins.unpin([namespace], ended)

    views, slices = in_slices(pins_of(h.cache.reads.pins, h.now_s), end)
    assert slices > 2
    assert [view.left_ms for view in views] == sorted(view.left_ms for view in views)
    assert len(views) == 599
    assert ended not in [view.key for view in views]


def test_a_namespace_is_told_from_others_without_a_look_at_what_they_have() -> None:
    """One request may name 256 namespaces, and each is looked up among those of the lease."""
    h = CacheRig()
    assert h.space() == h.space()
    assert h.space(rank=1) != h.space()
    assert Namespace.__eq__ is object.__eq__


def test_slices_take_turns() -> None:
    slices, done = Slices(), list[str]()

    def steps(name: str) -> Steps[None]:
        for number in range(2):
            done.append(f"{name}{number}")
            yield

    slices.add(steps("a"))
    slices.add(steps("b"))
    while slices.work():
        pass
    assert done == ["a0", "b0", "a1", "b1"]
    assert len(slices) == 0


def test_others_are_served_while_a_long_request_is_answered(client: Client, run_dir: Path) -> None:
    numbers = [client.namespace(window_blocks=1, tp_rank=rank, tp_size=4) for rank in range(4)]
    for number in numbers:
        client.store(number, new_chain(1), [block_of(0)])
    wanted = new_chain(1) * 65_536
    client.send("peek", numbers, wanted)
    client.send("ping")
    assert client.answer()[0] == "done"
    answer = client.answer()
    assert (answer[0], answer[3:6]) == ("peeked", [0, 0, [[0, 0]] * 4])
    # A client that has gone gets no answer, and nothing of its request stays.
    with Client(run_dir) as leaver:
        leaver.send("match", numbers, wanted, 1000)
        leaver.leave()
    assert client.ask("check")[1] == []
    # And no session may have more than a few of them under way.
    for _ in range(17):
        client.send("peek", numbers, wanted[: 16 * 16_384])
    answers = [client.answer() for _ in range(17)]
    assert sorted(answer[0] for answer in answers) == ["error"] + ["peeked"] * 16


def test_windows_of_too_many_blocks_are_refused(client: Client) -> None:
    numbers = [client.namespace(window_blocks=300, tp_rank=rank, tp_size=200) for rank in range(110)]
    assert client.refusal("match", numbers, new_chain(300), 0) == "too_large"
    assert client.refusal("pin", numbers, new_chain(300), 1000) == "too_large"
    assert client.refusal("prefetch", numbers, new_chain(300)) == "too_large"
    assert client.ask("match", numbers, new_chain(297), 0)[0] == "matched"


def test_lists_that_are_far_too_long_are_not_built(client: Client) -> None:
    numbers = [client.namespace()]
    assert client.refusal("renew", [1] * 65_537, 1000) == "malformed"
    assert client.ask("renew", [1] * 65_536, 1000)[0] == "renewed"
    assert client.refusal("match", numbers * 65_537, new_chain(1)) == "malformed"
    assert client.refusal("match", numbers * 257, new_chain(1)) == "bad_value"
    assert client.refusal("flush", "dram", numbers * 65_537, b"") == "malformed"


def test_a_flush_of_many_namespaces_leaves_the_empty_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    h = CacheRig(regions=1)
    spaces = [h.space(rank=rank, layers=layers) for rank in range(8) for layers in range(1, 20)]
    h.store(spaces[5], chain_of(1, 2))
    writing = h.cache.reserve(h.owner, spaces[9], b"", chain_of(2, 1), 10)
    dropped = counted(monkeypatch, Index, "drop_table")
    assert h.cache.flush_dram([namespace.number for namespace in spaces], b"")[0] == 2
    assert dropped() == 1  # pending blocks of the other namespace have been dropped already
    assert [int(state) for state in h.cache.writes.commit(h.owner, writing.lease_id, [0])] == [2]
    assert h.cache.match(h.owner, [spaces[5]], chain_of(1, 2), 0).dram == 0
    finish(h)


@pytest.mark.parametrize("after", range(4))
def test_a_pin_that_is_lost_while_its_regions_are_listed_is_no_contradiction(after: int) -> None:
    blocks = 3 * LOOKUPS
    h = CacheRig(region_bytes=2 * blocks * FRAME_BYTES)
    namespace, slices = h.space(), 0
    keys = fill(h, namespace, 1, blocks)

    def lose() -> None:
        nonlocal slices
        slices += 1
        if slices == after:
            h.cache.flush_dram([namespace.number], keys[-16:])

    in_slices(h.cache.reads.pins.pin([namespace], keys, 10), lose)
    finish(h)
    assert h.cache.space.index.invariant_failures == 0


def test_leases_on_wide_windows_end_in_slices_when_their_time_is_up() -> None:
    h = CacheRig(region_bytes=(WINDOW + 100) * FRAME_BYTES)
    namespace, keys = windowed(h)
    for _ in range(3 * PINS_LISTED // WINDOW):
        assert h.cache.match(h.owner, [namespace], keys, 10).lease is not None
    h.now_s = 11
    before, goes = len(h.cache.reads.leases), 0
    while h.cache.reads.leases:
        h.cache.expire()
        assert before - len(h.cache.reads.leases) <= PINS_LISTED // WINDOW + 1
        before, goes = len(h.cache.reads.leases), goes + 1
    assert goes > 2
    finish(h)


def test_many_leases_on_wide_windows_are_renewed_in_slices(client: Client) -> None:
    namespace, other = client.namespace(4096, window_blocks=WINDOW), client.namespace(4096)
    keys = new_chain(WINDOW)
    for first in range(0, WINDOW, 500):
        client.store(namespace, keys[16 * first : 16 * (first + 500)], [block_of(1, 4096)] * 500)
    leases = [client.match([namespace], keys)[1] for _ in range(8)]
    assert all(leases)
    client.send("renew", [*leases, 1], 60_000)
    client.send("flush", "all", [other], b"")
    answers = {answer[0]: answer for answer in (client.answer(), client.answer())}
    assert answers.keys() == {"flushed", "renewed"}, "the order depends on when the second request came"
    assert answers["renewed"][3] == bytes([1] * 8 + [0])
    assert all(map(client.release, leases))


@pytest.mark.parametrize("window", [0, 4])
def test_matches_and_pins_of_what_is_not_here_leave_nothing_behind(window: int) -> None:
    h = CacheRig()
    namespace = h.space(window_blocks=window)
    for _ in range(5):
        assert h.cache.match(h.owner, [namespace], chain_of(1, 8), 10).lease is None
        assert h.cache.pin([namespace], chain_of(1, 8), 10) == 0
    assert h.cache.reads.runs._taken == {}


@pytest.mark.parametrize("lost", [False, True])
def test_that_a_wide_window_is_whole_takes_one_look_before_its_blocks(
    monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """Every request checks the lease, however often other blocks are dropped, and while those are being unlinked."""
    h = CacheRig(region_bytes=(WINDOW + 3000) * FRAME_BYTES)
    namespace, keys = windowed(h)
    other = h.space()
    lease = h.cache.match(h.owner, [namespace], keys, 10).lease
    assert lease is not None
    assert len(lease.pins) == WINDOW
    h.cache.flush_dram([other.number], fill(h, other, 2, 2500)[:KEY_BYTES])
    if lost:
        h.cache.flush_dram([namespace.number], keys[-KEY_BYTES:])
    assert h.cache.space.index.unlinking_entries()
    looked = counted(monkeypatch, Index, "attached")
    assert (h.cache.reads.find(h.owner, lease.lease_id) is None) is lost
    assert looked() <= 1
    finish(h)


class Pinned(Counter[int]):
    """Pins may protect thousands of regions."""

    def items(self) -> ItemsView[int, int]:
        raise AssertionError("all of them are looked at for one pin")


@pytest.mark.parametrize("flushed", [False, True])
def test_pins_that_lie_in_many_regions_end_some_at_a_time(monkeypatch: pytest.MonkeyPatch, flushed: bool) -> None:
    monkeypatch.setattr("tiercache.daemon.tiers.dram.read_leases.PINS_LISTED", 60)
    monkeypatch.setattr("tiercache.daemon.tiers.dram.read_leases.PINS", 4)
    h = CacheRig(regions=8, pin_share=1000.0)
    namespace, keys = h.space(), chain_of(1, 60)
    h.store(namespace, keys)
    pinned = h.cache.space.pinned_regions = Pinned()
    for blocks in (60, 59, 58, 57):
        assert h.cache.pin([namespace], keys[: blocks * KEY_BYTES], 10) == blocks
    assert list(pinned.values()) == [4] * 8
    left = []
    if flushed:
        h.cache.space.index.drop(namespace.table.get(keys[:KEY_BYTES]))
        h.cache.space.index.unlink_slice(1000)
        h.cache.reads.suspect_all()
    h.now_s = 11
    while h.cache.reads.pins.leases:
        if flushed:
            h.cache.reads.work()
        else:
            h.cache.reads.expire()
        left.append(len(h.cache.reads.pins.leases))
    assert left == ([3, 2, 1, 0] if flushed else [2, 0])
    assert pinned == {}
    h.cache.space.pinned_regions = Counter()
    finish(h)


def test_cards_are_looked_at_in_slices_whether_or_not_they_may_be_told() -> None:
    """Models that name a namespace unknown to their session are left out, and take as long."""
    card = m.ModelCard(["a"], b"c", ["unknown"], 16)
    models = {number.to_bytes(2, "little"): card for number in range(300)}
    sessions = {number: SimpleNamespace(tenant="t", registered={}, models=models) for number in range(10)}
    context = SimpleNamespace(sessions=sessions)
    space = SimpleNamespace(numbers=lambda names: {}, windows=lambda names: {})
    ours: Any = SimpleNamespace(_context=context, _space=space, _generation=1)
    asking: Any = SimpleNamespace(tenant="t")
    steps = AdminRequests._models(ours, asking, m.Models(1, b"", 1, 0))
    assert sum(1 for _ in steps) == 10
