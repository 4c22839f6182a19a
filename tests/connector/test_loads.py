"""Replies to a load that make no sense: each is a miss, no byte is wrong, and the client recovers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_daemon import FakeDaemon
from waiting import hurried, wait_until

import tiercache
from tiercache.protocol import messages as m

BLOCK, COUNT, ARENA = 4096, 4, 4 << 20
SPEC = tiercache.NamespaceSpec(engine="t/1", layout="x", dtype="uint8", block_size=4, block_bytes=BLOCK)
KEYS = tiercache.KeyChain(tiercache.root_key("loads"), 4, range(4 * COUNT)).packed()
GOOD = {"dram_blocks": COUNT, "below_blocks": 0, "lease": 5}
MATCHED: dict[str, dict[str, Any]] = {
    "more blocks than asked": {"dram_blocks": 10**6},
    "fewer than none": {"dram_blocks": -4, "below_blocks": -1},
    "more shared than below": {"shared_blocks": 1},
    "frames of no length": {"frames": [b"123"]},
    "frames of no region": {"frames": [b"\xff" * 8 * COUNT]},
    "frames outside their region": {"frames": [(ARENA - 1).to_bytes(8, "little") * COUNT]},
    "lists for no namespace": {"frames": [bytes(8 * COUNT)] * 9},
    "no frames, and none when asked": {"frames": []},
}
"""What is wrong with the reply to a match, by its fields."""


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with tempfile.TemporaryDirectory(prefix="tc-") as directory, FakeDaemon(Path(directory)) as daemon:
        yield daemon


@pytest.mark.parametrize("case", MATCHED)
def test_a_match_that_makes_no_sense_is_a_miss(daemon: FakeDaemon, case: str) -> None:
    pool = np.full((2 * COUNT, BLOCK), 7, np.uint8)
    blocks = tiercache.Pool.from_blocks(pool)
    with tiercache.connect(
        daemon.address, namespace=SPEC, pool=blocks, required=True, request_timeout_s=60.0
    ) as connector:
        assert connector.store(KEYS, range(COUNT)).stored == COUNT
        daemon.rules[m.Match] = lambda request, reply: [
            msgspec.msgpack.encode(m.Matched(request.request_id, daemon.generation, **GOOD | MATCHED[case]))
        ]
        daemon.rules[m.Resolve] = lambda request, reply: [
            msgspec.msgpack.encode(m.Frames(request.request_id, daemon.generation, 3, bytes(8)))
        ]
        with hurried(connector.client):  # a region that does not exist is waited for
            assert connector.load(connector.match(KEYS), range(COUNT, 2 * COUNT)) == 0
        daemon.rules.clear()
        wait_until(lambda: connector.available, "the client has found the daemon again")
        assert connector.load(connector.match(KEYS), range(COUNT, 2 * COUNT)) == COUNT
        assert (pool == 7).all()
