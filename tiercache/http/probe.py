"""Probe of the data path: one block is stored, found, loaded and compared, as an engine would.

The block is in the probe's own namespace, which never goes to NVMe, and is flushed afterwards. It has the smallest
frame size in use, so that no memory is re-split for it.
"""

from __future__ import annotations

import os
import threading
import time

import numpy as np

from tiercache.client.client import Client
from tiercache.connector.blocks import Blocks, NewBlocks
from tiercache.connector.loads import load_blocks, match_blocks
from tiercache.connector.mover import Mover
from tiercache.connector.stores import store_blocks
from tiercache.copies.pool import Limit, Pool, make_copier
from tiercache.daemon.observe.traffic import PROBE_ENGINE
from tiercache.errors import TierCacheError
from tiercache.protocol.messages import KEY_BYTES
from tiercache.protocol.namespaces import FRAME_ALIGNMENT_BYTES, NamespaceSpec

AGAIN_S = 1.0
"""Seconds for which an answer is reused, for any number of callers."""
LIMIT_S = 5.0
"""Seconds after which no further copy begins; the requests have their own deadlines."""

FULL = "no frame is free at the moment, so nothing was stored: a full cache serves what it has"


class Probe:
    """Makes the round trip on request, one at a time. Thread-safe."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._due_s = 0.0
        self._found: tuple[str, str] = ("", "")
        self._specs: dict[int, NamespaceSpec] = {}

    def ask(self) -> tuple[str, str]:
        """What is wrong, if anything, and other remarks. Blocks for seconds at most."""
        with self._lock:
            if time.monotonic() >= self._due_s:
                try:
                    self._found = self._round_trip()
                except TierCacheError as error:
                    self._found = str(error), ""
                self._due_s = time.monotonic() + AGAIN_S
            return self._found

    def _round_trip(self) -> tuple[str, str]:
        stats = self._client.stats()
        spec = self._spec(stats["arena"]["classes"])
        # For example a hung disk: DRAM and the other disks still serve.
        remarks = [str(reason) for reason in stats["health"]["reasons"]]
        pool = np.zeros((2, spec.block_bytes), np.uint8)
        pool[0] = np.resize(np.frombuffer(os.urandom(FRAME_ALIGNMENT_BYTES), np.uint8), spec.block_bytes)
        mover = Mover(make_copier(Pool.from_blocks(pool)), spec.block_bytes)
        key, limit = os.urandom(KEY_BYTES), Limit(time.monotonic() + LIMIT_S)
        try:
            if not store_blocks(self._client, mover, spec, NewBlocks(np.array([0]), 0, limit, keys=key)).stored:
                return "", "; ".join([FULL, *remarks])
            match = match_blocks(self._client, key, (spec,), with_frames=True)
            if load_blocks(self._client, mover, spec, match, Blocks(np.array([1]), 0, limit)) != 1:
                return "a block that was just stored could not be loaded", ""
        finally:
            self._client.flush(tier="dram", namespaces=[spec], key=key)
        same = bool((pool[0] == pool[1]).all())
        return ("", "; ".join(remarks)) if same else ("a block came back with other bytes than were stored", "")

    def _spec(self, classes: list[dict[str, int]]) -> NamespaceSpec:
        size = min((one["frame_bytes"] for one in classes if one["frames"]), default=FRAME_ALIGNMENT_BYTES)
        if size not in self._specs:
            self._specs[size] = NamespaceSpec(
                engine=PROBE_ENGINE,
                layout="bytes",
                dtype="uint8",
                block_size=1,
                block_bytes=size,
                extra={"tiers": "dram"},
            )
        return self._specs[size]
