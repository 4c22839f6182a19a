"""Engines' names for their blocks, for KV events and model cards."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from .limits import CHAIN_HASHING, KEY_BYTES, MAX_NAMESPACES_PER_REQUEST, MAX_RESERVE


class EventRun(msgspec.Struct, array_like=True, frozen=True):
    """What KV events say of consecutive blocks of a chain, in the engine's own hashes and tokens.

    Attributes:
        hashes: the engine's own hash of each block.
        parent: that of the block before the first; None at the root.
        tokens: ids of all tokens, u32le, as many in each block as the namespace says.
        group, kind, window: which KV cache group of the engine, of which kind, and the tokens of its window.
        lora_id, lora_name: the adapter, if one was used.
        extra_keys: for each block what else the hash covers (images, salt), if anything.
    """

    hashes: Annotated[list[int | bytes], msgspec.Meta(max_length=MAX_RESERVE)]
    parent: int | bytes | None
    tokens: bytes
    group: int | None = None
    kind: str | None = None
    window: int | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: Annotated[list[Any], msgspec.Meta(max_length=MAX_RESERVE)] | None = None

    def part(self, first: int, count: int) -> EventRun:
        """Blocks `first ..< first + count` of these."""
        size, end = len(self.tokens) // len(self.hashes), first + count
        return msgspec.structs.replace(
            self,
            hashes=self.hashes[first:end],
            parent=self.hashes[first - 1] if first else self.parent,
            tokens=self.tokens[first * size : end * size],
            extra_keys=self.extra_keys and self.extra_keys[first:end],
        )


class ReceivedRun(EventRun, frozen=True):
    """An `EventRun` as the daemon reads it: `extra_keys` are passed on undecoded. Decoding them would take time and
    many times the memory of what was sent."""

    extra_keys: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_RESERVE)] | None = None


class ModelCard(msgspec.Struct, array_like=True, frozen=True):
    """How an engine names the blocks of one model, except for the tenant's salt: the basis of an affinity query.

    Attributes:
        names: what people call the model.
        content: identifies what computes it, from `keys.content_id`.
        namespaces: fingerprints of its blocks' forms; a match is what all of them have.
        block_size: tokens in a block.
        hashing: how keys are made: CHAIN_HASHING (`keys.KeyChain`), or one of vLLM's hashes.
        hash_size, hash_seed: of an engine's own hash: its tokens, and what comes before the first one.
        adapter, adapter_path: name and path of the LoRA adapter, if there is one.
    """

    names: list[str]
    content: bytes
    namespaces: list[str]
    block_size: int
    hashing: str = CHAIN_HASHING
    hash_size: int = 0
    hash_seed: bytes = b""
    adapter: str = ""
    adapter_path: str = ""

    def problem(self) -> str | None:
        """Why no keys can be made with it, or None. One line for the sender."""
        if len(self.content) != KEY_BYTES:
            return f"content is {len(self.content)} bytes: must be {KEY_BYTES}"
        if not 0 < len(self.namespaces) <= MAX_NAMESPACES_PER_REQUEST:
            return f"{len(self.namespaces)} namespaces: must be 1 to {MAX_NAMESPACES_PER_REQUEST}"
        if self.block_size < 1 or (self.hashing != CHAIN_HASHING and self.hash_size < 1):
            return f"block_size is {self.block_size}, hash_size {self.hash_size}: must be at least 1 token"
        return None
