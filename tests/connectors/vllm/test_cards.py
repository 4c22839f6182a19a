"""Model cards of an engine: when they are announced, and which are kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tiny_vllm import SIZE, SPEC

from tiercache.connectors.vllm import cards
from tiercache.protocol.messages import ModelCard


def test_cards_are_announced_when_they_change_and_the_oldest_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "MAX_CARDS", 2)
    announced: list[list[ModelCard]] = []
    connector: Any = SimpleNamespace(namespace=SPEC, announce=announced.append)
    model = SimpleNamespace(model="/models/m", served_model_name=["served", "m"])
    config = SimpleNamespace(model_config=model, cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"))
    its = cards.Cards(config, connector, [SPEC], 2 * SIZE)
    for content, adapter in ((b"1", ""), (b"1", ""), (b"1", "a"), (b"2", ""), (b"2", "b"), (b"1", "a")):
        its.add(content, adapter, f"/{adapter}")
    assert [[(card.content, card.adapter) for card in every] for every in announced] == [
        [(b"1", "")],
        [(b"1", ""), (b"1", "a")],
        [(b"1", "a"), (b"2", "")],
        [(b"2", ""), (b"2", "b")],
        [(b"2", "b"), (b"1", "a")],
    ]
    [card] = announced[0]
    assert (card.names, card.namespaces, card.block_size) == (["served", "m", "/models/m"], [SPEC.fingerprint()], SIZE)
    assert (card.hashing, card.hash_size) == ("vllm/sha256", 2 * SIZE)
