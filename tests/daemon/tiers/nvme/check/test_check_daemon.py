"""`check` of a daemon that runs: its books under load, blocks on its disks, and what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from chains import chain_of
from cluster import Cluster, rows_in
from waiting import wait_until

from tiercache.cli.main import main
from tiercache.daemon.tiers.nvme.catalog.rows import segment_and_slot
from tiercache.protocol.messages import Check, CheckReply


def flip_bit(cluster: Cluster, number: int) -> None:
    """In the file of a daemon that runs, of the block that was written as `number`."""
    directory = cluster.directories[0]
    place = sorted(rows_in(directory))[number]
    segment, slot = segment_and_slot(place)
    fd = os.open(directory / "segments" / f"{segment:08d}.seg", os.O_RDWR)
    try:
        byte = os.pread(fd, 1, slot * 4096 + 99)[0]
        os.pwrite(fd, bytes([byte ^ 1]), slot * 4096 + 99)
        os.fsync(fd)
    finally:
        os.close(fd)


def ask(cluster: Cluster, sample: int, bytes_per_s: int = 0) -> CheckReply:
    reply = cluster.connector.client.call(Check, timeout_s=30.0, sample=sample, bytes_per_s=bytes_per_s)
    assert isinstance(reply, CheckReply)
    return reply


def test_a_bad_block_is_found_and_forgotten(cluster: Cluster) -> None:
    chain = chain_of("a", 30)
    cluster.store(chain)
    cluster.wait_written()
    flip_bit(cluster, 12)
    reply = ask(cluster, sample=-1)
    assert len(reply.findings) == 1
    assert "fails its checksum and is dropped" in reply.findings[0]
    wait_until(lambda: cluster.nvme()["blocks"] < 30, "the blocks behind it are gone too")
    cluster.flush_dram()
    good = cluster.load(chain)
    assert good < 30
    assert cluster.store(chain).stored == 30 - good
    cluster.wait_written()
    assert cluster.check_daemon(sample=-1).scanned_blocks == 30


# --- the command line ----------------------------------------------------------------------------


def test_command_without_a_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path, directories=2)
    for number in range(8):
        cluster.store(chain_of(str(number), 10))
    cluster.wait_written()
    cluster.kill()
    first, second = cluster.directories
    monkeypatch.setenv("TIERCACHE_RUN_DIR", str(tmp_path / "absent"))
    named = ["--nvme", f"{first},{second}"]
    assert main(["check", *named]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{first}: clean: ")
    assert f"\n{second}: clean: " in out
    monkeypatch.setenv("TIERCACHE_NVME", str(first))
    assert main(["check", "--sample", "0"]) == 0, "the directories of the configuration"
    assert capsys.readouterr().out.endswith(" 0 blocks read (0 B)\n")
    flip_bit(cluster, 3)
    assert main(["check", "--full", *named]) == 1
    assert "--repair deletes them" in capsys.readouterr().out
    assert main(["check", "--full", "--repair", *named]) == 1
    assert "repaired: " in capsys.readouterr().out
    assert main(["check", "--full", "--json", *named]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["ok"]
    assert [one["path"] for one in tree["directories"]] == [str(first), str(second)]
