"""What a store tells for KV events: everything to a daemon that wants it, and nothing to another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fake_daemon import FakeDaemon

import tiercache
from tiercache.protocol import messages as m
from tiercache.protocol.keys import name_blocks

BLOCKS, SIZE = 300, 4
SPEC = tiercache.NamespaceSpec(engine="t", layout="l", dtype="uint8", block_size=SIZE, block_bytes=4096)
TOKENS = np.arange(BLOCKS * SIZE)


def low(key: bytes) -> int:
    return int.from_bytes(key, "big") & (1 << 64) - 1


@pytest.mark.parametrize("first", [0, 7])
def test_each_window_says_what_its_blocks_are(tmp_path: Path, first: int) -> None:
    chain = tiercache.KeyChain(tiercache.root_key("events"), SIZE, TOKENS)
    pool = tiercache.Pool.from_blocks(np.zeros((BLOCKS, 4096), np.uint8))
    with FakeDaemon(tmp_path) as daemon:
        daemon.kv_events = True
        with tiercache.connect(tmp_path, namespace=SPEC, pool=pool, required=True) as connector:
            assert connector.wants_events
            events = name_blocks(chain.packed(), first, TOKENS[first * SIZE :])
            stored = connector.store(chain.packed(), range(first, BLOCKS), first=first, events=events).stored
            assert stored == BLOCKS - first
            with pytest.raises(ValueError, match="events name 300 blocks, and 1 are stored"):
                connector.store(chain.packed(), [0], events=name_blocks(chain.packed(), 0, TOKENS))
        place, requests = first, daemon.seen(m.Reserve)
        assert len(requests) > 1
        for request in requests:
            assert isinstance(request, m.Reserve)
            assert request.events is not None
            count = len(request.keys) // m.KEY_BYTES
            assert request.events.hashes == [low(chain.key(place + number)) for number in range(count)]
            assert request.events.parent == (low(chain.key(place - 1)) if place else None)
            assert m.unpack_indices(request.events.tokens).tolist() == list(range(place * SIZE, (place + count) * SIZE))
            place += count
        assert place == BLOCKS


def test_a_daemon_without_events_is_told_nothing(tmp_path: Path) -> None:
    chain = tiercache.KeyChain(tiercache.root_key("events"), SIZE, TOKENS)
    pool = tiercache.Pool.from_blocks(np.zeros((BLOCKS, 4096), np.uint8))
    with FakeDaemon(tmp_path) as daemon:
        with tiercache.connect(tmp_path, namespace=SPEC, pool=pool, required=True) as connector:
            assert not connector.wants_events
            connector.store(chain.packed(), range(BLOCKS), events=name_blocks(chain.packed(), 0, TOKENS))
        requests = daemon.seen(m.Reserve)
        assert requests
        assert all(isinstance(request, m.Reserve) and request.events is None for request in requests)


def test_a_chain_knows_what_its_blocks_are_of() -> None:
    chain = tiercache.KeyChain(tiercache.root_key("events"), SIZE, range(6))
    chain.extend(range(6, 11), extra=b"\x0f")
    chain.extend(range(11, 17))
    for first, extras in ((0, [None, ["0f"], None, None]), (2, None)):
        run = chain.events(first, 4 - first)
        assert run.hashes == [low(chain.key(number)) for number in range(first, 4)]
        assert run.parent == (low(chain.key(first - 1)) if first else None)
        assert m.unpack_indices(run.tokens).tolist() == list(range(first * SIZE, 16))
        assert run.extra_keys == extras
