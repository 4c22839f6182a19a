"""Daemons as hosts that share a store, each with a client; and daemons whose waits for a store are short."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import wait_until

import tiercache
from tiercache.client import launcher

BLOCK_BYTES = 16 << 10
BLOCKS = 32
SPEC = tiercache.NamespaceSpec(engine="test/1", layout="bytes", dtype="uint8", block_size=4, block_bytes=BLOCK_BYTES)


class Host:
    """A daemon, and a client with a pool."""

    def __init__(self, run_dir: Path, store: str, **settings: Any) -> None:
        settings = {"shared_lookup_timeout": "1s", **settings}
        self.daemon = tiercache.launch("32MiB", run_dir=run_dir, shared=store, **settings)
        self.address = self.daemon.address
        self.pool = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        self.connector = tiercache.connect(self.address, namespace=SPEC, pool=tiercache.Pool.from_blocks(self.pool))

    def store(self, name: str, blocks: int = BLOCKS) -> None:
        """Store a prompt."""
        self.pool[:] = content(name)
        assert self.connector.store(keys(name)[: 16 * blocks], list(range(blocks))).stored == blocks

    def share(self, name: str, found: int = BLOCKS) -> None:
        """Store a prompt, and wait until the store of all hosts has its blocks."""
        written = self.shared("written_blocks")
        self.store(name)
        wait_until(lambda: self.shared("written_blocks") == written + found, "the blocks in the store")

    def load(self, name: str) -> int:
        """Good blocks of a prompt; all of them are compared."""
        self.pool[:] = 0
        found = self.connector.match(keys(name))
        if not found.blocks:
            self.connector.release(found)
            return 0
        good = self.connector.load(found, list(range(found.blocks)))
        assert (self.pool[:good] == content(name)[:good]).all()
        return good

    def finds(self, name: str, blocks: int = BLOCKS) -> None:
        """Wait until so many blocks are found: a look-up may come too late for one request."""
        wait_until(lambda: self.load(name) == blocks, f"{blocks} blocks of {name}")

    def stats(self) -> dict[str, Any]:
        tree: dict[str, Any] = self.connector.client.stats()
        return tree

    def shared(self, name: str) -> Any:
        return self.stats()["tiers"]["shared"][name]

    def forget_dram(self) -> None:
        self.connector.flush(tier="dram")

    def close(self) -> None:
        self.connector.close()
        self.daemon.close()


def keys(name: str) -> bytes:
    chain = tiercache.KeyChain(tiercache.root_key(name), block_size=4)
    chain.extend(range(4 * BLOCKS))
    return chain.packed()


def content(name: str) -> Any:
    seed = int.from_bytes(name.encode(), "little") % (1 << 32)
    return np.random.default_rng(seed).integers(0, 256, (BLOCKS, BLOCK_BYTES), np.uint8)


@contextmanager
def brief() -> Iterator[None]:
    """Meanwhile `tiercache.launch` starts daemons whose waits for a store are short."""
    script = str(Path(__file__).parent / "brief_daemon.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "python_command", lambda module, *options: [sys.executable, script, *options])
        yield
