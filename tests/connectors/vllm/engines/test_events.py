"""The daemon's KV events, decoded by vLLM's own classes, beside the events of vLLM's own publisher."""

from __future__ import annotations

import msgspec
import pytest
from vllm import SamplingParams
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request
from vllm_engines import prompt

from tiercache.connectors.vllm.orders import CacheGroup, name_blocks, of_group
from tiercache.protocol.messages import unpack_indices

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

Event = BlockStored | BlockRemoved | AllBlocksCleared
decode = msgspec.msgpack.Decoder(KVEventBatch).decode


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
