"""The daemon's KV events, decoded by vLLM's own classes, beside the events of vLLM's own publisher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from vllm import SamplingParams
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request
from vllm_engines import BLOCK, PATIENCE_S, Engine, launch, prompt, wait_until

import tiercache
from tiercache.connectors.vllm.events import CacheGroup, name_blocks, of_group
from tiercache.protocol.messages import unpack_indices

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

Event = BlockStored | BlockRemoved | AllBlocksCleared
decode = msgspec.msgpack.Decoder(KVEventBatch).decode


@contextmanager
def replays(endpoint: str) -> Iterator[Callable[[], list[Event]]]:
    """All events so far, of any publisher that speaks vLLM's protocol."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(endpoint)

    def events() -> list[Event]:
        dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        found: list[Event] = []
        while True:
            assert dealer.poll(PATIENCE_S * 1000), "events do not stop coming"
            _, _, number, payload = dealer.recv_multipart()
            if number == ZmqEventPublisher.END_SEQ:
                return found
            found += decode(payload).events

    try:
        yield events
    finally:
        dealer.close(0)
        context.term()


def stored(events: list[Event], medium: str) -> dict[int, tuple[object, ...]]:
    """All that is said of each block that was stored."""
    said = {}
    for event in events:
        if isinstance(event, BlockStored) and event.medium == medium:
            size, parent = event.block_size, event.parent_block_hash
            extra = event.extra_keys or [None] * len(event.block_hashes)
            for place, name in enumerate(event.block_hashes):
                tokens = tuple(event.token_ids[place * size : (place + 1) * size])
                form = event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
                said[name] = parent, tokens, size, event.lora_id, event.lora_name, extra[place], *form
                parent = name
    return said


def removed(events: list[Event], medium: str) -> set[object]:
    found = [event for event in events if isinstance(event, BlockRemoved) and event.medium == medium]
    return {name for event in found for name in event.block_hashes}


def test_what_is_below_the_gpu_has_vllms_names(start: Callable[..., Engine], tmp_path: Path) -> None:
    """What the daemon says of a block is what vLLM has said of it, but for the medium."""
    ours, theirs = f"ipc://{tmp_path}/ours", f"ipc://{tmp_path}/theirs"
    (tmp_path / "disk").mkdir()
    with (
        launch(
            "64MiB",
            region="16MiB",
            kv_events=f"{ours}-pub",
            kv_events_replay=ours,
            nvme=str(tmp_path / "disk"),
            nvme_size="256MiB",
            nvme_segment="16MiB",
        ) as daemon,
        replays(ours) as below,
        replays(theirs) as above,
    ):
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"{theirs}-pub"}
        engine = start(daemon.address, kv_events_config={**events, "replay_endpoint": theirs})
        long = prompt(1000, "events")
        engine.generate([long, long[:500] + prompt(100, "other")], 40)
        blocks = 1039 // BLOCK + 639 // BLOCK - 500 // BLOCK
        wait_until(lambda: len(stored(below(), "STORAGE")) == blocks)
        said = below()
        assert isinstance(said[0], AllBlocksCleared)
        assert len(stored(above(), "GPU")) == blocks
        assert stored(said, "CPU") == stored(above(), "GPU")
        assert stored(said, "STORAGE") == stored(above(), "GPU")
        with tiercache.Client.connect(daemon.address) as client:
            client.flush(tier="dram")
        wait_until(lambda: removed(below(), "CPU") == set(stored(said, "CPU")))
        assert removed(below(), "STORAGE") == set()
        stores = sum(isinstance(event, BlockStored) for event in below())
        assert engine.regenerate([long], 1)[1] == [992]  # from NVMe, by way of DRAM
        wait_until(lambda: sum(isinstance(event, BlockStored) for event in below()) > stores)
        assert stored(below()[len(said) :], "CPU").items() <= stored(said, "CPU").items()
        with tiercache.Client.connect(daemon.address) as client:
            client.flush()
        wait_until(lambda: isinstance(below()[-1], AllBlocksCleared))


@pytest.mark.parametrize("per_block", [1, 2])
@pytest.mark.parametrize("kind", ["text", "salted", "adapter", "images"])
def test_blocks_have_the_names_of_vllms_own_events(kind: str, per_block: int) -> None:
    size, hash_size = 16, 16 // per_block
    kv_cache_utils.init_none_hash(sha256)
    places = [PlaceholderRange(offset=offset, length=20) for offset in (3, 40, 75)]
    images = [MultiModalFeatureSpec(None, "image", f"image {place.offset}", place) for place in places]
    options = {
        "text": {},
        "salted": {"cache_salt": "secret"},
        "adapter": {"lora_request": LoRARequest("tuned", 7, "/path")},
        "images": {"mm_features": images},
    }[kind]
    hasher = kv_cache_utils.get_request_block_hasher(hash_size, sha256)
    request = Request("one", prompt(100), SamplingParams(), None, block_hasher=hasher, **options)
    pool = BlockPool(10, True, hash_size, enable_kv_cache_events=True)
    blocks = pool.get_new_blocks(6)
    named = []
    for first, end in ((0, 2), (2, 6)):
        pool.cache_full_blocks(request, blocks, first, end, size, kv_cache_group_id=0)
        run = name_blocks(request, first, end, per_block, size)
        run = of_group(run, CacheGroup(0, "full_attention", None), 0, end - first)
        named.append(
            BlockStored(
                run.hashes,
                run.parent,
                unpack_indices(run.tokens).tolist(),
                size,
                run.lora_id,
                "GPU",
                run.lora_name,
                run.extra_keys,
                run.group,
                run.kind,
                run.window,
            )
        )
    vllms = pool.take_events()
    assert len(vllms) == 2
    assert stored(named, "GPU").keys() == stored(vllms, "GPU").keys()
    for name, said in stored(named, "GPU").items():
        assert said[:7] == stored(vllms, "GPU")[name][:7]  # vLLM's event here has no kind
    assert (named[0].extra_keys is None) == (kind == "text")
