"""KV events of what the engine stores: its keys as hashes, its tokens, and what else is in a key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from random_models import prompt_of
from waiting import wait_until

import tiercache
from tiercache.engine import Engine, EngineSettings, SamplingParams, connect_to

pytestmark = pytest.mark.engine
SIZE = 8
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPT = prompt_of(120)  # chunks end at 32, 64, 96, 112; blocks 12 and 13 are of a chunk that ends where no other would


def stored(dealer: zmq.Socket[bytes]) -> dict[int, tuple[Any, ...]]:
    """All that was said so far of each block in DRAM: its tokens and those before it, and what else its key is of."""
    said: dict[int, tuple[Any, ...]] = {}
    for event in events(dealer):
        parent = event.get("parent_block_hash")
        for place, name in enumerate(event.get("block_hashes", ())):
            before = said[parent][0] if parent is not None else ()
            tokens = tuple(event["token_ids"][place * SIZE : (place + 1) * SIZE])
            extra = (event.get("extra_keys") or [None] * 99)[place]
            said[name] = (*before, *tokens), extra, event.get("group_idx")
            parent = name
    return said


def events(dealer: zmq.Socket[bytes]) -> Iterator[dict[str, Any]]:
    dealer.send_multipart([b"", bytes(8)])
    while True:
        assert dealer.poll(30_000), "events do not stop coming"
        *_, number, payload = dealer.recv_multipart()
        if number == b"\xff" * 8:
            return
        yield from msgspec.msgpack.decode(payload)[1]


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[tuple[tiercache.LaunchedDaemon, zmq.Socket[bytes]]]:
    places = {"kv_events": f"ipc://{tmp_path}/events", "kv_events_replay": f"ipc://{tmp_path}/replay"}
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    with tiercache.launch("16MiB", region="16MiB", **places) as daemon:
        dealer.connect(places["kv_events_replay"])
        yield daemon, dealer
    dealer.close(0)
    context.term()


@pytest.mark.parametrize("settings", [{}, {"write": "back"}, {"tier_dtype": "int8"}], ids=["through", "back", "int8"])
def test_events_have_the_tokens_of_what_is_stored(
    settings: dict[str, Any], listener: tuple[tiercache.LaunchedDaemon, zmq.Socket[bytes]], llama: Path
) -> None:
    daemon, dealer = listener
    small = {"block_size": SIZE, "chunk_size": 32, "pool_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 72}
    with Engine(llama, EngineSettings(**{**small, **settings}), connect=connect_to(daemon.address)) as engine:
        engine.generate([PROMPT], GREEDY)
    wait_until(lambda: len(stored(dealer)) >= 14, "all blocks are told of")
    said = list(stored(dealer).values())
    assert [tokens for tokens, *_ in said] == [tuple(PROMPT[: SIZE * (block + 1)]) for block in range(14)]
    assert [extra is None for _, extra, _ in said] == [True] * 12 + [False] * 2
    assert {group for *_, group in said} == {None}
