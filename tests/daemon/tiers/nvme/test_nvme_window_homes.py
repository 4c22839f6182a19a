"""In which directory a windowed namespace's blocks are, and what becomes of them without it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from chains import chain_of
from played import played
from tier_rig import TierRig
from window_rig import WINDOW, broken, check_closed, homes, spaces_of, spread

from tiercache.daemon.index.entries import Table
from tiercache.daemon.tiers.nvme import shelf as shelves

pytestmark = pytest.mark.usefixtures("slices")


@played
async def test_a_window_lives_where_its_chain_does(tmp_path: Path) -> None:
    rig = await TierRig(tmp_path, disks=3, arena_regions=16).open()
    chains, window = spaces_of(rig)
    alone = rig.namespace(rank=1, window_blocks=WINDOW)
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
    used = set()
    for chain in names:
        (home,) = set(homes(rig, chains, chain))
        assert homes(rig, window, chain) == [None] * 4 + [home] * 6
        used.add(home)
    assert {len(set(homes(rig, alone, chain))) for chain in lonely} == {1}
    assert len(used | {homes(rig, alone, chain)[0] for chain in lonely}) == 3, "every disk has its share"
    rig.check()
    await rig.close()
    check_closed(rig)
    # Turns after a restart go on where the blocks before are.
    rig = await TierRig(tmp_path, disks=3, arena_regions=16).open()
    chains, window = spaces_of(rig)
    for number, chain in enumerate(names):
        longer = chain_of(str(number), 14)
        rig.store(window, longer, first=10)
        await rig.settled()
        assert set(homes(rig, window, longer)[4:]) == set(homes(rig, chains, chain))
    await rig.close()


@played
async def test_a_window_over_several_directories_is_right_or_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelves, "OFFLINE_AGE_S", 0.3)
    rig = await TierRig(tmp_path, disks=3).open()
    spaces, chain = spaces_of(rig), chain_of("a", 13)
    chains, window = spaces
    await spread(rig, window, chain)
    rig.store(chains, chain)
    await rig.settled()
    rig.forget_dram()
    assert await rig.load_all(spaces, chain) == 13
    assert rig.tier.stats()["promoted_blocks"] == 13 + WINDOW
    await rig.settled()
    assert homes(rig, window, chain) == [number % 3 for number in range(13)], "not written again elsewhere"
    rig.check()
    for disk in rig.disks.values():  # each of them cannot be read, in turn
        rig.forget_dram()
        disk.hook = broken
        assert await rig.load(window, chain) == 0
        rig.check()
        disk.hook = lambda name, size: None
    # One disk hangs while the window comes up: no request waits for it, and no cut over it is found meanwhile.
    rig.forget_dram()
    hung = rig.shelves[1]
    gate = rig.disks[hung.directory.path].gate
    gate.clear()
    lease = rig.match([window], chain)
    assert lease is not None
    await rig.until(lambda: lease.lease_id not in rig.cache.reads.growing.leases)
    assert rig.read(lease, window) == 0
    assert hung.offline
    assert rig.cache.peek([window], chain) == (0, 1), "the first block alone, as a short prompt"
    gate.set()
    await rig.until(lambda: not hung.offline and hung.queue.in_flight == 0)
    rig.forget_dram()
    assert await rig.load(window, chain) == 13
    rig.check()
    await rig.close()
    check_closed(rig)


@played
async def test_a_lost_directory_costs_the_windows_that_it_had(tmp_path: Path) -> None:
    rig = await TierRig(tmp_path, disks=2, arena_regions=16).open()
    window, names = rig.namespace(window_blocks=WINDOW), [chain_of(str(number), 6) for number in range(12)]
    for chain in names:
        rig.store(window, chain)
    await rig.settled()
    homes_of = [set(homes(rig, window, chain)) for chain in names]
    await rig.close()
    rig = await TierRig(tmp_path, dirs=rig.dirs[:1]).open()
    window = rig.namespace(window_blocks=WINDOW)
    found = [await rig.load(window, chain) for chain in names]
    assert found == [6 if home == {0} else 0 for home in homes_of]
    assert set(found) == {0, 6}
    await rig.close()


@played
async def test_a_window_waits_for_the_rows_that_tell_where_it_is(tmp_path: Path) -> None:
    """While a directory loads, the tier cannot know whether it has a block, so it does not write the block again."""
    rig = await TierRig(tmp_path, disks=2, arena_regions=16).open()
    window, names = rig.namespace(window_blocks=WINDOW), [chain_of(str(number), 6) for number in range(8)]
    for chain in names:
        rig.store(window, chain)
    await rig.settled()
    before = [homes(rig, window, chain) for chain in names]
    await rig.close()
    rig = TierRig(tmp_path, disks=2, arena_regions=16)
    await rig.tier.open()
    slow = rig.shelves[0].recovery
    assert slow is not None
    slow.work = lambda: False  # type: ignore[method-assign]
    await rig.until(lambda: not rig.shelves[1].loading)
    window = rig.namespace(window_blocks=WINDOW)
    for chain in names:
        rig.store(window, chain, first=3)
    for _ in range(100):
        rig.cache.work()
    del slow.work  # type: ignore[method-assign]
    await rig.loaded()
    await rig.settled()
    assert [homes(rig, window, chain) for chain in names] == before
    assert rig.tier.stats()["written_blocks"] == 0
    rig.check()
    await rig.close()


@played
async def test_windows_are_placed_without_a_look_at_every_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be thousands: looking at all of them for each block held the event loop for a fifth of a second."""
    looked = 0

    def get(table: Table, key: bytes) -> int:
        nonlocal looked
        looked += 1
        return found(table, key)

    found = Table.get

    rig = await TierRig(tmp_path, disks=2).open()
    space = rig.cache.space
    for layers in range(1, 301):
        spec = msgspec.structs.replace(rig.namespace().spec, layers=layers)
        for shelf in rig.shelves:
            shelf.table(space.open_namespace(spec))
    window, chain = rig.namespace(window_blocks=WINDOW), chain_of("a", 40)
    rig.store(window, chain)
    monkeypatch.setattr(Table, "get", get)
    rig.tier.work()
    monkeypatch.setattr(Table, "get", found)
    await rig.settled()
    assert 0 < looked < 40 * 50
    assert rig.tier.stats()["written_blocks"] == 40
    await rig.close()
