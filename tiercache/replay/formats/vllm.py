"""KV events as vLLM and our daemon publish them, saved as JSON lines, one batch a line.

    [1763771234.5, [{"type": "BlockStored", "block_hashes": [11, 12], "parent_block_hash": null, "token_ids": [...],
                     "block_size": 16, "medium": "GPU"}, {"type": "BlockRemoved", "block_hashes": [7]}], 0]

An event may also be an array that begins with its type, as in older vLLMs, and a batch an object with `ts` and
`events`. Hashes are numbers or texts.

Events show which blocks filled a pool, but not which prompts found all of their blocks there. So a run of stored blocks
is played as a prompt of the run and all blocks before it, and the blocks before it count as hits of the engine's own
pool. A single block that continues where a run ended is taken for generated tokens: it is stored and not asked for. Of
several media (or groups) in one file only the first one's events count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import xxhash

from tiercache.protocol.namespaces import NamespaceSpec
from tiercache.replay.formats.lines import BadLine
from tiercache.replay.formats.mooncake import fields_of, wrong
from tiercache.replay.requests import RequestKind, TraceRequest, chain_keys, plain_spec

_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
_KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_BITS = (1 << 64) - 1


class Stored(msgspec.Struct):
    """The fields of a `BlockStored` that are used."""

    block_hashes: list[int | str]
    block_size: int
    parent_block_hash: int | str | None = None
    medium: str | None = None
    group_idx: int | None = None


class KvEvents:
    """See `Format`."""

    name = "vllm"

    def fits(self, line: bytes) -> bool:
        """See `Format`."""
        if {"ts", "events"} <= fields_of(line):
            return True
        try:
            batch = msgspec.json.decode(line)
        except msgspec.DecodeError:
            return False
        return isinstance(batch, list) and len(batch) in (2, 3) and isinstance(batch[1], list)

    def open(self, sample: list[bytes], block_tokens: int | None, block_bytes: Callable[[int], int]) -> KvEventsReader:
        """See `Format`."""
        return KvEventsReader(block_bytes)


class KvEventsReader:
    """See `Reader`. Remembers the parent of every block that it has seen."""

    in_order = True

    def __init__(self, block_bytes: Callable[[int], int]) -> None:
        self.specs: dict[int, NamespaceSpec] = {}
        self._block_bytes = block_bytes
        self._parent: dict[int, int | None] = {}
        self._ends: set[int] = set()
        self._pool: tuple[str | None, int | None] | None = None
        self._start_s: float | None = None

    def read(self, line: bytes) -> Iterable[TraceRequest]:
        """See `Reader`."""
        time_s, events = _batch(line)
        if self._start_s is None:
            self._start_s = time_s
        runs: list[list[int]] = []
        parents: list[int | None] = []
        for stored in filter(None, map(_stored, events)):
            if not self._is_ours(stored):
                continue
            hashes = [_number(one) for one in stored.block_hashes]
            parent = None if stored.parent_block_hash is None else _number(stored.parent_block_hash)
            for one, before in zip(hashes, [parent, *hashes], strict=False):
                self._parent[one] = before
            if runs and parent == runs[-1][-1]:
                runs[-1] += hashes  # chunks of one prompt
            elif hashes:
                runs.append(hashes)
                parents.append(parent)
        for run, parent in zip(runs, parents, strict=True):
            yield self._request(time_s - self._start_s, run, parent)

    def end(self) -> Iterable[TraceRequest]:
        """See `Reader`."""
        return ()

    def _is_ours(self, stored: Stored) -> bool:
        pool = stored.medium, stored.group_idx
        if self._pool is None:
            if stored.block_size < 1:
                raise BadLine(f"block_size is {stored.block_size}: must be at least 1 token")
            self._pool = pool
            self.specs[1] = plain_spec(stored.block_size, self._block_bytes(stored.block_size))
        if pool == self._pool and stored.block_size != self.specs[1].block_size:
            raise BadLine(f"block_size is {stored.block_size}, and that of earlier events {self.specs[1].block_size}")
        return pool == self._pool

    def _request(self, time_s: float, run: list[int], parent: int | None) -> TraceRequest:
        before: list[int] = []
        seen: set[int] = set()
        while parent is not None and parent not in seen:
            seen.add(parent)
            before.append(parent)
            parent = self._parent.get(parent)
        chain = before[::-1] + run
        grown = len(run) == 1 and bool(before) and before[0] in self._ends
        if before:
            self._ends.discard(before[0])
        self._ends.add(run[-1])
        keys, tokens = chain_keys(chain), len(chain) * self.specs[1].block_size
        if grown:
            return TraceRequest(time_s, keys, tokens, kind=RequestKind.KEEP, first=len(before))
        return TraceRequest(time_s, keys, tokens, in_gpu=len(before))


def _batch(line: bytes) -> tuple[float, list[Any]]:
    try:
        batch = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise BadLine(wrong(error)) from error
    if isinstance(batch, dict):
        batch = [batch.get("ts"), batch.get("events")]
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise BadLine("is not a batch of events: [time, [event, ...], rank]")
    if isinstance(batch[0], bool) or not isinstance(batch[0], (int, float)):
        raise BadLine(f"the time of the batch is {batch[0]!r}: must be seconds")
    return float(batch[0]), batch[1]


def _stored(event: Any) -> Stored | None:
    """The stored blocks of an event; None for other events. Raises BadLine."""
    if isinstance(event, list) and event:
        kind, fields = event[0], dict(zip(_STORED, event[1:], strict=False))
    elif isinstance(event, dict):
        kind, fields = event.get("type"), event
    else:
        raise BadLine(f"an event is a {type(event).__name__}: must be an object, or an array that begins with its type")
    if kind not in _KINDS:
        raise BadLine(f"an event has the type {kind!r}: must be one of {', '.join(_KINDS)}")
    if kind != "BlockStored":
        return None
    try:
        return msgspec.convert(fields, Stored)
    except msgspec.ValidationError as error:
        raise BadLine(f"BlockStored: {wrong(error)}") from error


def _number(name: int | str) -> int:
    """A block's name in 64 bits."""
    return name & _BITS if isinstance(name, int) else xxhash.xxh3_64_intdigest(name.encode())
