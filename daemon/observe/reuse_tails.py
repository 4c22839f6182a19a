"""Tails: the sampled blocks in chains that a store may continue."""

from __future__ import annotations

from typing import NamedTuple

from tiercache.daemon.observe.reuse_stack import still_chosen

MAX_CHAIN = 512
MAX_TAIL_SAMPLES = 16384
"""Of all chains together; beyond that the oldest are dropped."""


class Tail(NamedTuple):
    """The sampled blocks in a chain up to some block, from the root on.

    The first `used` of them were used at `used_s`, perhaps by a look-up, the others since: these are newer than the
    blocks before them until all are used again.
    """

    used_s: float
    looked_up: bool
    used: int
    chain: list[bytes]


class Tails:
    """Tails by the last block of each, `key[8:16]` and a tag of the namespace."""

    def __init__(self) -> None:
        self._tails: dict[bytes, Tail] = {}
        self._samples = 0

    def put(self, end: bytes, tail: Tail) -> None:
        """Remember the chain up to block `end`, which a store may continue."""
        self.take(end)
        if tail.chain:
            if len(tail.chain) > MAX_CHAIN:
                tail = tail._replace(chain=tail.chain[-MAX_CHAIN:])
            self._tails[end] = tail
            self._samples += len(tail.chain)
            while self._samples > MAX_TAIL_SAMPLES:
                self.take(next(iter(self._tails)))

    def take(self, end: bytes) -> Tail | None:
        """Return the tail of a block and forget it; None if there is none."""
        tail = self._tails.pop(end, None)
        if tail is not None:
            self._samples -= len(tail.chain)
        return tail

    def thin(self, shift: int) -> None:
        """Keep the samples of a lower rate."""
        for end, tail in self._tails.items():
            self._tails[end] = tail._replace(chain=still_chosen(tail.chain, shift))
        self._samples = sum(len(tail.chain) for tail in self._tails.values())

    def clear(self) -> None:
        """Forget all."""
        self._tails.clear()
        self._samples = 0
