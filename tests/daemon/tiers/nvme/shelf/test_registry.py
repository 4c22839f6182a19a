"""Namespaces over the lives of a directory: what is remembered, and that there is always room for new ones."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from chains import chain_of
from played import play
from tier_rig import TierRig

from tiercache.daemon.cache import Cache
from tiercache.daemon.tiers.dram import space as space_module
from tiercache.daemon.tiers.dram.space import Namespace, NoRoom
from tiercache.daemon.tiers.nvme.catalog.catalog_check import read_state

RANKS = 4


@pytest.mark.parametrize(
    "saved",
    [
        b"",
        b"\xc1",
        b"\x93\x01\x02\x03",
        msgspec.msgpack.encode({"engine": 1}),
        bytes([0x81]) * 2000,
        b"\x81\xa1e\x00\x00",
    ],
    ids=["nothing", "no msgpack", "no map", "no spec", "nested", "more behind it"],
)
def test_a_saved_spec_that_cannot_be_read_is_no_namespace(saved: bytes) -> None:
    assert Cache(lambda: 0.0).space.open_saved(saved) is None


async def _filled(root: Path) -> tuple[TierRig, list[Namespace]]:
    """A tier with one chain in as many namespaces as there may be."""
    rig = await TierRig(root).open()
    namespaces = [rig.namespace(rank=rank) for rank in range(RANKS)]
    for namespace in namespaces:
        rig.store(namespace, chain_of("a", 5))
    await rig.settled()
    return rig, namespaces


def test_namespaces_without_blocks_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space_module, "MAX_NAMESPACES", RANKS)

    async def scenario() -> None:
        rig, namespaces = await _filled(tmp_path)
        answers: list[bool] = []
        rig.forget_dram()  # what DRAM has is written again at the end
        rig.tier.flush(namespaces[1:], b"", lambda blocks, durable: answers.append(durable))
        await rig.until(lambda: bool(answers))
        await rig.close()
        rig = await TierRig(tmp_path).open()
        with pytest.raises(NoRoom, match="restart the daemon to forget the empty ones"):
            rig.namespace(rank=RANKS)
        first, second = rig.namespace(rank=0), rig.namespace(rank=1)
        assert await rig.load(first, chain_of("a", 5)) == 5
        rig.store(second, chain_of("b", 3))  # one that was forgotten just now is made anew
        await rig.settled()
        await rig.crash()
        rig = await TierRig(tmp_path).open()
        new = rig.namespace(rank=RANKS)
        rig.store(new, chain_of("a", 2))
        await rig.settled()
        await rig.close()
        state = read_state(rig.dirs[0])
        assert len(state.namespaces) == 3
        assert state.tombstones == []
        rig = await TierRig(tmp_path).open()
        for rank, name, blocks in ((0, "a", 5), (1, "a", 0), (1, "b", 3), (RANKS, "a", 2)):
            assert await rig.load(rig.namespace(rank=rank), chain_of(name, 5)) == blocks
        rig.check()
        await rig.close()

    play(scenario)


def test_namespaces_beyond_the_limit_are_dropped_with_their_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        rig, _ = await _filled(tmp_path)
        await rig.close()
        monkeypatch.setattr(space_module, "MAX_NAMESPACES", 1)
        rig = await TierRig(tmp_path).open()
        await rig.committed()
        assert rig.tier.stats()["blocks"] == 5
        await rig.close()
        monkeypatch.setattr(space_module, "MAX_NAMESPACES", RANKS)
        assert len(read_state(rig.dirs[0]).namespaces) == 1
        rig = await TierRig(tmp_path).open()
        found = [await rig.load(rig.namespace(rank=rank), chain_of("a", 5)) for rank in range(RANKS)]
        assert sorted(found) == [0, 0, 0, 5]
        rig.check()
        await rig.close()

    play(scenario)
