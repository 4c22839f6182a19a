"""Fault 54: one of two disks hangs under a real daemon; the other one, DRAM and the clients do not notice.

The disk is a directory whose system calls wait for a lock of the test's (fault_hang.py). The calls are the daemon's
own, or those of a worker process for each directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chains import chain_of
from fault_blocks import spec_of
from fault_engine import Engine
from fault_hang import Gate, patch
from fault_processes import Daemon
from waiting import wait_until

from tiercache.daemon.tiers.nvme.check.directory_check import ALL, check_directory
from tiercache.protocol import messages as m

pytestmark = [pytest.mark.stress, pytest.mark.timeout(240)]

SPEC = spec_of(64 << 10)
BLOCKS = 6
SOON_S = 60.0
"""Deadline of states that must be reached, however slow the machine."""


class Disks:
    """A daemon with two nvme directories, one engine, and chains whose directory is known."""

    def __init__(self, daemon: Daemon, paths: list[Path], engine_of: Callable[..., Engine]) -> None:
        self.daemon = daemon
        self.paths = paths
        self.chains: dict[Path, list[bytes]] = {path: [] for path in paths}
        self._engine_of = engine_of
        self._made = 0
        self.start()

    def start(self) -> None:
        """A life of the daemon, and an engine for it."""
        self.daemon.start()
        self.engine = self._engine_of(self.daemon, SPEC, BLOCKS, request_timeout_s=30.0)

    @property
    def nvme(self) -> dict[str, Any]:
        """The tier's statistics, which also shows that the daemon answers."""
        tier: dict[str, Any] = self.daemon.stats()["tiers"]["nvme"]
        return tier

    def of(self, path: Path) -> dict[str, Any]:
        """A directory's statistics; empty while it is not open."""
        found = next(one for one in self.nvme["directories"] if one["path"] == str(path))
        return {} if found["state"] in ("opening", "away") else found

    def blocks(self, path: Path) -> int:
        return int(self.of(path).get("blocks", 0))

    def new_chain(self) -> bytes:
        self._made += 1
        return chain_of(f"hung {self._made}", BLOCKS)

    def store(self) -> bytes:
        """A new chain, in DRAM."""
        keys = self.new_chain()
        assert self.engine.store(keys).stored == BLOCKS
        return keys

    def fill(self, each: int = 2) -> None:
        """Store chains until each directory has `each` of them; the tier chooses the directory."""
        while min(map(len, self.chains.values())) < each:
            before = {path: self.blocks(path) for path in self.paths}
            keys = self.store()
            wait_until(partial(self._has_grown, before), "it is written", SOON_S)
            wait_until(self._is_durable, "it is recorded", SOON_S)
            home = next(path for path in self.paths if self.blocks(path) > before[path])
            self.chains[home].append(keys)

    def _has_grown(self, before: dict[Path, int]) -> bool:
        return sum(map(self.blocks, self.paths)) == sum(before.values()) + BLOCKS

    def _is_durable(self) -> bool:
        """Whether every row is committed; blocks are found some milliseconds before that."""
        return not any(one["database_queue"] for one in self.nvme["directories"])

    def forget_dram(self) -> None:
        self.engine.connector.flush(tier="dram")

    def length(self, keys: bytes) -> int:
        """Blocks that a match finds, in DRAM and below."""
        match = self.engine.connector.match(keys)
        blocks = match.blocks
        self.engine.connector.release(match)
        return blocks

    def load_all(self, path: Path) -> list[int]:
        return [self.engine.load(keys) for keys in self.chains[path]]

    def health(self) -> str:
        return " ".join(self.daemon.stats()["health"]["reasons"])

    def wait_all_well(self) -> None:
        """Both directories are open, have loaded their rows, and nothing is wrong."""

        def well() -> bool:
            return [self.of(path).get("state") for path in self.paths] == ["ok", "ok"] and not self.health()

        wait_until(well, "all is well", SOON_S)

    def check(self) -> None:
        """The running daemon's books and blocks are in order."""
        reply = self.engine.connector.client.call(m.Check, timeout_s=SOON_S, sample=1 << 20, bytes_per_s=0)
        assert reply.findings == []

    def check_directories(self) -> None:
        """What `tiercache check` says of them when the daemon has ended: every byte is right."""
        for path in self.paths:
            assert check_directory(path, sample=ALL, rate=0).findings == []


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.close()


@pytest.fixture
def nvme_io(request: pytest.FixtureRequest) -> str:
    """What carries the blocks; of tests that do not depend on it, whatever is usual."""
    return str(getattr(request, "param", "auto"))


@pytest.fixture
def nvme_workers(request: pytest.FixtureRequest) -> str:
    """Whether each directory has a process of its own."""
    return str(getattr(request, "param", "off"))


each = pytest.mark.parametrize(
    ("nvme_io", "nvme_workers"),
    [("aio", "off"), ("threads", "on")],
    indirect=True,
    ids=["aio", "threads in workers"],
)


@pytest.fixture
def start_disks(
    tmp_path: Path, gate: Gate, closing: ExitStack, engine_of: Callable[..., Engine], nvme_io: str, nvme_workers: str
) -> Callable[..., Disks]:
    """A daemon on directories `hung`, which hangs when the gate says so, and `well`."""

    def start(**constants: float) -> Disks:
        paths = [tmp_path / "hung", tmp_path / "well"]
        code = patch(paths[0], gate, **{"shelf__OFFLINE_AGE_S": 1.0, "tier__CLOSE_S": 0.5, **constants})
        settings = "--arena", "32MiB", "--region", "8MiB", "--nvme-size", "128MiB", "--nvme-segment", "8MiB"
        nvme = "--nvme", ",".join(map(str, paths)), "--nvme-io", nvme_io, "--nvme-workers", nvme_workers
        daemon = Daemon(*settings, *nvme, "--grace", "1s", patch=code)
        closing.callback(daemon.close)
        return Disks(daemon, paths, engine_of)

    return start


@each
def test_54_a_hung_disk_is_one_disk(start_disks: Callable[..., Disks], gate: Gate) -> None:
    disks = start_disks()
    hung, well = disks.paths
    disks.fill()
    disks.forget_dram()
    in_dram = disks.chains[hung][0]
    assert disks.engine.load(in_dram) == BLOCKS
    gate.hang()
    lost = disks.chains[hung][1]
    assert disks.length(lost) == BLOCKS, "the daemon does not know yet"
    match = disks.engine.connector.match(lost)
    waiting = disks.engine.connector.load_async(match, list(range(BLOCKS)), timeout_s=SOON_S)
    other = disks.engine.connector.match(lost)
    assert disks.engine.connector.load(other, list(range(BLOCKS)), timeout_s=0.1) == 0, "the deadline of the load"
    assert waiting.result(SOON_S) == 0, "a miss when the disk is given up, before the deadline"
    assert disks.of(hung)["state"] == "offline"
    assert disks.of(well)["state"] == "ok"
    assert disks.load_all(well) == [BLOCKS] * len(disks.chains[well])
    assert disks.engine.load(in_dram) == BLOCKS, "DRAM has it, wherever else it is"
    assert disks.length(lost) == 0, "a miss at once"
    assert f"nvme directory {hung}: an operation has been under way for" in disks.health()
    assert f"nvme directory {hung} hangs" in disks.daemon.log()
    # What is computed again is kept in DRAM; what is new goes to the disk that works.
    assert disks.engine.store(lost).stored == BLOCKS
    assert disks.engine.load(lost) == BLOCKS
    before = disks.blocks(well)
    new = [disks.store() for _ in range(4)]
    wait_until(lambda: disks.blocks(well) == before + 4 * BLOCKS, "they are written to the other disk", SOON_S)
    disks.check()
    gate.go_on()
    disks.wait_all_well()
    disks.forget_dram()
    assert disks.load_all(hung) == [BLOCKS] * len(disks.chains[hung]), "and so is all that it holds"
    assert [disks.engine.load(keys) for keys in new] == [BLOCKS] * 4
    disks.chains[hung].clear()
    disks.fill(each=1)  # it is written to again
    disks.check()
    assert disks.daemon.terminate() == 0
    disks.check_directories()


@each
def test_54_the_end_of_a_daemon_whose_disk_hangs(start_disks: Callable[..., Disks], gate: Gate) -> None:
    """The stop does not wait for the disk, and blocks that were being written are good or a miss."""
    disks = start_disks()
    hung, well = disks.paths
    disks.fill()
    disks.forget_dram()
    gate.hang()
    new = []
    while disks.of(hung)["in_flight"] == 0:  # each chain may be the other directory's
        new.append(disks.store())
    match = disks.engine.connector.match(disks.chains[hung][0])
    assert disks.engine.connector.load(match, list(range(BLOCKS)), timeout_s=0.1) == 0
    assert disks.daemon.terminate() == 0, "within the grace and the time to close"
    gate.go_on()
    disks.start()
    disks.wait_all_well()
    assert disks.load_all(hung) == [BLOCKS] * len(disks.chains[hung])
    assert disks.load_all(well) == [BLOCKS] * len(disks.chains[well])
    assert all(disks.engine.load(keys) in range(BLOCKS + 1) for keys in new)
    disks.check()
    assert disks.daemon.terminate() == 0
    disks.check_directories()
