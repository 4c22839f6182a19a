"""A kill leaves no row whose parent's row is gone, whatever still held the dropped blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
from chains import chain_of, key_of
from played import played
from tier_rig import TierRig

from tiercache.daemon.index.policy import NO_ENTRY
from tiercache.daemon.tiers.nvme.catalog.catalog_check import check_rows
from tiercache.daemon.tiers.nvme.check.directory_check import ALL, check_directory


async def rig_with(root: Path, chain: bytes) -> TierRig:
    """A chain on NVMe, and a disk that ends no operation until its gate opens."""
    rig = await TierRig(root).open()
    rig.store(rig.namespace(), chain)
    await rig.settled()
    rig.disks[rig.dirs[0]].gate.clear()
    return rig


async def hold_last(rig: TierRig, chain: bytes, holder: str) -> None:
    """Have the last block of `chain` held: by the write of a child, or by reads."""
    space, (shelf,) = rig.namespace(), rig.shelves
    last = shelf.table(space).get(key_of(chain, len(chain) // 16 - 1))
    if holder == "write":
        rig.store(space, chain_of("a", 12))
    else:
        rig.forget_dram()
        assert rig.match([space], chain) is not None
    await rig.until(lambda: shelf.index.pins[last] > 0 and shelf.queue.in_flight > 0)


def kept_keys(rig: TierRig) -> set[bytes]:
    return {row.key for _, row in check_rows(rig.dirs[0]) if row is not None}


@pytest.mark.parametrize("holder", ["write", "read"])
@pytest.mark.parametrize("reason", ["flush", "damage"])
@played
async def test_a_held_block_keeps_its_slot_and_not_its_row(tmp_path: Path, holder: str, reason: str) -> None:
    chain = chain_of("a", 10)
    rig = await rig_with(tmp_path, chain)
    space, (shelf,) = rig.namespace(), rig.shelves
    last = shelf.table(space).get(key_of(chain, 9))
    slot = shelf.index.frame[last]
    await hold_last(rig, chain, holder)
    if reason == "flush":
        assert await rig.flush(key_of(chain, 4), tier="nvme")
    else:
        shelf.drop_damaged(space, key_of(chain, 4))
    await rig.until(lambda: kept_keys(rig).isdisjoint({key_of(chain, 4), key_of(chain, 8)}))
    assert shelf.index.frame[last] == slot, "it is still held"
    assert kept_keys(rig) == {key_of(chain, number) for number in range(4)}
    await rig.crash()
    assert check_directory(tmp_path / "nvme0", sample=ALL, rate=0).findings == []


@pytest.mark.parametrize("holder", ["write", "read"])
@played
async def test_the_slot_of_a_held_block_is_free_once_it_is_let_go(tmp_path: Path, holder: str) -> None:
    chain = chain_of("a", 10)
    rig = await rig_with(tmp_path, chain)
    space, (shelf,) = rig.namespace(), rig.shelves
    await hold_last(rig, chain, holder)
    used_bytes = shelf.allocator.used_bytes
    assert await rig.flush(key_of(chain, 4))
    rig.disks[rig.dirs[0]].gate.set()
    await rig.settled()
    await rig.until(lambda: shelf.table(space).get(key_of(chain, 4)) == NO_ENTRY and shelf.queue.in_flight == 0)
    await rig.until(lambda: shelf.allocator.used_bytes == 4 * rig.namespace().size_class.frame_bytes)
    assert used_bytes > shelf.allocator.used_bytes
    rig.check()
    await rig.until(lambda: not rig.cache.writes.pending.by_key)  # what was being promoted can be stored again
    rig.store(space, chain)
    await rig.settled()
    assert await rig.load(space, chain) == 10
    await rig.close()
    assert check_directory(tmp_path / "nvme0", sample=ALL, rate=0).findings == []


@played
async def test_a_held_row_that_could_not_be_deleted_goes_before_its_parents(tmp_path: Path) -> None:
    """The database refuses it for a while; what is dropped meanwhile waits behind it."""
    chain = chain_of("a", 10)
    rig = await rig_with(tmp_path, chain)
    space, (shelf,) = rig.namespace(), rig.shelves
    await hold_last(rig, chain, "write")
    order = list[int]()
    slot_of = {number: shelf.index.frame[shelf.table(space).get(key_of(chain, number))] for number in range(10)}
    delete, refused = shelf.slots.left._post_deletions, list[int]()

    def post(slots: list[int]) -> None:
        if not refused:
            refused.extend(slots)
            shelf.slots.left._rows_deleted(slots, ok=False)
            return
        order.extend(slots)
        delete(slots)

    shelf.slots.left._post_deletions = post  # type: ignore[method-assign]
    shelf.drop(space, key_of(chain, 4))
    await rig.until(lambda: len(order) == 6)
    assert order == [slot_of[number] for number in range(9, 3, -1)]
    await rig.crash()
