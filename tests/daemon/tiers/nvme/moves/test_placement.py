"""In which directory a chain lives, and the blocks of windows."""

from __future__ import annotations

from pathlib import Path

import pytest
from chains import chain_of, key_of
from memory_disks import MemoryDisk
from played import Clock, on_clock
from tier_rig import TierRig

from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.daemon.tiers.nvme.moves.placement import COPIED_SHARE, HEAD_PER_BRANCH
from tiercache.daemon.tiers.nvme.shelf.shelf import Shelf
from tiercache.protocol.messages import CommitState

PAGE = 4096
WINDOW = 3
NOWHERE = Path("/nowhere")


def homes(rig: TierRig, namespace: Namespace, chain: bytes) -> list[int | None]:
    """The number of the directory that has each block."""
    found = []
    for number in range(len(chain) // 16):
        holders = [place for place, one in enumerate(rig.shelves) if one.has(namespace, key_of(chain, number))]
        assert len(holders) < 2
        found.append(holders[0] if holders else None)
    return found


@on_clock
async def test_chains_are_found_whatever_the_order_of_the_directories(clock: Clock) -> None:
    dirs = [NOWHERE / name for name in ("one", "two", "three", "four")]
    disks = [MemoryDisk(number, clock) for number in range(4)]
    rig = await TierRig(NOWHERE, disks=disks[:3], dirs=dirs[:3]).open()
    space, chains = rig.namespace(PAGE), [chain_of(str(number), 5) for number in range(24)]
    for chain in chains:
        rig.store(space, chain)
    await rig.settled()
    homes_of = [set(homes(rig, space, chain)) for chain in chains]
    assert all(len(home) == 1 for home in homes_of), "a chain is in one directory, whole"
    assert set().union(*homes_of) == {0, 1, 2}
    await rig.close()
    for order in ([2, 0, 1], [1, 0], [0, 1, 2, 3]):
        again = TierRig(NOWHERE, disks=[disks[number] for number in order], dirs=[dirs[number] for number in order])
        await again.open()
        found = [await again.load(again.namespace(PAGE), chain) for chain in chains]
        assert found == [5 if home < set(order) or home == set(order) else 0 for home in homes_of]
        again.check()
        await again.close()


def whole(shelf: Shelf, namespace: Namespace, chain: bytes) -> bool:
    """Whether a directory has all of a chain."""
    return shelf.length(namespace, chain, len(chain) // 16) == len(chain) // 16


def having(rig: TierRig, namespace: Namespace, chains: list[bytes]) -> list[int]:
    """How many of these chains each directory has."""
    return [sum(whole(shelf, namespace, chain) for chain in chains) for shelf in rig.shelves]


async def store_in_turn(rig: TierRig, space: Namespace, chains: list[bytes]) -> None:
    for chain in chains:
        rig.store(space, chain)
        await rig.settled()


@on_clock
async def test_chains_with_one_beginning_use_all_directories(clock: Clock) -> None:
    """Each fills its directory: together they have the room of both, less the copies of what they begin with."""
    disks = [MemoryDisk(number, clock, 8, 16 * PAGE) for number in range(2)]
    rig = await TierRig(NOWHERE, disks=disks, arena_regions=2).open()
    space, head = rig.namespace(PAGE), chain_of("system prompt", 5)
    chains = [chain_of(str(number), 4, after=head) for number in range(60)]
    await store_in_turn(rig, space, chains[:48])
    counts = having(rig, space, chains)
    assert sum(counts) == 48
    assert min(counts) >= 12
    stats = rig.tier.stats()
    assert stats["evicted_blocks"] == 0
    assert stats["head_copied_blocks"] == 5, "once for the other directory"
    assert stats["head_copied_bytes"] * COPIED_SHARE <= stats["written_bytes"]
    rig.forget_dram()
    assert [await rig.load(space, chain) for chain in chains[:48]] == [9] * 48
    rig.check()
    await rig.close()
    # Both are found after a restart, and each goes on by itself when the other is away.
    rig = await TierRig(NOWHERE, disks=disks).open()
    space = rig.namespace(PAGE)
    assert having(rig, space, chains) == counts
    await rig.close()
    for number, count in enumerate(counts):
        one = await TierRig(NOWHERE, disks=[disks[number]], dirs=[NOWHERE / f"nvme{number}"]).open()
        space = one.namespace(PAGE)
        assert sum([await one.load(space, chain) == 9 for chain in chains]) == count
        one.check()
        await one.close()


@on_clock
async def test_a_new_directory_fills_while_the_old_one_keeps_what_it_has(clock: Clock) -> None:
    disks = [MemoryDisk(number, clock, 4, 16 * PAGE) for number in range(2)]
    rig = await TierRig(NOWHERE, disks=disks[:1], dirs=[NOWHERE / "nvme0"], arena_regions=2).open()
    space, head = rig.namespace(PAGE), chain_of("system prompt", 2)
    old = [chain_of(str(number), 3, after=head) for number in range(20)]
    await store_in_turn(rig, space, old)
    kept = [chain for chain in old if whole(rig.shelves[0], space, chain)]
    assert not rig.shelves[0].has_room(space)
    await rig.close()
    rig = await TierRig(NOWHERE, disks=disks, arena_regions=2).open()
    space = rig.namespace(PAGE)
    rig.tier._placement.copies.written_bytes = 1 << 30  # rule: of a daemon that has written for long
    assert [await rig.load(space, chain) for chain in kept] == [5] * len(kept)  # DRAM has the beginning again
    new = [chain_of(f"new {number}", 3, after=head) for number in range(15)]
    await store_in_turn(rig, space, new)
    assert having(rig, space, new) == [0, 15]
    assert having(rig, space, kept) == [len(kept), 0]
    assert rig.tier.stats()["evicted_blocks"] == 0
    rig.check()
    await rig.close()


@on_clock
async def test_a_branch_far_down_a_chain_stays_where_the_chain_is(clock: Clock) -> None:
    """A copy of all blocks before it would cost more than it is worth, until many branches are there."""
    disks = [MemoryDisk(number, clock) for number in range(2)]
    rig = await TierRig(NOWHERE, disks=disks, arena_regions=8).open()
    rig.tier._placement.copies.written_bytes = 1 << 30  # rule: of a daemon that has written for long
    space, long = rig.namespace(PAGE), chain_of("long", 2 * HEAD_PER_BRANCH + 1)
    branches = [chain_of(str(number), 1, after=long) for number in range(20)]
    await store_in_turn(rig, space, branches[:3])
    assert sorted(having(rig, space, branches)) == [0, 3]
    await store_in_turn(rig, space, branches[3:])
    assert min(having(rig, space, branches)) > 0
    assert rig.tier.stats()["head_copied_blocks"] == len(long) // 16
    rig.check()
    await rig.close()


@on_clock
@pytest.mark.parametrize("whole_namespace", [True, False])
async def test_a_flush_reaches_the_copies_of_a_head(clock: Clock, whole_namespace: bool) -> None:
    disks = [MemoryDisk(number, clock) for number in range(2)]
    rig = await TierRig(NOWHERE, disks=disks, arena_regions=8).open()
    rig.tier._placement.copies.written_bytes = 1 << 30  # rule: of a daemon that has written for long
    space, head = rig.namespace(PAGE), chain_of("system prompt", 3)
    chains = [chain_of(str(number), 2, after=head) for number in range(12)]
    await store_in_turn(rig, space, chains)
    assert min(having(rig, space, chains)) > 0
    assert await rig.flush(b"" if whole_namespace else key_of(head, 1))
    left = 0 if whole_namespace else 1
    assert [shelf.length(space, head, 3) for shelf in rig.shelves] == [left, left]
    rig.check()
    await rig.close()


@on_clock
async def test_clients_that_write_themselves_write_the_head_to_both_directories(clock: Clock) -> None:
    disks = [MemoryDisk(number, clock, segment_bytes=1 << 20) for number in range(2)]
    rig = await TierRig(NOWHERE, disks=disks).open()
    grants = rig.tier.grants
    assert grants is not None
    space, head = rig.namespace(PAGE), chain_of("system prompt", 3)
    chains, granted = [chain_of(str(number), 2, after=head) for number in range(40)], list[int]()
    for chain in chains:
        while (got := grants.reserve(rig.owner, space, b"", chain, 10)).soon:
            await rig.settled()
        states = grants.commit(rig.owner, got.lease_id, [0] * len(got.extents))
        assert [state is CommitState.VISIBLE for state in states] == [True] * len(got.extents)
        assert got.present + len(states) == 5
        granted.append(len(states))
    assert sorted(granted) == [2] * 38 + [5, 5], "the head twice, once to each"
    assert min(having(rig, space, chains)) >= 10
    stats = rig.tier.stats()
    assert stats["head_copied_blocks"] == 3
    assert stats["direct_stored_blocks"] == 86
    rig.check()
    await rig.close()


@on_clock
async def test_a_window_lives_where_its_chain_does(clock: Clock) -> None:
    disks = [MemoryDisk(number, clock) for number in range(3)]
    rig = await TierRig(NOWHERE, disks=disks, arena_regions=16).open()
    chains, window = rig.namespace(PAGE), rig.namespace(PAGE, window_blocks=WINDOW)
    alone = rig.namespace(PAGE, rank=1, window_blocks=WINDOW)
    names = [chain_of(str(number), 10) for number in range(8)]
    for chain in names:
        rig.store(chains, chain[: 16 * 6])
        rig.store(window, chain[: 16 * 6], first=4)  # the first ones had left the window already
    for chain in names:
        rig.store(window, chain, first=6)  # a turn later, the window first
        rig.store(chains, chain, first=6)
    await rig.settled()
    lonely = [chain_of(f"alone {number}", 10) for number in range(12)]
    for first in range(0, 10, 2):
        for chain in lonely:
            rig.store(alone, chain[: 16 * (first + 2)], first=first)
    await rig.settled()
    used = set[int | None]()
    for chain in names:
        (home,) = set(homes(rig, chains, chain))
        assert homes(rig, window, chain) == [None] * 4 + [home] * 6
        used.add(home)
    assert {len(set(homes(rig, alone, chain))) for chain in lonely} == {1}
    assert len(used | {homes(rig, alone, chain)[0] for chain in lonely}) == 3, "every disk has its share"
    await rig.close()
    # Turns after a restart go on where the blocks before are.
    rig = await TierRig(NOWHERE, disks=disks, arena_regions=16).open()
    chains, window = rig.namespace(PAGE), rig.namespace(PAGE, window_blocks=WINDOW)
    for number, chain in enumerate(names):
        longer = chain_of(str(number), 14)
        rig.store(window, longer, first=10)
        await rig.settled()
        assert set(homes(rig, window, longer)[4:]) == set(homes(rig, chains, chain))
    await rig.close()


@on_clock
async def test_a_window_waits_for_the_rows_that_tell_where_it_is(clock: Clock) -> None:
    """While a directory loads, the tier cannot know whether it has a block, so it does not write the block again."""
    disks = [MemoryDisk(number, clock) for number in range(2)]
    rig = await TierRig(NOWHERE, disks=disks).open()
    window, names = rig.namespace(PAGE, window_blocks=WINDOW), [chain_of(str(number), 6) for number in range(8)]
    for chain in names:
        rig.store(window, chain)
    await rig.settled()
    before = [homes(rig, window, chain) for chain in names]
    await rig.close()
    rig = TierRig(NOWHERE, disks=disks)
    await rig.tier.open()
    slow = rig.shelves[0].recovery
    assert slow is not None
    slow.work = lambda: False  # type: ignore[method-assign]
    await rig.until(lambda: not rig.shelves[1].loading)
    window = rig.namespace(PAGE, window_blocks=WINDOW)
    for chain in names:
        rig.store(window, chain, first=3)
    await rig.work(100)
    del slow.work  # type: ignore[method-assign]
    await rig.loaded()
    await rig.settled()
    assert [homes(rig, window, chain) for chain in names] == before
    assert rig.tier.stats()["written_blocks"] == 0
    rig.check()
    await rig.close()
