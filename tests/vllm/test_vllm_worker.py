"""The worker's half by itself, over a real daemon: blocks that are given away while they are being stored."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_engines import launch, wait_until

import tiercache
from tiercache.connectors.vllm_orders import Orders, Report, Run, Store
from tiercache.connectors.vllm_worker import Worker
from tiercache.gds_backend import Fault, HostBackend

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(60)]
BLOCKS = 8
BLOCK_BYTES = 65536
SPEC = tiercache.NamespaceSpec(engine="t", layout="l", dtype="uint8", block_size=16, block_bytes=BLOCK_BYTES)


@pytest.fixture(params=[False, True], ids=["through DRAM", "straight to NVMe"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Worker, Any, HostBackend]]:
    """A worker, its pool, and a backend whose first write hangs."""
    pool = np.frombuffer(mmap.mmap(-1, BLOCKS * BLOCK_BYTES), np.uint8).reshape(BLOCKS, BLOCK_BYTES)
    backend = HostBackend(write_fault=lambda write: None if write else Fault.HANG)
    disk = {"nvme": str(tmp_path / "disk"), "nvme_size": "64MiB", "nvme_segment": "16MiB"}
    (tmp_path / "disk").mkdir()
    with launch("16MiB", region="8MiB", run_dir=tmp_path / "run", **disk) as daemon:
        connector = tiercache.connect(
            daemon.address, namespace=SPEC, pool=tiercache.Pool.from_blocks(pool), required=True,
            gds=backend if request.param else "off", gds_store=request.param,
        )  # fmt: skip
        worker = Worker([connector], [True])
        wait_until(lambda: connector.client.stats()["tiers"]["nvme"]["directories"])
        yield worker, pool, backend
        backend.resume()
        worker.close()


def report_of(worker: Worker) -> Report:
    """What the worker says of stores, as soon as it does."""
    reports: list[Report] = []
    wait_until(lambda: (report := worker.report()) is not None and reports.append(report) is None)
    return reports[0]


def test_stores_whose_blocks_are_overwritten_count_for_nothing(rig: tuple[Worker, Any, HostBackend]) -> None:
    worker, pool, backend = rig
    connector = worker._groups[0]
    chain = tiercache.KeyChain(tiercache.root_key("worker"), block_size=16)
    chain.extend(range(16 * BLOCKS))
    keys = chain.packed()
    direct = connector.direct.storer is not None
    copier: Any = connector._own_mover().copier
    copy_out, held = copier.copy_out, []

    def copy_when_it_is_too_late(*arguments: Any) -> Any:
        copied = copy_out(*arguments)
        wait_until(lambda: held)
        return copied

    copier.copy_out = copy_when_it_is_too_late
    pool[:] = 7
    worker.begin(Orders(ready=[Store(1, keys, (Run(0, list(range(BLOCKS))),))]))
    wait_until(lambda: backend.hanging or not direct)
    worker.begin(Orders(flush=[1]))  # the step that follows writes to the blocks
    pool[:] = 9
    held.append(True)
    backend.resume()
    report = report_of(worker)
    assert (report.ended, report.incomplete) == ({1: 1}, {1})
    assert connector.match(keys).blocks == 0

    worker.begin(Orders(fresh=[Store(2, keys, (Run(0, list(range(BLOCKS))),))]))
    assert worker.report() is None, "the step has not computed them yet"
    worker.begin(Orders())
    assert report_of(worker) == Report({2: 1}, set())
    match = connector.match(keys)
    assert match.blocks == BLOCKS
    pool[:] = 0
    assert connector.load(match, range(BLOCKS)) == BLOCKS
    assert (pool == 9).all()
