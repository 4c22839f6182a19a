"""Daemons as hosts that share a store, each with a client; and daemons whose waits for a store are short."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiercache
from tiercache.client import launcher

BLOCK_BYTES = 16 << 10
BLOCKS = 40
SPEC = tiercache.NamespaceSpec(engine="test/1", layout="bytes", dtype="uint8", block_size=4, block_bytes=BLOCK_BYTES)


class Host:
    """A daemon, and a client with a pool."""

    def __init__(self, run_dir: Path, store: str, **settings: str) -> None:
        self.daemon = tiercache.launch("32MiB", run_dir=run_dir, shared=store, shared_lookup_timeout="1s", **settings)
        self.pool = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        self.connector = tiercache.connect(
            self.daemon.address, namespace=SPEC, pool=tiercache.Pool.from_blocks(self.pool)
        )

    def store(self, name: str) -> None:
        """Store a prompt of so many blocks."""
        self.pool[:] = content(name)
        assert self.connector.store(keys(name), list(range(BLOCKS))).stored == BLOCKS

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

    def stats(self) -> dict[str, Any]:
        tree: dict[str, Any] = self.connector.client.stats()
        return tree

    def shared(self, name: str) -> Any:
        return self.stats()["tiers"]["shared"][name]

    def forget_dram(self) -> None:
        flush(self, "dram")

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


def flush(host: Host, tier: str) -> None:
    from tiercache.protocol.messages import Flush

    host.connector.client.call(Flush, timeout_s=60.0, tier=tier, namespaces=[], key=b"")


@contextmanager
def started_by(script: str, *arguments: str, before: tuple[str, ...] = ()) -> Iterator[None]:
    """Meanwhile `tiercache.launch` runs a script of this folder, which becomes the daemon; `before`: as `nice`."""
    command = [*before, sys.executable, str(Path(__file__).parent / script), *arguments]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "python_command", lambda module, *options: [*command, *options])
        yield
