"""KV events of what `generate` stores: its keys as hashes, its tokens, padding left out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from tiny_models import tiny_model

import tiercache
from tiercache.connectors.transformers_cache import PrefixCache

pytestmark = pytest.mark.engine
SIZE = 16


def batches(dealer: zmq.Socket[bytes]) -> Iterator[list[dict[str, Any]]]:
    """All events that were published so far."""
    dealer.send_multipart([b"", bytes(8)])
    while True:
        assert dealer.poll(30_000), "events do not stop coming"
        *_, number, payload = dealer.recv_multipart()
        if number == b"\xff" * 8:
            return
        yield msgspec.msgpack.decode(payload)[1]


def test_events_have_the_tokens_of_prompt_and_answer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids = torch.randint(3, 128, (2, 70))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    places = {"kv_events": f"ipc://{tmp_path}/events", "kv_events_replay": f"ipc://{tmp_path}/replay"}
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    with tiercache.launch("16MiB", region="16MiB", **places) as daemon:
        dealer.connect(places["kv_events_replay"])
        model = tiny_model("LlamaConfig")
        with PrefixCache(model, daemon.address, required=True, block_size=SIZE, request_timeout_s=20.0) as cache:
            settings = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": None, "pad_token_id": 0}
            output = cache.generate(ids, mask, **settings)
            rows = [output[0, :-1].tolist(), output[1, 9:-1].tolist()]  # the last token is not computed with
            chains = {tuple(row[: len(row) // SIZE * SIZE]) for row in rows}
            deadline_s = time.monotonic() + 30
            while True:
                said: dict[int | None, tuple[int, ...]] = {None: ()}
                for event in (event for events in batches(dealer) for event in events):
                    for place, name in enumerate(event.get("block_hashes", ())):
                        parent = event["block_hashes"][place - 1] if place else event["parent_block_hash"]
                        said[name] = said[parent] + tuple(event["token_ids"][place * SIZE : (place + 1) * SIZE])
                if chains <= set(said.values()) or time.monotonic() > deadline_s:
                    break
            assert chains <= set(said.values())
            assert len(said) == 1 + sum(len(chain) for chain in chains) // SIZE
    dealer.close(0)
    context.term()
