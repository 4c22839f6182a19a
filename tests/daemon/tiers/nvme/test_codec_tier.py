"""Codecs on the way to the disk and back: a real daemon, real directories, real restarts."""

from __future__ import annotations

import importlib.util
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chains import chain_of
from cluster import BLOCK_BYTES, Cluster
from waiting import wait_until

from tiercache.daemon.tiers.forms import codecs
from tiercache.daemon.tiers.nvme.catalog.rows import Row, unpack_row

BLOCKS = 60
NAMES = ["lz4", *(["zstd"] if importlib.util.find_spec("zstandard") else [])]


def kv_content(key: bytes) -> np.ndarray[Any, Any]:
    """Values as a bfloat16 KV cache has them: exponents that repeat, mantissas that do not."""
    values = np.random.default_rng(int.from_bytes(key, "little")).standard_normal(BLOCK_BYTES // 2, np.float32)
    return np.ascontiguousarray(values.view(np.uint16)[1::2]).view(np.uint8)


def rows_of(directory: Path) -> list[Row]:
    with closing(sqlite3.connect(directory / "index.db")) as db:
        rows = [unpack_row(place, record) for place, record in db.execute("SELECT place, record FROM blocks")]
    good = [row for row in rows if row is not None]
    assert len(good) == len(rows)
    return good


def codecs_of(directory: Path) -> list[str]:
    return sorted(codecs.codec_name(row.codec) for row in rows_of(directory))


def kv_cluster(root: Path, **settings: str) -> Cluster:
    return Cluster(root, dtype="bfloat16", content_of=kv_content, **settings)


@pytest.mark.parametrize("name", NAMES)
def test_encoded_blocks_come_back_byte_for_byte(tmp_path: Path, name: str) -> None:
    cluster = kv_cluster(tmp_path, nvme_codec=name)
    chain = chain_of("kv", BLOCKS)
    assert cluster.store(chain).stored == BLOCKS
    cluster.wait_written()
    stats = cluster.nvme()
    assert stats["codec"] == name
    assert stats["written_bytes"] < 0.85 * BLOCKS * BLOCK_BYTES
    assert stats["saved_by_codec_bytes"] > 0.1 * BLOCKS * BLOCK_BYTES
    on_disk = sum(one["written_bytes"] for one in stats["directories"])
    assert on_disk == BLOCKS * BLOCK_BYTES - stats["saved_by_codec_bytes"]
    cluster.restart()
    assert cluster.load(chain) == BLOCKS
    assert cluster.nvme()["promoted_blocks"] == BLOCKS
    cluster.stop()
    assert {row.codec for row in rows_of(cluster.directories[0])} == {codecs.codec_number(name, 2)}


def test_a_codec_saves_no_room(tmp_path: Path) -> None:
    """As the setting's text says: a slot is as large as a block."""
    cluster = kv_cluster(tmp_path, nvme_codec="lz4")
    cluster.store(chain_of("kv", BLOCKS))
    cluster.wait_written()
    assert cluster.nvme()["bytes"] == BLOCKS * BLOCK_BYTES
    cluster.stop()


def test_blocks_stay_readable_when_the_codec_changes(tmp_path: Path) -> None:
    cluster = kv_cluster(tmp_path, nvme_codec="raw")
    written = {}
    for name in ("raw", *NAMES, "raw"):
        cluster.stop()
        cluster.settings["nvme_codec"] = name
        cluster.start()
        cluster.wait_loaded()
        for chain, blocks in written.items():
            assert cluster.load(chain) == blocks
        chain = chain_of(f"{name} {len(written)}", 10 + len(written))
        written[chain] = 10 + len(written)
        assert cluster.store(chain).stored == written[chain]
        cluster.wait_written()
    cluster.restart()
    for chain, blocks in written.items():
        assert cluster.load(chain) == blocks
    assert cluster.nvme()["bad_blocks"] == cluster.nvme()["failed_reads"] == 0
    cluster.stop()
    wanted = {"raw": 10 + 10 + len(NAMES) + 1, **{name: 11 + number for number, name in enumerate(NAMES)}}
    found = codecs_of(cluster.directories[0])
    assert {name: found.count(name) for name in wanted} == wanted


def test_blocks_that_do_not_get_smaller_are_stored_as_they_are(tmp_path: Path) -> None:
    def noise(key: bytes) -> np.ndarray[Any, Any]:
        return np.random.default_rng(int.from_bytes(key, "little")).integers(0, 256, BLOCK_BYTES, np.uint8)

    cluster = Cluster(tmp_path, dtype="bfloat16", content_of=noise, nvme_codec="lz4")
    chain = chain_of("noise", 10)
    cluster.store(chain)
    cluster.wait_written()
    cluster.restart()
    assert cluster.load(chain) == 10
    cluster.stop()
    assert codecs_of(cluster.directories[0]) == ["raw"] * 10


def test_elements_are_those_of_the_namespace(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, dtype="float32", nvme_codec="lz4")
    chain = chain_of("a", 5)
    cluster.store(chain)
    cluster.wait_written()
    cluster.restart()
    assert cluster.load(chain) == 5
    cluster.stop()
    assert {row.codec for row in rows_of(cluster.directories[0])} == {codecs.codec_number("lz4", 4)}


def without(tmp_path: Path, *names: str) -> str:
    """A PYTHONPATH on which these packages cannot be imported, which stands for: are not installed."""
    hidden = tmp_path / "hidden"
    for name in names:
        (hidden / name).mkdir(parents=True)
        (hidden / name / "__init__.py").write_text("raise ImportError('not here')\n")
    return f"{hidden}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"


def test_blocks_whose_library_is_gone_are_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = kv_cluster(tmp_path, nvme_codec="lz4")
    chain = chain_of("kv", 5)
    cluster.store(chain)
    cluster.wait_written()
    cluster.stop()
    cluster.settings["nvme_codec"] = "raw"
    monkeypatch.setenv("PYTHONPATH", without(tmp_path, "lz4"))
    cluster.start()
    cluster.wait_loaded()
    assert cluster.load(chain) == 0
    wait_until(lambda: cluster.nvme()["blocks"] == 0, "what follows is forgotten too")
    assert cluster.store(chain).stored == 5
    cluster.wait_written()
    said = cluster.daemon.log.read_text()
    assert "pip install lz4" in said
    assert "Traceback" not in said
    cluster.restart()
    assert cluster.load(chain) == 5
    cluster.stop()


def test_a_missing_library_is_one_line(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tiercache.daemon",
        "--run-dir",
        str(tmp_path / "run"),
        "--arena",
        "4MiB",
        "--nvme",
        str(tmp_path / "nvme"),
        "--nvme-codec",
        "zstd",
        "--log-level",
        "error",
    ]
    environment = {**os.environ, "PYTHONPATH": without(tmp_path, "zstandard", "compression")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "pip install zstandard" in done.stderr
    assert not (tmp_path / "nvme" / "superblock").exists()
