"""Traces of Aliyun Bailian: JSON lines of chats, with the ids of a prompt's blocks of 16 tokens.

    {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521, "output_length": 132,
     "type": "text", "turn": 2, "hash_ids": [1089, 1090, ...]}

`timestamp` is in seconds. The format is that of alibaba-edu/qwen-bailian-usagetraces-anon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from tiercache.protocol.namespaces import NamespaceSpec
from tiercache.replay.formats.lines import BadLine
from tiercache.replay.formats.mooncake import check, fields_of, full_keys, wrong
from tiercache.replay.requests import TraceRequest, plain_spec

BLOCK_TOKENS = 16


class BailianLine(msgspec.Struct):
    """One line. Further fields are ignored."""

    timestamp: float
    input_length: int
    hash_ids: list[int]
    output_length: int = 0


class Bailian:
    """See `Format`."""

    name = "bailian"

    def fits(self, line: bytes) -> bool:
        """See `Format`."""
        return {"chat_id", "timestamp", "hash_ids", "input_length"} <= fields_of(line)

    def open(self, sample: list[bytes], block_tokens: int | None, block_bytes: Callable[[int], int]) -> BailianReader:
        """See `Format`."""
        return BailianReader(block_tokens or BLOCK_TOKENS, block_bytes)


class BailianReader:
    """See `Reader`."""

    in_order = False

    def __init__(self, block_tokens: int, block_bytes: Callable[[int], int]) -> None:
        self.block_tokens = block_tokens
        self.specs: dict[int, NamespaceSpec] = {1: plain_spec(block_tokens, block_bytes(block_tokens))}
        self._decode = msgspec.json.Decoder(BailianLine).decode

    def read(self, line: bytes) -> Iterable[TraceRequest]:
        """See `Reader`."""
        try:
            row = self._decode(line)
        except msgspec.DecodeError as error:
            raise BadLine(wrong(error)) from error
        check(row.timestamp, row.input_length, row.output_length)
        keys = full_keys(row.hash_ids, row.input_length, self.block_tokens)
        yield TraceRequest(row.timestamp, keys, row.input_length)

    def end(self) -> Iterable[TraceRequest]:
        """See `Reader`."""
        return ()
