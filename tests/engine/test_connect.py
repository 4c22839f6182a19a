"""The engine over a real daemon: real shared memory, a real process, and its death."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from plain_model import Watch, greedy
from real_models import SaveModel, blocks_by_key, generated, prompt_of, small_engine
from waiting import wait_until

import tiercache
from tiercache.engine import connect_to

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("patient")]
SIZE = 8
PROMPT = prompt_of(120)  # chunks end at 32, 64, 96, 112, 120: 14 blocks of 8 that can be reused
GEMMA2 = {"sliding_window": 20, "num_hidden_layers": 4, "query_pre_attn_scalar": 16}
"""Two groups of layers."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[tiercache.LaunchedDaemon]:
    with tiercache.launch(arena="64MiB") as daemon:
        yield daemon


@pytest.mark.parametrize(
    ("config", "options", "settings"),
    [
        ("LlamaConfig", {}, {"write": "back"}),
        ("LlamaConfig", {}, {"kv_cache_dtype": "int4"}),
        ("LlamaConfig", {}, {"tier_dtype": "int8"}),
        ("Gemma2Config", GEMMA2, {}),
    ],
    ids=["write-back", "int4", "int8 in the tiers", "two groups"],
)
def test_a_new_engine_finds_what_the_first_one_computed(
    config: str,
    options: dict[str, Any],
    settings: dict[str, Any],
    daemon: tiercache.LaunchedDaemon,
    save_model: SaveModel,
) -> None:
    folder, connect = save_model(config, **options), connect_to(daemon.address, required=True, request_timeout_s=60.0)
    with small_engine(folder, connect, pool_blocks=128, **settings) as engine:
        cold = Watch(engine).serve(PROMPT, 6)
        assert engine.drain(60.0)
        computed = blocks_by_key(engine)
        engine.reset_pool()
        reset = Watch(engine).serve(PROMPT, 6)
    with small_engine(folder, connect, pool_blocks=128, **settings) as engine:
        warm = Watch(engine).serve(PROMPT, 6)
        loaded = blocks_by_key(engine)
        assert engine.stats()["loaded"] >= sum(len(window.needed(14)) for window in engine._groups.windows)
    assert [one.external_hit_tokens for one in (cold, reset, warm)] == [0, 112, 112]
    assert loaded.keys() <= computed.keys()
    if "tier_dtype" in settings:
        assert all((loaded[key] - computed[key]).norm() < 0.01 * computed[key].norm() for key in loaded)
    else:
        assert all(torch.equal(loaded[key], computed[key]) for key in loaded)
        assert cold.tokens == reset.tokens == warm.tokens


def test_an_engine_starts_without_its_daemon(llama: Path, tmp_path: Path) -> None:
    with small_engine(llama, connect_to(tmp_path / "absent")) as engine:
        assert Watch(engine).serve(PROMPT, 6).tokens == generated(llama, PROMPT, 6)


# --- KV events


def stored_events(dealer: zmq.Socket[bytes]) -> dict[int, tuple[Any, ...]]:
    """All that was said so far of each block in DRAM: its tokens and those before it, and what else its key is of."""
    said: dict[int, tuple[Any, ...]] = {}
    dealer.send_multipart([b"", bytes(8)])
    while True:
        assert dealer.poll(60_000), "events do not stop coming"
        *_, number, payload = dealer.recv_multipart()
        if number == b"\xff" * 8:
            return said
        for event in msgspec.msgpack.decode(payload)[1]:
            parent = event.get("parent_block_hash")
            for place, name in enumerate(event.get("block_hashes", ())):
                before = said[parent][0] if parent is not None else ()
                tokens = tuple(event["token_ids"][place * SIZE : (place + 1) * SIZE])
                extra = (event.get("extra_keys") or [None] * 99)[place]
                said[name] = (*before, *tokens), extra, event.get("group_idx")
                parent = name


@pytest.mark.parametrize("settings", [{}, {"write": "back"}, {"tier_dtype": "int8"}], ids=["through", "back", "int8"])
def test_events_have_the_tokens_of_what_is_stored(settings: dict[str, Any], tmp_path: Path, llama: Path) -> None:
    places = {"kv_events": f"ipc://{tmp_path}/events", "kv_events_replay": f"ipc://{tmp_path}/replay"}
    with (
        tiercache.launch("16MiB", region="16MiB", **places) as daemon,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
    ):
        dealer.linger = 0
        dealer.connect(places["kv_events_replay"])
        with small_engine(llama, connect_to(daemon.address, request_timeout_s=60.0), **settings) as engine:
            engine.generate([PROMPT], greedy(6))
            assert engine.drain(60.0)
        wait_until(lambda: len(stored_events(dealer)) >= 14, "all blocks are told of")
        said = list(stored_events(dealer).values())
    assert [tokens for tokens, *_ in said] == [tuple(PROMPT[: SIZE * (block + 1)]) for block in range(14)]
    # Blocks 12 and 13 are of a chunk that ends where no other would.
    assert [extra is None for _, extra, _ in said] == [True] * 12 + [False] * 2
    assert {group for *_, group in said} == {None}
