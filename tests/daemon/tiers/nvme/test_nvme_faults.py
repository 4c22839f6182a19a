"""Faults of disks and daemons, with real processes: every one ends in a hit that is right, or a miss."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from chains import chain_of, key_of
from cluster import BLOCK_BYTES, Cluster, content
from waiting import wait_until

import tiercache
from tiercache.daemon.tiers.nvme.catalog.catalog_check import check_rows
from tiercache.daemon.tiers.nvme.disk.superblock import FORMAT_VERSION, Superblock

END_S = 30.0


@pytest.fixture
def cluster(tmp_path: Path, carrier: str) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    assert [one["io"] for one in made.nvme()["directories"]] == [carrier]
    yield made
    made.stop()


def daemon_at(run_dir: Path, nvme: str, *flags: str) -> subprocess.Popen[str]:
    """A daemon of its own, with no client connected."""
    command = [sys.executable, "-m", "tiercache.daemon", "--run-dir", str(run_dir), "--arena", "4MiB"]
    command += ["--nvme", nvme, "--nvme-size", "64MiB", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit status of a daemon and its output."""
    try:
        said, _ = process.communicate(timeout=END_S)
    finally:
        process.kill()
    return process.returncode, said


def errors_in(said: str) -> list[str]:
    return [line for line in said.splitlines() if " ERROR " in line or "Traceback" in line]


def last_lines(said: str) -> list[str]:
    """Why it did not start."""
    return [line for line in said.splitlines() if "tiercache daemon: " in line or "Traceback" in line]


def kill_now(cluster: Cluster) -> None:
    """SIGKILL at once, whatever is under way."""
    os.kill(cluster.daemon.pid, signal.SIGKILL)
    cluster.connector.close()
    cluster.daemon.close()
    cluster.check_directories()


# --- who may use a directory ------------------------------------------------------------------------


def test_a_second_daemon_is_refused_and_the_first_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    chain = chain_of("a", 50)
    cluster.store(chain)
    cluster.wait_written()
    status, said = end_of(daemon_at(tmp_path / "second", str(cluster.directories[0])))
    assert status == 2
    (line,) = last_lines(said)
    assert f"another daemon (pid {cluster.daemon.pid}) uses nvme directory" in line
    cluster.flush_dram()
    assert cluster.load(chain) == 50
    more = chain_of("b", 20)
    assert cluster.store(more).stored == 20
    cluster.wait_written()
    cluster.restart()
    assert (cluster.load(chain), cluster.load(more)) == (50, 20)


@pytest.mark.parametrize("place", ["below a file", "open to all users", "newer"])
def test_a_directory_that_cannot_be_used_is_one_line(tmp_path: Path, place: str) -> None:
    path = tmp_path / "nvme"
    if place == "below a file":
        path.write_text("")
        path = path / "below"
    elif place == "open to all users":
        path.mkdir()
        path.chmod(0o1777)
    else:
        path.mkdir()
        (path / "superblock").write_bytes(newer_superblock())
        (path / "index.db").write_bytes(b"of a later version")
    before = {one: one.read_bytes() for one in path.glob("*")} if place == "newer" else {}
    status, said = end_of(daemon_at(tmp_path / "run", str(path)))
    assert status == 2
    (line,) = last_lines(said)
    assert str(path) in line
    assert "serves" not in said
    assert all(one.read_bytes() == data for one, data in before.items()), "nothing was changed"


def newer_superblock() -> bytes:
    """A superblock of a later version."""
    data = bytearray(Superblock.new(1 << 20).encode())
    data[8:12] = struct.pack("<I", FORMAT_VERSION + 1)
    data[-8:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(data[:-8]))
    return bytes(data)


# --- damage between two lives -----------------------------------------------------------------------


def _truncate(directory: Path) -> None:
    os.truncate(next((directory / "segments").glob("*.seg")), 1 << 20)


def _garble(directory: Path) -> None:
    (directory / "index.db").write_bytes(random.Random(1).randbytes(100_000))


def _garble_log(directory: Path) -> None:
    with (directory / "index.db-wal").open("ab") as file:
        file.write(random.Random(2).randbytes(50_000))


def _forget(directory: Path) -> None:
    for path in directory.glob("index.db*"):
        path.unlink()


def _damage_superblock(directory: Path) -> None:
    data = bytearray((directory / "superblock").read_bytes())
    data[20] ^= 1
    (directory / "superblock").write_bytes(data)


def _put_foreign_files(directory: Path) -> None:
    (directory / "notes.txt").write_text("mine")
    (directory / "segments" / "00000009.seg.old").write_bytes(b"x" * 5000)
    (directory / "segments" / "99999999.seg").write_bytes(b"x" * 5000)


DAMAGE: dict[Callable[[Path], None], set[int]] = {
    _put_foreign_files: {5},
    _garble_log: {0, 1, 2, 3, 4, 5},
    _truncate: {0},
    lambda directory: next((directory / "segments").glob("*.seg")).unlink(): {0},
    _forget: {0},
    _garble: {0},
    _damage_superblock: {0},
}
"""What is done to a directory, and how much of a chain of five blocks may be there afterwards."""


@pytest.mark.usefixtures("carrier")
def test_damaged_directories_lose_their_blocks_and_work_again(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, directories=len(DAMAGE), nvme_size="448MiB")
    chains = [chain_of(str(number), 5) for number in range(60)]
    for chain in chains:
        cluster.store(chain)
    cluster.wait_written()
    cluster.kill()
    homes = {row.key: path for path in cluster.directories for _, row in check_rows(path) if row is not None}
    assert set(homes.values()) == set(cluster.directories)
    for damage, directory in zip(DAMAGE, cluster.directories, strict=True):
        damage(directory)
    cluster.start()
    cluster.wait_loaded()
    for chain in chains:
        number = cluster.directories.index(homes[key_of(chain, 0)])
        assert cluster.load(chain) in list(DAMAGE.values())[number], f"directory {number}"
    for chain in chains:
        cluster.store(chain)
    cluster.wait_written()
    cluster.restart()
    assert [cluster.load(chain) for chain in chains] == [5] * len(chains)
    assert all(one["blocks"] for one in cluster.nvme()["directories"])
    cluster.stop()
    assert (cluster.directories[0] / "notes.txt").read_text() == "mine"


# --- ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["all", "nvme"])
@pytest.mark.usefixtures("carrier")
def test_a_flush_that_was_acknowledged_outlives_a_kill(tmp_path: Path, tier: str) -> None:
    cluster = Cluster(tmp_path)
    chains = [chain_of(str(number), 60) for number in range(4)]
    for round_ in range(3):
        for chain in chains:
            cluster.store(chain)
        if round_ == 1:
            cluster.wait_written()  # else they are under way
        if round_ == 2:
            cluster.restart()
            cluster.kill()
            cluster.start()  # rows may be loading
        cluster.connector.flush(tier=tier, key=key_of(chains[0], 30))
        if round_ == 2:
            cluster.connector.flush(tier=tier)
        kill_now(cluster)
        cluster.start()
        cluster.wait_loaded()
        assert cluster.load(chains[0]) <= 30
        assert round_ != 2 or [cluster.load(chain) for chain in chains] == [0] * 4
    cluster.stop()


def test_no_grace_and_a_short_one(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, grace="0s")
    chains = [chain_of(str(number), 120) for number in range(6)]
    for grace in ("0s", "1s", "20s"):
        cluster.settings["grace"] = grace
        for chain in chains:
            cluster.store(chain)
        started_s = time.monotonic()
        cluster.stop()
        assert time.monotonic() - started_s < END_S
        assert "Traceback" not in cluster.daemon.log.read_text()
        cluster.start()
        cluster.wait_loaded()
        found = [cluster.load(chain) for chain in chains]
        assert max(found) <= 120
    assert found == [120] * 6, "the last grace was long enough"
    cluster.stop()


class Customer(threading.Thread):
    """Stores and loads without end. Whatever happens to the daemon, each call is a right hit or a miss."""

    def __init__(self, cluster: Cluster, number: int, chains: list[bytes]) -> None:
        super().__init__(daemon=True)
        self.rng = random.Random(number)
        self.chains = chains
        self.stopping = threading.Event()
        self.hits = 0
        self.longest_s = 0.0
        self.failure: BaseException | None = None
        self.pool = np.zeros((64, BLOCK_BYTES), np.uint8)
        self.connector = tiercache.connect(
            cluster.daemon.address,
            namespace=cluster.spec,
            pool=tiercache.Pool.from_blocks(self.pool),
            request_timeout_s=2.0,
            load_timeout_s=5.0,
        )

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                started_s = time.monotonic()
                self._call(self.rng.choice(self.chains))
                self.longest_s = max(self.longest_s, time.monotonic() - started_s)
        except BaseException as failure:
            self.failure = failure
            raise
        finally:
            self.connector.close()

    def _call(self, chain: bytes) -> None:
        count = len(chain) // 16
        if self.rng.random() < 0.4:
            for number in range(count):
                self.pool[number] = content(key_of(chain, number))
            self.connector.store(chain, range(count))
            return
        match = self.connector.match(chain)
        self.pool[:] = 0
        good = self.connector.load(match, range(match.blocks)) if match.blocks else 0
        for number in range(good):
            assert np.array_equal(self.pool[number], content(key_of(chain, number))), f"block {number} is wrong"
        self.hits += good


def moved_blocks(cluster: Cluster) -> int:
    stats = cluster.nvme()
    return int(stats["written_blocks"] + stats["promoted_blocks"])


def _killed_under_load(tmp_path: Path, rounds: int, seed: int) -> None:
    cluster = Cluster(tmp_path, arena="6MiB", directories=2, nvme_size="20MiB", nvme_segment="4MiB")
    rng = random.Random(seed)
    chains = [chain_of(str(number), rng.randrange(5, 60)) for number in range(12)]
    customers = [Customer(cluster, 100 * seed + number, chains) for number in range(3)]
    for customer in customers:
        customer.start()
    try:
        for _ in range(rounds):
            hits = [customer.hits for customer in customers]
            wait_until(
                lambda: all(one.hits > before for one, before in zip(customers, hits, strict=True)),  # noqa: B023
                "all customers have hits again",
            )
            enough = rng.randrange(50, 400)
            wait_until(lambda: moved_blocks(cluster) > enough, "there is work for the disks")  # noqa: B023
            kill_now(cluster)
            cluster.start()
    finally:
        for customer in customers:
            customer.stopping.set()
        for customer in customers:
            customer.join(END_S)
    assert [customer.failure for customer in customers] == [None] * 3
    assert not any(customer.is_alive() for customer in customers)
    assert max(customer.longest_s for customer in customers) < END_S
    cluster.wait_loaded()
    cluster.stop()


@pytest.mark.usefixtures("carrier")
def test_kills_under_load_of_several_clients(tmp_path: Path) -> None:
    _killed_under_load(tmp_path, rounds=3, seed=1)


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("carrier")
@pytest.mark.parametrize("seed", range(2))
def test_many_kills_under_load_of_several_clients(tmp_path: Path, seed: int) -> None:
    _killed_under_load(tmp_path, rounds=20, seed=10 + seed)
