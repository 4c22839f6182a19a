"""Model cards of a vLLM engine for the daemon's affinity query: its names for the blocks of its model and adapters."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tiercache.connector.connector import Connector
from tiercache.ground import forks
from tiercache.protocol.messages import ModelCard
from tiercache.protocol.namespaces import NamespaceSpec

from .hashes import hash_seed

HASHING = "vllm/"
"""`ModelCard.hashing` is this and vLLM's name of the hash."""
MAX_CARDS = 64
"""For the most recently used adapters."""


class Cards:
    """The cards of one engine. Thread-safe.

    Args:
        connector: announces them.
        specs: the forms of all ranks' and groups' blocks.
        hash_size: tokens in a block hash of vLLM's.
    """

    def __init__(self, vllm_config: Any, connector: Connector, specs: Iterable[NamespaceSpec], hash_size: int) -> None:
        model, algorithm = vllm_config.model_config, vllm_config.cache_config.prefix_caching_hash_algo
        served = model.served_model_name
        names = [*([served] if isinstance(served, str) else served or []), model.model, Path(model.model).name]
        self._names = list(dict.fromkeys(names))
        self._connector = connector
        self._namespaces = sorted({spec.fingerprint() for spec in specs})
        self._hashing, self._seed, self._hash_size = HASHING + algorithm, hash_seed(algorithm), hash_size
        self._cards: dict[tuple[str, str], ModelCard] = {}
        self._lock = threading.Lock()
        forks.watch(self, "_lock")

    def add(self, content: bytes, adapter: str, adapter_path: str) -> None:
        """Blocks of `content`, perhaps with an adapter, are being used. Cheap if already announced."""
        known = self._cards.get((adapter, adapter_path))
        if known is not None and known.content == content:
            return
        block_size = self._connector.namespace.block_size
        with self._lock:
            self._cards.pop((adapter, adapter_path), None)
            while len(self._cards) >= MAX_CARDS:
                del self._cards[next(iter(self._cards))]
            self._cards[adapter, adapter_path] = ModelCard(
                self._names,
                content,
                self._namespaces,
                block_size,
                self._hashing,
                self._hash_size,
                self._seed,
                adapter,
                adapter_path,
            )
            self._connector.announce(list(self._cards.values()))
