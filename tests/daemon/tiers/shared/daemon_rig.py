"""Daemons as hosts that share a store, each with a client; and daemons whose waits for a store are short."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chains import chain_of
from fault_engine import Engine
from waiting import wait_until

import tiercache
from tiercache.client import launcher

BLOCK_BYTES = 16 << 10
BLOCKS = 32
SPEC = tiercache.NamespaceSpec(engine="test/1", layout="bytes", dtype="uint8", block_size=4, block_bytes=BLOCK_BYTES)


class Host:
    """A daemon, and an engine whose prompts have 32 blocks."""

    def __init__(self, run_dir: Path, store: str, **settings: Any) -> None:
        settings = {"shared_lookup_timeout": "1s", **settings}
        self.daemon = tiercache.launch("32MiB", run_dir=run_dir, shared=store, **settings)
        self.address = self.daemon.address
        self.engine = Engine(self.address, SPEC, BLOCKS, request_timeout_s=60.0)
        self.connector = self.engine.connector

    def store(self, name: str) -> None:
        assert self.engine.store(chain_of(name, BLOCKS)).stored == BLOCKS

    def share(self, name: str) -> None:
        """Store a prompt, and wait until the store of all hosts has its blocks."""
        written = self.shared("written_blocks")
        self.store(name)
        wait_until(lambda: self.shared("written_blocks") == written + BLOCKS, "the blocks in the store")

    def load(self, name: str) -> int:
        """Good blocks of a prompt; all of them are compared."""
        return self.engine.load(chain_of(name, BLOCKS))

    def finds(self, name: str) -> None:
        """Wait until all blocks are found: a look-up may come too late for one request."""
        wait_until(lambda: self.load(name) == BLOCKS, f"the blocks of {name}")

    def stats(self) -> dict[str, Any]:
        tree: dict[str, Any] = self.connector.client.stats()
        return tree

    def shared(self, name: str) -> Any:
        return self.stats()["tiers"]["shared"][name]

    def forget_dram(self) -> None:
        self.connector.flush(tier="dram")

    def close(self) -> None:
        self.engine.close()
        self.daemon.close()


@contextmanager
def brief() -> Iterator[None]:
    """Meanwhile `tiercache.launch` starts daemons whose waits for a store are short."""
    script = str(Path(__file__).parent / "brief_daemon.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "python_command", lambda module, *options: [sys.executable, script, *options])
        yield
