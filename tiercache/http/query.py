"""What an affinity query asks: a prompt as tokens, or as segments of which some may come in any order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from tiercache.protocol.messages import ModelCard

MAX_SEGMENTS = 256
"""Parts of a prompt, each one that may come in any order counted by itself."""

Token = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
Order = list[list[int]]
"""For each unordered group in turn, which of its segments comes when."""


class Unordered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Segments that the caller lets come in any order."""

    unordered: list[list[Token]]


class Query(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A query.

    Attributes:
        model: an engine's name for it (a served name, a folder), or the content id from an earlier answer.
        tokens: the prompt.
        segments: the prompt in parts, instead of `tokens`.
        salt: the tenant's, empty if the engines have none.
        lora: name of an adapter.
        cache_salt: the `cache_salt` of a request to vLLM.
    """

    model: str
    tokens: list[Token] | msgspec.UnsetType = msgspec.UNSET
    segments: list[list[Token] | Unordered] | msgspec.UnsetType = msgspec.UNSET
    salt: str
    lora: str = ""
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.tokens, list) == isinstance(self.segments, list):
            raise ValueError("give the prompt either as tokens or as segments")
        # An empty group counts too: a body has room for a hundred thousand of them.
        count = sum(len(part.unordered) or 1 if isinstance(part, Unordered) else 1 for part in self.parts)
        if count > MAX_SEGMENTS:
            raise ValueError(f"{count} segments: at most {MAX_SEGMENTS}; join those that always follow each other")

    @property
    def parts(self) -> Sequence[list[int] | Unordered]:
        """The prompt in parts; tokens are a single one."""
        if isinstance(self.segments, list):
            return self.segments
        return [self.tokens] if isinstance(self.tokens, list) else []

    @property
    def groups(self) -> list[Unordered]:
        """The parts whose segments may come in any order."""
        return [part for part in self.parts if isinstance(part, Unordered)]

    @property
    def as_given(self) -> Order:
        """The order in which the caller wrote the segments."""
        return [list(range(len(group.unordered))) for group in self.groups]

    def prompt(self, order: Order) -> list[int]:
        """The tokens of the prompt in that order."""
        return [token for segment in self._ordered(order) for token in segment]

    def _ordered(self, order: Order) -> Iterator[list[int]]:
        orders = iter(order)
        for part in self.parts:
            if isinstance(part, Unordered):
                yield from (part.unordered[number] for number in next(orders))
            else:
                yield part


def is_meant(card: ModelCard, query: Query) -> bool:
    """True if the model has that name. A query names an adapter with `lora`, or as a model, as engines do."""
    if query.model == card.content.hex() or (card.adapter and query.model == card.adapter and not query.lora):
        return True
    return query.model in card.names and query.lora == card.adapter
