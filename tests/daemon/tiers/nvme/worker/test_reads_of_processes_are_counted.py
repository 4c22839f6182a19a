"""The same where a worker process reads: there every read is counted so."""

from __future__ import annotations

from pathlib import Path

import pytest
from chains import chain_of
from played import played
from worker_rig import WorkerRig

pytestmark = pytest.mark.faults


@played
async def test_promoted_blocks_count_as_reads(tmp_path: Path) -> None:
    rig = await WorkerRig(tmp_path).open()
    space, chain = rig.namespace(), chain_of("a", 1)
    await rig.store_below([space], chain)
    assert await rig.load(space, chain) == 1
    stats = rig.queue().stats()
    assert (stats["reads"], stats["writes"]) == (1, 1)
    await rig.close()
