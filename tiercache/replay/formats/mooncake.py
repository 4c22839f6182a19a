"""Mooncake's traces: JSON lines with the ids of a prompt's blocks; each id stands for a block and all before it.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ..., 2354]}

`timestamp` is in ms. The last id may be that of a partial block: its tokens are asked for, but never stored or hit.
The format is that of kvcache-ai/Mooncake's traces with blocks of 512 tokens; others use it with other sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import msgspec

from tiercache.protocol.namespaces import NamespaceSpec
from tiercache.replay.formats.lines import BadLine
from tiercache.replay.requests import TraceRequest, chain_keys, plain_spec

BLOCK_TOKENS = 512
_LIKELY = (512, 16, 32, 64, 128, 256, 1024, 2048, 4096, 8, 4)
_ENOUGH = 0.9


class MooncakeLine(msgspec.Struct):
    """One line. Further fields are ignored."""

    timestamp: float
    input_length: int
    hash_ids: list[int]
    output_length: int = 0


class Mooncake:
    """See `Format`."""

    name = "mooncake"

    def fits(self, line: bytes) -> bool:
        """See `Format`."""
        found = fields_of(line)
        return {"timestamp", "hash_ids", "input_length"} <= found and "chat_id" not in found

    def open(self, sample: list[bytes], block_tokens: int | None, block_bytes: Callable[[int], int]) -> MooncakeReader:
        """See `Format`."""
        return MooncakeReader(block_tokens or guess_block_tokens(sample), block_bytes)


class MooncakeReader:
    """See `Reader`."""

    in_order = False

    def __init__(self, block_tokens: int, block_bytes: Callable[[int], int]) -> None:
        self.block_tokens = block_tokens
        self.specs: dict[int, NamespaceSpec] = {1: plain_spec(block_tokens, block_bytes(block_tokens))}
        self._decode = msgspec.json.Decoder(MooncakeLine).decode

    def read(self, line: bytes) -> Iterable[TraceRequest]:
        """See `Reader`."""
        try:
            row = self._decode(line)
        except msgspec.DecodeError as error:
            raise BadLine(wrong(error)) from error
        check(row.timestamp, row.input_length, row.output_length)
        keys = full_keys(row.hash_ids, row.input_length, self.block_tokens)
        yield TraceRequest(row.timestamp / 1000, keys, row.input_length)

    def end(self) -> Iterable[TraceRequest]:
        """See `Reader`."""
        return ()


def full_keys(ids: list[int], input_tokens: int, block_tokens: int) -> bytes:
    """Keys of the full blocks of a prompt; the id of a partial one is left out. Raises BadLine."""
    try:
        return chain_keys(ids[: input_tokens // block_tokens])
    except OverflowError:
        raise BadLine("hash_ids has a number below 0 or beyond 64 bits") from None


def check(time: float, input_tokens: int, output_tokens: int) -> None:
    """Raises BadLine for figures that no request has."""
    if not math.isfinite(time):
        raise BadLine(f"timestamp is {time}: must be a finite number")
    if input_tokens < 0 or output_tokens < 0:
        raise BadLine(f"a length below 0 (input_length {input_tokens}, output_length {output_tokens})")


def guess_block_tokens(sample: list[bytes]) -> int:
    """The block size for which the lengths of prompts and of id lists agree. Raises BadLine if there is none."""
    lengths = []
    for line in sample:
        try:
            row = msgspec.json.decode(line, type=MooncakeLine)
        except msgspec.DecodeError:
            continue  # reported when its turn comes
        if row.hash_ids and row.input_length > 0:
            lengths.append((row.input_length, len(row.hash_ids)))
    if not lengths:
        return BLOCK_TOKENS

    def fit(size: int) -> float:
        return sum(tokens // size <= ids <= -(-tokens // size) for tokens, ids in lengths) / len(lengths)

    best = max(_LIKELY, key=lambda size: (fit(size), size == BLOCK_TOKENS))
    if fit(best) < _ENOUGH:
        tokens, ids = max(lengths, key=lambda both: both[1])
        text = f"{ids} hash_ids for {tokens} tokens: no usual size of blocks fits; say it with --block-size"
        raise BadLine(text)
    return best


def fields_of(line: bytes) -> set[str]:
    """The names in a line that is a JSON object; none otherwise."""
    try:
        found = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return set()
    return set(found) if isinstance(found, dict) else set()


def wrong(error: msgspec.DecodeError) -> str:
    """What is wrong with a line, in words that name the field."""
    text = str(error)
    if isinstance(error, msgspec.ValidationError):
        what, _, place = text.partition(" - at `$.")
        return f"{place.rstrip('`')}: {what[:1].lower()}{what[1:]}" if place else f"{what[:1].lower()}{what[1:]}"
    return f"is not JSON: {text[:1].lower()}{text[1:]}"
