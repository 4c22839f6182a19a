"""llm-d's KV indexer in small: how it decodes vLLM's events, and what it makes of them.

Written from llm-d-router's `pkg/kvevents` (engineadapter, pool, subscriber; September 2026), as strict as that:

- three frames; the topic is `kv@POD@MODEL`, the number eight bytes, big endian
- a batch is an array of at least two: a float, events, and perhaps a rank. One bad event loses the batch
- an event is a map with `type`, or an array that begins with it. Unknown fields and further elements are skipped, an
  unknown type is an error
- a hash is an integer of 64 bits, or bytes of which the last eight count; token ids are integers; a medium is a string,
  and becomes lower case
- blocks of a group are indexed only if its kind is one of full attention, and if tokens and hashes are equally many
- a block whose parent is not indexed is skipped: its place in the prompt is unknown
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import msgpack

STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
REMOVED_FIELDS = "block_hashes", "medium", "group_idx"
FIELDS = {"BlockStored": STORED_FIELDS, "BlockRemoved": REMOVED_FIELDS, "AllBlocksCleared": ()}
PREFIX_KINDS = "full_attention", "mla_attention", "sink_full_attention"
INT_FIELDS = "lora_id", "group_idx", "kv_cache_spec_sliding_window"
TEXT_FIELDS = "medium", "lora_name", "kv_cache_spec_kind"
MAX_HASH_BYTES = 64


class Undecodable(Exception):
    """The indexer drops the whole batch, and logs an error."""


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise Undecodable(what)


def integer(value: Any, what: str) -> int:
    demand(type(value) is int and -(1 << 63) <= value < 1 << 64, f"{what} is no integer: {value!r}")
    return int(value)


def hash64(value: Any) -> int:
    if isinstance(value, bytes):
        demand(0 < len(value) <= MAX_HASH_BYTES, f"a hash of {len(value)} bytes")
        return int.from_bytes(value[-8:], "big")
    return integer(value, "a hash") % (1 << 64)


def parse_topic(topic: bytes) -> tuple[str, str]:
    """Pod and model; the whole topic and nothing where it has another form."""
    parts = topic.decode().split("@")
    return (parts[1], parts[2]) if len(parts) == 3 else (topic.decode(), "")


def decode_batch(payload: bytes) -> list[dict[str, Any]]:
    batch = msgpack.unpackb(payload)
    demand(isinstance(batch, list) and len(batch) >= 2, "a batch has at least two fields")
    time_s, events, *rest = batch
    demand(isinstance(time_s, float) and isinstance(events, list), "a batch is a time and events")
    if rest and rest[0] is not None:
        integer(rest[0], "a rank")
    return [decode_event(event) for event in events]


def decode_event(event: Any) -> dict[str, Any]:
    if isinstance(event, list):
        demand(bool(event) and isinstance(event[0], str), "an event begins with its type")
        kind = event[0]
        demand(
            kind in FIELDS and len(event) >= {"BlockStored": 5, "BlockRemoved": 2}.get(kind, 1), f"{kind}: too short"
        )
        fields = dict(zip(FIELDS[kind], event[1:], strict=False))
    else:
        demand(
            isinstance(event, dict) and isinstance(event.get("type"), str), "an event is an array or a map with a type"
        )
        kind = event["type"]
        demand(kind in FIELDS, f"unknown type {kind}")
        fields = {name: event[name] for name in FIELDS[kind] if name in event}
    return {"type": kind, **_checked(kind, fields)}


def _checked(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    for name in {"BlockStored": ("block_hashes", "token_ids", "block_size"), "BlockRemoved": ("block_hashes",)}.get(
        kind, ()
    ):
        demand(name in fields, f"{kind} has no {name}")
    for name in INT_FIELDS:
        if fields.get(name) is not None:
            demand(integer(fields[name], name) >= 0, f"{name} is negative")
    for name in TEXT_FIELDS:
        demand(fields.get(name) is None or isinstance(fields[name], str), f"{name} is no text")
    if "block_hashes" in fields:
        demand(isinstance(fields["block_hashes"], list), "block_hashes is no array")
        fields["block_hashes"] = [hash64(one) for one in fields["block_hashes"]]
    if fields.get("parent_block_hash") is not None:
        fields["parent_block_hash"] = hash64(fields["parent_block_hash"])
    if kind == "BlockStored":
        demand(isinstance(fields["token_ids"], list), "token_ids is no array")
        for token in fields["token_ids"]:
            demand(0 <= integer(token, "a token") < 1 << 32, f"token {token}")
        integer(fields["block_size"], "block_size")
        extra = fields.get("extra_keys")
        demand(extra is None or isinstance(extra, list), "extra_keys is no array")
        demand(all(one is None or isinstance(one, list) for one in extra or ()), "extra_keys has no arrays")
    return fields


class Indexer:
    """What the indexer knows: by key of a prompt's block, in which tiers of which pods it is.

    `size`: tokens in a block of the indexer. Its own keys are hashes of tokens and model, whatever engines call theirs.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.tiers: dict[bytes, set[tuple[str, str]]] = {}
        self.skipped: list[str] = []
        self._request_keys: dict[int, bytes] = {}  # by the engine's hash, last key of its tokens
        self._announced: Counter[tuple[str, str, Any, int]] = Counter()

    def receive(self, topic: bytes, number: bytes, payload: bytes) -> None:
        demand(len(number) == 8, "a number has eight bytes")
        pod, model = parse_topic(topic)
        for event in decode_batch(payload):
            getattr(self, f"_{event['type']}")(event, pod, model)

    def _BlockStored(self, event: dict[str, Any], pod: str, model: str) -> None:
        tier = (event.get("medium") or "gpu").lower()
        tokens, hashes, group = event["token_ids"], event["block_hashes"], event.get("group_idx")
        if group is not None:
            dense = len(tokens) == event["block_size"] * len(hashes)
            if event.get("kv_cache_spec_kind") not in PREFIX_KINDS or not dense:
                return self.skipped.append("not a prefix")
        parent = event.get("parent_block_hash")
        if parent and parent not in self._request_keys:
            return self.skipped.append("unknown parent")
        keys = self.keys(tokens, event.get("lora_name") or model, self._request_keys[parent] if parent else b"")
        per_hash = len(keys) // len(hashes)
        for number, name in enumerate(hashes):
            its = keys[number * per_hash : (number + 1) * per_hash]
            self._request_keys[name] = its[-1]
            for key in its:
                self.tiers.setdefault(key, set()).add((pod, tier))
            self._announced[pod, tier, group, name] += 1
        return None

    def _BlockRemoved(self, event: dict[str, Any], pod: str, model: str) -> None:
        tier, group = (event.get("medium") or "gpu").lower(), event.get("group_idx")
        for name in event["block_hashes"]:
            self._announced[pod, tier, group, name] -= 1
            if self._announced[pod, tier, group, name] <= 0 and name in self._request_keys:
                self.tiers.get(self._request_keys[name], set()).discard((pod, tier))

    def _AllBlocksCleared(self, event: dict[str, Any], pod: str, model: str) -> None:
        for places in self.tiers.values():
            places -= {place for place in places if place[0] == pod}
        for counted in [counted for counted in self._announced if counted[0] == pod]:
            del self._announced[counted]

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

    def score(self, tokens: list[int], model: str, weights: dict[str, float]) -> float:
        """Of the only pod: the best weight of each block, up to the first that is nowhere."""
        total = 0.0
        for tiers in self.places(tokens, model):
            if not tiers:
                break
            total += max(weights.get(tier, 1.0) for tier in tiers)
        return total
