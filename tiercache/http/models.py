"""The display names of the models that a namespace's blocks belong to."""

from __future__ import annotations

from collections.abc import Iterable

from tiercache.protocol.messages import ModelCard


def models_by_namespace(cards: Iterable[ModelCard]) -> dict[str, list[str]]:
    """Names of models by the fingerprint of a namespace, in order, each once.

    A model without a name is shown as the start of its content id, a model with a LoRA adapter as `model+adapter`.
    """
    found: dict[str, set[str]] = {}
    for card in cards:
        name = card.names[0] if card.names else card.content.hex()[:8]
        for fingerprint in card.namespaces:
            found.setdefault(fingerprint, set()).add(f"{name}+{card.adapter}" if card.adapter else name)
    return {fingerprint: sorted(names) for fingerprint, names in found.items()}
