"""What a store hangs below: the blocks of the sample in the chains that stores may go on with."""

from __future__ import annotations

from typing import NamedTuple

from tiercache.daemon.observe.reuse_stack import still_chosen

MAX_CHAIN = 512
MAX_TAIL_SAMPLES = 16384
"""Of all chains together; the oldest are let go."""


class Tail(NamedTuple):
    """The blocks of the sample in a chain up to some block, from the root on.

    The first `used` of them were used at `used_s`, by a look-up perhaps, the others since: these are newer than what
    they hang below until all are used again.
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
        """What a store that goes on after block `end` hangs below."""
        self.take(end)
        if tail.chain:
            if len(tail.chain) > MAX_CHAIN:
                tail = tail._replace(chain=tail.chain[-MAX_CHAIN:])
            self._tails[end] = tail
            self._samples += len(tail.chain)
            while self._samples > MAX_TAIL_SAMPLES:
                self.take(next(iter(self._tails)))

    def take(self, end: bytes) -> Tail | None:
        """The same, which is known no longer then; None where nothing is."""
        tail = self._tails.pop(end, None)
        if tail is not None:
            self._samples -= len(tail.chain)
        return tail

    def thin(self, shift: int) -> None:
        """Keep what the sample has at a lower rate."""
        for end, tail in self._tails.items():
            self._tails[end] = tail._replace(chain=still_chosen(tail.chain, shift))
        self._samples = sum(len(tail.chain) for tail in self._tails.values())

    def clear(self) -> None:
        """Forget all."""
        self._tails.clear()
        self._samples = 0
