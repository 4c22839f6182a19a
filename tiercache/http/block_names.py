"""Makes the keys that engines give the blocks of a prompt, from what they told the daemon about it (`ModelCard`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tiercache.connectors.vllm.names import ENCODINGS, HASHING, block_hashes, keys_of
from tiercache.http.query import Query
from tiercache.protocol.keys import KeyChain, salted_root
from tiercache.protocol.messages import CHAIN_HASHING, KEY_BYTES, MAX_KEYS, ModelCard


class EndOfBlock(NamedTuple):
    """The end of a block, from which further keys follow: how many blocks end here or before, and the last hash."""

    blocks: int
    last: bytes


class BlockNames:
    """The keys of prompts for the engines of one card, under a query's salts. Only full blocks have a key.

    `known` is false if the engines hash in a way that is unknown here: then there are no keys.
    """

    def __init__(self, card: ModelCard, query: Query) -> None:
        self._card = card
        self._root = salted_root(card.content, query.salt)
        self._cache_salt = query.cache_salt
        self._adapter = (card.adapter, card.adapter_path) if card.adapter else None
        self._algorithm = card.hashing.removeprefix(HASHING)
        self._chained = card.hashing == CHAIN_HASHING
        whole = card.hash_size > 0 and not card.block_size % card.hash_size
        self.known = self._chained or (self._algorithm in ENCODINGS and whole)
        self.start = EndOfBlock(0, self._root if self._chained else card.hash_seed)

    def keys(self, tokens: Sequence[int]) -> bytes:
        """Those of a whole prompt, as far as one request can ask for them."""
        return self.following(self.start, tokens[: MAX_KEYS * self._card.block_size])[0] if self.known else b""

    def following(self, place: EndOfBlock, tokens: Sequence[int]) -> tuple[bytes, EndOfBlock]:
        """The keys of the full blocks of `tokens`, which follow that place, and the place where these end."""
        card = self._card
        if self._chained:
            keys = KeyChain(place.last, card.block_size, tokens).packed()
            return keys, EndOfBlock(place.blocks + len(keys) // KEY_BYTES, keys[-KEY_BYTES:] or place.last)
        whole = tokens[: len(tokens) - len(tokens) % card.block_size]
        salt = "" if place.blocks else self._cache_salt  # vLLM puts it into the first block only
        hashes = block_hashes(self._algorithm, place.last, whole, card.hash_size, self._adapter, salt)
        per_block = card.block_size // card.hash_size
        blocks = len(hashes) // per_block
        return keys_of(self._root, hashes, per_block, 0, blocks), EndOfBlock(
            place.blocks + blocks, hashes[-1] if hashes else place.last
        )
