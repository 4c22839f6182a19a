"""One of two disks hangs under a real daemon; the other one, DRAM and the clients do not notice.

The disk is a directory whose system calls wait for a lock of the test's (fault_hang.py). The calls are the daemon's
own, or those of a worker process for each directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from chains import chain_of
from fault_engine import Engine, spec_of
from fault_hang import Gate, patch
from fault_processes import Daemon
from waiting import wait_until

from tiercache.daemon.tiers.nvme.check.directory_check import ALL, check_directory
from tiercache.protocol import messages as m

pytestmark = pytest.mark.stress

SPEC = spec_of(64 << 10)
BLOCKS = 6
SOON_S = 60.0
"""Deadline of states that must be reached, however slow the machine."""


class Disks:
    """A daemon with nvme directories `hung`, which hangs when the gate says so, and `well`; and one engine."""

    def __init__(self, daemon: Daemon, paths: list[Path], engine_of: Callable[..., Engine]) -> None:
        self.daemon = daemon
        self.hung, self.well = paths
        self.chains: dict[Path, list[bytes]] = {path: [] for path in paths}
        self._engine_of = engine_of
        self._made = 0
        self.start()

    def start(self) -> None:
        """A life of the daemon, and an engine for it."""
        self.daemon.start()
        self.engine = self._engine_of(self.daemon, SPEC, BLOCKS, request_timeout_s=30.0)
        wait_until(self.all_well, "all is well", SOON_S)

    def of(self, path: Path) -> dict[str, Any]:
        """A directory's statistics, which also shows that the daemon answers."""
        directories = self.daemon.stats()["tiers"]["nvme"]["directories"]
        return next(one for one in directories if one["path"] == str(path))

    def blocks(self) -> dict[Path, int]:
        """The durable blocks of each directory that is open: a little later than they are found."""
        found = {path: self.of(path) for path in self.chains}
        return {path: int(one["blocks"]) for path, one in found.items() if not one.get("database_queue", 1)}

    def all_well(self) -> bool:
        return {self.of(path)["state"] for path in self.chains} == {"ok"} and not self.health()

    def health(self) -> str:
        return " ".join(self.daemon.stats()["health"]["reasons"])

    def store(self) -> bytes:
        """A new chain, in DRAM."""
        self._made += 1
        keys = chain_of(f"hung {self._made}", BLOCKS)
        assert self.engine.store(keys).stored == BLOCKS
        return keys

    def fill(self, each: int) -> None:
        """Store chains until each directory has `each` of them; the tier chooses the directory."""
        while min(map(len, self.chains.values())) < each:
            before, keys = self.blocks(), self.store()
            wait_until(lambda: sum(self.blocks().values()) == sum(before.values()) + BLOCKS, "it is durable", SOON_S)  # noqa: B023
            after = self.blocks()
            self.chains[next(path for path in after if after[path] > before[path])].append(keys)

    def forget_dram(self) -> None:
        self.engine.connector.flush(tier="dram")

    def wait_for_all_of(self, path: Path) -> None:
        """Until all that was stored in a directory can be loaded: on a busy machine an operation may take too long."""
        whole = [BLOCKS] * len(self.chains[path])
        wait_until(lambda: [self.engine.load(keys) for keys in self.chains[path]] == whole, "no block is lost", SOON_S)

    def end(self) -> None:
        """The daemon's books are in order, it ends within its grace, and every byte on the disks is right."""
        assert (
            self.engine.connector.client.call(m.Check, timeout_s=SOON_S, sample=1 << 20, bytes_per_s=0).findings == []
        )
        assert self.daemon.terminate() == 0
        for path in self.chains:
            assert check_directory(path, sample=ALL, rate=0).findings == []


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.close()


@pytest.fixture(params=[("aio", "off"), ("threads", "on")], ids=["aio", "threads in workers"])
def disks(
    request: pytest.FixtureRequest, tmp_path: Path, gate: Gate, closing: ExitStack, engine_of: Callable[..., Engine]
) -> Disks:
    nvme_io, nvme_workers = request.param
    paths = [tmp_path / "hung", tmp_path / "well"]
    code = patch(paths[0], gate, shelf__OFFLINE_AGE_S=4.0, tier__CLOSE_S=0.5)
    settings = "--arena", "32MiB", "--region", "8MiB", "--nvme-size", "128MiB", "--nvme-segment", "8MiB"
    nvme = "--nvme", ",".join(map(str, paths)), "--nvme-io", nvme_io, "--nvme-workers", nvme_workers
    daemon = Daemon(*settings, *nvme, "--grace", "1s", patch=code)
    closing.callback(daemon.close)
    made = Disks(daemon, paths, engine_of)
    made.fill(2)
    made.forget_dram()
    return made


def test_a_hung_disk_is_one_disk(disks: Disks, gate: Gate) -> None:
    cache, hung, well = disks.engine.connector, disks.hung, disks.well
    in_dram, lost = disks.chains[hung][:2]
    assert disks.engine.load(in_dram) == BLOCKS
    gate.hang()
    waiting = cache.load_async(cache.match(lost), list(range(BLOCKS)), timeout_s=SOON_S)
    assert cache.load(cache.match(lost), list(range(BLOCKS)), timeout_s=0.1) == 0, "the deadline of the load"
    assert waiting.result(SOON_S) == 0, "a miss when the disk is given up, before the deadline"
    assert [disks.of(path)["state"] for path in (hung, well)] == ["offline", "ok"]
    disks.wait_for_all_of(well)
    assert disks.engine.load(in_dram) == BLOCKS, "DRAM has it, wherever else it is"
    assert cache.match(lost).blocks == 0, "a miss at once"
    assert f"nvme directory {hung}: an operation has been under way for" in disks.health()
    assert f"nvme directory {hung} hangs" in disks.daemon.log()
    # What is computed again is kept in DRAM; what is new goes to the disk that works.
    assert disks.engine.store(lost).stored == BLOCKS
    assert disks.engine.load(lost) == BLOCKS
    before = disks.blocks()[well]
    new = [disks.store() for _ in range(4)]
    wait_until(lambda: disks.blocks().get(well) == before + 4 * BLOCKS, "they are on the other disk", SOON_S)
    gate.go_on()
    wait_until(disks.all_well, "all is well", SOON_S)
    disks.forget_dram()
    disks.wait_for_all_of(hung)
    assert [disks.engine.load(keys) for keys in new] == [BLOCKS] * 4
    disks.chains[hung].clear()
    disks.fill(1)  # it is written to again
    disks.end()


def test_the_end_of_a_daemon_whose_disk_hangs(disks: Disks, gate: Gate) -> None:
    """The stop does not wait for the disk, and blocks that were being written are good or a miss."""
    gate.hang()
    new = []
    while disks.of(disks.hung)["in_flight"] == 0:  # each chain may be the other directory's
        new.append(disks.store())
    assert disks.daemon.terminate() == 0, "within the grace and the time to close"
    gate.go_on()
    disks.start()
    disks.wait_for_all_of(disks.hung)
    disks.wait_for_all_of(disks.well)
    assert all(disks.engine.load(keys) in range(BLOCKS + 1) for keys in new)
    disks.end()
