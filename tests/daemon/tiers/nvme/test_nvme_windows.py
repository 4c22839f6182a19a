"""Windowed namespaces in the NVMe tier, alone and beside chains: there and back, written behind, in directories."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from chains import chain_of, key_of
from tier_rig import BLOCK_BYTES, TierRig, play
from window_rig import WINDOW, broken, check_closed, homes, spaces_of, spread

from tiercache.daemon.index.entries import Table
from tiercache.daemon.tiers.dram import growing_leases, growing_run, read_leases, runs
from tiercache.daemon.tiers.nvme import shelf as shelves
from tiercache.daemon.tiers.nvme.moves import offers, promotion


@pytest.fixture(params=["at once", "in slices"], autouse=True)
def slices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs with the usual and with the smallest slices."""
    if request.param == "in slices":
        for module, name in (
            (growing_run, "PINS"),
            (growing_leases, "PINS"),
            (read_leases, "PINS"),
            (runs, "PINS"),
            (promotion, "PINS"),
            (promotion, "GROW_NS"),
            (offers, "LOOKED_AT_ONCE"),
        ):
            monkeypatch.setattr(module, name, 1)


# --- there and back ---------------------------------------------------------------------------------


def test_a_window_comes_back_after_a_crash_and_nothing_before_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        chain = chain_of("a", 12)
        rig.store(rig.namespace(window_blocks=WINDOW), chain)
        await rig.settled()
        rig.check()
        await rig.crash()
        check_closed(rig)
        rig = await TierRig(tmp_path).open()
        assert rig.shelves[0].stats()["orphan_rows"] == 0
        window = rig.namespace(window_blocks=WINDOW)
        assert rig.shelves[0].index.tables[window.number].windowed, "its spec says so, and that is durable"
        assert await rig.load(window, chain) == 12
        assert rig.tier.stats()["promoted_blocks"] == WINDOW
        assert await rig.load(window, chain[: 16 * 7]) == 7, "an earlier turn: its own window"
        await rig.settled()
        assert rig.tier.stats()["promoted_blocks"] == 2 * WINDOW
        assert rig.tier.stats()["written_blocks"] == 0, "a block here is clean: reading it writes nothing"
        rig.check()
        await rig.close()

    play(scenario)


def test_a_chain_and_a_window_come_up_together(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        spaces, chain = spaces_of(rig), chain_of("a", 12)
        for space in spaces:
            rig.store(space, chain)
        await rig.settled()
        rig.forget_dram()
        assert rig.cache.peek(spaces, chain + chain_of("b", 1)) == (0, 12)
        assert await rig.load_all(spaces, chain) == 12
        assert rig.tier.stats()["promoted_blocks"] == 12 + WINDOW
        rig.check()
        # Further ranks, one of which has a turn less.
        ranks = [*spaces, rig.namespace(rank=1), rig.namespace(rank=1, window_blocks=2)]
        for space in ranks[2:]:
            rig.store(space, chain[: 16 * 10])
        await rig.settled()
        rig.forget_dram()
        assert await rig.load_all(ranks, chain) == 10
        rig.check()
        await rig.close()

    play(scenario)


def test_one_window_in_both_tiers(tmp_path: Path) -> None:
    """Each block of it may be in DRAM only, on NVMe only, or in both."""

    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        spaces, chain = spaces_of(rig), chain_of("a", 8)
        chains, window = spaces
        for space in spaces:
            rig.store(space, chain)
        await rig.settled()
        for dram_only in range(5, 8):
            for gone in range(1, 8):
                rig.store(window, chain)
                rig.store(chains, chain)
                rig.shelves[0].drop(window, key_of(chain, dram_only))
                numbers = [5 + bit for bit in range(3) if gone >> bit & 1]
                for number in numbers:
                    rig.forget_blocks(window, key_of(chain, number))
                whole = dram_only not in numbers
                assert await rig.load_all(spaces, chain) == (8 if whole else dram_only)
                rig.check()
                rig.store(window, chain)
                await rig.settled()
        await rig.close()

    play(scenario)


def test_leases_of_overlapping_windows_share_their_reads(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        spaces, chain = spaces_of(rig), chain_of("a", 40)
        for space in spaces:
            rig.store(space, chain)
        await rig.settled()
        rig.forget_dram()
        disk = rig.disks[rig.dirs[0]]
        disk.gate.clear()
        leases = [rig.match(spaces, chain[: 16 * blocks]) for blocks in (40, 39, 40, 25)]
        assert all(lease is not None and lease.blocks == 0 for lease in leases)
        alone = [rig.match(spaces[1:], chain) for _ in range(2)]  # all that these want is on its way already
        first = leases[0]
        assert first is not None
        rig.cache.reads.release(rig.owner, first.lease_id)  # the client that began is gone, the others go on
        disk.gate.set()
        await rig.until(lambda: not rig.cache.reads.growing.leases)
        assert [rig.read(lease, *spaces) for lease in leases[1:] if lease] == [39, 40, 25]
        assert [rig.read(lease, spaces[1]) for lease in alone if lease] == [40, 40]
        assert rig.tier.stats()["promoted_blocks"] == 40 + 4 + 3
        rig.check()
        await rig.close()

    play(scenario)


def test_a_lease_that_grows_hands_out_each_namespace_as_it_comes(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        spaces, chain = spaces_of(rig), chain_of("a", 12)
        chains, window = spaces
        for space in spaces:
            rig.store(space, chain)
        await rig.settled()
        rig.forget_dram()
        rig.store(chains, chain[: 16 * 9])
        rig.store(window, chain[: 16 * 6])
        rig.shelves[0].drop(window, key_of(chain, 11))
        rig.store(window, key_of(chain, 11))  # the last one of the window is in DRAM, those before it below
        frames, gate = rig.cache.reads.frames, rig.disks[rig.dirs[0]].gate
        gate.clear()
        lease = rig.match(spaces, chain)
        assert lease is not None
        assert (lease.blocks, lease.target) == (6, 12)
        assert [len(frames(lease, chains, first, 12)) for first in (0, 6, 9)] == [9, 3, 0]
        assert [len(frames(lease, window, first, 12)) for first in (0, 3, 5, 9, 11)] == [0, 3, 1, 0, 0]
        gate.set()
        await rig.until(lambda: not rig.cache.reads.growing.leases)
        assert [len(frames(lease, window, first, 12)) for first in (3, 8, 9, 11)] == [0, 0, 3, 1]
        assert rig.read(lease, *spaces) == 12
        rig.check()
        await rig.close()

    play(scenario)


def test_where_the_rest_does_not_come_the_cut_of_dram_is_still_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        spaces, chain = spaces_of(rig), chain_of("a", 12)
        for space in spaces:
            rig.store(space, chain)
        await rig.settled()
        rig.forget_dram()
        for space in spaces:
            rig.store(space, chain[: 16 * 6])
        disk = rig.disks[rig.dirs[0]]
        places = [rig.shelves[0].find(spaces[1], key_of(chain, number)) for number in range(9, 12)]
        offsets = [stored.slot & (1 << 48) - 1 for stored in places if stored is not None]

        def bad_window(name: str, size: int) -> int | None:
            offset = disk.call.offset
            return broken(name, size) if any(offset <= one < offset + size for one in offsets) else None

        # First the rest of the chain comes and the window does not, then nothing comes.
        for hook in (bad_window, broken):
            disk.hook = hook
            lease = rig.match(spaces, chain)
            assert lease is not None
            assert (lease.blocks, lease.target) == (6, 12)
            await rig.until(lambda: not rig.cache.reads.growing.leases)
            disk.hook = lambda name, size: None
            assert rig.tier.stats()["promoted_blocks"] == 6, "in the first round"
            assert rig.cache.reads.frames(lease, spaces[0], 6, 6) == []
            assert rig.read(lease, *spaces) == 6
            rig.check()
            rig.forget_blocks(spaces[0], key_of(chain, 6))
            await rig.settled()
            rig.tier._promotion._unreadable.clear()  # a second failure of a block would be its last
        assert await rig.load_all(spaces, chain) == 12, "a block that failed once may be good the next time"
        await rig.close()

    play(scenario)


def test_a_window_larger_than_dram_is_a_miss(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        chain = chain_of("a", 60)
        rig.store(rig.namespace(window_blocks=50), chain)
        await rig.settled()
        await rig.close()
        rig = await TierRig(tmp_path, arena_regions=1).open()  # 32 frames
        window = rig.namespace(window_blocks=50)
        for _ in range(3):
            assert await rig.load(window, chain) == 0
            rig.check()
        assert await rig.load(window, chain[: 16 * 30]) == 30
        rig.check()
        await rig.close()

    play(scenario)


def test_prefetches_bring_windows_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        spaces, chain = spaces_of(rig), chain_of("a", 12)
        for space in spaces:
            rig.store(space, chain)
        await rig.settled()
        rig.forget_dram()
        assert rig.cache.prefetch(rig.owner, spaces, chain).below == 12
        await rig.until(lambda: not rig.cache.reads.growing.leases)
        assert rig.cache.reads.leases == {}
        assert rig.cache.match(rig.owner, spaces, chain, 0.0).dram == 12
        rig.check()
        await rig.close()

    play(scenario)


# --- writing behind ---------------------------------------------------------------------------------


def test_what_the_budget_skips_is_written_when_asked_for_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, nvme_write_budget_bytes=1 << 40).open()
        spaces, chain, budget = spaces_of(rig), chain_of("a", 12), rig.tier._budget
        budget._level = budget._rate = 0.0
        for space in spaces:
            rig.store(space, chain)
        await rig.settled()
        assert rig.tier.stats()["blocks"] == 0
        budget._level = budget._depth
        assert await rig.load_all(spaces, chain[: 16 * 9]) == 9
        await rig.settled()
        assert rig.tier.stats()["blocks"] == 9 + WINDOW, "the chain, and the window that was asked for"
        assert homes(rig, spaces[1], chain) == [None] * 6 + [0] * 3 + [None] * 3
        assert await rig.close(grace_s=30) == 0
        check_closed(rig)
        rig = await TierRig(tmp_path).open()
        assert rig.tier.stats()["blocks"] == 24, "the rest within the grace"
        assert await rig.load_all(spaces_of(rig), chain) == 12
        await rig.close()

    play(scenario)


def test_old_blocks_of_windows_make_room_for_new_ones(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path, arena_regions=1, nvme_bytes=16 << 20).open()  # 7 segments of 32 slots
        window, chain = rig.namespace(window_blocks=WINDOW), chain_of("a", 400)
        for first in range(0, 400, 8):
            rig.store(window, chain[: 16 * (first + 8)], first=first)
            await rig.settled()
        rig.check()
        here = [number for number, home in enumerate(homes(rig, window, chain)) if home is not None]
        assert len(here) >= 224 - 28 - 8, "the directory is full, and no emptier than it must be"
        assert min(here) >= 400 - 224, "the oldest blocks went"
        rig.forget_dram()
        assert await rig.load(window, chain) == 400
        # A window that is asked for stays, while others come and go.
        kept = chain[: 16 * (min(here) + 8)]
        for number in range(30):
            rig.forget_dram()
            assert await rig.load(window, kept) == len(kept) // 16
            rig.store(window, chain_of(f"other {number}", 8))
            await rig.settled()
        rig.check()
        await rig.close()
        check_closed(rig)

    play(scenario)


def test_a_namespace_for_dram_only_stays_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = await TierRig(tmp_path).open()
        spec = rig.namespace(window_blocks=1).spec
        spaces = [
            rig.cache.space.open_namespace(
                type(spec)(
                    engine="t",
                    layout="l",
                    dtype="uint8",
                    block_size=1,
                    block_bytes=BLOCK_BYTES,
                    window_blocks=window,
                    extra={"tiers": "dram"},
                )
            )
            for window in (0, 1)
        ]
        for space in spaces:
            rig.store(space, chain_of("a", 5))
            assert await rig.load(space, chain_of("a", 5)) == 5
        await rig.settled()
        assert await rig.close(grace_s=30) == 0
        rig = await TierRig(tmp_path).open()
        assert rig.tier.stats()["blocks"] == 0
        await rig.close()

    play(scenario)


# --- several directories ----------------------------------------------------------------------------


def test_a_window_lives_where_its_chain_does(tmp_path: Path) -> None:
    async def scenario() -> None:
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

    play(scenario)


def test_a_window_over_several_directories_is_right_or_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
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

    play(scenario)


def test_a_lost_directory_costs_the_windows_that_it_had(tmp_path: Path) -> None:
    async def scenario() -> None:
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

    play(scenario)


def test_a_window_waits_for_the_rows_that_tell_where_it_is(tmp_path: Path) -> None:
    """While a directory loads, the tier cannot know whether it has a block, so it does not write the block again."""

    async def scenario() -> None:
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

    play(scenario)


def test_windows_are_placed_without_a_look_at_every_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be thousands: looking at all of them for each block held the event loop for a fifth of a second."""
    looked = 0

    def get(table: Table, key: bytes) -> int:
        nonlocal looked
        looked += 1
        return found(table, key)

    found = Table.get

    async def scenario() -> None:
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

    play(scenario)
