"""How a store treats the daemon's answers: what counts as stored, when it goes on, and what it must not commit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_daemon import FakeDaemon

import tiercache
from tiercache.connector import stores as storing
from tiercache.protocol import messages as m
from tiercache.protocol.keys import name_blocks
from tiercache.protocol.messages import BlockState

BLOCK = 4096
BLOCKS = 12
SPEC = tiercache.NamespaceSpec(engine="t/1", layout="x", dtype="uint8", block_size=4, block_bytes=BLOCK)
KEYS = tiercache.KeyChain(tiercache.root_key("stores"), 4, range(4 * BLOCKS)).packed()
_encode = msgspec.msgpack.Encoder().encode
H, F, N = BlockState.HAVE, BlockState.FRAME, BlockState.NONE


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    """A store of twelve blocks has three windows of four."""
    monkeypatch.setattr(storing, "EDGE_BYTES", 4 * BLOCK)
    monkeypatch.setattr(storing, "WINDOW_BYTES", 4 * BLOCK)
    with tempfile.TemporaryDirectory(prefix="tc-") as directory, FakeDaemon(Path(directory)) as daemon:
        yield daemon


@pytest.fixture
def connector(daemon: FakeDaemon) -> Iterator[tiercache.Connector]:
    pool = tiercache.Pool.from_blocks(np.zeros((BLOCKS, BLOCK), np.uint8))
    # A busy machine must not make the daemon look down.
    with tiercache.connect(
        daemon.address, namespace=SPEC, pool=pool, required=True, request_timeout_s=30.0
    ) as connector:
        yield connector


def grants(daemon: FakeDaemon, *answers: list[BlockState]) -> list[tuple[int, int]]:
    """What the daemon says to one reserve after another; to all further ones that there is no room.

    Returns what it is asked: of each reserve its first block and how many there are.
    """
    coming, asked = list(answers), list[tuple[int, int]]()

    def rule(request: m.AnyRequest, reply: m.Reply) -> list[bytes]:
        assert isinstance(request, m.Reserve)
        assert isinstance(reply, m.Reserved)
        count = len(request.keys) // m.KEY_BYTES
        asked.append((KEYS.index(request.keys[:16]) // 16, count))
        states = (coming.pop(0) if coming else [N])[:count]
        states += [N] * (count - len(states))
        frames = m.unpack_frames(reply.frames)
        given = [frames[number] for number, state in enumerate(states) if state is F]
        lease = reply.lease if given else m.NO_LEASE
        answer = m.Reserved(request.request_id, daemon.generation, lease, bytes(states), m.pack_frames(given))
        return [_encode(answer)]

    daemon.rules[m.Reserve] = rule
    return asked


@pytest.mark.parametrize(
    ("answers", "result", "asks"),
    [
        # It asks for as many again as it got.
        ([[F, F, F, N], *[[F, F, F]] * 3], (12, 0, 0, False), [(0, 4), (3, 3), (6, 3), (9, 3)]),
        # Half of that, for the blocks being committed may have been as many as one client may have at a time.
        ([[F, F, F, F], [N], *[[F, F]] * 4], (12, 0, 0, False), [(0, 4), (4, 4), (4, 2), (6, 2), (8, 2), (10, 2)]),
        # With nothing under way asking again would change nothing.
        ([[N]], (0, 0, 12, False), [(0, 4)]),
        ([[H, H, H, H], [N]], (0, 4, 8, False), [(0, 4), (4, 4)]),
    ],
    ids=["some", "none while it commits", "none", "none after what is present"],
)
def test_a_store_that_gets_fewer_frames_than_it_asks_for(
    daemon: FakeDaemon, connector: Any, answers: Any, result: Any, asks: list[tuple[int, int]]
) -> None:
    asked = grants(daemon, *answers)
    assert connector.store(KEYS, range(BLOCKS)) == result
    assert asked == asks


def test_answers_for_other_blocks_than_were_committed_prove_nothing(daemon: FakeDaemon, connector: Any) -> None:
    daemon.rules[m.Commit] = lambda request, reply: [
        _encode(m.Committed(request.request_id, daemon.generation, bytes(3)))
    ]
    assert connector.store(KEYS, range(BLOCKS)).stored == 0


@pytest.mark.parametrize("wanted", [True, False])
def test_each_window_tells_what_its_blocks_are_to_a_daemon_that_wants_events(daemon: FakeDaemon, wanted: bool) -> None:
    daemon.kv_events = wanted
    tokens, first = np.arange(4 * BLOCKS), 3
    pool = tiercache.Pool.from_blocks(np.zeros((BLOCKS, BLOCK), np.uint8))
    with tiercache.connect(
        daemon.address, namespace=SPEC, pool=pool, required=True, request_timeout_s=60.0
    ) as connector:
        assert connector.wants_events == wanted
        events = name_blocks(KEYS, first, tokens[4 * first :])
        assert connector.store(KEYS, range(first, BLOCKS), first=first, events=events).stored == BLOCKS - first
        with pytest.raises(ValueError, match="events name 9 blocks, and 1 are stored"):
            connector.store(KEYS, [0], events=events)
    told = [request.events for request in daemon.seen(m.Reserve) if isinstance(request, m.Reserve)]
    assert len(told) == 3
    if not wanted:
        assert told == [None] * 3
        return
    place = first
    for run, count in zip(told, (4, 1, 4), strict=True):
        assert run is not None
        assert run.hashes == [low(place + number) for number in range(count)]
        assert run.parent == low(place - 1)
        assert m.unpack_indices(run.tokens).tolist() == list(range(4 * place, 4 * (place + count)))
        place += count


def low(number: int) -> int:
    """What an event calls block `number` of the chain."""
    return int.from_bytes(KEYS[16 * number : 16 * number + 16], "big") & (1 << 64) - 1
