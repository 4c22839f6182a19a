"""Namespaces over the lives of a directory: what is remembered, and that there is always room for new ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from tier_rig import TierRig, keys_of, play

from tiercache.daemon import space as space_module
from tiercache.daemon.nvme.catalog_check import read_state
from tiercache.daemon.space import Namespace, NoRoom

RANKS = 4


async def _filled(root: Path) -> tuple[TierRig, list[Namespace]]:
    """A tier with one chain in as many namespaces as there may be."""
    rig = await TierRig(root).open()
    namespaces = [rig.namespace(rank=rank) for rank in range(RANKS)]
    for namespace in namespaces:
        rig.store(namespace, keys_of("a", 5))
    await rig.settled()
    return rig, namespaces


def test_namespaces_without_blocks_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space_module, "MAX_NAMESPACES", RANKS)

    async def scenario() -> None:
        rig, namespaces = await _filled(tmp_path)
        answers: list[bool] = []
        rig.tier.flush(namespaces[1:], b"", lambda blocks, durable: answers.append(durable))
        await rig.until(lambda: bool(answers))
        await rig.close()
        rig = await TierRig(tmp_path).open()
        with pytest.raises(NoRoom, match="restart the daemon to forget the empty ones"):
            rig.namespace(rank=RANKS)
        first, second = rig.namespace(rank=0), rig.namespace(rank=1)
        assert await rig.load(first, keys_of("a", 5)) == 5
        rig.store(second, keys_of("b", 3))  # one that was forgotten just now is made anew
        await rig.settled()
        await rig.crash()
        rig = await TierRig(tmp_path).open()
        new = rig.namespace(rank=RANKS)
        rig.store(new, keys_of("a", 2))
        await rig.settled()
        await rig.close()
        state = read_state(rig.dirs[0])
        assert len(state.namespaces) == 3
        assert state.tombstones == []
        rig = await TierRig(tmp_path).open()
        for rank, name, blocks in ((0, "a", 5), (1, "a", 0), (1, "b", 3), (RANKS, "a", 2)):
            assert await rig.load(rig.namespace(rank=rank), keys_of(name, 5)) == blocks
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
        found = [await rig.load(rig.namespace(rank=rank), keys_of("a", 5)) for rank in range(RANKS)]
        assert sorted(found) == [0, 0, 0, 5]
        rig.check()
        await rig.close()

    play(scenario)
