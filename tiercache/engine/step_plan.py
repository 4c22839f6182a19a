"""The plan of one step: copies, loads, and forward passes over chunks of sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tiercache.engine.loads import LoadOrder
from tiercache.engine.sequence import Sequence


class Chunk(NamedTuple):
    """Tokens `[start, end)` of a sequence, to be computed in one forward pass."""

    sequence: Sequence
    start: int
    end: int


class BlockCopy(NamedTuple):
    """A whole pool block, to be copied to another."""

    source: int
    target: int


@dataclass(slots=True)
class StepPlan:
    """To be done in this order: copies, start of loads, forward passes."""

    copies: list[BlockCopy] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    passes: list[list[Chunk]] = field(default_factory=list)


def next_chunks(sequence: Sequence, budget: int) -> list[Chunk]:
    """The next chunks of a sequence, as many as fit into `budget` tokens."""
    chunks: list[Chunk] = []
    start = sequence.computed
    while start < len(sequence.tokens):
        end = sequence.edge_after(start)
        if end - sequence.computed > budget:
            break
        chunks.append(Chunk(sequence, start, end))
        start = end
    return chunks


def pack(decodes: list[Chunk], prefills: list[list[Chunk]]) -> list[list[Chunk]]:
    """Forward passes with at most one chunk of each sequence.

    Other rows of a matrix product can change the last bits of a row. So a chunk whose K and V others may
    reuse is computed alone; all the rest are packed.
    """
    alone: list[list[Chunk]] = []
    packed = [decodes]
    for chunks in prefills:
        rest = []
        for chunk in chunks:
            if chunk.sequence.is_reusable(chunk.start):
                alone.append([chunk])
            else:
                rest.append(chunk)
        for place, chunk in enumerate(rest):
            packed += [[]] * (place + 1 - len(packed))
            packed[place] = [*packed[place], chunk]
    return [chunks for chunks in alone + packed if chunks]
