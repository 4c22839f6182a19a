"""Windowed namespaces in the NVMe tier, alone and beside chains: there and back, and written behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from chains import chain_of, key_of
from played import played
from tier_rig import BLOCK_BYTES, TierRig
from window_rig import WINDOW, broken, check_closed, homes, spaces_of

pytestmark = pytest.mark.usefixtures("slices")


# --- there and back ---------------------------------------------------------------------------------


@played
async def test_a_window_comes_back_after_a_crash_and_nothing_before_it(tmp_path: Path) -> None:
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


@played
async def test_a_chain_and_a_window_come_up_together(tmp_path: Path) -> None:
    rig = await TierRig(tmp_path).open()
    spaces, chain = spaces_of(rig), chain_of("a", 12)
    await rig.store_below(spaces, chain)
    assert rig.cache.peek(spaces, chain + chain_of("b", 1)) == (0, 12)
    assert await rig.load_all(spaces, chain) == 12
    assert rig.tier.stats()["promoted_blocks"] == 12 + WINDOW
    rig.check()
    # Further ranks, one of which has a turn less.
    ranks = [*spaces, rig.namespace(rank=1), rig.namespace(rank=1, window_blocks=2)]
    await rig.store_below(ranks[2:], chain[: 16 * 10])
    assert await rig.load_all(ranks, chain) == 10
    rig.check()
    await rig.close()


@played
async def test_one_window_in_both_tiers(tmp_path: Path) -> None:
    """Each block of it may be in DRAM only, on NVMe only, or in both."""
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


@played
async def test_leases_of_overlapping_windows_share_their_reads(tmp_path: Path) -> None:
    rig = await TierRig(tmp_path).open()
    spaces, chain = spaces_of(rig), chain_of("a", 40)
    await rig.store_below(spaces, chain)
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


@played
async def test_a_lease_that_grows_hands_out_each_namespace_as_it_comes(tmp_path: Path) -> None:
    rig = await TierRig(tmp_path).open()
    spaces, chain = spaces_of(rig), chain_of("a", 12)
    chains, window = spaces
    await rig.store_below(spaces, chain)
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


@played
async def test_where_the_rest_does_not_come_the_cut_of_dram_is_still_there(tmp_path: Path) -> None:
    rig = await TierRig(tmp_path).open()
    spaces, chain = spaces_of(rig), chain_of("a", 12)
    await rig.store_below(spaces, chain)
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
        rig.tier.sources.unreadable.blocks.clear()  # a second failure of a block would be its last
    assert await rig.load_all(spaces, chain) == 12, "a block that failed once may be good the next time"
    await rig.close()


@played
async def test_a_window_larger_than_dram_is_a_miss(tmp_path: Path) -> None:
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


@played
async def test_prefetches_bring_windows_up(tmp_path: Path) -> None:
    rig = await TierRig(tmp_path).open()
    spaces, chain = spaces_of(rig), chain_of("a", 12)
    await rig.store_below(spaces, chain)
    assert rig.cache.prefetch(rig.owner, spaces, chain).below == 12
    await rig.until(lambda: not rig.cache.reads.growing.leases)
    assert rig.cache.reads.leases == {}
    assert rig.cache.match(rig.owner, spaces, chain, 0.0).dram == 12
    rig.check()
    await rig.close()


# --- writing behind ---------------------------------------------------------------------------------


@played
async def test_what_the_budget_skips_is_written_when_asked_for_again(tmp_path: Path) -> None:
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


@played
async def test_old_blocks_of_windows_make_room_for_new_ones(tmp_path: Path) -> None:
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


@played
async def test_a_namespace_for_dram_only_stays_there(tmp_path: Path) -> None:
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
