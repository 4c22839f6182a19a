"""KV events about vLLM's blocks: with its own hashes and tokens, like its own events about blocks on the GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from tiercache.protocol.messages import EventRun, pack_indices

from .compat import kv_cache_interface, kv_cache_utils


class CacheGroup(NamedTuple):
    """A KV cache group, as events name it."""

    group_id: int
    kind: str
    window: int | None


def event_groups(kv_cache_config: Any) -> list[CacheGroup]:
    """The groups of an engine, in order."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    kind, window = kv_cache_interface.get_kv_cache_spec_kind, kv_cache_interface.get_kv_cache_spec_sliding_window
    return [CacheGroup(group_id, kind(spec).value, window(spec)) for group_id, spec in enumerate(specs)]


def name_blocks(request: Any, first: int, end: int, per_block: int, block_size: int) -> EventRun:
    """Blocks `first ..< end` of a request, each of `per_block` hashes of vLLM's."""
    external = kv_cache_utils.maybe_convert_block_hash
    places = range((first + 1) * per_block - 1, end * per_block, per_block)
    adapter, extra = request.lora_request, None
    if adapter is not None or request.mm_features or request.cache_salt or request.prompt_embeds is not None:
        starts = range(first * block_size, end * block_size, block_size)
        made = [kv_cache_utils.generate_block_hash_extra_keys(request, at, at + block_size, 0)[0] for at in starts]
        extra = kv_cache_utils.to_event_extra_keys(made)
    return EventRun(
        hashes=[external(request.block_hashes[place]) for place in places],
        parent=external(request.block_hashes[first * per_block - 1]) if first else None,
        tokens=pack_indices(list(request.all_token_ids[first * block_size : end * block_size])),
        lora_id=adapter.adapter_id if adapter is not None else None,
        lora_name=adapter.name if adapter is not None else None,
        extra_keys=extra,
    )


def of_group(events: EventRun, group: CacheGroup, first: int, count: int) -> EventRun:
    """The part of an event run for blocks `first ..< first + count` in one KV cache group."""
    part = events.part(first, count)
    return msgspec.structs.replace(part, group=group.group_id, kind=group.kind, window=group.window)
