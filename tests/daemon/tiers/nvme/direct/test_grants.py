"""Slots that clients write: what the daemon refuses to give them."""

from __future__ import annotations

from typing import Any

import pytest
from chains import chain_of
from cluster import Cluster

import tiercache
from tiercache.errors import RequestRefused
from tiercache.protocol import messages
from tiercache.protocol.messages import CommitState


def test_what_makes_no_sense_is_refused_and_takes_no_place(cluster: Cluster) -> None:
    cluster.wait_loaded()  # before that nothing is granted
    client = cluster.connector.client
    number = client.register(cluster.spec)
    good: dict[str, Any] = {"namespace": number, "parent": b"", "keys": chain_of("a", 4), "ttl_ms": 1000}
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
            client.call(messages.ReserveExtents, **{**good, **changes})
        assert refused.value.code == code, changes
    for sums in (b"1234567", bytes(8 * 513)):
        with pytest.raises(RequestRefused) as refused:
            client.call(messages.CommitExtents, lease=1, checksums=sums)
        assert refused.value.code == "bad_value"
    reply = client.call(messages.CommitExtents, lease=12345, checksums=messages.pack_checksums([1, 2]))
    assert isinstance(reply, messages.Committed)
    assert list(reply.states) == [CommitState.DROPPED] * 2
    odd = {"engine": "odd", "layout": "l", "dtype": "uint8", "block_size": 1}
    for spec in (
        tiercache.NamespaceSpec(block_bytes=5000, **odd),
        tiercache.NamespaceSpec(block_bytes=4096, window_blocks=4, **odd),
    ):
        got = client.call(messages.ReserveExtents, **{**good, "namespace": client.register(spec)})
        assert isinstance(got, messages.ReservedExtents)
        assert (got.lease, got.present, got.soon) == (0, 0, False)
    stats = cluster.nvme()
    assert (stats["direct_write_leases"], stats["direct_quarantined_bytes"]) == (0, 0)
