"""What is stored of a prompt for the engines of one model: peeks, which change nothing in the daemon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tiercache.client.session import Session
from tiercache.http.block_names import BlockNames
from tiercache.http.query import Query
from tiercache.protocol.messages import KEY_BYTES, ModelCard, Peek, Peeked


class ModelsKnown(NamedTuple):
    """The models that are announced. The numbers of namespaces are valid in this session only.

    `windows`: blocks that a match needs in a namespace with a window.
    """

    session: Session
    asked_s: float
    cards: Sequence[ModelCard]
    numbers: Mapping[str, int]
    windows: Mapping[str, int]


class ModelBlocks:
    """What the daemon has for the engines of one card. `there` is false if it has never met one of its namespaces."""

    def __init__(self, models: ModelsKnown, card: ModelCard, query: Query) -> None:
        self.card = card
        self.names = BlockNames(card, query)
        self._session = models.session
        self._numbers = [models.numbers[name] for name in card.namespaces if name in models.numbers]
        self.there = self.names.known and len(self._numbers) == len(card.namespaces)
        self.windows = [models.windows.get(name, 0) for name in card.namespaces]

    def peek(self, keys: bytes) -> Peeked:
        """The leading run of these keys."""
        if not keys or not self.there:
            none = len(self.card.namespaces)
            return Peeked(0, 0, 0, 0, [(0, 0)] * none, 0, [0] * none)
        return self._session.call(Peek, namespaces=self._numbers, keys=keys)

    def matched(self, tokens: Sequence[int]) -> int:
        """How many leading tokens of the prompt a match would find."""
        return run_blocks(self.peek(self.names.keys(tokens))) * self.card.block_size

    def chain(self, tokens: Sequence[int]) -> dict[str, Any]:
        """The part of an answer about this model."""
        card, keys = self.card, self.names.keys(tokens)
        found = self.peek(keys)
        return {
            "content": card.content.hex(),
            "names": card.names,
            "adapter": card.adapter,
            "hashing": card.hashing,
            "block_size": card.block_size,
            "blocks": len(keys) // KEY_BYTES,
            "matched": run_blocks(found) * card.block_size,
            "matched_tokens": _by_tier(found.dram_blocks, found.below_blocks, found.shared_blocks, card.block_size),
            "namespaces": [
                {"fingerprint": name, **_by_tier(dram, below, shared, card.block_size)}
                for name, (dram, below), shared in zip(card.namespaces, found.each, found.each_shared, strict=True)
            ],
        }


def run_blocks(found: Peeked) -> int:
    """Blocks of the leading run that all namespaces have, in any tier."""
    return found.dram_blocks + found.below_blocks


def run_here(found: Peeked) -> int:
    """The same without what a store that hosts share was found to have: that is known of whole prompts only."""
    return run_blocks(found) - found.shared_blocks


def runs_here(found: Peeked) -> list[int]:
    """Blocks of the run of each namespace on this host."""
    return [dram + below - shared for (dram, below), shared in zip(found.each, found.each_shared, strict=True)]


def _by_tier(dram_blocks: int, below_blocks: int, shared_blocks: int, block_size: int) -> dict[str, int]:
    """Tokens. `shared_blocks` are a part of `below_blocks`."""
    blocks = {"dram": dram_blocks, "nvme": below_blocks - shared_blocks, "shared": shared_blocks}
    return {tier: count * block_size for tier, count in blocks.items()}
