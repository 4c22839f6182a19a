"""Hints with a real daemon and directory: a returning client finds its blocks in DRAM, finished chains are gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from raw_client import VISIBLE, Client, block_of, daemon, new_chain
from waiting import wait_until

DRAM_BLOCKS = 512


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    nvme = ["--nvme", str(tmp_path / "kv"), "--nvme-size", "64MiB", "--nvme-segment", "8MiB"]
    with daemon(tmp_path / "run", "--arena", "4MiB", "--region", "4MiB", *nvme), Client(tmp_path / "run") as connected:
        connected.await_arena()
        yield connected


def store(client: Client, number: int, keys: bytes) -> None:
    """Store a chain, and wait for NVMe to have it."""
    blocks = len(keys) // 16
    assert client.store(number, keys, [block_of(place) for place in range(blocks)]) == [VISIBLE] * blocks
    wait_until(lambda: {view[1] for view in client.ask("inspect", [number], keys[-16:])[1]} == {"dram", "nvme"})


def where(client: Client, number: int, keys: bytes) -> tuple[int, int]:
    """How many blocks are in DRAM, and how many more are below; looking does not count as a use."""
    tag, dram, below, *_ = client.ask("peek", [number], keys)
    assert tag == "peeked"
    return dram, below


def test_a_session_comes_back_and_ends(client: Client) -> None:
    number, keys = client.namespace(), new_chain(20)
    store(client, number, keys)
    for _ in range(3):
        store(client, number, new_chain(DRAM_BLOCKS // 2))
    assert where(client, number, keys) == (0, 20), "other blocks were stored since"
    before = client.stats()

    assert client.ask("hint", [number], keys, 0, False, 1500) == ["hinted", 20]
    wait_until(lambda: where(client, number, keys) == (20, 0))
    after = client.stats()
    assert after["hints"]["ahead_blocks"] == 20
    assert after["hints"]["returning"] == 1
    assert after["tiers"]["nvme"]["promoted_blocks"] == before["tiers"]["nvme"]["promoted_blocks"] + 20
    assert after["counters"]["match_requests"] == before["counters"]["match_requests"], "no client has asked"
    assert client.load(number, keys, 8192) == [block_of(place) for place in range(20)]

    assert client.ask("hint", [number], keys, 0, False, 0, 100) == ["hinted", 20]
    wait_until(lambda: where(client, number, keys) == (0, 0))
    assert client.stats()["hints"]["expired_blocks"] == 40, "in both tiers"
    tag, findings, _, _ = client.ask("check")
    assert (tag, findings) == ("check_reply", [])
