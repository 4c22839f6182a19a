"""The NVMe tier end to end: a real daemon, real directories, real kills."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from chains import chain_of, key_of
from cluster import BLOCK_BYTES, Cluster
from waiting import wait_until

from tiercache.daemon.tiers.nvme.catalog.catalog_check import check_rows
from tiercache.daemon.tiers.nvme.catalog.rows import pack_row


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.stop()


def test_blocks_come_back_after_a_kill(cluster: Cluster) -> None:
    chain = chain_of("a", 100)
    assert cluster.store(chain).stored == 100
    cluster.wait_written()
    cluster.restart()
    assert cluster.nvme()["blocks"] == 100
    assert cluster.load(chain) == 100
    assert cluster.load(chain) == 100
    stats = cluster.nvme()
    assert stats["promoted_blocks"] == 100
    assert stats["written_blocks"] == 0, "a block on nvme is clean: reading it writes nothing"


def test_what_dram_has_evicted_is_read_back(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, arena="4MiB")
    chains = [chain_of(str(number), 40) for number in range(10)]
    for chain in chains:
        cluster.store(chain)
        cluster.wait_written()
    for chain in chains:
        assert cluster.load(chain) == 40
    cluster.stop()


def test_a_load_larger_than_dram_is_short_not_wrong(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, arena="4MiB")
    chain = chain_of("long", 150)
    for first in range(0, 150, 50):
        cluster.store(chain[: 16 * (first + 50)], first=first)
        cluster.wait_written()
    assert 0 < cluster.load(chain) <= 64
    cluster.stop()


def test_a_flipped_bit_is_a_miss(cluster: Cluster) -> None:
    chain = chain_of("a", 20)
    cluster.store(chain)
    cluster.wait_written()
    cluster.kill()
    segment = next((cluster.directories[0] / "segments").glob("*.seg"))
    data = bytearray(segment.read_bytes())
    data[7 * BLOCK_BYTES + 123] ^= 4
    segment.write_bytes(data)
    cluster.start()
    cluster.wait_loaded()
    good = cluster.load(chain)
    assert good < 20
    assert cluster.nvme()["bad_blocks"] == 1
    wait_until(lambda: cluster.nvme()["blocks"] == good, "the bad block and what follows are forgotten")
    assert cluster.store(chain).stored == 20 - good
    assert cluster.load(chain) == 20


def test_flushed_blocks_stay_away(cluster: Cluster) -> None:
    kept, gone, part = chain_of("kept", 10), chain_of("gone", 10), chain_of("part", 10)
    for chain in (kept, gone, part):
        cluster.store(chain)
    cluster.wait_written()
    assert cluster.connector.flush(key=key_of(gone, 0)) == 20
    assert cluster.connector.flush(key=key_of(part, 4)) == 12
    assert (cluster.load(kept), cluster.load(gone), cluster.load(part)) == (10, 0, 4)
    cluster.restart()
    assert (cluster.load(kept), cluster.load(gone), cluster.load(part)) == (10, 0, 4)
    assert cluster.store(part).stored == 6
    cluster.wait_written()
    cluster.restart()
    assert cluster.load(part) == 10
    cluster.connector.flush()
    cluster.restart()
    assert (cluster.load(kept), cluster.load(part)) == (0, 0)
    assert cluster.nvme()["blocks"] == 0


def test_what_a_flush_left_behind_does_not_hang_itself_below_new_blocks(cluster: Cluster) -> None:
    """A crash may undo deletions: a flushed block's row comes back, and its parent has been stored again."""
    chain = chain_of("a", 6)
    cluster.store(chain)
    cluster.wait_written()
    cluster.daemon.close()
    old = dict(check_rows(cluster.directories[0]))
    cluster.start()
    cluster.wait_loaded()
    cluster.connector.flush(key=key_of(chain, 0))
    cluster.store(chain[: 3 * 16])
    cluster.wait_written()
    cluster.daemon.close()
    new = dict(check_rows(cluster.directories[0]))
    assert len(new) == 3
    with sqlite3.connect(cluster.directories[0] / "index.db") as database:
        stale = [(place, pack_row(place, row)) for place, row in old.items() if row and place not in new]
        stale = stale[:3] or [pytest.fail("every old place was taken again")]
        database.executemany("INSERT INTO blocks VALUES(?, ?)", stale)
    database.close()
    cluster.start()
    cluster.wait_loaded()
    assert cluster.load(chain) == 3
    assert cluster.nvme()["blocks"] == 3


def test_a_stop_with_grace_leaves_nothing_behind(cluster: Cluster) -> None:
    chain = chain_of("a", 200)
    cluster.store(chain)
    cluster.stop()
    assert "blocks of DRAM were not on nvme" not in cluster.daemon.log.read_text()
    cluster.start()
    cluster.wait_loaded()
    assert cluster.load(chain) == 200


def test_the_cap_holds_and_the_coldest_go(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, nvme_size="40MiB", nvme_segment="8MiB")
    chains = [chain_of(str(number), 50) for number in range(30)]
    for chain in chains:
        cluster.store(chain)
        cluster.wait_written()
    used = sum(path.stat().st_blocks * 512 for path in cluster.directories[0].rglob("*") if path.is_file())
    assert used <= 40 << 20
    cluster.restart()
    assert cluster.load(chains[-1]) == 50
    assert cluster.load(chains[0]) == 0
    cluster.stop()


def test_a_lost_directory_costs_its_share(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, directories=2)
    chains = [chain_of(str(number), 10) for number in range(20)]
    for chain in chains:
        cluster.store(chain)
    cluster.wait_written()
    cluster.kill()
    shutil.rmtree(cluster.directories[1])
    cluster.start()
    cluster.wait_loaded()
    found = [cluster.load(chain) for chain in chains]
    assert set(found) == {0, 10}, "a chain is on one disk, whole"
    cluster.stop()


def test_kills_at_random_moments(tmp_path: Path) -> None:
    _kill_rounds(tmp_path, rounds=8, seed=1)


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10))
def test_many_kills_at_random_moments(tmp_path: Path, seed: int) -> None:
    _kill_rounds(tmp_path, rounds=40, seed=100 + seed)


def _kill_rounds(tmp_path: Path, rounds: int, seed: int) -> None:
    """Store, load and flush at random over a small cap; kill -9; what comes back is right or nothing."""
    rng = random.Random(seed)
    cluster = Cluster(tmp_path, arena="4MiB", nvme_size="24MiB", nvme_segment="4MiB")
    chains = [chain_of(str(number), rng.randrange(5, 60)) for number in range(16)]
    back = 0
    for _ in range(rounds):
        for _ in range(rng.randrange(5, 25)):
            chain = rng.choice(chains)
            action = rng.random()
            if action < 0.55:
                cluster.store(chain)
            elif action < 0.95:
                cluster.load(chain)
            else:
                cluster.connector.flush(key=key_of(chain, rng.randrange(len(chain) // 16)))
        cluster.kill()
        cluster.start()
        back += sum(cluster.load(chain) for chain in rng.sample(chains, 4))
    cluster.wait_loaded()
    back += sum(map(cluster.load, chains))
    assert back > 0, "no block ever came back: the test has checked nothing"
    assert cluster.connector.client.stats()["counters"]["invariant_failures"] == 0
    cluster.stop()
