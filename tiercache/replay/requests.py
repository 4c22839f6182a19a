"""Requests of a trace, as chains of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import xxhash

from tiercache.protocol.messages import KEY_BYTES
from tiercache.protocol.namespaces import NamespaceSpec

_ID_BYTES = 8


class RequestKind(Enum):
    """Kinds of requests to the cache."""

    ASK = "ask"
    """A prompt: a match of all its blocks, then a store of those that DRAM lacks."""
    LOOK = "look"
    """A match alone."""
    KEEP = "keep"
    """A store of the blocks from `first` on."""
    FETCH = "fetch"
    """A prefetch: a match for which no client waits."""
    FORGET = "forget"
    """A flush: of the last block of `keys` and all that follow it, or without keys of the whole namespace."""
    HINT = "hint"
    """A hint about the further use of the blocks from `first` on; see `Told`."""


class Told(NamedTuple):
    """A hint, as in `messages.Hint`; 0 for fields not given."""

    done: bool = False
    return_in_s: float = 0.0
    ttl_s: float = 0.0
    priority: int = 0


class TraceRequest(NamedTuple):
    """One line of a trace.

    `keys`: packed, 16 bytes for each full block from the root on. `input_tokens` counts the whole prompt, with a
    partial block at its end. `in_gpu`: blocks known to be in the engine's own pool. `namespaces`: numbers of the
    namespaces concerned, as in `Trace.specs`.
    KEEP: `first` is where the store begins; `rooted` says whether `keys` begin at the root or, if the trace knows no
    more, at the block before the store. LOOK: `had` is how many blocks the recorded daemon had in DRAM and below;
    `promote` says whether blocks below are promoted. FORGET: `tier` is the tier flushed, empty for all. HINT: `told`
    is the hint.
    """

    time_s: float
    keys: bytes
    input_tokens: int
    kind: RequestKind = RequestKind.ASK
    first: int = 0
    had: tuple[int, int] = (0, 0)
    namespaces: tuple[int, ...] = (1,)
    promote: bool = True
    rooted: bool = True
    tier: str = ""
    in_gpu: int = 0
    told: Told = Told()

    @property
    def blocks(self) -> int:
        """Number of full blocks."""
        return len(self.keys) // KEY_BYTES


def chain_keys(ids: Sequence[int]) -> bytes:
    """Packed keys of a chain of block ids: each stands for its id and all before it.

    So a trace whose ids name single blocks, not their prefixes, also becomes a set of chains. Raises OverflowError for
    an id that does not fit 64 bits.
    """
    digest, before, keys = xxhash.xxh3_128_digest, b"", []
    for number in ids:
        before = digest(before + number.to_bytes(_ID_BYTES, "little"))
        keys.append(before)
    return b"".join(keys)


def plain_spec(block_tokens: int, block_bytes: int) -> NamespaceSpec:
    """The namespace of a trace that names none."""
    return NamespaceSpec(
        engine="trace", layout="block", dtype="uint8", block_size=block_tokens, block_bytes=block_bytes
    )
