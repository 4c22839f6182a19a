"""The worker's half by itself, with a real daemon: blocks that vLLM reuses while they are being stored."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm_engines import launch, wait_until

import tiercache
from tiercache.connector.direct.backend import Fault, HostBackend
from tiercache.connectors.vllm.orders import BlockRun, Load, Orders, Store, WorkerReport
from tiercache.connectors.vllm.weights import Look, Weights
from tiercache.connectors.vllm.worker import RankWorker

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
BLOCKS = 8
BLOCK_BYTES = 65536
SPEC = tiercache.NamespaceSpec(engine="t", layout="l", dtype="uint8", block_size=16, block_bytes=BLOCK_BYTES)


@pytest.fixture(params=[False, True], ids=["through DRAM", "straight to NVMe"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[RankWorker, Any, HostBackend]]:
    """A worker, its pool, and a backend whose first write hangs."""
    pool = np.frombuffer(mmap.mmap(-1, BLOCKS * BLOCK_BYTES), np.uint8).reshape(BLOCKS, BLOCK_BYTES)
    backend = HostBackend(write_fault=lambda write: None if write else Fault.HANG)
    disk = {"nvme": str(tmp_path / "disk"), "nvme_size": "64MiB", "nvme_segment": "16MiB"}
    (tmp_path / "disk").mkdir()
    with launch("16MiB", region="8MiB", run_dir=tmp_path / "run", **disk) as daemon:
        connector = tiercache.connect(
            daemon.address,
            namespace=SPEC,
            pool=tiercache.Pool.from_blocks(pool),
            required=True,
            gds=backend if request.param else "off",
            gds_store=request.param,
        )
        worker = RankWorker([connector], [True])
        wait_until(lambda: connector.client.stats()["tiers"]["nvme"]["directories"][0]["state"] == "ok")
        yield worker, pool, backend
        backend.resume()
        worker.close()


def report_of(worker: RankWorker) -> WorkerReport:
    """The worker's next report of stores."""
    reports: list[WorkerReport] = []
    wait_until(lambda: (report := worker.report()) is not None and reports.append(report) is None)
    return reports[0]


def test_stores_whose_blocks_are_overwritten_count_for_nothing(rig: tuple[RankWorker, Any, HostBackend]) -> None:
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
    worker.begin(Orders(ready=[Store(1, keys, (BlockRun(0, list(range(BLOCKS))),))]))
    wait_until(lambda: backend.hanging or not direct)
    worker.begin(Orders(flush=[1]))  # the step that follows writes to the blocks
    pool[:] = 9
    held.append(True)
    backend.resume()
    report = report_of(worker)
    assert (report.ended, report.incomplete) == ({1: 1}, {1})
    assert connector.match(keys).blocks == 0

    worker.begin(Orders(fresh=[Store(2, keys, (BlockRun(0, list(range(BLOCKS))),))]))
    assert worker.report() is None, "the step has not computed them yet"
    worker.begin(Orders())
    assert report_of(worker) == WorkerReport({2: 1}, set())
    match = connector.match(keys)
    assert match.blocks == BLOCKS
    pool[:] = 0
    assert connector.load(match, range(BLOCKS)) == BLOCKS
    assert (pool == 9).all()


class Moving:
    """Weights of one tensor, whose changes are known when `known` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tensor = torch.zeros(8)
        self.known = True
        monkeypatch.setattr(Look, "known", lambda look: self.known)
        self.weights = Weights(lambda: [("tensor", self.tensor)])

    def change(self) -> None:
        self.tensor.data += 1


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> Moving:
    return Moving(monkeypatch)


@pytest.fixture
def cached(tmp_path: Path, moving: Moving) -> Iterator[tuple[RankWorker, Any, bytes]]:
    """A worker of such weights, its pool, and the keys of as many blocks as that has, of which half are stored."""
    pool = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
    with launch("16MiB", region="8MiB", run_dir=tmp_path / "run") as daemon:
        connector = tiercache.connect(
            daemon.address, namespace=SPEC, pool=tiercache.Pool.from_blocks(pool), required=True
        )
        worker = RankWorker([connector], [True], weights=moving.weights, rank=3)
        chain = tiercache.KeyChain(tiercache.root_key("weights"), block_size=16)
        chain.extend(range(16 * BLOCKS))
        assert connector.store(chain.packed(), range(BLOCKS // 2)).stored == BLOCKS // 2
        yield worker, pool, chain.packed()
        worker.close()


def order_load(worker: RankWorker, keys: bytes, name: str = "r", **known: Any) -> None:
    ticket = worker._groups[0].match(keys).ticket()
    worker.begin(Orders(loads=[Load(name, ticket, (BlockRun(0, list(range(BLOCKS // 2))),))], **known))


def ended(worker: RankWorker) -> tuple[set[str], set[int]]:
    """Requests whose loads have ended, and blocks that are not good."""
    names: set[str] = set()
    wait_until(lambda: names.update(worker.ended_loads(True)[0]) or names)
    return names, worker.take_bad_blocks()


ALL = set(range(BLOCKS // 2))
REST = (BlockRun(BLOCKS // 2, list(range(BLOCKS // 2, BLOCKS))),)


def test_loads_count_for_the_weights_that_they_are_named_by(
    cached: tuple[RankWorker, Any, bytes], moving: Moving
) -> None:
    worker, _, keys = cached
    order_load(worker, keys)
    assert ended(worker) == ({"r"}, set())
    moving.change()
    order_load(worker, keys)
    assert ended(worker) == ({"r"}, ALL), "they have changed before it began"
    assert report_of(worker).moves == {3: 1}
    order_load(worker, keys)
    assert ended(worker) == ({"r"}, ALL), "the scheduler does not know it yet"
    assert report_of(worker).moves == {3: 1}
    order_load(worker, keys, moves={3: 1}, renamed=True)
    assert ended(worker) == ({"r"}, set())
    worker.report()
    assert worker.report() is None
    order_load(worker, keys, moves={3: 1})
    moving.change()
    worker.begin(Orders(moves={3: 1}))
    assert ended(worker) == ({"r"}, ALL), "they have changed while it went on"


def test_a_load_is_good_only_once_that_is_known(cached: tuple[RankWorker, Any, bytes], moving: Moving) -> None:
    worker, _, keys = cached
    moving.known = False
    order_load(worker, keys)
    wait_until(lambda: all(part.done() for _, part in worker._loads["r"]))
    assert worker.ended_loads(False) == (set(), set())
    moving.known = True
    assert worker.ended_loads(False) == ({"r"}, set())


def test_stores_count_for_the_weights_that_they_are_named_by(
    cached: tuple[RankWorker, Any, bytes], moving: Moving
) -> None:
    worker, _, keys = cached
    connector = worker._groups[0]
    worker.begin(Orders(fresh=[Store(1, keys, REST)]))
    moving.change()  # before or while the step computes them
    worker.begin(Orders())
    report = report_of(worker)
    assert (report.ended, report.incomplete, report.moves) == ({1: 1}, {1}, {3: 1})
    worker.begin(Orders(ready=[Store(2, keys, REST)]))
    assert report_of(worker).incomplete == {2}, "the scheduler does not know it yet"
    worker.begin(Orders(moves={3: 1}, renamed=True, fresh=[Store(3, keys, REST)], ready=[Store(4, keys, REST)]))
    assert report_of(worker).incomplete == {4}, "it was computed before all was named anew"
    assert connector.match(keys).blocks == BLOCKS // 2
    worker.begin(Orders(moves={3: 1}))
    assert report_of(worker) == WorkerReport({3: 1}, set())
    assert connector.match(keys).blocks == BLOCKS


def test_a_store_is_committed_only_once_that_is_known(cached: tuple[RankWorker, Any, bytes], moving: Moving) -> None:
    """On a GPU: when the blocks are copied the answer may still be on its way."""
    worker, _, keys = cached
    moving.known = False
    worker.begin(Orders(fresh=[Store(1, keys, REST)]))
    moving.change()
    worker.begin(Orders())
    assert report_of(worker).incomplete == {1}
    assert worker._groups[0].match(keys).blocks == BLOCKS // 2


def test_without_loads_and_stores_nothing_is_looked_at(cached: tuple[RankWorker, Any, bytes], moving: Moving) -> None:
    worker, _, _ = cached
    moving.weights.look = None  # type: ignore[assignment, method-assign]
    worker.begin(Orders())
    assert worker.report() is None


def test_copies_end_before_vllm_takes_its_memory_away(cached: tuple[RankWorker, Any, bytes]) -> None:
    """As it does when it goes to sleep."""
    worker, _, keys = cached
    worker.begin(Orders(fresh=[Store(1, keys, REST)]))
    order_load(worker, keys, fresh=[Store(2, keys, REST)])
    worker.end_copies()
    assert all(transfer.done() for parts in worker._stores.values() for transfer in parts)
    assert all(transfer.done() for parts in worker._loads.values() for _, transfer in parts)
    report = report_of(worker)
    assert (report.ended, report.incomplete) == ({1: 1, 2: 1}, {2}), "the second had not begun"
    assert ended(worker) == ({"r"}, ALL)
