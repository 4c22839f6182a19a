"""The affinity query for load balancers: how much of a prompt is stored. Makes keys from tokens, then peeks.

The engines have told the daemon their models and how they hash blocks (`ModelCard`). The tenant's salt comes with each
query, since keys cannot be made without it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec

from tiercache.client.client import Client
from tiercache.client.session import Session
from tiercache.connectors.vllm.cards import HASHING
from tiercache.connectors.vllm.hashes import ENCODINGS, block_hashes
from tiercache.connectors.vllm.names import keys_of
from tiercache.errors import TierCacheError
from tiercache.protocol.keys import KeyChain, salted_root
from tiercache.protocol.messages import CHAIN_HASHING, KEY_BYTES, MAX_KEYS, ModelCard, ModelList, Models, Peek, Peeked

LIST_S = 1.0
"""How long the list of models is used before it is fetched again."""
NEW_LIST_S = 0.1
"""The same when the wanted model is not in the list."""

Token = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]


class UnknownModel(TierCacheError):
    """No engine that is connected to the daemon has announced this model."""


class Query(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A query.

    Attributes:
        model: an engine's name for it (a served name, a folder), or the content id from an earlier answer.
        tokens: the prompt.
        salt: the tenant's, empty if the engines have none.
        lora: name of an adapter.
        cache_salt: the `cache_salt` of a request to vLLM.
    """

    model: str
    tokens: list[Token]
    salt: str
    lora: str = ""
    cache_salt: str = ""


class _List(NamedTuple):
    session: Session
    asked_s: float
    models: list[ModelCard]
    numbers: Mapping[str, int]


class Affinity:
    """Answers queries. Thread-safe."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._list: _List | None = None

    def ask(self, query: Query) -> dict[str, Any]:
        """The answer as a tree: tokens matched by tier, in total and for each model of that name.

        One round trip to the daemon for each model, and one a second for the list of models. Raises UnknownModel,
        DaemonUnavailable, RequestRefused.
        """
        listed = self._listed(LIST_S)
        cards = [card for card in listed.models if is_meant(card, query)]
        if not cards:
            listed = self._listed(NEW_LIST_S)
            cards = [card for card in listed.models if is_meant(card, query)]
        if not cards:
            names = sorted({name for card in listed.models for name in card.names})
            known = f"there are {', '.join(names[:8])}" if names else "none has announced one"
            raise UnknownModel(f"{query.model}: no engine here has announced this model ({known})")
        chains = [_chain(listed, card, query) for card in cards]
        best = max(chains, key=lambda chain: int(chain["matched"]))
        return {
            "model": query.model,
            "tokens": len(query.tokens),
            "matched": best["matched"],
            "matched_tokens": best["matched_tokens"],
            "chains": chains,
        }

    def _listed(self, at_most_s: float) -> _List:
        """The models, from a list at most `at_most_s` old. Numbers of namespaces are valid in one session only."""
        session, now_s = self._client.session(), time.monotonic()
        with self._lock:
            listed = self._list
            if listed is None or listed.session is not session or now_s - listed.asked_s > at_most_s:
                reply = session.call(Models, ModelList)
                listed = self._list = _List(session, now_s, reply.models, reply.namespaces)
        return listed


def is_meant(card: ModelCard, query: Query) -> bool:
    """Whether the model has that name. A query names an adapter with `lora`, or as a model, as engines do."""
    if query.model == card.content.hex() or (card.adapter and query.model == card.adapter and not query.lora):
        return True
    return query.model in card.names and query.lora == card.adapter


def _chain(listed: _List, card: ModelCard, query: Query) -> dict[str, Any]:
    """What is stored of the prompt under the names of one model."""
    keys = keys_of_card(card, query)
    numbers = [listed.numbers[name] for name in card.namespaces if name in listed.numbers]
    found = Peeked(0, 0, 0, 0, [(0, 0)] * len(card.namespaces))
    if keys and len(numbers) == len(card.namespaces):
        found = listed.session.call(Peek, Peeked, namespaces=numbers, keys=keys)
    size = card.block_size
    return {
        "content": card.content.hex(),
        "names": card.names,
        "adapter": card.adapter,
        "hashing": card.hashing,
        "block_size": size,
        "blocks": len(keys) // KEY_BYTES,
        "matched": (found.dram_blocks + found.below_blocks) * size,
        "matched_tokens": _tokens(found.dram_blocks, found.below_blocks, size),
        "namespaces": [
            {"fingerprint": name, **_tokens(dram, below, size)}
            for name, (dram, below) in zip(card.namespaces, found.each, strict=True)
        ],
    }


def _tokens(dram_blocks: int, below_blocks: int, block_size: int) -> dict[str, int]:
    return {"dram": dram_blocks * block_size, "nvme": below_blocks * block_size}


def keys_of_card(card: ModelCard, query: Query) -> bytes:
    """Keys that an engine with this card gives the full blocks of the prompt; none if its hash is unknown here."""
    root = salted_root(card.content, query.salt)
    tokens = query.tokens[: MAX_KEYS * card.block_size]
    if card.hashing == CHAIN_HASHING:
        return KeyChain(root, card.block_size, tokens).packed()
    algorithm = card.hashing.removeprefix(HASHING)
    if algorithm not in ENCODINGS:
        return b""  # of a newer engine
    adapter = (card.adapter, card.adapter_path) if card.adapter else None
    hashes = block_hashes(algorithm, card.hash_seed, tokens, card.hash_size, adapter, query.cache_salt)
    per_block = card.block_size // card.hash_size
    return keys_of(root, hashes, per_block, 0, len(hashes) // per_block)
