"""llm-d's KV indexer in small: how it decodes vLLM's events, and what it makes of them.

Written from llm-d-router's `pkg/kvevents` (engineadapter, pool, subscriber; September 2026), as strict as that:

- three frames; the topic is `kv@POD@MODEL`, the number eight bytes, big endian
- a batch is an array of at least two: a float, events, and perhaps a rank. One bad event loses the batch
- an event is a map with `type`. Unknown fields are skipped, an unknown type is an error
- a hash is an integer of 64 bits, or bytes of which the last eight count; token ids are integers; a medium is a string,
  and becomes lower case
- blocks of a group are indexed only if its kind is one of full attention, and if tokens and hashes are equally many
- a block whose parent is not indexed is skipped: its place in the prompt is unknown
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

import msgspec

Hash = Annotated[int, msgspec.Meta(ge=-(1 << 63))] | Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Count = Annotated[int, msgspec.Meta(ge=0)]
PREFIX_KINDS = "full_attention", "mla_attention", "sink_full_attention"


class BlockStored(msgspec.Struct, tag_field="type", tag=True):
    block_hashes: list[Hash]
    token_ids: list[Token]
    block_size: int
    parent_block_hash: Hash | None = None
    lora_id: Count | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: Count | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: Count | None = None


class BlockRemoved(msgspec.Struct, tag_field="type", tag=True):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: Count | None = None


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    time_s: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    rank: int | None = None


decode = msgspec.msgpack.Decoder(Batch).decode


def hash64(value: int | bytes) -> int:
    return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value % (1 << 64)


def parse_topic(topic: bytes) -> tuple[str, str]:
    """Pod and model; the whole topic and nothing where it has another form."""
    parts = topic.decode().split("@")
    return (parts[1], parts[2]) if len(parts) == 3 else (topic.decode(), "")


class Indexer:
    """What the indexer knows: by key of a prompt's block, in which tiers of which pods it is.

    `size`: tokens in a block of the indexer. Its own keys are hashes of tokens and model, whatever engines call theirs.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.tiers: dict[bytes, set[tuple[str, str]]] = {}
        self._request_keys: dict[int, bytes] = {}  # by the engine's hash, last key of its tokens

    def receive(self, topic: bytes, number: bytes, payload: bytes) -> None:
        assert len(number) == 8
        pod, model = parse_topic(topic)
        for event in decode(payload).events:
            if isinstance(event, BlockStored):
                self._stored(event, pod, model)
            elif isinstance(event, BlockRemoved):
                for name in map(hash64, event.block_hashes):
                    if name in self._request_keys:
                        self.tiers[self._request_keys[name]].discard((pod, (event.medium or "gpu").lower()))
            else:
                for places in self.tiers.values():
                    places -= {place for place in places if place[0] == pod}

    def _stored(self, event: BlockStored, pod: str, model: str) -> None:
        tokens, hashes = event.token_ids, list(map(hash64, event.block_hashes))
        if event.group_idx is not None:
            assert event.kv_cache_spec_kind in PREFIX_KINDS
            assert len(tokens) == event.block_size * len(hashes)
        parent = hash64(event.parent_block_hash or 0)
        assert not parent or parent in self._request_keys, "blocks of an unknown parent are skipped"
        keys = self.keys(tokens, event.lora_name or model, self._request_keys[parent] if parent else b"")
        per_hash = len(keys) // len(hashes)
        for number, name in enumerate(hashes):
            its = keys[number * per_hash : (number + 1) * per_hash]
            self._request_keys[name] = its[-1]
            for key in its:
                self.tiers.setdefault(key, set()).add((pod, (event.medium or "gpu").lower()))

    def keys(self, tokens: list[int], model: str, parent: bytes = b"") -> list[bytes]:
        """Keys of the full blocks of these tokens."""
        found = []
        for at in range(0, len(tokens) - self.size + 1, self.size):
            text = f"{model} {tokens[at : at + self.size]}".encode()
            found.append(parent := hashlib.blake2b(parent + text, digest_size=8).digest())
        return found

    def places(self, tokens: list[int], model: str) -> list[set[str]]:
        """For each block of a prompt the tiers that it is in."""
        return [{tier for _, tier in self.tiers.get(key, ())} for key in self.keys(tokens, model)]
