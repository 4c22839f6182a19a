"""Room on the disk, with real processes: full disks, caps, other geometries, and what stays readable meanwhile."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from catalog_bench import fill
from chains import chain_of, key_of
from cluster import Cluster
from waiting import wait_until

from tiercache.daemon.tiers.nvme.catalog.rows import unpack_row


def used_bytes(cluster: Cluster) -> int:
    paths = [path for path in cluster.directories[0].rglob("*") if path.is_file()]
    return sum(path.stat().st_blocks * 512 for path in paths)


def test_a_daemon_that_starts_on_a_full_disk_reads(mount: Callable[[str], Path]) -> None:
    """The tier writes again when there is room."""
    disk = mount("20m")
    cluster = Cluster(disk, nvme_size="16MiB", nvme_segment="2MiB")
    kept, new = chain_of("kept", 40), chain_of("new", 40)
    cluster.store(kept)
    cluster.wait_written()
    cluster.stop()
    filler = fill(disk)
    for _ in range(2):
        cluster.start()
        cluster.wait_loaded()
        assert cluster.load(kept) == 40
        cluster.stop()
    cluster.start()
    cluster.wait_loaded()
    filler.unlink()
    cluster.store(new)
    cluster.wait_written()
    cluster.restart()
    assert (cluster.load(kept), cluster.load(new)) == (40, 40)
    cluster.stop()


def test_a_daemon_that_starts_on_a_full_disk_without_the_spare_room_reads(mount: Callable[[str], Path]) -> None:
    """Other files have taken the spare room: the daemon reads, says why it does not write, and writes when it can."""
    disk = mount("20m")
    cluster = Cluster(disk, nvme_size="16MiB", nvme_segment="2MiB")
    kept, new = chain_of("kept", 40), chain_of("new", 40)
    cluster.store(kept)
    cluster.wait_written()
    cluster.stop()
    (cluster.directories[0] / "spare").unlink()
    fillers = [fill(disk)]
    with closing(sqlite3.connect(cluster.directories[0] / "index.db")) as db:
        db.execute("SELECT count(*) FROM blocks")  # a tmpfs says that it is full some pages before it is
    fillers.append(fill(cluster.directories[0]))
    cluster.start()
    cluster.wait_loaded()
    assert cluster.load(kept) == 40
    health = cluster.connector.client.stats()["health"]
    assert f"nvme directory {cluster.directories[0]}: database or disk is full" in health["reasons"]
    for filler in fillers:
        filler.unlink()
    wait_until(lambda: cluster.connector.client.stats()["health"]["state"] == "ok", "it writes again")
    cluster.store(new)
    wait_until(lambda: cluster.nvme()["blocks"] == 80, "both are there")
    cluster.stop()
    cluster.start()
    cluster.wait_loaded()
    assert (cluster.load(kept), cluster.load(new)) == (40, 40)
    cluster.stop()


def test_a_disk_that_fills_up_and_empties_again(mount: Callable[[str], Path]) -> None:
    """Blocks acknowledged before, meanwhile or afterwards are right or a miss, in the next life too."""
    disk = mount("24m")
    cluster = Cluster(disk, arena="4MiB", nvme_size="20MiB", nvme_segment="2MiB")
    kept = chain_of("kept", 40)
    cluster.store(kept)
    cluster.wait_written()
    filler = fill(disk)
    others = [chain_of(str(number), 50) for number in range(12)]
    for chain in others:
        cluster.store(chain)
        cluster.load(chain)
    wait_until(lambda: "nvme directory" in str(cluster.connector.client.stats()["health"]), "it says what is wrong")
    cluster.flush_dram()
    assert sum(map(cluster.load, [kept, *others])) > 0, "reads go on"
    assert cluster.nvme()["failed_reads"] == 0
    filler.unlink()
    new = chain_of("new", 40)

    def stored() -> bool:
        cluster.store(new)
        return cluster.nvme()["directories"][0]["writing"] == "on" and cluster.nvme()["write_queue_blocks"] == 0

    wait_until(stored, "it writes again")
    cluster.wait_written()
    for _ in range(2):
        cluster.restart()
        for chain in (kept, *others):
            cluster.load(chain)
        assert cluster.load(new) > 0, "its last blocks may have made room for later ones"
    cluster.stop()


def test_the_cap_holds_over_lives_with_other_settings(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, nvme_size="40MiB", nvme_segment="8MiB", nvme_shrink="yes")
    chains = [chain_of(str(number), 50) for number in range(30)]
    lives = [{}, {"nvme_segment": "4MiB"}, {"nvme_size": "24MiB"}, {"nvme_size": "64MiB", "nvme_segment": "32MiB"}]
    for changed in lives:
        cluster.stop()
        cluster.settings.update(changed)
        cluster.start()
        cluster.wait_loaded()
        cap_bytes = int(cluster.settings["nvme_size"].removesuffix("MiB")) << 20
        assert used_bytes(cluster) <= cap_bytes
        found = sum(map(cluster.load, chains))
        assert found == cluster.nvme()["blocks"]
        # The first life finds nothing, and with segments their chains' beginnings may be taken away.
        assert found > 0 or changed in ({}, {"nvme_size": "24MiB"})
        for chain in chains:
            cluster.store(chain)
            cluster.wait_written()
        assert cluster.load(chains[-1]) == 50
        assert used_bytes(cluster) <= cap_bytes
    cluster.stop()


def test_one_bit_of_a_row_costs_its_block_and_what_follows(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    chains = [chain_of(str(number), 6) for number in range(20)]
    for chain in chains:
        cluster.store(chain)
    cluster.wait_written()
    cluster.stop()
    with closing(sqlite3.connect(cluster.directories[0] / "index.db", isolation_level=None)) as db:
        rows = db.execute("SELECT place, record FROM blocks").fetchall()
        places = {row.key: place for place, record in rows if (row := unpack_row(place, record)) is not None}
        records = dict(rows)
        for number, chain in enumerate(chains):
            place = places[key_of(chain, 3)]
            damaged = bytearray(records[place])
            damaged[4 * number % len(damaged)] ^= 1 << number % 8
            db.execute("UPDATE blocks SET record = ? WHERE place = ?", (bytes(damaged), place))
    cluster.start()
    cluster.wait_loaded()
    assert [cluster.load(chain) for chain in chains] == [3] * 20
    for chain in chains:
        assert cluster.store(chain).stored == 3
    cluster.wait_written()
    cluster.restart()
    assert [cluster.load(chain) for chain in chains] == [6] * 20
    cluster.stop()
