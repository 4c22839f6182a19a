"""The wire protocol as `daemon/PROTOCOL.md` has it, spoken to a real daemon without a line of tiercache: blocks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from raw_client import (
    DROPPED,
    FRAME,
    REGIONS,
    VISIBLE,
    Client,
    block_of,
    daemon,
    new_chain,
)


def test_blocks_come_back_through_shared_memory(client: Client, run_dir: Path) -> None:
    number, keys = client.namespace(), new_chain(5)
    blocks = [block_of(i) for i in range(5)]
    assert client.store(number, keys, blocks) == [VISIBLE] * 5
    with Client(run_dir) as other:
        assert other.load(number, keys, 8192) == blocks
        assert other.load(number, keys[: 3 * 16], 8192) == blocks[:3]
        assert other.load(number, new_chain(2), 8192) == []


def test_blocks_come_back_through_payload_parts(run_dir: Path) -> None:
    block_bytes = (2 << 20) - 4096
    with Client(run_dir, map_arena=False) as client:
        number, keys = client.namespace(block_bytes), new_chain(1)
        lease, states, _, _ = client.reserve(number, keys)
        assert states == [FRAME]
        content = os.urandom(block_bytes)
        for offset in range(0, block_bytes, 1 << 20):
            part = content[offset : offset + (1 << 20)]
            assert client.ask("write", lease, 0, offset, payload=[part]) == ["done"]
        assert client.commit(lease, [0]) == [VISIBLE]
        _, lease, _ = client.match([number], keys)
        assert client.ask("read", lease, number, 0, 0, block_bytes) == ["payload", block_bytes, content]
        assert client.ask("read", lease, number, 0, 4097, 3) == ["payload", 3, content[4097:4100]]
        assert client.release(lease)
        with pytest.raises(TimeoutError):  # it did not ask for the arena, and is not given it
            client.take_regions(wait_s=0.05)


def test_without_a_mapping_only_what_was_written_is_committed(run_dir: Path) -> None:
    """A frame holds what its former owner left there, and a tenant without a mapping must not see it."""
    with Client(run_dir, map_arena=False) as client:
        number, keys = client.namespace(8192), new_chain(3)
        lease, states, _, _ = client.reserve(number, keys)
        assert states == [FRAME] * 3
        assert client.refusal("write", lease, 0, 4096, payload=[b"x" * 4096]) == "bad_value"
        assert client.ask("write", lease, 0, 0, payload=[b"x" * 8192]) == ["done"]
        assert client.ask("write", lease, 1, 0, payload=[b"y" * 8191]) == ["done"]
        assert client.commit(lease, [0, 1, 2]) == [VISIBLE, DROPPED, DROPPED]
        assert client.length(number, keys) == 1


def test_what_cannot_be_read_or_written_is_refused(client: Client) -> None:
    number, keys = client.namespace(8192), new_chain(2)
    lease, _, _, _ = client.reserve(number, keys)
    assert client.refusal("write", lease, 2, 0, payload=[b"x"]) == "unknown_lease"
    assert client.refusal("write", lease, 0, 8192, payload=[b"x"]) == "bad_value"
    assert client.refusal("write", lease, 0, -1, payload=[b"x"]) == "bad_value"
    assert client.refusal("write", lease, 0, 0, payload=[b""]) == "bad_value"
    assert client.refusal("write", lease, 0, 0) == "malformed"
    assert client.refusal("write", lease, 0, 0, payload=[b"x", b"y"]) == "malformed"
    assert client.refusal("ping", payload=[b"x"]) == "malformed"
    assert client.commit(lease, [0, 1]) == [VISIBLE] * 2
    assert client.refusal("write", lease, 0, 0, payload=[b"x"]) == "unknown_lease"
    _, lease, _ = client.match([number], keys)
    for index, offset, length in ((2, 0, 1), (-1, 0, 1), (0, 8192, 1), (0, -1, 2), (0, 0, 0), (0, 1, 8192)):
        assert client.refusal("read", lease, number, index, offset, length) == "bad_value"
    assert client.refusal("read", lease + 1, number, 0, 0, 1) == "unknown_lease"
    assert client.release(lease)


def test_regions_come_in_packets_of_at_most_sixteen(run_dir: Path, client: Client) -> None:
    with Client(run_dir) as late:
        while len(late.regions) < REGIONS:
            late.take_regions()
        assert late.region_packets == [16, 16, 8]
        assert sorted(late.regions) == list(range(REGIONS))
        assert late.arena_bytes == sum(map(len, late.regions.values())) == 80 << 20


def test_regions_made_after_the_welcome_are_handed_out_too(tmp_path: Path) -> None:
    with daemon(tmp_path / "run", "--arena", "384MiB", "--region", "48MiB"), Client(tmp_path / "run") as client:
        while len(client.regions) < 8:
            client.take_regions()
        assert client.stats()["arena"]["populated_bytes"] == 384 << 20
        with pytest.raises(TimeoutError):
            client.take_regions(wait_s=0.05)


def test_a_permuted_list_names_no_wrong_frame(client: Client) -> None:
    number, keys = client.namespace(), new_chain(3)
    client.store(number, keys, [block_of(i) for i in range(3)])
    before = client.stats()["counters"]["invariant_failures"]
    permuted = keys[:16] + keys[32:] + keys[16:32]
    dram, lease, frames = client.match([number], permuted, resolve=3)
    assert len(frames[0]) < dram
    assert client.refusal("read", lease, number, 2, 0, 1) == "bad_value"
    assert client.stats()["counters"]["invariant_failures"] > before
    assert client.release(lease)


def test_only_the_window_of_a_windowed_namespace_is_handed_out(client: Client) -> None:
    full, window, keys = client.namespace(), client.namespace(window_blocks=2), new_chain(4)
    blocks = [block_of(i) for i in range(4)]
    client.store(full, keys, blocks)
    client.store(window, keys, blocks)
    dram, lease, frames = client.match([full, window], keys, resolve=4)
    assert (dram, list(map(len, frames))) == (4, [4, 0])
    assert client.ask("resolve", lease, window, 1, 3) == ["frames", 1, b"", b"", False]
    tag, first, packed, _, _ = client.ask("resolve", lease, window, 2, 2)
    assert (tag, first, len(packed)) == ("frames", 2, 16)
    assert client.refusal("read", lease, window, 1, 0, 1) == "bad_value"
    assert client.ask("read", lease, window, 3, 0, 8192) == ["payload", 8192, blocks[3]]
    assert client.release(lease)
