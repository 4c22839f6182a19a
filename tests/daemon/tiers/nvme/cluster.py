"""A real daemon on real directories, and blocks whose bytes identify their keys."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
from chains import key_of
from waiting import wait_until

import tiercache
from tiercache.daemon.tiers.nvme.check.directory_check import ALL, check_directory
from tiercache.protocol.messages import Check, CheckReply

BLOCK_BYTES = 64 << 10
POOL_BLOCKS = 256
DEADLINE_S = 60.0


def content(key: bytes) -> np.ndarray[Any, Any]:
    """What is stored under `key`: bytes that no other key has."""
    seed = np.frombuffer(hashlib.blake2b(key, digest_size=64).digest(), np.uint8)
    return np.tile(seed, BLOCK_BYTES // 64)


def rows_in(directory: Path) -> dict[int, bytes]:
    """Records that are committed, by place. Raises OSError or sqlite3.DatabaseError while that cannot be told.

    From a copy: while a daemon has the database open, nobody else can.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in ("index.db", "index.db-wal"):
            shutil.copy(directory / name, folder)
        with closing(sqlite3.connect(f"{folder}/index.db")) as db:
            return dict(db.execute("SELECT place, record FROM blocks"))


def count_rows_in(directory: Path) -> int:
    """How many there are; -1 while that cannot be told."""
    with suppress(OSError, sqlite3.DatabaseError):
        return len(rows_in(directory))
    return -1


class Cluster:
    """One daemon with nvme directories, restartable, and one connector."""

    def __init__(
        self,
        root: Path,
        arena: str = "64MiB",
        directories: int = 1,
        dtype: str = "uint8",
        content_of: Callable[[bytes], np.ndarray[Any, Any]] = content,
        **settings: str,
    ) -> None:
        self.run_dir = root / "run"
        self.directories = [root / f"nvme{number}" for number in range(directories)]
        self.settings = {"nvme_size": "256MiB", "nvme_segment": "16MiB", "region": "2MiB", **settings}
        self.arena = arena
        self.content_of = content_of
        self.pool = np.zeros((POOL_BLOCKS, BLOCK_BYTES), np.uint8)
        self.spec = tiercache.NamespaceSpec(
            engine="test/1", layout="bytes", dtype=dtype, block_size=1, block_bytes=BLOCK_BYTES
        )
        self.start()

    def start(self) -> None:
        """Start the daemon, and connect."""
        nvme = ",".join(map(str, self.directories))
        self.daemon = tiercache.launch(self.arena, run_dir=self.run_dir, nvme=nvme, **self.settings)
        self.connector = tiercache.connect(
            self.daemon.address,
            namespace=self.spec,
            pool=tiercache.Pool.from_blocks(self.pool),
            required=True,
            request_timeout_s=30.0,
            connect_timeout_s=60.0,
        )
        states = {"loading", "ok"}
        wait_until(lambda: all(one["state"] in states for one in self.nvme()["directories"]), "directories are open")
        wait_until(self.has_memory, "all memory is there")

    def has_memory(self) -> bool:
        arena = self.connector.client.stats()["arena"]
        return bool(arena["populated_bytes"] == arena["bytes"])

    def kill(self) -> None:
        """End the daemon with SIGKILL."""
        self.check_daemon()
        os.kill(self.daemon.pid, signal.SIGKILL)
        self._close()

    def stop(self) -> None:
        """Close everything; SIGTERM if the daemon still runs."""
        if self.daemon.poll() is None:
            self.check_daemon()
        self._close()

    def _close(self) -> None:
        """Close both. However the daemon ended, its directories must be in order."""
        self.connector.close()
        self.daemon.close()
        self.check_directories()

    def check_daemon(self, sample: int = 0) -> CheckReply:
        """Check the daemon's books now, and `sample` of its blocks."""
        reply = self.connector.client.call(Check, timeout_s=DEADLINE_S, sample=sample, bytes_per_s=0)
        assert isinstance(reply, CheckReply)
        assert reply.findings == []
        return reply

    def check_directories(self) -> None:
        """Every directory is as its index says, to the last byte."""
        for directory in self.directories:
            report = check_directory(directory, sample=ALL, rate=0)
            assert report.findings == [], report

    def restart(self) -> None:
        """Kill -9, then start again and wait for the rows."""
        self.kill()
        self.start()
        self.wait_loaded()

    def wait_loaded(self) -> None:
        wait_until(lambda: all(one["state"] == "ok" for one in self.nvme()["directories"]), "rows are loaded")

    def nvme(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.connector.client.stats()["tiers"]["nvme"]
        return stats

    def wait_written(self) -> None:
        """Wait until no write is under way, and the catalog has a row for each block and for no other."""

        def settled() -> bool:
            stats = self.nvme()
            idle = stats["write_queue_blocks"] == 0 and stats["write_in_flight_bytes"] == 0
            # The counts alone may agree while old rows are still being deleted and new ones still being written.
            recorded = all(one["database_queue"] == 0 for one in stats["directories"])
            return idle and recorded and stats["blocks"] == sum(map(count_rows_in, self.directories))

        wait_until(settled, "blocks are written")

    def store(self, chain: bytes, first: int = 0) -> tiercache.StoreResult:
        """Store a chain from block `first` on."""
        count = len(chain) // 16 - first
        for number in range(count):
            self.pool[number] = self.content_of(key_of(chain, first + number))
        return self.connector.store(chain, range(count), first=first)

    def load(self, chain: bytes) -> int:
        """Load what there is of a chain; every block that is said to be good is compared."""
        match = self.connector.match(chain)
        if not match.blocks:
            return 0
        self.pool[: match.blocks] = 0
        good = self.connector.load(match, range(match.blocks), timeout_s=DEADLINE_S)
        for number in range(good):
            right = self.content_of(key_of(chain, number))
            assert np.array_equal(self.pool[number], right), f"wrong bytes in block {number}"
        return good

    def flush_dram(self) -> None:
        """Flush DRAM only."""
        self.connector.flush(tier="dram", all_namespaces=True)
