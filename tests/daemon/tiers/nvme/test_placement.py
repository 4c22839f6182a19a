"""In which directory a chain lives, and the blocks of windows."""

from __future__ import annotations

from pathlib import Path

from chains import chain_of, key_of
from memory_disks import MemoryDisk
from played import Clock, on_clock
from tier_rig import TierRig

from tiercache.daemon.tiers.dram.space import Namespace

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
