"""The NVMe tier as a whole: by a state machine on disks in memory, and with real daemons on real directories."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from catalog_bench import fill
from chains import chain_of, key_of
from cluster import Cluster
from machines import in_first_ring, in_stress
from nvme_machine import CHAINS, KEYS, NvmeMachine
from waiting import wait_until

TestTier = in_first_ring(NvmeMachine, examples=40, steps=50)
TestTierForLong = in_stress(NvmeMachine, examples=150, steps=80)


# --- what the machine seldom comes to by chance ------------------------------------------------------

NOTHING = 0, 0, False


def begun(small_slices: bool = False, directories: int = 1) -> NvmeMachine:
    machine = NvmeMachine()
    machine.begin(directories=directories, roomy=True, small_slices=small_slices, quota=False, codecs=["raw"])
    return machine


def filled() -> NvmeMachine:
    """A chain is on the disk, and not in DRAM."""
    machine = begun()
    machine.store(0, CHAINS[0], 7, 0, NOTHING)
    machine.come_to_rest()
    machine.forget_dram(NOTHING)
    return machine


def end(machine: NvmeMachine) -> None:
    machine.look()
    machine.nothing_is_wrong()
    machine.recheck()
    machine.teardown()


@pytest.mark.parametrize("small_slices", [False, True])
@pytest.mark.parametrize("space", [0, 1, 2])
@pytest.mark.parametrize("key", [b"", key_of(CHAINS[0], 0), key_of(CHAINS[0], 3)], ids=["all", "root", "key"])
def test_what_is_flushed_while_it_is_written_stays_away(key: bytes, space: int, small_slices: bool) -> None:
    machine = begun(small_slices)
    machine.flush(key, "all", space, NOTHING)
    end(machine)


@pytest.mark.parametrize("space", range(4))
def test_what_dram_alone_has_is_written_before_the_daemon_ends(space: int) -> None:
    machine = begun(directories=2)
    for chain in CHAINS:
        machine.store(space, chain, 7, 0, NOTHING)
    machine.stop(3.0, all_is_dirty=True)
    assert len(machine.model.promised) >= len(KEYS)
    end(machine)


def test_a_block_whose_write_a_flush_of_another_has_voided_is_written_before_the_daemon_ends() -> None:
    machine = begun(small_slices=True)
    machine.flush(key_of(CHAINS[0], 3), "all", 1, (2, 0, False))
    machine.stop(3.0, all_is_dirty=False)
    end(machine)


@pytest.mark.parametrize("meanwhile", ["", "flushed", "written from DRAM"])
@pytest.mark.parametrize("how", ["all", "some", "late"])
def test_what_a_client_writes_by_itself_is_there_unless_it_was_flushed(how: str, meanwhile: str) -> None:
    machine = filled()
    machine.grant(0, CHAINS[1], 2, 7, 0, NOTHING)
    assert machine.grants, "slots below blocks that are there"
    if meanwhile == "flushed":
        machine.flush(key_of(CHAINS[1], 2), "all", 5, NOTHING)
    elif meanwhile:
        machine.store(0, CHAINS[1], 5, 0, NOTHING)  # three of the four
        machine.go_on(6)
    machine.end_grant(0, how, NOTHING)
    expected = {"": {"all": 4, "some": 1}, "written from DRAM": {"all": 1}}.get(meanwhile, {}).get(how, 0)
    assert machine.rig.tier.stats()["direct_stored_blocks"] == expected
    end(machine)


@pytest.mark.parametrize("restarts", [False, True])
def test_what_is_flushed_while_another_disk_is_there_stays_away_when_the_first_is_back(restarts: bool) -> None:
    """Or the flush was not said to be durable, where the daemon ends in between."""
    machine = filled()
    machine.replace(0)
    machine.wait(30.0)
    machine.come_to_rest()
    machine.flush(b"", "all", 5, NOTHING)
    machine.go_on(6)
    assert machine.answers == [[False]], "and that is said at once"
    if restarts:
        machine.kill(0, 0, 0, back=True)
    else:
        machine.replace(0)
        machine.wait(30.0)
    machine.come_to_rest()
    assert len(machine.found()) == (6 + len(machine.spaces) if restarts else 0)
    end(machine)


@pytest.mark.parametrize("happens", [["away", "back", "away"], ["", "away", "back"], ["", "replaced", "replaced"]])
@pytest.mark.parametrize("key", [b"", key_of(CHAINS[0], 2)], ids=["all", "key"])
def test_what_is_flushed_part_by_part_while_a_directory_goes_and_comes_stays_away(
    happens: list[str], key: bytes
) -> None:
    """Before the first part, and after each of the next ones."""
    machine = begun(small_slices=True)
    events = ["away" if what == "back" else what for what in reversed(happens)]
    machine.flush_namespaces_in_turn(key, False, events, 0, 40)
    end(machine)


def test_a_flush_that_a_disk_has_not_recorded_is_told_again_when_it_is_back() -> None:
    machine = filled()
    machine.fail(0, "commit")
    machine.flush(b"", "all", 5, NOTHING)
    machine.take_away(0)
    for _ in range(3):
        machine.wait(30.0)
        machine.go_on(6)
    assert not machine.rig.shelves
    machine.take_away(0)
    machine.fail(0, "commit")
    end(machine)


def test_a_daemon_whose_directory_cannot_be_used_ends_at_once() -> None:
    """And not when its grace is over: nothing can take the blocks."""
    machine = begun()
    machine.take_away(0)
    machine.wait(30.0)
    machine.go_on(6)
    assert not machine.rig.shelves
    machine.store(0, CHAINS[0], 7, 0, NOTHING)
    before_s = machine.clock()
    assert machine.run(machine.rig.close(3600.0)) > 0
    assert machine.clock() == before_s
    machine.model.restarted()
    machine.start()
    end(machine)


# --- with real daemons -------------------------------------------------------------------------------


def test_blocks_come_back_after_a_kill_and_flushed_ones_stay_away(cluster: Cluster) -> None:
    kept, gone, part = chain_of("kept", 100), chain_of("gone", 10), chain_of("part", 10)
    for chain in (kept, gone, part):
        cluster.store(chain)
    cluster.wait_written()
    assert cluster.connector.flush(key=key_of(gone, 0)) == 20
    assert cluster.connector.flush(key=key_of(part, 4)) == 12
    cluster.restart()
    assert (cluster.load(kept), cluster.load(gone), cluster.load(part)) == (100, 0, 4)
    stats = cluster.nvme()
    assert stats["promoted_blocks"] == 104
    assert stats["written_blocks"] == 0, "a block on nvme is clean: reading it writes nothing"
    assert cluster.store(part).stored == 6
    cluster.stop()
    assert "blocks of DRAM were not on nvme" not in cluster.daemon.log.read_text()
    cluster.start()
    cluster.wait_loaded()
    assert (cluster.load(kept), cluster.load(part)) == (100, 10)


# --- kills under load -------------------------------------------------------------------------------


def kill_now(cluster: Cluster) -> None:
    """SIGKILL at once, whatever is under way."""
    os.kill(cluster.daemon.pid, signal.SIGKILL)
    cluster.connector.close()
    cluster.daemon.close()
    cluster.check_directories()


@pytest.mark.stress
@pytest.mark.usefixtures("carrier")
@pytest.mark.parametrize("moment", ["under way", "written", "loading"])
def test_a_flush_that_was_acknowledged_outlives_a_kill(tmp_path: Path, moment: str) -> None:
    cluster = Cluster(tmp_path)
    chains = [chain_of(str(number), 60) for number in range(4)]
    for chain in chains:
        cluster.store(chain)
    if moment != "under way":
        cluster.wait_written()
    if moment == "loading":
        cluster.kill()
        cluster.start()
    cluster.connector.flush(key=key_of(chains[0], 30))
    cluster.connector.flush(key=key_of(chains[1], 0))
    kill_now(cluster)
    cluster.start()
    cluster.wait_loaded()
    assert cluster.load(chains[0]) <= 30
    assert cluster.load(chains[1]) == 0
    assert cluster.connector.flush() >= 0
    kill_now(cluster)
    cluster.start()
    cluster.wait_loaded()
    assert [cluster.load(chain) for chain in chains] == [0] * 4
    cluster.stop()


# --- full disks -------------------------------------------------------------------------------------


@pytest.mark.stress
def test_a_disk_that_is_full_is_read_and_written_again_when_it_has_room(mount: Callable[[str], Path]) -> None:
    """It fills up while the daemon runs, and is still full when the next one starts."""
    disk = mount("24m")
    cluster = Cluster(disk, arena="4MiB", nvme_size="20MiB", nvme_segment="2MiB")
    kept, new = chain_of("kept", 40), chain_of("new", 40)
    others = [chain_of(str(number), 50) for number in range(12)]
    cluster.store(kept)
    cluster.wait_written()
    filler = fill(disk)
    for chain in others:
        cluster.store(chain)
        cluster.load(chain)
    wait_until(lambda: "nvme directory" in str(cluster.connector.client.stats()["health"]), "it says what is wrong")
    for _ in range(2):
        cluster.flush_dram()
        assert sum(map(cluster.load, [kept, *others])) > 0, "reads go on"
        assert cluster.nvme()["failed_reads"] == 0
        cluster.restart()
    filler.unlink()

    def stored() -> bool:
        cluster.store(new)
        return cluster.nvme()["directories"][0]["writing"] == "on" and cluster.nvme()["write_queue_blocks"] == 0

    wait_until(stored, "it writes again")
    cluster.wait_written()
    cluster.restart()
    for chain in (kept, *others):
        cluster.load(chain)
    assert cluster.load(new) > 0, "its last blocks may have made room for later ones"
    cluster.stop()
