"""KV events of blocks from the shared store: the host that has them in DRAM says so once a store names them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import zmq
from daemon_rig import BLOCKS, Host, keys, started_by
from valkey_rig import ValkeyServer
from waiting import wait_until

from tiercache.protocol.keys import name_blocks
from tiercache.protocol.messages import EventRun

WAIT_MS = 60_000


@contextmanager
def replays(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect(endpoint)
        yield dealer
    context.term()


def in_dram(dealer: zmq.Socket[bytes]) -> set[Any]:
    """The names of the blocks that one who has heard all events thinks are in DRAM."""
    there: set[Any] = set()
    dealer.send_multipart([b"", bytes(8)])
    while True:
        assert dealer.poll(WAIT_MS), "events do not stop coming"
        *_, number, payload = dealer.recv_multipart()
        if number == struct.pack(">q", -1):
            return there
        for event in msgpack.unpackb(payload)[1]:
            if event["type"] == "BlockStored" and event["medium"] == "CPU":
                there.update(event["block_hashes"])
            elif event["type"] == "BlockRemoved" and event["medium"] == "CPU":
                there.difference_update(event["block_hashes"])


def names() -> EventRun:
    return name_blocks(keys("one"), 0, range(4 * BLOCKS))


def test_blocks_of_another_host_are_in_the_events_of_the_one_that_has_loaded_them(
    full_valkey: ValkeyServer, tmp_path: Path
) -> None:
    places = {"kv_events": f"ipc://{tmp_path}/events", "kv_events_replay": f"ipc://{tmp_path}/replay"}
    with started_by("brief_daemon.py"), replays(places["kv_events_replay"]) as dealer:
        a = Host(tmp_path / "a", full_valkey.url, shared_plain="yes")
        b = Host(tmp_path / "b", full_valkey.url, shared_plain="yes", **places)
        try:
            a.store("one")
            wait_until(lambda: a.shared("written_blocks") == BLOCKS)
            assert b.load("one") == BLOCKS
            assert b.shared("fetched_blocks") == BLOCKS
            assert b.connector.wants_events
            assert in_dram(dealer) == set(), "nobody has told the daemon how they are called"
            result = b.connector.store(keys("one"), list(range(BLOCKS)), events=names())
            assert (result.stored, result.present) == (0, BLOCKS), "nothing is copied for that"
            wait_until(lambda: in_dram(dealer) == set(names().hashes), "the router knows of them")
            b.forget_dram()
            wait_until(lambda: in_dram(dealer) == set(), "and that they have left")
        finally:
            a.close()
            b.close()
