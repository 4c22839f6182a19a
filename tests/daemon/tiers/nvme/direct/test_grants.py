"""Slots that clients write: how the daemon answers, whatever they do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chains import chain_of, key_of
from cluster import BLOCK_BYTES, Cluster, content
from waiting import wait_until

import tiercache
from tiercache.errors import RequestRefused
from tiercache.protocol import messages
from tiercache.protocol.checksums import CHECKSUM_LANES, block_checksum, block_seed
from tiercache.protocol.messages import CommitState, Extent

VISIBLE, DROPPED = CommitState.VISIBLE, CommitState.DROPPED


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, lease_ttl_max="5s", quarantine_per_client="4MiB")
    made.wait_loaded()  # before that nothing is granted
    yield made
    made.stop()


class Writer:
    """A hand-made client, as a process with an instance of its own."""

    def __init__(self, cluster: Cluster, instance: bytes | None = None) -> None:
        self.cluster = cluster
        self.client = tiercache.Client.connect(
            cluster.daemon.address, instance=instance, map_arena=False, request_timeout_s=30.0
        )
        self.number = self.client.register(cluster.spec)

    def reserve(self, keys: bytes, parent: bytes = b"", ttl_ms: int = 5000) -> messages.ReservedExtents:
        reply = self.client.call(
            messages.ReserveExtents, namespace=self.number, parent=parent, keys=keys, ttl_ms=ttl_ms
        )
        assert isinstance(reply, messages.ReservedExtents)
        return reply

    def granted(self, keys: bytes, parent: bytes = b"", ttl_ms: int = 5000) -> messages.ReservedExtents:
        """The same, once there is room."""
        replies: list[messages.ReservedExtents] = []

        def has_places() -> bool:
            replies.append(self.reserve(keys, parent, ttl_ms))
            assert replies[-1].lease or replies[-1].soon
            return replies[-1].lease != 0

        wait_until(has_places, "there are places")
        return replies[-1]

    def write(self, reply: messages.ReservedExtents, keys: bytes) -> list[int]:
        """Write the granted blocks of a run of keys; their checksums."""
        sums = []
        for number, place in enumerate(messages.unpack_extents(reply.extents)):
            key = key_of(keys, reply.present + number)
            data = content(key).tobytes()
            with open(f"{reply.directory}/segments/{place.segment:08d}.seg", "r+b") as file:
                file.seek(place.offset)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            seed = block_seed(key, self.cluster.spec.fingerprint(), BLOCK_BYTES, 0, CHECKSUM_LANES)
            sums.append(block_checksum(data, seed, CHECKSUM_LANES))
        return sums

    def commit(self, lease: int, sums: list[int]) -> list[int]:
        reply = self.client.call(messages.CommitExtents, lease=lease, checksums=messages.pack_checksums(sums))
        assert isinstance(reply, messages.Committed)
        return list(reply.states)

    def abort(self, lease: int, finished: bool) -> None:
        self.client.call(messages.Abort, lease=lease, finished=finished)


@pytest.fixture
def writer(cluster: Cluster) -> Iterator[Writer]:
    made = Writer(cluster)
    yield made
    made.client.close()


def slots(reply: messages.ReservedExtents) -> list[Extent]:
    return messages.unpack_extents(reply.extents)


def held(cluster: Cluster) -> tuple[int, int]:
    """Write leases that are open, and blocks in quarantine."""
    stats = cluster.nvme()
    return stats["direct_write_leases"], stats["direct_quarantined_bytes"] // BLOCK_BYTES


def test_places_are_blocks_in_a_segment(cluster: Cluster, writer: Writer) -> None:
    chain = chain_of("a", 10)
    reply = writer.granted(chain)
    assert (reply.present, reply.directory, len(slots(reply))) == (0, str(cluster.directories[0]), 10)
    assert len(set(slots(reply))) == 10
    for place in slots(reply):
        assert place == Extent(place.segment, 0, CHECKSUM_LANES, 0, place.offset, BLOCK_BYTES, BLOCK_BYTES, 0)
        assert place.offset % BLOCK_BYTES == 0
    assert held(cluster) == (1, 0)
    assert writer.commit(reply.lease, writer.write(reply, chain)) == [VISIBLE] * 10
    assert held(cluster) == (0, 0)
    assert cluster.load(chain) == 10, "the daemon verifies blocks that the client reported as right"
    assert writer.commit(reply.lease, [1, 2]) == [DROPPED] * 2, "the lease is over"
    writer.abort(reply.lease, True)
    assert cluster.load(chain) == 10


def test_what_makes_no_sense_is_refused(cluster: Cluster, writer: Writer) -> None:
    good: dict[str, Any] = {"namespace": writer.number, "parent": b"", "keys": chain_of("a", 4), "ttl_ms": 1000}
    wrong = (
        ({"keys": b""}, "bad_value"),
        ({"keys": b"x" * 17}, "bad_value"),
        ({"keys": bytes(16 * 513)}, "too_large"),
        ({"parent": b"short"}, "bad_value"),
        ({"ttl_ms": 0}, "bad_value"),
        ({"namespace": 99}, "unknown_namespace"),
    )
    for changes, code in wrong:
        with pytest.raises(RequestRefused) as refused:
            writer.client.call(messages.ReserveExtents, **{**good, **changes})
        assert refused.value.code == code, changes
    for sums in (b"1234567", bytes(8 * 513)):
        with pytest.raises(RequestRefused) as refused:
            writer.client.call(messages.CommitExtents, lease=1, checksums=sums)
        assert refused.value.code == "bad_value"
    assert writer.commit(12345, [1, 2]) == [DROPPED] * 2
    assert held(cluster) == (0, 0)


def test_blocks_that_no_direct_write_can_be_made_of_get_no_place(cluster: Cluster, writer: Writer) -> None:
    odd = {"engine": "odd", "layout": "l", "dtype": "uint8", "block_size": 1}
    for spec in (
        tiercache.NamespaceSpec(block_bytes=5000, **odd),
        tiercache.NamespaceSpec(block_bytes=4096, window_blocks=4, **odd),
    ):
        number = writer.client.register(spec)
        reply = writer.client.call(
            messages.ReserveExtents, namespace=number, parent=b"", keys=chain_of("a", 2), ttl_ms=1000
        )
        assert isinstance(reply, messages.ReservedExtents)
        assert (reply.lease, reply.present, reply.soon) == (0, 0, False)
